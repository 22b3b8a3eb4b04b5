"""From the results of the pair tests to culprits: which symptom a pair shows, and who explains it. Pure.

A pair shows its most basic symptom: where nothing comes through, a failure of large packets adds no information. Each
symptom is blamed on its own, on the graph of the pairs that do not show a more basic one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from allranks.causes.cause import Symptom
from allranks.causes.outcome import Outcome
from allranks.model.card import Card, Interface
from allranks.model.finding import Confidence, Status
from allranks.model.hostlist import fold_hosts
from allranks.model.pair import PairResult
from allranks.preflight.pair_blame import Blame, Edge, Kind, blame
from allranks.preflight.roster import mtu_of
from allranks.preflight.symptoms import (
    filtered_ports,
    has_large_passed,
    has_tried_large,
    is_heavy_loss,
    is_kept_closed,
    is_untried,
    own_errno,
    slow_nodes,
    symptom_of,
)
from allranks.preflight.vet import is_plausible

MIN_LOST = 3
LOSS = 0.01
"""Share of lost datagrams, in an undisturbed test, from which TCP suffers."""
MAX_REASONS = 4
"""Different answers of closed ports that are shown."""
CLOCK_S = 1.0
"""Clocks that differ by more mislead whoever reads logs side by side; the measurement itself is off by half a round
trip, milliseconds on a busy machine."""


class LinkVerdict(NamedTuple):
    """One thing that is wrong between nodes."""

    cause_id: str
    culprit: str
    """As it is named: `node03`, `node01 -> node04`, `node[01-03] | node[04-06]`, `node01 or node02`."""
    nodes: tuple[str, ...]
    """Who is part of it."""
    outcome: Outcome


def judge_pairs(
    results: Sequence[PairResult],
    quiet: Sequence[PairResult],
    cards: Mapping[int, Card],
    *,
    store_port: int | None,
) -> list[LinkVerdict]:
    """Name who explains the pair tests that did not go well.

    Args:
        results: of the last time each pair was tried, all at the same time.
        quiet: of the second look, one pair at a time.
        cards: by node index; their hosts are the names.
        store_port: the leader's port.
    """
    tests = _Tests({index: card.host for index, card in cards.items()}, cards)
    # Of nodes that have left since, nothing is said.
    results, quiet = (
        [result for result in tried if result.source in cards and result.target in cards and is_plausible(result)]
        for tried in (results, quiet)
    )
    shown = [_Shown(result, tests.common_mtu(result)) for result in results if result.problem is None]
    lossy = _lossy(tests, shown, quiet)
    losers = {verdict.culprit for verdict in lossy}
    # A node that loses much is now and then not reached at all, one way: ARP asks once a second.
    silent = {tested.pair for tested in shown if tested.symptom is Symptom.SILENT}
    clear = [
        tested
        for tested in shown
        if tested.pair not in silent or tested.pair[::-1] in silent or not tests.ends(tested.result) & losers
    ]
    return [
        *_silent(tests, clear),
        *lossy,
        *_filtered(tests, shown),
        *_store_filtered(tests, shown, store_port),
        *_large_lost(tests, shown),
        # TCP slows down where packets are lost.
        *(verdict for verdict in _slow(tests, quiet) if verdict.culprit not in losers),
        *_clocks(tests, results),
    ]


class _Tests:
    """Names for nodes, and what a blame reads like."""

    def __init__(self, names: Mapping[int, str], cards: Mapping[int, Card]) -> None:
        self.names = names
        self.cards = cards
        self._all = frozenset(names.values())
        self._mtus = {index: mtu_of(card) for index, card in cards.items()}
        self._by_name = {card.host: card for card in cards.values()}

    def card_of(self, name: str) -> Card:
        return self._by_name[name]

    def ends(self, result: PairResult) -> set[str]:
        return {self.names[result.source], self.names[result.target]}

    def common_mtu(self, result: PairResult) -> int | None:
        return min(filter(None, (self._mtus[result.source], self._mtus[result.target])), default=None)

    def edges(self, results: Iterable[tuple[PairResult, bool]]) -> list[Edge]:
        return [Edge(self.names[result.source], self.names[result.target], is_ok) for result, is_ok in results]

    def peers(self, found: Blame) -> str:
        culprits = {node for group in found.groups for node in group}
        if found.kind is not Kind.NODE:
            return found.culprit.rpartition(" ")[2]
        met = {node for edge in found.explains for node in (edge.source, edge.target)} - culprits
        # Both are without the culprits, which are all among the nodes.
        if len(met) == len(self._all) - len(culprits) > 1:
            return "every other node"
        return fold_hosts(sorted(met))

    def interface(self, found: Blame) -> str | None:
        if found.kind is not Kind.NODE:
            return None
        return self.card_of(found.groups[0][0]).data_interface

    def common_interface(self) -> dict[str, object]:
        """The name of the data interface for commands, where all nodes call it the same."""
        names = {card.data_interface for card in self.cards.values()}
        return {"interface": names.pop()} if len(names) == 1 and None not in names else {}

    def outcome(self, found: Blame, status: Status, *evidence: str, **values: object) -> Outcome:
        decide = [f"to be certain: {found.would_decide}"] if found.would_decide else []
        seen = f"{found.num_failed} pair tests failed; {found.num_passed} tests of the same nodes passed"
        named = {"culprit": found.culprit, "peers": self.peers(found), **self.common_interface(), **values}
        return Outcome(
            status,
            values=named,
            evidence=(*evidence, seen, *decide),
            interface=self.interface(found),
            confidence=found.confidence if found.kind is not Kind.UNDECIDED else Confidence.UNDECIDED,
        )


class _Shown:
    """A result with the most basic symptom that it shows."""

    def __init__(self, result: PairResult, common_mtu: int | None) -> None:
        self.result = result
        self.common_mtu = common_mtu
        self.symptom = symptom_of(result, common_mtu)
        self.pair = (result.source, result.target)


def _blame_symptom(tests: _Tests, shown: Sequence[_Shown], symptom: Symptom) -> list[tuple[Blame, list[_Shown]]]:
    failed = {
        (tests.names[tested.result.source], tests.names[tested.result.target]): tested
        for tested in shown
        if tested.symptom is symptom
    }
    if not failed:
        return []  # as in most roll calls: what passed between many nodes is not gone through again
    found = blame(tests.edges((tested.result, tested.symptom is not symptom) for tested in shown))
    return [(blamed, [failed[edge.source, edge.target] for edge in blamed.explains]) for blamed in found]


def _silent(tests: _Tests, shown: Sequence[_Shown]) -> list[LinkVerdict]:
    judged = []
    for found, explained in _blame_symptom(tests, shown, Symptom.SILENT):
        culprit, peers = found.culprit, tests.peers(found)
        network = "on the data network; the agents still reach each other over another path"
        what = f"no packets pass between {culprit} and {peers} {network}"
        cause, evidence = "AR210", []
        if found.kind is Kind.PARTITION:
            cause = "AR211"
            groups = " and ".join(fold_hosts(list(group)) for group in found.groups)
            what = f"no packets pass between {groups} {network}"
            evidence = _differences(tests, found)
        elif found.kind is Kind.LINK:
            cause = "AR211"
            what = f"no packets pass from {culprit.replace(' -> ', ' to ')} {network}"
            if not found.is_one_way:
                what = f"no packets pass between {' and '.join(g[0] for g in found.groups)} {network}"
            evidence = ["both nodes reach the other nodes"]
        elif found.kind is Kind.UNDECIDED:
            what = f"no packets pass between {culprit.replace(' or ', ' and ')} {network}"
        outcome = tests.outcome(found, Status.FAIL, *evidence, *_no_routes(tests, explained), what=what)
        judged.append(LinkVerdict(cause, culprit, _nodes(found), outcome))
    return judged


def _no_routes(tests: _Tests, shown: Iterable[_Shown]) -> list[str]:
    """What the testers' own kernels said: `node01 to node02: No route to host (EHOSTUNREACH)`."""
    said = {
        f"{tests.names[tested.result.source]} to {tests.names[tested.result.target]}: {why}": None
        for tested in shown
        for why in tested.result.closed.values()
        if own_errno(why)
    }
    return list(said)[:MAX_REASONS]


