"""What happened when, on all ranks: events in order, victims folded, the culprit marked. Pure.

    > 14:03:09  rank 3         AR590 user-code-error: ValueError: no label [rank_3.err:812]
      14:03:11  ranks 0-2,4-7  AR490 collective-timeout: Watchdog caught ... (7 lines) [rank_0.err:91]

Lines of one source are in their order. Lines of different sources are ordered by time if they have comparable times,
corrected by the offsets of clocks (times.py). A line without a time happened no earlier than the line before it in its
source. Sources without any comparable time come last.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache

from allranks.facts.fact import NEVER_SAID, FactKind, When
from allranks.report.text import fold_ranks, one_line
from allranks.why.conclusion import Conclusion
from allranks.why.findings import show_line, tell_nodes, tell_place
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.times import DATELESS, Times, estimate_offsets

MAX_ROWS = 60
MAX_CLOCKS = 4
_DAY_S = 86400.0
_MARKS_SHOWN = frozenset(("exception", "failure-code", "closing", "task-end"))
"""Marks that are events of the job; the others are parts of them."""
_NOT_SHOWN = frozenset((None, FactKind.FINISHED, FactKind.STEP, FactKind.RECOVERED))
"""Lines that report no failure."""
_MAX_TEXT = 110

_HEADERS = re.compile(r"^(?:\[[^\]]{0,120}\]:? *)+(?=.)")
"""[E325 14:03:11.48 ProcessGroupNCCL.cpp:616] [Rank 0]"""
_NUMBERS = re.compile(r"(?:0x)?[0-9][0-9a-fA-F]*")


@dataclass(slots=True)
class TimelineRow:
    """One row of the timeline: a message of one or more ranks."""

    time_s: float | None
    """Time of the first of them, like Line.time, corrected by its clock's offset; None if unknown."""
    has_date: bool
    text: str
    cause: str | None
    """Id and name of the cause; None if the line shows none by itself."""
    place: str
    """`path:line` of the first of them."""
    is_culprit: bool = False
    ranks: set[int] = field(default_factory=set)
    nodes: dict[str, None] = field(default_factory=dict)
    local_ranks: set[int] = field(default_factory=set)
    """Nodes of lines without a known rank."""
    lines: int = 0

    def who(self) -> str:
        """Return the writers: the ranks; the nodes if there are no ranks, or with a single rank."""
        nodes = tell_nodes(tuple(self.nodes)) or ""
        if len(self.ranks) > 1 and len(self.nodes) != 1:
            return fold_ranks(self.ranks)
        ranks = fold_ranks(self.ranks) or (self.local_ranks and f"local {fold_ranks(self.local_ranks)}") or ""
        return f"{nodes} {ranks}".strip()


def make_timeline(logs: Logs, conclusion: Conclusion | None = None) -> list[TimelineRow]:
    """Return the events, in order.

    Args:
        logs: all that was read.
        conclusion: whose culprit and evidence are marked.
    """
    rows: dict[tuple[object, ...], TimelineRow] = {}
    for event, when in _in_order(_choose(logs, conclusion), Times(logs)):
        is_culprit = conclusion is not None and _is_of(event.line, conclusion)
        key = (is_culprit, when.clock, *_sameness(event))
        row = rows.get(key)
        if row is None:
            row = rows[key] = TimelineRow(
                time_s=when.earliest_s,
                has_date=when.clock != DATELESS,
                text=_text(event),
                cause=event.cause.label if event.cause else None,
                place=tell_place(event.line),
                is_culprit=is_culprit,
            )
        row.lines += 1
        if event.line.rank is not None:
            row.ranks.add(event.line.rank)
        elif event.line.local_rank is not None:
            row.local_ranks.add(event.line.local_rank)
        if event.line.node:
            row.nodes[event.line.node] = None
    return list(rows.values())


