"""Are the MTUs of RDMA ports and the tables of RoCE addresses judged right?"""

from __future__ import annotations

from typing import Any

import pytest

from allranks.causes.book import find_cause
from allranks.causes.cause import Cause
from allranks.causes.probes import checks_of
from allranks.causes.probes.rdma import (
    collect_rdma_mtu_unequal,
    collect_roce_gid_differs,
    gid_index,
    probe_roce_gid_differs,
)
from allranks.model.card import Card, Facts, Gid, Interface, RdmaPort
from allranks.model.finding import Confidence, Status
from allranks.preflight.compare import compare
from cards import collect, make_card, probe

MTU = "the MTU of the RDMA ports"
KIND = "the kind of address at NCCL_IB_GID_INDEX"
LINK_LOCAL = "fe80:0000:0000:0000:0ac0:ebff:feda:1cfb"
IPV4 = "0000:0000:0000:0000:0000:ffff:c0a8:140f"
GLOBAL = "2010:0200:0000:0002:a288:c2ff:fe3b:506a"
USUAL = (("IB/RoCE v1", LINK_LOCAL), ("RoCE v2", LINK_LOCAL), ("IB/RoCE v1", IPV4), ("RoCE v2", IPV4))
"""As mlx5 fills the table of an interface with one IPv4 address (NVIDIA/nccl#769)."""
WITHOUT_LINK_LOCAL = USUAL[2:]


def port(device: str = "mlx5_0", **changes: Any) -> RdmaPort:
    named = {"device": device, "port": 1, "state": "ACTIVE", "phys_state": "LinkUp", "rate": "400 Gb/sec (4X NDR)"}
    return RdmaPort(**{**named, "link_layer": "InfiniBand", "active_mtu": 4096, **changes})


def table(*entries: tuple[str, str]) -> tuple[Gid, ...]:
    return tuple(Gid(index=index, kind=kind, gid=gid, netdev="ens1f1") for index, (kind, gid) in enumerate(entries))


def roce(*entries: tuple[str, str], **changes: Any) -> RdmaPort:
    return port(**{"link_layer": "Ethernet", "netdev": "ens1f1", "gids": table(*entries), **changes})


def node(number: int, *ports: RdmaPort, env: dict[str, str] | None = None, **changes: Any) -> Card:
    facts = Facts(rdma_ports=ports, environment=env or {}, **changes.pop("facts", {}))
    return make_card(number, **{"num_workers": 8, "num_gpus": 8, "facts": facts, **changes})


def probed(cause: Cause, card: Card) -> tuple[Status, str] | None:
    outcome = probe(cause, card)
    if outcome is None:
        return None
    if outcome.status in (Status.FAIL, Status.WARN):
        return outcome.status, outcome.to_finding(cause, node=card.host).message
    return outcome.status, outcome.note


@pytest.mark.parametrize("cause", [find_cause("AR305"), find_cause("AR306")])
@pytest.mark.parametrize(
    ("card", "seen"),
    [
        (node(1), (Status.SKIP, "no RDMA device")),
        (node(1, port(), env={"NCCL_IB_DISABLE": "1"}), (Status.SKIP, "NCCL_IB_DISABLE=1")),
        (node(1, port(), num_gpus=0), (Status.SKIP, "no rank here uses NCCL")),
        (
            node(1, facts={"unread": {"rdma_ports": "torn"}}),
            (Status.UNKNOWN, "the node's RDMA devices could not be read"),
        ),
    ],
)
def test_where_nccl_uses_no_rdma_nothing_is_compared(cause: Cause, card: Card, seen: tuple[Status, str]) -> None:
    assert probed(cause, card) == seen
    assert collect(cause, card) is None


# MTU


