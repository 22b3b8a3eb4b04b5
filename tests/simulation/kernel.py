"""The simulated machines of one job: workers, what they do together, and what their agents would see of them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec

from allranks.launch.events import EndingFacts
from allranks.launch.workers import LINGERS_S
from allranks.model.beat import GroupSeen, NodeBeat, ProcessState, RankBeat, TrySeen
from allranks.model.pace import PACE_STATES, Pace, PaceState
from allranks.model.room import GIB, FullPlace, Room
from allranks.wire.protocol import Order, Plan, WorkerEnd

from .lives import Stream

STEP_S = 1.0
SAVE_S = 0.5
LOST = "RuntimeError: [pair.cc:547] Connection closed by peer [10.0.0.2]:41"


@dataclass(eq=False)
class Worker:
    """One rank of one generation."""

    rank: int
    node: int
    generation: int
    key: tuple[int, int]
    """The store's port, which is another one for each leader, and the generation: two leaders may count alike."""
    pid: int
    begun_s: float
    is_told: bool = False
    is_deaf: bool = False
    """It ignores SIGTERM."""
    saves_until_s: float | None = None
    """It has got SIGTERM, and saves until then."""
    is_hung: bool = False
    has_raised: bool = False
    """An exception has ended it, but not its process."""
    stopped_s: float | None = None
    held_s: float | None = None
    """Since when the kernel holds it: nothing ends it."""
    is_doomed: bool = False
    """SIGKILL waits for the kernel to let it go."""
    awaits: tuple[int, str | None] | None = None
    """It ends with this code and message when it is continued."""
    is_leaving: bool = False
    end: WorkerEnd | None = None
    ended_s: float = 0.0
    order: Order | None = None

    @property
    def is_well(self) -> bool:
        """Whether it does its part."""
        return self.end is None and not self.is_stuck and self.stopped_s is None and self.held_s is None

    @property
    def is_stuck(self) -> bool:
        """Whether it does not notice that it loses another one."""
        return self.is_hung or self.has_raised

    @property
    def broke_by_itself(self) -> bool:
        """Whether it has ended, neither well nor for want of another one nor because its agent ended it."""
        end = self.end
        return end is not None and end.exit_code != 0 and end.message != LOST and not end.ended_by_us


@dataclass(eq=False)
class Generation:
    """The ranks of one generation, and how far they are."""

    number: int
    nodes: tuple[int, ...]
    size: int
    step: int
    ranks: tuple[int, ...]
    workers: dict[int, Worker] = field(default_factory=dict)
    blocked_s: float | None = None
    """Since when a collective waits."""


FULL = FullPlace(purpose="checkpoint directory", path="/ckpt", room=Room(size_bytes=100 * GIB))


@dataclass(eq=False)
class Machine:
    """One node."""

    index: int
    skew_s: float
    is_up: bool = True
    had_agent: bool = False
    """Whether an agent with workers ran on it when it died."""
    woke_s: float = 0.0
    """When its agent went on: what was before, it did not see."""
    full_since_s: float = 0.0
    full_until_s: float = 0.0
    """When its disk is full, after a worker has met that."""
    workers: list[Worker] = field(default_factory=list)
    """Of the generation that its agent started last."""
    tries: list[tuple[float, TrySeen]] = field(default_factory=list)
    all_workers: list[Worker] = field(default_factory=list)

    def wall_s(self, now_s: float) -> float:
        """What its own clock shows."""
        return 1.7e9 + now_s + self.skew_s


