"""How does a job start under each launcher, who serves its store, and how does one reach its ranks?

    job = LocalJob("torchrun", directory); job.start(); job.wait_until_stepping(); job.pid_of(2)

| launcher | who starts the ranks | how a rank learns its number | who serves the store |
|---|---|---|---|
| torchrun | its agent | environment | the agent |
| srun | slurmstepd, one on each of 3 nodes | SLURM's variables, copied by the script | a process of its own |
| mp.spawn | the script itself | an argument; os.environ is filled later | the script |
| ray-like | a driver, with subprocess | a pipe; os.environ is filled later | the driver |
| deepspeed | its launcher | environment | rank 0 |
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from . import seen
from .programs.board import Board

PROGRAMS = Path(__file__).parent / "programs"
NUM_RANKS = 3
START_S = 120.0
"""Until all ranks do steps: three imports of torch, beside other work of the machine."""
SETTLED_STEPS = 10
PORT = 29500
FOREIGN = ("SLURM_", "ALLRANKS_", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE")
DEEPSPEED = os.environ.get("WATCH_DEEPSPEED", "")
"""An interpreter that has DeepSpeed; without it the stand-in of programs/stand_in shows the same tree of processes."""


class DrillError(Exception):
    """The drill itself did not work; it says nothing of the product."""


class Job(ABC):
    """One job with three ranks.

    Args:
        launcher: one of LAUNCHERS.
        directory: empty; the programs are copied there, as if they were a user's.
    """

    def __init__(self, launcher: str, directory: Path) -> None:
        self.launcher, self.directory = launcher, directory
        directory.mkdir(parents=True, exist_ok=True)
        for program in PROGRAMS.iterdir():
            if program.suffix == ".py":
                shutil.copy(program, directory)
        os.mkfifo(directory / "shard")
        self.shard = -1
        self.board = Board(directory / "board")
        self.output = directory / "output.txt"

    @abstractmethod
    def start(self) -> None:
        """Start it; return before its ranks train."""

    @abstractmethod
    def pid_of(self, rank: int) -> int:
        """Return a rank's pid as this process sees it."""

    @property
    @abstractmethod
    def store_pid(self) -> int:
        """Who serves the store."""

    @abstractmethod
    def filter(self, rank: int, script: str) -> None:
        """Feed nft on the machine of a rank."""

    @abstractmethod
    def watch_command(self, *flags: str) -> Sequence[str]:
        """Return the command line that watches this job."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Whether the launcher has ended."""

    @abstractmethod
    def end(self) -> None:
        """End it in any case."""

    @property
    def store_rank(self) -> int | None:
        """The rank that serves the store; None: no rank does."""
        return 0 if self.launcher == "deepspeed" else None

    def steps(self) -> list[int]:
        return [self.board.step_of(rank) for rank in range(NUM_RANKS)]

    def wait_until_stepping(self) -> None:
        """Wait until all ranks have done some more steps than now.

        Raises:
            DrillError: they do not.
        """
        began_s, first = time.monotonic(), self.steps()
        while any(now < before + SETTLED_STEPS for now, before in zip(self.steps(), first, strict=True)):
            if self.has_ended() or time.monotonic() > began_s + START_S:
                said = self.output.read_text(errors="replace")[-1500:] if self.output.exists() else ""
                raise DrillError(f"{self.launcher}: its ranks do not train (steps {self.steps()}):\n{said}")
            time.sleep(0.05)


class LocalJob(Job):
    """A job on this machine; `stage.py` gives it namespaces of its own first."""

    def start(self) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        env["OMP_NUM_THREADS"] = "1"
        if self.launcher == "deepspeed" and not has_deepspeed():
            env["PYTHONPATH"] = str(PROGRAMS / "stand_in")
        with self.output.open("wb") as file:
            self._process = subprocess.Popen(
                self._command(), cwd=self.directory, env=env, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def _command(self) -> Sequence[str]:
        python, where = sys.executable, str(self.directory)
        if self.launcher == "torchrun":
            return [python, "-m", "torch.distributed.run", f"--nproc-per-node={NUM_RANKS}", "train.py", where]
        if self.launcher == "mp.spawn":
            return [python, "spawn.py", where]
        if self.launcher == "ray-like":
            return [python, "ray_like.py", where]
        assert self.launcher == "deepspeed"
        if DEEPSPEED:
            runner = str(Path(DEEPSPEED).with_name("deepspeed"))
            return [DEEPSPEED, runner, f"--num_accelerators={NUM_RANKS}", f"--master_port={PORT}", "train.py", where]
        world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(NUM_RANKS))}).encode()).decode()
        launch = [python, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world}"]
        return [*launch, "--master_addr=127.0.0.1", f"--master_port={PORT}", "--node_rank=0", "train.py", where]

    def pid_of(self, rank: int) -> int:
        return self.board.pid_of(rank)

    @property
    def store_pid(self) -> int:
        if self.store_rank is not None:
            return self.pid_of(self.store_rank)
        return self._process.pid

    def filter(self, rank: int, script: str) -> None:
        done = subprocess.run(["nft", "-f", "-"], input=script, text=True, capture_output=True, check=False, timeout=10)
        if done.returncode:
            raise DrillError(f"nft: {done.stderr}\n{script}")

    def watch_command(self, *flags: str) -> Sequence[str]:
        return [sys.executable, "-m", "allranks", "watch", "--here", *flags]

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        for pid in {self._process.pid, *(self.board.pid_of(rank) for rank in range(NUM_RANKS))} - {0}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


