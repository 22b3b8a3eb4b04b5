"""`allranks stack` through the command line, with a SLURM made of two scripts on PATH."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allranks.host.process import read_environment
from allranks.model.finding import Verdict
from allranks.report.rundir import RunDir
from conftest import Allranks, Tell, allranks_command, clean_env, wait_until
from fake_slurm import show_job

SRUN = """\
#!{python}
# Runs the command once for each node of FAKE_NODES, all at once, as srun does; FAKE_SILENT does not answer.
import os, subprocess, sys
first = next(i for i, word in enumerate(sys.argv) if i and not word.startswith("--"))
count = int(next(word for word in sys.argv if word.startswith("--nodes="))[8:])
nodes = os.environ["FAKE_NODES"].split(",")
assert count == len(nodes) and not [name for name in os.environ if name.startswith("SLURM_")], os.environ
print("*** Welcome to the site. ***", flush=True)
if os.environ.get("FAKE_REFUSAL"):
    sys.exit("srun: error: Unable to create step for job 7: " + os.environ["FAKE_REFUSAL"])
children = []
for node in nodes:
    silent = node == os.environ.get("FAKE_SILENT")
    env = dict(os.environ, SLURMD_NODENAME=node)
    children.append(subprocess.Popen(["sleep", "60"] if silent else sys.argv[first:], env=env, start_new_session=False))
open("srun.pid", "w").write(str(os.getpid())) if "FAKE_SILENT" in os.environ else None
sys.exit(max(child.wait() for child in children))
"""
SCONTROL = """\
#!/bin/sh
if [ -n "$FAKE_ERROR" ]; then echo "$FAKE_ERROR" >&2; exit 1; fi
printf '%s' "$FAKE_JOB"
"""
SLEEPER = """\
import os, time
def straggle():
    os.close(1)
    time.sleep(600)
straggle()
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment in which SLURM seems to be installed, and `srun` runs on two nodes."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"srun": SRUN.format(python=sys.executable), "scontrol": SCONTROL}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    job = f"8{os.getpid():06}"
    return {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "FAKE_NODES": "n1,n2",
        "FAKE_JOB": show_job(job, nodes="n[1-2]"),
        "SLURM_NTASKS": "99",  # of an outer job: not for our step
        "JOB": job,
    }


Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start_one(text: str, **env: str) -> int:
        script = tmp_path / "train.py"
        script.write_text(text)
        command, env = [sys.executable, str(script)], clean_env(os.environ, **env)
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        assert process.stdout is not None
        with process.stdout as closed:
            assert closed.read() == b""  # until it is where it stays
        return process.pid

    yield start_one
    for each in started:
        os.killpg(each.pid, signal.SIGKILL)
        each.wait()


def test_all_nodes_are_asked_and_equal_stacks_folded(allranks: Allranks, slurm: dict[str, str], start: Start) -> None:
    start(SLEEPER, SLURM_JOB_ID=slurm["JOB"], RANK="0", WORLD_SIZE="1")
    result = allranks("stack", slurm["JOB"], env=slurm)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == f"job {slurm['JOB']}: 2 ranks on 2 nodes, 1 place"  # one process, seen by both "nodes"
    assert lines[2].startswith("2 ranks (0)   n[1-2]   sleep at train.py:4 straggle")
    assert "Welcome" not in result.stdout


def test_json_is_for_programs(allranks: Allranks, slurm: dict[str, str], start: Start) -> None:
    start(SLEEPER, SLURM_JOB_ID=slurm["JOB"], RANK="0", WORLD_SIZE="2")
    found = json.loads(allranks("stack", "--json", slurm["JOB"], env=slurm).stdout)
    assert found["missing_ranks"] == [1]
    told = [(group["role"], group["ranks"], group["nodes"]) for group in found["groups"]]
    assert told == [("worker", [0], ["n1", "n2"]), ("launcher", [], ["n1", "n2"])]  # this test has started it


def test_a_job_without_python_is_a_could_not_tell(allranks: Allranks, slurm: dict[str, str]) -> None:
    result = allranks("stack", slurm["JOB"], env=slurm)
    assert result.returncode == 3
    assert "n[1-2]   no Python process of the job" in result.stdout


