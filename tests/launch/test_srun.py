from __future__ import annotations

import os
from pathlib import Path

import pytest

from allranks.launch.srun import pack, run_steps, step_env, words_of

ENV = {"PATH": "/usr/bin:/bin"}


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def listen(
    commands: list[list[str]], *, count: int = 99, first_s: float = 20.0, next_s: float = 20.0
) -> tuple[bool, list[object], list[str]]:
    """Whether all that was to come has come, what has, and what was said aside."""
    found, words = list[object](), list[str]()
    is_whole = run_steps(
        commands,
        ENV,
        lambda sender, document: found.append((sender, document)),
        kinds={"said": str},
        words=words,
        is_complete=lambda: len(found) >= count,
        on_wait=lambda waited_s: found.append(f"waiting for {waited_s:.0f} s"),
        first_s=first_s,
        next_s=next_s,
    )
    return is_whole, found, words


def test_documents_of_all_steps_come_and_what_is_said_aside_is_kept() -> None:
    last = pack("n2", "said", "two").rstrip("\n")
    commands = [
        ["printf", "%s", f"Welcome\n{pack('n1', 'said', 'one')}"],
        ["printf", "%s", last],
        shell("printf 'aside\\n\\377\\n' >&2"),
    ]
    is_whole, found, words = listen(commands)
    assert (is_whole, sorted(map(str, found))) == (True, ["('n1', 'one')", "('n2', 'two')"])
    assert [line for line in words if line] == ["aside", "\ufffd"]


def test_a_document_of_another_version_is_passed_over_and_nobody_waits_after_the_last_one() -> None:
    odd, good = pack("n1", "said", 7) + pack("n1", "sung", "la"), pack("n1", "said", "one")
    assert listen([shell(f"echo '{odd}{good}'; sleep 60")], count=1) == (True, [("n1", "one")], [])


@pytest.mark.parametrize(("said", "limits"), [("", {"first_s": 3.0}), (pack("n1", "said", "one"), {"next_s": 3.0})])
def test_a_wait_is_said_and_ends_at_its_limit(said: str, limits: dict[str, float]) -> None:
    is_whole, found, _ = listen([shell(f"echo '{said}'; sleep 60")], **limits)
    assert not is_whole
    assert found == [*([("n1", "one")] if said else []), "waiting for 2 s"]


class Enough(Exception):
    pass


def leave(sender: str, document: str) -> None:
    raise Enough


@pytest.mark.parametrize("ends", ["it is complete", "an exception"])
def test_what_still_runs_is_ended_whatever_ends_the_wait(ends: str, tmp_path: Path) -> None:
    pid_file, here = tmp_path / "pid", pack("n1", "said", "here")
    command = shell(f"trap '' TERM; echo $$ >{pid_file}; echo '{here}'; while :; do sleep 0.1; done")
    if ends == "an exception":
        with pytest.raises(Enough):
            run_steps(
                [command],
                ENV,
                leave,
                kinds={"said": str},
                words=[],
                is_complete=bool,
                on_wait=lambda _: None,
                first_s=20.0,
                next_s=20.0,
            )
    else:
        assert listen([command], count=1) == (True, [("n1", "here")], [])
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
