"""From standstills to facts: who kept the others waiting, as the table of progress infers it (recorder/). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from allranks.causes.book import find_cause
from allranks.facts.fact import NEVER_SAID, NOBODY, Fact, FactKind, Place, Said, When, Who
from allranks.model.finding import Confidence
from allranks.recorder.calls import Call, Dump
from allranks.recorder.wait_graph import Standstill, StandstillKind, find_stops
from allranks.report.text import fold_ranks

LEAST_WAIT_S = 5.0
"""A shorter wait may be in a running job: a recorder can be dumped at any time."""
MAX_PLACES = 3
_MEANINGS = {
    StandstillKind.MISMATCH: ("collective-mismatch", FactKind.RAISED, ""),
    StandstillKind.CIRCLE: ("collective-mismatch", FactKind.RAISED, ""),
    StandstillKind.MISSING: (
        "straggler-rank",
        FactKind.MISSING,
        "the log of {ranks}, their stacks while the job hangs (allranks stack JOB), or how they ended: dmesg, sacct",
    ),
    StandstillKind.BEHIND: ("straggler-rank", FactKind.MISSING, "flight recorder dumps taken while the job hangs"),
    StandstillKind.ALL_THERE: (
        "collective-timeout",
        FactKind.WAITED,
        "set NCCL_DEBUG=INFO, and check the links and GPUs of these ranks: allranks check",
    ),
}
"""By what it is: the cause, the fact, and what would tell more."""


def read_stops(
    dumps: Sequence[Dump],
    *,
    world: int | None = None,
    places: Mapping[int, Place] | None = None,
    when: When = NEVER_SAID,
    attempt: int = 0,
) -> Iterator[Fact]:
    """Return the facts that follow from what is known of all ranks.

    Args:
        dumps: at most one per rank.
        places: by rank, the line that told of it; None: the dumps are files.
        when: before when it happened.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    for stop in find_stops(dumps, world):
        is_mismatch = stop.kind is StandstillKind.MISMATCH
        is_short = not is_mismatch and _waited_s(stop, by_rank) < LEAST_WAIT_S
        if places is not None:
            is_few = world is not None and len(stop.ranks) <= len(stop.victims)
            if not stop.ranks or not (is_mismatch or stop.is_decided or is_few):
                continue
            ranks = [*stop.ranks[:2], *(rank for rank, _ in stop.calls), *stop.victims[:2]]
            seen = [places[rank] for rank in dict.fromkeys(ranks) if rank in places]
        elif is_short and stop.kind is StandstillKind.ALL_THERE:
            continue
        else:
            seen = [_place(by_rank[rank], call) for rank, call in stop.calls if call.number]
            seen = seen or [Place(dumps[0].source, 1, f"the flight recorder dump of rank {dumps[0].rank}")]
        cause, kind, ask = _MEANINGS[stop.kind]
        about: dict[str, Any] = {"said": Said.INFERRED, "when": when, "attempt": attempt}
        about |= {"group": stop.group, "seq": stop.seq}
        for who in [Who(rank=rank) for rank in stop.ranks] or [NOBODY]:
            yield Fact(
                kind=kind,
                who=who,
                places=tuple(seen[:MAX_PLACES]),
                cause=cause,
                confidence=Confidence.UNDECIDED if is_short else stop.confidence,
                alternatives=() if stop.confidence is Confidence.CERTAIN else find_cause(cause).also,
                told=stop.message,
                ask=ask.format(ranks=fold_ranks(stop.ranks)),
                **about,
            )
        for rank in stop.victims if places is None else ():  # else the ranks' own lines say that they waited
            yield Fact(kind=FactKind.WAITED, who=Who(rank=rank), places=tuple(seen[:MAX_PLACES][-1:]), **about)


def _waited_s(stop: Standstill, dumps: Mapping[int, Dump]) -> float:
    """Return how long a rank that is shown had been waiting when its dump was taken; infinity: nobody can tell."""
    shown = [(dumps[rank].taken_s, call.created_s) for rank, call in stop.calls if rank in stop.waiting]
    waited = [taken_s - began_s for taken_s, began_s in shown if taken_s is not None and began_s is not None]
    return max(waited, default=math.inf)


def _place(dump: Dump, call: Call) -> Place:
    """Render one call as a line of the dump's file."""
    state = "done" if call.is_done else "not done"
    text = f"{'p2p' if call.is_p2p else 'collective'} {call.seq} of group {call.group}: {call}, {state}"
    return Place(dump.source, call.number, text + (f", at {call.place}" if call.place else ""))
