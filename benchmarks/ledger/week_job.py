"""A job of 1,024 ranks on 128 nodes with GPUs that trains for a virtual week: what its agents tell at any moment.

All is reckoned from the age of a rank's process, so a moment can be asked for without all those before it, and the
totals are those of a job that has lived through them. A rank starts, then makes cycles:

    500 steps, an evaluation, 500 steps, an evaluation, a checkpoint

One rank loads its batches longer in each step, and the others are blocked as long. The totals of each word are moved by
some milliseconds between states, since real ones are not multiples of anything: that decides how well books compress.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from allranks.guard.inside.flight import MAX_LAGS, chosen
from allranks.model.beat import CallSeen, GpuSeen, GroupSeen, LoadSeen, NodeBeat, ProcessState, RankBeat
from allranks.model.pace import PACE_STATES, Pace, PaceState
from allranks.wire.protocol import Beat

from ..many_agents import address_of

NODES, PER_NODE = 128, 8
RANKS = NODES * PER_NODE
LATE_RANK = 517
START_US, EVAL_US, SAVE_US = 66_000_000, 20_000_000, 6_000_000
STEP_US, BLOCK_STEPS = 1_250_000, 500
PARTS_US = (20_000, 300_000, 830_000, 100_000)
"""Of a step: data, compute, backward, blocked."""
LATE_US = 90_000
CALLS, CALL_US = 4, 250_000
"""Collectives of a step, and the time between two of them."""
NOISE_US = 5_000
DUMP_S, TOLD_BEGUN_S = 1.0, 60.0
MAX_SHIFT_US = 40_000
BLOCK_US = BLOCK_STEPS * STEP_US
CYCLE_US = 2 * (BLOCK_US + EVAL_US) + SAVE_US
START, STEP, BACKWARD, DATA, EVAL, SAVE, BLOCKED = range(len(PACE_STATES))
assert PACE_STATES[BLOCKED] is PaceState.BLOCKED


class VirtualJob:
    """What the agents of all nodes tell.

    Args:
        wall_s: of the nodes' clocks when the leader's is 0.
        is_async: the ranks' collectives are NCCL's, which come back at once, so they tell no times of calls; False:
            they block, and each rank tells when it called which.
    """

    def __init__(self, wall_s: float, *, is_async: bool) -> None:
        self.wall_s, self.is_async = wall_s, is_async
        self.has_left = False
        self.dead: int | None = None
        """A rank whose process has died."""
        self.generation, self.begun_s, self.first_step = 0, 0.0, 0
        self._chance = random.Random(41)
        self._parts = [self._parts_of(rank) for rank in range(RANKS)]
        self._told = [(0, 0.0)] * RANKS

    def begin(self, generation: int, now_s: float, first_step: int) -> None:
        """Start all processes, which go on at the step of a checkpoint."""
        self.generation, self.begun_s, self.first_step, self.dead = generation, now_s, first_step, None
        self._told = [(0, 0.0)] * RANKS

    def checkpoint_at(self, now_s: float) -> int:
        """Return the step of the newest checkpoint."""
        cycles = max(0, self._age_us(now_s) - START_US) // CYCLE_US
        return self.first_step + 2 * BLOCK_STEPS * cycles

    def beat(self, node: int, now_s: float) -> Beat:
        """Return what the agent of a node says."""
        ranks = tuple(self._rank(rank, now_s) for rank in range(node * PER_NODE, (node + 1) * PER_NODE))
        told = NodeBeat(
            node_index=node, generation=self.generation, ranks=ranks, addresses=(address_of(node),),
            try_ports=(40011, 40012), shm_used=0.01, time_ns=round(1e9 * (self.wall_s + now_s)),
        )  # fmt: skip
        return Beat(node=told, ping_ns=round(1e9 * (now_s - 0.0002)), held_ns=100_000)

    def _age_us(self, now_s: float) -> int:
        return max(0, round(1e6 * (now_s - self.begun_s)))

    def _parts_of(self, rank: int) -> tuple[int, ...]:
        data_us, step_us, backward_us, blocked_us = PARTS_US
        shift_us = self._chance.randrange(MAX_SHIFT_US)  # no two ranks are equally fast
        late_us = LATE_US if rank == LATE_RANK else 0
        return data_us + late_us, step_us - shift_us, backward_us + shift_us, blocked_us - late_us

    def _rank(self, rank: int, now_s: float) -> RankBeat:
        age_us = self._age_us(now_s)
        pace = self._pace(rank, age_us)
        steps, is_training = pace.steps, age_us >= START_US
        called = CALLS * steps + (pace.state in (BACKWARD, BLOCKED))
        is_open = pace.state in (BACKWARD, BLOCKED)
        group = GroupSeen(name="0", enqueued=called, completed=called - is_open, waiting_s=0.01 if is_open else 0.0)
        call = CallSeen(group="0", seq=called, op="all_reduce", sizes=((25_000_000,),), dtypes=("Float",))
        gpu = GpuSeen(88 + (rank + steps) % 13, 61_000 + (37 * rank + steps) % 2000, 81_559)
        begun_ago_s = age_us / 1e6 - 4.0
        return RankBeat(
            rank=rank, pid=41_000 + rank, cpu_s=1.1e-6 * age_us, silent_s=0.1, main_at="train.py:120 in step",
            state=ProcessState.GONE if rank == self.dead else ProcessState.RUNNING,
            step=self.first_step + steps if is_training else None,
            checkpoint=(saved := self.checkpoint_at(now_s)) or None,
            write_s=4.5 if rank == 0 and saved > self.first_step else None,
            total_steps=1_000_000 if rank == 0 and is_training else None,
            phase="leaving" if self.has_left else "training" if is_training else "init",
            groups=(group,) if is_training else (), calls=(call,) if is_training else (),
            lags=() if self.is_async else self._lags(rank, called, now_s),
            pace=pace, begun_ago_s=begun_ago_s if 0 <= begun_ago_s < TOLD_BEGUN_S else None,
            load=LoadSeen(rss_mib=9000 + (rank + age_us // 60_000_000) % 900).with_gpu(gpu),
        )  # fmt: skip

    def _pace(self, rank: int, age_us: int) -> Pace:
        if age_us < START_US:
            return Pace(START, age_us, 0, (age_us, 0, 0, 0, 0, 0, 0), is_async=self.is_async, has_left=self.has_left)
        cycles, at_us = divmod(age_us - START_US, CYCLE_US)
        half, at_us = divmod(at_us, BLOCK_US + EVAL_US)
        steps, here_us = divmod(min(at_us, BLOCK_US), STEP_US)
        data_us, step_us, backward_us, blocked_us = parts = self._parts[rank]
        state, state_us, open_us = DATA, here_us, at_us - BLOCK_US
        totals = [START_US, 0, 0, 0, 0, cycles * SAVE_US, 0]
        if half == 2:  # it saves
            steps, state, state_us = 0, SAVE, at_us
            totals[SAVE] += at_us
        elif open_us >= 0:  # it evaluates, which is known only afterwards
            state, state_us = STEP, open_us
            totals[STEP] += open_us
        else:
            for state, part_us in zip((DATA, STEP, BACKWARD, BLOCKED), parts, strict=True):
                state_us = min(here_us, part_us)
                totals[state] += state_us
                if (here_us := here_us - part_us) < 0:
                    break
        steps += (2 * cycles + half) * BLOCK_STEPS
        totals[EVAL] = (2 * cycles + half) * EVAL_US
        totals[DATA] += steps * data_us
        totals[STEP] += steps * step_us
        totals[BACKWARD] += steps * backward_us
        totals[BLOCKED] += steps * blocked_us
        for from_state, to_state in ((STEP, DATA), (BACKWARD, BLOCKED)):
            noise_us = min(self._chance.randrange(NOISE_US), totals[from_state])
            totals[from_state] -= noise_us
            totals[to_state] += noise_us
        permille = -1 if self.is_async or not steps else 120
        return Pace(state, state_us, steps, tuple(totals), permille, self.is_async, self.has_left)  # type: ignore[arg-type]

    def _lags(self, rank: int, called: int, now_s: float) -> Sequence[tuple[str, int, int]]:
        """Return when it called which collectives, of those that all ranks tell of; once in DUMP_S."""
        told, told_s = self._told[rank]
        if called <= told or now_s < told_s + DUMP_S:
            return ()
        self._told[rank] = called, now_s
        begun_us = round(1e6 * (self.wall_s + self.begun_s)) + START_US + self._parts[rank][0]
        found = []
        for seq in sorted(chosen(told + 1, called, MAX_LAGS)):
            step, call = divmod(seq - 1, CALLS)
            halves = step // BLOCK_STEPS
            pauses_us = halves * EVAL_US + halves // 2 * SAVE_US
            called_us = begun_us + step * STEP_US + pauses_us + call * CALL_US + self._chance.randrange(300)
            found.append(("0", seq, 1000 * called_us))
        return tuple(found)
