"""What carries gradients on each node, and how fast? From the reports of the nodes and the tests of a roll call.

A lane is one further data interface of every node, all on one network: Gloo can use it beside the first one, which the
roll call has tested by itself. It must look like the first (kind, speed, MTU, RDMA), carry no host name (management),
belong to no container, and be on the network that the user named, if there is one; then all nodes try each other there.
Whoever sets GLOO_SOCKET_IFNAME on any node keeps what is set. Two interfaces in one subnet take ARP settings, too: else
the kernel answers for either of them with whichever it likes, and everything arrives on one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from allranks.model.card import Card, Interface
from allranks.model.hostlist import fold_hosts
from allranks.model.pair import LARGE, PairResult
from allranks.preflight.look import FULL_UP_TO, SPARSE_TESTS_S, TESTS_S, Look
from allranks.preflight.networks import find_management, find_networks, list_subnets
from allranks.preflight.pairs import choose_pairs
from allranks.preflight.second_look import merge, plan_confirmation
from allranks.preflight.symptoms import has_failed, lost_sizes

ARP = (1, 2)
"""arp_ignore and arp_announce, at least: Documentation/networking/ip-sysctl.rst."""
FAR_BELOW = 4.0
"""A test sends 48 KiB, on a connection that has just begun: it may show a fourth of what the interface reports."""


def measured_link(
    results: Iterable[PairResult], cards: Mapping[int, Card], addresses: Mapping[int, str]
) -> tuple[float | None, str]:
    """Return what one interface of the slowest node carries one way, in Mbit/s, and how that is known; None: it is not.

    Args:
        results: of all pair tests; of each node the best one counts, in each direction.
        cards: by node index.
        addresses: of each node on the data network.
    """
    best: dict[tuple[int, bool], float] = defaultdict(float)
    for result in results:
        for key in ((result.source, True), (result.target, False)):
            best[key] = max(best[key], result.delivery_mbit_s or 0.0)
    nics = {index: nic_of(card, addresses.get(index)) for index, card in cards.items()}
    speeds = [nic.speed_mbit_s for nic in nics.values() if nic is not None and nic.speed_mbit_s]
    speed = min(speeds) if len(speeds) == len(cards) else None
    rate = min(best.values(), default=0.0)
    if not rate:
        return None, ""
    (slowest, _) = min(best, key=lambda key: (best[key], key))
    if speed is None or rate < speed / FAR_BELOW:
        return round(rate, 1), f"delivery rate of the slowest node, {cards[slowest].host}, in the roll call"
    return float(speed), f"speed that the data interfaces report; the roll call measured {rate:.0f} Mbit/s at least"


def nic_of(card: Card, address: str | None) -> Interface | None:
    """Return the interface of a node that has this address."""
    nics = card.facts.interfaces if card.facts else ()
    return next((nic for nic in nics if address in nic.addresses), None)


@dataclass(frozen=True, slots=True)
class Way:
    """How one node is on a lane."""

    nic: Interface
    address: str


Lane = Mapping[int, Way]
"""By node index."""


def find_lanes(cards: Mapping[int, Card], first: Mapping[int, str]) -> tuple[list[Lane], str | None]:
    """Return the lanes beside the first interfaces, and what to say of one that needs other settings.

    Args:
        cards: of all nodes.
        first: the address of each node on the data network.
    """
    facts = {card.host: card.facts for card in cards.values() if card.facts is not None}
    nics = {index: nic_of(card, first.get(index)) for index, card in cards.items()}
    is_set = any("GLOO_SOCKET_IFNAME" in each.environment for each in facts.values())
    if is_set or len(facts) < 2 or any(card.facts is None or nics[index] is None for index, card in cards.items()):
        return [], None
    is_named = any(card.data_interface is not None for card in cards.values())
    management, lanes, why = find_management(facts), list[Lane](), None
    for network in find_networks(facts)[0]:
        found: dict[int, list[Way]] = {}
        is_first_subnet = False
        for index, card in cards.items():
            nic = nics[index]
            assert nic is not None
            ways = network.nodes.get(card.host, ())
            is_first_subnet |= any(way.address == first[index] for way in ways)
            own = (nic.kind, nic.speed_mbit_s, nic.mtu, _has_rdma(card, nic))
            found[index] = [
                Way(way.nic, way.address)
                for way in sorted(ways, key=lambda way: way.nic.name)
                if way.nic.is_up
                and way.nic.name != nic.name
                and (way.nic.kind, way.nic.speed_mbit_s, way.nic.mtu, way.has_rdma) == own
            ]
        if not is_first_subnet and (is_named or management in (None, network.subnet)):
            continue
        new = [
            {index: ways[number] for index, ways in found.items()} for number in range(min(map(len, found.values())))
        ]
        if new and is_first_subnet and (lacking := _lack_arp(cards, nics)):
            names = ", ".join(dict.fromkeys(name for way in new[0].values() for name in (way.nic.name,)))
            why = (
                f"Gloo does not use {names}, which is in {network.subnet}, too: {fold_hosts(lacking)} would receive "
                f"everything on one interface; to use both, sysctl -w net.ipv4.conf.all.arp_ignore={ARP[0]} "
                f"net.ipv4.conf.all.arp_announce={ARP[1]} on all nodes"
            )
            continue
        lanes += new
    return lanes, why


def prove_lanes(
    cards: Mapping[int, Card],
    first: Mapping[int, str],
    try_pairs: Callable[[Look, Mapping[int, str]], list[PairResult]],
    *,
    seed: int,
) -> tuple[dict[int, tuple[str, ...]], str | None]:
    """Return all data interfaces of each node if there are several, and why one was left out.

    Gloo needs equally many of each node, so a lane that fails between two nodes is left out on all.

    Args:
        cards: of all nodes.
        first: the address of each node on the data network.
        try_pairs: has nodes try each other at these addresses.
        seed: as for `choose_pairs`.
    """
    lanes, why = find_lanes(cards, first)
    proven = []
    for lane in lanes:
        nodes, addresses = sorted(lane), {index: way.address for index, way in lane.items()}
        pairs = [(nodes[a], nodes[b]) for a, b in choose_pairs(len(nodes), full_up_to=FULL_UP_TO, seed=seed)]
        within_s = SPARSE_TESTS_S if len(nodes) > FULL_UP_TO else TESTS_S
        look = Look(pairs, LARGE, within_s, is_one_by_one=False, reason="further data interfaces")
        results = try_pairs(look, addresses)
        if (again := plan_confirmation(results)) is not None:
            results = merge(results, try_pairs(again, addresses))
        failed = describe_failure(results, lane, cards, asked=pairs)
        why = why or failed
        if failed is None:
            proven.append(lane)
    names = {index: nic.name for index, card in cards.items() if (nic := nic_of(card, first[index])) is not None}
    return {i: (names[i], *(lane[i].nic.name for lane in proven)) for i in names} if proven else {}, why


def describe_failure(
    results: Iterable[PairResult], lane: Lane, cards: Mapping[int, Card], *, asked: Sequence[tuple[int, int]]
) -> str | None:
    """Return why a lane cannot be used; None: all pairs got through."""
    seen = {(result.source, result.target): result for result in results}
    failed: dict[tuple[int, int], str] = {}
    for pair in asked:
        result = seen.get(pair)
        if result is None:
            failed[pair] = "no report"
        elif result.problem or has_failed(result) or lost_sizes(result, None):
            reason = result.problem or next(iter(result.closed.values()), "")
            failed[pair] = reason or "packets of the MTU are lost"
    if not failed:
        return None
    common = set.intersection(*(set(pair) for pair in failed))
    (source, target), reason = min(failed.items())
    ends = sorted(common)[:1] if len(failed) > 1 and common else [source, target]
    who = " and ".join(f"{cards[index].host} {lane[index].nic.name} ({lane[index].address})" for index in ends)
    others = " to the other nodes" if len(ends) == 1 else ""
    return f"Gloo uses one interface a node: {who} did not get through{others}: {reason}"


def _has_rdma(card: Card, nic: Interface) -> bool:
    ports = card.facts.rdma_ports if card.facts else ()
    return any(port.netdev == nic.name and port.state == "ACTIVE" for port in ports)


def _lack_arp(cards: Mapping[int, Card], nics: Mapping[int, Interface | None]) -> list[str]:
    """Hosts on which one of the interfaces that share the first one's subnet has other ARP settings."""
    lacking = []
    for index, card in cards.items():
        nic = nics[index]
        subnets = {subnet for subnet, _ in list_subnets(nic)} if nic else set()
        beside = [each for each in card.facts.interfaces if subnets & {subnet for subnet, _ in list_subnets(each)}]  # type: ignore[union-attr]
        if any(each.arp is not None and any(a < b for a, b in zip(each.arp, ARP, strict=True)) for each in beside):
            lacking.append(card.host)
    return list(dict.fromkeys(lacking))
