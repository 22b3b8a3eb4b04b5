"""What does a fault know about the job that it strikes? Its steps, processes, checkpoints, and the file for orders.

The training program (`programs/train.py`) logs every step, and reads its orders before each (`Orders` in
`programs/orders.py`): so a strike inside the program happens at a known step, and its time is logged before it happens.
All nodes of the lab share one clock.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from allranks.host.process import read_environment
from allranks.lab import hosts as machines
from allranks.lab.faults.fault import LabScene
from allranks.model.errors import SetupError
from allranks.state.saved.manifest import Damaged
from allranks.state.saved.parts import PartReader, list_checkpoints, read_manifest
from allranks.wire.leader_port import ANNOUNCEMENT, decode_announcement

STRUCK_S = 20.0
"""How long an order may take: a few steps."""
AHEAD_STEPS = 4
"""Orders are for a step that no rank has begun yet."""
POLL_S = 0.01


class StepDone(msgspec.Struct, frozen=True):
    """One optimizer step of one rank."""

    step: int
    time_s: float
    attempt: int
    """How often SLURM had started the job before."""
    generation: int
    """How often the workers had been started before, in this attempt."""
    rank: int
    world: int
    node: str
    pid: int
    """Pid in its node."""

    @property
    def start(self) -> tuple[int, int]:
        """The start of the workers that it belongs to."""
        return self.attempt, self.generation


class Saved(msgspec.Struct, frozen=True):
    """One whole checkpoint."""

    step: int
    run: str
    """Name of the start of the workers that wrote it."""
    time_s: float
    """When it was completed, seconds since the epoch."""


class DrilledJob:
    """A running job during a drill.

    Args:
        directory: directory of the drill, with steps and orders; run directories are in its `runs`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.job_id = ""
        """Id in SLURM; empty: unknown."""
        self.checkpoints = directory / "checkpoints"
        self._read: dict[Path, int] = {}
        self._steps: list[StepDone] = []
        self._saved: dict[Path, Saved] = {}

    def steps(self) -> list[StepDone]:
        """Return all logged steps, in the order of reading."""
        for path in sorted(self.directory.glob("steps_*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self._steps += msgspec.json.Decoder(StepDone).decode_lines(whole)
        return self._steps

    def saved(self) -> list[Saved]:
        """Return the checkpoints that were there at this call or an earlier one: the job deletes old ones."""
        for directory in list_checkpoints(self.checkpoints):
            if directory not in self._saved:
                with contextlib.suppress(Damaged):
                    manifest = read_manifest(directory)
                    run = manifest.attempt.partition("-")[0]
                    self._saved[directory] = Saved(manifest.step, run, manifest.saved_s)
        return list(self._saved.values())

    def leader(self) -> str:
        """Return the node whose agent leads the job now.

        Raises:
            SetupError: no leader has announced itself.
        """
        paths = (self.directory / "runs").glob(f"[0-9]*/{ANNOUNCEMENT}")
        newest = max(paths, key=lambda path: path.stat().st_mtime, default=None)
        announced = decode_announcement(newest.read_bytes()) if newest is not None else None
        if announced is None:
            raise SetupError(f"lab: no leader has announced itself: no {ANNOUNCEMENT} in {self.directory}/runs")
        return announced.host

    def newest(self) -> dict[int, StepDone]:
        """Return the last step of each rank of the newest start."""
        steps = self.steps()
        start = max((step.start for step in steps), default=(0, 0))
        return {step.rank: step for step in steps if step.start == start}

    def is_stepping(self, num_ranks: int, *, after: tuple[int, int] | None = None, num_steps: int = 3) -> bool:
        """Whether all ranks of the newest start have done some steps.

        Args:
            num_ranks: expected number of ranks.
            after: the start must be newer than this one.
            num_steps: steps that each must have done.
        """
        newest = self.newest()
        if len(newest) != num_ranks or (after is not None and next(iter(newest.values())).start <= after):
            return False
        start = next(iter(newest.values())).start
        made = [sum(step.rank == rank and step.start == start for step in self._steps) for rank in newest]
        return min(made) >= num_steps

    def ranks_on(self, node: str) -> tuple[int, ...]:
        """Return the ranks of a node, in the newest start."""
        return tuple(sorted(rank for rank, step in self.newest().items() if step.node == node))

    def rank_on(self, node: str) -> int:
        """Return the first rank of a node.

        Raises:
            SetupError: it has none.
        """
        if not (ranks := self.ranks_on(node)):
            raise SetupError(f"lab: {node} has no rank of the job")
        return ranks[0]

    def worker_pid(self, scene: LabScene, node: str) -> int:
        """Return the pid of a node's first worker, as seen from this machine.

        Raises:
            SetupError: it is gone.
        """
        there = self.newest()[self.rank_on(node)].pid
        return _pid_here(scene.inits[node], there, f"rank {self.rank_on(node)} on {node}")

    def agent_pid(self, scene: LabScene, node: str) -> int:
        """Return the pid of the agent that started a node's first worker: of `allranks run`, or of torchrun.

        Raises:
            SetupError: it is gone.
        """
        worker = self.worker_pid(scene, node)
        if named := read_environment(worker).get("ALLRANKS_AGENT_PID"):
            return _pid_here(scene.inits[node], int(named), f"the agent on {node}")
        return int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])

    def whole_checkpoint(self) -> int | None:
        """Return the step of the newest intact checkpoint; None if there is none."""
        for directory in list_checkpoints(self.checkpoints):
            with contextlib.suppress(Damaged):
                manifest = read_manifest(directory)
                for part in manifest.parts:
                    with PartReader(directory, part) as reader:
                        reader.verify_rest()
                return manifest.step
        return None

    def order(self, rank: int, do: str, **details: Any) -> float:
        """Order one rank of the program to do something at a step soon; wait until it has begun.

        Args:
            rank: the rank.
            do: an order of `programs/orders.py`.
            details: other fields of the order.
        Returns:
            When it began, seconds since the epoch.
        Raises:
            SetupError: it did not begin.
        """
        at = max(step.step for step in self.newest().values()) + AHEAD_STEPS
        struck = self.directory / f"struck_{rank}.json"
        self._write("order.json", {"rank": rank, "step": at, "do": do, **details})
        self.wait(struck.exists, STRUCK_S, f"rank {rank} to obey the order {do!r}")
        return float(json.loads(struck.read_text())["time_s"])

    def stop(self) -> None:
        """Order the program to end, all ranks after the same step, and to ignore further orders."""
        (self.directory / "order.json").unlink(missing_ok=True)
        at = max((step.step for step in self.newest().values()), default=0) + AHEAD_STEPS
        self._write("stop.json", {"step": at})

    def wait(self, is_there: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Wait for something.

        Raises:
            SetupError: it does not come in time.
        """
        give_up_s = time.monotonic() + deadline_s
        while not is_there():
            if time.monotonic() > give_up_s:
                raise SetupError(f"lab: waited {deadline_s:.0f} s for {what}")
            time.sleep(POLL_S)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        draft = self.directory / f".{name}"
        draft.write_text(json.dumps(content))
        draft.rename(self.directory / name)


def _pid_here(init_pid: int, there: int, whom: str) -> int:
    """Return this machine's pid of a process, from its pid in its node."""
    for pids in machines.processes_in(init_pid).values():
        for pid in pids:
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                line = next(line for line in status.splitlines() if line.startswith("NSpid:"))
                if int(line.split()[-1]) == there:
                    return pid
    raise SetupError(f"lab: {whom} (pid {there} there) is gone")