def _lossy(tests: _Tests, shown: Sequence[_Shown], quiet: Sequence[PairResult]) -> list[LinkVerdict]:
    looked = {(result.source, result.target): result for result in quiet if result.datagrams_sent}
    graph: list[tuple[PairResult, bool]] = []
    for result in (shown_each.result for shown_each in shown if shown_each.symptom is not Symptom.SILENT):
        again = looked.get((result.source, result.target))
        if again is not None and again.datagrams_lost < again.datagrams_sent:
            lost, sent = again.datagrams_lost, again.datagrams_sent
            graph.append((again, not (lost >= MIN_LOST and lost / sent >= LOSS)))
        elif result.datagrams_sent and result.datagrams_lost == 0:
            graph.append((result, True))
    graph += [
        (tested.result, False)
        for tested in shown
        if tested.symptom is Symptom.LOSSY and (tested.result.source, tested.result.target) not in looked
    ]
    judged: list[LinkVerdict] = []
    if all(is_ok for _, is_ok in graph):
        return judged
    # Where a node loses a few, a pair of it may have been lucky: only the second look speaks for a pair of a loser.
    by_names = {(tests.names[result.source], tests.names[result.target]): result for result, _ in graph}
    light = [result for result, is_ok in graph if not is_ok and not is_heavy_loss(result)]
    losers = {tests.names[node] for result in light for node in (result.source, result.target)}
    edges = [
        edge
        for edge, (result, _) in zip(tests.edges(graph), graph, strict=True)
        if (result.source, result.target) in looked or not edge.is_ok or not {edge.source, edge.target} & losers
    ]
    for found in blame(edges):
        explained = [by_names[edge.source, edge.target] for edge in found.explains]
        lost, sent = (sum(getattr(result, f"datagrams_{what}") for result in explained) for what in ("lost", "sent"))
        one_way = 1 - math.sqrt(max(0.0, 1 - lost / max(sent, 1)))
        retransmits = sum(result.retransmits for result in explained)
        if not retransmits:
            continue  # a busy agent drops datagrams; a network that does drops segments, too
        seen = f"{lost} of {sent} datagrams were lost, and TCP retransmitted {retransmits} segments"
        outcome = tests.outcome(found, Status.FAIL, seen, percent=f"{100 * one_way:.2g}")
        judged.append(LinkVerdict("AR212", found.culprit, _nodes(found), outcome))
    return judged


