"""Only the lines between two times: `--since`, `--until`. Pure.

    narrow(logs, read_bound("2026-03-25T10:00"), None)
    narrow(logs, read_bound("30m"), None)                  the last half hour of the logs

A bound is an absolute time, or relative to the last time in the logs: the job is dead, and its clocks differ from the
reader's. Times without a zone are compared as they are. Lines whose time cannot be compared with a bound are kept.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, time, timedelta

import msgspec

from allranks.model.errors import UsageError
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs

_RELATIVE = re.compile(r"-?(\d{1,9}(?:\.\d{1,3})?)(s|m|min|h|d)", re.IGNORECASE)
_UNITS = {"s": "seconds", "m": "minutes", "min": "minutes", "h": "hours", "d": "days"}
_YEARLESS = 1972
"""The year of lines that have none (line.py)."""

Bound = datetime | time | timedelta
"""One end of a time range: a time in UTC, or without a zone as in the lines; a time of any day; before the last one."""


def read_bound(text: str) -> Bound:
    """Parse `2026-03-25T10:00`, `2026-03-25`, `10:00`, `30m`, `2h`.

    Raises:
        UsageError: it is none of these.
    """
    try:
        if match := _RELATIVE.fullmatch(text.strip()):
            return timedelta(**{_UNITS[match[2].lower()]: float(match[1])})
        try:
            return time.fromisoformat(text.strip()).replace(tzinfo=None)
        except ValueError:
            at = datetime.fromisoformat(text.strip())
            return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(
            f"{text!r}: expected a time, for example 2026-03-25T10:00, 10:00, or 30m for the last 30 minutes"
        ) from None


def narrow(logs: Logs, since: Bound | None, until: Bound | None) -> Logs:
    """Return the logs without lines before or after the range."""
    if since is None and until is None:
        return logs
    last: dict[tuple[bool, bool], float] = {}
    for line in (*(event.line for event in logs.events), *(line for tail in logs.tails for line in tail.lines)):
        if line.time is not None:
            kind = (line.has_year, line.has_date)
            last[kind] = max(last.get(kind, line.time), line.time)

    def is_within(line: Line) -> bool:
        if line.time is None:
            return True
        end_s = last.get((line.has_year, line.has_date), line.time)
        first_s, last_s = _seconds(since, line, end_s), _seconds(until, line, end_s)
        return (first_s is None or line.time >= first_s) and (last_s is None or line.time <= last_s)

    return replace(
        logs,
        events=tuple(event for event in logs.events if is_within(event.line)),
        tails=tuple(msgspec.structs.replace(tail, lines=tuple(filter(is_within, tail.lines))) for tail in logs.tails),
        printed=tuple(printed for printed in logs.printed if is_within(printed.line)),
    )


def _seconds(bound: Bound | None, line: Line, end_s: float) -> float | None:
    """Return a bound as a time of the line's kind; None if the two cannot be compared."""
    match bound:
        case timedelta():
            return end_s - bound.total_seconds()
        case time():
            return datetime.combine(datetime.fromtimestamp(line.time or 0.0, UTC), bound, UTC).timestamp()
        case datetime() if line.has_date:
            return (bound if line.has_year else bound.replace(year=_YEARLESS)).timestamp()
    return None
