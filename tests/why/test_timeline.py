"""The timeline: in order, victims folded, the culprit marked; and what is between two times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, time, timedelta

import pytest

from allranks.model.errors import UsageError
from allranks.why.blame import conclude
from allranks.why.conclusion import TimelineRow
from allranks.why.last import last_words
from allranks.why.logs.log_events import Logs
from allranks.why.timeline import MAX_ROWS, make_timeline, render_timeline, tell_clocks
from allranks.why.window import Bound, narrow, read_bound

Read = Callable[[str | Mapping[str, str]], Logs]
WATCHDOG = (
    "[rank{rank}]:[E325 14:03:{second:02} ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=80078, OpType=BROADCAST, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600042 "
    "milliseconds before timing out.\n"
)
CLOSED = "[{stamp}] RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:4711\n"


def test_victims_are_folded_and_the_culprit_is_marked(read: Read) -> None:
    texts = {f"rank_{rank}.err": WATCHDOG.format(rank=rank, second=11 + rank) for rank in (0, 1, 2, 4)}
    texts["rank_3.err"] = (
        "[E325 14:03:09 x.cpp:1] CUDA out of memory. Tried to allocate 2.00 GiB\n"
        'Traceback (most recent call last):\n  File "train.py", line 7, in step\nValueError: no label\n'
    )
    texts["rank_3.err"] += WATCHDOG.format(rank=3, second=30)
    logs = read(texts)
    rows = make_timeline(logs, conclude(logs)[0])
    folded = next(row for row in rows if row.lines == 4)
    assert (folded.who, folded.cause, folded.is_culprit) == ("ranks 0-2,4", "AR490 collective-timeout", False)
    assert folded.source == "rank_0.err:1"
    assert [row.who for row in rows if row.is_culprit] == ["rank 3"] * 3
    text = render_timeline(rows)
    (line,) = [line for line in text.splitlines() if "ranks 0-2,4" in line]
    assert line.startswith("   14:03:11  ranks 0-2,4  AR490 collective-timeout: ")
    assert line.endswith("(4 lines) [rank_0.err:1]")
    assert [line[0] for line in text.splitlines() if "rank 3" in line] == [">", ">", ">"]


def test_sources_are_merged_by_time_and_those_without_come_last(read: Read) -> None:
    texts = {
        "rank_0.log": CLOSED.format(stamp="2026-03-25 10:00:05"),
        "rank_1.log": CLOSED.format(stamp="2026-03-25 10:00:01").replace("10.0.0.3", "10.0.0.4")
        + "ValueError: then this\n",
        "rank_2.log": "KeyError: 'no time here'\n",
    }
    rows = make_timeline(read(texts))
    assert [(row.who, row.time == "") for row in rows] == [
        ("ranks 0-1", False),
        ("rank 1", False),
        ("rank 2", True),
    ]
    assert render_timeline(rows).splitlines()[0].startswith("10:00:01  ranks 0-1  AR215 peer-connection-lost: ")


def test_what_a_clock_is_off_is_taken_off_and_said(read: Read) -> None:
    """All ranks time out at the same moments; node03's clock shows a minute more."""
    texts = {}
    for rank in range(4):
        text = "".join(
            WATCHDOG.format(rank=rank, second=10 + seq)
            .replace("80078", str(seq))
            .replace("14:03", f"14:0{3 + rank // 3}")
            for seq in range(5)
        )
        texts[f"node0{rank}_rank_{rank}.err"] = text
    texts["node03_rank_3.err"] += "[E325 14:04:20 x.cpp:1] CUDA out of memory. Tried to allocate 2.00 GiB\n"
    logs = read(texts)
    assert tell_clocks(logs) == ["the clock of node03 is 60.0 s ahead: corrected above"]
    (oom,) = [line for line in render_timeline(make_timeline(logs)).splitlines() if "AR109" in line]
    assert oom.startswith("14:03:20  node03 rank 3  ")


def test_times_without_a_date_are_relative(read: Read) -> None:
    full = "OSError: [Errno 28] No space left on device"
    text = f"10:00:01 CUDA out of memory. Tried to allocate 2.00 GiB\n10:00:03 {full}\n"
    lines = render_timeline(make_timeline(read({"a.log": text}))).splitlines()
    assert [line[:8] for line in lines] == ["+0.0 s  ", "+2.0 s  "]