def test_a_node_that_does_not_answer_is_named_and_its_step_ended(
    allranks: Allranks, slurm: dict[str, str], start: Start, tmp_path: Path
) -> None:
    start(SLEEPER, SLURM_JOB_ID=slurm["JOB"], RANK="0")
    began_s = time.monotonic()
    result = allranks("stack", slurm["JOB"], "--deadline", "10", env=slurm | {"FAKE_SILENT": "n2"})
    assert result.returncode == 0
    assert "n2   did not answer within 10 s" in result.stdout
    assert "rank 0   n1   pid" in result.stdout
    assert re.search(r"still waiting for n2 after \d+ s; 1 of 2 nodes have answered", result.stderr)
    assert time.monotonic() - began_s < 55
    assert not Path("/proc", (tmp_path / "srun.pid").read_text()).exists()


def test_ctrl_c_ends_the_step_at_once(slurm: dict[str, str], tmp_path: Path) -> None:
    command = allranks_command("stack", slurm["JOB"])
    env = clean_env(os.environ, **slurm, FAKE_SILENT="n2")
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        pid_file = tmp_path / "srun.pid"
        wait_until(lambda: pid_file.exists() and pid_file.read_text(), "the step")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert not Path("/proc", (tmp_path / "srun.pid").read_text()).exists()


@pytest.mark.parametrize(
    ("env", "exit_code", "line"),
    [
        (
            {"FAKE_ERROR": "slurm_load_jobs error: Invalid job id specified"},
            2,
            "error: job 7: SLURM knows no such job; allranks list prints your jobs",
        ),
        (
            {"FAKE_JOB": show_job("7", state="COMPLETED")},
            3,
            "error: job 7 has ended; to see what happened: allranks why 7",
        ),
        (
            {"FAKE_JOB": show_job("7", state="PENDING", reason="Priority")},
            3,
            "error: job 7 is PENDING (Priority); expected a running job",
        ),
        (
            {"FAKE_JOB": show_job("7", nodes="n[1-2]"), "FAKE_REFUSAL": "Access/permission denied"},
            3,
            "error: stack 7: no node answered; srun: Unable to create step for job 7: Access/permission denied",
        ),
    ],
)
def test_what_slurm_refuses_is_one_line_in_its_words(
    allranks: Allranks, slurm: dict[str, str], env: dict[str, str], exit_code: int, line: str
) -> None:
    result = allranks("stack", "7", env=slurm | env)
    assert (result.returncode, result.stderr, result.stdout) == (exit_code, f"{line}\n", "")


def test_without_slurm_it_says_what_to_do(allranks: Allranks, tmp_path: Path) -> None:
    result = allranks("stack", "7", env={"PATH": str(tmp_path)})
    assert result.returncode == 78
    assert result.stderr == (
        "error: scontrol: not found on this machine; SLURM's commands are needed: load the slurm module, or log in to "
        "a login node of the cluster\n"
    )


@pytest.mark.parametrize("name", ["nonsense", "runs/gone"])
def test_a_name_that_is_no_job_is_looked_for_among_the_runs(tell: Tell, name: str) -> None:
    told = tell("stack", name)
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith(f"error: JOB {name!r}: no such run in runs; expected the id of a run")


@pytest.mark.parametrize("verb", ["stack", "logs", "status"])
def test_without_a_job_the_newest_run_is_meant(tell: Tell, verb: str) -> None:
    assert tell(verb) == (2, "", "error: latest: there is no run in runs yet\n")
    run_dir = RunDir(Path("runs"), "20261123-040000-42")
    run_dir.create()
    run_dir.create_attempt(None)
    run_dir.write_verdict(Verdict(job=run_dir.path.name, attempt=0, exit_code=0), node="n")
    (run_dir.node_path("n") / "rank_0.out").write_text("hello\n")
    expected = {
        "stack": f"error: run {run_dir.path.name} has ended; to see what happened: allranks why {run_dir.path.name}\n",
        "logs": "[n r0] hello\n",
        "status": f"run {run_dir.path.name}   COMPLETED, exit code 0",
    }[verb]
    told = tell(verb)
    assert (told.out + told.err).startswith(expected)


