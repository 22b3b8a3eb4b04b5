"""How does a training start in the lab, and how does it end? Under `allranks run`, `allranks submit`, torchrun."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from allranks.lab import hosts as machines
from allranks.lab.faults.fault import PROGRAMS, JobStart
from allranks.lab.faults.running.strike import Launch, Strike
from allranks.lab.faults.running.target import DrilledJob
from allranks.lab.faulty_job import cut_off, data_interface_of, start_on, write_cluster
from allranks.lab.lab import Lab
from allranks.model.errors import SetupError
from allranks.model.finding import Verdict
from allranks.model.ledger import Ledger
from allranks.report.readback import parse_ledger

PROGRAM, PLAIN, ORDERS = PROGRAMS / "train.py", PROGRAMS / "train_plain.py", PROGRAMS / "orders.py"
GUARD: Mapping[str, float] = {
    "join_s": 25.0,
    "gone_s": 3.0,
    "beat_s": 0.2,
    "stopped_s": 1.5,
    "stalled_s": 1.5,
    "slow_s": 30.0,
    "hang_s": 60.0,
}
"""Short times for the lab: what would be a hiccup in production is a fault here."""
MAX_RESTARTS = 3
EVERY_STEPS = 50
"""Steps between checkpoints: about 3 s."""
TIME_MINUTES = 10
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY")


class Running:
    """One job of a drill, from its start to its end.

    Args:
        lab: where it runs.
        directory: directory of the drill.
        strike: it says how the job is started; None: no strike.
        start: further options from `inject`.
        minutes: its time limit.
    """

    def __init__(
        self,
        lab: Lab,
        directory: Path,
        strike: type[Strike] | None,
        start: JobStart,
        *,
        minutes: int = TIME_MINUTES,
    ) -> None:
        self._lab = lab
        self._strike = strike or Strike
        self._start = start
        self._minutes = minutes
        self.directory = directory
        self.output = directory / "output.txt"
        self.target = DrilledJob(directory)
        self.controller = lab.controller()
        available = len(lab.planned_hosts())
        self.num_nodes = min(self._strike.most_nodes or available, available)
        self._process: subprocess.Popen[bytes] | None = None
        self._let_go = ""
        """Id of the job that SLURM was told to start soon."""

    def begin(self, program: Path, arguments: Sequence[str] = ()) -> None:
        """Start it under allranks.

        Raises:
            SetupError: SLURM rejects it.
        """
        guard = {**GUARD, **self._strike.guard}
        cluster = write_cluster(self._lab, self.directory / "cluster.toml", guard=guard)
        flags = [
            *("--cluster", str(cluster), "--log-dir", str(self.directory / "runs"), "--nproc-per-node", "1"),
            *("--nnodes", self._nodes(), "--max-restarts", str(MAX_RESTARTS)),
            *("--checkpoint-dir", str(self.target.checkpoints)),
            *(("--checkpoint-every", str(EVERY_STEPS)) if program is PROGRAM else ()),
            *(*self._strike.run_flags, *self._start.run_flags),
        ]
        script = [str(self._copy(program)), "--dir", str(self.directory), *arguments, *self._strike.arguments]
        if self._strike.launch is Launch.STEP:
            self._srun([*self._start.prefix, "allranks", "run", *flags, *script])
        else:
            self._submit([*flags, *script])

    def begin_torchrun(self) -> None:
        """Start the plain program under torchrun, with the same number of restarts."""
        first = self._lab.planned_hosts()[0]
        # As a careful user sets it: each node's own data interface.
        nic = data_interface_of(first)
        torchrun = [
            *("torchrun", f"--nnodes={self._nodes()}", "--nproc-per-node=1", f"--max-restarts={MAX_RESTARTS}"),
            *("--rdzv-backend=c10d", "--rdzv-id=drill", f"--rdzv-endpoint={first.name}:29500"),
            *(str(self._copy(PLAIN)), "--dir", str(self.directory)),
        ]
        self._srun([*self._start.prefix, "sh", "-c", f'export GLOO_SOCKET_IFNAME="{nic}"; exec "$@"', "sh", *torchrun])

    def wait_until_stepping(self, deadline_s: float) -> None:
        """Wait until all ranks have done some steps.

        Raises:
            SetupError: they did not, or the job has ended.
        """

        def is_there() -> bool:
            if self.has_ended():
                raise SetupError(f"lab: the job ended before its first step: {_last_line(self.output)}")
            return self.target.is_stepping(self.num_nodes)

        self.target.wait(is_there, deadline_s, f"{self.num_nodes} ranks to train; see {self.output}")
        if not self.target.job_id:
            self.target.job_id = self._ask("squeue", "--noheader", "--format=%i").split()[0]

    def has_ended(self) -> bool:
        """Whether it has ended. A requeued job that SLURM holds back is told to start."""
        if self._process is not None:
            return self._process.poll() is not None
        shown = self._show()
        state = _field(shown, "JobState")
        if state == "PENDING" and _field(shown, "Reason") == "BeginTime" and self._let_go != _field(shown, "Restarts"):
            self._let_go = _field(shown, "Restarts")
            self._ask("scontrol", "update", f"JobId={self.target.job_id}", "StartTime=now+2")  # docs/how-to/slurm.md
        return state in _ENDED

    def exit_code(self) -> int | None:
        """Return the exit code of the leader, else SLURM's; None if the job did not end by itself."""
        if not self.has_ended():
            return None
        for verdict in (self.verdict(), self._ended_event()):
            if verdict is not None:
                return verdict
        if self._process is not None:
            return self._process.returncode
        code, _, signum = _field(self._show(), "ExitCode").partition(":")
        return 128 + int(signum) if int(signum or 0) else int(code or 0)

    def slurm_state(self) -> str:
        """Return SLURM's state of the job, `COMPLETED`; empty if SLURM has forgotten it."""
        return _field(self._show(), "JobState")

    def num_requeues(self) -> int:
        """Return how often SLURM has put the job back into the queue."""
        return int(_field(self._show(), "Restarts") or 0)

    def verdict(self) -> int | None:
        """Return the exit code in the newest verdict.json."""
        paths = sorted((self.directory / "runs").glob("[0-9]*/attempt_*/verdict.json"), key=_modified)
        with contextlib.suppress(OSError, msgspec.DecodeError, IndexError):
            return Verdict.from_json(paths[-1].read_bytes()).exit_code
        return None

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the leaders of all attempts, in order of time."""
        found: list[dict[str, Any]] = []
        for path in (self.directory / "runs").glob("[0-9]*/attempt_*/events.jsonl"):
            for line in path.read_text(errors="replace").splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    found.append(json.loads(line))
        return sorted(found, key=lambda event: float(event["time_s"]))

    def ledger(self) -> Ledger | None:
        """Return the account of the job's time; None: it left none."""
        for path in (self.directory / "runs").glob("[0-9]*/goodput.json"):
            with contextlib.suppress(OSError):
                return parse_ledger(path.read_bytes())
        return None

    def cut_off(self) -> None:
        """End it in any case."""
        if self._process is not None:
            cut_off(self._process)
        for _ in range(50):
            if not (jobs := self._ask("squeue", "--noheader", "--format=%i").split()):
                return
            self._ask("scancel", *jobs)
            time.sleep(0.2)

    def _ended_event(self) -> int | None:
        ended = [event for event in self.events() if event["event"] == "ended" and "exit_code" in event]
        return int(ended[-1]["exit_code"]) if ended else None

    def _copy(self, program: Path) -> Path:
        """Copy a program into the user's directory, so that no path of allranks appears in messages."""
        for path in (program, ORDERS):
            shutil.copy(path, self.directory)
        return self.directory / program.name

    def _nodes(self) -> str:
        low, _, high = self._strike.nodes.partition(":")
        most = min(int(high), self.num_nodes)
        return f"{min(int(low), most)}:{most}"

    def _srun(self, command: Sequence[str]) -> None:
        srun = [
            *("srun", f"--nodes={self.num_nodes}", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0"),
            *(f"--time={self._minutes}", "--label"),
        ]
        self._process = start_on(self._lab, self.controller.name, [*srun, *command], self.output)

    def _submit(self, words: Sequence[str]) -> None:
        flags = [
            *("--nodes", str(self.num_nodes), "--output", str(self.output), "--time", str(self._minutes)),
            *self._strike.submit_flags,
        ]
        said = self.directory / "submitted.txt"
        process = start_on(self._lab, self.controller.name, ["allranks", "submit", "--json", *flags, *words], said)
        process.wait(30)
        found = re.search(r'"job": ?"?(\d+)', said.read_text())
        if process.returncode or found is None:
            raise SetupError(f"lab: allranks submit: {' '.join(said.read_text().split())}")
        self.target.job_id = found[1]

    def _show(self) -> str:
        return self._ask("scontrol", "show", "job", "--oneliner", self.target.job_id)

    def _ask(self, *command: str) -> str:
        """Return the output of a SLURM command, run where users work."""
        controller = machines.find_inits(self._lab.dir)[self.controller.name]
        return machines.run_in(controller, command, must_work=False).stdout


def _field(shown: str, name: str) -> str:
    """Return a field of `scontrol show --oneliner`."""
    found = re.search(rf"\b{name}=(\S+)", shown)
    return found[1] if found else ""


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()] if path.exists() else []
    return lines[-1] if lines else "it printed nothing"


def _modified(path: Path) -> float:
    return path.stat().st_mtime
