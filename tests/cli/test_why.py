"""`allranks why` through the command line: what it answers, how it ends, and what never reaches a terminal."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import textwrap
from pathlib import Path
from typing import IO

import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

from allranks.cli.main import cli
from allranks.cli.progress_line import ReadProgress
from conftest import Allranks, allranks_command, clean_env, wait_until
from fake_slurm import FakeSlurm, assert_one_line, fake_slurm, show_job  # noqa: F401  (a fixture)

UTF8 = {"PYTHONIOENCODING": "utf-8", "COLUMNS": "100"}
OOM = (
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of "
    "79.15 GiB of which 1.2 GiB is free.\n"
)
WATCHDOG = (
    "[rank{rank}]:[E325 14:03:11.000000000 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=80078, OpType=BROADCAST, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for "
    "600042 milliseconds before timing out.\n"
)
GOES_ON = "2026-03-25 10:00:01 step 10 loss 0.4\n2026-03-25 10:00:02 step 20 loss 0.3\n"
FINISHED = GOES_ON + "`Trainer.fit` stopped: `max_epochs=10` reached.\n"
SUCCEEDED = """allranks: 2 ranks on node01, gloo over lo; logs in runs/3/attempt_0
[master-node r0] the sum is 6.0
allranks: train.py succeeded: 2 ranks, 0.5 s; output in runs/3/attempt_0
"""
REPORT = """
\u2717 AR408 stuck-rank   vm \u00b7 rank 2                             likely
  it has been in user code for 16 s: hang.py:3 in <module>
  more allranks explain AR408
"""


@pytest.fixture
def allranks(allranks_here: Allranks) -> Allranks:
    """It compiles the patterns once for all tests."""
    return allranks_here


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A job of four ranks, of which rank 3 ran out of memory."""
    folder = tmp_path / "logs"
    folder.mkdir()
    for rank in range(3):
        (folder / f"rank_{rank}.err").write_text(GOES_ON + WATCHDOG.format(rank=rank))
    (folder / "rank_3.err").write_text(GOES_ON + OOM)
    return folder


def test_the_culprit_is_named_with_evidence_fix_and_victims(allranks: Allranks, logs: Path) -> None:
    result = allranks("why", "logs", env=UTF8)
    lines = result.stdout.splitlines()
    assert result.returncode == 1, result.stderr
    assert result.stderr == ""
    assert lines[0].startswith("\u2717 AR109 cuda-oom   rank 3")
    assert lines[0].endswith(" certain")
    assert "  log  rank_3.err:3" in lines
    assert any(line.startswith("  fix  ") for line in lines)
    assert "  more allranks explain AR109" in lines
    assert lines[-2:] == ["", "1 more finding: allranks why --all logs"]
    assert "AR490" not in result.stdout


TORCHRUN_OF_TWO = """failed (exitcode: 1) local_rank: 0 (pid: 14050) of binary: /usr/bin/python
train.py FAILED
Failures:
[1]:
  host      : node01
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 14051)
Root Cause (first observed failure):
[0]:
  host      : node01
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 14050)
"""
MISTYPED = 'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n    import torhc\n'
EVERYDAY = {
    "train.py:1: ModuleNotFoundError: No module named 'torhc'": 2
    * f"{MISTYPED}ModuleNotFoundError: No module named 'torhc'\n"
    + TORCHRUN_OF_TWO,
    "error: execve(): alranks: No such file or directory": "srun: error: node02: task 0: Exited with exit code 2\n"
    "slurmstepd-node02: error: execve(): alranks: No such file or directory\n"
    "slurmstepd-node03: error: execve(): alranks: No such file or directory\n"
    "srun: error: node03: task 1: Exited with exit code 2\n",
    "slurm_script: line 5: torchrun: command not found": "slurm_script: line 5: torchrun: command not found\n",
}
"""What the line below the first is, and the log: all ranks failed alike, so that none waited for another."""


@pytest.mark.parametrize("said", EVERYDAY)
def test_what_stops_a_job_at_its_first_line_is_told_in_its_own_words(
    said: str, allranks: Allranks, tmp_path: Path
) -> None:
    (tmp_path / "job.out").write_text(EVERYDAY[said])
    result = allranks("why", "job.out", env=UTF8)
    assert result.stdout.startswith("\u2717 AR590 user-code-error"), result.stdout
    assert result.stdout.splitlines()[1] == f"  {said}"
    assert ("waited for it" in result.stdout, result.returncode) == (False, 1)