def cut_middle(
    rows: Sequence[TimelineRow], limit: int = MAX_ROWS
) -> tuple[Sequence[TimelineRow], int, Sequence[TimelineRow]]:
    """Return the first rows, the number of rows left out, and the last rows."""
    if len(rows) <= limit:
        return rows, 0, ()
    return rows[: limit - limit // 2], len(rows) - limit, rows[len(rows) - limit // 2 :]


def tell_times(rows: Iterable[TimelineRow]) -> list[str]:
    """Return the times of rows as text: with the day if there are several, relative if there are none."""
    rows = list(rows)
    known = [row.time_s for row in rows if row.time_s is not None]
    days = {int(row.time_s // _DAY_S) for row in rows if row.time_s is not None and row.has_date}
    return [_time(row, min(known, default=0.0), has_days=len(days) > 1) for row in rows]


def tell_clocks(logs: Logs) -> list[str]:
    """Return a line for each clock that is off: its times were corrected."""
    offsets = sorted((-abs(off.seconds), clock, off.seconds > 0) for clock, off in estimate_offsets(logs).items())
    lines = [
        one_line(f"the clock of {clock} is {-minus_s:.1f} s {'ahead' if is_ahead else 'behind'}: corrected above")
        for minus_s, clock, is_ahead in offsets[:MAX_CLOCKS]
    ]
    left_out = len(offsets) - MAX_CLOCKS
    return [*lines, f"the clocks of {left_out} more are corrected, too"] if left_out > 0 else lines


def _time(row: TimelineRow, start_s: float, *, has_days: bool) -> str:
    if row.time_s is None:
        return ""
    if not row.has_date:
        return f"+{row.time_s - start_s:.1f} s"
    return datetime.fromtimestamp(row.time_s, UTC).strftime("%m-%d %H:%M:%S" if has_days else "%H:%M:%S")


def _choose(logs: Logs, conclusion: Conclusion | None) -> Iterable[LogEvent]:
    """Return the events to show: for each line the most informative one, as the conclusion reads it."""
    wanted = conclusion.cause if conclusion else None
    evidence = {place.at for place in conclusion.evidence} if conclusion else set()

    def rank(event: LogEvent) -> tuple[bool, bool, bool]:
        return event.cause is not wanted or wanted is None, event.states is None, event.is_loss

    best: dict[tuple[str, int], LogEvent] = {}
    for event in logs.events:
        key = event.line.at
        if event.cause is None:
            is_shown = event.kind in _MARKS_SHOWN
        else:
            is_shown = key in evidence or event.states not in _NOT_SHOWN
        if is_shown and (key not in best or rank(event) < rank(best[key])):
            best[key] = event
    return best.values()


def _in_order(chosen: Iterable[LogEvent], times: Times) -> Iterator[tuple[LogEvent, When]]:
    """Yield events in order, each with when it can have happened: on the most usual clock, or at an unknown time."""
    by_source: defaultdict[str, list[tuple[LogEvent, When]]] = defaultdict(list)
    for event in chosen:
        by_source[event.line.source.shown].append((event, times.of(event.line)))
    clocks = Counter(when.clock for own in by_source.values() for _, when in own if when.clock)
    usual = clocks.most_common(1)[0][0] if clocks else ""
    timed: list[tuple[float, LogEvent]] = []
    untimed: list[LogEvent] = []
    for own in by_source.values():
        now_s: float | None = None
        for event, when in own:
            at_s = when.latest_s if when.earliest_s is None else when.earliest_s
            if at_s is not None and when.clock == usual:
                now_s = at_s if now_s is None else max(now_s, at_s)
            if now_s is None:
                untimed.append(event)
            else:
                timed.append((now_s, event))
    timed.sort(key=lambda entry: entry[0])
    yield from ((event, When(at_s, at_s, usual)) for at_s, event in timed)
    yield from ((event, NEVER_SAID) for event in untimed)


def _is_of(line: Line, conclusion: Conclusion) -> bool:
    culprit = conclusion.culprit
    if any(line.at == place.at for place in conclusion.evidence):
        return True
    if culprit.ranks:
        return line.rank in culprit.ranks
    return line.node is not None and line.node in culprit.nodes


def _sameness(event: LogEvent) -> tuple[object, ...]:
    """Return the key of two events that are folded into one row."""
    words = _NUMBERS.sub("0", event.line.text[_start(event) :][:_MAX_TEXT])
    if event.sign is None:
        return event.kind, words
    collective = (event.values.get("seq"), event.values.get("op"))
    if event.is_loss:  # of one collective, in any wording
        words = "" if any(collective) else event.sign.pattern
    return event.kind, words, *collective


def _start(event: LogEvent) -> int:
    """Return the position of the words that the event's sign matched."""
    match = _compiled(event.sign.pattern).search(event.line.text) if event.sign else None
    return match.start() if match else 0


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _text(event: LogEvent) -> str:
    """Return the message of a line, without the headers before it."""
    text = _HEADERS.sub("", " ".join(show_line(event.line).split()), count=1)
    if event.sign is not None:
        match = _compiled(event.sign.pattern).search(text)
        text = text[match.start() :] if match and match.start() > _MAX_TEXT // 2 else text
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 4].rstrip() + " ..."


def render_timeline(rows: Sequence[TimelineRow], *, mark: str = ">", dots: str = "...") -> str:
    """Return the timeline as text: at most MAX_ROWS lines and a line about the rest; without a final newline.

    Args:
        rows: result of make_timeline.
        mark: prefix of the culprit's rows.
        dots: text for rows that are left out.
    """
    first, left_out, last = cut_middle(rows)
    shown = [*first, *last]
    paths = {row.place.rpartition(":")[0] for row in shown}
    columns = [
        [mark if row.is_culprit else "" for row in shown],
        tell_times(shown),
        [one_line(row.who()) for row in shown],
    ]
    widths = [min(24, max(map(len, column), default=0)) for column in columns]
    lines = []
    for row, *cells in zip(shown, *columns, strict=True):
        parts = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True) if width]
        lines.append("  ".join([*parts, _said(row, is_only_source=len(paths) == 1)]))
    if left_out:
        lines.insert(len(first), f"{dots} {left_out} more {dots}")
    return "\n".join(lines)


def _said(row: TimelineRow, *, is_only_source: bool) -> str:
    cause = f"{row.cause}: " if row.cause else ""
    count = f" ({row.lines} lines)" if row.lines > 1 else ""
    place = f"line {row.place.rpartition(':')[2]}" if is_only_source else row.place
    return one_line(f"{cause}{row.text}{count} [{place}]")
