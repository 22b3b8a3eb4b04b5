"""Interfaces, ports and names of this machine."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_network

import pytest

from allranks.host.net import (
    Interface,
    describe_port_holder,
    find_interface_in,
    find_interface_of,
    is_local_host,
    read_interfaces,
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
        assert describe_port_holder(port) == "a process that is gone again or in another namespace"
