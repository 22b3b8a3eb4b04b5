"""In which order, and from where on, are the lines of several ranks printed?"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from allranks.files.folder import Folder
from allranks.launch.batch.output import File, begin_of, merge, read_bar, read_new
from allranks.report.growth import INTERVALS_S, NAME, Growth, GrowthRecorder, index_line, read_growth
from allranks.report.rundir import RunDir
from conftest import Tell, wait_until

RUN = "20261123-040000-42"
BEGAN_S = datetime(2026, 11, 23, 4, 0).timestamp()


def texts(files: list[File], **wanted: object) -> list[str]:
    return [line.text.decode() for line in merge(files, **wanted)]  # type: ignore[arg-type]


Make = Callable[..., File]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A file of a rank, whose lines were there at these times."""

    def make_one(rank: int, lines: dict[float, str], *, is_recorded: bool = True) -> File:
        path = tmp_path / f"rank_{rank}.out"
        path.write_text("".join(lines.values()))
        growth, size = Growth(), 0
        for time_s, text in lines.items() if is_recorded else ():
            size += len(text)
            growth.times_s.append(time_s)
            growth.sizes.append(size)
        return File(path=path, stream="out", prefix=f"[r{rank}] ", rank=rank, growth=growth)

    return make_one


def test_lines_come_in_the_order_of_their_times_and_those_of_one_time_stay_together(make: Make) -> None:
    files = [make(0, {1.0: "a\n", 2.0: "c\nd\n", 4.0: "h\n"}), make(1, {1.5: "b\n", 2.0: "e\nf\n", 3.0: "g\n"})]
    assert "".join(texts(files)) == "abcdefgh"
    assert [line.time_s for line in merge(files)] == [1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(("tail", "expected"), [(0, ""), (1, "h"), (3, "fgh"), (6, "cdefgh"), (99, "abcdefgh")])
def test_a_tail_is_that_of_all_files_together(tail: int, expected: str, make: Make) -> None:
    files = [make(0, {1.0: "a\n", 2.0: "c\nd\n", 4.0: "h\n"}), make(1, {1.5: "b\n", 2.0: "e\nf\n", 3.0: "g\n"})]
    assert "".join(texts(files, tail=tail)) == expected


def test_a_tail_is_found_in_a_large_file_of_long_and_unfinished_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.out"
    path.write_bytes(b"a" * 200_000 + b"\nshort\n" + b"b" * 70_000 + b"\n\nlast")
    file = File(path=path, stream="out")
    assert [len(line.text) for line in merge([file], tail=4)] == [5, 70_000, 0, 4]
    assert [len(line.text) for line in merge([file], tail=5)] == [200_000, 5, 70_000, 0, 4]


def test_lines_since_a_time_begin_there_in_every_file(make: Make) -> None:
    last_s = BEGAN_S + 100
    files = [make(0, {BEGAN_S: "a\n", last_s: "c\n"}), make(1, {BEGAN_S + 60: "b\n", last_s: "d\n"})]
    for file in files:
        os.utime(file.path, (last_s, last_s))
    assert texts(files, since="50s") == ["b", "c", "d"]
    assert texts(files, since="04:01") == ["b", "c", "d"]
    assert texts(files, since="2026-11-23T04:01:30") == ["c", "d"]
    assert texts(files, since="1h") == ["a", "b", "c", "d"]


def test_a_time_of_day_is_one_of_the_last_lines_day() -> None:
    assert begin_of("03:30", BEGAN_S) == BEGAN_S - 1800
    assert begin_of("2026-11-23T04:00:00+00:00", 0.0) == datetime.fromisoformat("2026-11-23T04:00:00+00:00").timestamp()


def test_a_file_without_times_has_that_of_its_last_change_and_says_so(make: Make) -> None:
    old = make(0, {1.0: "x\n", 2.0: "y\n"}, is_recorded=False)
    os.utime(old.path, (5.0, 5.0))
    lines = list(merge([old, make(1, {4.0: "a\n", 6.0: "b\n"})]))
    assert [(line.text, line.is_time_known) for line in lines] == [
        (b"a", True), (b"x", False), (b"y", False), (b"b", True),
    ]  # fmt: skip


def test_a_line_is_shown_once_it_has_ended_and_a_progress_bar_once_for_each_state(make: Make) -> None:
    file = make(0, {1.0: "whole\n10 %\r20 %"})
    assert [line.text for line in read_new([file])] == [b"whole"]
    bar = read_bar(file)
    assert bar is not None
    assert bar.text == b"20 %"
    assert read_bar(file) is None
    with file.path.open("a") as more:
        more.write("\r30 %\r40 %")
    assert (bar := read_bar(file)) is not None
    assert bar.text == b"40 %"
    with file.path.open("a") as more:
        more.write("\nend")
    assert read_new([file]) == []  # the same state was shown
    assert [line.text for line in read_new([file], is_last=True)] == [b"end"]


def test_lines_without_an_end_and_holes_are_read_in_pieces(make: Make) -> None:
    file = make(0, {1.0: "short\n"})
    with file.path.open("ab") as more:
        more.write(b"x" * 2_500_000)
        more.truncate(1 << 40)
        more.seek(0, os.SEEK_END)
        more.write(b"behind\n")
    lengths = [len(line.text.strip(b"\0")) for line in merge([file])]
    assert [size for size in lengths if size] == [5, 1 << 20, 1 << 20, 2_500_000 - (2 << 20), len("behind")]


def test_what_has_been_written_is_read_in_parts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.launch.batch.output.NEW_BYTES", 4000)
    file = make(0, {1.0: ("x" * 99 + "\n") * 100})
    sizes = []
    while lines := read_new([file]):
        sizes.append(len(lines))
    assert sizes == [41, 41, 18]


def test_the_recorder_writes_what_has_grown_and_a_last_line_at_its_end(tmp_path: Path) -> None:
    recorder = GrowthRecorder(Folder.at(tmp_path))
    out = tmp_path / "rank_0.out"
    out.write_text("a\n")
    recorder.watch(["rank_0.out", "rank_1.out"])
    wait_until(lambda: (tmp_path / NAME).exists() and (tmp_path / NAME).read_text(), "the first line")
    out.write_text("a\nb\n")
    recorder.end()
    lines = (tmp_path / NAME).read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines] == ["rank_0.out=2", "rank_0.out=4"]
    growth = read_growth(tmp_path)["rank_0.out"]
    assert growth.sizes == [2, 4]
    assert (growth.time_of(2), growth.time_of(3), growth.time_of(5)) == (*growth.times_s, None)
    assert [size for size, _ in INTERVALS_S] == sorted(size for size, _ in INTERVALS_S)


