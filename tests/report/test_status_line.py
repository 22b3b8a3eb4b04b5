"""Does one line say what a job does, in any width, and leave out what is least important?"""

from __future__ import annotations

import re

import msgspec
import pytest

from allranks.model.job_status import JobStatus, NodeRow, RankRow, Stuck
from allranks.model.safe_text import width_of
from allranks.report.status_line import describe_rate, short_ranks, short_time, status_line
from allranks.report.text import Style

UNICODE = Style(is_unicode=True, has_colour=False, width=80)
ASCII = Style(is_unicode=False, has_colour=False, width=80)
COLOR = Style(is_unicode=True, has_colour=True, width=80)

TRAINS = JobStatus(
    job="7",
    written_s=1_000_000.0 + 8047,
    started_s=1_000_000.0,
    phase="running",
    num_ranks=16,
    num_up=16,
    step=1840,
    total_steps=10_000,
    steps_per_s=5.4,
    eta_s=1511.0,
    checkpoint=1800,
    checkpoint_s=1_000_000.0 + 7847,
    num_restarts=1,
    max_restarts=3,
    wait_share=0.06,
    waits_for=5,
)
STUCK = Stuck(
    op="all_reduce", for_s=41.2, num_waiting=7, ranks=(3,), place="/home/ada/evaluate.py:88 in run", ends_in_s=559.0
)
HANGS = JobStatus(job="7", written_s=1300.0, started_s=0.0, phase="running", num_ranks=8, num_up=8, stuck=STUCK)


ROLL_CALL = JobStatus(
    job="7",
    written_s=12.0,
    started_s=0.0,
    phase="forming",
    num_nodes=4,
    num_ranks=12,
    missing="node03",
    gives_up_in_s=48.2,
    nodes=(NodeRow(name="node00"), NodeRow(name="node01"), NodeRow(name="node02")),
)


def replace(status: JobStatus, **changes: object) -> JobStatus:
    return msgspec.structs.replace(status, **changes)


# What a job does -> the line.
LINES = {
    "it trains": (
        TRAINS,
        "▸ 2:14:07 · 16/16 ranks · step 1,840/10,000 · 5.4 it/s · ETA 25m · waiting 6 %, most for r5 · "
        "ckpt 1,800 3m ago · restarts 1/3",
    ),
    "it hangs": (
        HANGS,
        "▸ 0:21:40 · 7/8 wait 41 s in all_reduce for r3 evaluate.py:88 · ends in 9:19 · allranks stack latest",
    ),
    "nothing is known": (JobStatus(job="7", written_s=5.0, started_s=0.0, phase="running"), "▸ 0:00:05"),
    "a script that tells no total": (
        replace(TRAINS, total_steps=None, eta_s=None, wait_share=0.0, checkpoint=None, num_restarts=0),
        "▸ 2:14:07 · 16/16 ranks · step 1,840 · 5.4 it/s",
    ),
    "one rank waits, nobody knows for whom": (
        replace(HANGS, num_ranks=2, stuck=Stuck(op="barrier", for_s=130.0, num_waiting=1, ranks=())),
        "▸ 0:21:40 · 1/2 waits 2:10 in barrier · allranks stack latest",
    ),
    "it waits for several ranks": (
        replace(HANGS, stuck=Stuck(op="all_gather", for_s=4.0, num_waiting=5, ranks=(1, 2, 6))),
        "▸ 0:21:40 · 5/8 wait 4 s in all_gather for r1-2,6 · allranks stack latest",
    ),
    "ranks start": (
        replace(HANGS, stuck=None, num_up=0, rows=(RankRow(ranks=(0,), num_ranks=8, state="start"),)),
        "▸ 0:21:40 · 8 ranks · starting",
    ),
    "ranks that make no step of an optimizer, perhaps for hours": (
        replace(HANGS, stuck=None, rows=(RankRow(ranks=(0,), num_ranks=8, state="start"),)),
        "▸ 0:21:40 · 8/8 ranks · no step yet",
    ),
    "some ranks are not up": (
        replace(HANGS, stuck=None, num_up=7, step=3),
        "▸ 0:21:40 · 7/8 ranks · step 3",
    ),
    "it ends after a fault": (replace(HANGS, phase="stopping", num_up=5), "▸ 0:21:40 · 5/8 ranks · stopping"),
    "a node has not come": (
        ROLL_CALL,
        "▸ 0:00:12 · 3/4 nodes · waiting for node03, at most 48 s more",
    ),
    "all nodes have come": (
        replace(ROLL_CALL, missing="", gives_up_in_s=None),
        "▸ 0:00:12 · 3/4 nodes · testing the network",
    ),
    "it begins again": (
        replace(TRAINS, phase="forming", generation=1, checkpoint=None),
        "▸ 2:14:07 · 16/16 ranks · restarting · step 1,840/10,000 · restarts 1/3",
    ),
    "a script without a session after a restart": (
        replace(HANGS, stuck=None, generation=2, step=40),
        "▸ 0:21:40 · 8/8 ranks · step 40 since the restart",
    ),
    "it is paused": (
        replace(HANGS, stuck=None, phase="paused", num_up=0, missing="only 2 of at least 3 nodes", gives_up_in_s=270.0),
        "▸ 0:21:40 · 0/8 ranks · paused: only 2 of at least 3 nodes, at most 4:30 more",
    ),
    "it has ended": (
        replace(TRAINS, phase="over", num_up=0, exit_code=137, checkpoint=None, num_restarts=0),
        "▸ 2:14:07 · ended with exit code 137 · step 1,840/10,000",
    ),
    "a name that is no text for a terminal": (
        replace(HANGS, stuck=msgspec.structs.replace(STUCK, op="a\x1b[2J\nb", ends_in_s=None)),
        r"▸ 0:21:40 · 7/8 wait 41 s in a\x1b[2J b for r3 evaluate.py:88 · allranks stack latest",
    ),
}


