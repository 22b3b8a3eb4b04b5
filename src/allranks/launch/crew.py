"""This node's workers, one generation after another: start them, end them, clean up after them.

    crew.start(plan)                        generation 0, with everything that the plan says
    crew.end(signal.SIGTERM, grace_s=3)     the signal to each worker's process group; at_once: SIGKILL
    crew.advance(now_s)                     SIGKILL to workers that outlive the grace; called while the agent waits
    crew.start(next_plan)                   generation 1, with the standbys that were ready

The agent (launch.agent) decides when; launch.environment decides what a worker's environment contains.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
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
MOST_BETWEEN_LOOKS_S = 0.5
"""The agent looks at ending workers 20 times a second; a longer pause means that the agent itself did not run."""
REAP_S = 1.0
"""Seconds after SIGKILL; a worker that still exists then is unkillable (state D)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where the workers' output goes; the files of the run directory get it in any case.

    `hidden` names local ranks and streams (`out`, `err`) that the terminal does not show.
    """

    log_dir: Path
    hidden: frozenset[tuple[int, str]] = frozenset()


@dataclass(slots=True, kw_only=True)
class _Ending:
    """Workers are being ended."""

    signum: int
    grace_s: float
    looked_s: float
    waited_s: float = 0.0
    """Measured while the agent runs: on a suspended or overloaded machine, workers cannot end either."""
    has_told: bool = False
    has_killed: bool = False


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
    _ending: _Ending | None = None

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
        self._ending = None
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
    def is_ending(self) -> bool:
        """Whether they have been told to end."""
        return self._ending is not None

    @property
    def watched(self) -> list[WatchedWorker]:
        """This generation's workers, for the watch."""
        return [
            WatchedWorker(rank=worker.rank, pid=worker.pid, cell=worker.cell)
            for worker in self.workers
            if worker.cell is not None and worker.pid is not None
        ]

    @property
    def can_save(self) -> bool:
        """Whether a worker reports steps, and therefore reads orders."""
        return any(worker.cell is not None and worker.cell.read().step is not None for worker in self.still_running)

    def order(self, order: Order) -> None:
        """Give an order to the workers; those that handle the signal themselves get the signal."""
        for worker in self.still_running:
            if worker.cell is not None:
                worker.cell.give_order(order.at_step, order.why, leaves=order.leaves)
            if order.signum and worker.pid is not None and catches(worker.pid, order.signum):
                worker.send(order.signum)

    def end(self, signum: int, *, grace_s: float, at_once: Sequence[int] = ()) -> None:
        """Tell all workers to end; a second call only adds workers to kill at once."""
        is_first = self._ending is None
        if is_first:
            self._ending = _Ending(signum=signum, grace_s=grace_s, looked_s=time.monotonic())
        for worker in self.workers:
            if worker.rank in at_once:
                worker.signal_tree(signal.SIGKILL)
            elif is_first:
                worker.signal_tree(signum)

    def advance(self, now_s: float) -> bool:
        """Do what is due while the workers end.

        Args:
            now_s: monotonic time.
        Returns:
            Whether all have ended, or are unkillable.
        """
        ending = self._ending
        stubborn = self.still_running
        if ending is None or not stubborn:
            return not stubborn
        ending.waited_s += min(max(now_s - ending.looked_s, 0.0), MOST_BETWEEN_LOOKS_S)
        ending.looked_s = now_s
        waited_s = ending.waited_s
        if waited_s >= 1.0 and not ending.has_told and not ending.has_killed:
            ending.has_told = True
            name = signal.Signals(ending.signum).name
            ranks, has = ", ".join(str(worker.rank) for worker in stubborn), "has" if len(stubborn) == 1 else "have"
            left_s = max(0.0, ending.grace_s - waited_s)
            noun = "rank" if len(stubborn) == 1 else "ranks"
            at_once = ", or at once with another Ctrl-C" if ending.signum == signal.SIGINT else ""
            self.say(f"{noun} {ranks} {has} not ended after {name} yet; SIGKILL in {left_s:.0f} s{at_once}")
        if waited_s >= ending.grace_s and not ending.has_killed:
            ending.has_killed = True
            for worker in stubborn:
                worker.signal_tree(signal.SIGKILL)
        if waited_s < ending.grace_s + REAP_S:
            return False
        for worker in stubborn:
            self.say(f"rank {worker.rank} (pid {worker.pid}) is unkillable: it hangs in the kernel (state D in ps)")
        return True

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