def test_an_index_with_a_clock_that_was_set_back_and_half_a_line_is_read(tmp_path: Path) -> None:
    text = index_line(10.0, {"a": 1}) + index_line(7.0, {"a": 5, "b": 1}) + "11.0 a=9 b=x"
    (tmp_path / NAME).write_text(text)
    found = read_growth(tmp_path)
    assert (found["a"].times_s, found["a"].sizes) == ([10.0, 10.0, 11.0], [1, 5, 9])
    assert found["b"].size_at(8.0) == 1
    assert read_growth(tmp_path / "none") == {}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run of two ranks on n1 and two on n2, without SLURM, that has ended."""
    run_dir = RunDir(tmp_path / "runs", RUN)
    run_dir.create()
    run_dir.create_attempt(None)
    run_dir.add_event("started", command=["python", "train.py"], members=["n1", "n2"])
    for at, node in enumerate(("n1", "n2")):
        folder = run_dir.create_node(node).path
        for rank in (2 * at, 2 * at + 1):
            (folder / f"rank_{rank}.out").write_text(f"begin {rank}\nend {rank}\n")
            sizes = ((BEGAN_S + rank, 8), (BEGAN_S + 60 - rank, 14))
            index = "".join(index_line(time_s, {f"rank_{rank}.out": size}) for time_s, size in sizes)
            with (folder / NAME).open("a") as file:
                file.write(index)
            os.utime(folder / f"rank_{rank}.out", (BEGAN_S + 60, BEGAN_S + 60))
    return run_dir


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            (),
            ["[n1 r0] begin 0", "[n1 r1] begin 1", "[n2 r2] begin 2", "[n2 r3] begin 3",
             "[n2 r3] end 3", "[n2 r2] end 2", "[n1 r1] end 1", "[n1 r0] end 0"],
        ),
        (("--node", "n2", "--tail", "2"), ["[n2 r3] end 3", "[n2 r2] end 2"]),
        (("--node", "n2", "--rank", "3", RUN), ["begin 3", "end 3"]),
        (("--rank", "0", "--rank", "3", "--since", "30s"), ["[n2 r3] end 3", "[n1 r0] end 0"]),
        (("--timestamps", "--tail", "1"), ["2026-11-23T04:01:00.0 [n1 r0] end 0"]),
        (
            ("--json", "--tail", "1"),
            ['{"time": "2026-11-23T04:01:00.0", "node": "n1", "rank": 0, "stream": "out", "text": "end 0"}'],
        ),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)  # fmt: skip
def test_logs_prints_the_wanted_lines_of_a_run(
    words: tuple[str, ...], lines: list[str], run_dir: RunDir, tell: Tell
) -> None:
    assert tell("logs", *words) == (0, "\n".join(lines) + "\n", "")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--rank", "7"), f"run {RUN}: runs/{RUN} has no files of rank 7; it has those of ranks 0-3"),
        (("--node", "n9"), f"--node n9: runs/{RUN} has files of n[1-2]"),
        (("--since", "soon"), "'soon': expected a time, for example 2026-03-25T10:00, 10:00, or 30m"),
        (("--tail", "-1"), "invalid value for '--tail'"),
        (("20260101-000000-1",), "JOB '20260101-000000-1': no such run in runs"),
    ],
)
def test_what_logs_cannot_print_is_one_line(words: tuple[str, ...], error: str, run_dir: RunDir, tell: Tell) -> None:
    told = tell("logs", *words)
    assert (told.code, told.out) == (2, "")
    assert re.fullmatch(rf"error: {re.escape(error)}[^\n]*\n", told.err)


def test_a_run_of_an_older_version_says_that_it_has_no_times(run_dir: RunDir, tell: Tell) -> None:
    for index in run_dir.path.rglob(NAME):
        index.unlink()
    told = tell("logs")
    words = "the times of the lines of ranks 0-3 were not recorded; each of these files is printed as a whole"
    assert told.err == f"allranks: {words}\n"
    assert told.out.splitlines()[:2] == ["[n1 r0] begin 0", "[n1 r0] end 0"]
    assert json.loads(tell("logs", "--json", "--tail", "1").out)["time"] is None