@pytest.mark.parametrize(
    ("ports", "value"),
    [
        ((port(),), "4096"),
        ((port(), port("mlx5_1")), "4096"),
        ((port(), port("mlx5_1"), port("mlx5_2", active_mtu=1024)), "4096, 1024 on mlx5_2:1"),
        ((port(), port("mlx5_1", active_mtu=1024, state="DOWN")), "4096"),
        ((port(), port("mlx5_1", active_mtu=None)), None),
    ],
)
def test_the_mtu_is_that_of_all_active_ports(ports: tuple[RdmaPort, ...], value: str | None) -> None:
    assert collect_rdma_mtu_unequal(node(1, *ports)) == {MTU: value}


def test_the_node_with_another_mtu_is_named() -> None:
    cards = [node(number, port(active_mtu=1024 if number == 3 else 4096)) for number in range(1, 7)]
    [(hosts, outcome)] = compare(checks_of(find_cause("AR305")), cards)
    assert (hosts, outcome.status) == (("node03",), Status.FAIL)
    message = outcome.to_finding(find_cause("AR305"), node="node03").message
    assert message == "the MTU of the RDMA ports differs: 5 of 6 nodes have 4096; node03 has 1024"


def test_of_two_nodes_nobody_can_say_which_is_right() -> None:
    [(hosts, outcome)] = compare(checks_of(find_cause("AR305")), [node(1, port()), node(2, port(active_mtu=2048))])
    assert (hosts, outcome.confidence) == (("node01", "node02"), Confidence.UNDECIDED)


def test_an_mtu_that_nothing_tells_is_unknown_and_no_pass() -> None:
    silent = port(active_mtu=None)
    unread = {"unread": {"rdma_ports.active_mtu": "ibv_devinfo: not installed"}}
    reason = "the MTU of mlx5_0:1 could not be read: ibv_devinfo: not installed"
    assert probed(find_cause("AR305"), node(1, silent, facts=unread)) == (Status.UNKNOWN, reason)
    assert compare(checks_of(find_cause("AR305")), [node(1, port()), node(2, silent), node(3, port())]) == []


def test_roce_over_the_data_interface_is_left_to_its_own_cause() -> None:
    nic = Interface(name="ens1f1", addresses=("192.168.20.15",), is_up=True, networks=("192.168.20.0/24",))
    card = node(1, roce(*USUAL), data_interface="ens1f1", facts={"interfaces": (nic,)})
    assert collect_rdma_mtu_unequal(card) is None
    assert probed(find_cause("AR305"), card) is None
    rail = roce(*USUAL, device="mlx5_1", netdev="rail1", active_mtu=1024)
    both = node(1, roce(*USUAL), rail, data_interface="ens1f1", facts={"interfaces": (nic,)})
    assert collect_rdma_mtu_unequal(both) == {MTU: "1024"}


# GIDs


@pytest.mark.parametrize(
    ("env", "version", "index"),
    [
        ({"NCCL_IB_GID_INDEX": "3"}, "2.28.9", 3),
        ({"NCCL_IB_GID_INDEX": "0"}, None, 0),
        ({"NCCL_IB_GID_INDEX": "-1"}, "2.28.9", None),
        ({"NCCL_IB_GID_INDEX": "three"}, None, None),
        ({"NCCL_IB_GID_INDEX": "9" * 5000}, None, None),
        ({}, "2.28.9", None),
        ({}, "2.21.5", None),
        ({}, "2.20.5", 0),
        ({}, None, None),
        ({}, "of my own", None),
    ],
)
def test_the_index_is_set_or_that_of_an_old_nccl(env: dict[str, str], version: str | None, index: int | None) -> None:
    assert gid_index(Facts(environment=env, nccl_version=version)) == index


