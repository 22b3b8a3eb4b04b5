"""What carries gradients on each node, and how fast? From the reports of the nodes and the tests of a roll call.

A lane is one further data interface of every node, all on one network, beside the first one, which the roll call has
tested by itself: one in the same subnet with the same speed and MTU, or one on the `second` network of cluster.toml. No
other network is taken, however alike it looks: it may be for management or storage. All nodes try each other over it,
and Gloo uses those lanes that work. Whoever sets GLOO_SOCKET_IFNAME on any node keeps what is set. Two interfaces in
one subnet take ARP settings: else the kernel answers for either with whichever it likes, and all arrives on one; AR216
warns of that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from allranks.model.card import Card, Interface
from allranks.model.hostlist import fold_hosts
from allranks.model.pair import LARGE, PairResult
from allranks.preflight.look import FULL_UP_TO, SPARSE_TESTS_S, TESTS_S, RoundOfTests
from allranks.preflight.networks import find_management, find_networks
from allranks.preflight.pairs import choose_pairs
from allranks.preflight.second_look import merge, plan_confirmation
from allranks.preflight.symptoms import has_failed, has_tried_large, lost_sizes

FAR_BELOW = 4.0
"""A test sends 48 KiB, on a connection that has just begun: it may show a fourth of what the interface reports."""


def measured_link(
    results: Iterable[PairResult], cards: Mapping[int, Card], addresses: Mapping[int, str]
) -> tuple[float | None, str]:
    """Return what one interface of the slowest node carries one way, in Mbit/s, and how that is known; None: it is not.

    Args:
        results: of all pair tests; of each node the best one counts, in each direction, of those between two machines
            that sent enough.
        cards: by node index.
        addresses: of each node on the data network.
    """
    best: dict[tuple[int, bool], float] = defaultdict(float)
    for result in results:
        hosts = {cards[index].host for index in (result.source, result.target) if index in cards}
        if not has_tried_large(result) or len(hosts) < 2:  # a node may have left since
            continue
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
class LaneEnd:
    """How one node is on a lane."""

    nic: Interface
    address: str


Lane = Mapping[int, LaneEnd]
"""By node index."""


def find_lanes(
    cards: Mapping[int, Card], first: Mapping[int, str], *, second: str | None = None
) -> tuple[list[Lane], str | None]:
    """Return the lanes beside the first interfaces, and what to say of one that cannot be used.

    Args:
        cards: of all nodes.
        first: the address of each node on the data network.
        second: subnet of cluster.toml.
    """
    facts = {card.host: card.facts for card in cards.values() if card.facts is not None}
    nics = {index: nic for index, card in cards.items() if (nic := nic_of(card, first.get(index))) is not None}
    is_set = any("GLOO_SOCKET_IFNAME" in node.environment for node in facts.values())
    if is_set or len(facts) < 2 or nics.keys() != cards.keys():
        return [], None
    networks = {network.subnet: network.nodes for network in find_networks(facts)[0]}

    def ways_in(subnet: str, *, is_alike: bool) -> list[Lane]:
        nodes, found = networks.get(subnet, {}), dict[int, list[LaneEnd]]()
        for index, card in cards.items():
            ways = sorted(nodes.get(card.host, ()), key=lambda way: way.nic.name)
            found[index] = [
                LaneEnd(way.nic, way.address)
                for way in ways
                if way.nic.is_up
                and ":" not in way.nic.name  # a label of another interface's address
                and way.nic.name != nics[index].name
                and not (is_alike and (_differs(way.nic, nics[index]) or not way.nic.answers_for_itself))
            ]
        return [{index: own[n] for index, own in found.items()} for n in range(min(map(len, found.values())))]

    lanes, why, host = list[Lane](), None, cards[0].host
    own = next(
        (net for net, nodes in networks.items() if first[0] in {way.address for way in nodes.get(host, ())}), None
    )
    management = find_management(facts)
    if own not in (None, management) and all(nic.answers_for_itself for nic in nics.values()):
        lanes += ways_in(str(own), is_alike=True)
    if second is not None and second != own:
        lanes += (more := ways_in(second, is_alike=False))
        if not more:
            here = {host for host, ways in networks.get(second, {}).items() if any(way.nic.is_up for way in ways)}
            absent = fold_hosts(sorted({card.host for card in cards.values()} - here))
            why = f"Gloo uses one interface a node: {absent} has no interface in {second} (network.second) that is up"
    elif second is None and management not in (None, own) and not lanes:
        alike = next((net for net in networks if net not in (own, management) and ways_in(net, is_alike=True)), None)
        if alike is not None:
            why = f"Gloo uses one interface a node; if {alike} is for gradients, too, write second = "
            why += f'"{alike}" under [network] in cluster.toml'
    return lanes, why


def prove_lanes(
    cards: Mapping[int, Card],
    first: Mapping[int, str],
    try_pairs: Callable[[RoundOfTests, Mapping[int, str]], list[PairResult]],
    *,
    second: str | None = None,
    seed: int,
) -> tuple[dict[int, tuple[str, ...]], str | None]:
    """Return all data interfaces of each node if there are several, and why one was left out.

    Gloo needs equally many of each node, so a lane that fails between two nodes is left out on all.

    Args:
        cards: of all nodes.
        first: the address of each node on the data network.
        try_pairs: has nodes try each other at these addresses.
        second: further subnet, of cluster.toml.
        seed: as for `choose_pairs`.
    """
    lanes, why = find_lanes(cards, first, second=second)
    proven = []
    for lane in lanes:
        nodes, addresses = sorted(lane), {index: way.address for index, way in lane.items()}
        pairs = [(nodes[a], nodes[b]) for a, b in choose_pairs(len(nodes), full_up_to=FULL_UP_TO, seed=seed)]
        within_s = SPARSE_TESTS_S if len(nodes) > FULL_UP_TO else TESTS_S
        look = RoundOfTests(pairs, LARGE, within_s, is_one_by_one=False, reason="further data interfaces")
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


def _differs(nic: Interface, other: Interface) -> bool:
    return (nic.kind, nic.speed_mbit_s, nic.mtu) != (other.kind, other.speed_mbit_s, other.mtu)