IMAGE_REFUSED = """slurmstepd: error: pyxis: child 10028 failed with error code: 1
slurmstepd: error: pyxis: failed to import docker image
slurmstepd: error: pyxis: printing enroot log file:
slurmstepd: error: pyxis:     [INFO] Authenticating with user: <anonymous>
slurmstepd: error: pyxis:     [ERROR] URL https://nvcr.io/proxy_auth returned error code: 401 Unauthorized
slurmstepd: error: pyxis: couldn't start container
srun: error: compute-0: task 0: Exited with exit code 1
"""


def test_why_a_container_does_not_start_is_its_evidence(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "slurm-7.out").write_text(IMAGE_REFUSED)
    lines = allranks("why", "slurm-7.out").stdout.splitlines()
    assert lines[0][2:].startswith("AR512 node-cannot-start   compute-0")
    assert [line.partition("pyxis: ")[2].strip() for line in lines if line.startswith("  seen ")] == [
        "couldn't start container",
        "failed to import docker image",
        "[ERROR] URL https://nvcr.io/proxy_auth returned error code: 401 Unauthorized",
    ]


def test_a_run_that_has_no_output_yet_is_no_usage_error(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "runs/977/attempt_0/node01").mkdir(parents=True)
    (tmp_path / "runs/977/attempt_0/node01/env.json").write_text("{}")
    result = allranks("why", "runs/977", env=UTF8)
    said = "no known cause; there is no output of any rank: none was started, or the disk was full\n"
    assert (result.returncode, result.stdout) == (3, said)


def test_all_shows_the_others_too(allranks: Allranks, logs: Path) -> None:
    result = allranks("why", "--all", "logs", env=UTF8)
    heads = [line[:7] for line in result.stdout.splitlines() if line[:1] in "\u2717\u26a0" and line]
    assert heads == ["\u2717 AR109", "\u26a0 AR490"]
    assert "more finding" not in result.stdout


def test_the_timeline_folds_victims_and_marks_the_culprit(allranks: Allranks, logs: Path) -> None:
    lines = allranks("why", "--timeline", "logs", env=UTF8).stdout.splitlines()
    assert any(line.startswith("\u25b8") and "rank 3" in line and "AR109 cuda-oom" in line for line in lines)
    (folded,) = [line for line in lines if "ranks 0-2" in line and "14:03" in line and " -> " not in line]
    assert "14:03:11" in folded
    assert folded.endswith("(3 lines) [rank_0.err:3]")


def test_json_is_a_document(allranks: Allranks, logs: Path) -> None:
    result = allranks("why", "--json", "--timeline", "logs", env=UTF8)
    document = json.loads(result.stdout)
    assert list(document) == [
        "version", "exit_code", "findings", "others", "last_words", "problems", "sources", "lines", "bytes", "dropped",
        "timeline", "restarts", "running", "chain",
    ]  # fmt: skip
    assert (document["version"], document["exit_code"], document["others"]) == (1, 1, 1)
    (finding,) = document["findings"]
    assert (finding["cause"], finding["ranks"], finding["severity"]) == ("AR109 cuda-oom", [3], "fail")
    assert finding["evidence"][0]["source"] == "rank_3.err:3"
    assert document["sources"][3] == {
        "path": "rank_3.err",
        "size_bytes": (logs / "rank_3.err").stat().st_size,
        "node": None,
        "rank": 3,
    }
    assert document["lines"] == 12
    assert document["bytes"] == sum(path.stat().st_size for path in logs.iterdir())
    assert {row["who"] for row in document["timeline"]} == {"rank 3", "ranks 0-2"}
    assert json.loads(allranks("why", "--json", "logs").stdout)["timeline"] is None


