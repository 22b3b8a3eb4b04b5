"""When was a line written? Parses the times of loggers, glog, syslog, SLURM and torchrun, with or without a year.

Pure.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from datetime import date, datetime
from functools import cache, lru_cache
from itertools import islice

_CLOCK = re.compile(
    r"(?<!\d)([01]\d|2[0-3]):([0-5]\d):([0-5]\d|60)(?:[.,](\d{1,9}))?"
    r"(?: ?(Z|[+-](?:0\d|1[0-4]):?[0-5]\d)(?!\d))?(?!\d|:\d)"
)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
# Dates directly before the time of day. Order matters: a date with a year before one without.
_DATES = [
    re.compile(pattern + "$")
    for pattern in (
        r"(?<!\d)(?P<year>\d{4})[-/.](?P<month>\d\d)[-/.](?P<day>\d\d)(?:[T_ ]|, |  )",  # 2026-03-25T
        r"(?<!\d)(?P<month>\d\d)/(?P<day>\d\d)/(?P<year>\d{4}) ",  # 07/25/2023
        rf"(?P<name>{'|'.join(_MONTHS)}) (?P<day>[ \d]?\d) ",  # May 19, Fri Sep 25
        r"\b[EWIFDCV](?P<month>\d?\d)(?P<day>\d\d) ",  # glog: E1218; torch before it pads: W303
        r"(?<![\d/-])(?P<month>\d\d)[-/](?P<day>\d\d) ",  # vLLM: 07-25
    )
]
_DATE_REACH = 13
"""Number of characters that decide it: what stands before a date counts, too."""
_YEAR_AFTER = re.compile(r" (?:[A-Z]{3,4} )?(\d{4})\b")
_YEARLESS = 1972
_MAX_CLOCKS = 3


def find_time(head: str, start: int) -> tuple[float | None, bool, bool]:
    """Return the first time with a year; else the first without one, else a time of day at the start of the message.

    `head` are launchers' prefixes, which end at `start`, and a program's header.
    """
    best: tuple[float | None, bool, bool] = (None, False, False)
    if head.count(":") < 2:
        return best
    for clock in islice(_find_clocks(head), _MAX_CLOCKS):
        hours, minutes, seconds, fraction, zone = clock.groups()
        at = clock.start()
        of_day = int(hours) * 3600 + int(minutes) * 60 + int(seconds)
        of_day_s = of_day + float(f"0.{fraction}") if fraction else float(of_day)
        found = _find_date(head[max(0, at - _DATE_REACH) : at])
        if found is None:
            if best[0] is None and at >= start and not head[start:at].strip(" [("):
                best = (of_day_s, False, False)
            continue
        year, month, day = found
        if year is None:
            after = _YEAR_AFTER.match(head, clock.end())
            year = int(after[1]) if after else 0
        if (first := _day_number(year or _YEARLESS, month, day)) is None:
            continue
        time_s = first * 86400 + of_day_s - (_offset_s(zone) if zone else 0)
        if year:
            return time_s, True, True
        if not best[2]:
            best = (time_s, False, True)
    return best


def _find_clocks(head: str) -> Iterator[re.Match[str]]:
    """Yield the times of day. Jumping from colon to colon takes a third of a search at each character."""
    at = head.find(":")
    while at >= 0:
        clock = _CLOCK.match(head, at - 2) if at >= 2 and head.startswith(":", at + 3) else None
        if clock:
            yield clock
        at = head.find(":", clock.end() if clock else at + 1)


@lru_cache(maxsize=4096)
def _find_date(before: str) -> tuple[int | None, int, int] | None:
    """Return year (0: there is none; None: it may follow the time), month and day directly before a time of day.

    Cached: most lines of a log have the same date.
    """
    for pattern in _DATES:
        if match := pattern.search(before):
            parts = match.groupdict()
            if name := parts.get("name"):
                return None, _MONTHS.index(name) + 1, int(parts["day"])
            return int(parts.get("year") or 0), int(parts["month"]), int(parts["day"])
    return None


@cache
def _day_number(year: int, month: int, day: int) -> int | None:
    """Days since 1970-01-01; None if it is not a date, or not a plausible one."""
    with contextlib.suppress(ValueError):
        if 1970 <= year <= 2100:
            return date(year, month, day).toordinal() - date(1970, 1, 1).toordinal()
    return None


@cache
def _offset_s(zone: str) -> float:
    offset = datetime.strptime(zone, "%z").utcoffset()
    return offset.total_seconds() if offset else 0.0
