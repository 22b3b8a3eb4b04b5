"""The drawings of a report as numbers: bars, curves and their axes. Pure; page.html.j2 makes SVG and HTML of them.

>>> time_ticks(5400, 3)
[(0.0, '0:00'), (0.333, '30:00'), (0.667, '1:00:00'), (1.0, '1:30:00')]
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from allranks.model.hostlist import fold_hosts
from allranks.model.ledger import Category, Ledger
from allranks.report.history import describe_clock
from allranks.report.page_curves import PageCurve
from allranks.report.text import count_of, fold_ranks

WIDTH, HEIGHT = 720, 150
"""Of a curve, in SVG units."""
BUCKETS = 360
"""A curve with more points shows the lowest and the highest of each of these."""
LABELLED, NAMED = 0.06, 0.12
"""From these shares on a part of the bar has its number, and its name, in it."""
SHOWN_RANKS = 6
LEAST = 1e-300
"""Ticks that are nearer to each other than this cannot be told apart."""
_FOLDER = Path(__file__).parent / "html"
_ROUND_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPart:
    """One category of the ledger in the bar and in its table."""

    key: str
    label: str
    meaning: str
    advice: str
    share: float
    wall_s: float
    """Its share of the wall time."""
    rank_s: float
    whom: str
    """`ranks 3,5 on node03`; empty: everybody."""
    is_estimated: bool
    in_bar: str
    """What fits into its part of the bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One curve, in the box of WIDTH and HEIGHT."""

    name: str
    unit: str
    path: str
    """The `d` of an SVG path."""
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    text: str
    """`last 5.4, lowest 0, highest 5.6`."""


def split_budget(ledger: Ledger, *, job: str) -> list[BudgetPart]:
    """Return the categories that have time in them, in the order of the bar: work first, then the losses by size."""
    texts = _read_texts()
    owed = {str(loss.category): loss for loss in ledger.losses}
    work = [str(category) for category in (Category.STEP, Category.TRANSFER)]
    seconds = {key: value for key, value in ledger.seconds.items() if value > 0 and key in texts}
    order = [key for key in work if key in seconds]
    order += sorted((key for key in seconds if key not in work), key=lambda key: -seconds[key])
    parts, wall_s = [], max(0.0, ledger.until_s - ledger.begun_s)
    for key in order:
        text, loss = texts[key], owed.get(key)
        share = min(1.0, seconds[key] / ledger.rank_s) if ledger.rank_s > 0 else 0.0
        ranks = loss.ranks if loss else ()
        shown = fold_ranks(ranks[:SHOWN_RANKS]) + (
            f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
        )
        nodes = f" on {fold_hosts(loss.nodes[:SHOWN_RANKS])}" if loss and loss.nodes else ""
        named = {"ranks": shown or "all ranks", "job": job}
        label = text["label"] + (" + wait" if key == Category.STEP and ledger.is_async else "")
        parts.append(
            BudgetPart(
                key=key,
                label=label,
                meaning=text["meaning"],
                advice=text["advice"].format_map(named),
                share=share,
                wall_s=share * wall_s,
                rank_s=seconds[key],
                whom=shown + nodes if shown else "",
                is_estimated=(loss is not None and loss.is_estimated)
                or (ledger.is_estimated and key in (Category.WAIT, Category.TRANSFER)),
                in_bar=f"{label} {show_percent(share)}"
                if share >= NAMED
                else show_percent(share)
                if share >= LABELLED
                else "",
            )
        )
    return parts


@cache
def _read_texts() -> dict[str, dict[str, str]]:
    return tomllib.loads((_FOLDER / "categories.toml").read_text(encoding="utf-8"))


def draw(curve: PageCurve) -> Chart:
    """Return a curve's line and axes; the points are in order, and there is at least one."""
    xs, ys = zip(*curve.points, strict=True)
    low, high = min(0.0, *ys) if min(ys) >= 0 and curve.begins_at_zero else min(ys), max(ys)
    y_ticks = number_ticks(low, high)
    low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])
    first, last = 0.0 if curve.is_of_time else xs[0], xs[-1]
    across, up = (last - first) or 1.0, (high - low) or 1.0

    def at(x: float, y: float) -> str:
        return f"{WIDTH * (x - first) / across:.1f} {HEIGHT * (high - y) / up:.1f}"

    unfit = f"; {count_of(curve.num_not_finite, 'value')} not finite" if curve.num_not_finite else ""
    points = thin_out(curve.points)
    path = "M" + "L".join(at(x, y) for x, y in points) if len(points) > 1 else f"M{at(first, ys[0])}h4"
    if curve.is_of_time:
        x_ticks = tuple((WIDTH * share, text) for share, text in time_ticks(last - first, 5))
    else:
        x_ticks = tuple(
            (WIDTH * (x - first) / across, show_number(x)) for x in number_ticks(first, last, 8) if first <= x <= last
        )
    return Chart(
        name=curve.name,
        unit=curve.unit,
        path=path,
        x_ticks=x_ticks,
        y_ticks=tuple((HEIGHT * (high - y) / up, show_number(y)) for y in y_ticks),
        text=f"last {show_number(ys[-1])}, lowest {show_number(min(ys))}, highest {show_number(max(ys))}{unfit}",
    )