@pytest.mark.parametrize("arguments", [["1", "2"], ["--pid"], ["--pid", "x"]])
def test_arguments_that_make_no_sense_are_refused(allranks: Allranks, arguments: list[str]) -> None:
    result = allranks("stack", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: stack")
    assert "expected" in result.stderr


def test_processes_of_this_machine_need_no_slurm(allranks: Allranks, start: Start) -> None:
    pid = start(SLEEPER)
    result = allranks("stack", "--pid", str(pid), "4194304")
    assert result.returncode == 0, result.stderr
    assert f"pid {pid}   sleep at train.py:4 straggle" in result.stdout
    assert result.stderr == "allranks: no such process on this machine: 4194304\n"
    nobody = allranks("stack", "--pid", "4194304")
    assert (nobody.returncode, nobody.stdout) == (2, "")
    assert nobody.stderr == "error: stack: no such process on this machine: 4194304\n"


def test_two_jobs_of_this_machine_are_shown_apart(allranks: Allranks, start: Start, tmp_path: Path) -> None:
    """Other tests may run here, too: only these two jobs are looked at."""
    ours = [f"{name}-{os.getpid()}" for name in ("first", "second")]
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"store-{os.getpid()}"}
    start(SLEEPER, RANK="0", WORLD_SIZE="2", TORCHELASTIC_RUN_ID=ours[0])
    start(SLEEPER, RANK="0", WORLD_SIZE="1", TORCHELASTIC_RUN_ID=ours[1])
    start(SLEEPER, RANK="0", WORLD_SIZE="1", **torchrun)
    ours.append(f"127.0.0.1:store-{os.getpid()}")
    heads = [f"job {name}: 1 rank on 1 node, 1 place" for name in ours]

    def look() -> list[str]:
        lines = allranks("stack", "--local").stdout.splitlines()
        return lines if sum("straggle" in line for line in lines) >= 3 and set(heads) <= set(lines) else []

    lines = wait_until(look, "all three jobs")
    missing = [lines[lines.index(head) + 2] for head in heads]
    assert missing[0].endswith("rank 1   no process found: it never started, or has ended")
    assert all("sleep at train.py:4 straggle" in line for line in missing[1:])
    document = json.loads(allranks("stack", "--local", "--json").stdout)
    assert {job["job"]: job["missing_ranks"] for job in document["jobs"] if job["job"] in ours} == dict(
        zip(ours, [[1], [], []], strict=True)
    )
    assert {group["job"] for group in document["groups"]} >= set(ours)
    one = json.loads(allranks("stack", "--local", "--json", ours[0]).stdout)
    assert (one["job"], [group["ranks"] for group in one["groups"]]) == (ours[0], [[0], []])
    (tmp_path / "runs" / ours[1]).mkdir(parents=True)
    (tmp_path / "runs" / ours[1] / "leader.json").touch()
    (tmp_path / "runs" / "latest").symlink_to(ours[1])
    for name in (ours[1], "latest"):
        assert heads[1] in allranks("stack", name).stdout.splitlines()


GROUP = """\
import time
import torch
import torch.distributed as dist

def straggle():
    time.sleep(600)

def step(tensor):
    dist.all_reduce(tensor)

dist.init_process_group("gloo")
straggle() if dist.get_rank() == 2 else step(torch.ones(1))
"""


@pytest.mark.torch
def test_the_rank_that_the_others_wait_for_is_the_first(allranks: Allranks, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GROUP)
    command = allranks_command("run", "--nproc-per-node", "3", "train.py")
    job = f"7{os.getpid():06}"
    env = clean_env(os.environ, ALLRANKS_TEST_JOB=job)
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as group:
        try:
            heads = wait_until(lambda: heads_of(allranks, job), "all ranks to be where they stay")
        finally:
            os.killpg(group.pid, signal.SIGTERM)
    assert heads[0].startswith("rank 2   ")
    assert "   sleep at train.py:6 straggle" in heads[0]
    assert heads[1].startswith("2 ranks (0-1)   ")
    assert "   all_reduce at train.py:9 step" in heads[1]
    assert len(heads) == 2


def heads_of(allranks: Allranks, job: str) -> list[str]:
    """What stands above each stack, once rank 2 sleeps and two ranks wait for it."""
    pids = [path.name for path in Path("/proc").glob("[0-9]*") if is_worker(int(path.name), job)]
    text = allranks("stack", "--pid", *pids).stdout if pids else ""
    heads = [line for line in text.splitlines() if " at train.py" in line]
    return heads if "sleep at" in text and "2 ranks (0-1)" in text else []


def is_worker(pid: int, job: str) -> bool:
    env = read_environment(pid)
    return env.get("ALLRANKS_TEST_JOB") == job and "LOCAL_RANK" in env
