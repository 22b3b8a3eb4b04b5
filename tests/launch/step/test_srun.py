from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from allranks.launch.step.srun import Line, run_steps, words_of

ENV = {"PATH": "/usr/bin:/bin"}


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def test_lines_of_all_steps_come_as_they_are_written_the_last_one_without_its_end_too() -> None:
    commands = [shell("printf 'one\\ntwo'"), shell("echo aside >&2; printf '\\377\\n'")]
    found: set[Line] = set()
    deadline_s = time.monotonic() + 10.0
    with run_steps(commands, ENV) as output:
        while not output.has_ended and time.monotonic() < deadline_s:
            found.update(output.lines())
        assert output.has_ended
    said = {line for line in found if line.text}
    assert said == {Line("one", False), Line("two", False), Line("aside", True), Line("\ufffd", False)}


class Enough(Exception):
    pass


def leave_when_it_speaks(command: list[str]) -> None:
    deadline_s = time.monotonic() + 10.0
    with run_steps([command], ENV) as output:
        while time.monotonic() < deadline_s:
            if any(line.text == "here" for line in output.lines()):
                raise Enough


def test_what_still_runs_is_ended_with_the_block_whatever_ends_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(Enough):
        leave_when_it_speaks(shell(f"trap '' TERM; echo $$ >{pid_file}; echo here; while :; do sleep 0.1; done"))
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["srun: error: Unable to create step", "srun: error: Unable to create step"], "Unable to create step"),
        (["slurm_load_jobs error: Invalid job id specified"], "Invalid job id specified"),
        (["slurmstepd-n03: error: no space", "", "allranks: waiting", "pmix lacks support"], "no space"),
        (["squeue: error: a\x1b[2Jb"], "a [2Jb"),
        ([], ""),
    ],
)
def test_what_slurm_says_is_one_line_without_who_says_it(lines: list[str], said: str) -> None:
    assert words_of(lines) == said