def thin_out(points: Sequence[tuple[float, float]], buckets: int = BUCKETS) -> list[tuple[float, float]]:
    """Return at most two points of each bucket, its lowest and its highest, so that no peak vanishes.

    >>> thin_out([(0, 1), (1, 5), (2, 2), (3, 0), (4, 3), (5, 3)], buckets=2)
    [(0, 1), (1, 5), (3, 0), (4, 3)]
    """
    if len(points) <= 2 * buckets:
        return list(points)
    first, last = points[0][0], points[-1][0]
    width, kept = (last - first) / buckets or 1.0, dict[int, list[tuple[float, float]]]()
    for point in points:
        kept.setdefault(min(buckets - 1, int((point[0] - first) / width)), []).append(point)
    shown = []
    for group in kept.values():
        low, high = min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])
        shown += [low] if low is high else sorted((low, high))
    return shown


def time_ticks(length_s: float, about: int) -> list[tuple[float, str]]:
    """Return about so many round times from 0 to a length: where they are, from 0 to 1, and their text."""
    if length_s <= 0:
        return [(0.0, "0:00")]
    step = next((step for step in _ROUND_S if length_s / step <= about + 0.01), None)
    step = step or 86400.0 * math.ceil(length_s / 86400 / about)
    texts = []
    for number in range(int(length_s / step + 1e-9) + 1):
        passed_s = number * step
        text = describe_clock(passed_s) if step >= 1 else f"{passed_s:.1f} s"
        texts.append((round(passed_s / length_s, 3), text))
    return texts


def number_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return round numbers from at most `low` to at least `high`.

    >>> number_ticks(0, 5.4), number_ticks(3.0, 3.0)
    ([0.0, 2.0, 4.0, 6.0], [3.0])
    """
    if not high > low:
        return [low]
    rough = (high - low) / about
    if not LEAST < rough < math.inf:
        return [low, high]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, last + 1)]


def show_number(value: float) -> str:
    """Return a number in few characters.

    >>> show_number(1840), show_number(0.000123456), show_number(5.43219), show_number(2e7)
    ('1,840', '0.000123', '5.43', '2e+07')
    """
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def show_percent(share: float) -> str:
    """Return a share with its sign.

    >>> show_percent(0.914), show_percent(0.0312), show_percent(0.0002), show_percent(0)
    ('91 %', '3.1 %', '< 0.1 %', '0 %')
    """
    percent = 100 * share
    if percent <= 0:
        return "0 %"
    if percent < 0.1:
        return "< 0.1 %"
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.1f} %"
