"""A job as the leader's books see it: ranks run small programs, agents tell what they book, and the truth is known.

A program is one line: operations, one after the other, and blocks that are repeated.

    start 2.0                  seconds before the first step; all until the first `opt` counts as start
    step 0.08                  compute; `back`, `data`, `eval`, `save` alike
    all 0.02                   a collective of all ranks: blocked until all have called it, and 0.02 s more
    ddp 0.02                   the same inside of `backward`
    async                      a collective that returns at once
    form 0.02                  init_process_group: waits for all ranks, and 0.02 s more; no collective
    opt                        an optimizer step ends
    keep 50                    the checkpoint of that step is complete
    hang                       never goes on
    100 * ( step 0.08 all 0.02 opt )
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from allranks.guard.goodput.clocks import NodeClock
from allranks.guard.goodput.ledger import Books
from allranks.guard.inside.flight import MAX_LAGS, chosen
from allranks.model.beat import GroupSeen, NodeBeat, RankBeat
from allranks.model.membership import Member
from allranks.model.pace import PACE_STATES, Pace
from allranks.wire.protocol import Plan, WorkerEnd

START, STEP, BACKWARD, DATA, EVAL, SAVE, BLOCKED = range(len(PACE_STATES))
_STATES = {"start": START, "step": STEP, "back": BACKWARD, "data": DATA, "eval": EVAL, "save": SAVE}
DUMP_EVERY_S = 1.0
WALL_S = 1e9
"""Of the nodes' clocks when the leader's is 0."""


def plan(num_nodes: int, workers: int, generation: int = 0) -> Plan:
    members = tuple(
        Member(name=f"node{at + 1:02}", first_rank=at * workers, num_workers=workers) for at in range(num_nodes)
    )
    about = {"store_address": "", "store_port": 0, "backend": "gloo", "backend_reason": ""}
    return Plan(members=members, node_index=0, attempt=0, generation=generation, **about)


def unroll(program: str) -> Iterator[tuple[str, float]]:
    """Yield the operations of a program."""
    words = program.split()
    yield from _unroll(iter(words))


def _unroll(words: Iterator[str]) -> Iterator[tuple[str, float]]:
    for word in words:
        if word == ")":
            return
        if word.isdigit():
            assert (next(words), next(words)) == ("*", "(")
            block = list(_unroll(words))
            for _ in range(int(word)):
                yield from block
        elif word in ("opt", "async", "hang"):
            yield word, 0.0
        else:
            yield word, float(next(words))


@dataclass
class Lived:
    """What one rank has done: when it entered which state, stepped, and called collectives."""

    operations: list[tuple[str, float]]
    now_s: float
    changes: list[tuple[float, int]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    calls: list[tuple[float, float]] = field(default_factory=list)
    """When it called, and when that was done."""
    kept: list[tuple[float, int]] = field(default_factory=list)
    at: int = 0
    truth: dict[str, float] = field(default_factory=dict)
    """By category, and how long others waited for it."""
    ddp_s: float = 0.0
    """Blocked in backward."""
    is_over: bool = False
    begun_s: float | None = None
    """When it called init_process_group."""
    seen: int = 1
    """Of the changes, that pace_at has gone through; and what it then booked."""
    totals: list[float] = field(default_factory=lambda: [0.0] * len(PACE_STATES))
    state: int = START
    since_s: float = 0.0

    @cached_property
    def permille(self) -> int:
        ends_s = [at_s for at_s, _ in self.changes[1:]]
        spans = zip(self.changes, ends_s, strict=False)
        backward_s = sum(end_s - at_s for (at_s, state), end_s in spans if state == BACKWARD)
        return round(1000 * self.ddp_s / backward_s) if self.ddp_s else -1

    def enter(self, state: int) -> None:
        self.changes.append((self.now_s, state if self.steps else START))

    def book(self, category: str, seconds: float) -> None:
        category = category if self.steps else "start"
        self.truth[category] = self.truth.get(category, 0.0) + seconds

    def advance(self) -> tuple[str, float] | None:
        """Go on to the next collective; None: there is none."""
        while self.at < len(self.operations):
            what, seconds = self.operations[self.at]
            self.at += 1
            match what:
                case "opt":
                    self.steps.append(self.now_s)
                    self.enter(STEP)
                case "keep":
                    self.kept.append((self.now_s, int(seconds)))
                case "all" | "ddp" | "async" | "hang" | "form":
                    return what, seconds
                case _:
                    self.enter(_STATES[what])
                    self.book("step" if what == "back" else what, seconds)
                    self.now_s += seconds
                    self.enter(STEP)
        self.is_over = True
        return None


def live(programs: Sequence[str], *, begun_s: float = 0.0, until_s: float = 1e6) -> list[Lived]:
    """Run all ranks until nobody can go on."""
    ranks = [Lived([*unroll(program)], begun_s, since_s=begun_s) for program in programs]
    for rank in ranks:
        rank.enter(START)
    while True:
        doing = [rank.advance() for rank in ranks]
        arrived = [
            (rank, call)
            for rank, call in zip(ranks, doing, strict=True)
            if call is not None and call[0] != "hang" and rank.now_s < until_s
        ]
        is_whole = len(arrived) == len(ranks)
        last_s = max((rank.now_s for rank, _ in arrived), default=0.0)
        last = next((number for number, rank in enumerate(ranks) if rank.now_s == last_s), None)
        for rank, (what, seconds) in arrived:
            called_s, done_s = rank.now_s, last_s + seconds if is_whole else until_s
            if what == "form":
                rank.begun_s, rank.now_s = called_s, done_s
                rank.book("start", done_s - called_s)
                continue
            rank.calls.append((called_s, done_s))
            if what == "async":
                continue
            rank.enter(BACKWARD if what == "ddp" else BLOCKED)
            rank.book("wait", (last_s if is_whole else until_s) - called_s)
            if is_whole:
                rank.book("transfer", seconds)
                if rank.steps and last is not None:
                    whom = ranks[last].truth
                    whom["waited for"] = whom.get("waited for", 0.0) + last_s - called_s
            rank.ddp_s += (done_s - called_s) if what == "ddp" and rank.steps else 0.0
            rank.now_s = done_s
            rank.enter(STEP)
        if not is_whole:
            for rank, call in zip(ranks, doing, strict=True):
                if call is not None and call[0] == "hang":
                    rank.now_s = until_s
            return ranks


def pace_at(rank: Lived, now_s: float, *, is_async: bool = False) -> Pace:
    """What it has booked by then; to be asked in the order of time."""
    while rank.seen < len(rank.changes) and rank.changes[rank.seen][0] <= now_s:
        at_s, entered = rank.changes[rank.seen]
        rank.totals[rank.state] += at_s - rank.since_s
        rank.state, rank.since_s, rank.seen = entered, at_s, rank.seen + 1
    here_s = max(0.0, now_s - rank.since_s)
    totals = (total_s + here_s * (state == rank.state) for state, total_s in enumerate(rank.totals))
    return Pace(
        state=rank.state,
        state_us=round(1e6 * here_s),
        steps=bisect_right(rank.steps, now_s),
        totals_us=tuple(round(1e6 * total_s) for total_s in totals),
        back_blocked_permille=rank.permille,
        is_async=is_async,
    )


class Told:
    """What agents tell of these ranks, fed to the books as the guard would."""

    def __init__(
        self,
        books: Books,
        ranks: Sequence[Lived],
        *,
        workers: int = 1,
        generation: int = 0,
        beat_s: float = 0.2,
        noise_s: float = 0.0002,
        session: int | None = None,
        is_async: bool = False,
    ) -> None:
        self.books, self.ranks, self.workers, self.beat_s = books, ranks, workers, beat_s
        self.is_async, self.session, self.generation = is_async, session, generation
        rng = random.Random(7)
        self._told = [0] * len(ranks)
        self._dumped_s = [-1e9] * len(ranks)
        self._clocks = [NodeClock() for _ in range(-(-len(ranks) // workers))]
        self._skews_s = [rng.uniform(-3, 3) for _ in self._clocks]
        self._noise_s, self._rng = noise_s, rng
        self.silent: set[int] = set()
        self.has_destroyed = False
        """All ranks have destroyed their groups; what they called is still told."""

    def until(self, since_s: float, until_s: float) -> None:
        """All beats of a time."""
        number = int(since_s / self.beat_s) + 1
        while number * self.beat_s <= until_s:
            for node in range(len(self._clocks)):
                if node not in self.silent:
                    self._beat(node, number * self.beat_s + 0.001 * node)
            number += 1

    def end(self, rank: int, at_s: float, exit_code: int = 0) -> None:
        self.books.ended(WorkerEnd(rank=rank, node="", exit_code=exit_code, time_s=at_s), at_s)
        self._beat(rank // self.workers, at_s + 0.01)

    def _beat(self, node: int, now_s: float) -> None:
        there_s, back_s = (self._rng.uniform(0, self._noise_s) for _ in range(2))
        clock, skew_s = self._clocks[node], self._skews_s[node] + WALL_S
        clock.hear(sent_s=now_s - there_s, held_s=0.0, node_s=now_s + skew_s, now_s=now_s + back_s)
        ranks = range(node * self.workers, min(len(self.ranks), (node + 1) * self.workers))
        beats = tuple(self._rank(number, now_s, skew_s) for number in ranks)
        told = NodeBeat(node_index=node, generation=self.generation, ranks=beats, time_ns=int(1e9 * (now_s + skew_s)))
        self.books.hear(told, now_s, clock=clock)

    def _rank(self, number: int, now_s: float, skew_s: float) -> RankBeat:
        rank, lags = self.ranks[number], []
        enqueued = bisect_right(rank.calls, now_s, key=lambda call: call[0])
        completed = bisect_right(rank.calls, now_s, key=lambda call: call[1])
        if now_s >= self._dumped_s[number] + DUMP_EVERY_S and enqueued > self._told[number]:
            for seq in sorted(chosen(self._told[number] + 1, enqueued, MAX_LAGS)):
                lags.append(("0", seq, int(1e9 * (rank.calls[seq - 1][0] + skew_s))))
            self._told[number], self._dumped_s[number] = enqueued, now_s
        waiting_s = now_s - rank.calls[completed][0] if enqueued > completed else 0.0
        group = GroupSeen(name="0", enqueued=enqueued, completed=completed, waiting_s=waiting_s)
        steps = bisect_right(rank.steps, now_s)
        return RankBeat(
            rank=number,
            pace=pace_at(rank, now_s, is_async=self.is_async),
            step=None if self.session is None else self.session + steps,
            begun_ago_s=now_s - rank.begun_s if rank.begun_s is not None and rank.begun_s <= now_s else None,
            checkpoint=max((step for at_s, step in rank.kept if at_s <= now_s), default=None),
            groups=() if self.has_destroyed else (group,),
            lags=tuple(lags),
        )