def _filtered(tests: _Tests, shown: Sequence[_Shown]) -> list[LinkVerdict]:
    # A pair that loses packets speaks for its ends where some port is open.
    known = [
        tested
        for tested in shown
        if tested.symptom is not Symptom.SILENT and (tested.symptom is not Symptom.LOSSY or tested.result.num_open)
        if not is_untried(tested.result)
    ]
    judged = []
    for found, explained in _blame_symptom(tests, known, Symptom.FILTERED):
        failing = [tested.result for tested in explained]
        closed = sum(len(filtered_ports(result)) for result in failing)
        tried = sum(len(result.closed) + result.num_open for result in failing)
        reasons = sorted({reason for result in failing for reason in filtered_ports(result).values()})
        where = found.culprit
        between = where if found.kind is Kind.LINK else f"{where} and {tests.peers(found)}"
        between = between.replace(" <-> ", " and ").replace(" -> ", " and ")
        what = f"{closed} of {tried} TCP ports of the ephemeral range do not answer between {between}"
        examples = sorted({port for result in failing for port in filtered_ports(result)})[:4]
        told = "; ".join(reasons[:MAX_REASONS])
        seen = f"for example port {', '.join(map(str, examples))}: {told}; other packets pass"
        outcome = tests.outcome(found, Status.FAIL, seen, what=what, ports=_port_range(tests), where=where)
        judged.append(LinkVerdict("AR206", where, _nodes(found), outcome))
    return judged


def _store_filtered(tests: _Tests, shown: Sequence[_Shown], store_port: int | None) -> list[LinkVerdict]:
    basic = (Symptom.SILENT, Symptom.LOSSY)
    known = [tested.result for tested in shown if tested.symptom not in basic]
    asked = [result for result in known if result.store is not None and result.target == 0]
    silent = [result for result in asked if is_kept_closed(result.store)]
    if not silent:
        return []
    leader = tests.names[0]
    sources = fold_hosts([tests.names[result.source] for result in silent])
    everybody = len(silent) == len(asked)
    culprit = leader if everybody or len(silent) > 1 else f"{sources} -> {leader}"
    whom = f"none of {len(asked)} nodes" if everybody and len(asked) > 1 else ""
    what = f"port {store_port} of {leader} {f'answers {whom}' if whom else f'does not answer {sources}'}"
    what += ", but its other ports answer"
    outcome = Outcome(
        Status.FAIL,
        values={"what": what, "ports": f"port {store_port}", "where": leader, "culprit": culprit, "peers": sources},
        evidence=tuple(
            f"{fold_hosts([tests.names[result.source] for result in silent if result.store == why])}: {why}"
            for why in sorted({result.store or "" for result in silent})[:MAX_REASONS]
        ),
        confidence=Confidence.CERTAIN,
    )
    nodes = (leader,) if culprit == leader else (tests.names[silent[0].source], leader)
    return [LinkVerdict("AR206", culprit, nodes, outcome)]


