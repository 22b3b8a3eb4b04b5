"""What a job came to, in a verdict and in lines for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from allranks.guard.judged import name_fault
from allranks.launch.plan import count_of
from allranks.model.finding import Finding, Severity, Verdict
from allranks.model.hostlist import fold_hosts


def as_survived(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings of faults that the job got over: they stop nobody any more."""
    return tuple(msgspec.structs.replace(each, severity=Severity.WARN) for each in findings)


def crash_loop(finding: Finding, step: int | None) -> Finding:
    """Return the finding that another start does not help: the same crash came back."""
    what = f"the same crash came back at step {step} after a restart: {finding.cause}: {finding.message}"
    return name_fault("AR509", what, node=finding.node, ranks=finding.ranks)


def below_minimum(num_nodes: int, min_nodes: int, waited_s: float, checkpoint: int | None) -> Finding:
    """Return the finding that too few nodes are left, and none came in time."""
    last = "there is no checkpoint" if checkpoint is None else f"the last checkpoint is of step {checkpoint}"
    what = f"{num_nodes} of at least {min_nodes} nodes for {waited_s:.0f} s; {last}"
    return name_fault("AR608", what)


def as_event(finding: Finding) -> dict[str, object]:
    """Return what events.jsonl holds of a finding."""
    names = ("cause", "node", "ranks", "confidence", "message")
    return {name: getattr(finding, name) for name in names}


def describe_restart(
    generation: int,
    nodes: Sequence[str],
    without: Sequence[str],
    checkpoint: int | None,
    *,
    num_left: int,
    is_tracked: bool = True,
) -> str:
    """`restart 1 on 5 nodes without node03, from the checkpoint of step 120; 2 more restarts left`.

    Args:
        generation: the next one.
        nodes: that it runs on.
        without: those that are left out.
        checkpoint: step of the newest one that allranks knows of.
        num_left: restarts after this one.
        is_tracked: whether the script tells of its steps; else what it saves is its own affair.
    """
    where = f"from the checkpoint of step {checkpoint}"
    if checkpoint is None:
        where = "from the beginning" if is_tracked else "from what the script itself has saved"
    left = f" without {fold_hosts(without)}" if without else ""
    more = count_of(num_left, "more restart")
    return f"restart {generation} on {count_of(len(nodes), 'node')}{left}, {where}; {more} left"


def describe_pause(num_nodes: int, min_nodes: int, left_s: float, capacity_s: float) -> str:
    """`paused: 3 of at least 4 nodes; waiting for capacity, 9:40 left (--capacity-timeout 600)`."""
    left = f"{int(left_s) // 60}:{int(left_s) % 60:02d}"
    here = f"{num_nodes} of at least {min_nodes} nodes"
    return f"paused: {here}; waiting for capacity, {left} left (--capacity-timeout {capacity_s:.0f})"


def summarize(verdict: Verdict) -> str:
    """Return one line for nodes whose terminal is not the leader's; empty when all is well."""
    if not verdict.exit_code or not verdict.findings:
        return ""
    culprit = verdict.findings[0]
    ranks = ",".join(map(str, culprit.ranks))
    who = f"rank {ranks} on {culprit.node}" if ranks else culprit.node or "the job"
    return f"{culprit.cause}: {who}: {culprit.message}"