@pytest.mark.parametrize(
    ("ports", "env", "seen"),
    [
        ((port(),), {}, (Status.SKIP, "no active RoCE port")),
        ((roce(*USUAL, state="DOWN"),), {}, (Status.SKIP, "no active RoCE port")),
        ((roce(*USUAL),), {}, (Status.PASS, "")),
        ((roce(*USUAL),), {"NCCL_IB_GID_INDEX": "3"}, (Status.PASS, "")),
        (
            (roce(*USUAL[:3]),),
            {},
            (Status.WARN, "no usable RoCE address: NCCL needs RoCE v2 with IPv4; mlx5_0:1 has none"),
        ),
        ((roce(*USUAL[:3]),), {"NCCL_IB_ADDR_FAMILY": "AF_INET6"}, (Status.PASS, "")),
        (
            (roce(*USUAL), roce(*WITHOUT_LINK_LOCAL, device="mlx5_1")),
            {"NCCL_IB_GID_INDEX": "3"},
            (Status.FAIL, "NCCL_IB_GID_INDEX=3: the table has no address at this index; mlx5_1:1"),
        ),
    ],
)
def test_one_nodes_tables_are_judged(
    ports: tuple[RdmaPort, ...], env: dict[str, str], seen: tuple[Status, str]
) -> None:
    assert probed(find_cause("AR306"), node(1, *ports, env=env)) == seen


def test_an_empty_index_shows_what_the_table_has() -> None:
    outcome = probe_roce_gid_differs(node(1, roce(*WITHOUT_LINK_LOCAL), env={"NCCL_IB_GID_INDEX": "3"}))
    assert outcome.evidence == ("mlx5_0:1: 0 RoCE v1, IPv4; 1 RoCE v2, IPv4",)


@pytest.mark.parametrize(
    ("index", "kind"),
    [("0", "RoCE v1, link-local"), ("1", "RoCE v2, link-local"), ("2", "RoCE v1, IPv4"), ("3", "RoCE v2, IPv4"),
     ("4", "RoCE v2, IPv6"), ("5", "RoCE v2, no address")],
)  # fmt: skip
def test_the_kind_of_address_is_named(index: str, kind: str) -> None:
    own = roce(*USUAL, ("RoCE v2", GLOBAL), ("RoCE v2", "garbage"))
    assert collect_roce_gid_differs(node(1, own, env={"NCCL_IB_GID_INDEX": index})) == {KIND: kind}


def test_without_an_index_nothing_is_compared() -> None:
    assert collect_roce_gid_differs(node(1, roce(*USUAL))) is None
    assert collect_roce_gid_differs(node(1, port(), env={"NCCL_IB_GID_INDEX": "3"})) is None


def test_the_node_whose_index_leads_elsewhere_is_named() -> None:
    odd = (("IB/RoCE v1", IPV4), ("RoCE v2", IPV4), ("IB/RoCE v1", GLOBAL), ("RoCE v2", GLOBAL))
    env = {"NCCL_IB_GID_INDEX": "3"}
    cards = [node(number, roce(*(odd if number == 3 else USUAL)), env=env) for number in range(1, 7)]
    [(hosts, outcome)] = compare(checks_of(find_cause("AR306")), cards)
    assert (hosts, outcome.status) == (("node03",), Status.FAIL)
    assert outcome.to_finding(find_cause("AR306"), node="node03").message == (
        "the kind of address at NCCL_IB_GID_INDEX: 5 of 6 nodes have RoCE v2, IPv4; node03 has RoCE v2, IPv6"
    )


def test_nodes_with_an_index_each_that_leads_to_the_same_kind_are_alike() -> None:
    one = node(1, roce(*USUAL), env={"NCCL_IB_GID_INDEX": "3"})
    two = node(2, roce(*WITHOUT_LINK_LOCAL), env={"NCCL_IB_GID_INDEX": "1"})
    assert compare(checks_of(find_cause("AR306")), [one, two]) == []


@pytest.mark.parametrize("cause", [find_cause("AR305"), find_cause("AR306")])
def test_nothing_of_it_ran_on_hardware(cause: Cause) -> None:
    assert cause.never_on_hardware
    assert cause.no_fault_yet
