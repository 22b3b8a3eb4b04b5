"""`allranks watch` through the command line: a job like torchrun's, of tiny processes that nobody else started."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_srun import FakeStep

from conftest import Allranks, allranks_command, clean_env, wait_until
from fake_slurm import show_job

TRAIN = """\
import os, subprocess, sys, time
from torch_like.torch.distributed.distributed_c10d import all_reduce

def read_block(step):
    open("block").read()  # a fifo: storage that does not answer
    sys.exit(3)

if "RANK" in os.environ:
    print(os.environ["RANK"], os.getpid(), flush=True)
    read_block(150) if os.environ["RANK"] == "2" else all_reduce()
store = dict(WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511") | dict(os.environ)
envs = [dict(store, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(3)]
ranks = [subprocess.Popen([sys.executable, __file__], env=env) for env in envs]
code = ranks[2].wait()
open("told").read()  # a fifo: until it has been seen
for rank in ranks:
    rank.kill()
    rank.wait()
"""
ALL_REDUCE = "import time\ndef all_reduce():\n    time.sleep(600)\n"
STATE = "rank 2 has been at train.py:"


class Job:
    """Three ranks below a parent without RANK: ranks 0 and 1 wait in an all-reduce, rank 2 reads."""

    def __init__(self, folder: Path, name: str, **env: str) -> None:
        self.name, self.folder = name, folder
        folder.mkdir()
        for fifo in ("block", "told"):
            os.mkfifo(folder / fifo)
        (folder / "train.py").write_text(TRAIN)
        library = folder / "torch_like" / "torch" / "distributed"
        library.mkdir(parents=True)
        (library / "distributed_c10d.py").write_text(ALL_REDUCE)
        self.process = subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=folder,
            env=clean_env(os.environ, TORCHELASTIC_RUN_ID=name, **env),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        told = [self.process.stdout.readline().split() for _ in range(3)]
        self.pids = {int(rank): int(pid) for rank, pid in told}

    def end(self, *, which: str) -> None:
        """Let rank 2 end (`block`), or the other ones (`told`)."""
        (self.folder / which).write_text("")

    def kill(self) -> None:
        with self.process:
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path / "job", f"watched-{os.getpid()}-{tmp_path.name[-8:]}")
    yield job
    job.kill()


def test_once_names_the_rank_that_the_others_wait_for_and_its_line(allranks: Allranks, job: Job) -> None:
    result = allranks("watch", "--once", job.name)
    lines = result.stdout.splitlines()
    assert result.returncode == 3, result.stdout + result.stderr
    assert STATE in lines[0]
    assert "2 ranks wait" in lines[0]
    assert "for at least " in lines[0]
    row = next(line for line in lines if line.startswith("⚠ 2"))
    assert re.search(r" >\d+(\.\d)? s train\.py:.* 0 % ", row)
    assert not [line for line in lines if line.startswith(("✗", "NODES"))]
    assert "train.py:" in row
    assert sum("all_reduce" in line for line in lines[1:] if line.startswith("  ")) == 2
    assert result.stderr == f"allranks: looking at 3 ranks of {job.name}\n"


def test_json_is_one_document_and_a_stopped_rank_a_verdict(allranks: Allranks, job: Job) -> None:
    os.kill(job.pids[0], signal.SIGSTOP)
    result = allranks("watch", "--once", "--json", "--pid", *map(str, job.pids.values()))
    assert result.returncode == 1, result.stdout + result.stderr
    document = json.loads(result.stdout)
    assert (document["version"], document["exit_code"], document["is_over"]) == (1, 1, False)
    assert document["verdicts"][0]["ranks"] == document["culprits"] == [0]
    assert {row["ranks"][0]: row["state"] for row in document["rows"]}[0] == "stopped"
    assert Path(f"/proc/{job.pids[0]}/stat").read_text().split()[2] == "T"  # left as it was


def test_a_job_that_ends_ends_the_watch_and_why_says_the_same(allranks: Allranks, job: Job, tmp_path: Path) -> None:
    command, out = allranks_command("watch", job.name), tmp_path / "lines"
    with (
        out.open("w") as file,
        subprocess.Popen(
            command, cwd=tmp_path, env=clean_env(os.environ), stdout=file, stderr=subprocess.STDOUT
        ) as watch,
    ):
        wait_until(lambda: STATE in out.read_text(), "the state")
        job.end(which="block")
        wait_until(lambda: "✗ AR" in out.read_text(), "the verdict")  # before the launcher ends the others
        job.end(which="told")
        assert watch.wait(60) == 1
    text, record = out.read_text(), tmp_path / "runs" / f"watch-{job.name}"
    head = next(line for line in text.splitlines() if line.startswith("✗ AR"))
    assert re.search(r"rank 2\b.*", head)
    assert f"allranks why runs/watch-{job.name}" in text
    looks = [json.loads(line) for line in (record / "looks.jsonl").read_text().splitlines()]
    # The store's port is free again: who of another test connects to it now may be taken for a client without a rank.
    own = [process for process in looks[-1]["processes"] if process["role"] == "worker" and "rank" in process]
    assert {process["rank"] for process in own} == {0, 1, 2}
    why = allranks("why", str(record))
    assert (why.returncode, why.stdout.splitlines()[0]) == (1, head)
    assert job.name not in allranks("list").stdout
    cleaned = allranks("clean", "--keep", "0", "--yes")  # it is no run
    assert (cleaned.returncode, cleaned.stdout, record.exists()) == (0, "", True)
    assert "no such run" in allranks("clean", record.name, "--yes").stderr


def test_ctrl_c_ends_the_watch_and_leaves_nothing(job: Job, tmp_path: Path) -> None:
    with subprocess.Popen(
        allranks_command("watch", job.name),
        cwd=tmp_path,
        env=clean_env(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as watch:
        assert watch.stdout is not None
        watch.stdout.readline()
        watch.send_signal(signal.SIGINT)
        _, errors = watch.communicate(timeout=30)
    assert (watch.returncode, errors.strip()) == (130, f"allranks: looking at 3 ranks of {job.name}")
    assert not (tmp_path / "runs").exists()
    assert all(Path(f"/proc/{pid}").exists() for pid in job.pids.values())


def test_a_terminal_has_the_table_and_q_quits(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("textual")
    head, tail = pty.openpty()
    env = clean_env(os.environ, TERM="xterm-256color", COLUMNS="120", LINES="30")
    with subprocess.Popen(
        allranks_command("watch", job.name), cwd=tmp_path, env=env, stdin=tail, stdout=tail, stderr=tail
    ) as watch:
        os.close(tail)
        drawn, until_s = "", time.monotonic() + 60
        while not all(words in drawn for words in (STATE, "RANKS", "WHERE")) and time.monotonic() < until_s:
            drawn += os.read(head, 1 << 16).decode(errors="replace")
        os.write(head, b"q")
        while watch.poll() is None:  # a full terminal would hold it
            try:
                os.read(head, 1 << 16)
            except OSError:
                break
        assert watch.wait(100) == 3, drawn[-2000:]
    os.close(head)
    assert "WHERE" in drawn


def test_several_jobs_are_listed_one_a_line_as_commands(allranks: Allranks, job: Job, tmp_path: Path) -> None:
    other = Job(tmp_path / "other", "none", MASTER_ADDR="", MASTER_PORT="")  # nothing names it
    try:
        result = allranks("watch")
        first, *listed = result.stderr.splitlines()
        commands = dict(line.strip().split("    ", 1) for line in listed)
        words = {told.strip(): command for command, told in commands.items()}
        command = words[f"3 ranks of train.py in {other.folder}, pid {other.pids[0]}"]
        once = allranks(*command.split()[1:], "--once")
    finally:
        other.kill()
    assert (result.returncode, result.stdout, first) == (2, "", "error: watch: several jobs run on this machine:")
    assert words[f"3 ranks of train.py in {job.folder}, pid {job.pids[0]}"] == f"allranks watch {job.name}"
    assert (once.returncode, "; 2 ranks wait" in once.stdout) == (3, True), once.stdout + once.stderr


def test_a_job_with_a_number_as_its_name_is_watched_here(allranks: Allranks, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", f"1{os.getpid():06}")
    try:
        known, other = allranks("watch", "--once", job.name), allranks("watch", f"2{os.getpid():06}")
    finally:
        job.kill()
    assert (known.returncode, STATE in known.stdout) == (3, True), known.stdout
    assert known.stderr == f"allranks: looking at 3 ranks of {job.name}\n"  # SLURM was not asked
    assert other.returncode == 2
    first, *listed = other.stderr.splitlines()
    assert first == f"error: JOB '2{os.getpid():06}': no SLURM here, and no process of such a job runs here; jobs here:"
    assert any(line.split()[:3] == ["allranks", "watch", job.name] for line in listed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "error: JOB 'nonsense': no process of such a job runs here; "),
        (["1"], "error: JOB '1': no SLURM here, and no process of such a job runs here; to watch the process 1: "),
        (["--pid"], "error: watch --pid: expected process ids, for example --pid 4711 4712"),
        (["--pid", "x"], "error: watch --pid x: expected process ids, for example --pid 4711 4712"),
        (["--pid", "4194304"], "error: watch: no such process on this machine: 4194304"),
        (["1", "2"], "error: watch 1 2: expected one job; for process ids: allranks watch --pid PID..."),
    ],
)
def test_what_cannot_be_watched_is_a_usage_error(allranks: Allranks, arguments: list[str], words: str) -> None:
    result = allranks("watch", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(words)
    assert all(line.startswith("  allranks watch ") for line in result.stderr.splitlines()[1:])  # what runs here


def probes_of(job: str) -> list[Path]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            found += [path] if b"--probe" in words and job.encode() in words and b"allranks" in words[:4] else []
    return found


def test_a_slurm_job_is_watched_by_probes_that_end_with_a_killed_watcher(allranks: Allranks, tmp_path: Path) -> None:
    number = f"9{os.getpid():06}"
    step = FakeStep(tmp_path / "bin")
    (step.folder / "scontrol").write_text("#!/bin/sh\nprintf '%s' \"$FAKE_JOB\"\n")
    env = step.env | {"FAKE_NODES": "n1", "FAKE_JOB": show_job(number, nodes="n1")}
    job = Job(tmp_path / "job", "none", SLURM_JOB_ID=number)
    try:
        with subprocess.Popen(
            allranks_command("watch", "--ask", number),
            cwd=tmp_path,
            env=clean_env(os.environ, **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as watch:
            assert watch.stdout is not None
            assert any(STATE.encode() in line for line in watch.stdout)
            (probe,) = probes_of(number)
            assert b"--ask" in (probe / "cmdline").read_bytes()
            watch.kill()
        wait_until(lambda: not probes_of(number), "the end of the probe")
        flags = step.call["flags"]
        assert isinstance(flags, dict)
        assert (flags["jobid"], flags["time"], "input" in flags) == (number, "0", False)
    finally:
        job.kill()
    refused = allranks("watch", number, env=env | {"FAKE_REFUSAL": "Access/permission denied"})
    words = f"error: watch {number}: no node answered; srun: Unable to allocate resources: Access/permission denied\n"
    assert (refused.returncode, refused.stderr) == (3, words)