class LabJob(Job):
    """`srun python train.py` on three nodes of a lab that is up.

    Args:
        directory: all nodes of the lab see it.
        lab: its name.
    """

    def __init__(self, directory: Path, lab: str) -> None:
        from allranks.lab import hosts
        from allranks.lab.lab import Lab

        super().__init__("srun", directory)
        self._lab, self._hosts = Lab(lab), hosts
        self._nodes = [host.name for host in self._lab.planned_hosts()[:NUM_RANKS]]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._job = ""

    def start(self) -> None:
        from allranks.lab.faulty_job import start_on

        python, first = sys.executable, self._nodes[0]
        script = self.directory / "job.sh"
        srun = f"srun --overlap --mem=0 --kill-on-bad-exit=0 {python} train.py {self.directory}"
        script.write_text(
            f"#!/bin/sh\ncd {self.directory}\nexport OMP_NUM_THREADS=1 STORE_AT={first}:{PORT}\n"
            f"srun --overlap --mem=0 --nodes=1 --ntasks=1 --nodelist={first} {python} serve_store.py {PORT} &\n"
            f"{srun}\nkill $!\n"
        )
        script.chmod(0o755)
        self._said = self.directory / "submitted.txt"
        submit = [
            *("sbatch", "--parsable", f"--nodelist={','.join(self._nodes)}", f"--nodes={NUM_RANKS}"),
            *("--ntasks-per-node=1", "--time=10", f"--output={self.output}", str(script)),
        ]
        started = start_on(self._lab, first, submit, self._said)
        if started.wait(30):
            raise DrillError(f"sbatch: {self._said.read_text()}")
        self._job = self._said.read_text().split()[0]

    def _init_of(self, rank: int) -> int:
        return self._lab.find_init(self._nodes[rank])

    def pid_of(self, rank: int) -> int:
        return seen.host_pid(self._init_of(rank), self.board.pid_of(rank))

    @property
    def store_pid(self) -> int:
        for pid in self._hosts.processes_in(self._init_of(0)).get("python", []):
            if b"serve_store.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise DrillError("nobody serves the store")

    def filter(self, rank: int, script: str) -> None:
        self._hosts.run_in(self._init_of(rank), ["nft", "-f", "-"], script=script)

    def watch_command(self, *flags: str) -> Sequence[str]:
        """From the second node of the job: one answer by its id, documents of whatever job has ranks there."""
        lab = [sys.executable, "-m", "allranks", "lab", "exec", "--name", self._lab.name, self._nodes[1], "--"]
        job = [self._job] if "--once" in flags else []
        return [*lab, sys.executable, "-m", "allranks", "watch", *job, *flags]

    def has_ended(self) -> bool:
        return self._ask("squeue", "--noheader", f"--jobs={self._job}", "--format=%T").strip() not in (
            *("PENDING", "RUNNING", "CONFIGURING"),
        )

    def end(self) -> None:
        for rank in range(NUM_RANKS):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid_of(rank), signal.SIGKILL)
        deadline_s = time.monotonic() + 30
        while not self.has_ended() and time.monotonic() < deadline_s:
            self._ask("scancel", self._job)
            time.sleep(0.2)

    def _ask(self, *command: str) -> str:
        return self._hosts.run_in(self._init_of(0), command, must_work=False).stdout


LAUNCHERS = ("torchrun", "srun", "mp.spawn", "ray-like", "deepspeed")


def has_deepspeed() -> bool:
    """Whether the real launcher is used."""
    return bool(DEEPSPEED) or importlib.util.find_spec("deepspeed") is not None
