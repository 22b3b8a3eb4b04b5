"""Which interface of this node carries gradients: the choice of cluster.toml, compared with what exists. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_network

from allranks.host.net import find_interface_in, find_interface_of
from allranks.host.node import NodeFacts
from allranks.model.card import Interface
from allranks.model.cluster import Cluster
from allranks.model.errors import ConfigError, SetupError
from allranks.model.finding import Finding

LOOPBACK, LOOPBACK_6 = "127.0.0.1", "::1"


@dataclass(frozen=True, slots=True)
class DataPath:
    """The interface of this node that carries gradients, and why it was chosen."""

    interface: str
    address: str
    reason: str
    source: str


def data_path_alone(facts: NodeFacts) -> DataPath | None:
    """Return the loopback interface, for a job on one machine; None where it has none."""
    for address in (LOOPBACK, LOOPBACK_6):
        if (nic := find_interface_of(address, facts.interfaces)) is not None:
            return DataPath(nic.name, address, "all ranks are on this machine", "num_nodes")
    return None


def data_path_of_cluster(cluster: Cluster, facts: NodeFacts, origin: Mapping[str, str]) -> DataPath | None:
    """Return this node's interface in the data subnet, or the one its [[node]] names; None where the file says neither.

    Raises:
        ConfigError: the machine has no such interface.
        SetupError: the interface is down.
    """
    data, node = cluster.network.data, cluster.find_node(facts.host)
    if data is not None:
        found = find_interface_in(ip_network(data), facts.interfaces, preferred=node.interface if node else None)
        if found is None:
            there = list_nics(facts.interfaces)
            text = f"[network] data = {data}: no interface of {facts.host} is in that subnet; it has {there}"
            raise ConfigError(
                f"{text}; correct the subnet, or run on this machine alone with --standalone",
                finding=_finding("AR208", text, facts),
            )
        nic, address = found
        node = node or cluster.find_node(address)
        reason, source = f"{address} is in {data}", origin.get("network.data", "cluster.toml")
    elif node is not None and (named := find_interface_of(node.address, facts.interfaces)) is not None:
        nic, address = named, node.address
        reason, source = f"{address} is this node's address", origin.get(f"node.{node.name}.address", "cluster.toml")
    elif node is not None:
        text = f"[[node]] {node.name}: address = {node.address}, but {facts.host} has {list_nics(facts.interfaces)}"
        raise ConfigError(
            f"{text}; correct it, or run on this machine alone with --standalone",
            finding=_finding("AR208", text, facts),
        )
    else:
        return None
    if node is not None and node.interface not in (None, nic.name):
        text = f"[[node]] {node.name}: interface = {node.interface}, but {address} is on {nic.name} there"
        raise ConfigError(
            f"{text}; correct it, or omit it: allranks finds the interface from [network] data",
            finding=_finding("AR208", text, facts, interface=node.interface),
        )
    if not nic.is_up:
        why = "has no carrier" if nic.has_carrier is False else "is down"
        text = f"the data interface of {facts.host} {why}: {nic}"
        raise SetupError(
            f"{text}; run ip link set {nic.name} up, or check its cable and switch port",
            finding=_finding("AR210", text, facts, interface=nic.name),
        )
    return DataPath(nic.name, address, reason, source)


def list_nics(interfaces: Sequence[Interface]) -> str:
    """`ens1f1 (192.168.20.3), eno1 (10.1.0.3)`: what there is instead."""
    return ", ".join(str(interface) for interface in interfaces if interface.addresses) or "none with an address"


def _finding(cause_id: str, what: str, facts: NodeFacts, *, interface: str | None = None) -> Finding:
    from allranks.causes.book import find_cause  # not before it is needed: plans are made without it
    from allranks.causes.outcome import failed

    return failed(what=what, interface=interface).to_finding(find_cause(cause_id), node=facts.host, reader=facts.reader)
