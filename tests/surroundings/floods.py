"""Floods: each function is what all ranks of a job print, and how the terminal is read. The agent's memory stays small.

@flood(LIVES)                  the job must succeed
@flood(fails("TEXT"))          it fails, with this pattern in the finding
@flood(LIVES, read=STOPPED)    nobody reads the terminal for some seconds
"""

from __future__ import annotations

import os
import pty
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .judge import Expect, Fall, judge
from .stage import DEADLINE_S, Situation, Stage

LIVES = Expect()
FILE, STOPPED, HEAD, TERMINAL = "a file", "a reader that stops for 4 s", "a pipe to head", "a terminal"
Does = Callable[[], object]
FLOODS: dict[str, tuple[Does, Expect, str, int]] = {}
MB = 1 << 20


def fails(words: str) -> Expect:
    """Every rank fails alike; the first is named."""
    return Expect(rank=0, words=words)


def flood(expect: Expect, *, read: str = FILE, ranks: int = 2) -> Callable[[Does], Does]:
    """Add the function to the table."""

    def add(function: Does) -> Does:
        FLOODS[function.__name__] = (function, expect, read, ranks)
        return function

    return add


def act() -> None:
    """Be one of the ranks."""
    FLOODS[os.environ["SURROUNDINGS_FLOOD"]][0]()


