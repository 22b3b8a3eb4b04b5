"""This node's workers, one generation after another: start them, end them, clean up after them.

    workers.start(plan)                        generation 0, with everything that the plan says
    workers.signal(signal.SIGTERM, [0, 1])     to each worker's process group
    workers.sweep(0.5)                         ends what the workers left running
    workers.start(next_plan)                   generation 1

The agent (launch.agent) decides when; launch.environment decides what a worker's environment contains.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from allranks.files.folder import Folder
from allranks.guard.inside.cell import Cell
from allranks.guard.node.activity import Activity
from allranks.guard.node.worker import WatchedWorker
from allranks.host.limits import name_places
from allranks.host.process import is_below
from allranks.host.signals import catches, handled, read_caught
from allranks.host.slurm_job import is_running
from allranks.join.standby import NO_TORCH, READY, differing
from allranks.launch import container
from allranks.launch.book_writer import BookWriter
from allranks.launch.console import Console
from allranks.launch.events import EndingFacts
from allranks.launch.full_directories import PlaceWatch
from allranks.launch.live import Live, Shows
from allranks.launch.plan import JobPlan
from allranks.launch.sweeper import Sweeper
from allranks.launch.worker_environment import base_env, node_settings, provisional_group, rank_settings
from allranks.launch.workers import LOCAL_RANK, Standby, Worker, end_left_behind, kill_descendants
from allranks.model.errors import AllranksError
from allranks.model.membership import format_members
from allranks.model.setting import Setting
from allranks.report.growth import GrowthRecorder
from allranks.report.rundir import LATEST, RunDir, this_directory
from allranks.report.text import Style, say
from allranks.state.saved.holding import Holding
from allranks.state.saved.owner import identify
from allranks.wire.protocol import Order, Plan, WorkerEnd

CAUGHT_S = 1.0
"""How old may be what the kernel says of a worker's handlers; those of its script are known at once."""


