"""What `allranks top` shows of a status: rows, columns, lines."""

from __future__ import annotations

import re

import msgspec
import pytest

from allranks.model.beat import GpuSeen, InterfaceSeen
from allranks.model.job_status import EventSeen, JobStatus, NodeRow, RankRow
from allranks.report.text import Style
from allranks.report.top_rows import (
    COLUMNS,
    OPTIONAL,
    ORDERS,
    TopView,
    choose_columns,
    describe_states,
    make_view,
    pick_rows,
    render_view,
    sparkline,
)

LATE = RankRow(
    ranks=(5,),
    num_ranks=1,
    nodes=("n2",),
    state="data",
    place="evaluate.py:88 in run",
    for_s=41.2,
    step=1840,
    is_culprit=True,
    late_s=0.035,
    cost_share=0.07,
    cpu_cores=1.02,
    rss_bytes=12 << 30,
    segments=10_000,
    retransmits=12,
)
WAITING = RankRow(
    ranks=(0, 1, 2, 3, 4, 6, 7),
    num_ranks=7,
    nodes=("n1", "n2"),
    state="all_reduce",
    for_s=40.0,
    step=1840,
    cpu_cores=2.0,
)
STATUS = JobStatus(
    job="4711",
    written_s=1000.0,
    started_s=100.0,
    phase="running",
    num_ranks=8,
    num_up=8,
    num_nodes=2,
    step=1840,
    rates=(0.0, 2.0, 4.0),
    rows=(LATE, WAITING),
    nodes=(
        NodeRow(
            name="n2", num_ranks=4, interfaces=(InterfaceSeen(name="ens1", sent_mbit_s=812.4, received_mbit_s=1.5),)
        ),
        NodeRow(name="n1", num_ranks=4, silent_s=70.0, is_lost=True),
    ),
    events=(EventSeen(time_s=900.0, event="checkpoint", text="step 1800"),),
)


def show(view: TopView, *, width: int = 80, is_unicode: bool = False, has_colour: bool = False) -> list[str]:
    lines = render_view(view, Style(is_unicode=is_unicode, has_colour=has_colour, width=width))
    return [re.sub(r"\d\d:\d\d:\d\d(?= checkpoint)", "TIME", line) for line in lines]


def test_eighty_columns_have_what_matters_most() -> None:
    view = make_view(STATUS, now_s=1001.0)
    assert show(view)[1:] == [
        "7 in all_reduce, 1 late: 5",
        "_=# 4 it/s, at most 4",
        "RANKS             STATE              FOR WHERE                        LATE  COST",
        "x 5               data              41 s evaluate.py:88 in run       35 ms   7 %",
        "  7: 0-4,6-7      all_reduce        40 s",
        "NODES",
        "  n2              4 ranks, ens1 812 out 1.5 in Mbit/s",
        "x n1              4 ranks, lost, silent for 1:10",
        "EVENTS",
        "  TIME checkpoint step 1800",
    ]


def test_a_wide_terminal_has_all_columns_and_the_last_line_of_the_log() -> None:
    view = make_view(STATUS, now_s=1001.0, last_lines={5: "loss \x1b[31m2.5 " + "x" * 100, 0: "token=hf_" + "a" * 34})
    head, late, waiting = show(view, width=200)[3:6]
    assert head.split() == " ".join(column.title for column in COLUMNS if column.title not in OPTIONAL).split()
    assert len(late) == 200
    assert late.split()[:1] + late.split()[-3:-1] == ["x", "loss", "\\x1b[31m2.5"]
    assert "102 %    12 GiB n2                 1,840    812    1.5  0.12 %" in late
    assert "hf_aaaa" not in waiting
    assert waiting.split()[2:6] == ["all_reduce", "40", "s", "200"]


@pytest.mark.parametrize(
    ("gpu", "titles", "cells"),
    [
        (GpuSeen(97, 62_695, 81_559), ["RSS", "GPU", "GPU MEM", "NODE"], ["GiB", "97", "%", "61.2/79.6", "G", "n2"]),
        (GpuSeen(None, 1_229, 143_771), ["CPU", "RSS", "GPU MEM", "NODE"], ["12", "GiB", "1/140", "G", "n2", "1,840"]),
        (None, ["COST", "CPU", "RSS", "NODE"], ["102", "%", "12", "GiB", "n2", "1,840", "812"]),
    ],
)
def test_gpus_have_columns_where_a_row_has_a_value(gpu: GpuSeen | None, titles: list[str], cells: list[str]) -> None:
    busy = msgspec.structs.replace(LATE, gpu=gpu)
    view = make_view(msgspec.structs.replace(STATUS, rows=(busy, WAITING)), now_s=1001.0)
    head, late = show(view, width=200)[3:5]
    assert " ".join(titles) in " ".join(head.split())
    assert " ".join(cells) in " ".join(late.split())


