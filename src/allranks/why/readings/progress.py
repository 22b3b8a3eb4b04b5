"""How far did each rank get? What came before its last step was survived; others wait for who stopped first. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from allranks.causes.cause import Trait
from allranks.facts.fact import NEVER_SAID, Fact, FactKind
from allranks.why.attempts import ANEW, RESTART
from allranks.why.facts_of_lines import FactReader
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.people import People
from allranks.why.step_lines import NUMBER, SLURM, is_step

STOPPED_S = 30.0
"""A rank's last line must be this much older than all others': writers buffer some seconds."""
_DEVICE = re.compile(r"\b(cuda:\d{1,3})\b")
_WELL = frozenset((None, FactKind.STEP, FactKind.FINISHED, FactKind.RECOVERED))
_LEAST = 3
"""Minimum number of ranks with steps: of two, one is always behind."""


def read_steps(reader: FactReader) -> Iterator[Fact]:
    """Return the last step of each rank in each file."""
    errors = {event.line.at for event in reader.logs.events if event.kind == "exception" or event.states not in _WELL}
    for tail in reader.logs.tails:
        last: dict[object, Line] = {}
        for line in reversed(tail.lines):
            who = (line.rank, line.local_rank, line.node)
            is_error = line.at in errors
            if who not in last and not is_error and is_step(line.text) and not SLURM.search(line.text):
                last[who] = line
        for line in last.values():
            yield reader.state(FactKind.STEP, line)


def find_laggard(logs: Logs, people: People) -> tuple[int | str, str, Line] | None:
    """Return the one rank, or device, that stopped before all others, in what way, and its last line; or None.

    Its last step is lower than that of all others. Else its last line is older, unless that line is an error: then it
    did not stop.
    """
    lines = [(people.speaker(line).rank, line) for tail in logs.tails for line in tail.lines]
    by_rank: defaultdict[int | str, list[Line]] = defaultdict(list)
    for rank, line in lines:
        if rank is not None:
            by_rank[rank].append(line)
    if len(by_rank) < _LEAST:
        by_rank.clear()
        for _, line in lines:
            if device := _DEVICE.search(line.text):
                by_rank[device[1]].append(line)
    steps: dict[int | str, tuple[float, Line]] = {}
    times: dict[int | str, tuple[float, Line]] = {}
    for who, own in by_rank.items():
        for said in own:
            for match in NUMBER.finditer(said.text) if _may_tell_step(said.text) else ():
                steps[who] = int(match[1]), said
            if said.time is not None and said.time >= times.get(who, (said.time, said))[0]:
                times[who] = said.time, said
    who, gap, lowest = _find_lowest(steps)
    if lowest is not None and gap > 0:
        step = int(steps[who][0])
        return who, f"stopped at step {step}; all others reached at least {step + int(gap)}", lowest
    who, gap, lowest = _find_lowest(times)
    are_comparable = len({(last.has_year, last.has_date) for _, last in times.values()}) == 1
    if lowest is None or not are_comparable or gap < STOPPED_S:
        return None
    is_error = any(event.line.at == lowest.at for event in logs.events if event.cause)
    return None if is_error else (who, f"went silent {gap:.0f} s before all others", lowest)


def _find_lowest(told: Mapping[int | str, tuple[float, Line]]) -> tuple[int | str, float, Line | None]:
    """Return who has the lowest number, how far it is from the next one, and its line; no line of too few."""
    if len(told) < _LEAST:
        return "", 0.0, None
    (who, (lowest, line)), (_, (following, _)), *_ = sorted(told.items(), key=lambda item: item[1][0])
    return who, following - lowest, line


def read_progress(reader: FactReader) -> Iterator[Fact]:
    """Return the rank that stopped first, if others timed out or lost a connection."""
    if not any(event.is_loss for event in reader.logs.events):
        return
    if any(reader.logs.of(Trait.OTHERS_WAIT_FOR_IT)):  # they never began together
        return
    if (laggard := find_laggard(reader.logs, reader.people)) is not None:
        who, what, line = laggard
        name = f"rank {who}" if isinstance(who, int) else who
        yield from reader.behind(
            (line,),
            f"{name} {what}",
            ranks=(who,) if isinstance(who, int) else (),
            when=NEVER_SAID,  # by other clocks than those of the others
            things=(who,) if isinstance(who, str) else (),
            ask=f"the stack of {name} while it hangs: allranks stack JOB",
        )


def read_restarts(reader: FactReader) -> Iterator[Fact]:
    """Return that the workers started from the beginning after a restart, if a log has both lines in this order.

    Neither line alone proves it: torchrun also restarts workers that resume, and the first start finds no checkpoint.
    """
    restarts: dict[str, Line] = {}
    for event in reader.logs.of(ANEW):
        source = event.line.source.shown
        if RESTART.search(event.line.text):
            restarts.setdefault(source, event.line)
        elif event.states is None and source in restarts:
            yield from reader.infer(
                FactKind.RAISED,
                ANEW,
                (event.line, restarts[source]),
                "the workers were restarted, but found no checkpoint to resume from",
                ask="which checkpoint the script loads at its start, and from where",
            )
            return


def _may_tell_step(text: str) -> bool:
    """Whether a word of a step is in it: the search takes five times as long."""
    words = text.lower()
    return "step" in words or "iter" in words or "batch" in words
