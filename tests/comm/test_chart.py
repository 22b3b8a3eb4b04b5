"""Rows as nccl-tests prints them, as bars and as a plot: pure."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from allranks.comm.bench_table import BenchRow, BenchTable, Pair
from allranks.comm.chart import draw_bars, draw_svg, find_link_gb_s, render_table

MIB = 1 << 20
# At 1 Gbit/s (0.125 GB/s) and six ranks, an all-reduce of 15 MB that takes 0.25 s has 0.1 GB/s: 80 % of the link.
ROW = BenchRow(
    collective="all_reduce", size_bytes=15_000_000, count=3_750_000, redop="sum", time_s=0.25, p95_s=0.3, wrong=0
)
TABLE = BenchTable(
    backend="gloo",
    nodes=tuple(f"n{number}" for number in range(1, 7)),
    ranks=6,
    link_mbit_s=1000,
    rows=(
        ROW,
        replace(ROW, in_flight=8, time_s=0.2, wrong=3),
        BenchRow(collective="broadcast", size_bytes=MIB, count=MIB // 4, root=0, time_s=0.01, p95_s=0.02, wrong=0),
        BenchRow(collective="barrier", size_bytes=0, count=0, time_s=0.0004, p95_s=0.001),
    ),
)


def test_the_columns_are_those_of_nccl_tests_then_p95_and_percent_of_the_link() -> None:
    assert render_table(TABLE).splitlines() == [
        "# gloo, 6 nodes, 6 ranks; link: 0.125 GB/s (slowest data interface)",
        "#       size         count      type   redop    root       time    algbw    busbw   #wrong        p95    link",
        "#        (B)    (elements)                                 (us)   (GB/s)   (GB/s)                (us)     (%)",
        "# all_reduce",
        "    15000000       3750000     float     sum      -1   250000.0   0.0600    0.100        0   300000.0    80.0",
        "# all_reduce, 8 in flight: time of one",
        "    15000000       3750000     float     sum      -1   200000.0   0.0750    0.125        3   300000.0   100.0",
        "# broadcast",
        "     1048576        262144     float    none       0    10000.0    0.105    0.105        0    20000.0    83.9",
        "# barrier",
        "           0             0     float    none      -1      400.0        0        0      N/A     1000.0       -",
    ]


@pytest.mark.parametrize(
    ("changed", "link"),
    [
        ({}, (0.125, "slowest data interface")),
        (
            {
                "link_mbit_s": None,
                "pairs": (Pair(source="n1", target="n2", mbit_s=80.0), Pair(source="n2", target="n1")),
            },
            (0.01, "slowest TCP stream; the data interfaces report no speed"),
        ),
        ({"link_mbit_s": None}, (None, "the data interfaces report no speed, and no TCP stream was measured")),
        ({"nodes": ("n1",)}, (None, "one node has no link")),
    ],
    ids=["its speed", "a stream", "neither", "one node"],
)
def test_the_link_is_what_it_reports_or_what_a_stream_carried(changed: dict, link: tuple) -> None:  # type: ignore[type-arg]
    table = replace(TABLE, **changed)
    assert find_link_gb_s(table) == link
    assert ("unknown" in render_table(table)) == (link[0] is None)


def test_a_bar_is_as_long_as_its_part_of_the_link() -> None:
    lines = draw_bars(TABLE, width=74, is_unicode=False).splitlines()
    assert lines[:4] == [
        "all_reduce",
        "   14.3 MiB  ################################           0.100 GB/s  80 %",
        "all_reduce, 8 in flight: time of one",
        "   14.3 MiB  ########################################   0.125 GB/s 100 %",
    ]
    assert lines[-1] == "  400 us"
    assert draw_bars(TABLE, width=74).splitlines()[5].count("\u2588") == 33  # 83.9 % of 40 cells, and half a cell


def test_the_plot_has_a_line_for_each_collective_and_the_link() -> None:
    small = replace(ROW, size_bytes=MIB, time_s=0.04, count=MIB // 4)
    root = ElementTree.fromstring(draw_svg(replace(TABLE, rows=(small, *TABLE.rows))))
    space = "{http://www.w3.org/2000/svg}"
    lines = {line.get("stroke"): line.get("points") for line in root.iter(f"{space}polyline")}
    assert len(lines) == 3  # a barrier has no bandwidth
    (first, second) = (tuple(map(float, point.split(","))) for point in lines["#0072b2"].split())  # type: ignore[union-attr]
    assert first[0] < second[0]
    assert first[1] > second[1]  # 0.044 GB/s lies below 0.1 GB/s
    (link,) = (line for line in root.iter(f"{space}line") if line.get("stroke-dasharray"))
    assert float(link.get("y1") or 0) == pytest.approx(420 - 370 * 0.125 / 0.2, abs=0.1)
    assert "all_reduce, 8 in flight" in [text.text for text in root.iter(f"{space}text")]


@pytest.mark.parametrize("rows", [(), TABLE.rows[-1:], TABLE.rows[:1]], ids=["none", "a barrier", "one"])
def test_any_rows_make_a_plot(rows: tuple[BenchRow, ...]) -> None:
    for table in (replace(TABLE, rows=rows), replace(TABLE, rows=rows, link_mbit_s=None, backend="<&>")):
        ElementTree.fromstring(draw_svg(table))
        draw_bars(table)
        render_table(table)
