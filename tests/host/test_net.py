"""Interfaces, ports and names of this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from ipaddress import ip_network
from pathlib import Path

import pytest

from allranks.host.net import (
    Interface,
    answers,
    describe_port_holder,
    find_interface_in,
    find_interface_of,
    is_local_host,
    read_boot_id,
    read_interfaces,
    read_port_range,
    resolve,
)

LO = Interface("lo", ("127.0.0.1", "::1"), is_up=True)
MANAGEMENT = Interface("eno1", ("10.1.0.15", "fe80::1"), is_up=True)
DATA = Interface("ens1f1", ("192.168.20.15", "fd00:20::15"), is_up=True)
BARE = Interface("ens1f0", (), is_up=False)
ALL = (LO, MANAGEMENT, BARE, DATA)


@pytest.mark.parametrize(
    ("network", "found"),
    [
        ("192.168.20.0/24", (DATA, "192.168.20.15")),
        ("192.168.20.15/32", (DATA, "192.168.20.15")),
        ("fd00:20::/64", (DATA, "fd00:20::15")),
        ("10.0.0.0/8", (MANAGEMENT, "10.1.0.15")),
        ("0.0.0.0/0", (LO, "127.0.0.1")),
        ("::/0", (LO, "::1")),
        ("192.168.21.0/24", None),
        ("fd00:21::/64", None),
    ],
)
def test_the_interface_of_a_subnet_is_the_first_with_an_address_in_it(network, found):
    assert find_interface_in(ip_network(network), ALL) == found


def test_without_interfaces_nothing_is_found():
    assert find_interface_in(ip_network("0.0.0.0/0"), ()) is None
    assert find_interface_of("127.0.0.1", ()) is None


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("192.168.20.15", DATA),
        ("fd00:20::15", DATA),
        ("FD00:20:0::15", DATA),
        ("10.1.0.15", MANAGEMENT),
        ("192.168.20.16", None),
    ],
)
def test_the_interface_of_an_address_has_exactly_it(address, interface):
    assert find_interface_of(address, ALL) == interface


@pytest.mark.parametrize(
    ("interface", "text"),
    [
        (DATA, "ens1f1 192.168.20.15 fd00:20::15"),
        (BARE, "ens1f0 (down)"),
        (Interface("ib0", ("10.2.0.1",), is_up=False), "ib0 10.2.0.1 (down)"),
    ],
)
def test_an_interface_reads_with_addresses_and_state(interface, text):
    assert str(interface) == text


def test_this_machine_has_a_loopback_interface():
    loopback = find_interface_of("127.0.0.1", read_interfaces())
    assert loopback is not None
    assert loopback.is_up


def test_no_address_of_this_machine_has_a_scope():
    assert [a for interface in read_interfaces() for a in interface.addresses if "%" in a] == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_names_of_this_machine_are_local(host):
    assert is_local_host(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid"])
def test_names_of_other_machines_are_not_local(host):
    assert not is_local_host(host)


def test_a_machine_answers_whether_somebody_listens_or_not():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert answers("127.0.0.1", port, within_s=60.0)
    assert answers("127.0.0.1", port, within_s=60.0)
    assert not answers("..", port, within_s=60.0)  # no name of a host


def test_who_says_nothing_does_not_answer():
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        place = full.getsockname()
        stack.enter_context(socket.create_connection(place))  # nobody accepts it: the kernel drops further SYNs
        assert not answers(*place, within_s=0.3)


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")])
def test_the_holder_of_a_port_is_named(family, address):
    with socket.socket(family) as sock:
        sock.bind((address, 0))
        sock.listen()
        text = describe_port_holder(sock.getsockname()[1])
    assert f"(pid {os.getpid()}, " in text


def test_a_port_that_nobody_holds_is_said_so():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound, not listening: nobody else takes it meanwhile
        port = sock.getsockname()[1]
        assert describe_port_holder(port) == "a process that has ended, or is in another namespace"


def link_tree(root: Path, **files: str) -> Path:
    """A tree of /sys in which `lo`, which every machine has, is what the files say."""
    link = root / "sys/class/net/lo"
    link.mkdir(parents=True)
    (link / "device").mkdir()
    for name, text in files.items():
        (link / name).write_text(text)
    return root


def loopback_in(root: Path) -> Interface:
    return next(nic for nic in read_interfaces(root=root) if nic.name == "lo")


def test_the_loopback_interface_is_read_whole():
    lo = loopback_in(Path("/"))
    assert lo.kind == "loopback"
    assert lo.mtu
    assert lo.mtu >= 1500
    assert lo.networks[lo.addresses.index("127.0.0.1")] == "127.0.0.0/8"
    assert len(lo.networks) == len(lo.addresses)


def test_every_address_is_in_its_network():
    pairs = [pair for nic in read_interfaces() for pair in zip(nic.addresses, nic.networks, strict=True)]
    assert pairs
    assert all(find_interface_in(ip_network(network), [Interface("x", (address,), True)]) for address, network in pairs)


def test_figures_come_from_sysfs(tmp_path):
    lo = loopback_in(link_tree(tmp_path, mtu="9000\n", speed="100000\n", carrier="1\n", carrier_changes="7\n"))
    assert (lo.mtu, lo.speed_mbit_s, lo.has_carrier, lo.carrier_changes) == (9000, 100000, True, 7)


@pytest.mark.parametrize("speed", ["-1\n", "0\n", "4294967295\n", "", "Unknown!\n"])
def test_a_speed_that_says_nothing_is_none(tmp_path, speed):
    assert loopback_in(link_tree(tmp_path, speed=speed)).speed_mbit_s is None


@pytest.mark.parametrize(("uevent", "speed"), [("DEVTYPE=bond\n", 25000), ("DEVTYPE=vlan\n", 25000), ("", None)])
def test_a_speed_without_a_device_counts_for_bonds_and_vlans_only(tmp_path, uevent, speed):
    root = link_tree(tmp_path, speed="25000\n", uevent=f"{uevent}INTERFACE=lo\n")
    (root / "sys/class/net/lo/device").rmdir()
    assert loopback_in(root).speed_mbit_s == speed


def test_a_link_without_a_cable_has_no_carrier(tmp_path):
    assert loopback_in(link_tree(tmp_path, carrier="0\n")).has_carrier is False


def test_without_sysfs_the_kernel_is_asked_for_the_mtu(tmp_path):
    lo = loopback_in(tmp_path)
    assert lo.mtu == loopback_in(Path("/")).mtu
    assert (lo.has_carrier, lo.carrier_changes, lo.is_up) == (None, None, True)


@pytest.mark.parametrize(("entry", "kind"), [("bridge", "bridge"), ("device", "physical"), ("queues", "virtual")])
def test_the_kind_of_an_interface_is_what_its_directory_holds(tmp_path, entry, kind):
    others = [nic.name for nic in read_interfaces() if nic.kind != "loopback"]
    if not others:
        pytest.skip("no interface but loopback here")
    (tmp_path / "sys/class/net" / others[0] / entry).mkdir(parents=True)
    assert next(nic for nic in read_interfaces(root=tmp_path) if nic.name == others[0]).kind == kind


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("32768\t60999\n", (32768, 60999)),
        ("1024 1024\n", (1024, 1024)),
        ("60999 32768\n", None),
        ("0 70000\n", None),
        ("1\n", None),
        ("a b\n", None),
        ("", None),
    ],
)
def test_the_port_range_is_first_and_last(tmp_path, text, ports):
    file = tmp_path / "proc/sys/net/ipv4/ip_local_port_range"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert read_port_range(root=tmp_path) == ports
    assert read_port_range(root=tmp_path / "other") is None


def test_the_boot_id_is_the_kernel_s(tmp_path):
    file = tmp_path / "proc/sys/kernel/random/boot_id"
    file.parent.mkdir(parents=True)
    file.write_text("9e966cda-1658-4d04-b252-12e3dc96df44\n")
    assert read_boot_id(root=tmp_path) == "9e966cda-1658-4d04-b252-12e3dc96df44"
    assert read_boot_id(root=tmp_path / "other") is None


def test_names_are_resolved_and_those_that_are_none_are_empty():
    answers = resolve(
        ["127.0.0.1", "::ffff:10.0.0.7", "no-such-host.invalid", "127.0.0.1", "", "x" * 300], deadline_s=20
    )
    assert answers == {
        "127.0.0.1": ("127.0.0.1",),
        "::ffff:10.0.0.7": ("10.0.0.7",),
        "no-such-host.invalid": (),
        "": (),
        "x" * 300: (),
    }


def test_a_resolver_that_hangs_is_not_waited_for(monkeypatch):
    def hang(*_: object, **__: object) -> list[object]:
        time.sleep(30)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    start_s = time.monotonic()
    assert resolve([f"node{i:02}" for i in range(40)], deadline_s=0.2) == {}
    assert time.monotonic() - start_s < 20


def test_no_names_cost_nothing():
    assert resolve([], deadline_s=20) == {}
