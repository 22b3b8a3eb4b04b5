"""From the observations of a roll call to findings: cards are matched with causes, pair tests go to blame. Pure.

Whatever `Observations` hold, in whatever order it came, the same findings follow, on every machine. Where two findings
have one reason, the more basic one stays: a node whose interface is down is not also a node that nothing reaches.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from allranks.causes.book import all_causes, find_cause, known_cause, traits_of
from allranks.causes.cause import Cause, Trait
from allranks.causes.outcome import Checks, Outcome, failed, warned
from allranks.causes.probes import CHECKS
from allranks.model.card import Card
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Finding, Result, Severity, Status
from allranks.model.fix import ANYBODY, Reader
from allranks.model.hostlist import fold_hosts
from allranks.model.membership import name_hosts
from allranks.model.pair import PairResult
from allranks.model.safe_text import as_one_line
from allranks.preflight.compare import compare_values, values_of
from allranks.preflight.links import judge_pairs
from allranks.preflight.untried import judge_untried
from allranks.preflight.vet import vet_card

MAX_FINDINGS = 100
"""The first of them name the culprits; a node that differs in everything would fill pages."""
MAX_EVIDENCES = 24
MAX_EVIDENCE = 4000
MAX_TEXT = 1000
"""Characters of a message, a fix."""
ALONE, NOTHING = "one node alone", "nothing to compare"
"""Why a comparison of nodes says nothing about one: no GPU, no RDMA device."""


class Stranger(NamedTuple):
    """Somebody who was not let in."""

    cause_id: str
    host: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """Everything that the roll call saw; nodes by their index."""

    cards: Mapping[int, Card]
    results: tuple[PairResult, ...] = ()
    quiet: tuple[PairResult, ...] = ()
    """Of the second look, one pair at a time."""
    missing: tuple[int, ...] = ()
    waited_s: float = 0.0
    left: Mapping[int, str] = field(default_factory=dict)
    """Nodes that joined, then disconnected, and why."""
    silent: frozenset[int] = frozenset()
    """Who did not report its pair tests in time."""
    strangers: tuple[Stranger, ...] = ()
    interfaces: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """The data interfaces of each node, where all have several on the same networks, and all nodes reach each other
    over each of them."""


class JobTerms(Protocol):
    """What of the roll call's terms the judgement depends on."""

    @property
    def num_nodes(self) -> int: ...  # noqa: D102
    @property
    def node_names(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def store_port(self) -> int | None: ...  # noqa: D102
    @property
    def ignored(self) -> frozenset[str]: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Judgement:
    """What it came to."""

    findings: tuple[Finding, ...]
    """Culprit first: what stops the job before what does not."""
    results: tuple[Result, ...]
    """Every cause on every node: the table of `allranks check`."""
    exit_code: int
    """0 where nothing stops the job."""

    @property
    def is_go(self) -> bool:
        """Whether the job may start."""
        return self.exit_code == Exit.OK


def judge(
    seen: Observations, terms: JobTerms, *, causes: Sequence[Cause] | None = None, checks: Mapping[str, Checks] = CHECKS
) -> Judgement:
    """Match what was seen with the causes.

    Args:
        seen: cards and results.
        terms: of the job.
        causes: which to look for; all by default.
        checks: how each cause is looked for, by its id.
    """
    by_index = {index: vet_card(seen.cards[index]) for index in sorted(seen.cards)}
    names = name_nodes(by_index)
    by_index = {index: msgspec.structs.replace(card, host=names[index]) for index, card in by_index.items()}
    cards = list(by_index.values())
    wanted = [cause for cause in (all_causes() if causes is None else causes) if cause.id not in terms.ignored]
    bench = _Bench({card.host: card.reader for card in cards})
    _judge_presence(seen, terms, names, bench)
    bench.add_problems([card for card in cards if card.problem is not None])
    for cause in wanted:
        bench.look_for(cause, checks.get(cause.id, Checks()), cards)
    bench.look_at_pairs(
        # Whoever is known not to answer is no news between nodes.
        [
            result
            for result in seen.results
            if not {names.get(result.source), names.get(result.target)} & bench.unreachable
        ],
        seen.quiet,
        by_index,
        wanted=wanted,
        store_port=terms.store_port,
    )
    allowed = {cause.id for cause in wanted}
    found = [located for located in bench.found if located.finding.cause_id not in terms.ignored]
    found = [
        located for located in found if located.finding.cause_id in allowed or located.finding.severity is Severity.FAIL
    ]
    shown = sorted(_without_echoes(found), key=lambda located: _rank(located.finding))[:MAX_FINDINGS]
    ordered = tuple(bench.name_waiting(located) for located in shown)
    return Judgement(ordered, tuple(bench.results), _exit_code(shown, cards))


def name_at(names: Sequence[str], index: int) -> str:
    """Return the name of a node that has sent no card, as the scheduler has it."""
    return names[index] if index < len(names) else f"node rank {index}"


def name_nodes(cards: Mapping[int, Card]) -> dict[int, str]:
    """Return a name for each node: its host, with a number where two agents share one."""
    indices = sorted(cards)
    return dict(zip(indices, name_hosts([cards[index].host for index in indices]), strict=True))


class _Found(NamedTuple):
    """A finding, and the nodes at fault, for which the others wait; empty where nobody waits."""

    finding: Finding
    culprits: Sequence[str] = ()


class _Bench:
    """Collects findings and the cells of the table."""

    def __init__(self, readers: Mapping[str, Reader]) -> None:
        self._nodes, self._readers = list(readers), readers
        self.found: list[_Found] = []
        self.results: list[Result] = []
        self.unreachable: set[str] = set()
        """Nodes of which it is known that nothing reaches them on the data network, and why."""

    def add(self, cause: Cause, culprits: Sequence[str], outcome: Outcome, *, named: str | None = None) -> None:
        """Note one outcome that is FAIL or WARN.

        Args:
            culprits: nodes at fault, or not told apart.
            named: how they are called together; None: as a list of hosts.
        """
        is_decided = outcome.confidence is not Confidence.UNDECIDED
        node = named or (_fold(culprits) if is_decided else " or ".join(culprits))
        is_fail = outcome.status is Status.FAIL
        if Trait.CUTS_ITS_NODE_OFF in cause.traits and is_fail:
            self.unreachable.update(culprits)
        reader = self._reader_at(culprits)
        finding = _bounded(outcome.to_finding(cause, node=node or None, reader=reader))
        self.found.append(_Found(finding, culprits if is_fail else ()))

    def _reader_at(self, culprits: Sequence[str]) -> Reader:
        """For whom is a fix for these nodes; one that has not come is as the others are."""
        readers = (self._readers[name] for name in (*culprits, *self._nodes) if name in self._readers)
        return next(readers, ANYBODY)

    def add_problems(self, cards: Sequence[Card]) -> None:
        """Note what nodes' own agents say against them; the same words of several nodes are one finding."""
        alike: dict[tuple[str, int], list[str]] = {}
        for card in cards:
            finding = card.problem_finding
            cause = known_cause(finding.cause_id) if finding is not None else None
            if finding is None or cause is None or cause.is_outcome:
                what = as_one_line(card.problem or "", at_most=MAX_TEXT)
                alike.setdefault((what, card.problem_exit), []).append(card.host)
                continue
            if Trait.CUTS_ITS_NODE_OFF in cause.traits:
                self.unreachable.add(card.host)
            # Whatever its agent thinks of it, the node does not take part: that stops the job.
            finding = msgspec.structs.replace(finding, cause=cause.label, severity=Severity.FAIL, ranks=(), victims=())
            finding = msgspec.structs.replace(finding, node=card.host)
            self.found.append(_Found(_bounded(finding), (card.host,)))
        for (what, _), hosts in alike.items():
            self.add(find_cause("AR512"), hosts, failed(what=what))

    def name_waiting(self, found: _Found) -> Finding:
        """The finding with who merely waits: only of those that are shown, since it is a list of all nodes."""
        if not found.culprits:
            return found.finding
        known = set(found.culprits)
        others = _fold([node for node in self._nodes if node not in known])
        return msgspec.structs.replace(found.finding, waiting=others or None)

    def look_for(self, cause: Cause, checks: Checks, cards: Sequence[Card]) -> None:
        """Look for one cause on all nodes, in all the ways that cards allow."""
        try:
            self._look_for(cause, checks, cards)
        except Exception:
            self._note_crash([cause])

    def look_at_pairs(
        self,
        results: Sequence[PairResult],
        quiet: Sequence[PairResult],
        cards: Mapping[int, Card],
        *,
        wanted: Sequence[Cause],
        store_port: int | None,
    ) -> None:
        """Look for what shows between nodes."""
        try:
            judged = (*judge_pairs(results, quiet, cards, store_port=store_port), *judge_untried(results, cards))
            for verdict in judged:
                self.add(find_cause(verdict.cause_id), verdict.nodes, verdict.outcome, named=verdict.culprit)
        except Exception:
            self._note_crash([cause for cause in wanted if cause.symptoms])

    def _note_crash(self, causes: Sequence[Cause]) -> None:
        """A broken check must not stop a job, nor pass."""
        note = as_one_line(traceback.format_exc(limit=-1).strip().rpartition("\n")[2])
        self.results += [
            Result(cause=cause.label, node=node, status=Status.CRASH, note=note)
            for cause in causes
            for node in self._nodes
        ]

    def _look_for(self, cause: Cause, checks: Checks, cards: Sequence[Card]) -> None:
        statuses: dict[str, tuple[Status, str]] = {}
        # The same outcome on several nodes is one finding.
        probed: dict[tuple[str, str], tuple[Outcome, list[str]]] = {}
        for card in cards:
            outcome = checks.probe(card) if checks.probe is not None else None
            if outcome is None:
                continue
            statuses[card.host] = (outcome.status, outcome.note)
            if outcome.status in (Status.FAIL, Status.WARN):
                key = repr((outcome.status, outcome.interface, sorted(outcome.values.items(), key=str))), ""
                probed.setdefault(key, (outcome, []))[1].append(card.host)
        found = [(tuple(hosts), outcome) for outcome, hosts in probed.values()]
        surveyed = checks.survey(cards) if checks.survey is not None else None
        alike = values_of(checks, cards)
        compared = compare_values(alike, checks.severity_of) if checks.alike is not None else None
        if surveyed is not None or compared is not None:
            found += [*(surveyed or ()), *(compared or ())]
            passed = (Status.PASS, "") if surveyed is not None or len(cards) > 1 else (Status.SKIP, ALONE)
            for card in cards:
                is_seen = surveyed is not None or card.host in alike
                statuses.setdefault(card.host, passed if is_seen else (Status.SKIP, NOTHING))
        # A check that breaks half-way has found nothing: all messages first.
        is_bad = (Status.FAIL, Status.WARN)
        notes = [seen.to_finding(cause).message if seen.status in is_bad else seen.note for _, seen in found]
        for (hosts, outcome), note in zip(found, notes, strict=True):
            if outcome.status in is_bad:
                self.add(cause, hosts, outcome)
            for host in hosts:
                if statuses.get(host, (Status.PASS, ""))[0] is not Status.FAIL:
                    statuses[host] = (outcome.status, note)
        plain = {note: as_one_line(note) for _, note in statuses.values()}
        self.results += [
            Result(cause=cause.label, node=host, status=status, note=plain[note])
            for host, (status, note) in statuses.items()
        ]


def _judge_presence(seen: Observations, terms: JobTerms, names: Mapping[int, str], bench: _Bench) -> None:
    silent_node, left_node = find_cause("AR001"), find_cause("AR012")
    here = f"{len(seen.cards)} of {terms.num_nodes} nodes joined"
    gone = [index for index in seen.missing if index not in seen.left]
    if gone:
        missing = [name_at(terms.node_names, index) for index in gone]
        outcome = failed(what=f"the node's agent did not join within {seen.waited_s:.0f} s; {here}")
        bench.add(silent_node, missing, outcome)
    for index, reason in seen.left.items():
        node = names.get(index) or name_at(terms.node_names, index)
        bench.add(left_node, (node,), failed(reason, what="the node's agent joined the roll call, then disconnected"))
    silent = [names[index] for index in sorted(seen.silent & set(names))]
    if silent:
        bench.add(silent_node, silent, failed(what="the node's agent joined, then stopped answering"))
        bench.unreachable.update(silent)  # that it answers no test either is no news
    for stranger in seen.strangers:
        what = f"the leader rejected {stranger.host}, which tried to join"
        bench.add(find_cause(stranger.cause_id), (stranger.host,), warned(stranger.reason, what=what))


def _fold(nodes: Sequence[str]) -> str:
    return fold_hosts(list(nodes)) if all(" " not in node for node in nodes) else ", ".join(nodes)


def _bounded(finding: Finding) -> Finding:
    """The finding with texts that a verdict of hundreds of them can carry to hundreds of nodes."""
    evidence = [
        msgspec.structs.replace(shown, seen=shown.seen[:MAX_EVIDENCE], source=shown.source and shown.source[:MAX_TEXT])
        for shown in finding.evidence[:MAX_EVIDENCES]
    ]
    return msgspec.structs.replace(
        finding,
        message=as_one_line(finding.message, at_most=MAX_TEXT),
        interface=finding.interface and as_one_line(finding.interface, at_most=MAX_TEXT),
        fix=finding.fix and as_one_line(finding.fix, at_most=MAX_TEXT),
        evidence=tuple(evidence),
    )


def _without_echoes(found: Sequence[_Found]) -> list[_Found]:
    """Leave out what another finding says already: the same cause of the same culprit."""
    kept: dict[tuple[str, str | None, str | None], _Found] = {}
    for located in found:
        finding = located.finding
        words = None if Trait.ONCE_A_NODE in traits_of(finding.cause_id) else finding.message
        key = (finding.cause, finding.node, words)
        kept.setdefault(key, located)
    return list(kept.values())


def _rank(finding: Finding) -> tuple[bool, int, str]:
    certainty = list(Confidence).index(finding.confidence)
    return (finding.severity is not Severity.FAIL, certainty, finding.cause)


def _exit_code(found: Sequence[_Found], cards: Sequence[Card]) -> int:
    fails = [located for located in found if located.finding.severity is Severity.FAIL]
    if not fails:
        return Exit.OK
    problems = {card.host: card.problem_exit for card in cards if card.problem is not None}
    culprits = fails[0].culprits
    if culprits and problems.keys() >= set(culprits):
        return problems[culprits[0]]
    # What leaving nodes out cures is worth another try only if that cures everything.
    codes = {int(find_cause(located.finding.cause_id).exit_code) for located in fails}
    return int(Exit.NODE_FAULT) if codes == {int(Exit.NODE_FAULT)} else int(Exit.SETUP)
