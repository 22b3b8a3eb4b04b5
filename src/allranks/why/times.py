"""When did the event of a line happen? As an interval on a clock that it shares with other lines. Pure.

    times = Times(logs)
    times.of(line).is_before(times.of(other))

A line without a time lies between its neighbors in the same file. A time without a year gets that of the other lines if
that is unambiguous; otherwise, and without a date, it is on a clock of its own kind. Clocks of nodes that are off are
corrected, and the spread of the correction widens the interval.

How far a clock is off is estimated from events that all nodes saw at the same moment: a collective that times out does
so on all its ranks within moments, and a communicator is complete on all of them at once. Each such event gives one
difference between two clocks; a node's offset is the median of its differences. A clock belongs to a node, or to a file
if no node is known. Offsets are relative to the clock that most of the job agrees with. What could be the spread of the
events themselves is not an offset.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median, median_low

from allranks.causes.cause import Trait
from allranks.facts.fact import CALENDAR, NEVER_SAID, When
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent, Logs

_YEARLESS = "time without a year"
DATELESS = "time without a date"
_DAY_S = 86_400
_HALF_A_YEAR = 6
LEAST_OFFSET_S = 2.0
"""Events may differ by less than this by themselves: a watchdog looks every 100 ms or so, and log lines are delayed."""
_SPREADS = 3.0
_ROUNDS = 3

_COMM = re.compile(r"commId (0x[0-9a-f]+).{0,80}Init (START|COMPLETE)")
_Moment = tuple[object, ...]


class Times:
    """The times of all lines."""

    def __init__(self, logs: Logs) -> None:
        lines = [event.line for event in logs.events]
        lines += [line for tail in logs.tails for line in tail.lines]
        stamps: defaultdict[str, dict[int, Line]] = defaultdict(dict)
        days: set[float] = set()
        for line in lines:
            if line.time is not None:
                stamps[line.source.shown][line.number] = line
                if line.has_year:
                    days.add(line.time // _DAY_S)
        self._numbers = {shown: sorted(known) for shown, known in stamps.items()}
        self._lines = stamps
        self._years = sorted({datetime.fromtimestamp(day * _DAY_S, UTC).year for day in days})
        self._offsets = estimate_offsets(logs)

    def of(self, line: Line) -> When:
        """Return when the event of a line happened."""
        if line.time is not None:
            return self._exact(line)
        shown = line.source.shown
        numbers = self._numbers.get(shown)
        if not numbers:
            return NEVER_SAID
        at = bisect_left(numbers, line.number)
        before = self._exact(self._lines[shown][numbers[at - 1]]) if at else None
        after_at = bisect_right(numbers, line.number)
        after = self._exact(self._lines[shown][numbers[after_at]]) if after_at < len(numbers) else None
        clock = (before or after or NEVER_SAID).clock
        earliest_s = before.earliest_s if before and before.clock == clock else None
        latest_s = after.latest_s if after and after.clock == clock else None
        if earliest_s is not None and latest_s is not None and earliest_s > latest_s:  # of several writers
            if earliest_s - latest_s > LEAST_OFFSET_S:  # whose clocks differ
                return NEVER_SAID
            earliest_s, latest_s = latest_s, earliest_s
        return When(earliest_s, latest_s, clock)

    def _exact(self, line: Line) -> When:
        time_s, clock = self._on_clock(line)
        spread_s = 0.0
        if (offset := self._offsets.get(clock_of(line))) is not None:
            time_s, spread_s = time_s - offset.seconds, offset.spread_s
        precision_s = 0.999 if time_s == int(time_s) else 0.0
        return When(time_s - spread_s, time_s + precision_s + spread_s, clock)

    def _on_clock(self, line: Line) -> tuple[float, str]:
        time_s = line.time or 0.0
        if line.has_year:
            return time_s, CALENDAR
        if not line.has_date:
            return time_s, DATELESS
        moment = datetime.fromtimestamp(time_s, UTC)
        year = self._year_of(moment.month)
        if year is None:
            return time_s, _YEARLESS
        try:
            return moment.replace(year=year).timestamp(), CALENDAR
        except ValueError:  # February 29
            return time_s, _YEARLESS

    def _year_of(self, month: int) -> int | None:
        if len(self._years) == 1:
            return self._years[0]
        if len(self._years) == 2 and self._years[1] == self._years[0] + 1:
            return self._years[0] if month > _HALF_A_YEAR else self._years[1]
        return None


# --- Clocks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offset:
    """How far one clock is off."""

    seconds: float
    """Positive: its times are later than those of the others."""
    spread_s: float
    """Half of its events differ from it by no more."""

    @property
    def is_real(self) -> bool:
        """Whether it is larger than the spread of events."""
        return abs(self.seconds) > max(LEAST_OFFSET_S, _SPREADS * self.spread_s)


def clock_of(line: Line) -> str:
    """Return the clock of a line's time."""
    return line.node or line.source.shown


