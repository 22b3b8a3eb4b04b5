"""The curves of a report: rate of the steps, shares that waited, loaded and saved, values of `step.log`.

    draw_rate(books)                     # steps per second, of the ranks with the most rows
    draw_shares(books)                   # of all ranks' time
    draw_values(points)                  # what the script has passed to step.log, over its steps

Rate and shares come from the books of the nodes (report.books), whose rows get longer with their age; a job without
books has the last ten minutes from its status. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from allranks.model.curve import CurvePoint
from allranks.model.job_status import JobStatus
from allranks.model.pace import PaceState
from allranks.model.time_book import BookRow, RankBook, TimeBook

COLUMNS = 240
"""Of the curves of shares."""
MAX_RANKS = 64
"""Whose rows make the shares; of more ranks each so many'th one."""
WORTH_SHOWING = 0.005
"""A share that never is so large makes no curve."""
MAX_VALUE = 1e150
"""Larger ones count as not finite: no chart has room for them."""
MAX_VALUES = 64
"""Names of values that have a curve."""
RATE_EVERY_S = 5.0
"""As launch.lead.step_rate samples it."""
_ZERO = BookRow((0,) * 7, 0)
_SHARES = {
    PaceState.BLOCKED: "Blocked in collectives, besides backward",
    PaceState.DATA: "Waiting for data",
    PaceState.SAVE: "Saving",
}


class PageCurve(msgspec.Struct, frozen=True, kw_only=True):
    """One line."""

    name: str
    unit: str = ""
    points: tuple[tuple[float, float], ...]
    """In order; where `is_of_time`, seconds since the first book began."""
    is_of_time: bool = True
    """False: x is the step."""
    begins_at_zero: bool = True
    """The axis shows 0, too."""
    num_not_finite: int = 0
    """Values that were no finite numbers, or beyond MAX_VALUE; they are no points."""


def draw_rate(books: Sequence[TimeBook]) -> PageCurve | None:
    """Return the steps per second over time, of each generation by the rank that has the most rows."""
    best: dict[int, tuple[int, float, RankBook]] = {}
    for book in books:
        for account in book.ranks:
            known = best.get(account.generation)
            if known is None or len(account.packed_rows) > known[0]:
                best[account.generation] = len(account.packed_rows), book.begun_s, account
    points = []
    for _, begun_s, account in best.values():
        for before, row in pairwise((_ZERO, *account.rows)):
            if (passed_us := row.age_us - before.age_us) > 0:
                end_s = begun_s + (account.begun_us + row.age_us) / 1e6
                points.append((end_s, 1e6 * (row.steps - before.steps) / passed_us))
    if not any(rate for _, rate in points):
        return None
    first_s = min(book.begun_s for book in books)
    return PageCurve(name="Rate", unit="steps/s", points=tuple((at_s - first_s, rate) for at_s, rate in sorted(points)))


def draw_shares(books: Sequence[TimeBook]) -> list[PageCurve]:
    """Return over time the share of all ranks' time in each state of _SHARES that has some."""
    accounts = [(book.begun_s, account) for book in books for account in book.ranks if account.packed_rows]
    every = 1 + len({account.rank for _, account in accounts}) // (MAX_RANKS + 1)
    spans = list(_list_spans((begun_s, account) for begun_s, account in accounts if account.rank % every == 0))
    if not spans:
        return []
    first_s, last_s = min(book.begun_s for book in books), max(end_s for _, end_s, _ in spans)
    width_s = max(0.0, last_s - first_s) / COLUMNS or 1.0
    total, of_state = [0.0] * COLUMNS, defaultdict[PaceState, list[float]](lambda: [0.0] * COLUMNS)
    for begin_s, end_s, shares in spans:
        at, until = max(0, int((begin_s - first_s) / width_s)), min(COLUMNS - 1, int((end_s - first_s) / width_s))
        for column in range(at, until + 1):
            weight = min(end_s, first_s + (column + 1) * width_s) - max(begin_s, first_s + column * width_s)
            total[column] += weight
            for state, share in shares.items():
                of_state[state][column] += weight * share
    curves = []
    for state, name in _SHARES.items():
        values = [
            (column, 100 * of_state[state][column] / total[column]) for column in range(COLUMNS) if total[column] > 0
        ]
        if any(value > 100 * WORTH_SHOWING for _, value in values):
            points = tuple(((column + 0.5) * width_s, value) for column, value in values)
            curves.append(PageCurve(name=name, unit="% of all ranks' time", points=points))
    return curves


def _list_spans(
    accounts: Iterable[tuple[float, RankBook]],
) -> Iterable[tuple[float, float, dict[PaceState, float]]]:
    """Return begin and end of each row, and which shares of it were spent in the states of _SHARES."""
    for begun_s, account in accounts:
        start_s = begun_s + account.begun_us / 1e6
        for before, row in pairwise((_ZERO, *account.rows)):
            if (passed_us := row.age_us - before.age_us) > 0:
                shares = {state: max(0, row.of(state) - before.of(state)) / passed_us for state in _SHARES}
                yield start_s + before.age_us / 1e6, start_s + row.age_us / 1e6, shares


def draw_last_rates(status: JobStatus | None) -> PageCurve | None:
    """Return the rate of the last minutes, as the leader has seen it."""
    if status is None or not any(status.rates):
        return None
    points = tuple((RATE_EVERY_S * number, rate) for number, rate in enumerate(status.rates))
    return PageCurve(name="Rate, last minutes", unit="steps/s", points=points)


def draw_values(attempts: Sequence[Sequence[CurvePoint]]) -> list[PageCurve]:
    """Return a curve for each name, in the order of the names' first values.

    Args:
        attempts: the points of each attempt, oldest first; a later one begins at the step of a checkpoint, and what an
            earlier one has beyond that step was lost.
    """
    names: dict[str, list[tuple[int, float | None]]] = {}
    for points in attempts:
        if points:
            begin = points[0].step
            names = {name: [point for point in known if point[0] < begin] for name, known in names.items()}
        for point in points:
            for name, value in point.values.items():
                names.setdefault(name, []).append((point.step, value))
    curves = []
    for name, known in list(names.items())[:MAX_VALUES]:
        finite = [(float(step), value) for step, value in known if value is not None and abs(value) < MAX_VALUE]
        if finite:
            curves.append(
                PageCurve(
                    name=name,
                    points=tuple(sorted(finite)),
                    is_of_time=False,
                    begins_at_zero=False,
                    num_not_finite=len(known) - len(finite),
                )
            )
    return curves


def draw_all(
    books: Sequence[TimeBook], status: JobStatus | None, values: Sequence[Sequence[CurvePoint]]
) -> list[PageCurve]:
    """Return all curves."""
    rate = draw_rate(books) or draw_last_rates(status)
    return [*([rate] if rate else []), *draw_values(values), *draw_shares(books)]