@dataclass(slots=True, kw_only=True)
class WorkerGroup:
    """Owns the worker processes of one node; `close` ends whatever is left of them."""

    job: JobPlan
    command: Sequence[str]
    run_dir: RunDir
    hidden: Collection[tuple[int, str]]
    """Local ranks and streams (`out`, `err`) that the terminal does not show; the files have them."""
    env: Mapping[str, str]
    """The agent's."""
    sweeper: Sweeper = field(default_factory=lambda: Sweeper(0, -1))
    """Ends what this node's workers have started, if this agent is killed."""
    store_fd: int | None = None
    """The leader's socket for rank 0."""
    standby: Standby | None = None
    """Forks the workers, where there is one."""
    console: Console = field(default_factory=Console)
    shows: Shows | None = None
    """`--status`."""
    live: Live = field(init=False)
    """What the terminal shows of the job beside the workers' output."""
    growth: GrowthRecorder | None = None
    """Writes down when the workers' output grows, once they are started."""
    book: BookWriter = field(init=False)
    """Writes down what the workers have spent their time on."""
    owner: Holding | None = None
    """On the leader: keeps other runs out of the directory of checkpoints."""
    processes: list[Worker] = field(default_factory=list)
    folder: Folder | None = None
    """This node's directory, which has the files of the workers that were started last."""
    settings: list[Setting] = field(default_factory=list)
    places: PlaceWatch = field(init=False)
    """Looks which directories that workers write to are full."""
    _can_stand_by: bool = True
    """False once a standby could not fork: another one could not, either."""

    _caught: dict[int, int] = field(default_factory=dict)
    """By pid: the signals that a worker catches, as the kernel had it at `_caught_s`."""
    _caught_s: float = 0.0

    def __post_init__(self) -> None:
        root = str(self.run_dir.root)
        job = LATEST if root == "runs" else f"--log-dir {shlex.quote(root)} {LATEST}"
        self.live = Live(self.console, self.shows, Style.of(sys.stderr), job=job)
        self.book = BookWriter(lambda exc: self.run_dir.last_files.on_error(exc))
        known = name_places(self.env, run_dir=self.run_dir.path)
        order = {"run directory": known["run directory"], "checkpoint directory": self.checkpoints}
        order |= {"TMPDIR": known["TMPDIR"], "/dev/shm": known["/dev/shm"]}  # noqa: S108
        self.places = PlaceWatch(order, cwd=this_directory())

    # The directory of checkpoints

    @property
    def checkpoints(self) -> Path:
        """Where the workers are told to save."""
        named = self.job.request.checkpoint_dir
        return self.run_dir.checkpoints_path(named or self.env.get("ALLRANKS_CHECKPOINT_DIR") or None)

    def make_owner(self, generation: int) -> Holding:
        """Return what keeps other runs out of the directory of checkpoints, from the generation that this agent leads.

        One that nobody named is made by the first save, if there is any.
        """
        me = identify(
            self.env, job=self.job.job, attempt_path=str(self.run_dir.attempt_path.absolute()), generation=generation
        )
        is_named = self.job.request.checkpoint_dir is not None or "ALLRANKS_CHECKPOINT_DIR" in self.env
        self.owner = Holding(self.checkpoints, me, find_running=is_running, say=say, is_made=is_named)
        return self.owner

    # Starting

    def start(self, group: Plan, *, interface: str | None = None) -> None:
        """Start this node's workers, with this data interface; the `end` of one that cannot start gives the reason.

        Raises:
            UsageError: the directory for their files cannot be made.
        """
        me = group.members[group.node_index]
        self.console.finish()
        for worker in self.processes:
            worker.cell.close()
        self.processes = []
        before, folder = self.folder, self.run_dir.create_node(me.name)
        self.folder = folder
        self.settings = node_settings(
            self.job,
            group,
            env=self.env,
            interface=interface,
            store_fd=self.store_fd,
            checkpoints=self.run_dir.checkpoints_path(self.job.request.checkpoint_dir),
            attempt=self.run_dir.attempt_path.absolute(),
            recorder=(folder.path / "recorder_rank_").absolute(),
            members=self.run_dir.share_members(me.name, format_members(group.members)),
        )
        self.settings += _name_folder(folder)
        self.run_dir.write_settings(me.name, self.settings)
        for local_rank in range(me.num_workers):
            worker = self._start_one(group, local_rank, folder)
            prefix = f"[{me.name} r{worker.rank}] " if group.world_size > 1 else ""
            for stream, start in worker.starts.items():
                if (local_rank, stream) not in self.hidden:
                    name = worker.file_name(stream)
                    with contextlib.suppress(OSError):  # the worker has already put something else in its place
                        self.console.follow(name, start=start, stream=stream, prefix=prefix, dir_fd=folder.fd)
            self.processes.append(worker)
        if self.growth is None or folder is not before:  # somebody has removed the directory
            self.growth = GrowthRecorder(folder, self.run_dir.last_files.on_error)
        self.growth.watch(worker.file_name(stream) for worker in self.processes for stream in worker.starts)
        self.sweeper.watch(worker.pid for worker in self.still_running)
        if group.generation >= group.max_restarts:
            self.end_standby()

    def watch(self) -> list[WatchedWorker]:
        """Return what looks at the workers that run."""
        hang_s = self.job.guard.hang_s
        return [
            WatchedWorker(
                rank=worker.rank,
                pid=worker.pid,
                cell=worker.cell,
                activity=Activity(hang_s=hang_s, outputs=worker.outputs),
            )
            for worker in self.still_running
        ]

    def write_book(self, data: bytes) -> None:
        """Write this node's book soon; nothing where its workers were never started."""
        if self.folder is not None:
            self.book.write(self.folder, data)

    def refuse(self, group: Plan, why: str) -> list[WorkerEnd]:
        """Return the ends of this node's workers where `start` could start none of them."""
        me = group.members[group.node_index]
        ranks = range(me.first_rank, me.first_rank + me.num_workers)
        first = WorkerEnd(rank=0, node=me.name, exit_code=127, time_s=time.time(), message=why, could_not_start=True)
        return [msgspec.structs.replace(first, rank=rank) for rank in ranks]

    def _start_one(self, group: Plan, local_rank: int, folder: Folder) -> Worker:
        me, request = group.members[group.node_index], self.job.request
        rank = me.first_rank + local_rank
        worker = Worker(rank=rank, node=me.name, folder=folder, cell=Cell.create())
        own = rank_settings(group, local_rank, error_file=worker.path("error.json").absolute())
        settings = [*self.settings, *own]
        command = [word.replace(LOCAL_RANK, str(local_rank)) for word in self.command]
        fds = {"ALLRANKS_CELL_FD": worker.cell.fd}
        if self.store_fd is not None and rank == 0:
            fds["ALLRANKS_STORE_FD"] = self.store_fd
        env = base_env(self.env, settings) | {name: str(fd) for name, fd in fds.items()}
        env["ALLRANKS_STARTED_S"] = str(time.time())
        if request.container:
            runtime, names = container.find_runtime(request.container_runtime), [setting.name for setting in settings]
            has_gpus = self.job.facts.num_gpus > 0
            command, env = container.enter(runtime, request.container, command, env, names=names, has_gpus=has_gpus)
        standby = self._standby_for(env)
        worker.start(command, env, fds=fds, standby=standby)
        if standby is not None and worker.end is None and not isinstance(worker.process, psutil.Process):
            say("the standby forked no worker; workers start without it")
            self.end_standby()
        return worker

    # The standby

    def begin_standby(self) -> None:
        """Start the first generation's, if it is worthwhile, with the environment as far as it is known."""
        is_worthwhile = self.job.num_workers > 1 or self.job.request.max_restarts > 0
        if is_worthwhile and self.job.problem is None:
            with contextlib.suppress(AllranksError):  # the roll call says it
                self.settings = node_settings(self.job, provisional_group(self.job), env=self.env)
                self.prepare_standby()

    def prepare_standby(self) -> None:
        """See that there is a standby for the next generation; one that was killed is replaced."""
        env = base_env(self.env, self.settings)
        self._standby_for(env)
        is_wanted = self.job.request.has_standby and self._can_stand_by
        if self.standby is None and is_wanted and Standby.can_serve(self.command, env):
            with contextlib.suppress(OSError):  # no process or descriptor is left for it
                self.standby = Standby.start(self.command, env)

    def _standby_for(self, env: Mapping[str, str]) -> Standby | None:
        """Return the standby if it can fork a worker with this environment now; end it if it never can."""
        if self.standby is None or self.standby.answer is None:
            return None
        obstacle = self.standby.answer
        if obstacle == READY:
            names = differing(self.standby.env, env)
            obstacle = f"{', '.join(names)} changed since it imported torch" if names else ""
        if obstacle or self.standby.process.poll() is not None:
            self.end_standby()
            self._can_stand_by = not obstacle
            if obstacle not in ("", NO_TORCH) and not (self.processes and self.processes[0].rank):
                say(f"workers start without a standby: {obstacle}")
        return self.standby

    def end_standby(self) -> None:
        """End it; the workers that it has forked live on."""
        if self.standby is not None:
            self.standby.end()
            self.standby = None

    # Ending

    @property
    def still_running(self) -> list[Worker]:
        """Workers that have not ended."""
        return [worker for worker in self.processes if worker.end is None]

    def order(self, order: Order) -> None:
        """Give an order to the workers."""
        for worker in self.still_running:
            worker.cell.give_order(order.at_step, order.why, leaves=order.leaves)

    def sense(self) -> dict[int, EndingFacts]:
        """Return how each worker is to be ended: what it handles, and whether it saves."""
        if time.monotonic() > self._caught_s + CAUGHT_S:
            self._caught_s, self._caught = time.monotonic(), {}
        holds = {}
        for worker in self.still_running:
            told = worker.cell.handlers()
            if worker.pid not in self._caught:
                self._caught[worker.pid] = read_caught(_teller_of(worker) or worker.pid)
            signums = handled(self._caught[worker.pid], script=told.handled, own=told.own)
            holds[worker.rank] = EndingFacts(handles=signums, begun_s=told.begun_s, is_saving=worker.cell.is_saving)
        return holds

    def signal(self, signum: int, ranks: Collection[int]) -> None:
        """Send a signal that is meant to end them to these workers and their process groups; 0: they have got it."""
        for worker in self.still_running:
            if worker.rank in ranks:
                worker.told_s.setdefault(signum, time.time())
                worker.handles_end |= not signum or catches(worker.pid, signum)
                worker.cell.end()
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signum)

    def forward(self, signum: int, ranks: Collection[int], *, ends: bool) -> None:
        """Send a signal to the processes that handle it, and, as far as these say who they are, to nobody else.

        The processes of a DataLoader would die of it, and take with them a rank that wants to save.

        Args:
            ends: it is meant to end them.
        """
        for worker in self.still_running:
            if worker.rank in ranks:
                if ends:
                    worker.told_s.setdefault(signum, time.time())
                    worker.handles_end = True
                    worker.cell.end()
                pid = _teller_of(worker)
                with contextlib.suppress(ProcessLookupError, PermissionError):  # it has become another user
                    if pid or not ends:
                        os.kill(pid or worker.pid, signum)
                    else:
                        os.killpg(worker.pid, signum)

    def sweep(self, grace_s: float, *, spared: Collection[int] = ()) -> list[str]:
        """End what the workers left running, but not the spared pids; returns names and pids."""
        standby = [self.standby.process.pid] if self.standby else []
        return end_left_behind(grace_s, spared=[*spared, *standby, self.sweeper.pid])

    def close(self) -> None:
        """End whatever is left."""
        if self.owner is not None:
            self.owner.end()
        self.end_standby()
        if self.still_running:
            kill_descendants()
        if self.growth is not None:
            self.growth.end()
        self.book.end()
        self.console.finish()
        for worker in self.processes:
            worker.cell.close()


def _name_folder(folder: Folder) -> list[Setting]:
    """Return what lets a worker's hook hold the directory of its files, where another user could swap that."""
    device, inode = folder.identity
    try:
        if not folder.may_be_swapped(folder.owner):
            return []
    except OSError:  # a directory above it cannot be looked at
        pass
    reason = "device and inode of the run directory: another user can rename a directory above it"
    return [Setting("ALLRANKS_FOLDER", f"{device}:{inode}", reason, "run dir")]


def _teller_of(worker: Worker) -> int:
    """Return the process that says what it handles, the worker or one below it; 0: there is none that can be found.

    In a container with process ids of its own, the number is another process's here.
    """
    pid = worker.cell.handlers().pid
    return pid if pid == worker.pid or (pid and is_below(pid, worker.pid)) else 0
