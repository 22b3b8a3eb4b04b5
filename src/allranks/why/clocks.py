"""How far is each node's clock off? Estimated from events that all nodes saw at the same moment. Pure.

    offsets = estimate_offsets(logs)
    line.time - offsets.get(clock_of(line), 0.0)        comparable between nodes

A collective that times out does so on all its ranks within moments, and a communicator is complete on all of them at
once. Each such event gives one difference between two clocks; a node's offset is the median of its differences. A clock
belongs to a node, or to a file if no node is known. Offsets are relative to the clock that most of the job agrees with.
What could be the spread of the events themselves is not an offset.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median, median_low

from allranks.causes.cause import Trait
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent, Logs

LEAST_OFFSET_S = 2.0
"""Events may differ by less than this by themselves: a watchdog looks every 100 ms or so, and log lines are delayed."""
_SPREADS = 3.0
_MAX_LINES = 500
"""Maximum number of lines of one clock and one kind of event: a median needs no more."""
_ROUNDS = 3

_COMM = re.compile(r"commId (0x[0-9a-f]+).{0,80}Init (START|COMPLETE)")

_Moment = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Offset:
    """How far one clock is off."""

    seconds: float
    """Positive: its times are later than those of the others."""
    spread_s: float
    """Half of its events differ from it by no more."""
    moments: int
    """Number of events that it shares with others."""

    @property
    def is_real(self) -> bool:
        """Whether it is larger than the spread of events."""
        return abs(self.seconds) > max(LEAST_OFFSET_S, _SPREADS * self.spread_s)


def clock_of(line: Line) -> str:
    """Return the clock of a line's time."""
    return line.node or line.source.shown


def estimate_offsets(logs: Logs) -> dict[str, float]:
    """Return the seconds to subtract from the times of each clock that is off."""
    return {clock: offset.seconds for clock, offset in measure_clocks(read_moments(logs)).items() if offset.is_real}


def read_moments(logs: Logs) -> dict[_Moment, dict[str, float]]:
    """Return events that happened everywhere at once: their time by the clock of each node, from its first line."""
    counts: defaultdict[tuple[str, str], int] = defaultdict(int)
    moments: defaultdict[_Moment, dict[str, float]] = defaultdict(dict)
    for event in logs.of("comm", Trait.ONLY_WAITS, Trait.SUCCESS):
        line = event.line
        if line.time is None:
            continue
        clock = clock_of(line)
        counts[event.kind, clock] += 1
        if counts[event.kind, clock] > _MAX_LINES:
            continue
        for name in _name(event):
            # Times with and without a year or a date are not compared.
            seen = moments[(*name, line.has_year, line.has_date)]
            seen[clock] = min(seen.get(clock, line.time), line.time)
    return {name: seen for name, seen in moments.items() if len(seen) > 1}


def _name(event: LogEvent) -> Iterator[_Moment]:
    if Trait.ONLY_WAITS in event.traits and (seq := event.number("seq")) is not None:
        yield "timeout", event.values.get("group", "0"), seq, event.values.get("op")
    elif event.kind == "comm" and (match := _COMM.search(event.line.text)):
        yield "comm", match[1], match[2]
    elif Trait.SUCCESS in event.traits and "successfully finished" in event.line.text:
        yield ("finished",)


def measure_clocks(moments: Mapping[_Moment, Mapping[str, float]]) -> dict[str, Offset]:
    """Return the offset of each clock that shares an event with another one.

    Clocks that share no event, not even through others, are not comparable: each group of clocks has its own zero.

    Args:
        moments: name -> clock -> time.
    """
    of_clock: defaultdict[str, list[_Moment]] = defaultdict(list)
    for name, seen in moments.items():
        for clock in seen:
            of_clock[clock].append(name)
    offsets: dict[str, float] = {}
    for start in sorted(of_clock, key=lambda clock: (-len(of_clock[clock]), clock)):
        if start not in offsets:
            part = _spread_from(start, moments, of_clock)
            for _ in range(_ROUNDS):
                part = _refine(part, moments, of_clock)
            zero = median_low(part.values())
            offsets |= {clock: offset - zero for clock, offset in part.items()}
    true_s = _true_times(moments, moments, offsets)
    return {
        clock: Offset(
            offset,
            median(abs(moments[name][clock] - offset - true_s[name]) for name in of_clock[clock]),
            len(of_clock[clock]),
        )
        for clock, offset in offsets.items()
    }


def _spread_from(
    start: str, moments: Mapping[_Moment, Mapping[str, float]], of_clock: Mapping[str, list[_Moment]]
) -> dict[str, float]:
    """Walk from one clock over shared events to all others that it reaches; use each event once."""
    offsets = {start: 0.0}
    seen: set[_Moment] = set()
    layer: Iterable[str] = [start]
    while layer:
        guesses: defaultdict[str, list[float]] = defaultdict(list)
        for name in dict.fromkeys(name for clock in layer for name in of_clock[clock] if name not in seen):
            seen.add(name)
            times = moments[name]
            true_s = median(time - offsets[clock] for clock, time in times.items() if clock in offsets)
            for clock, time in times.items():
                if clock not in offsets:
                    guesses[clock].append(time - true_s)
        offsets |= {clock: median(found) for clock, found in guesses.items()}
        layer = list(guesses)
    return offsets


def _refine(
    offsets: Mapping[str, float],
    moments: Mapping[_Moment, Mapping[str, float]],
    of_clock: Mapping[str, list[_Moment]],
) -> dict[str, float]:
    """Compare each clock with all that share its events, not only with the first."""
    true_s = _true_times((name for clock in offsets for name in of_clock[clock]), moments, offsets)
    return {clock: median(moments[name][clock] - true_s[name] for name in of_clock[clock]) for clock in offsets}


def _true_times(
    names: Iterable[_Moment], moments: Mapping[_Moment, Mapping[str, float]], offsets: Mapping[str, float]
) -> dict[_Moment, float]:
    """Time of each event, by all clocks that saw it."""
    return {
        name: median(time - offsets[clock] for clock, time in moments[name].items()) for name in dict.fromkeys(names)
    }
