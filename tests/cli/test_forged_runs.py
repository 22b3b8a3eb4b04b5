"""Run directories that somebody has forged: nothing acts on them, nothing breaks, and no terminal is written to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.host.process import identify, read_boot_id, read_start_ticks
from allranks.launch.batch.local_run import cancel_run
from allranks.model.errors import UsageError
from allranks.report.rundir import RunDir
from allranks.report.runs import read_run
from conftest import HANG_S, Tell, wait_until
from fake_slurm import FakeSlurm, assert_one_line, fake_slurm  # noqa: F401  (a fixture)

NAME = "20261123-040000-42"
AS_AGENT = [sys.executable, "-c", "import time; time.sleep(60)  # as if it were allranks"]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, slurm: FakeSlurm) -> None:
    """This machine is the leader's; SLURM is there and knows no job."""
    monkeypatch.setenv("SLURMD_NODENAME", "node07")
    for name in ("SLURM_JOB_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A child of this test: nothing else is ever named in a forged file."""
    with subprocess.Popen(AS_AGENT) as child:
        await_command(child.pid)
        yield child
        child.kill()


def await_command(pid: int) -> None:
    """The kernel shows the words of a new program a little after it has closed the files of the old one."""
    wait_until(lambda: b"60" in Path(f"/proc/{pid}/cmdline").read_bytes(), "the command of a child")


def leave(folder: Path, name: str = NAME, **about: object) -> Path:
    """What a run leaves behind that was started on this machine, and has no verdict."""
    run_dir = RunDir(folder / "runs", name)
    run_dir.create()
    run_dir.create_attempt(None)
    run_dir.add_event("started", **{"generation": 0, "command": ["python", "a.py"], "members": ["node07"], **about})
    return run_dir.path


def about(pid: int) -> dict[str, Any]:
    """What an agent records of itself."""
    return {"pid": pid, "start_ticks": read_start_ticks(pid), "boot_id": read_boot_id()}


def test_the_agent_gets_sigterm(process: subprocess.Popen[bytes], tmp_path: Path, tell: Tell) -> None:
    path = leave(tmp_path, **about(process.pid))
    assert "RUNNING" in tell("list").out
    told = tell("cancel", NAME)
    assert (told.code, told.out, told.err) == (
        0, f"cancelling run {NAME}: sent SIGTERM to its agent, process {process.pid}\n", "",
    )  # fmt: skip
    assert process.wait(100) == -signal.SIGTERM
    assert "allranks cancel: " in (path / "attempt_0/cancel.log").read_text()


@pytest.mark.parametrize(
    ("forged", "words"),
    [
        ({"start_ticks": 1}, "another one (it began at another time), and got no signal"),
        ({"boot_id": "another"}, "another one (the machine was restarted since), and got no signal"),
        ({"start_ticks": "1"}, "run 20261123-040000-42: its agent has not started its ranks yet: use Ctrl-C"),
    ],
)
def test_another_process_gets_no_signal(
    forged: dict[str, object], words: str, process: subprocess.Popen[bytes], tmp_path: Path, tell: Tell
) -> None:
    path = leave(tmp_path, **{**about(process.pid), **forged})
    told = tell("cancel", NAME)
    assert words in told.out + told.err
    assert len((told.out + told.err).splitlines()) == 1
    assert process.poll() is None
    assert not (path / "attempt_0/cancel.log").exists()


def test_a_process_that_is_no_agent_gets_no_signal(tmp_path: Path, tell: Tell) -> None:
    """The forger knows its start and its boot; so did runs of older versions name any older process: process 1, too."""
    with subprocess.Popen(["sleep", "60"]) as process:
        await_command(process.pid)
        leave(tmp_path, **about(process.pid))
        leave(tmp_path, "20261123-040000-43", pid=process.pid)
        said = f"process {process.pid} is another one (it runs sleep 60), and got no signal\n"
        for name in (NAME, "20261123-040000-43"):
            assert tell("cancel", name).out == f"run {name} had already ended: LOST; {said}"
        assert process.poll() is None
        process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_files_of_another_user_name_no_process_of_this_one(
    process: subprocess.Popen[bytes], tmp_path: Path, tell: Tell
) -> None:
    path = leave(tmp_path, **about(process.pid))
    os.chown(path / "attempt_0/events.jsonl", 12345, 12345)
    told = tell("cancel", NAME)
    assert (told.code, told.out) == (2, "")
    assert_one_line(told.err)
    assert told.err.startswith(f"error: run {NAME}: process {process.pid} is not its agent: it belongs to user id 0, ")
    assert process.poll() is None


def test_a_process_that_ends_while_it_is_looked_at_gets_no_signal(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another process's by then; the descriptor is of the one that was compared."""
    run, signalled = read_run(leave(tmp_path, **about(process.pid))), []
    real = signal.pidfd_send_signal

    def end_first(held: int, signum: int) -> None:
        process.kill()
        process.wait()
        signalled.append(signum)
        real(held, signum)

    monkeypatch.setattr(signal, "pidfd_send_signal", end_first)
    assert cancel_run(run) == f"run {NAME} had already ended"
    assert signalled == [signal.SIGTERM]


@pytest.mark.parametrize("pid", [-1, 0, "x", "1", 1.5, 2**31, 2**63, 10**40, True, None, [], {}, [1]], ids=str)
def test_an_impossible_process_id_is_one_line(pid: object, tmp_path: Path, tell: Tell) -> None:
    leave(tmp_path, pid=pid)
    for verb in ("list", "status", "cancel"):
        told = tell(verb, *([NAME] if verb != "list" else []))
        assert "Traceback" not in told.out + told.err
        if verb == "cancel":
            assert_one_line(told.err)


_EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\nJOB  NAME  RUNNING\r\u2028x"


def test_no_name_reaches_the_terminal_as_a_control_sequence(tmp_path: Path, tell: Tell) -> None:
    path = leave(tmp_path, command=["python", _EVIL], members=[_EVIL], cwd=_EVIL)
    node = path / "attempt_0" / _EVIL.replace("/", "")
    node.mkdir()
    (node / "rank_0.out").write_text("fine\n")
    (path / "submission.sh").write_text(f"#SBATCH --job-name='{_EVIL}'\n")
    finding = {"cause": f"AR012 {_EVIL}", "severity": "fail", "confidence": "certain", "node": _EVIL, "message": _EVIL,
               "fix": _EVIL, "subject": _EVIL, "notes": [_EVIL], "waiting": _EVIL, "ranks": [3],
               "evidence": [{"seen": _EVIL, "source": _EVIL}]}  # fmt: skip
    for verdict in (None, {"job": _EVIL, "attempt": 0, "exit_code": 75, "findings": [finding]}):
        if verdict is not None:
            (path / "attempt_0/verdict.json").write_text(json.dumps(verdict))
        for words in ("list", "status", "list --json", "status --json", "cancel latest", "logs --timestamps",
                      "clean --keep 0", "why", "why --all"):  # fmt: skip
            told = tell(*words.split())
            shown = told.out + told.err
            assert [c for c in shown if not c.isprintable() and c != "\n"] == [], words
            assert not any(line.startswith("JOB  NAME  RUNNING") for line in shown.splitlines()), words


def test_a_directory_with_a_name_that_no_job_makes_is_no_run(tmp_path: Path, tell: Tell) -> None:
    leave(tmp_path)
    (tmp_path / "runs" / NAME).rename(tmp_path / "runs" / "evil\x1b[2J\n")
    (tmp_path / "runs" / "latest").unlink()
    assert "has no run" in tell("list").err


def test_a_name_of_ten_megabytes_is_cut(tmp_path: Path, tell: Tell) -> None:
    long = "n" * 10_000_000
    path = leave(tmp_path, command=["python", "a.py"], members=["node07"])
    (path / "submission.sh").write_text(f"#SBATCH --job-name={long}\n")
    verdict = {"job": "7", "attempt": 0, "exit_code": 1, "findings": []}
    (path / "attempt_0/verdict.json").write_text(json.dumps(verdict))
    began_s = time.monotonic()
    assert max(map(len, tell("list").out.splitlines())) < 1000
    assert max(map(len, tell("status").out.splitlines())) < 3000
    assert time.monotonic() - began_s < HANG_S


def test_damaged_lines_are_counted_and_said(tmp_path: Path, tell: Tell) -> None:
    path = leave(tmp_path, pid=2**22 + 1)
    with (path / "attempt_0/events.jsonl").open("a") as file:
        file.write('{"event": "ended", "exit_code": "x"}\n[]\n')
    assert "\n  damaged   2 lines of events.jsonl skipped: no event of allranks\n" in tell("status").out


@pytest.mark.parametrize("name", ["attempt_0/events.jsonl", "attempt_0/verdict.json", "attempt_0/node07/rank_0.out"])
@pytest.mark.parametrize("kind", ["fifo", "zero"])
def test_no_file_of_a_run_holds_a_command(name: str, kind: str, tmp_path: Path, tell: Tell) -> None:
    path = leave(tmp_path, pid=2**22 + 1)
    (path / "attempt_0/node07").mkdir(exist_ok=True)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name) if kind == "fifo" else (path / name).symlink_to("/dev/zero")
    (path / "attempt_0/cancel.log").symlink_to("../../../mine")
    (tmp_path / "mine").write_text("mine")
    began_s = time.monotonic()
    for words in (
        ("list",),
        ("status",),
        ("logs",),
        ("logs", "--tail", "3"),
        ("cancel", NAME),
        ("clean", "--keep", "0"),
    ):
        assert "Traceback" not in tell(*words).err
    assert time.monotonic() - began_s < HANG_S
    assert (tmp_path / "mine").read_text() == "mine"


def test_the_environment_that_names_checkpoints_is_decoded(tmp_path: Path, tell: Tell) -> None:
    """A running run with a forged env.json keeps no other from being deleted, and `clean` does not break."""
    path = leave(tmp_path, pid=2**22 + 1, members=["node08"])
    (path / "attempt_0/node08").mkdir()
    for value in (
        [],
        {"name": 1},
        [{"name": "ALLRANKS_CHECKPOINT_DIR", "value": "a\0b"}],
        [{"name": "X"}],
        "[" * 10_000,
    ):
        text = value if isinstance(value, str) else json.dumps(value)
        (path / "attempt_0/node08/env.json").write_text(text)
        assert tell("clean", "--keep", "0").code == 0


def test_who_a_process_is_comes_from_the_kernel(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    found = identify(process.pid, run_dir=tmp_path)
    assert found is not None
    assert (found.owner, found.command, found.is_dead) == (os.geteuid(), tuple(AS_AGENT), False)
    assert (found.start_ticks, found.boot_id) == (read_start_ticks(process.pid), read_boot_id())
    assert abs(found.start_s - time.time()) < 60.0
    assert not found.has_file_of_run
    with (tmp_path / "rank_0.out").open("w"):
        own = identify(os.getpid(), run_dir=tmp_path)
    assert own is not None
    assert own.has_file_of_run
    process.kill()
    process.wait()
    assert identify(process.pid, run_dir=tmp_path) is None


def test_cancel_of_a_run_that_is_elsewhere_sends_nothing(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_run(leave(tmp_path, **{**about(process.pid), "members": ["node08"]}))
    with pytest.raises(UsageError, match="runs on node08: cancel it there"):
        cancel_run(run)
    assert process.poll() is None
