"""This machine's network interfaces and ports: read here, decided elsewhere."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address

from allranks.model.card import Interface


def read_interfaces() -> list[Interface]:
    """Return all interfaces of this network namespace, IPv4 and IPv6 addresses without scope."""
    import psutil  # 30 ms that the other verbs need not pay

    is_up = {name: status.isup for name, status in psutil.net_if_stats().items()}
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        Interface(
            name=name,
            addresses=tuple(address.address.partition("%")[0] for address in addresses if address.family in families),
            is_up=is_up.get(name, False),
        )
        for name, addresses in psutil.net_if_addrs().items()
    ]


def find_interface_in(
    network: IPv4Network | IPv6Network, interfaces: Sequence[Interface], *, preferred: str | None = None
) -> tuple[Interface, str] | None:
    """Return an interface with an address in the network, and that address: the preferred one, else one that is up."""
    found = [
        (interface, address)
        for interface in interfaces
        for address in interface.addresses
        if ip_address(address) in network
    ]
    return min(found, key=lambda each: (each[0].name != preferred, not each[0].is_up), default=None)


def find_interface_of(address: str, interfaces: Sequence[Interface]) -> Interface | None:
    """Return the interface that has exactly this address."""
    wanted = ip_address(address)
    return next((nic for nic in interfaces if any(ip_address(own) == wanted for own in nic.addresses)), None)


def is_local_host(host: str) -> bool:
    """Whether a name or address leads to this machine; a name that does not resolve does not."""
    try:
        answers = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return False
    own = {ip_address(address) for interface in read_interfaces() for address in interface.addresses}
    return any(ip_address(str(answer[4][0]).partition("%")[0]) in own for answer in answers)


def describe_port_holder(port: int) -> str:
    """Say which process listens on a port: `python3 (pid 812, alice)`, as far as this user may see it."""
    import psutil

    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            if connection.pid is None:
                return "another user's process"
            try:
                process = psutil.Process(connection.pid)
                return f"{process.name()} (pid {connection.pid}, {process.username()})"
            except psutil.Error:
                return f"pid {connection.pid}"
    return "a process that is gone again or in another namespace"
