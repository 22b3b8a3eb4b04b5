"""This node's workers, one generation after another: start them, end them, clean up after them.

    crew.start(plan)                        generation 0, with everything that the plan says
    crew.signal(signal.SIGTERM, [0, 1])     to each worker's process group
    crew.sweep(grace_s=0.5)                 ends what the workers left running
    crew.start(next_plan)                   generation 1, with the standbys that were ready

The agent (launch.agent) decides when; launch.environment decides what a worker's environment contains.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from allranks.guard.inside.cell import Cell
from allranks.guard.worker import WatchedWorker
from allranks.host.signals import catches
from allranks.launch import container
from allranks.launch.console import Console
from allranks.launch.environment import HOOK_PATH, node_settings, rank_settings
from allranks.launch.plan import JobPlan
from allranks.launch.standby import Standby
from allranks.launch.workers import Worker, end_left_behind, find_writers, kill_descendants
from allranks.model.membership import format_members
from allranks.model.setting import Setting
from allranks.report.rundir import RunDir
from allranks.wire.protocol import Order, Plan
from allranks.wire.secret import SECRET_VARIABLE

LOCAL_RANK = "${local_rank}"
"""Placeholder of the local rank in a worker's arguments, as in torchrun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where the workers' output goes; the files of the run directory get it in any case.

    `hidden` names local ranks and streams (`out`, `err`) that the terminal does not show.
    """

    log_dir: Path
    hidden: frozenset[tuple[int, str]] = frozenset()


@dataclass(slots=True, kw_only=True)
class Crew:
    """Owns the worker processes of one node; `close` ends whatever is left of them."""

    job: JobPlan
    command: Sequence[str]
    run_dir: RunDir
    output: Output
    env: Mapping[str, str]
    """The agent's."""
    interface: str | None
    """The data interface."""
    store_fd: int | None
    """The leader's socket for rank 0."""
    say: Callable[[str], None]
    has_standbys: bool = False
    spared: Callable[[], list[int]] = list
    """Pids of descendants that must not be ended as left-overs of workers."""
    console: Console = field(default_factory=Console)
    workers: list[Worker] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    _standbys: list[Standby] = field(default_factory=list)

    # Starting

    def start(self, group: Plan) -> None:
        """Start this node's workers; the `end` of one that cannot start gives the reason.

        Raises:
            OSError: their output files cannot be written.
        """
        me = group.members[group.node_index]
        node_path = self.run_dir.create_node(me.name)
        self.settings = node_settings(
            self.job,
            group,
            interface=self.interface,
            store_fd=self.store_fd,
            env=self.env,
            hook_path=HOOK_PATH,
            checkpoints=self.run_dir.checkpoints_path(self.job.request.checkpoint_dir),
            recorder=(node_path / "recorder_rank_").absolute(),
            members=self.run_dir.share_members(me.name, format_members(group.members)),
        )
        self.run_dir.write_settings(me.name, self.settings)
        self.console.finish()
        for worker in self.workers:
            worker.close()
        self.workers = []
        for local_rank in range(me.num_workers):
            worker = self._start_one(group, local_rank, node_path)
            prefix = f"[{me.name} r{worker.rank}] " if group.world_size > 1 else ""
            for stream, path, start in (
                ("err", worker.err_path, worker.err_start),
                ("out", worker.out_path, worker.out_start),
            ):
                if (local_rank, stream) not in self.output.hidden:
                    self.console.follow(path, start=start, stream=stream, prefix=prefix)
            self.workers.append(worker)

    def _start_one(self, group: Plan, local_rank: int, node_path: Path) -> Worker:
        me = group.members[group.node_index]
        rank = me.first_rank + local_rank
        worker = Worker(
            rank=rank,
            local_rank=local_rank,
            node=me.name,
            out_path=node_path / f"rank_{rank}.out",
            err_path=node_path / f"rank_{rank}.err",
            error_file=node_path / f"rank_{rank}.error.json",
            cell=Cell.create(),
        )
        own = rank_settings(group, local_rank, error_file=worker.error_file.absolute())
        values = self._base_env() | {setting.name: setting.value for setting in own}
        values["ALLRANKS_STARTED_S"] = str(time.time())
        command = [word.replace(LOCAL_RANK, str(local_rank)) for word in self.command]
        fds = {"ALLRANKS_CELL_FD": worker.cell.fd} if worker.cell else {}
        if self.store_fd is not None and rank == 0:
            fds["ALLRANKS_STORE_FD"] = self.store_fd
        values |= {name: str(fd) for name, fd in fds.items()}
        if self.job.request.container:
            handed = [setting.name for setting in (*self.settings, *own)]
            command, values = self._in_container(command, values, handed)
        while self._standbys:
            if worker.take_over(self._standbys.pop(), values, fds=fds):
                return worker
        worker.start(command, values, pass_fds=tuple(fds.values()))
        return worker

    def _base_env(self) -> dict[str, str]:
        kept = {name: value for name, value in self.env.items() if name != SECRET_VARIABLE}
        ours = {setting.name: setting.value for setting in self.settings}
        return kept | ours | {"ALLRANKS_AGENT_PID": str(os.getpid())}

    def _in_container(
        self, command: list[str], values: dict[str, str], names: list[str]
    ) -> tuple[list[str], dict[str, str]]:
        image = self.job.request.container
        assert image is not None
        runtime = container.find_runtime(self.job.request.container_runtime)
        wrapped = container.wrap_command(
            runtime,
            image,
            command,
            names=names,
            hook_root=HOOK_PATH.parent,
            cwd=Path.cwd(),
            has_gpus=self.job.facts.num_gpus > 0,
        )
        return wrapped, values | container.handed_in(runtime, {name: values[name] for name in names})

    def prepare_standbys(self) -> None:
        """Start a standby for each worker, with torch already imported, so that a restart does not wait for imports."""
        env = self._base_env()
        is_one_command = LOCAL_RANK not in " ".join(self.command) and not self.job.request.container
        if not self.has_standbys or not is_one_command or not Standby.can_serve(self.command, env):
            return
        alive = [standby for standby in self._standbys if standby.is_alive]
        self.has_standbys = len(alive) == len(self._standbys)  # one that ended by itself would do so again
        self._standbys = alive
        with contextlib.suppress(OSError):  # no process or descriptor is left for them
            for _ in range(len(self.workers) - len(alive)):
                self._standbys.append(Standby.start(self.command, env))

    # Ending

    @property
    def still_running(self) -> list[Worker]:
        """Workers that have not ended."""
        return [worker for worker in self.workers if worker.end is None]

    @property
    def watched(self) -> list[WatchedWorker]:
        """This generation's workers, for the watch."""
        return [
            WatchedWorker(rank=worker.rank, pid=worker.pid, cell=worker.cell)
            for worker in self.workers
            if worker.cell is not None and worker.pid is not None
        ]

    def order(self, order: Order) -> None:
        """Give an order to the workers; those that handle the signal themselves get the signal."""
        for worker in self.still_running:
            if worker.cell is not None:
                worker.cell.give_order(order.at_step, order.why, leaves=order.leaves)
            if order.signum and worker.pid is not None and catches(worker.pid, order.signum):
                worker.send(order.signum)

    def signal(self, signum: int, ranks: Collection[int]) -> None:
        """Send a signal, meant to end them, to these workers and their process groups."""
        for worker in self.workers:
            if worker.rank in ranks:
                worker.signal_tree(signum)

    def sweep(self, grace_s: float) -> list[str]:
        """End what the workers left running; returns names and pids."""
        return end_left_behind(grace_s, spared=[*self.spared(), *(each.process.pid for each in self._standbys)])

    def wait_for_writers(self, patience_s: float) -> None:
        """Wait until checkpoints are written: when this process ends, SLURM ends all other processes of the step."""
        deadline_s, notice_at_s = time.monotonic() + patience_s, time.monotonic() + 2.0
        while (writers := find_writers()) and time.monotonic() < deadline_s:
            if time.monotonic() >= notice_at_s:
                notice_at_s = deadline_s
                self.say(f"waiting at most {patience_s:.0f} s for a checkpoint to be written (pid {writers[0]})")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill all descendants of this process at once."""
        kill_descendants()

    def close(self) -> None:
        """End whatever is left."""
        for standby in self._standbys:
            standby.end()
        self._standbys = []
        if self.still_running:
            kill_descendants()
        self.console.finish()
        for worker in self.workers:
            worker.close()
