"""Which network should carry gradients? Told from the cards of all nodes, with the reason. Pure.

A network is a subnet with an address on every node. Never one of a bridge, of a container's or a VPN's interface, of
loopback or link-local addresses, nor one on which several nodes have the same address. Of those that are left the rules
below leave fewer and fewer, until one is left; each says why.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from allranks.model.card import Card, Facts, Interface
from allranks.model.hostlist import fold_hosts

_NEVER = re.compile(
    r"(docker|veth|virbr|br-|cni|cali|flannel|lxc|lxd|podman|tun|tap|wg|tailscale|dummy|kube|nodelocal)"
)
_FAST = re.compile(r"(ib|hsn|roce|rdma)")
"""How interfaces of InfiniBand, Slingshot and RoCE networks are called."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """How a node is on a network."""

    nic: Interface
    address: str
    has_rdma: bool


@dataclass(frozen=True, slots=True)
class Network:
    """One subnet and the nodes that are on it."""

    subnet: str
    nodes: Mapping[str, tuple[Attachment, ...]]
    """Host -> how it is on it, best interface first."""

    @property
    def speed_mbit_s(self) -> int | None:
        """Of the slowest node; None where one of them does not say."""
        speeds = [ways[0].nic.speed_mbit_s for ways in self.nodes.values()]
        return None if None in speeds else min((speed for speed in speeds if speed is not None), default=None)

    @property
    def has_rdma(self) -> bool:
        """Whether every node has an active RDMA port on it."""
        return all(ways[0].has_rdma for ways in self.nodes.values())

    @property
    def mtu(self) -> int:
        """The smallest."""
        return min((ways[0].nic.mtu or 0 for ways in self.nodes.values()), default=0)

    @property
    def interfaces(self) -> str:
        """Names of the interfaces, most common first: `ens1f1, ens1f0np0`."""
        names = Counter(ways[0].nic.name for ways in self.nodes.values())
        return ", ".join(name for name, _ in names.most_common(3)) + (", ..." if len(names) > 3 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkChoice:
    """The network that was chosen, and why; None where there is none."""

    network: Network | None
    reason: str
    notes: tuple[str, ...] = ()
    """What else should be known: other networks, nodes that are not on it."""


def choose_network(cards: Sequence[Card]) -> NetworkChoice:
    """Choose the data network.

    Args:
        cards: one of each node; those without facts are passed over.
    """
    facts = {card.host: card.facts for card in cards if card.facts is not None}
    networks, passed_over = find_networks(facts)
    notes = [f"skipped: {'; '.join(passed_over)}"] if passed_over else []
    if not networks:
        return NetworkChoice(network=None, reason="no network is left that could carry gradients", notes=tuple(notes))
    most = max(len(network.nodes) for network in networks)
    left = [network for network in networks if len(network.nodes) == most]
    if most * 2 <= len(facts):
        found = ", ".join(f"{network.subnet} ({fold_hosts(list(network.nodes))})" for network in networks[:6])
        reason = "the nodes share no subnet" + (f": {found}" if len(facts) > 1 else "")
        return NetworkChoice(network=None, reason=reason, notes=tuple(notes))
    chosen, why = _narrow(left, facts)
    where = f"all {len(facts)} nodes are on it" if most == len(facts) else f"{most} of {len(facts)} nodes are on it"
    only = "no other network could carry gradients" if len(networks) == 1 else f"no other has {most} nodes"
    reason = "; ".join([*([where] if len(facts) > 1 else []), *(why or [only])])
    if absent := [host for host in facts if host not in chosen.nodes]:
        notes.append(f"not on {chosen.subnet}: {fold_hosts(absent)}")
    if down := [host for host, ways in chosen.nodes.items() if not ways[0].nic.is_up]:
        notes.append(f"down at the moment: the interface of {fold_hosts(down)}")
    if others := [network for network in networks if network is not chosen]:
        notes.append(
            f"other networks: {', '.join(f'{network.subnet} ({network.interfaces})' for network in others[:6])}"
        )
    return NetworkChoice(network=chosen, reason=reason, notes=tuple(notes))


def advise_network(cards: Sequence[Card], taken: str | None) -> str | None:
    """Return what to tell where nobody names the data network and the nodes took another one than we would choose.

    Args:
        cards: one of each node.
        taken: any node's address on the network on which the nodes found each other.
    Returns:
        The interface that was taken, why, what the better one is and how to name it; None where there is no other.
    """
    card, nic, subnet = next(
        (
            (card, nic, subnet)
            for card in cards
            for nic in (card.facts.interfaces if card.facts else ())
            for subnet, address in list_subnets(nic)
            if address == taken
        ),
        (None, None, ""),
    )
    choice, hosts = choose_network(cards), {known.host for known in cards}
    better = choice.network
    if card is None or nic is None or better is None or set(better.nodes) != hosts:
        return None
    if better.nodes[card.host][0].nic.name == nic.name or not all(ways[0].nic.is_up for ways in better.nodes.values()):
        return None
    return (
        f"gradients go over {nic.name} ({subnet}{_speed(nic.speed_mbit_s)}): no cluster.toml names the data network, "
        f"and the nodes found each other there; {better.interfaces} ({better.subnet}{_speed(better.speed_mbit_s)}) "
        f'looks like it: {choice.reason}; to use it, write data = "{better.subnet}" under [network] in cluster.toml, '
        "as allranks init does"
    )


def _speed(mbit_s: int | None) -> str:
    return f", {mbit_s / 1000:g} Gbit/s" if mbit_s else ""


def find_management(facts: Mapping[str, Facts]) -> str | None:
    """Return the subnet that most host names resolve to, as the nodes themselves see it; None: to none of theirs."""
    votes: Counter[str] = Counter()
    for host, own in facts.items():
        named = {*own.resolved.get(host, ()), *own.resolved.get(own.host_name, ())}
        votes.update(subnet for nic in own.interfaces for subnet, address in list_subnets(nic) if address in named)
    return votes.most_common(1)[0][0] if votes else None


# The rules, each with what it says of the networks that it leaves and of those that it drops.


def _narrow(networks: Sequence[Network], facts: Mapping[str, Facts]) -> tuple[Network, list[str]]:
    management = find_management(facts)

    def has_lost(network: Network, best: int) -> bool:
        return network.speed_mbit_s is not None and network.speed_mbit_s < best

    left, why = list(networks), list[str]()

    def keep(is_better: Callable[[Network], bool], reason: Callable[[Sequence[Network]], str]) -> None:
        nonlocal left
        kept = [network for network in left if is_better(network)]
        if kept and len(kept) < len(left):
            why.append(reason([network for network in left if network not in kept]))
            left = kept

    best = max((network.speed_mbit_s for network in left if network.speed_mbit_s is not None), default=0)
    # Order matters: what is measured before what is only a habit.
    keep(lambda network: network.has_rdma, lambda lost: f"it has RDMA; {_subnets(lost)} does not")
    best = max((network.speed_mbit_s for network in left if network.speed_mbit_s is not None), default=0)
    keep(lambda network: not has_lost(network, best), lambda lost: f"{best / 1000:g} Gbit/s, {_speeds(lost)}")
    is_told = why != []
    keep(
        lambda network: all(_FAST.match(ways[0].nic.name) for ways in network.nodes.values()),
        lambda lost: f"its interfaces are named like a fast network's, those of {_subnets(lost)} are not",
    )
    keep(
        lambda network: network.subnet != management,
        lambda lost: (
            f"host names lead to {_subnets(lost)}, so that one is for management"
            + ("" if is_told else " (no speeds to compare)")
        ),
    )
    largest = max(network.mtu for network in left)
    keep(lambda network: network.mtu == largest, lambda lost: f"MTU {largest}, more than {_subnets(lost)}")
    keep(lambda network: ip_network(network.subnet).version == 4, lambda lost: f"IPv4, {_subnets(lost)} is IPv6")
    if len(left) > 1:
        left.sort(key=lambda network: ip_network(network.subnet).network_address.packed)
        why.append(f"the lowest address: it looks the same as {_subnets(left[1:])}; check this choice")
    return left[0], why


def _subnets(networks: Sequence[Network]) -> str:
    return ", ".join(network.subnet for network in networks)


def _speeds(networks: Sequence[Network]) -> str:
    return ", ".join(f"{network.subnet} has {(network.speed_mbit_s or 0) / 1000:g}" for network in networks)


def find_networks(facts: Mapping[str, Facts]) -> tuple[list[Network], list[str]]:
    """Return the networks that may carry gradients, in the order of the interfaces, and what was passed over."""
    owners = Counter(a for own in facts.values() for a in {a for nic in own.interfaces for _, a in list_subnets(nic)})
    found: dict[str, dict[str, list[Attachment]]] = {}
    passed: dict[str, None] = {}
    for host, own in facts.items():
        rdma = {port.netdev for port in own.rdma_ports if port.state == "ACTIVE" and port.netdev}
        for nic in own.interfaces:
            for subnet, address in list_subnets(nic):
                why = _objection(nic) or ("the same address on several nodes" if owners[address] > 1 else None)
                if why:
                    passed[f"{nic.name} {subnet} ({why})"] = None
                else:
                    way = Attachment(nic, address, nic.name in rdma)
                    found.setdefault(subnet, {}).setdefault(host, []).append(way)
    networks = [
        Network(subnet, {host: tuple(sorted(ways, key=_rank)) for host, ways in nodes.items()})
        for subnet, nodes in found.items()
    ]
    return networks, list(passed)[:6]


def _rank(way: Attachment) -> tuple[bool, bool, int]:
    return (not way.nic.is_up, not way.has_rdma, -(way.nic.speed_mbit_s or 0))


def _objection(nic: Interface) -> str | None:
    if nic.kind == "bridge":
        return "a bridge"
    return "of containers or a VPN" if _NEVER.match(nic.name) else None


def list_subnets(nic: Interface) -> list[tuple[str, str]]:
    """Return subnet and address of each, of those that lead to other machines."""
    if nic.kind == "loopback":
        return []
    found = []
    for subnet, text in zip(nic.networks, nic.addresses, strict=False):
        try:
            address, network = ip_address(text), ip_network(subnet)
        except ValueError:
            continue
        if not (address.is_loopback or address.is_link_local or address.is_unspecified):
            found.append((str(network), str(address)))
    return found
