"""Which interface NCCL and Gloo pick: tables after their sources.

NCCL: src/misc/socket.cc (ncclFindInterfaces), src/os/linux.cc (ncclOsFindInterfaces), src/misc/utils.cc (matchIfList).
Gloo: torch's ProcessGroupGloo.cpp (createDefaultDevice), gloo/transport/tcp/device.cc (lookupAddrForIface).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.model.card import Interface
from allranks.model.choice import gloo_address, nccl_address, nccl_candidates

LO = Interface("lo", ("127.0.0.1", "::1"), is_up=True, networks=("127.0.0.0/8", "::1/128"), kind="loopback")
ENO1 = Interface("eno1", ("10.77.0.11", "fe80::11"), is_up=True, networks=("10.77.0.0/24", "fe80::/64"))
DOCKER = Interface("docker0", ("172.17.0.1",), is_up=True, networks=("172.17.0.0/16",), kind="bridge")
ENS1F1 = Interface("ens1f1", ("192.168.20.15",), is_up=True, networks=("192.168.20.0/24",), kind="virtual")
ENS1F10 = Interface("ens1f10", ("192.168.21.15",), is_up=True, networks=("192.168.21.0/24",))
DOWN = Interface("ens2", ("192.168.30.15",), is_up=False)
BARE = Interface("ens3", (), is_up=True)
V6 = Interface("ens6", ("fd00:20::15",), is_up=True, networks=("fd00:20::/64",))
IB = Interface("ib0", ("10.0.0.15",), is_up=True)
VETH = Interface("veth1a2b", ("10.244.0.1",), is_up=True, kind="virtual")
VIRBR = Interface("virbr0", ("192.168.122.1",), is_up=True, kind="bridge")
V6_LO = Interface("lo", ("::1",), is_up=True)
ALL = (LO, ENO1, DOCKER, ENS1F1, ENS1F10, DOWN, BARE, V6)


@pytest.mark.parametrize(
    ("interfaces", "env", "names"),
    [
        # Left to itself: prefix ib, else all but docker, lo, virbr, else docker, lo, virbr; only what is running.
        (ALL, {}, ["eno1", "ens1f1", "ens1f10", "ens6"]),
        ((*ALL, IB), {}, ["ib0"]),
        ((LO, VETH, ENO1), {}, ["veth1a2b", "eno1"]),  # nccl#913
        ((LO, DOCKER, DOWN), {}, ["docker0"]),
        ((LO, DOWN, BARE), {}, ["lo"]),
        ((V6_LO, VIRBR), {}, ["virbr0"]),
        ((V6_LO,), {}, []),
        ((), {}, []),
        # Prefixes, exact names, all but.
        (ALL, {"NCCL_SOCKET_IFNAME": "ens1f1"}, ["ens1f1", "ens1f10"]),
        (ALL, {"NCCL_SOCKET_IFNAME": "=ens1f1"}, ["ens1f1"]),
        (ALL, {"NCCL_SOCKET_IFNAME": "=ens1f1,eno1"}, ["eno1", "ens1f1"]),
        (ALL, {"NCCL_SOCKET_IFNAME": "ens1f10,eno"}, ["eno1", "ens1f10"]),
        (ALL, {"NCCL_SOCKET_IFNAME": "^docker,lo"}, ["eno1", "ens1f1", "ens1f10", "ens6"]),
        (ALL, {"NCCL_SOCKET_IFNAME": "^=eno1,lo"}, ["docker0", "ens1f1", "ens1f10", "ens6"]),
        (ALL, {"NCCL_SOCKET_IFNAME": "docker"}, ["docker0"]),
        (ALL, {"NCCL_SOCKET_IFNAME": "lo"}, ["lo"]),
        (ALL, {"NCCL_SOCKET_IFNAME": "eth"}, []),
        (ALL, {"NCCL_SOCKET_IFNAME": "ens2"}, []),
        (ALL, {"NCCL_SOCKET_IFNAME": "ens1f1:1"}, ["ens1f1", "ens1f10"]),
        (ALL, {"NCCL_SOCKET_IFNAME": ""}, ["eno1", "ens1f1", "ens1f10", "ens6"]),
        (ALL, {"NCCL_SOCKET_IFNAME": "x"}, ["eno1", "ens1f1", "ens1f10", "ens6"]),  # one character is ignored
        ((LO, ENO1), {"NCCL_SOCKET_IFNAME": "=,"}, ["lo", "eno1"]),
        # Families.
        (ALL, {"NCCL_SOCKET_FAMILY": "AF_INET"}, ["eno1", "ens1f1", "ens1f10"]),
        (ALL, {"NCCL_SOCKET_FAMILY": "AF_INET6"}, ["eno1", "ens6"]),
        (ALL, {"NCCL_SOCKET_FAMILY": "4"}, ["eno1", "ens1f1", "ens1f10", "ens6"]),
        # A hint from the communicator's id.
        (ALL, {"NCCL_COMM_ID": "192.168.20.11:29500"}, ["ens1f1"]),
        (ALL, {"NCCL_COMM_ID": "[fd00:20::11]:29500"}, ["ens6"]),
        (ALL, {"NCCL_COMM_ID": "master-node:29500"}, ["eno1", "ens1f1", "ens1f10", "ens6"]),
        ((*ALL, IB), {"NCCL_COMM_ID": "192.168.20.11:29500"}, ["ib0"]),
    ],
)
def test_nccl_takes_these_interfaces(interfaces, env, names):
    assert [nic.name for nic in nccl_candidates(interfaces, env)] == names


def test_nccl_takes_sixteen_at_most():
    many = [Interface(f"eth{i}", (f"10.0.{i}.1",), is_up=True) for i in range(20)]
    assert len(nccl_candidates(many, {})) == 16


@pytest.mark.parametrize(
    ("nic", "env", "address"),
    [
        (ENO1, {}, "10.77.0.11"),
        (ENO1, {"NCCL_SOCKET_FAMILY": "AF_INET6"}, "fe80::11"),
        (ENS1F1, {"NCCL_SOCKET_FAMILY": "AF_INET6"}, None),
        (V6_LO, {}, None),
        (BARE, {}, None),
    ],
)
def test_nccl_announces_the_first_address(nic, env, address):
    assert nccl_address(nic, env) == address


@pytest.mark.parametrize(
    ("env", "resolved", "interface", "address", "reason"),
    [
        ({}, {"n1": ("10.77.0.11",)}, ENO1, "10.77.0.11", "the host name n1 resolves to it"),
        ({}, {"n1": ("172.17.0.1", "10.77.0.11")}, DOCKER, "172.17.0.1", "the host name n1 resolves to it"),
        ({}, {"n1": ("10.9.9.9", "10.77.0.11")}, ENO1, "10.77.0.11", "the host name n1 resolves to it"),
        ({}, {"n1": ("127.0.0.1",)}, LO, "127.0.0.1", "the host name n1 resolves to it"),
        ({}, {"n1": ("127.0.1.1",)}, LO, "127.0.1.1", "the host name n1 resolves to it"),
        ({}, {"n1": ("192.168.30.15",)}, DOWN, "192.168.30.15", "the host name n1 resolves to it"),
        ({}, {"n1": ()}, LO, "127.0.0.1", "the host name n1 does not resolve: Gloo falls back to loopback"),
        ({}, {}, LO, "127.0.0.1", "the host name n1 does not resolve: Gloo falls back to loopback"),
        (
            {},
            {"n1": ("10.9.9.9",)},
            LO,
            "127.0.0.1",
            "the host name n1 resolves to 10.9.9.9, which is not an address of this node: Gloo falls back to loopback",
        ),
        ({"GLOO_SOCKET_IFNAME": "ens1f1"}, {}, ENS1F1, "192.168.20.15", "GLOO_SOCKET_IFNAME=ens1f1"),
        ({"GLOO_SOCKET_IFNAME": "ens6,eno1"}, {}, V6, "fd00:20::15", "GLOO_SOCKET_IFNAME=ens6,eno1"),
        ({"GLOO_SOCKET_IFNAME": "ens2"}, {}, DOWN, "192.168.30.15", "GLOO_SOCKET_IFNAME=ens2"),
        ({"GLOO_SOCKET_IFNAME": "ens"}, {}, None, None, "GLOO_SOCKET_IFNAME=ens: this node has no interface 'ens'"),
        ({"GLOO_SOCKET_IFNAME": "ens3"}, {}, BARE, None, "GLOO_SOCKET_IFNAME=ens3: ens3 has no address"),
        ({"GLOO_SOCKET_IFNAME": ""}, {"n1": ("10.77.0.11",)}, ENO1, "10.77.0.11", "the host name n1 resolves to it"),
    ],
)
def test_gloo_takes_this_address(env, resolved, interface, address, reason):
    assert gloo_address(ALL, env, resolved, "n1") == (interface, address, reason)


@given(st.text(), st.text(), st.text(), st.text())
def test_any_words_in_the_environment_are_survived(names, comm_id, family, address):
    env = {"NCCL_SOCKET_IFNAME": names, "NCCL_COMM_ID": comm_id, "NCCL_SOCKET_FAMILY": family}
    odd = Interface("odd0", (address,), is_up=True, networks=(address,))
    nccl_candidates((*ALL, odd), env)
    nccl_candidates((odd,), {"NCCL_COMM_ID": comm_id})
    gloo_address((odd,), {"GLOO_SOCKET_IFNAME": names}, {"n": (address,)}, "n")
    gloo_address((odd,), {}, {"n": (address,)}, "n")
