"""Only the lines between two times: `--since`, `--until`. Pure.

    narrow(logs, read_bound("2026-03-25T10:00"), None)
    narrow(logs, read_bound("30m"), None)                  the last half hour of the logs

A bound is an absolute time, or relative to the last time in the logs: the job is dead, and its clocks differ from the
reader's. Times without a zone are compared as they are. Lines whose time cannot be compared with a bound are kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time

from allranks.model.errors import UsageError
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs

_RELATIVE = re.compile(r"-?(\d{1,9}(?:\.\d{1,3})?)(s|m|min|h|d)", re.IGNORECASE)
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_Kind = tuple[bool, bool]


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of a time range."""

    at: datetime | None = None
    """A time with a date; in UTC, or without a zone as in the lines."""
    of_day: time | None = None
    """A time of any day."""
    before_end_s: float | None = None
    """Relative to the last time in the logs."""


def read_bound(text: str) -> Bound:
    """Parse `2026-03-25T10:00`, `2026-03-25`, `10:00`, `30m`, `2h`.

    Raises:
        UsageError: it is none of these.
    """
    if match := _RELATIVE.fullmatch(text.strip()):
        return Bound(before_end_s=float(match[1]) * _SECONDS[match[2].lower()])
    try:
        return Bound(of_day=time.fromisoformat(text.strip()).replace(tzinfo=None))
    except ValueError:
        pass
    try:
        at = datetime.fromisoformat(text.strip())
        return Bound(at=at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC))
    except (ValueError, OverflowError):
        raise UsageError(
            f"{text!r}: expected a time, for example 2026-03-25T10:00, 10:00, or 30m for the last 30 minutes"
        ) from None


def narrow(logs: Logs, since: Bound | None, until: Bound | None) -> Logs:
    """Return the logs without lines before or after the range."""
    if since is None and until is None:
        return logs
    last: dict[_Kind, float] = {}
    lines = [event.line for event in logs.events] + [line for tail in logs.tails for line in tail.lines]
    for line in lines:
        if line.time is not None:
            kind = (line.has_year, line.has_date)
            last[kind] = max(last.get(kind, line.time), line.time)

    def is_within(line: Line) -> bool:
        if line.time is None:
            return True
        end_s = last.get((line.has_year, line.has_date), line.time)
        first_s = _seconds(since, line, end_s)
        last_s = _seconds(until, line, end_s)
        return (first_s is None or line.time >= first_s) and (last_s is None or line.time <= last_s)

    return replace(
        logs,
        events=tuple(event for event in logs.events if is_within(event.line)),
        tails=tuple(replace(tail, lines=tuple(filter(is_within, tail.lines))) for tail in logs.tails),
        printed=tuple(printed for printed in logs.printed if is_within(printed.line)),
    )


def _seconds(bound: Bound | None, line: Line, end_s: float) -> float | None:
    """Return a bound as a time of the line's kind; None if the two cannot be compared."""
    if bound is None:
        return None
    if bound.before_end_s is not None:
        return end_s - bound.before_end_s
    if bound.of_day is not None:
        of_day_s = _of_day_s(bound.of_day)
        assert line.time is not None
        return line.time // 86400 * 86400 + of_day_s
    assert bound.at is not None
    if line.has_year:
        return bound.at.timestamp()
    if line.has_date:  # such lines have the year 1972
        day = date(1972, bound.at.month, bound.at.day).toordinal() - date(1970, 1, 1).toordinal()
        return day * 86400 + _of_day_s(bound.at.time())
    return None


def _of_day_s(at: time) -> float:
    return at.hour * 3600 + at.minute * 60 + at.second + at.microsecond / 1e6