@pytest.mark.parametrize(
    ("text", "code", "first"),
    [
        (FINISHED, 0, "\u2713 AR599 healthy   "),
        (GOES_ON, 0, "\u2713 AR599 healthy   "),
        ("hello\n", 0, "\u2713 AR599 healthy   these logs show no failure"),
        ("", 3, "no known cause; these logs are empty"),
        (
            "Listening...\n" + "".join(f"Dialling shard 5 failed, waiting for {n} ms\n" for n in (200, 260, 338)),
            3,
            "\u26a0 AR491 silent-hang",
        ),
        (OOM, 1, "\u2717 AR109 cuda-oom   "),
        (SUCCEEDED, 0, "\u2713 AR599 healthy   "),
        (GOES_ON + REPORT, 1, "\u2717 AR408 stuck-rank   vm \u00b7 rank 2"),
        (WATCHDOG.format(rank=1), 1, "\u2717 AR490 collective-timeout   "),
    ],
    ids=["finished", "goes on", "nothing", "empty", "hangs", "oom", "succeeded", "reported", "timeout"],
)
def test_exit_codes(allranks: Allranks, tmp_path: Path, text: str, code: int, first: str) -> None:
    (tmp_path / "a.log").write_text(text)
    result = allranks("why", "a.log", env=UTF8)
    assert result.stdout.startswith(first), result.stdout + result.stderr
    assert result.returncode == code


