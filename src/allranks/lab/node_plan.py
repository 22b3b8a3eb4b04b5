"""Which nodes does the lab build for a cluster.toml? Pure.

>>> from allranks.model.cluster import Cluster, Node
>>> plan_hosts(Cluster(node=(Node(name="n1", address="192.168.20.15"),)))[0].data_address
'192.168.20.15/24'
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_interface, ip_network

from allranks.model.cluster import Cluster
from allranks.model.errors import ConfigError

MANAGEMENT_NETWORK = ip_network("10.77.0.0/24")
LIMIT = MANAGEMENT_NETWORK.num_addresses - 2
"""Largest number of nodes."""
MANAGEMENT_INTERFACE = "eno1"
DOCKER_INTERFACE = "docker0"
DOCKER_ADDRESS = "172.17.0.1/16"
DEFAULT_DATA_INTERFACE = "ens1f1"
SECOND_INTERFACE = "ens2f1"
LOGIN = "login"
"""Name of the login node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One node as the lab builds it."""

    name: str
    index: int
    """From 0, in the order of cluster.toml; the login node's is the number of the others."""
    management_address: str
    """With prefix length, 10.77.0.1/24; the node's name resolves to it on every node."""
    data_interface: str
    """Empty: it is not on the data network."""
    data_address: str
    """With prefix length, 192.168.20.15/24."""
    second_address: str = ""
    """On the `second` network of cluster.toml, with the host part of the first address; empty: there is none."""
    gpus: int


def plan_hosts(cluster: Cluster) -> tuple[Host, ...]:
    """Return the nodes of cluster.toml in order, with everything that the lab adds to them.

    Raises:
        ConfigError: cluster.toml lacks a value, or has one that the lab cannot build.
    """
    if not cluster.node:
        raise ConfigError("cluster.toml: no [[node]]: the lab builds the listed nodes, expected at least one")
    if len(cluster.node) > LIMIT:
        raise ConfigError(f"cluster.toml: {len(cluster.node)} nodes: the lab builds at most {LIMIT}")
    data = ip_network(cluster.network.data, strict=False) if cluster.network.data else None
    planned = []
    for index, node in enumerate(cluster.node):
        interface = node.interface or DEFAULT_DATA_INTERFACE
        where = f"cluster.toml: [[node]] {node.name}"
        if interface in ("lo", MANAGEMENT_INTERFACE, DOCKER_INTERFACE):
            raise ConfigError(f"{where}: interface = {interface!r}: the lab itself uses this name; choose another one")
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,15}", interface):
            raise ConfigError(f"{where}: interface = {interface!r}: expected up to 15 letters, digits, '.', '_', '-'")
        address = _with_prefix(node.address, data)
        if ip_interface(address).network.overlaps(MANAGEMENT_NETWORK):
            raise ConfigError(f"{where}: address {node.address}: {MANAGEMENT_NETWORK} is the lab's management network")
        planned.append(
            Host(
                name=node.name,
                index=index,
                management_address=_management_address(index),
                data_interface=interface,
                data_address=address,
                second_address=_in_second(address, cluster.network.second),
                gpus=node.gpus or 0,
            )
        )
    return tuple(planned)


def plan_controller(planned: Sequence[Host], *, has_login: bool) -> Host:
    """Return the node that runs slurmctld, on which users work: the login node, or without one the first node.

    The login node is on the management network only, and in no partition.

    Args:
        planned: the nodes of cluster.toml.
        has_login: whether there is a login node.
    Raises:
        ConfigError: cluster.toml already has a node of its name, or leaves it no address.
    """
    if not has_login:
        return planned[0]
    index = len(planned)
    if LOGIN in (host.name for host in planned):
        raise ConfigError(f"cluster.toml: [[node]] {LOGIN}: the lab gives this name to the login node (--login)")
    if index >= LIMIT:
        raise ConfigError(f"cluster.toml: {index} nodes: the lab builds at most {LIMIT}, one of them the login node")
    address = _management_address(index)
    return Host(name=LOGIN, index=index, management_address=address, data_interface="", data_address="", gpus=0)


def render_hosts_file(planned: Sequence[Host]) -> str:
    """Return /etc/hosts for all nodes: names resolve to the management network."""
    lines = [f"{bare(host.management_address)} {host.name}\n" for host in planned]
    return "".join(["127.0.0.1 localhost\n", "::1 localhost ip6-localhost\n", *lines])


def bare(address: str) -> str:
    """Return an address without its prefix length."""
    return address.partition("/")[0]


def _in_second(address: str, second: str | None) -> str:
    if second is None:
        return ""
    first, network = ip_interface(address), ip_network(second)
    return f"{network[int(first.ip) - int(first.network.network_address)]}/{network.prefixlen}"


def _management_address(index: int) -> str:
    return f"{MANAGEMENT_NETWORK[index + 1]}/{MANAGEMENT_NETWORK.prefixlen}"


def _with_prefix(address: str, data: IPv4Network | IPv6Network | None) -> str:
    parsed = ip_address(address)
    if data and parsed in data:
        return f"{address}/{data.prefixlen}"
    return f"{address}/{24 if parsed.version == 4 else 64}"
