from __future__ import annotations

import os
from pathlib import Path

import pytest

from allranks.launch.srun import Parcel, Steps, pack, run_steps, step_env, words_of

ENV = {"PATH": "/usr/bin:/bin"}


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def listen(steps: Steps, *, count: int = 99, first_s: float = 20.0, next_s: float = 20.0) -> tuple[bool, list[object]]:
    """Whether all that was to come has come, and what has."""
    found: list[object] = []

    def take(parcel: Parcel) -> None:
        found.append((parcel.sender, parcel.read(str)))

    is_whole = steps.listen(
        take,
        is_complete=lambda: len(found) >= count,
        first_s=first_s,
        next_s=next_s,
        describe_wait=lambda waited_s: f"waiting for {waited_s:.0f} s",
        say=found.append,
    )
    return is_whole, found


def test_documents_of_all_steps_come_and_what_is_said_aside_is_kept() -> None:
    last = pack("n2", "said", "two").rstrip("\n")
    commands = [
        ["printf", "%s", f"Welcome\n{pack('n1', 'said', 'one')}"],
        ["printf", "%s", last],
        shell("printf 'aside\\n\\377\\n' >&2"),
    ]
    with run_steps(commands, ENV) as steps:
        is_whole, found = listen(steps)
    assert (is_whole, sorted(map(str, found))) == (True, ["('n1', 'one')", "('n2', 'two')"])
    assert [line for line in steps.words if line] == ["aside", "\ufffd"]


def test_a_document_of_another_version_is_passed_over_and_nobody_waits_after_the_last_one() -> None:
    odd, good = pack("n1", "said", 7), pack("n1", "said", "one")
    with run_steps([shell(f"echo '{odd}{good}'; sleep 60")], ENV) as steps:
        assert listen(steps, count=1) == (True, [("n1", "one")])


@pytest.mark.parametrize(("said", "limits"), [("", {"first_s": 3.0}), (pack("n1", "said", "one"), {"next_s": 3.0})])
def test_a_wait_is_said_and_ends_at_its_limit(said: str, limits: dict[str, float]) -> None:
    with run_steps([shell(f"echo '{said}'; sleep 60")], ENV) as steps:
        is_whole, found = listen(steps, **limits)
    assert not is_whole
    assert found == [*([("n1", "one")] if said else []), "waiting for 2 s"]


class Enough(Exception):
    pass


def leave_when_it_speaks(command: list[str]) -> None:
    with run_steps([command], ENV) as steps:
        is_whole, _ = listen(steps, count=1)
        assert is_whole
        raise Enough


def test_what_still_runs_is_ended_with_the_block_whatever_ends_it(tmp_path: Path) -> None:
    pid_file, here = tmp_path / "pid", pack("n1", "said", "here")
    with pytest.raises(Enough):
        leave_when_it_speaks(shell(f"trap '' TERM; echo $$ >{pid_file}; echo '{here}'; while :; do sleep 0.1; done"))
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_variables_of_an_outer_job_are_no_options_of_the_step() -> None:
    env = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SLURM_NTASKS": "99", "SLURM_QOS": "high"}
    assert step_env(env) == {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}
    assert step_env(env, kept=("SLURM_QOS",)) == {"PATH": "/bin", "SLURM_QOS": "high"}


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