def test_healthy_is_one_calm_line(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(FINISHED)
    assert len(allranks("why", "a.log", env=UTF8).stdout.splitlines()) == 1


def test_nothing_found_shows_the_last_lines_of_who_stopped_first(allranks: Allranks, tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank_{rank}.log").write_text(f"2026-03-25 10:00:0{9 - rank} hello {rank}\n")
    result = allranks("why", *(f"rank_{rank}.log" for rank in range(3)))
    assert result.returncode == 0
    first, _, rest = result.stdout.partition("\n\n")
    assert first.endswith(" undecided")
    assert rest == (
        "the last lines of rank 2 (rank_2.log), which stopped first, are\n  rank_2.log:1: 2026-03-25 10:00:07 hello 2\n"
    )


def test_standard_input(tmp_path: Path) -> None:
    result = subprocess.run(
        allranks_command("why", "-", "-"),
        input=OOM.encode(),
        capture_output=True,
        cwd=tmp_path,
        env=clean_env(os.environ, **UTF8),
        timeout=60,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert result.stdout.decode().startswith("\u2717 AR109 cuda-oom   rank 3")
    assert "  log  -:1" in result.stdout.decode()


def test_packed_logs_and_what_is_wrong_with_them(allranks: Allranks, tmp_path: Path) -> None:
    packed = gzip.compress((GOES_ON + OOM).encode() * 50)
    (tmp_path / "whole.log.gz").write_bytes(packed)
    (tmp_path / "cut.log.gz").write_bytes(packed[:-20])
    result = allranks("why", "whole.log.gz", "cut.log.gz", env=UTF8)
    assert result.returncode == 1
    assert "cut.log.gz:3" in result.stdout  # the same line is in both
    last = result.stdout.splitlines()[-1]
    assert last.startswith("not fully read: cut.log.gz: its gzip data ends too early")
    assert json.loads(allranks("why", "--json", "cut.log.gz").stdout)["problems"] == [
        last.removeprefix("not fully read: ")
    ]


def test_what_was_not_read_is_not_well(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "cut.log.gz").write_bytes(gzip.compress(FINISHED.encode() * 90)[:-20])
    result = allranks("why", "cut.log.gz", env=UTF8)
    assert result.stdout.startswith("\u2713 AR599 healthy")
    assert result.returncode == 3


@pytest.mark.parametrize(
    "arguments",
    [["nix.log"], [], ["*.log"], ["--since", "yesterday", "a.txt"], ["12", "a.txt"], ["--unknown", "a.txt"]],
    ids=["missing file", "no argument", "no match", "no time", "job and file", "flag"],
)
def test_wrong_usage_is_one_line(allranks: Allranks, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "a.txt").write_text("x\n")
    result = allranks("why", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert_one_line(result.stderr)


CODE = """import torch.distributed as dist

dist.init_process_group("gloo", world_size=2)
for step in range(10):
    print("step", step, "loss", 0.1)
"""


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [("train.py", CODE, "Python source"), ("job.sh", "srun python train.py\n", "a shell script")],
)
def test_source_code_is_no_log(allranks: Allranks, tmp_path: Path, name: str, text: str, what: str) -> None:
    (tmp_path / name).write_text(text)
    result = allranks("why", name)
    assert (result.returncode, result.stdout) == (2, "")
    assert_one_line(result.stderr)
    assert f"{name}: this is {what} without a line of a log" in result.stderr


def test_a_log_with_the_name_of_source_code_is_read(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(OOM)
    assert allranks("why", "a.py").returncode == 1
    (tmp_path / "a.py").write_text(GOES_ON)
    assert allranks("why", "a.py").returncode == 0


def test_a_job_of_slurm(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    slurm.answer("scontrol", "show job 12", out=show_job(state="FAILED", work=tmp_path))
    (tmp_path / "slurm-12.out").write_text(OOM)
    result = allranks("why", "12", env=UTF8)
    assert result.stdout.startswith("\u2717 AR109 cuda-oom   rank 3"), result.stderr
    assert "  log  slurm-12.out:1" in result.stdout


def test_of_several_jobs_in_a_directory_the_newest_is_read(allranks: Allranks, logs: Path) -> None:
    for job, text in ((97, OOM), (104, MISTYPED + "ModuleNotFoundError: No module named 'torhc'\n")):
        (logs / f"slurm-{job}.out").write_text(text)
    for path in logs.glob("rank_*"):
        path.unlink()
    result = allranks("why", "logs", env=UTF8)
    assert result.stderr == (
        "allranks: the output of 2 jobs is here; reading that of the newest, 104; the previous one is 97\n"
    )
    assert result.stdout.splitlines()[1] == "  train.py:1: ModuleNotFoundError: No module named 'torhc'"
    result = allranks("why", "logs/slurm-97.out", "logs/slurm-104.out", env=UTF8)
    assert "these are logs of 2 jobs, read as if they were one: name the files of one" in result.stdout


def test_a_job_that_still_runs_is_not_called_healthy(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    slurm.answer("scontrol", "show job 12", out=show_job(work=tmp_path))
    (tmp_path / "slurm-12.out").write_text(GOES_ON)
    result = allranks("why", "12", env=UTF8)
    assert result.stdout.startswith("12 is still RUNNING; to see where its ranks are: allranks stack 12\n\n")
    assert "its logs show no failure so far; the last lines of slurm-12.out are" in result.stdout
    assert "healthy" not in result.stdout
    assert result.returncode == 3
    (tmp_path / "slurm-12.out").write_text(OOM)
    result = allranks("why", "12", env=UTF8)
    assert result.stdout.splitlines()[0] == "12 is still RUNNING; to see where its ranks are: allranks stack 12"
    assert "AR109 cuda-oom" in result.stdout
    assert result.returncode == 1


def test_files_of_other_runs_in_the_job_s_directory_are_not_read(
    slurm: FakeSlurm, allranks: Allranks, tmp_path: Path
) -> None:
    """Dumps of a collective mismatch: below another run, and beside the job's output file."""
    slurm.answer("scontrol", "show job 2", out=show_job("2", state="COMPLETED", work=tmp_path))
    (tmp_path / "slurm-2.out").write_text(GOES_ON)
    own = tmp_path / "runs/2/attempt_0/vm"
    own.mkdir(parents=True)
    (own / "env.json").write_text("[]")
    (own / "rank_0.out").write_text(GOES_ON)
    other = tmp_path / "runs/20261123-215113-17541/attempt_0/vm"
    leave_mismatch(other)
    leave_mismatch(tmp_path)
    (other / "env.json").write_text("[]")
    (tmp_path / "runs/latest").symlink_to("2")
    assert allranks("why", "runs/20261123-215113-17541").stdout.startswith("\u2717 AR410 collective-mismatch")
    for arguments in (["2"], ["latest"], [], ["slurm-*.out", "runs/2/attempt_0/vm/rank_0.out"]):
        result = allranks("why", "--all", *arguments, env=UTF8)
        assert "AR410" not in result.stdout, arguments
        assert "AR599" in result.stdout, arguments
    leave_mismatch(own)
    assert allranks("why", "2", env=UTF8).stdout.startswith("\u2717 AR410 collective-mismatch")


def leave_mismatch(folder: Path) -> None:
    """The flight recorder's dumps of three ranks, of which rank 1 calls another collective."""
    folder.mkdir(parents=True, exist_ok=True)
    group = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    for rank in range(3):
        call = {
            "record_id": 0, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 1, "p2p_seq_id": 0,
            "profiling_name": "gloo:broadcast" if rank == 1 else "gloo:all_reduce", "input_sizes": [[8]],
            "input_dtypes": ["Float"], "output_sizes": [[8]], "output_dtypes": ["Float"], "state": "started",
            "retired": False, "is_p2p": False, "time_created_ns": 1_700_000_000_000_000_000, "frames": [],
        }  # fmt: skip
        dump = {"version": "2.10", "pg_config": group, "entries": [call]}
        (folder / f"recorder_rank_{rank}.json").write_text(json.dumps(dump))


def test_a_file_that_is_called_like_a_job_is_meant(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "12").write_text(OOM)
    assert allranks("why", "12").returncode == 1
    assert not slurm.calls()


def test_a_job_that_nobody_knows_is_one_line(slurm: FakeSlurm, allranks: Allranks) -> None:
    result = allranks("why", "4711")
    assert result.returncode == 2
    assert_one_line(result.stderr)


def test_since_and_until_leave_out_what_was_before_and_after(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(
        "2026-03-25 10:00:01 OSError: [Errno 28] No space left on device\n"
        "2026-03-25 11:00:01 torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    )
    result = allranks("why", "--since", "30m", "--all", "a.log")
    assert "AR109" in result.stdout
    assert "AR005" not in result.stdout
    result = allranks("why", "--until", "2026-03-25T10:30", "--all", "a.log")
    assert "AR109" not in result.stdout
    assert "AR005" in result.stdout


def test_the_newest_run_is_meant_where_nothing_is_named(allranks: Allranks, tmp_path: Path) -> None:
    """Also the whole way: a script fails under `allranks run`, and its logs alone tell who and where."""
    script = """
    import os, time

    def load_batch(rank):
        if rank == 1:
            raise ValueError("expected 4 columns, got 3")
        time.sleep(30)

    load_batch(int(os.environ["RANK"]))
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script).lstrip())
    node = {"SLURMD_NODENAME": "node07"}
    ran = allranks("run", "--ignore", "AR011", "--nproc-per-node", "3", "train.py", env=node)
    assert ran.returncode == 1, ran.stderr
    for arguments in ([], [str((tmp_path / "runs/latest").readlink())], ["runs/latest"]):
        named = [f"runs/{each}" if each[:4] != "runs" else each for each in arguments]
        result = allranks("why", "--json", *named)
        assert result.returncode == 1, result.stderr
        finding = json.loads(result.stdout)["findings"][0]
        assert (finding["cause"], finding["node"], finding["ranks"]) == ("AR590 user-code-error", "node07", [1])
        assert "train.py:5" in json.dumps(finding)
        assert "expected 4 columns" in finding["message"]
        assert finding["evidence"][0]["source"].endswith("attempt_0/node07/rank_1.err:6")
    assert "allranks: reading " in allranks("why").stderr


NASTY = (
    b"\x1b[2J\x1b]0;owned\x07[rank3]: ValueError: \x9b31m\xe2\x80\xae HF_TOKEN=geheim\x1b[0m\x00\r\n"
    b'  File "t\x1b[31m.py", line 7, in \xff\nValueError: password=geheim\x85 \xc2\x9b1m\n'
)
FILLER = b"step\n" * 1000
"""Only the first 4 KiB tell whether a file is text."""


def assert_harmless(text: str) -> None:
    assert all(line.isprintable() for line in text.split("\n")), text


@pytest.mark.parametrize("flags", [[], ["--all", "--timeline"], ["--json", "--timeline"]])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_neither_control_characters_nor_secrets_come_out(
    allranks: Allranks, tmp_path: Path, flags: list[str], encoding: str
) -> None:
    traceback = b'Traceback (most recent call last):\n  File "t.py", line 7\n'
    (tmp_path / "rank_3\x1b[2J\n.log").write_bytes(FILLER + traceback + NASTY)
    result = subprocess.run(
        allranks_command("why", *flags, "."),
        cwd=tmp_path,
        env=clean_env(os.environ, PYTHONIOENCODING=encoding),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode in (1, 3), result.stderr
    assert result.stderr == b""
    assert_harmless(result.stdout.decode(encoding))
    assert b"geheim" not in result.stdout


PIECES = st.sampled_from([
    OOM.encode(), WATCHDOG.encode(), NASTY, b"Traceback (most recent call last):\n", b'  File "a.py", line 7, in f\n',
    b"ValueError: x\n", b"\r", b"\n", b"[rank3]: ", b"3: ", b"\x1f\x8b", b"\x00", b"\xff\xfe", FILLER,
    b"srun: error: n1: task 3: ",
    b"Connection closed by peer [10.0.0.3]:4711", b"WorkNCCL(SeqNum=99999999999999999999, OpType=", b"12:61:99 ",
])  # fmt: skip


@given(data=st.lists(st.one_of(PIECES, st.binary(max_size=60)), max_size=12).map(b"".join), is_json=st.booleans())
@example(data=b"", is_json=False)
@example(data=FILLER + NASTY * 3, is_json=False)
def test_any_bytes_are_a_log(tmp_path: Path, data: bytes, is_json: bool) -> None:
    path = tmp_path / "any.log"
    path.write_bytes(data)
    result = CliRunner().invoke(
        cli, ["why", "--all", "--timeline", *(["--json"] if is_json else []), str(path)], standalone_mode=False
    )
    if type(result.exception).__name__ == "UsageError":  # it holds no text
        return
    assert result.exception is None, result.exception
    assert result.return_value in (0, 1, 3)
    assert_harmless(result.stdout)
    assert "geheim" not in result.stdout
    if is_json:
        assert json.loads(result.stdout)["exit_code"] == result.return_value


@pytest.mark.parametrize("arguments", [["--help"], ["why", "--help"]])
def test_help_needs_neither_hyperscan_nor_torch(arguments: list[str]) -> None:
    code = f"import sys; sys.argv[1:] = {arguments!r}\nfrom allranks.cli.main import main\n"
    code += "try: main()\nexcept SystemExit: pass\nprint({'hyperscan', 'zstandard', 'torch'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.endswith("\nset()\n")


def test_without_hyperscan_the_answer_is_the_same_and_one_line_says_that_it_takes_longer(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(OOM)
    code = "import sys; sys.argv[1:] = ['why', 'a.log']\n{}\nfrom allranks.cli.main import main\nmain()"
    fast, plain = (
        subprocess.run(
            [sys.executable, "-c", code.format(line)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd=tmp_path,
        )
        for line in ("", "sys.modules['hyperscan'] = None")
    )
    assert (fast.returncode, fast.stderr) == (1, "")
    assert (plain.returncode, plain.stdout) == (1, fast.stdout)
    assert plain.stderr.splitlines() == [
        "allranks: hyperscan is not installed, so reading large logs takes many times as long; the findings are the "
        "same. To install it: pip install hyperscan"
    ]


def test_an_answer_about_a_small_log_loads_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(OOM)
    unused = {"numpy", "torch", "psutil", "subprocess", "multiprocessing", "concurrent.futures", "pickletools"}
    code = "import sys; sys.argv[1:] = ['why', 'a.log']\nfrom allranks.cli.main import main\n"
    code += f"try: main()\nexcept SystemExit: pass\nprint({unused} & {{*sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path
    )
    assert result.stdout.endswith("\nset()\n")


def test_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    process = subprocess.Popen(
        allranks_command("why", "-"),
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdin is not None
        process.stdin.write(OOM.encode())
        process.stdin.flush()
        wait_until(lambda: _unread(process.stdin) == 0, "the reading of what was written")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


def _unread(pipe: IO[bytes] | None) -> int:
    """Bytes that are still in a pipe."""
    return int.from_bytes(fcntl.ioctl(pipe or -1, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_how_much_was_read_is_said_on_a_terminal_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        now = iter([0.0, 1.9, 2.1, 2.2, 2.5])
        progress = ReadProgress(4_000_000_000, is_packed=False, clock=lambda: next(now))
        for _ in range(4):
            progress.add(500_000_000)
        progress.clear()
        said = ""
        while said.count("\r") < 4:
            said += os.read(ours, 4096).decode()
    os.close(ours)
    assert said.split("\r") == [
        "", "allranks: 1.0 of 4.0 GB, 25 %", "allranks: 2.0 of 4.0 GB, 50 %", " " * 29, "",
    ]  # fmt: skip


def test_nothing_is_said_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([0.0, 9.0, 10.0])
    progress = ReadProgress(1, is_packed=True, clock=lambda: next(now))
    progress.add(5)
    progress.clear()
    assert capsys.readouterr().err == ""
