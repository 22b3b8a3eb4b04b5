"""A machine that starts no more processes or threads, or opens no more files, is one line that names the limit."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from allranks.host.limits import describe_shortage
from allranks.launch.check.member_step import lines_of
from conftest import clean_env

GIB = 1 << 30
FEW_FILES = {resource.RLIMIT_NOFILE: 8}
TWO_THREADS = {resource.RLIMIT_STACK: GIB, resource.RLIMIT_AS: 2 * GIB + 3 * GIB // 4}
"""The stack of a thread is as large as that of a process may be: two fit."""


@pytest.mark.parametrize(
    ("words", "limits", "said"),
    [
        (
            ("bench",),
            FEW_FILES,
            "error: a process may open no more files here (ulimit -n is 8); to raise it: ulimit -n $(ulimit -Hn)\n",
        ),
        (
            ("run", "--nproc-per-node", "2", "train.py"),
            TWO_THREADS,
            "error: no more processes or threads can be started here: end other programs, or raise the limit (",
        ),
    ],
    ids=["files", "threads"],
)
def test_a_limit_of_the_machine_is_one_line(
    words: tuple[str, ...], limits: dict[int, int], said: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('here')\n")

    def lower() -> None:
        for which, number in limits.items():
            resource.setrlimit(which, (number, resource.getrlimit(which)[1]))

    ended = subprocess.run(
        [sys.executable, "-m", "allranks", *words],
        cwd=tmp_path,
        env=clean_env(os.environ),
        preexec_fn=lower,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 78, ended.stderr
    assert ended.stderr.startswith(said)
    assert ended.stderr.count("\n") == 1


def test_a_program_that_cannot_start_or_crashes_says_so_for_its_rank(tmp_path: Path) -> None:
    program = tmp_path / "exits.py"
    program.write_text("import json, sys; sys.exit(json.loads(sys.argv[1])['code'])\n")
    orders = [{"code": "no such order is so long" * 10_000}, {"code": 3}, {"code": 0}]
    said = {number: json.loads(line) for number, line in lines_of(program, orders, deadline_s=100, env=os.environ)}
    assert said == {
        0: {"status": "failed", "what": "its process cannot start: argument list too long"},
        1: {"status": "failed", "what": "its process crashed (exit 3)"},
    }


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (RuntimeError("can't start new thread"), True),
        (OSError(24, "Too many open files"), True),
        (BlockingIOError(11, "write could not complete without blocking"), False),
        (RuntimeError("dictionary changed size during iteration"), False),
        (FileNotFoundError(2, "No such file or directory"), False),
    ],
)
def test_other_errors_are_no_shortage(error: Exception, is_told: bool) -> None:
    assert (describe_shortage(error) is not None) == is_told


def test_a_fork_that_fails_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    monkeypatch.setattr(os, "fork", partial(os.read, reader, 1))  # EAGAIN
    with pytest.raises(BlockingIOError) as raised:
        multiprocessing.get_context("fork").Process(target=print).start()
    os.close(reader)
    os.close(writer)
    assert str(describe_shortage(raised.value)).startswith("no more processes or threads can be started here")
