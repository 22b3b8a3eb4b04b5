"""Where does everybody stand when one rank stops, skips a collective or swaps two? A discrete-event play of some steps.

Each rank runs the same program on its host, which enqueues operations; its device executes them in order. An operation
runs when all members of its group have come to the operation with the same number, and hangs if these differ. The play
ends when nothing moves any more.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from .plan import Plan

NUM_STEPS = 3
"""Steps that are played: one that is well, the one with the fault, one for those that get past it."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective in the program of a rank."""

    group: str
    """Unique over the job: `tp3`."""
    members: tuple[int, ...]
    op: str
    numel: int
    numel_out: int


@dataclass(frozen=True, slots=True)
class Deviation:
    """What one rank does otherwise in the step with the fault."""

    kind: str
    """stop: it enqueues nothing from there on; skip: not this one; swap: this one after the next of another group."""
    index: int
    """Index of the operation in the step."""


@dataclass(slots=True)
class Place:
    """Where a rank stands in the end."""

    blocked: Operation | None = None
    seq: int = 0
    """Number of the blocked operation within its group."""
    since_s: float = 0.0
    """When it was enqueued."""
    enqueued: dict[str, int] = field(default_factory=dict)
    completed: dict[str, int] = field(default_factory=dict)


def program_of(plan: Plan, rank: int) -> list[Operation]:
    """Return the operations of one step of a rank."""
    per_stage = plan.world // plan.pipeline
    stage, inner = divmod(rank, per_stage)
    shard = inner % plan.tensor
    tensor_group = tuple(range(rank - shard, rank - shard + plan.tensor))
    data_group = tuple(range(stage * per_stage + shard, (stage + 1) * per_stage, plan.tensor))
    operations: list[Operation] = []
    for _ in range(2):
        if stage > 0:
            members = (rank - per_stage, rank)
            operations.append(Operation(f"pp{members[0]}", members, "COALESCED", 8_388_608, 8_388_608))
        if plan.tensor > 1:
            name = f"tp{tensor_group[0]}"
            operations += [Operation(name, tensor_group, "ALLREDUCE", 16_777_216, 16_777_216)] * 2
        if stage < plan.pipeline - 1:
            members = (rank, rank + per_stage)
            operations.append(Operation(f"pp{rank}", members, "COALESCED", 8_388_608, 8_388_608))
    if len(data_group) > 1:
        name = f"dp{stage}.{shard}"
        numel = 13_631_488
        operations += [
            Operation(name, data_group, "_REDUCE_SCATTER_BASE", numel * len(data_group), numel),
            Operation(name, data_group, "_ALLGATHER_BASE", numel, numel * len(data_group)),
            Operation(f"metrics{name}", data_group, "ALLREDUCE", 1, 1),
        ]
    return operations


class Play:
    """The play; `places` says where everybody stands after `run`."""

    def __init__(self, plan: Plan, deviations: Mapping[int, Deviation], step: int, rng: random.Random) -> None:
        self._plan, self._rng = plan, rng
        has_swap = any(deviation.kind == "swap" for deviation in deviations.values())
        self._is_ahead = plan.is_ahead and not has_swap  # else both run, on streams of their own
        self._heap: list[tuple[float, int, int]] = []
        self._count = 0
        self._programs: dict[int, deque[Operation | None]] = {}
        self._queues: list[deque[tuple[Operation, int, float]]] = [deque() for _ in range(plan.world)]
        self._waits: dict[tuple[str, int], dict[int, Operation]] = {}
        self._held: set[int] = set()
        """Ranks whose host waits for its device at the end of a step."""
        self.places = [Place() for _ in range(plan.world)]
        for rank in range(plan.world):
            program = program_of(plan, rank)
            whole: list[Operation | None] = []
            for number in range(NUM_STEPS):
                part: list[Operation | None] = list(program)
                if number == 1 and rank in deviations:
                    deviation = deviations[rank]
                    if deviation.kind == "stop":
                        whole += part[: deviation.index]
                        break
                    if deviation.kind == "skip":
                        del part[deviation.index]
                    if deviation.kind == "swap":
                        at = deviation.index
                        part[at], part[at + 1] = part[at + 1], part[at]
                whole += [*part, None]  # the host waits for the loss
            self._programs[rank] = deque(whole)
            counts: dict[str, int] = {}
            for operation in program:
                counts[operation.group] = counts.get(operation.group, 0) + 1
            self.places[rank].enqueued = {group: step * count for group, count in counts.items()}
            self.places[rank].completed = dict(self.places[rank].enqueued)
            self._push(rng.uniform(0, 0.02), rank)

    def run(self) -> list[Place]:
        """Run until nothing moves."""
        while self._heap:
            now, _, rank = heapq.heappop(self._heap)
            self._enqueue(rank, now)
        for rank, queue in enumerate(self._queues):
            if queue:
                place = self.places[rank]
                place.blocked, place.seq, place.since_s = queue[0]
        return self.places

    def _push(self, when: float, rank: int) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, rank))

    def _enqueue(self, rank: int, now: float) -> None:
        program = self._programs[rank]
        if not program:
            return
        queue = self._queues[rank]
        if program[0] is None or not self._is_ahead:
            if queue:
                self._held.add(rank)
                return
            if program[0] is None:
                program.popleft()
                self._push(now + 0.01 + self._rng.uniform(0, 0.05), rank)
                return
        operation = program.popleft()
        assert operation is not None
        place = self.places[rank]
        place.enqueued[operation.group] += 1
        queue.append((operation, place.enqueued[operation.group], now))
        if len(queue) == 1:
            self._arrive(rank, now)
        self._push(now + 0.001 + self._rng.uniform(0, 0.002), rank)

    def _arrive(self, rank: int, now: float) -> None:
        operation, seq, _ = self._queues[rank][0]
        came = self._waits.setdefault((operation.group, seq), {})
        came[rank] = operation
        if len(came) < len(operation.members) or len({(other.op, other.numel) for other in came.values()}) > 1:
            return
        for member in operation.members:
            self._queues[member].popleft()
            self.places[member].completed[operation.group] = seq
        for member in operation.members:
            if self._queues[member]:
                self._arrive(member, now + 0.005)
            if member in self._held and not self._queues[member]:
                self._held.discard(member)
                self._push(now + 0.005, member)
