"""An epilog costs its node nothing, whatever is broken, and one line arrives where nothing is."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from allranks.host.slurm import JobState
from allranks.host.slurm_job import ASK_S, set_comment_in_accounting
from allranks.model.errors import SetupError
from allranks.model.finding import Confidence, Finding, Severity
from allranks.why.fleet import epilog
from allranks.why.fleet.epilog import SLOTS, append_line, explain, take_slot
from allranks.why.fleet.told import MAX_COMMENT, Duty, choose_duty, is_well, may_comment, tell_comment
from conftest import HANG_S, NOBODY, Allranks, allranks_command, clean_env, is_alive, wait_until
from fake_slurm import FakeSlurm, fake_slurm, show_job  # noqa: F401  (a fixture)

XID = "Nov 28 10:00:01 n3 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus.\n"
OOM = (
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of "
    "79.15 GiB of which 1.2 GiB is free.\n"
)
JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_UID": str(os.getuid()), "SLURM_JOB_USER": "ada"}
NODE = JOB | {"SLURMD_NODENAME": "n1", "SLURM_NODELIST": "n[1-4]"}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


def without_comment(text: str, comment: str = "(null)") -> str:
    return text.replace("Comment=x JobId=77 JobState=FAILED y", f"Comment={comment}")


def lines_of(path: Path) -> list[dict[str, object]]:
    # The watcher has a low priority and one core: beside busy processes it gets little of it.
    wait_until(lambda: path.exists() and path.read_bytes().endswith(b"\n"), "a line in the file", 2 * HANG_S)
    return [json.loads(line) for line in path.read_text().splitlines()]


def comments(slurm: FakeSlurm) -> list[list[str]]:
    return [call["argv"] for call in slurm.calls("sacctmgr")]  # type: ignore[misc]


# --- From the epilog to the line --------------------------------------------------------------------------------------


def test_a_failed_job_gets_a_comment_and_a_line(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "slurm-12.out").write_text(OOM)
    slurm.answer("scontrol", "show job 12", out=without_comment(show_job(state="FAILED", code="1:0", work=tmp_path)))
    slurm.answer("sacctmgr", out=" Modified jobs...\n  12 submitted at 2026-11-21T03:16:18\n")
    done = allranks("why", "--epilog", "--to", "ends.jsonl", env=NODE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (line,) = lines_of(tmp_path / "ends.jsonl")
    assert line.pop("time_s") == pytest.approx(time.time(), abs=2 * HANG_S)
    assert line == {
        "version": 1,
        "job": "12",
        "user": "ada",
        "state": "FAILED",
        "nodes": "n[1-4]",
        "is_failed": True,
    }  # fmt: skip  (the log names no node)
    assert comments(slurm) == [[
        "--immediate", "modify", "job", "where", "jobid=12", "set",
        "comment=allranks: AR109 cuda-oom, rank 3 GPU 3 (certain): a rank ran out of GPU memory; allranks why 12",
    ]]  # fmt: skip
    assert (tmp_path / "ends.jsonl").stat().st_mode & 0o777 == 0o644


def test_no_quote_of_a_log_reaches_the_database(slurm: FakeSlurm) -> None:
    slurm.answer("sacctmgr", out=" Modified jobs...\n  12 submitted at 2026-11-21T03:16:18\n")
    set_comment_in_accounting("12", """allranks: it's "x", `y`, \\'; DROP TABLE jobs""")
    assert comments(slurm)[0][-1] == "comment=allranks: its x, y, ; DROP TABLE jobs"
    slurm.answer("sacctmgr", out=" Modified jobs...\n  Nothing modified\n")
    with pytest.raises(SetupError, match="sacctmgr"):
        set_comment_in_accounting("12", "x")


def test_the_line_names_the_node_at_fault(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "slurm-12.out").write_text(XID)
    slurm.answer("scontrol", "show job 12", out=without_comment(show_job(state="TIMEOUT", work=tmp_path)))
    assert allranks("why", "--epilog", "--to", "ends.jsonl", env=NODE).returncode == 0
    (line,) = lines_of(tmp_path / "ends.jsonl")
    assert (line["state"], line["is_failed"]) == ("TIMEOUT", True)
    assert line["faults"] == [{"cause": "AR105 gpu-hardware", "node": "n3", "confidence": "likely"}]


def test_a_controller_that_is_restarted_is_asked_again(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    slurm.answer("scontrol", "show job 12", out=without_comment(show_job(state="COMPLETED", work=tmp_path)))
    slurm.answer_once("scontrol", err="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    assert allranks("why", "--epilog", "--to", tmp_path, env=NODE).returncode == 0
    assert lines_of(tmp_path / "n1.jsonl")[0]["job"] == "12"


def test_a_healthy_job_gets_a_short_line_and_no_comment_and_its_logs_are_not_read(
    slurm: FakeSlurm, allranks: Allranks, tmp_path: Path
) -> None:
    (tmp_path / "slurm-12.out").write_text(OOM)
    slurm.answer("scontrol", "show job 12", out=without_comment(show_job(state="COMPLETED", work=tmp_path)))
    assert allranks("why", "--epilog", "--to", tmp_path, env=NODE).returncode == 0
    (line,) = lines_of(tmp_path / "n1.jsonl")  # a directory has a file for each node
    del line["time_s"]
    assert line == {"version": 1, "job": "12", "user": "ada", "state": "COMPLETED", "nodes": "n[1-4]"}
    assert comments(slurm) == []


def test_the_comment_of_a_user_stays(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "slurm-12.out").write_text(OOM)
    slurm.answer("scontrol", "show job 12", out=show_job(state="FAILED", code="1:0", work=tmp_path))
    assert allranks("why", "--epilog", "--to", "ends.jsonl", env=NODE).returncode == 0
    assert lines_of(tmp_path / "ends.jsonl")[0]["is_failed"] is True
    assert comments(slurm) == []


def test_a_job_without_logs_is_failed_and_unexplained(slurm: FakeSlurm, allranks: Allranks, tmp_path: Path) -> None:
    slurm.answer("scontrol", "show job 12", out=without_comment(show_job(state="NODE_FAIL", work=tmp_path)))
    assert allranks("why", "--epilog", "--to", "ends.jsonl", env=NODE).returncode == 0
    (line,) = lines_of(tmp_path / "ends.jsonl")
    assert line["is_failed"] is True
    assert str(line["unexplained"]).startswith("job 12: it has no logs here")


# --- What it costs when something is broken ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        ([], {}),
        (["--bogus"], NODE),
        (["--to", "/nowhere/ends.jsonl"], NODE),
        (["--to", "fifo"], NODE),
        ([], NODE | {"SLURM_CONF": "/nowhere/slurm.conf"}),
        ([], NODE | {"PATH": ""}),
        ([], NODE | {"SLURM_JOB_UID": "999999"}),
    ],
    ids=["not an epilog", "wrong option", "no directory", "fifo", "no slurm.conf", "no SLURM", "no such user"],
)  # fmt: skip
def test_it_ends_with_0_at_once_whatever_is_broken(
    slurm: FakeSlurm, allranks: Allranks, tmp_path: Path, arguments: list[str], env: dict[str, str]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    slurm.answer("scontrol", "show job 12", out=without_comment(show_job(state="COMPLETED", work=tmp_path)))
    done = allranks("why", "--epilog", *arguments, env=env)  # returns when nobody holds its output open any more
    assert (done.returncode, done.stdout) == (0, "")


def test_a_slurm_that_hangs_holds_nobody_up_and_the_watcher_ends(slurm: FakeSlurm, tmp_path: Path) -> None:
    for tool in ("scontrol", "sinfo"):
        (slurm.bin / tool).write_text(f"#!/bin/sh\necho $PPID >{tmp_path}/watcher\nexec sleep 30\n")
    code = (
        "import os; from pathlib import Path; from allranks.why.fleet.epilog import start; "
        "os.nice = int; "  # its life may be over on a busy machine before it has asked SLURM
        f"start(os.environ, to=Path('{tmp_path}/ends.jsonl'), command=['false'], life_s=6)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_env(os.environ, **NODE), capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    wait_until(lambda: (tmp_path / "watcher").exists() and (tmp_path / "watcher").read_text(), "the watcher")
    watcher = int((tmp_path / "watcher").read_text())
    assert is_alive(watcher)  # so it holds nothing that the epilog's caller waits for
    wait_until(lambda: not is_alive(watcher), "SIGALRM ends the watcher")
    assert not (tmp_path / "ends.jsonl").exists()


def test_on_a_full_disk_nothing_is_written_and_the_next_line_is_whole(
    slurm: FakeSlurm, allranks: Allranks, tmp_path: Path
) -> None:
    ends = tmp_path / "ends.jsonl"
    ends.write_text("x" * (1 << 16) + "\n")
    slurm.answer("scontrol", "show job 12", out=without_comment(show_job(state="COMPLETED", work=tmp_path)))
    limited = ["prlimit", f"--fsize={(1 << 16) + 20}", *map(str, allranks_command("why", "--epilog", "--to", ends))]
    done = subprocess.run(limited, env=clean_env(os.environ, **NODE), timeout=60, check=False)
    assert done.returncode == 0
    wait_until(lambda: ends.stat().st_size == (1 << 16) + 20, "a line that is cut")
    assert allranks("why", "--epilog", "--to", ends, env=NODE).returncode == 0
    wait_until(lambda: ends.read_text().endswith("}\n"), "a whole line")
    assert json.loads(ends.read_text().splitlines()[-1])["job"] == "12"


def test_no_more_than_some_watchers_run_at_once() -> None:
    with contextlib.ExitStack() as held:
        taken = [held.enter_context(take_slot(f"test-{os.getpid()}")) for _ in range(SLOTS + 1)]
        assert [slot is None for slot in taken] == [False] * SLOTS + [True]
    with take_slot(f"test-{os.getpid()}") as slot:
        assert slot is not None


# --- Who explains it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "turn"),
    [
        ({"SLURMD_NODENAME": "n1", "SLURM_NODELIST": "n[1-4]"}, 0),
        ({"SLURMD_NODENAME": "n2", "SLURM_NODELIST": "n[1-4]"}, 1),
        ({"SLURMD_NODENAME": "n3", "SLURM_NODELIST": "n[1-4]"}, None),
        ({"SLURMD_NODENAME": "n3", "SLURM_JOB_NODELIST": "n[3-4]", "SLURM_NODELIST": "n[1-4]"}, 0),
        ({"SLURM_SCRIPT_CONTEXT": "epilog_slurmctld", "SLURM_JOB_NODELIST": "n[1-4]"}, 0),
    ],
)
def test_the_first_node_explains_the_job_and_the_second_stands_in(env: dict[str, str], turn: int | None) -> None:
    duty = choose_duty(JOB | env)
    assert duty is None if turn is None else isinstance(duty, Duty) and duty.turn(duty.nodes) == turn


@pytest.mark.parametrize(
    "env",
    [{}, {"SLURM_JOB_ID": "12"}, {"SLURM_JOB_ID": "; rm -rf /", "SLURM_JOB_UID": "0"}, JOB | {"SLURM_JOB_UID": "-1"}],
)
def test_without_a_job_and_its_user_there_is_nothing_to_do(env: dict[str, str]) -> None:
    assert "expected SLURM_JOB_ID and SLURM_JOB_UID" in str(choose_duty(env))


def test_a_node_that_does_not_know_the_others_asks_slurm_first() -> None:
    for env in ({"SLURMD_NODENAME": "n3"}, {"SLURMD_NODENAME": "n3", "SLURM_NODELIST": "n[1-"}):
        duty = choose_duty(JOB | env)
        assert isinstance(duty, Duty)
        assert duty.nodes == ()
    assert [duty.turn(["n1", "n2", "n3"]), duty.turn(["n3"])] == [None, 0]


@pytest.mark.parametrize(("state", "is_explained"), [("idle", False), ("down*", True), ("drained", True)])
def test_the_second_node_explains_it_only_if_the_first_is_out_of_service(
    slurm: FakeSlurm, allranks: Allranks, tmp_path: Path, state: str, is_explained: bool
) -> None:
    slurm.answer("scontrol", "show job 12", out=without_comment(show_job(state="COMPLETED", work=tmp_path)))
    slurm.answer("sinfo", "-n n1", out=f"n1\x1f{state}\x1fnone\x1fmain*\x1f(null)\n")
    assert allranks("why", "--epilog", "--to", tmp_path, env=NODE | {"SLURMD_NODENAME": "n2"}).returncode == 0
    wait_until(lambda: slurm.calls("sinfo"), "a question for the first node")
    if is_explained:
        assert lines_of(tmp_path / "n2.jsonl")[0]["job"] == "12"
    else:
        time.sleep(0.3)
        assert not (tmp_path / "n2.jsonl").exists()


def test_the_task_that_has_the_number_of_its_array_is_not_the_array(
    slurm: FakeSlurm, allranks: Allranks, tmp_path: Path
) -> None:
    tasks = [
        show_job("12 ArrayJobId=12 ArrayTaskId=2", state="COMPLETED", work=tmp_path),
        show_job("10 ArrayJobId=12 ArrayTaskId=1", state="FAILED", code="1:0", work=tmp_path),
    ]
    slurm.answer("scontrol", "show job 12", out="".join(map(without_comment, tasks)))
    assert allranks("why", "--epilog", "--to", "ends.jsonl", env=NODE).returncode == 0
    assert [(line["job"], line["state"]) for line in lines_of(tmp_path / "ends.jsonl")] == [("12_2", "COMPLETED")]


# --- With whose rights ------------------------------------------------------------------------------------------------

REPORT = r"""printf '{"problem":"%s %s %s %s"}' "$(id -u)" "$(id -G)" "$(pwd)" "$1" """


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@needs_root
@pytest.mark.parametrize(("uid", "gid"), [(NOBODY, NOBODY), (999_999, 888_888)], ids=["known", "unknown"])
def test_the_reader_has_the_rights_of_the_jobs_user(place: Path, uid: int, gid: int) -> None:
    state = JobState(id="12_4", state="FAILED", work_dir=str(place))
    told = explain(Duty("12", uid, gid, "ada", "n1", ()), state, ["sh", "-c", REPORT, "sh"])
    assert told.problem == f"{uid} {gid} {place} 12_4"


@needs_root
def test_a_user_that_nobody_knows_and_without_a_group_is_a_problem() -> None:
    told = explain(Duty("12", 999_999, None, "ada", "n1", ()), JobState(id="12", state=""), ["false"])
    assert told.problem == "user 999999 is not known on this machine"


@needs_root
def test_another_user_than_root_never_reads_what_a_user_names(without_root: Path) -> None:
    told = explain(Duty("12", 0, 0, "root", "n1", ()), JobState(id="12", state=""), ["false"])
    assert told.problem.startswith("the epilog runs as nobody, and may not become user root")


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("exec sleep 60", "sh: no answer within 0.3 s"),
        ("echo no such library >&2; exit 1", "no such library"),
        ("echo hello", "its reader said something else"),
        ("""printf '{"comment":"%2000000s"}' x""", "its reader said something else"),
    ],
    ids=["hangs", "fails", "talks", "floods"],
)
def test_a_reader_that_misbehaves_is_a_problem_and_no_more(program: str, problem: str, tmp_path: Path) -> None:
    state = JobState(id="12", state="FAILED", work_dir=str(tmp_path / "gone"))
    duty = Duty("12", os.geteuid(), None, "ada", "n1", ())
    assert explain(duty, state, ["sh", "-c", program], deadline_s=0.3 if "sleep" in program else 20).problem.startswith(
        problem
    )


# --- The file ---------------------------------------------------------------------------------------------------------


def test_lines_of_many_writers_are_whole(tmp_path: Path) -> None:
    lines = [b"%d" % number * 300 + b"\n" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            list(pool.map(lambda line: append_line(tmp_path / "ends.jsonl", line, node="n1"), lines))
    said = (tmp_path / "ends.jsonl").read_bytes().splitlines(keepends=True)
    assert sorted(line for line in said if line != b"\n") == sorted(lines * 20)


@pytest.mark.parametrize("kind", ["link", "second name", "anybody's directory"])
def test_root_is_not_led_to_another_file(place: Path, kind: str) -> None:
    other = place / "passwd"
    other.write_text("root\n")
    ends = place / "ends.jsonl"
    if kind == "link":
        ends.symlink_to(other)
    elif kind == "second name":
        ends.hardlink_to(other)
    else:
        place.chmod(0o777)
    with pytest.raises(OSError):
        append_line(ends, b"{}\n", node="n1")
    assert other.read_text() == "root\n"
    assert not ends.exists() or ends.read_text() == "root\n"


# --- The comment ------------------------------------------------------------------------------------------------------

FAULT = Finding(
    cause="AR105 gpu-hardware",
    severity=Severity.FAIL,
    confidence=Confidence.CERTAIN,
    node="node17",
    ranks=(3,),
    message="Xid 79: the GPU has fallen off the bus",
)


def test_a_comment_is_one_line_with_the_command_that_tells_more() -> None:
    assert tell_comment(FAULT, job="12") == (
        "allranks: AR105 gpu-hardware, node17 rank 3 (certain): Xid 79: the GPU has fallen off the bus; allranks why 12"
    )


def test_a_long_comment_is_cut_without_its_command_and_has_no_secret() -> None:
    long = Finding(
        cause="AR590 user-code-error",
        severity=Severity.FAIL,
        confidence=Confidence.LIKELY,
        message="HF_TOKEN=hf_abcdefghijklmnopqrst\n" + "x" * 500,
    )
    said = tell_comment(long, job="12")
    assert len(said) <= MAX_COMMENT
    assert said.endswith("x...; allranks why 12")
    assert "hf_abc" not in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("comment", "may"),
    [("", True), ("allranks: AR105 gpu-hardware", True), ("my job", False), ("an allranks: job", False)],
)
def test_only_our_own_comment_is_replaced(comment: str, may: bool) -> None:
    assert may_comment(comment) == may


@pytest.mark.parametrize(
    ("state", "code", "signal", "well"),
    [("COMPLETED", 0, None, True), ("COMPLETED", 1, None, False), ("FAILED", 1, None, False),
     ("TIMEOUT", 0, None, False), ("COMPLETING", 0, None, False), ("COMPLETED", None, None, False)],
)  # fmt: skip
def test_slurm_s_word_is_enough_for_a_job_that_ended_well(
    state: str, code: int | None, signal: int | None, well: bool
) -> None:
    assert is_well(JobState(id="12", state=state, exit_code=code, signal=signal)) == well


def test_a_watcher_lives_as_long_as_its_longest_duty() -> None:
    assert epilog.STAND_IN_S + epilog.EXPLAIN_S + 2 * ASK_S < epilog.LIFE_S
