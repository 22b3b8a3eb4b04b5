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
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from allranks.facts.fact import FactKind
from allranks.report.text import fold_ranks, one_line
from allranks.why.conclusion import Conclusion, TimelineRow
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


def make_timeline(logs: Logs, conclusion: Conclusion | None = None) -> list[TimelineRow]:
    """Return the events in order; what the conclusion's culprit did, and its evidence, are marked."""
    clock, ordered = _in_order(_choose(logs, conclusion), Times(logs))
    rows: defaultdict[tuple[object, ...], list[tuple[float | None, LogEvent]]] = defaultdict(list)
    for time_s, event in ordered:
        is_culprit = conclusion is not None and _is_of(event.line, conclusion)
        rows[is_culprit, time_s is None, *_sameness(event)].append((time_s, event))
    times = [same[0][0] for same in rows.values() if same[0][0] is not None]
    days = {time_s // _DAY_S for time_s in times}
    format_of_time = "" if clock == DATELESS else "%m-%d %H:%M:%S" if len(days) > 1 else "%H:%M:%S"
    return [
        TimelineRow(
            time=_time(time_s, min(times, default=0.0), format_of_time),
            who=_who([event.line for _, event in same]),
            text=_text(first),
            cause=first.cause.label if first.cause else None,
            source=tell_place(first.line),
            lines=len(same),
            is_culprit=bool(is_culprit),
        )
        for (is_culprit, *_), same in rows.items()
        for time_s, first in same[:1]
    ]


def tell_clocks(logs: Logs) -> list[str]:
    """Return a line for each clock that is off: its times were corrected."""
    offsets = sorted((-abs(off.seconds), clock, off.seconds > 0) for clock, off in estimate_offsets(logs).items())
    lines = [
        one_line(f"the clock of {clock} is {-minus_s:.1f} s {'ahead' if is_ahead else 'behind'}: corrected above")
        for minus_s, clock, is_ahead in offsets[:MAX_CLOCKS]
    ]
    left_out = len(offsets) - MAX_CLOCKS
    return [*lines, f"the clocks of {left_out} more are corrected, too"] if left_out > 0 else lines


def _time(time_s: float | None, start_s: float, format_of_time: str) -> str:
    if time_s is None:
        return ""
    at = datetime.fromtimestamp(time_s, UTC)
    return at.strftime(format_of_time) if format_of_time else f"+{time_s - start_s:.1f} s"


def _who(lines: Sequence[Line]) -> str:
    nodes = tuple(line.node for line in lines if line.node)
    ranks = {line.rank for line in lines if line.rank is not None}
    if len(ranks) > 1 and len(set(nodes)) != 1:
        return fold_ranks(ranks)
    local_ranks = {line.local_rank for line in lines if line.rank is None and line.local_rank is not None}
    local = f"local {fold_ranks(local_ranks)}" if local_ranks else ""
    return f"{tell_nodes(nodes) or ''} {fold_ranks(ranks) or local}".strip()


def _choose(logs: Logs, conclusion: Conclusion | None) -> Iterable[LogEvent]:
    """Return the events to show: for each line the most informative one, as the conclusion reads it."""
    wanted = conclusion.cause if conclusion else None
    evidence = {place.at for place in conclusion.evidence} if conclusion else set()

    def rank(event: LogEvent) -> tuple[bool, bool, bool]:
        return event.cause is not wanted or wanted is None, event.states is None, event.is_loss

    best: dict[tuple[str, int], LogEvent] = {}
    for event in logs.events:
        is_mark, is_failure = event.kind in _MARKS_SHOWN, event.states not in _NOT_SHOWN
        if is_mark or is_failure or (event.cause is not None and event.line.at in evidence):
            best[event.line.at] = min(best.get(event.line.at, event), event, key=rank)
    return best.values()


def _in_order(chosen: Iterable[LogEvent], times: Times) -> tuple[str, list[tuple[float | None, LogEvent]]]:
    """Return the most usual clock, and the events in order, each with its time on that clock, or None."""
    whens = [(event, times.of(event.line)) for event in chosen]
    clocks = Counter(when.clock for _, when in whens if when.clock)
    usual = clocks.most_common(1)[0][0] if clocks else ""
    now_s: dict[str, float] = {}  # in each source
    found: list[tuple[float | None, LogEvent]] = []
    for event, when in whens:
        source = event.line.source.shown
        at_s = when.latest_s if when.earliest_s is None else when.earliest_s
        if at_s is not None and when.clock == usual:
            now_s[source] = max(at_s, now_s.get(source, at_s))
        found.append((now_s.get(source), event))
    return usual, sorted(found, key=lambda entry: float("inf") if entry[0] is None else entry[0])


def _is_of(line: Line, conclusion: Conclusion) -> bool:
    culprit = conclusion.culprit
    is_culprits = line.rank in culprit.ranks if culprit.ranks else line.node in culprit.nodes
    return is_culprits or any(line.at == place.at for place in conclusion.evidence)


def _sameness(event: LogEvent) -> tuple[object, ...]:
    """Return the key of two events that are folded into one row."""
    match = re.search(event.sign.pattern, event.line.text) if event.sign else None
    words = _NUMBERS.sub("0", event.line.text[match.start() if match else 0 :][:_MAX_TEXT])
    if event.sign is None:
        return event.kind, words
    collective = (event.values.get("seq"), event.values.get("op"))
    if event.is_loss:  # of one collective, in any wording
        words = "" if any(collective) else event.sign.pattern
    return event.kind, words, *collective


def _text(event: LogEvent) -> str:
    """Return the message of a line, without the headers before it."""
    text = _HEADERS.sub("", " ".join(show_line(event.line).split()), count=1)
    match = re.search(event.sign.pattern, text) if event.sign else None
    text = text[match.start() :] if match and match.start() > _MAX_TEXT // 2 else text
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 4].rstrip() + " ..."


def render_timeline(rows: Sequence[TimelineRow], *, mark: str = ">", dots: str = "...") -> str:
    """Return the timeline as text: at most MAX_ROWS lines, and one between `dots` about the rest.

    The culprit's rows begin with `mark`; the last one has no newline.
    """
    left_out = len(rows) - MAX_ROWS
    shown = [*rows[: MAX_ROWS // 2], *rows[-MAX_ROWS // 2 :]] if left_out > 0 else rows
    is_one_source = len({row.source.rpartition(":")[0] for row in shown}) == 1
    cells = [(mark if row.is_culprit else "", row.time, one_line(row.who)) for row in shown]
    widths = [min(24, max(map(len, column))) for column in zip(*cells, strict=True)]
    lines = []
    for row, parts in zip(shown, cells, strict=True):
        cause = f"{row.cause}: " if row.cause else ""
        count = f" ({row.lines} lines)" if row.lines > 1 else ""
        place = f"line {row.source.rpartition(':')[2]}" if is_one_source else row.source
        columns = [f"{part:<{width}}" for part, width in zip(parts, widths, strict=True) if width]
        lines.append("  ".join([*columns, one_line(f"{cause}{row.text}{count} [{place}]")]))
    if left_out > 0:
        lines.insert(MAX_ROWS // 2, f"{dots} {left_out} more {dots}")
    return "\n".join(lines)