def test_what_is_wrong_wraps_where_the_screen_is_narrow() -> None:
    view = make_view(STATUS, now_s=1001.0, said=("  rank 2 has been in sleep at train.py:11; 2 ranks wait",))
    assert show(view, width=30)[:2] == ["  rank 2 has been in sleep at", "  train.py:11; 2 ranks wait"]


def test_a_culprit_is_red_where_there_is_color_and_marked_everywhere() -> None:
    chronic = RankRow(ranks=(8,), num_ranks=1, state="step", cost_share=0.05)
    view = make_view(msgspec.structs.replace(STATUS, rows=(*STATUS.rows, chronic)), now_s=1001.0)
    colored = show(view, has_colour=True, is_unicode=True)
    assert [line[:10] for line in colored if "data" in line] == ["\x1b[31;1m✗ 5"]
    assert [line[:8] for line in colored if "  step " in line] == ["\x1b[33m! 8"]
    assert not any("\x1b" in line for line in show(view))
    assert all(line.isascii() for line in show(view))


@pytest.mark.parametrize("width", [1, 40, 79, 80, 120, 200, 500])
def test_a_table_is_no_wider_than_its_terminal(width: int) -> None:
    columns = choose_columns(width)
    assert [column.title for column in columns] == [column.title for column in COLUMNS][: len(columns)]
    assert sum(column.width + 1 for column in columns) - 1 <= max(width, COLUMNS[0].width)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], ""),
        ([RankRow(ranks=(0, 1), num_ranks=2, state="step")], "2 in step"),
        ([RankRow(ranks=(0, 1), num_ranks=2, state="running")], "2 running"),
        ([RankRow(ranks=(3,), num_ranks=1, state="lost"), RankRow(ranks=(0,), num_ranks=1)], "1 lost"),
        (
            [
                RankRow(ranks=(17, 512, 513), num_ranks=3, state="data", is_culprit=True),
                RankRow(ranks=tuple(range(17)), num_ranks=1000, state="all_reduce"),
                RankRow(ranks=(900,), num_ranks=21, state="all_reduce"),
            ],
            "1,021 in all_reduce, 3 late: 17,512-513",
        ),
        (
            [RankRow(ranks=tuple(range(0, 128, 2)), num_ranks=200, state="data", is_culprit=True)],
            "200 late: 0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30,32,34,36,38,...",
        ),
    ],
    ids=["none", "one state", "no steps seen", "lost, and unknown", "many", "too many to tell"],
)
def test_what_all_ranks_do_is_one_line(rows: list[RankRow], text: str) -> None:
    assert describe_states(rows) == text


@pytest.mark.parametrize(
    ("changes", "now_s", "exit_code", "notice"),
    [
        ({}, 1010.0, None, ""),
        ({}, 1075.0, None, "no news for 1:15, since {at}: its leader is gone or hangs"),
        ({}, 1075.0, 137, "ended with exit code 137; this is the last state, of {at}"),
        ({"exit_code": 0}, 1001.0, None, "ended with exit code 0; this is the last state, of {at}"),
        ({"phase": "over"}, 1001.0, None, "ended; this is the last state, of {at}"),
    ],
    ids=["of now", "old", "its leader was killed", "over", "over, code not known"],
)
def test_a_state_that_is_not_of_now_says_so(
    changes: dict[str, object], now_s: float, exit_code: int | None, notice: str
) -> None:
    view = make_view(msgspec.structs.replace(STATUS, **changes), now_s=now_s, exit_code=exit_code)
    at = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(re.escape(notice).replace(r"\{at\}", at), view.notice)
    assert (view.notice in show(view)) == bool(notice)


def test_rows_are_sorted_and_searched() -> None:
    rows = make_view(STATUS, now_s=1001.0).rows
    found = {order: [row.of.ranks[0] for row in pick_rows(rows, order=order)] for order in ORDERS}
    assert found == {
        "worst": [5, 0], "rank": [0, 5], "late": [5, 0], "cost": [5, 0], "cpu": [0, 5], "gpu": [5, 0], "rss": [5, 0],
        "out": [5, 0],
    }  # fmt: skip
    assert [[row.of.ranks[0] for row in pick_rows(rows, wanted=text)] for text in ("EVAL", "n[1", "none", "")] == [
        [5], [0], [], [5, 0],
    ]  # fmt: skip


def test_rates_are_bars_from_zero() -> None:
    unicode = Style(is_unicode=True, has_colour=False, width=80)
    assert sparkline((), unicode) == ""
    assert sparkline((0.0, 0.0), unicode) == "▁▁ 0 it/s, at most 0"
    assert sparkline((9.0, 1.0, 4.0, 8.0), unicode, at_most=3) == "▂▅█ 8 it/s, at most 8"
