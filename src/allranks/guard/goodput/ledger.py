"""Where did the time of the job go? The leader's books of all ranks, from the first generation to the last. Pure.

    books = Books(epoch_s=..., started_s=...)
    books.begin(plan, now_s)                    each generation; the time up to the next one belongs to its ranks
    books.hear(beat, told_s, clock=...)         what ranks have booked (account.py), and when they called the same
                                                collectives (waited.py, stragglers.py)
    books.ended(end, at_s)                      a worker ended
    books.lost(node_index)                      nothing comes from that node any more; a word of it takes it back
    books.fault(now_s, findings)                the generation is over: `restart` until the next one's first step
    books.end(now_s)                            the job is over
    books.snapshot(now_s)                       the Ledger up to now
    books.lately()                              how long ranks wait now, and for whom

Each rank has one account for each generation. When the next one begins, the account is closed and added to what came
before, so the books grow with the ranks, never with the time. Times are of the leader's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from allranks.guard.goodput.blocked import weigh_trust
from allranks.guard.goodput.clocks import NodeClock
from allranks.guard.goodput.lately import Lately, see_lately
from allranks.guard.goodput.rank_account import SAVE, Account
from allranks.guard.goodput.start_waits import StartWaits
from allranks.guard.goodput.stragglers import Straggler, Stragglers
from allranks.guard.goodput.totals import LOST, Totals, find_losses, show_row
from allranks.guard.goodput.waited import CallTimes
from allranks.model.beat import GroupSeen, NodeBeat
from allranks.model.finding import Finding
from allranks.model.ledger import MAX_CULPRITS, MAX_RANKS, MAX_RESTARTS, Category, Chronic, Ledger, RestartCost
from allranks.wire.protocol import Plan, WorkerEnd

LONG_S = 1.0
"""A call that is open for so long is looked at: who has not made it?"""
MISSING_EVERY_S = 0.5
"""Between two looks at the ranks that have not made the same call."""
MAX_MISSING = 1024
POINT_FOR_RANK_S = 0.004
"""Between two points of a rank's way to which redo is reckoned."""
EACH_WORD_UP_TO, WEIGH_FOR_RANK_S = 256, 0.004
"""Ranks of a job whose every word is weighed; and in a larger one, for each rank, the time between two that are, and
between two looks at how it was lately. Words have running totals, so what is left out is in the next one."""
TRUST_EVERY_S, TRUST_FOR_RANK_S = 2.0, 0.004
"""Between two looks at how far the waits in collectives are borne out, with many ranks more."""


@dataclass(slots=True)
class _Fault:
    """The one that ended the generation."""

    at_s: float
    cause: str
    node: str
    redo_s: float | None = None
    redo_steps: int | None = None
    is_guessed: bool = False


