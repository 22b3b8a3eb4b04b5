"""Does a reader that has stopped leave the writer alone, and does one that reads get everything?"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.launch.console import Console
from conftest import wait_until

MUCH = b"".join(b"%07d\n" % number for number in range(1 << 18))
"""2 MiB: more than a pipe holds, and more than waits in memory."""


class Pipe:
    """A pipe that is read when the test says so."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self._is_open = True

    def read(self, size: int) -> bytes:
        got = bytearray()
        while len(got) < size:
            got += os.read(self.reader, size - len(got))
        return bytes(got)

    def leave(self) -> None:
        os.close(self.reader)
        self._is_open = False

    def close(self) -> None:
        if self._is_open:
            self.leave()
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.writer)  # a thread may still write to this number


@pytest.fixture
def out() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


@pytest.fixture
def err() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def test_everything_comes_in_order_to_who_reads_late(out: Pipe, err: Pipe):
    screen = Console(out_fd=out.writer, err_fd=err.writer).screen
    for start in range(0, len(MUCH), 50_000):
        screen["out"].write(MUCH[start : start + 50_000])
    assert out.read(len(MUCH)) == MUCH
    assert screen["out"].drain(patience_s=30)


def test_a_stream_that_nobody_reads_does_not_hold_the_other_one_up(out: Pipe, err: Pipe):
    screen = Console(out_fd=out.writer, err_fd=err.writer).screen
    screen["out"].write(MUCH)
    screen["err"].write(b"verdict\n")
    assert err.read(8) == b"verdict\n"
    assert not screen["out"].has_room


def test_two_streams_that_are_one_file_keep_their_order(out: Pipe):
    screen = Console(out_fd=out.writer, err_fd=os.dup(out.writer)).screen
    expected = b""
    for number in range(200):
        for stream in ("out", "err"):
            line = b"%s %d\n" % (stream.encode(), number)
            screen[stream].write(line)
            expected += line
    assert out.read(len(expected)) == expected


def test_a_reader_that_takes_nothing_is_given_up_and_the_bytes_are_counted(out: Pipe, err: Pipe):
    screen = Console(out_fd=out.writer, err_fd=err.writer).screen
    for line in MUCH.splitlines(keepends=True)[: 1 << 15]:
        screen["out"].write(line)
    assert not screen["out"].drain(patience_s=0.3)
    assert 0 < screen["out"].num_dropped < (1 << 15) * 8
    assert screen["out"].is_given_up
    screen["out"].write(b"more\n")
    assert screen["out"].drain(patience_s=0.3)
    assert not screen["err"].is_given_up


def test_a_wait_for_a_reader_ends_when_it_is_told_to(out: Pipe, err: Pipe):
    screen = Console(out_fd=out.writer, err_fd=err.writer).screen
    screen["out"].write(MUCH)
    assert not screen["out"].drain(is_over=lambda: True)


def test_who_reads_too_slowly_misses_some_and_gets_what_comes_after(out: Pipe, err: Pipe, tmp_path: Path):
    console = Console(out_fd=out.writer, err_fd=err.writer)
    (tmp_path / "rank_0.out").write_bytes(8 * MUCH)
    console.follow(tmp_path / "rank_0.out", start=0, stream="out", prefix="")
    got = bytearray()

    def is_over() -> bool:
        got.extend(out.read(1 << 14))
        return len(got) > 1 << 17

    num_left = console.close(is_over=is_over)
    console.screen["out"].write(b"verdict\n")
    while not got.endswith(b"verdict\n"):
        got += os.read(out.reader, 1 << 16)
    assert len(got) - 8 + num_left == 8 * len(MUCH)
    assert MUCH.startswith(got.removesuffix(b"verdict\n"))


def test_a_reader_that_has_left_makes_room_for_everything(out: Pipe, err: Pipe):
    screen = Console(out_fd=out.writer, err_fd=err.writer).screen
    out.leave()
    for _ in range(2):
        screen["out"].write(MUCH)
        wait_until(lambda: screen["out"].has_room, "the reader that left is noticed")
    assert screen["out"].drain(patience_s=30)
    assert screen["out"].num_dropped == 0


def test_what_is_written_to_a_closed_file_goes_nowhere():
    out = Console(out_fd=1000, err_fd=1000).screen["out"]
    out.write(MUCH)
    assert out.drain(patience_s=30)
    assert not out.isatty()
    out.close()


def test_what_is_printed_goes_the_same_way(out: Pipe, err: Pipe):
    screen, before = Console(out_fd=out.writer, err_fd=err.writer).screen, sys.stderr
    with contextlib.redirect_stderr(screen["err"].as_text()):
        print("caf\xe9", file=sys.stderr, flush=True)
        assert not sys.stderr.isatty()
        assert sys.stderr.fileno() == err.writer
    assert sys.stderr is before
    assert err.read(4)[:3] == b"caf"