def test_several_days_have_their_date(read: Read) -> None:
    texts = {
        "a.log": "2026-03-25 23:59:59 CUDA out of memory. Tried to allocate 2.00 GiB\n"
        "2026-03-26 00:00:01 OSError: [Errno 28] No space left on device\n"
    }
    text = render_timeline(make_timeline(read(texts)))
    assert [line[:14] for line in text.splitlines()] == ["03-25 23:59:59", "03-26 00:00:01"]


def row(number: int) -> TimelineRow:
    return TimelineRow(time="", who="", text=f"event {number}", cause=None, source=f"a.log:{number}", lines=1)


def test_a_long_timeline_is_cut_in_the_middle() -> None:
    rows = [row(number) for number in range(1000)]
    lines = render_timeline(rows).splitlines()
    assert len(lines) == MAX_ROWS + 1
    assert lines[0] == "event 0 [line 0]"
    assert lines[30] == "... 940 more ..."
    assert lines[-1] == "event 999 [line 999]"
    assert len(render_timeline(rows[:MAX_ROWS]).splitlines()) == MAX_ROWS


def test_a_timeline_cannot_speak_to_the_terminal() -> None:
    nasty = TimelineRow(time="", who="n\x07", text="a\u202eb", cause=None, source="x\x1b[2J\n:1", lines=1)
    assert render_timeline([nasty]).isprintable()


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("30m", timedelta(minutes=30)),
        ("2h", timedelta(hours=2)),
        ("-1.5d", timedelta(days=1.5)),
        ("10:00", time(10)),
        ("2026-03-25", datetime(2026, 3, 25, tzinfo=UTC)),
        ("2026-03-25T10:00", datetime(2026, 3, 25, 10, tzinfo=UTC)),
        ("2026-03-25 10:00:01+02:00", datetime(2026, 3, 25, 8, 0, 1, tzinfo=UTC)),
    ],
)
def test_a_bound_is_a_time_or_relative(text: str, bound: Bound) -> None:
    assert read_bound(text) == bound


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01", "h", "1e9m"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a time"):
        read_bound(text)


@pytest.mark.parametrize(
    ("since", "until", "kept"),
    [
        ("2026-03-25T10:00:03", None, [2, 3, 4]),
        (None, "2026-03-25T10:00:03", [1, 2, 3]),
        ("10:00:04", None, [2, 4]),
        ("2s", None, [2, 3, 4]),
        ("2s", "1s", [2, 3]),
        (None, None, [1, 2, 3, 4]),
    ],
)
def test_what_is_out_of_the_span_goes_and_what_has_no_time_stays(
    read: Read, since: str | None, until: str | None, kept: list[int]
) -> None:
    text = (
        "2026-03-25 10:00:01 CUDA out of memory. Tried to allocate 1.00 GiB\n"
        "CUDA out of memory. Tried to allocate 2.00 GiB\n"
        "2026-03-25 10:00:03 CUDA out of memory. Tried to allocate 3.00 GiB\n"
        "2026-03-25 10:00:05 CUDA out of memory. Tried to allocate 4.00 GiB\n"
    )
    logs = narrow(read({"a.log": text}), *(read_bound(each) if each else None for each in (since, until)))
    assert [event.line.number for event in logs.events] == kept
    assert [line.number for line in logs.tails[0].lines] == kept


def test_lines_without_a_year_are_compared_by_their_day(read: Read) -> None:
    text = "".join(f"[E325 10:00:0{second} x.cpp:1] CUDA out of memory. Tried to allocate 1 GiB\n" for second in (1, 3))
    logs = read({"a.log": text})
    assert [event.line.number for event in narrow(logs, read_bound("2026-03-25T10:00:02"), None).events] == [2]
    assert not narrow(logs, read_bound("2026-03-26"), None).events


def test_last_words_are_of_the_log_that_stops_first(read: Read) -> None:
    texts = {f"rank_{rank}.log": f"2026-03-25 10:00:0{9 - rank} step {rank}\n" for rank in range(3)}
    clause, lines = last_words(read(texts))
    assert clause == "the last lines of rank 2 (rank_2.log), which stopped first, are"
    assert [line.text for line in lines] == ["2026-03-25 10:00:07 step 2"]


def test_without_times_nobody_can_say_who_stopped_first(read: Read) -> None:
    clause, lines = last_words(read({"a.log": "x\ny\n", "b.log": "z\n"}))
    assert clause == (
        "which of the 2 logs stopped first is unknown, since some have no times; the last lines of the shortest, "
        "b.log, are"
    )
    assert [line.text for line in lines] == ["z"]


def test_empty_logs_have_no_last_words(read: Read) -> None:
    assert last_words(read({"a.log": ""})) == ("", ())
