"""How often were a run's ranks started again, and why? From the lines of events.jsonl. Pure.

>>> fault = {"event": "verdict", "generation": 0, "cause": "AR407 dead-rank", "ranks": [2], "node": "node03"}
>>> start = {"event": "restarting", "generation": 1, "lost_s": 72.4, "is_tracked": True}
>>> describe_restarts(list_restarts([fault, start]))
'1 restart (AR407, rank 2, 1:12 lost)'
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from allranks.model.finding import Finding, Severity, Verdict, fill_cause_id
from allranks.report.text import count_of, fold_ranks

SHOWN = 3
"""Faults that a line names."""


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """One start of all ranks after the first, and the fault before it."""

    generation: int
    cause: str = ""
    """Id and name; empty: there was no fault, and a node joined."""
    cause_id: str = ""
    """The id alone, for programs; always that of `cause`."""
    node: str | None = None
    ranks: tuple[int, ...] = ()
    lost_s: float | None = None
    """Seconds from the last checkpoint, or the start before, to this one; None: the leader did not tell."""
    is_tracked: bool = False
    """Whether the script reports its steps. If not, it may have saved what allranks does not know: `lost_s` at most."""
    checkpoint: int | None = None
    """Step of the checkpoint that the ranks began with, if allranks knows it."""

    def __post_init__(self) -> None:
        fill_cause_id(self)

    @property
    def fault(self) -> str:
        """`AR407, rank 2`."""
        who = fold_ranks(self.ranks) or self.node or ""
        return ", ".join(filter(None, [self.cause_id, who])) or "more nodes"


def list_restarts(events: Iterable[Mapping[str, Any]]) -> tuple[Restart, ...]:
    """Return the restarts in the order of the events; a fault is the last verdict before its restart."""
    restarts, fault = [], dict[str, Any]()
    for event in events:
        if event.get("event") == "verdict" and not fault:  # of several findings, the culprit's comes first
            fault = {"cause": event.get("cause", ""), "node": event.get("node"), "ranks": event.get("ranks", ())}
        elif event.get("event") == "restarting":
            told = {name: event[name] for name in ("generation", "lost_s", "is_tracked", "checkpoint") if name in event}
            with contextlib.suppress(msgspec.ValidationError):  # of a version that writes it otherwise
                restarts.append(msgspec.convert(fault | told, Restart))
            fault = {}
    return tuple(restarts)


def describe_restarts(restarts: Sequence[Restart], *, allowed: int | None = None) -> str:
    """Return the restarts in a few words; empty for none.

    Args:
        restarts: all of one run.
        allowed: `--max-restarts`; if all are used, that is said.
    """
    if not restarts:
        return ""
    used = sum(bool(restart.cause) for restart in restarts)
    is_used_up = allowed is not None and 0 < allowed <= used
    head = f"{used} of {count_of(allowed or 0, 'restart')} used" if is_used_up else count_of(len(restarts), "restart")
    faults = Counter(restart.fault for restart in restarts)
    named = [f"{fault}, {count} times" if count > 1 else fault for fault, count in list(faults.items())[-SHOWN:]]
    more = [f"{len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
    told = [restart for restart in restarts if restart.lost_s is not None]
    clock = describe_clock(sum(restart.lost_s or 0.0 for restart in told))
    loss = f", {'' if all(restart.is_tracked for restart in told) else 'at most '}{clock} lost" if told else ""
    return f"{head} ({'; '.join([*more, *named])}{loss})"


def open_findings(verdict: Verdict, restarts: Sequence[Restart]) -> tuple[Finding, ...]:
    """Return the findings of a verdict without the faults that a restart has cured: the restarts tell these."""
    cured = {(restart.cause, restart.node, restart.ranks) for restart in restarts}
    return tuple(
        finding
        for finding in verdict.findings
        if finding.severity is not Severity.WARN or (finding.cause, finding.node, finding.ranks) not in cured
    )


def describe_clock(seconds: float) -> str:
    """Return `1:12`, or `2:05:00` with hours.

    >>> describe_clock(72.4), describe_clock(7500)
    ('1:12', '2:05:00')
    """
    minutes, rest_s = divmod(round(seconds), 60)
    hours, of_hour = divmod(minutes, 60)
    return f"{hours}:{of_hour:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"