def _write(descriptor: int, block: bytes, size: int) -> None:
    """Write a block again and again."""
    view = memoryview(block * max(1, MB // len(block)))
    for _ in range(size // len(view)):
        rest = view
        while rest:
            rest = rest[os.write(descriptor, rest) :]


LINE = b"%s\n" % (b"y" * 99)
FRAME = b'  File "train.py", line 3, in f\n    g(x)\n'
TRACEBACK = b"Traceback (most recent call last):\n" + FRAME * 20 + b"ValueError: x\n"


@flood(LIVES)
def lines_on_stdout() -> None:
    _write(1, LINE, 60 * MB)


@flood(LIVES, ranks=4)
def lines_on_stderr() -> None:
    _write(2, LINE, 30 * MB)


@flood(LIVES)
def short_lines() -> None:
    _write(1, b"x\n", 4 * MB)


@flood(LIVES)
def empty_lines() -> None:
    _write(1, b"\n", 2 * MB)


@flood(LIVES)
def tracebacks() -> None:
    _write(2, TRACEBACK, 60 * MB)


@flood(LIVES)
def a_traceback_without_an_end() -> None:
    _write(2, TRACEBACK[:35], MB)
    _write(2, FRAME, 60 * MB)


@flood(LIVES)
def a_traceback_then_much_output() -> None:
    os.write(2, b"Traceback (most recent call last):\n")
    _write(2, LINE, 60 * MB)


@flood(LIVES)
def one_endless_line() -> None:
    _write(1, b"z" * 4096, 100 * MB)


@flood(LIVES)
def an_endless_line_on_stderr() -> None:
    _write(2, b"z" * 4096, 60 * MB)


@flood(LIVES)
def binary() -> None:
    _write(1, random.Random(1).randbytes(MB), 40 * MB)


@flood(LIVES)
def zeros() -> None:
    _write(1, bytes(4096), 40 * MB)


@flood(LIVES, read=TERMINAL)
def bars() -> None:
    for number in range(20_000):
        os.write(2, b"\r%3d%%|%s| %d/20000" % (number // 200, b"#" * (number // 400), number))


@flood(LIVES, read=TERMINAL)
def many_bars() -> None:
    for number in range(3000):
        text = "".join(f"\x1b[{row}B\rbar {row}: {number}/3000\x1b[{row}A" for row in range(1, 8))
        os.write(2, text.encode())


@flood(LIVES, read=TERMINAL)
def cursor_games() -> None:
    games = [
        b"\x1b[2J",
        b"\x1b[H",
        b"\x1b[999;999H",
        b"\x1b[1A\x1b[2K",
        b"\x1b]0;t\x07",
        b"\x1b(0",
        b"\x1b[?1049h",
        b"\x1b[",
    ]
    for number in range(20_000):
        os.write(1, games[number % len(games)] + b"word")
    os.write(1, b"\n")


@flood(LIVES)
def an_escape_without_an_end() -> None:
    os.write(1, b"\x1b]0;")
    _write(1, b"t" * 4096, 20 * MB)


@flood(LIVES)
def carriage_returns_only() -> None:
    _write(2, b"\rstep", 20 * MB)


@flood(LIVES)
def backspaces() -> None:
    _write(2, b"ab\b\b", 10 * MB)


@flood(LIVES)
def many_processes() -> None:
    children = [subprocess.Popen(["sh", "-c", f"yes child {number} | head -c 500000"]) for number in range(40)]
    for child in children:
        child.wait()


@flood(LIVES)
def many_warnings() -> None:
    import warnings

    warnings.simplefilter("always")
    for number in range(5000):
        warnings.warn(f"warning {number}", stacklevel=1)


@flood(LIVES, ranks=12)
def many_ranks() -> None:
    _write(1, LINE, 5 * MB)


@flood(LIVES)
def a_sparse_output_file() -> None:
    os.ftruncate(1, 1 << 36)
    time.sleep(1)
    os.write(1, b"after the hole\n")


@flood(LIVES)
def a_sparse_error_file() -> None:
    os.ftruncate(2, 1 << 36)
    time.sleep(1)


@flood(fails("exit code 1"))
def a_sparse_error_file_and_a_failure() -> None:
    os.ftruncate(2, 1 << 36)
    os._exit(1)


@flood(LIVES)
def output_that_is_shortened() -> None:
    for _ in range(20):
        _write(1, LINE, 2 * MB)
        os.ftruncate(1, 0)


@flood(fails("ValueError: xxx"))
def an_exception_of_50_mb() -> None:
    raise ValueError("x" * (50 * MB))


@flood(fails("ValueError: x"))
def an_exception_of_many_lines() -> None:
    raise ValueError("x\n" * (5 * MB))


@flood(fails("ValueError: with notes"))
def an_exception_with_many_notes() -> None:
    error = ValueError("with notes")
    for number in range(100_000):
        error.add_note(f"note {number} {'n' * 200}")
    raise error


@flood(fails("ValueError: 3000"))
def a_long_chain_of_exceptions() -> None:
    error: Exception | None = None
    for number in range(3001):
        try:
            raise ValueError(str(number)) from error
        except ValueError as exc:
            error = exc
    assert error is not None
    raise error


@flood(fails("ExceptionGroup"))
def a_large_group_of_exceptions() -> None:
    raise ExceptionGroup("many", [ValueError("y" * 1000) for _ in range(20_000)])


@flood(fails("exit code 1"))
def much_output_and_a_silent_failure() -> None:
    _write(2, LINE, 40 * MB)
    os._exit(1)


@flood(fails("ValueError: the cause"))
def tracebacks_and_then_a_failure() -> None:
    _write(2, TRACEBACK, 40 * MB)
    raise ValueError("the cause")


@flood(LIVES, read=STOPPED)
def lines_that_nobody_reads() -> None:
    _write(1, LINE, 40 * MB)


@flood(LIVES, read=STOPPED)
def tracebacks_that_nobody_reads() -> None:
    _write(2, TRACEBACK, 40 * MB)


@flood(Expect(is_terminal_gone=True), read=HEAD)
def lines_to_head() -> None:
    _write(1, LINE, 20 * MB)


@flood(Expect(is_terminal_gone=True), read=HEAD)
def stderr_to_head() -> None:
    _write(2, LINE, 20 * MB)


@flood(Expect(rank=0, words="the cause", is_terminal_gone=True), read=HEAD)
def a_failure_to_head() -> None:
    _write(1, LINE, 20 * MB)
    raise ValueError("the cause")


@flood(LIVES, read=TERMINAL)
def lines_on_a_terminal() -> None:
    _write(1, LINE, 10 * MB)


def play_flood(stage: Stage, *, name: str) -> tuple[list[Fall], float]:
    """Start the job with its terminal, and read that as the table says."""
    _, expect, read, ranks = FLOODS[name]
    stage.env["SURROUNDINGS_FLOOD"] = name
    if read == FILE:
        job = stage.start("floods:act", ranks=ranks)
    else:
        ours, theirs = pty.openpty() if read == TERMINAL else os.pipe()
        job = stage.start("floods:act", ranks=ranks, stdout=theirs, stderr=theirs)
        os.close(theirs)
        threading.Thread(target=_read, args=(ours, read, stage.terminals[-1]), daemon=True).start()
    facts = stage.end(job, deadline_s=2 * DEADLINE_S)
    return judge(facts, expect), job.peak_mb


def _read(descriptor: int, how: str, terminal: Any) -> None:
    with terminal.open("ab") as file:
        if how == HEAD:
            file.write(os.read(descriptor, 2000))
            os.close(descriptor)
            return
        file.write(os.read(descriptor, 1000))
        time.sleep(4 if how == STOPPED else 0)
        try:
            while data := os.read(descriptor, MB):
                file.write(data)
                file.flush()
        except OSError:  # how a terminal ends
            return


def situations() -> Iterator[Situation]:
    """One for each flood."""
    for name, (_, expect, _, _) in FLOODS.items():
        must = f"fails with {expect.words}" if expect.rank is not None else "job succeeds"
        yield Situation(
            name=f"flood/{name}",
            expected=f"{must}; the agent stays small",
            play=partial(play_flood, name=name),
        )
