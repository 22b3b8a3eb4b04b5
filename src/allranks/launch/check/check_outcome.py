"""What is the result of a check? From observations to one status per cause and node, findings, and an exit code. Pure.

preflight.judge applies the known causes to node reports and pair tests. This module adds the cells of the table that it
does not fill: the pairs of nodes, and whether a node answered at all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from allranks.causes.book import all_causes, select_causes
from allranks.causes.cause import Cause, Symptom, Trait
from allranks.causes.probes import ways_to_find
from allranks.launch.check.check_step import Held
from allranks.model.errors import Exit, HostlistError, UsageError
from allranks.model.finding import Confidence, Finding, Result, Severity, Status
from allranks.model.hostlist import expand_hosts
from allranks.preflight.judge import ALONE, judge, name_at, name_nodes
from allranks.preflight.symptoms import has_tried_large, is_untried

_WORST_FIRST = (Status.FAIL, Status.CRASH, Status.WARN, Status.UNKNOWN, Status.PASS, Status.SKIP)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOutcome:
    """Result of a check."""

    nodes: tuple[str, ...]
    """In the order of the nodes, silent nodes included."""
    results: tuple[Result, ...] = ()
    """By cause, then by node."""
    findings: tuple[Finding, ...] = ()
    exit_code: int = Exit.OK
    figures: tuple[Mapping[str, object], ...] | None = None
    """Of the collectives: times and bandwidths, one entry per pair and per GPU; None: none were run."""


@functools.cache
def checks() -> dict[str, tuple[Cause, tuple[str, ...]]]:
    """Return every cause that a check can find, by id, and how: `on each node`, `between pairs of nodes`."""
    found = {}
    for cause in all_causes():
        ways = [
            f"{way}: {what.rstrip('.')}" if way.startswith("by ") else way
            for way, what in ways_to_find(cause).items()
            if way != "in logs"
        ]
        if ways and not cause.is_outcome:
            found[cause.id] = (cause, tuple(ways))
    return found


def choose_checks(select: Sequence[str], ignore: Sequence[str]) -> tuple[Cause, ...]:
    """Return the causes to check.

    Args:
        select: ids, names, aliases or prefixes of ids; empty: all.
        ignore: the same, for causes to skip.
    Raises:
        UsageError: one of them is no cause, or no check is left.
    """
    chosen, known = select_causes(select, ignore), checks()
    left = tuple(cause for cause in chosen if cause.id in known)
    if not left:
        if len(chosen) == 1 and not ignore:
            raise UsageError(
                f"allranks check does not test for {chosen[0].label}; allranks check --list prints all its checks"
            )
        raise UsageError("--select and --ignore leave no check to run; allranks check --list prints all checks")
    return left


def judge_check(
    held: Held, wanted: Collection[Cause], *, ignored: Collection[str] = (), skipped: Mapping[str, str] = {}
) -> CheckOutcome:
    """Apply the known causes to the observations.

    Args:
        wanted: causes to check; missing nodes are always reported.
        ignored: ids that are not reported even then.
        skipped: id -> why it cannot be judged in this check.
    """
    always = (cause for cause in all_causes() if Trait.KEEPS_ITS_NODE_OUT in cause.traits)
    chosen = {cause.id for cause in (*wanted, *always)} - set(ignored)
    left_out = {cause.id for cause in all_causes()} - (chosen - skipped.keys())
    judgement = judge(held.seen, msgspec.structs.replace(held, ignored=frozenset(left_out)))
    names = name_nodes(held.seen.cards)
    results = [*judgement.results]
    for cause in (known for known in all_causes() if known.id in chosen):
        for index, name in names.items():
            cell = (Status.SKIP, skipped[cause.id]) if cause.id in skipped else _between_nodes(held, cause, index)
            if cell is not None:
                results.append(Result(cause=cause.label, node=name, status=cell[0], note=cell[1]))
    absent = {i: name_at(held.node_names, i) for i in {*held.seen.missing, *held.seen.left} - names.keys()}
    nodes = tuple(name for _, name in sorted({**names, **absent}.items()))
    return add_more(CheckOutcome(nodes=nodes), results, judgement.findings)


def add_more(outcome: CheckOutcome, results: Sequence[Result], findings: Sequence[Finding]) -> CheckOutcome:
    """Return the outcome with further results on the same nodes: of each cause on each node, the worst status counts.

    A finding is the status of the nodes that it names, too.
    """
    # First what stops the job: a further check runs only without it.
    findings = (*findings, *outcome.findings)
    of_findings = [
        Result(cause=finding.cause, node=node, status=Status(finding.severity), note=finding.message)
        for finding in findings
        for node in _named(finding)
    ]
    cells: dict[tuple[str, str], Result] = {}
    for result in sorted((*outcome.results, *results, *of_findings), key=lambda one: _WORST_FIRST.index(one.status)):
        cells.setdefault((result.cause, result.node), result)
    order = {node: place for place, node in enumerate(outcome.nodes)}
    kept = sorted(cells.values(), key=lambda cell: (cell.cause, order.get(cell.node, len(order)), cell.node))
    is_open = any(result.status in (Status.UNKNOWN, Status.CRASH) for result in kept)
    is_bad = any(finding.severity is Severity.FAIL for finding in findings)
    exit_code = Exit.USER_CODE if is_bad else Exit.UNKNOWN if is_open else Exit.OK
    return replace(outcome, results=tuple(kept), findings=findings, exit_code=exit_code)


def nodes_to_exclude(outcome: CheckOutcome) -> tuple[list[str], list[str]]:
    """Return the nodes that a job should exclude, and a line about every finding that excludes none.

    A link, a partition or an undecided culprit excludes no node: a person has to decide which end to exclude.
    """
    excluded, left = set[str](), list[str]()
    for finding in (failure for failure in outcome.findings if failure.severity is Severity.FAIL):
        named = set(_named(finding))
        if finding.confidence is Confidence.UNDECIDED or not named or not named <= set(outcome.nodes):
            left.append(f"{finding.cause} ({finding.node or 'no node'}) excludes no node: {finding.message}")
        else:
            excluded |= named
    names = [node for node in outcome.nodes if node in excluded]
    if names and len(names) == len(outcome.nodes):
        left.append("all checked nodes are at fault: excluding nodes does not cure it")
    return names, left


def _named(finding: Finding) -> list[str]:
    """Return the nodes that a finding names; for a link, its text."""
    text = finding.node or ""
    with contextlib.suppress(HostlistError):
        if " " not in text:
            return expand_hosts(text)
    return [text] if text else []


def _between_nodes(held: Held, cause: Cause, index: int) -> tuple[Status, str] | None:
    """Return a cell that no node report fills: whether a node answered, and what its pair tests showed."""
    if not cause.roll_call and not cause.symptoms:
        return None
    if held.num_nodes == 1 and Trait.KEEPS_ITS_NODE_OUT not in cause.traits:
        return Status.SKIP, ALONE
    if cause.roll_call:
        return Status.PASS, ""
    if held.seen.cards[index].problem is not None:
        return Status.SKIP, "the node cannot take part in the tests"
    results = held.seen.results
    own = [result for result in results if result.source == index]
    if crashed := next((result.problem for result in own if result.problem), None):
        return Status.CRASH, crashed
    if untried := next((result for result in own if is_untried(result)), None):
        return Status.UNKNOWN, f"not tested from here: {next(iter(untried.closed.values()))}"
    if index in held.seen.silent or not (own or any(result.target == index for result in results)):
        return Status.UNKNOWN, "no pair with this node was tested"
    if cause.symptoms == (Symptom.LARGE_LOST,) and not any(
        result.datagrams or has_tried_large(result) for result in results
    ):
        return Status.SKIP, "not tested between this many nodes"
    return Status.PASS, ""
