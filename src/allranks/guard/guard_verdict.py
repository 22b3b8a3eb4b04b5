"""What the guard concludes: a proven fault, its culprit, and what follows for the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allranks.causes.book import find_cause
from allranks.model.finding import Confidence, Evidence, Finding, Severity
from allranks.model.fix import ANYBODY, Fix, Reader


@dataclass(frozen=True, slots=True)
class GuardVerdict:
    """One verdict on a running job."""

    findings: tuple[Finding, ...]
    """The culprit's first."""
    exit_code: int
    """Of the job, where nobody starts it again."""
    ranks: tuple[int, ...] = ()
    """Culprits; none where a link or nobody is."""
    nodes: tuple[int, ...] = ()
    """Indices in the Plan of the nodes to go on without; where two cannot be told apart, the one that is easier to
    miss (never the leader's). None where no node is at fault."""
    lost: tuple[int, ...] = ()
    """Indices in the Plan of the nodes whose machines do not answer."""
    cures: bool = False
    """Leaving out `nodes` cures it: the node or its link is at fault, and not what runs there."""
    may_stay: bool = False
    """Where `nodes` cannot be left out, the job may start again with them, once."""
    comes_back_as: str = ""
    """What is the same where this fault comes back, on whichever rank; empty: ranks, step and message are."""
    is_retryable: bool = True
    """Starting again from a checkpoint may help; False for an error of the user's code, which comes back."""
    needs_room: bool = False
    """A disk was full: starting again helps once there is room."""
    is_over: bool = False
    """All other ranks have finished: there is nothing to start again."""
    blocked: tuple[int, ...] = ()
    """Ranks that no SIGTERM reaches in time: stopped, or deep in a collective. For `Stop.at_once`."""
    is_final: bool = True
    """Nothing that workers say while they are ended can change it; False: ask again when they have ended."""
    told_within_s: float | None = None
    """How long a verdict that is not final may wait for them; None: as long as it takes."""
    others: tuple[GuardVerdict, ...] = ()
    """Of ranks that broke by themselves, too, each group that failed alike; their findings are in `findings`, but what
    else is said here is of the first group alone."""

    @property
    def parts(self) -> tuple[GuardVerdict, ...]:
        """Itself, and the others."""
        return (self, *self.others)


FIX_OF_LOST_AGENT = Fix(
    slurm="on {node}: dmesg -T | grep -i 'killed process', and the end of its SLURM log",
    pod="kubectl describe pod {node} shows how it ended (OOMKilled, Evicted)",
    none="on {node}: dmesg -T | grep -i 'killed process', and the end of the agent's output",
)
"""Of an agent that is gone while its machine is there."""


def name_fault(
    cause_id: str,
    message: str,
    *,
    node: str | None = None,
    reader: Reader = ANYBODY,
    evidence: Sequence[str | Evidence] = (),
    fix: str | None = None,
    values: Mapping[str, object] | None = None,
    **about: Any,
) -> Finding:
    """Return a finding of a known cause, in the guard's own words: certain, and a failure, unless told.

    Args:
        reader: for whom the cause's fix is.
        evidence: what was seen, one line each.
        fix: what to do; None: what the cause says; empty: nothing.
        values: what the cause's fix names, where it is known: interface, rank.
        about: any other field of Finding.
    """
    cause = find_cause(cause_id)
    if fix is None:
        fix = cause.fix.tell(reader, ({"node": node} if node else {}) | dict(values or {}))
    seen = tuple(Evidence(seen=shown) if isinstance(shown, str) else shown for shown in evidence)
    more = {"severity": Severity.FAIL, "confidence": Confidence.CERTAIN} | about
    return Finding(cause=cause.label, message=message, node=node, evidence=seen, fix=fix or None, **more)