class Books:
    """The account of a job.

    Args:
        epoch_s: what to add to the leader's clock to have seconds since the epoch.
        started_s: since the epoch: when this attempt began; None: with the first generation.
        earlier: the books up to now, of earlier attempts or of the last leader.
        attempt: number of this one.
        takes_over: another agent has led the generation that begins first.
    """

    def __init__(
        self,
        *,
        epoch_s: float = 0.0,
        started_s: float | None = None,
        earlier: Ledger | None = None,
        attempt: int = 0,
        takes_over: bool = False,
    ) -> None:
        self._epoch_s, self._attempt, self._started_s = epoch_s, attempt, started_s
        self._earlier, self._takes_over = earlier, takes_over
        self._begun_s = 0.0
        self._past = Totals() if earlier is None else Totals.of(earlier)
        self._restarts = [*earlier.restarts] if earlier else []
        self._accounts: dict[int, Account] = {}
        self._everybody = range(0)
        self._names: dict[int, str] = {}
        """Of the ranks' nodes."""
        self._generation, self._gen_s = -1, 0.0
        self._fault: _Fault | None = None
        self._last_fault: _Fault | None = None
        """The one before this generation."""
        self._end_s: float | None = None
        self._checkpoint: int | None = None
        self._num_checkpoints = earlier.num_checkpoints if earlier else 0
        self._saved: tuple[int, float | None, int] = (0, None, 0)
        """Of rank 0: what it had booked as `save`, when that last ended, and after how many steps."""
        self._is_async = earlier is not None and earlier.is_async
        self._are_steps_seen = earlier is not None and earlier.is_steps_seen
        self._is_estimated = earlier is not None and earlier.is_estimated
        self._chronic = {found.rank: found for found in earlier.chronic} if earlier else {}
        self._times, self._stragglers, self._start_waits = CallTimes(), Stragglers(), StartWaits()
        self._next_trust_s = self._told_s = self._lately_due_s = 0.0
        self._lately: Lately | None = None
        self._missing: dict[tuple[str, int], tuple[float, int | None, float]] = {}
        """By group and number of an open call: when this was looked at, who has not made it, until when that holds."""

    # What is told

    def begin(self, plan: Plan, now_s: float) -> None:
        """A generation begins: the time up to now belongs to the ranks of the last one."""
        if self._accounts:
            self._close(now_s)
        nodes = {
            member.first_rank + number: index
            for index, member in enumerate(plan.members)
            for number in range(member.num_workers)
        }
        self._names = {rank: plan.members[index].name for rank, index in nodes.items()}
        self._everybody = range(len(nodes))
        is_first = self._generation < 0
        self._generation, self._gen_s = plan.generation, now_s
        since_s = self._book_before(now_s) if is_first else now_s
        about: dict[str, Any] = {"is_running": is_first and self._takes_over, "point_s": POINT_FOR_RANK_S * len(nodes)}
        about["weigh_s"] = WEIGH_FOR_RANK_S * len(nodes) if len(nodes) > EACH_WORD_UP_TO else 0.0
        self._accounts = {rank: Account(rank, node=node, begun_s=since_s, **about) for rank, node in nodes.items()}
        self._saved = 0, None, 0
        self._times, self._stragglers, self._start_waits = CallTimes(), Stragglers(), StartWaits()
        self._missing, self._next_trust_s, self._lately = {}, now_s, None

    def hear(self, beat: NodeBeat, told_s: float, *, clock: NodeClock | None = None) -> None:
        """A node told of its ranks.

        Args:
            told_s: when, by the leader's clock.
            clock: the node's, which puts the times of its calls on the leader's.
        """
        self._told_s = told_s
        for rank in beat.ranks:
            account = self._accounts.get(rank.rank)
            if account is None:
                continue
            account.hear(rank, told_s)
            if rank.rank == 0 and rank.pace is not None:
                saved_us = rank.pace.totals_us[SAVE]
                if saved_us > self._saved[0] and rank.pace.state != SAVE:
                    self._saved = saved_us, told_s, account.steps
            if rank.checkpoint is not None and rank.checkpoint > (-1 if self._checkpoint is None else self._checkpoint):
                self._keep(rank.checkpoint)
            for group in rank.groups:
                if group.waiting_s >= LONG_S and group.completed >= 0:
                    self._look_at_wait(account, group, told_s)
            if not rank.lags or clock is None or clock.offset_s is None:
                continue
            members = {group.name: group.ranks or self._everybody for group in account.groups}
            calls: dict[str, list[tuple[int, float]]] = {}
            for name, seq, created_ns in rank.lags:
                calls.setdefault(name, []).append((seq, created_ns / 1e9 - clock.offset_s))
            for name, told in calls.items():
                if 1 < len(members.get(name, ())) <= len(self._everybody):
                    self.called(name, members[name], rank.rank, told, clock.error_s)
        if told_s >= self._next_trust_s:
            self._next_trust_s = told_s + max(TRUST_EVERY_S, TRUST_FOR_RANK_S * len(self._accounts))
            trust = weigh_trust({rank: account.blocked for rank, account in self._accounts.items()})
            self._stragglers.trust = trust
            loads = {rank: account.loads for rank, account in self._accounts.items() if account.is_async}
            self._stragglers.compare(loads)
            for account in self._accounts.values():
                account.blocked.trust = trust

    def called(
        self, group: str, members: Sequence[int], rank: int, calls: Iterable[tuple[int, float]], error_s: float
    ) -> None:
        """A rank called collectives of its group: number and time by the leader's clock, and how wrong that may be."""
        accounts = self._accounts
        if rank not in accounts or self._fault is not None:
            return
        for sample in self._times.hear(group, members, rank, calls, node=(accounts[rank].node, error_s)):
            for other, called_s, wait_s, covered_s in sample.waited:
                if (account := accounts.get(other)) is None:
                    continue
                if called_s < account.first_s:
                    self._start_waits.add(sample, wait_s)
                elif covered_s > 0:
                    account.blocked.wait_in(sample, wait_s, covered_s)
            last = accounts.get(sample.rank)
            if last is not None and (last.first_step_s is None or sample.called_s >= last.first_s):
                self._stragglers.hear(sample, step=last.steps or None)

    def forget_clocks(self) -> None:
        """A node's clock was set: what was measured before compares with nothing."""
        self._times.forget()
        self._stragglers.forget()

    def ended(self, end: WorkerEnd, at_s: float) -> None:
        """A worker ended.

        Args:
            at_s: when, by the leader's clock.
        """
        if (account := self._accounts.get(end.rank)) is not None:
            account.end(at_s, is_well=end.exit_code == 0, is_dead=end.exit_code != 0 and not end.ended_by_us)

    def lost(self, node_index: int) -> None:
        """The connection to a node's agent is gone."""
        for account in self._accounts.values():
            account.is_dead |= account.node == node_index and account.until_s is None

    def fault(self, now_s: float, findings: Sequence[Finding] = ()) -> None:
        """The generation is over, since its first rank died, or now: what followed the last checkpoint is lost.

        Args:
            findings: the culprit's first; a later verdict on the same fault may have others.
        """
        cause, node = (findings[0].cause, findings[0].node or "") if findings else ("", "")
        if self._fault is not None:
            self._fault.cause, self._fault.node = cause, node
            return
        died_s = [account.until_s for account in self._accounts.values() if account.is_dead and account.until_s]
        at_s = min([now_s, *died_s])
        fault = self._fault = _Fault(at_s, cause, node)
        beats = (account.beat for account in self._accounts.values() if account.beat is not None)
        told = [beat.step for beat in beats if beat.step is not None]
        _, saved_s, saved_step = self._saved
        for account in self._accounts.values():
            account.stop(at_s, has_stood_still=not died_s)
        if told:
            fault.redo_steps = max(0, max(told) - (self._checkpoint or 0))
            redo_s = mean(account.lose(self._checkpoint) for account in self._accounts.values())
            is_known = all(account.knows(self._checkpoint) for account in self._accounts.values())
            fault.redo_s = redo_s if is_known else None
        elif saved_s is not None:
            fault.is_guessed = True
            fault.redo_steps = max(0, self._accounts[0].steps - saved_step)
            fault.redo_s = mean(account.lose_since(saved_s) for account in self._accounts.values())

    def queued(self, since_s: float) -> None:
        """Book the queue of a first attempt: since this time (since the epoch) SLURM could have begun the job."""
        if self._earlier is None and self._names and since_s < self._begun_s:
            for rank in self._names:
                self._past.book(rank, Category.QUEUE, self._begun_s - since_s)
            self._past.rank_s += len(self._names) * (self._begun_s - since_s)
            self._begun_s = since_s

    def end(self, now_s: float) -> None:
        """The job is over; nothing is booked behind that."""
        self._end_s = now_s if self._end_s is None else self._end_s

    # What follows

    def named(self) -> list[Straggler]:
        """Return the stragglers that were found since the last time this was asked; each rank once."""
        found = [*self._stragglers.named()]
        for straggler in found:
            self._chronic[straggler.rank] = Chronic(
                rank=straggler.rank,
                node=self._names.get(straggler.rank, ""),
                share=round(straggler.share, 4),
                late_s=round(straggler.lag_s, 6),
                since_step=straggler.since_step,
            )
        return found

    def lately(self) -> Lately:
        """Return how long ranks wait now, and for whom; of a large job, as the last look has found."""
        if self._lately is None or len(self._accounts) <= EACH_WORD_UP_TO or self._told_s >= self._lately_due_s:
            self._lately_due_s = self._told_s + WEIGH_FOR_RANK_S * len(self._accounts)
            self._lately = see_lately(self._accounts.values(), self._stragglers.lately())
        return self._lately

    def snapshot(self, now_s: float) -> Ledger:
        """Return the whole account up to now; takes 20 us for each rank."""
        now_s = max(self._gen_s, now_s if self._end_s is None else min(now_s, self._end_s))
        totals = self._past.copy()
        self._close_into(totals, now_s)
        seconds = {category.value: round(totals.seconds[category], 3) for category in Category}
        rows = [show_row(rank, row) for rank, row in sorted(totals.rows.items())]
        lost = sorted(rows, key=lambda row: -sum(row.seconds.get(category, 0.0) for category in LOST))
        owed_s = {row.rank: max(row.waited_for_s, row.waited_for_at_start_s) for row in rows}
        waited_for = sorted((row for row in rows if owed_s[row.rank] > 0), key=lambda row: -owed_s[row.rank])
        restarts = [*self._restarts, *self._open_restart(now_s)]
        is_estimated = self._is_estimated or any(account.blocked.is_estimated for account in self._accounts.values())
        return Ledger(
            begun_s=round(self._begun_s, 3),
            until_s=round(now_s + self._epoch_s, 3),
            rank_s=round(totals.rank_s, 3),
            seconds={category: found_s for category, found_s in seconds.items() if found_s > 0},
            steps=max(0, totals.steps),
            is_async=self._is_async or any(account.is_async for account in self._accounts.values()),
            is_steps_seen=self._are_steps_seen or any(account.steps > 0 for account in self._accounts.values()),
            is_estimated=is_estimated,
            attempts=(self._earlier.attempts if self._earlier else 0) + (0 if self._continues else 1),
            losses=find_losses(totals, restarts, is_estimated=is_estimated),
            waited_for=tuple(waited_for[:MAX_CULPRITS]),
            ranks=tuple(sorted(lost[:MAX_RANKS], key=lambda row: row.rank)),
            restarts=tuple(restarts[-MAX_RESTARTS:]),
            chronic=tuple(self._chronic.values()),
            num_checkpoints=self._num_checkpoints,
            save_s=round(totals.save_s, 3),
        )

    # Inside

    @property
    def _continues(self) -> bool:
        """Whether the earlier books are of this attempt, too."""
        return self._earlier is not None and self._takes_over

    def _book_before(self, now_s: float) -> float:
        """Book what came before the first generation; return since when its ranks have accounts of their own."""
        now_epoch_s = now_s + self._epoch_s
        started_s = min(now_epoch_s, now_epoch_s if self._started_s is None else self._started_s)
        before_s, category = started_s, Category.QUEUE
        if self._earlier is not None:
            before_s = min(self._earlier.until_s, now_epoch_s)
            started_s = max(started_s, before_s)
        if self._takes_over:
            before_s = before_s if self._earlier is not None else started_s
            started_s, category = now_epoch_s, Category.UNKNOWN
        self._begun_s = self._earlier.begun_s if self._earlier is not None else before_s
        for rank in self._names:
            self._past.book(rank, category, started_s - before_s)
        self._past.rank_s += len(self._names) * (started_s - before_s)
        return started_s - self._epoch_s

    def _close(self, now_s: float) -> None:
        """End the accounts of a generation that another one follows."""
        self._close_into(self._past, now_s, over=Category.RESTART)
        self._restarts += self._open_restart(now_s, is_over=True)
        self._is_async |= any(account.is_async for account in self._accounts.values())
        self._are_steps_seen |= any(account.steps > 0 for account in self._accounts.values())
        self._is_estimated |= any(account.blocked.is_estimated for account in self._accounts.values())
        self._last_fault, self._fault = self._fault, None

    def _close_into(self, totals: Totals, now_s: float, *, over: Category | None = None) -> None:
        """Add the accounts of the present generation.

        Args:
            over: what the time is from the end of ranks to now, if no fault has ended them; None: theirs.
        """
        fault = self._fault
        for rank, account in self._accounts.items():
            row = totals.rows[rank]
            row.node = self._names[rank]
            until_s = now_s if account.until_s is None else min(account.until_s, now_s)
            seconds, waits = account.close(until_s)
            if self._last_fault is not None:
                seconds[Category.RESTART], seconds[Category.START] = seconds[Category.START], 0.0
            if fault is not None:
                fault_s = min(max(fault.at_s, until_s), now_s)
                seconds[Category.UNKNOWN] += fault_s - until_s
                behind = Category.UNKNOWN if self._end_s is not None else Category.RESTART
                seconds[behind] += now_s - fault_s
            else:
                seconds[over or (Category.END if account.has_ended_well else Category.UNKNOWN)] += now_s - until_s
            for category, found_s in seconds.items():
                if found_s > 0:
                    totals.book(rank, category, found_s)
            for whom, wait_s in waits.items():
                if whom is not None:
                    totals.rows[whom].waited_for_s += wait_s
            row.steps += account.steps
            totals.rank_s += now_s - account.begun_s
        if self._last_fault is None:  # else it is `restart`
            for rank, wait_s in self._start_waits.find(self._accounts).items():
                totals.rows[rank].waited_for_at_start_s += wait_s
        totals.steps += max((account.steps for account in self._accounts.values()), default=0)
        totals.steps -= (fault.redo_steps or 0) if fault is not None else 0
        totals.save_s += max((account.saved_s for account in self._accounts.values()), default=0.0)

    def _open_restart(self, now_s: float, *, is_over: bool = False) -> list[RestartCost]:
        """Return what the last fault cost, if this generation began after one."""
        fault = self._last_fault
        if fault is None:
            return []
        first_s = [found for account in self._accounts.values() if (found := account.first_step_s) is not None]
        until_s = min([now_s, *first_s, *([self._fault.at_s] if self._fault else [])])
        return [
            RestartCost(
                generation=self._generation,
                attempt=self._attempt,
                cause=fault.cause,
                node=fault.node,
                at_s=round(fault.at_s + self._epoch_s, 3),
                restart_s=round(max(0.0, until_s - fault.at_s), 3),
                redo_s=None if fault.redo_s is None else round(fault.redo_s, 3),
                redo_steps=fault.redo_steps,
                is_redo_guessed=fault.is_guessed,
            )
        ]

    def _keep(self, step: int) -> None:
        """A checkpoint is complete; one of a step that no rank was seen to make was loaded, or is an earlier one."""
        self._num_checkpoints += any(account.has_made(step) for account in self._accounts.values())
        self._checkpoint = step
        for account in self._accounts.values():
            account.forget_until(step)

    def _look_at_wait(self, account: Account, group: GroupSeen, told_s: float) -> None:
        """A rank has waited for long in a call: book that on whoever has not made it."""
        seq = group.completed + 1
        looked_s, whom, known_s = self._missing.get((group.name, seq), (-MISSING_EVERY_S, None, 0.0))
        if told_s >= looked_s + MISSING_EVERY_S:
            members = group.ranks or self._accounts
            missing = [
                (rank, found.told_s)
                for rank in members
                if (found := self._accounts.get(rank)) is not None and found.has_not_called(group.name, seq)
            ]
            whom = missing[0][0] if len(missing) == 1 else None
            known_s = max((at_s for _, at_s in missing), default=0.0)
            if len(self._missing) >= MAX_MISSING:
                self._missing.clear()
            self._missing[group.name, seq] = told_s, whom, known_s
        if known_s > 0:
            account.wait_long((group.name, seq), whom, told_s - group.waiting_s, known_s)