class Kernel:
    """Runs all workers.

    Args:
        rng: the generator of a purpose.
        at: does something later.
        on_end: told when a worker has ended.
        on_linger: told when one has raised some time ago, and its process is still there.
        on_step: told when all ranks have made a step.
        on_save: told when a checkpoint is complete.
    """

    def __init__(
        self,
        rng: Callable[[str], Stream],
        machines: list[Machine],
        *,
        at: Callable[[float, Callable[[], None]], None],
        clock: Callable[[], float],
        on_end: Callable[[Worker], None],
        on_linger: Callable[[Worker], None],
        on_step: Callable[[Generation], None],
        on_save: Callable[[Generation], None],
        num_steps: int,
        is_tracked: bool,
        saves_s: float,
        is_split: Callable[[Collection[int]], bool],
    ) -> None:
        self._rng, self.machines, self._at, self._now, self._on_end = rng, machines, at, clock, on_end
        self._on_step, self._on_save, self._is_split, self._on_linger = on_step, on_save, is_split, on_linger
        self._num_steps, self._is_tracked, self._saves_s = num_steps, is_tracked, saves_s
        self.generations: dict[tuple[int, int], Generation] = {}
        self.checkpoint: int | None = None
        self.checkpoints_found = 0
        self._pids = 100
        self.deaf: set[tuple[int, int]] = set()
        """(node, local rank) whose workers ignore SIGTERM."""

    def _draw(self, purpose: str) -> float:
        return self._rng(purpose).random()

    def start(self, plan: Plan, node: int) -> list[Worker]:
        """Start one node's workers."""
        number, key = plan.generation, (plan.store_port, plan.generation)
        if key not in self.generations:
            size = plan.world_size
            generation = Generation(number, plan.nodes, size, self.checkpoint or 0, tuple(range(size)))
            self.generations[key] = generation
            self._at(STEP_S, lambda: self._tick(generation))
        me, workers = plan.members[plan.node_index], []
        for local_rank in range(me.num_workers):
            self._pids += 1
            worker = Worker(me.first_rank + local_rank, node, number, key, self._pids, self._now())
            worker.is_deaf = (node, local_rank) in self.deaf
            self.generations[key].workers[worker.rank] = worker
            workers.append(worker)
        machine = self.machines[node]
        machine.workers = workers
        machine.all_workers += workers
        return workers

    def _tick(self, generation: Generation) -> None:
        """All ranks make one step together, or those that can wait for the others."""
        workers = list(generation.workers.values())
        if all(worker.end is not None for worker in workers) and len(workers) == generation.size:
            return
        self._at(STEP_S * (0.9 + 0.2 * self._draw("steps")), lambda: self._tick(generation))
        are_all_here = len(workers) == generation.size and all(each.is_well for each in workers)
        if not are_all_here or self._is_split({each.node for each in workers}):
            if generation.blocked_s is None:
                generation.blocked_s = self._now()
            return
        generation.blocked_s = None
        if any(each.is_leaving for each in workers):  # they save
            return
        generation.step += 1
        self._on_step(generation)
        is_ordered = all(each.order is not None and generation.step >= each.order.at_step for each in workers)
        if generation.step >= self._num_steps:
            self._leave(workers, generation)
        elif is_ordered and (self._is_tracked or any(each.order and each.order.signum for each in workers)):
            if self._is_tracked:
                self._save(generation, generation.step)
            self._leave(workers, generation)
        elif self._is_tracked and generation.step % 4 == 0:
            step = generation.step
            self._at(SAVE_S * self._draw("saves"), lambda: self._save(generation, step))

    def _save(self, generation: Generation, step: int) -> None:
        """Rank 0 completes a checkpoint, unless it has ended meanwhile."""
        if generation.workers[0].end is None:
            self.checkpoint = max(step, self.checkpoint or 0)
            self._on_save(generation)

    def _leave(self, workers: list[Worker], generation: Generation) -> None:
        for worker in workers:
            worker.is_leaving = True
            self._at(SAVE_S * self._draw(f"workers {worker.node}"), lambda worker=worker: self.end(worker, 0))

    # What happens to workers

    def end(self, worker: Worker, code: int, *, message: str | None = None) -> None:
        """A worker ends, unless the kernel holds it, or it is stopped and does not die of SIGKILL."""
        if worker.end is not None or worker.held_s is not None:
            worker.is_doomed |= code == -signal.SIGKILL
            worker.awaits = worker.awaits or (code, message)
            return
        if worker.stopped_s is not None and code != -signal.SIGKILL:
            worker.awaits = worker.awaits or (code, message)
            return
        worker.ended_s = self._now()
        worker.end = WorkerEnd(
            rank=worker.rank, node=f"n{worker.node}", exit_code=code, message=message,
            time_s=self.machines[worker.node].wall_s(worker.ended_s),
            ended_by_us=worker.is_told and code not in (0, -signal.SIGSEGV),
        )  # fmt: skip
        self._on_end(worker)
        if code and not worker.is_told:
            self._break_others(worker)

    def linger(self, worker: Worker) -> None:
        """A worker raises, and a thread of its goes on: the others wait for it."""
        worker.has_raised = True
        self._at(LINGERS_S, lambda: None if worker.is_told or worker.end is not None else self._on_linger(worker))

    def _break_others(self, worker: Worker) -> None:
        if self._draw(f"workers {worker.node}") < 0.3:
            return  # they wait in their collective
        for other in list(self.generations[worker.key].workers.values()):
            if other.end is None:
                self._at(
                    0.02 + 0.4 * self._draw(f"workers {other.node}"),
                    lambda other=other: None if other.is_told or other.is_stuck else self.end(other, 1, message=LOST),
                )

    def signal(self, worker: Worker, signum: int) -> None:
        """Its agent signals a worker, which is meant to end."""
        worker.is_told = True
        if signum == signal.SIGKILL:
            self._at(0.05, lambda: self.end(worker, -signal.SIGKILL))
        elif not worker.is_deaf and not worker.is_hung:
            self._at(0.3 * self._draw(f"workers {worker.node}"), lambda: self.end(worker, -signum))

    def forward(self, worker: Worker, signum: int, *, ends: bool) -> None:
        """Its agent passes on a signal that the worker handles: it saves, and leaves, if it is not stuck."""
        worker.is_told |= ends
        if worker.is_deaf or worker.is_hung or worker.saves_until_s is not None:
            return
        worker.is_leaving = True
        worker.saves_until_s = self._now() + self._saves_s
        self._at(self._saves_s, lambda: self.end(worker, 0))

    def hold(self, worker: Worker) -> EndingFacts:
        """Return what its agent knows of how it is to be ended."""
        return EndingFacts(handles=frozenset({signal.SIGTERM} if self._saves_s else ()))

    def release(self, worker: Worker) -> None:
        """The kernel lets a worker go, or somebody continues it."""
        worker.held_s = worker.stopped_s = None
        if worker.is_doomed:
            self.end(worker, -signal.SIGKILL)
        elif worker.awaits is not None:
            self.end(worker, worker.awaits[0], message=worker.awaits[1])

    def kill_all(self, node: int) -> None:
        """An agent or a machine has died, and its workers with it."""
        for worker in self.machines[node].all_workers:
            self.end(worker, -signal.SIGKILL)

    # What an agent sees

    def news(self, node: int) -> object:
        """Return what changes if a node's next beat tells more than how time passes."""
        machine = self.machines[node]
        generation = self.generations[machine.workers[0].key] if machine.workers else None
        workers = [(each.end is None, each.stopped_s, each.held_s, each.is_leaving) for each in machine.workers]
        return generation and (generation.number, generation.step, generation.blocked_s), workers, machine.tries

    def beat(self, node: int, position: int, generation: int) -> NodeBeat:
        """Return how a node's workers are."""
        machine, now_s = self.machines[node], self._now()
        return NodeBeat(
            node_index=position,
            generation=generation,
            ranks=tuple([self._beat_of(worker) for worker in machine.workers if worker.generation == generation]),
            tries=tuple([msgspec.structs.replace(seen, age_s=now_s - at_s) for at_s, seen in machine.tries]),
            addresses=(f"192.168.0.{node + 1}",),
            try_ports=(4000, 4001),
            full=(FULL,) if now_s < machine.full_until_s else (),
            time_ns=round(machine.wall_s(now_s) * 1e9),
        )

    def _beat_of(self, worker: Worker) -> RankBeat:
        now_s, generation = self._now(), self.generations[worker.key]
        state, since_s = ProcessState.RUNNING, worker.begun_s
        if worker.end is not None:
            state, since_s = ProcessState.GONE, worker.ended_s
        elif worker.stopped_s is not None:
            state, since_s = ProcessState.STOPPED, max(worker.stopped_s, self.machines[worker.node].woke_s)
        elif worker.held_s is not None:
            state, since_s = ProcessState.BLOCKED, worker.held_s
        is_waiting = generation.blocked_s is not None and worker.is_well
        group = GroupSeen(
            name="0",
            enqueued=generation.step + is_waiting,
            completed=generation.step,
            waiting_s=now_s - generation.blocked_s if is_waiting and generation.blocked_s is not None else 0.0,
        )
        age_us = round(1e6 * max(0.0, (now_s if worker.end is None else worker.ended_s) - worker.begun_s))
        start_us, blocked_us = min(age_us, 2_000_000), min(age_us, round(1e6 * group.waiting_s))
        worked_us = max(0, age_us - start_us - blocked_us)
        return RankBeat(
            rank=worker.rank,
            pid=worker.pid,
            pace=Pace(
                state=PACE_STATES.index(PaceState.BLOCKED if is_waiting else PaceState.STEP),
                state_us=blocked_us,
                steps=generation.step,
                totals_us=(start_us, worked_us, 0, 0, 0, 0, age_us - start_us - worked_us),
            ),
            state=state,
            state_for_s=max(0.0, now_s - since_s),
            silent_s=0.1 if worker.stopped_s is None else now_s - worker.stopped_s,
            main_at="train.py:10 in step",
            step=generation.step if self._is_tracked else None,
            checkpoint=self.checkpoint if self._is_tracked else None,
            phase="leaving" if worker.is_leaving else "training",
            handles=(signal.SIGTERM,) if self._saves_s else (),
            groups=(group,),
            idle_s=now_s - max(generation.blocked_s, self.machines[worker.node].woke_s)
            if generation.blocked_s
            else 0.0,
        )
