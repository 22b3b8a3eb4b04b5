"""Do all kinds of jobs work, for all users, with real accounting? Each in a lab of three nodes that has slurmdbd."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import allranks_command, clean_env, wait_until

from .conftest import RELEASE_FLAGS, TestLab, lab_command, unique

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.by_hand, pytest.mark.timeout(600)]

USER = "games"
"""A user of every Debian machine. SLURM refuses nobody."""
BECOME = ("setpriv", f"--reuid={USER}", "--clear-groups", "env")
"""setpriv itself starts a program with root's rights to find it; `env` does not have them."""
THREE_NODES = """
[network]
data = "192.168.20.0/24"
[[node]]
name = "node01"
address = "192.168.20.16"
[[node]]
name = "node02"
address = "192.168.20.17"
[[node]]
name = "node03"
address = "192.168.20.18"
"""
TRAIN = """\
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
time.sleep(float(sys.argv[1]))
"""
FAILS = 'raise RuntimeError("boom")\n'
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def accounted() -> Iterator[TestLab]:
    """Three nodes with slurmdbd; preemption is by QOS, and slurmctld forgets jobs after two seconds."""
    lab = TestLab(unique("kinds"))
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder, "cluster.toml")
        cluster.write_text(THREE_NODES)
        try:
            lab.run("up", "--cluster", cluster, "--accounting", *RELEASE_FLAGS)
            conf = lab.lab.dir / "slurm/slurm.conf"
            text = conf.read_text().replace("preempt/partition_prio", "preempt/qos")
            conf.write_text(text + "MinJobAge=2\nAccountingStorageEnforce=qos\n")
            for command in (
                "add qos high preempt=normal",
                "modify user root set qos+=high",
                "modify qos normal set gracetime=10",
            ):
                lab.on("node01", "sacctmgr", "--immediate", *command.split())
            pid = json.loads(lab.run("status", "--json").stdout)["nodes"][0]["daemon_pids"]["slurmctld"]
            os.kill(pid, 15)
            wait_until(lambda: not Path(f"/proc/{pid}").exists(), "slurmctld ends", 30)
            lab.run("up", "--cluster", cluster, "--accounting", *RELEASE_FLAGS)
            lab.on("node01", "sacctmgr", "--immediate", "add", "user", USER, "account=root")
            yield lab
        finally:
            lab.run("down")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that other users can enter; pytest's own they cannot."""
    path = Path(tempfile.mkdtemp(prefix="allranks-kinds-"))
    path.chmod(0o755)
    (path / "train.py").write_text(TRAIN)
    (path / "fails.py").write_text(FAILS)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def run(accounted: TestLab, folder: Path) -> Iterator[Run]:
    """Run a command on node01, in `folder`; no job is left behind."""

    def run(*command: str, must_work: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            lab_command("exec", "--name", accounted.name, "node01", "--", *command),
            cwd=folder,
            env=clean_env(os.environ),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert not must_work or done.returncode == 0, done.stdout + done.stderr
        return done

    yield run
    accounted.on("node01", "scancel", "--full", "--user", "root")
    wait_until(lambda: not accounted.do("node01", "squeue", "--noheader", "--all").stdout, "an empty queue", 60)


def ranks_in(text: str) -> list[str]:
    return sorted(re.findall(r"rank \d+ of \d+", text))


def submit(run: Run, *arguments: str) -> str:
    return str(json.loads(run(*allranks_command("submit", "--json", *arguments)).stdout)["job"])


def state_of(run: Run, job: str) -> dict[str, object]:
    (report,) = json.loads(run(*allranks_command("status", "--json", job)).stdout)
    return dict(report["slurm"])


def is_forgotten(run: Run, job: str) -> bool:
    return run("scontrol", "show", "job", job, must_work=False).returncode != 0


def test_accounting_answers_when_the_controller_has_forgotten_the_job(run: Run) -> None:
    job = submit(run, "--nodes", "2", "fails.py")
    run(*allranks_command("logs", "-f", job))
    wait_until(lambda: is_forgotten(run, job), "slurmctld forgets the job", 120)
    slurm = state_of(run, job)
    assert (slurm["state"], slurm["exit_code"], slurm["num_nodes"]) == ("FAILED", 1, 2)
    why = run(*allranks_command("why", job), must_work=False)
    assert "AR590" in why.stdout, why.stdout + why.stderr


def test_accounting_knows_every_task_of_an_array(run: Run) -> None:
    job = submit(run, "--nodes", "1", "--array", "0-2", "train.py", "0")
    run(*allranks_command("logs", "-f", job))
    wait_until(lambda: is_forgotten(run, job), "slurmctld forgets the job", 120)
    reports = json.loads(run(*allranks_command("status", "--json", job)).stdout)
    assert [(report["job"], report["slurm"]["state"]) for report in reports] == [
        (f"{job}_{task}", "COMPLETED") for task in range(3)
    ]


def python_of_others() -> tuple[str, dict[str, str]]:
    """A Python that other users can start, and its environment: that of the tests may be in root's home."""
    if can_start(sys.executable, {}):
        return sys.executable, {}
    path = f"{Path(__file__).parents[2] / 'src'}:{sysconfig.get_path('purelib')}"
    other = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if not can_start(other, {"PYTHONPATH": path}):
        pytest.skip(f"{USER} can start neither {sys.executable} nor {other} with allranks")
    return other, {"PYTHONPATH": path}


def can_start(python: str, env: dict[str, str]) -> bool:
    command = [*BECOME, python, "-c", "import allranks.cli.main, torch"]
    return subprocess.run(command, env=os.environ | env, cwd="/", capture_output=True, check=False).returncode == 0


def test_a_user_who_is_not_root_submits_and_reads_a_job(run: Run, folder: Path) -> None:
    python, env = python_of_others()
    shutil.chown(folder, USER)
    settings = env | {"HOME": str(folder), "USER": USER}
    become = (*BECOME, *(f"{name}={value}" for name, value in settings.items()), python, "-m", "allranks")
    handed_on = [word for name in env for word in ("--env", name)]
    told = run(*become, "submit", "--json", "--nodes", "3", *handed_on, "train.py", "0")
    job = str(json.loads(told.stdout)["job"])
    followed = run(*become, "logs", "-f", job)
    assert ranks_in(followed.stdout) == [f"rank {rank} of 3" for rank in range(3)], followed.stderr
    (report,) = json.loads(run(*become, "status", "--json", job).stdout)
    assert (report["slurm"]["state"], report["slurm"]["user"]) == ("COMPLETED", USER)
    assert {path.owner() for path in (folder / "runs").rglob("*")} == {USER}


def test_salloc_starts_ranks_on_all_its_nodes(run: Run) -> None:
    ranks = ["srun", "--ntasks-per-node=1", *allranks_command("run", "train.py", "0")]
    assert ranks_in(run("salloc", "--quiet", "--nodes=3", *ranks).stdout) == [f"rank {rank} of 3" for rank in range(3)]


def test_the_parts_of_a_heterogeneous_job_are_one_group(run: Run) -> None:
    ranks = ["srun", "--het-group=0,1", "--ntasks-per-node=1", *allranks_command("run", "train.py", "0")]
    done = run("salloc", "--quiet", "--nodes=1", ":", "--nodes=2", *ranks)
    assert ranks_in(done.stdout) == [f"rank {rank} of 3" for rank in range(3)], done.stderr


def test_a_job_that_has_its_nodes_for_itself(run: Run) -> None:
    done = run("srun", "--exclusive", "--nodes=2", "--ntasks-per-node=1", *allranks_command("run", "train.py", "0"))
    assert ranks_in(done.stdout) == ["rank 0 of 2", "rank 1 of 2"], done.stderr


@pytest.mark.parametrize("cores", [1, 2])
def test_ranks_of_a_submitted_job_have_the_cores_it_asked_for(cores: int, run: Run, folder: Path) -> None:
    # srun took --cpus-per-task from sbatch before 22.05, and takes it again from 23.11 on.
    (folder / "cores.py").write_text("import os\nprint('cores', os.environ['SLURM_CPUS_PER_TASK'], flush=True)\n")
    if cores > (os.cpu_count() or 1):
        pytest.skip("the nodes of this lab have one core")
    job = submit(run, "--nodes", "2", "--cpus-per-task", str(cores), "cores.py")
    followed = run(*allranks_command("logs", "-f", job))
    assert re.findall(r"cores \d+", followed.stdout) == [f"cores {cores}"] * 2, followed.stderr


def test_a_job_that_a_higher_qos_preempts_runs_again(run: Run, accounted: TestLab) -> None:
    job = submit(run, "--nodes", "3", "--requeue", "train.py", "20")
    logs = allranks_command("logs", job)  # refused until the job has started
    wait_until(lambda: len(ranks_in(run(*logs, must_work=False).stdout)) == 3, "three ranks", 60)
    run("srun", "--qos=high", "--nodes=3", "--exclusive", "true")
    wait_until(lambda: "Restarts=1" in run("scontrol", "show", "job", job).stdout, "the requeue", 60)
    soon = ("scontrol", "update", f"JobId={job}", "StartTime=now+2")
    wait_until(lambda: run(*soon, must_work=False).returncode == 0, "an earlier start", 60)
    followed = run(*allranks_command("logs", "-f", job))
    assert followed.stdout.count("rank 0 of 3") == 2, followed.stderr
    slurm = state_of(run, job)
    assert slurm["exit_code"] == 0
    assert slurm["state"] in ("COMPLETED", "PREEMPTED")  # the second with 24.11: launch.queue.scheduler


def test_the_version_is_the_one_that_was_asked_for(accounted: TestLab) -> None:
    told = json.loads(accounted.run("status", "--json").stdout)["slurm"]
    (daemon,) = re.findall(r"SLURM_VERSION += (\S+)", accounted.on("node01", "scontrol", "show", "config"))
    assert told == daemon
    if RELEASE_FLAGS:
        assert daemon.startswith(f"{RELEASE_FLAGS[-1]}.")
    # Tasks run with the machine's own Python and C library.
    code = "import sys; print(sys.version); print(open('/proc/self/maps').read().count('libc.so.6') > 0)"
    code += "; print('/release/' in open('/proc/self/maps').read())"
    said = accounted.on("node01", "srun", "-N1", sys.executable, "-c", code).splitlines()
    assert said == [*sys.version.splitlines(), "True", "False"]