@pytest.mark.parametrize("case", LINES)
def test_the_line_says_what_the_job_does(case: str):
    status, expected = LINES[case]
    assert status_line(status, UNICODE) == expected


# Columns -> what is left of the lines.
CUT = {
    200: "▸ 2:14:07 · 16/16 ranks · step 1,840/10,000 · 5.4 it/s · ETA 25m · waiting 6 %, most for r5 · "
    "ckpt 1,800 3m ago · restarts 1/3",
    120: "▸ 2:14:07 · 16/16 ranks · step 1,840/10,000 · 5.4 it/s · ETA 25m · waiting 6 %, most for r5 · restarts 1/3",
    77: "▸ 2:14:07 · step 1,840/10,000 · 5.4 it/s · ETA 25m · waiting 6 %, most for r5",
    64: "▸ 2:14:07 · step 1,840/10,000 · 5.4 it/s · ETA 25m · waiting 6 %",
    60: "▸ 2:14:07 · step 1,840/10,000 · 5.4 it/s · ETA 25m",
    40: "▸ 2:14:07 · step 1,840/10,000 · ETA 25m",
    30: "▸ 2:14:07 · step 1,840/10,000",
    20: "▸ 2:14:07",
    7: "▸ 2…:07",
}
CUT_HANG = {
    77: "> 0:21:40 - 7/8 wait 41 s in all_reduce for r3 evaluate.py:88 - ends in 9:19",
    70: "> 0:21:40 - 7/8 wait 41 s in all_reduce for r3 evaluate.py:88",
    50: "> 0:21:40 - 7/8 wait 41 ...e for r3 evaluate.py:88",
}


@pytest.mark.parametrize("columns", CUT)
def test_a_long_line_loses_its_least_important_parts_first(columns: int):
    assert status_line(TRAINS, UNICODE, columns=columns) == CUT[columns]


@pytest.mark.parametrize("columns", CUT_HANG)
def test_who_is_waited_for_is_kept_and_then_cut_in_the_middle(columns: int):
    assert status_line(HANGS, ASCII, columns=columns) == CUT_HANG[columns]


@pytest.mark.parametrize("status", [TRAINS, HANGS])
@pytest.mark.parametrize("style", [UNICODE, ASCII, COLOR])
def test_no_line_is_wider_than_it_may_be(status: JobStatus, style: Style):
    for columns in range(4, 200):
        text = status_line(status, style, columns=columns, silence="no output for 5m")
        assert width_of(re.sub("\x1b\\[[0-9]+m", "", text)) <= columns


def test_wide_characters_are_counted_as_wide():
    status = replace(HANGS, stuck=msgspec.structs.replace(STUCK, place="\u8a55\u4fa1.py:88 in run"))
    assert status_line(status, UNICODE, columns=50) == "▸ 0:21:40 · 7/8 wait 41 s…reduce for r3 評価.py:88"


def test_a_bar_beside_the_line_tells_steps_and_has_its_room():
    assert status_line(TRAINS, UNICODE, columns=77, spare=40) == "▸ 2:14:07 · waiting 6 %, most for r5"
    assert status_line(TRAINS, UNICODE, columns=140, spare=40).startswith("▸ 2:14:07 · 16/16 ranks · waiting 6 %, most")
    assert status_line(HANGS, UNICODE, columns=77, spare=40).endswith("in all_reduce for r3 evaluate.py:88")


def test_silence_is_said_where_there_is_room():
    silent = status_line(HANGS, UNICODE, silence="no output yet", job="--log-dir x latest")
    assert silent.endswith(" · allranks stack --log-dir x latest · no output yet")
    assert "no output" not in status_line(TRAINS, UNICODE, columns=125, silence="no output yet")


def test_the_color_says_whether_all_is_well():
    assert status_line(TRAINS, COLOR, columns=20) == "\x1b[32m▸\x1b[0m 2:14:07"
    assert status_line(HANGS, COLOR, columns=12) == "\x1b[33m▸ 0:21…py:88\x1b[0m"
    assert status_line(replace(TRAINS, phase="over", exit_code=1), COLOR).startswith("\x1b[31m")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.9, "59s"), (1511, "25m"), (3600, "1h00m"), (7500, "2h05m"), (273_600, "3d4h")]
)
def test_a_short_time_has_its_largest_units(seconds: float, text: str):
    assert short_time(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(5.42, "5.4 it/s"), (0.0, "0 it/s"), (120.4, "120 it/s"), (0.43, "2.3 s/it"), (0.96, "1.0 it/s")]
)
def test_a_rate_is_said_as_bars_say_it(rate: float, text: str):
    assert describe_rate(rate) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((3,), "r3"), ((0, 1, 2, 5), "r0-2,5"), (tuple(range(0, 60, 2)), "r0,2,4,6,8,10,12,14,16 and 21 more")],
)
def test_many_ranks_are_folded(ranks: tuple[int, ...], text: str):
    assert short_ranks(ranks) == text
