"""What do the rows of a measurement look like: as nccl-tests prints them, as bars, and as a plot? Pure.

A bandwidth is a bus bandwidth in GB (1e9 bytes) a second, comparable with the link's speed one way. Where the data
interfaces report no speed, as virtual ones do, the slowest TCP stream stands for it; one node has no link.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from allranks.comm.bench_table import BenchRow, BenchTable
from allranks.report.text import count_of

_HEAD = ("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "p95", "link")
_UNITS = ("(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(%)")
_WIDTHS = (12, 12, 8, 6, 6, 9, 7, 7, 7, 9, 6)
"""As nccl-tests has them, up to #wrong; times of Ethernet have more digits."""
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Distinct also for color-blind readers. Source: Okabe and Ito, "Color Universal Design" (2008)."""
_WIDTH, _HEIGHT = 900, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 220, 50, 60
_SVG_TEXT = '<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
_SVG_LINE = '<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" stroke="{}"{}/>'


def find_link_gb_s(table: BenchTable) -> tuple[float | None, str]:
    """Return the speed that bandwidths are compared with, and what it is of; None: there is none."""
    if len(table.nodes) < 2:
        return None, "one node has no link"
    if table.link_mbit_s:
        return table.link_mbit_s / 8000, "slowest data interface"
    if mbit_s := table.slowest_mbit_s():
        return mbit_s / 8000, "slowest TCP stream; the data interfaces report no speed"
    return None, "the data interfaces report no speed, and no TCP stream was measured"


def render_table(table: BenchTable) -> str:
    """Return the rows in the columns of nccl-tests, then p95 and percent of the link, without a final newline."""
    link_gb_s, of_what = find_link_gb_s(table)
    link = f"{_number(link_gb_s)} GB/s ({of_what})" if link_gb_s else f"unknown ({of_what})"
    lines = [f"# {_describe(table)}; link: {link}", "#" + _align(_HEAD)[1:]]
    lines.append("#" + _align(_UNITS)[1:])
    for name, rows in _by_collective(table.rows):
        lines += [f"# {name}", *(_align(_cells(row, table.ranks, link_gb_s)) for row in rows)]
    return "\n".join(lines)


def _describe(table: BenchTable) -> str:
    return f"{table.backend}, {count_of(len(table.nodes), 'node')}, {count_of(table.ranks, 'rank')}"


def _cells(row: BenchRow, ranks: int, link_gb_s: float | None) -> Sequence[str]:
    busbw = row.busbw_gb_s(ranks)
    return (
        str(row.size_bytes), str(row.count), row.dtype, row.redop, str(row.root), f"{row.time_s * 1e6:.1f}",
        _number(row.algbw_gb_s()), _number(busbw), "N/A" if row.wrong is None else str(row.wrong),
        f"{row.p95_s * 1e6:.1f}", f"{100 * busbw / link_gb_s:.1f}" if link_gb_s and busbw else "-",
    )  # fmt: skip


def _align(cells: Sequence[str]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()


def _by_collective(rows: Iterable[BenchRow]) -> Iterable[tuple[str, list[BenchRow]]]:
    """Group the rows by collective and number in flight, in the order of their first row."""
    groups = dict[str, list[BenchRow]]()
    for row in rows:
        name = row.collective + (f", {row.in_flight} in flight: time of one" if row.in_flight > 1 else "")
        groups.setdefault(name, []).append(row)
    return groups.items()


def _number(value: float) -> str:
    """Three digits, without an exponent: 0.0118, 0.118, 11.8, 118."""
    return f"{value:.{min(5, max(0, 2 - math.floor(math.log10(value))))}f}" if value > 0 else "0"


def draw_bars(table: BenchTable, *, width: int = 80, is_unicode: bool = True) -> str:
    """Return a bar for the bus bandwidth of each row; the full width is the link, or the fastest row."""
    link_gb_s, _ = find_link_gb_s(table)
    full_gb_s = max([link_gb_s or 0.0, *(row.busbw_gb_s(table.ranks) for row in table.rows)])
    lines, cells = list[str](), max(10, width - 34)
    for name, rows in _by_collective(table.rows):
        lines.append(name)
        for row in (row for row in rows if row.size_bytes):
            busbw = row.busbw_gb_s(table.ranks)
            share = f"{100 * busbw / link_gb_s:3.0f} %" if link_gb_s else ""
            bar = _bar(busbw / full_gb_s if full_gb_s else 0.0, cells, is_unicode=is_unicode)
            lines.append(f"  {_size(row.size_bytes):>9}  {bar:<{cells}} {_number(busbw):>7} GB/s {share}".rstrip())
        lines += [f"  {row.time_s * 1e6:.0f} us" for row in rows if not row.size_bytes]
    return "\n".join(lines)


def _bar(share: float, cells: int, *, is_unicode: bool) -> str:
    if not is_unicode:
        return "#" * round(share * cells)
    whole, eighths = divmod(round(share * cells * 8), 8)
    return "\u2588" * whole + (chr(0x2590 - eighths) if eighths else "")


def _size(size_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= size / 2:
            return f"{size_bytes / size:.3g} {unit}"
    return f"{size_bytes} B"


def draw_svg(table: BenchTable) -> str:
    """Return a plot: bus bandwidth against size (logarithmic), a line for each collective, the link dashed."""
    link_gb_s, of_what = find_link_gb_s(table)
    groups = [(name.partition(":")[0], [row for row in rows if row.size_bytes]) for name, rows in
              _by_collective(table.rows)]  # fmt: skip
    groups = [(name, rows) for name, rows in groups if rows]
    sizes = [row.size_bytes for _, rows in groups for row in rows] or [1]
    low, high = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    top_gb_s = _round_up(max([link_gb_s or 0.0, *(row.busbw_gb_s(table.ranks) for _, rows in groups for row in rows)]))

    def x(size_bytes: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (math.log2(size_bytes) - low) / max(1, high - low)

    def y(gb_s: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * gb_s / top_gb_s

    right = _WIDTH - _RIGHT
    parts = [_text(_LEFT, 24, f"Bus bandwidth, {_describe(table)}", "start")]
    for power in range(low, high + 1, max(1, (high - low) // 8)):
        parts.append(_SVG_LINE.format(x(2.0**power), y(0), x(2.0**power), _TOP, "#dddddd", ""))
        parts.append(_text(x(2.0**power), y(0) + 18, _size(2**power), "middle"))
    for step in range(5):
        gb_s = top_gb_s * step / 4
        parts.append(_SVG_LINE.format(_LEFT, y(gb_s), right, y(gb_s), "#999999" if not step else "#dddddd", ""))
        parts.append(_text(_LEFT - 6, y(gb_s) + 4, f"{gb_s:.4g}", "end"))
    parts += [_text(_LEFT, _TOP - 8, "GB/s", "end"), _text((_LEFT + right) / 2, _HEIGHT - 16, "size", "middle")]
    if link_gb_s:
        parts.append(_SVG_LINE.format(_LEFT, y(link_gb_s), right, y(link_gb_s), "#555555", ' stroke-dasharray="6 4"'))
        parts.append(_text(right + 8, y(link_gb_s) + 4, f"link {_number(link_gb_s)}", "start"))
        parts.append(_text(right, 24, of_what, "end"))
    for number, (name, rows) in enumerate(groups):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [(x(row.size_bytes), y(row.busbw_gb_s(table.ranks))) for row in rows]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points]
        at = _TOP + 30 + 20 * number
        parts.append(_SVG_LINE.format(right + 40, at, right + 60, at, colour, ' stroke-width="3"'))
        parts.append(_text(right + 66, at + 4, name, "start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
    return "\n".join(
        [f'{head}font-size="13">', '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""]
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return _SVG_TEXT.format(x=x, y=y, anchor=anchor, text=escape(text))


def _round_up(value: float) -> float:
    """To 1, 2, 4 or 8 times a power of ten: four steps of an axis then have short numbers."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10) if value <= step * power * (1 + 1e-9))