def estimate_offsets(logs: Logs) -> dict[str, Offset]:
    """Return how far each clock is off that is off."""
    return {clock: offset for clock, offset in measure_clocks(read_moments(logs)).items() if offset.is_real}


def read_moments(logs: Logs) -> dict[_Moment, dict[str, float]]:
    """Return events that happened everywhere at once: their time by the clock of each node, from its first line."""
    moments: defaultdict[_Moment, dict[str, float]] = defaultdict(dict)
    for event in logs.of("comm", Trait.ONLY_WAITS):
        line, name = event.line, _name(event)
        if line.time is not None and name is not None:
            # Times with and without a year or a date are not compared.
            seen = moments[(*name, line.has_year, line.has_date)]
            clock = clock_of(line)
            seen[clock] = min(seen.get(clock, line.time), line.time)
    return {name: seen for name, seen in moments.items() if len(seen) > 1}


def _name(event: LogEvent) -> _Moment | None:
    if Trait.ONLY_WAITS in event.traits and (seq := event.number("seq")) is not None:
        return "timeout", event.values.get("group", "0"), seq, event.values.get("op")
    match = _COMM.search(event.line.text) if event.kind == "comm" else None
    return ("comm", match[1], match[2]) if match else None


def measure_clocks(moments: Mapping[_Moment, Mapping[str, float]]) -> dict[str, Offset]:
    """Return the offset of each clock that shares an event with another one.

    Clocks that share no event, not even through others, are not comparable: each group of clocks has its own zero.
    """
    of_clock: defaultdict[str, list[_Moment]] = defaultdict(list)
    for name, seen in moments.items():
        for clock in seen:
            of_clock[clock].append(name)
    offsets: dict[str, float] = {}
    groups: list[list[str]] = []
    walked: set[_Moment] = set()
    for start in sorted(of_clock, key=lambda clock: (-len(of_clock[clock]), clock)):
        if start in offsets:
            continue
        groups.append(group := [start])
        offsets[start] = 0.0
        for clock in group:  # which grows
            for name in of_clock[clock]:
                new = () if name in walked else moments[name].keys() - offsets.keys()
                walked.add(name)
                offsets |= {other: offsets[clock] + moments[name][other] - moments[name][clock] for other in new}
                group += sorted(new)
    for _ in range(_ROUNDS):  # to what most of the events that they share say
        true_s = {name: median(at - offsets[clock] for clock, at in seen.items()) for name, seen in moments.items()}
        offsets = {clock: median(moments[name][clock] - true_s[name] for name in of_clock[clock]) for clock in offsets}
    found = {}
    for group in groups:
        zero = median_low(offsets[clock] for clock in group)
        for clock in group:
            spread = median(abs(moments[name][clock] - offsets[clock] - true_s[name]) for name in of_clock[clock])
            found[clock] = Offset(offsets[clock] - zero, spread)
    return found