def _large_lost(tests: _Tests, shown: Sequence[_Shown]) -> list[LinkVerdict]:
    basic = (Symptom.SILENT, Symptom.LOSSY, Symptom.FILTERED)
    # Between many nodes few pairs send anything large: the others say nothing of it.
    tried = [tested for tested in shown if has_tried_large(tested.result) or has_large_passed(tested.result)]
    known = [tested for tested in tried if tested.symptom not in basic]
    judged = []
    for found, explained in _blame_symptom(tests, known, Symptom.LARGE_LOST):
        failing = [tested.result for tested in explained]
        lost = [size for result in failing for size, came in result.datagrams.items() if not came]
        passed = [size for result in failing for size, came in result.datagrams.items() if came]
        mtu = max((tested.common_mtu for tested in explained if tested.common_mtu), default=0) or "(unknown)"
        path_mtu = max(passed, default=min([576, *lost]))
        worst = max(failing, key=lambda result: result.unacked_bytes)
        seen = [f"datagrams of {max(passed)} bytes pass, those of {min(lost)} bytes do not" if passed and lost else ""]
        if worst.large_sent and worst.large_s is None:
            seen.append(
                f"{tests.names[worst.source]} -> {tests.names[worst.target]}: {worst.large_back} of "
                f"{worst.large_sent} bytes came back, {worst.unacked_bytes} unacknowledged, "
                f"{worst.retransmits} retransmits"
            )
        outcome = tests.outcome(found, Status.FAIL, *filter(None, seen), path_mtu=path_mtu, mtu=mtu)
        judged.append(LinkVerdict("AR204", found.culprit, _nodes(found), outcome))
    return judged


def _slow(tests: _Tests, quiet: Sequence[PairResult]) -> list[LinkVerdict]:
    judged = []
    for node, slow in sorted(slow_nodes(quiet).items()):
        name = tests.names[node]
        rates = {
            tests.names[result.target if result.source == node else result.source]: result.delivery_mbit_s
            for result in quiet
            if node in (result.source, result.target) and result.delivery_mbit_s
        }
        outcome = Outcome(
            Status.FAIL,
            values={
                "culprit": name,
                "peers": fold_hosts(sorted(rates)),
                "mbit_s": f"{slow.mbit_s:.0f}",
                "usual_mbit_s": f"{slow.usual_mbit_s:.0f}",
            },
            evidence=(f"tested one at a time with {fold_hosts(sorted(rates))}: no faster",),
            interface=tests.cards[node].data_interface,
            confidence=Confidence.CERTAIN,
        )
        judged.append(LinkVerdict("AR213", name, (name,), outcome))
    return judged


def _clocks(tests: _Tests, results: Sequence[PairResult]) -> list[LinkVerdict]:
    known = [result for result in results if result.clock_offset_s is not None]
    judged: list[LinkVerdict] = []
    if all(abs(result.clock_offset_s or 0.0) <= CLOCK_S for result in known):
        return judged
    edges = tests.edges((result, abs(result.clock_offset_s or 0.0) <= CLOCK_S) for result in known)
    for found in blame(edges):
        nodes = {node for group in found.groups for node in group}
        offsets = [
            (result.clock_offset_s or 0.0) * (1 if tests.names[result.target] in nodes else -1)
            for result in known
            if tests.names[result.target] in nodes or tests.names[result.source] in nodes
        ]
        offset = max(offsets, key=abs, default=0.0)
        outcome = tests.outcome(found, Status.WARN, offset_s=f"{offset:+.1f}")
        judged.append(LinkVerdict("AR007", found.culprit, _nodes(found), outcome))
    return judged


def _nodes(found: Blame) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node for group in found.groups for node in group))


def _nic(card: Card) -> Interface | None:
    interfaces = card.facts.interfaces if card.facts else ()
    return next((nic for nic in interfaces if nic.name == card.data_interface), None)


def _port_range(tests: _Tests) -> str:
    ranges = {card.facts.port_range for card in tests.cards.values() if card.facts and card.facts.port_range}
    if not ranges:
        return "the ephemeral TCP ports (sysctl net.ipv4.ip_local_port_range)"
    low, high = min(first for first, _ in ranges), max(last for _, last in ranges)
    return f"TCP ports {low} to {high}"


def _differences(tests: _Tests, found: Blame) -> list[str]:
    """What all nodes of one group have alike and the other group has otherwise: where to look for the reason."""
    told = []
    for what in ("subnet", "interface", "MTU", "kernel"):
        per_group = [{_describe(tests.card_of(name), what) for name in group} for group in found.groups]
        if all(len(values) == 1 for values in per_group) and len({min(values) for values in per_group}) > 1:
            values = ", ".join(
                f"{fold_hosts(list(group))} {min(figures)}"
                for group, figures in zip(found.groups, per_group, strict=True)
            )
            told.append(f"the groups differ in {what}: {values}")
    return told or ["both groups have the same subnet, interface, MTU and kernel: check the switches between them"]


def _describe(card: Card, what: str) -> str:
    nic = _nic(card)
    match what:
        case "subnet":
            return ",".join(nic.networks) if nic else "?"
        case "interface":
            return card.data_interface or "?"
        case "MTU":
            return str(nic.mtu) if nic else "?"
        case _:
            return (card.facts.kernel if card.facts else None) or "?"
