"""When does the leader write down what the job does, and what? Its knowledge as a JobStatus, once a second. Pure.

    if keeper.is_due(now_s, leader.phase):
        effects += keeper.look(known, guard, now_s)      # WriteStatus, WriteLedger, events `hang` and `straggler`

What each rank does is in launch.lead.rank_rows, how fast they are in launch.lead.step_rate. All times are by the
leader's clock, until `on_wall_clock` makes them times since the epoch: a reducer knows no other clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from allranks.guard.goodput.ledger import Books
from allranks.guard.scene import Scene
from allranks.guard.verdict import Guard
from allranks.guard.waits import Waiting, find_waiting, is_typed_at, longest_wait_s
from allranks.launch import events
from allranks.launch.events import Effect
from allranks.launch.lead.course import Phase
from allranks.launch.lead.rank_rows import CpuMeter, see_nodes, see_ranks, see_stuck
from allranks.launch.lead.script_saves import ScriptSaves
from allranks.launch.lead.step_rate import StepRate
from allranks.model.errors import name_signal
from allranks.model.finding import Finding
from allranks.model.job_status import MAX_EVENTS, EventSeen, JobStatus, RankRow, Stuck, write_status
from allranks.model.ledger import Ledger
from allranks.wire.protocol import Plan

STATUS_S = 1.0
"""Between two statuses."""
LEDGER_S = 60.0
"""Between two writings of the ledger, besides those at a fault, a restart and the end."""
SAMPLE_S, SAMPLE_FOR_RANK_S = 5.0, 0.02
"""Between two looks at the ledger, and the same for each rank: a look takes 20 us a rank."""
ROWS_FOR_RANK_S = 2e-3
"""Between two looks at what all ranks do, for each rank; at least STATUS_S. A look takes 4 us a rank."""
STUCK_S = 3.0
"""Ranks that wait for so long are told as waiting for others."""
WALK_S = 6e-3
"""Between two walks over all groups, for each rank: a walk takes 70 us a rank, so 1,024 ranks are walked every 6 s."""
MAX_BYTES = 64 << 10
SMALL = 16
"""Rows and nodes of a status that surely has no more bytes."""
MAX_TEXT = 160
SHOWN_LOSSES, SHOWN_CULPRITS, SHOWN_RESTARTS = 8, 8, 8
_QUIET = ("network", "worker_ended_late")
"""Events that are no news for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a leader knows of its job, beyond what the guard does."""

    job: str
    phase: Phase
    plan: Plan
    """Of the generation that runs, or ran last."""
    steps: Mapping[int, int]
    """Of a session, by rank."""
    total_steps: int | None
    checkpoint: int | None
    complete: tuple[int | None, float]
    """Step of the newest one that was written while this leader led, and when it was complete, by its clock."""
    num_restarts: int
    missing: str
    """What a paused job waits for."""
    gives_up_s: float | None
    """Until when, by the leader's clock."""
    exit_code: int | None
    """Of a job that is over."""


@dataclass(slots=True)
class StatusKeeper:
    """Remembers what a status says of the past: rates, events, the last look at the ledger.

    Args:
        books: the guard's account of the job.
    """

    books: Books
    _phase: Phase | None = None
    _due_s: float = -math.inf
    _ledger_due_s: float = -math.inf
    _sample_due_s: float = -math.inf
    _generation: int | None = None
    _events: deque[EventSeen] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    _rate: StepRate = field(default_factory=StepRate)
    _cpu: CpuMeter = field(default_factory=CpuMeter)
    _saves: ScriptSaves = field(default_factory=ScriptSaves)
    _ledger: Ledger | None = None
    _rows: tuple[RankRow, ...] = ()
    _rows_due_s: float = -math.inf
    _waiting: Waiting | None = None
    _walked_s: float = -math.inf
    """When the last walk over all groups was made, by the guard's clock."""
    _hung: tuple[int, ...] | None = None
    """The ranks of the last event `hang`; None: nobody hangs."""
    _warnings: tuple[Finding, ...] = ()
    """Of the guard, that were told as events."""

    def note(self, event: str, fields: Mapping[str, object], now_s: float) -> None:
        """Take in an event, for the last ones that a status has."""
        if event in _QUIET or (event == "worker_ended" and (fields.get("told") or not fields.get("exit_code"))):
            return
        text = describe_event(event, fields)
        text = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 4].rstrip() + " ..."
        self._events.append(EventSeen(time_s=now_s, event=event, text=text))

    def is_due(self, now_s: float, phase: Phase) -> bool:
        """Whether a status is due: once a second, and at once in each new phase."""
        return phase is not self._phase or (now_s >= self._due_s and phase is not Phase.OVER)

    def look(self, known: Known, guard: Guard, now_s: float) -> list[Effect]:
        """Return what is to be written down now."""
        scene, guard_s = guard.look(now_s)
        is_new_phase, self._phase, self._due_s = known.phase is not self._phase, known.phase, now_s + STATUS_S
        if known.plan.generation != self._generation:
            self._generation, self._warnings = known.plan.generation, ()
            self._cpu, self._saves = CpuMeter(), ScriptSaves()
            self._hung, self._waiting, self._walked_s, self._rows_due_s = None, None, -math.inf, -math.inf
            self._rate.begin()
        is_kept = is_new_phase or now_s >= self._ledger_due_s
        if is_kept or now_s >= self._sample_due_s:
            self._sample_due_s = now_s + max(SAMPLE_S, SAMPLE_FOR_RANK_S * scene.num_ranks)
            if known.phase is Phase.OVER:
                self.books.end(now_s)
            self._ledger = self.books.snapshot(now_s)
        is_running = known.phase is Phase.RUNNING
        waiting = self._find_waiting(scene, guard_s) if is_running else None
        may_end = waiting is not None and not scene.may_leave and not is_typed_at(scene, waiting)
        stuck = see_stuck(scene, waiting, guard_s, is_ended_for_it=may_end) if waiting is not None else None
        records: list[events.Record] = []
        if (hang := self._find_hang(stuck, scene.settings.slow_s)) is not None:
            records.append(events.Record(event="hang", fields=hang))
        for straggler in self._find_stragglers(guard.warnings):
            records.append(events.Record(event="straggler", fields=straggler))
        if (saved := self._find_save(known, scene, now_s)) is not None:
            records.append(events.Record(event="checkpoint", fields=saved))
        for record in records:
            self.note(record.event, record.fields, now_s)
        effects: list[Effect] = [*records]
        status = self._make(known, scene, now_s, guard_s, waiting, stuck)
        effects.append(events.WriteStatus(status=status, ledger=self._ledger))
        if is_kept and self._ledger is not None:
            self._ledger_due_s = now_s + LEDGER_S
            effects.append(events.WriteLedger(ledger=self._ledger))
        return effects

    def _find_waiting(self, scene: Scene, guard_s: float) -> Waiting | None:
        """Return why ranks wait, if one of them has waited for STUCK_S; of many ranks, as the last walk has found."""
        if longest_wait_s(scene, guard_s) < STUCK_S:
            self._waiting = None
            return None
        if (passed_s := guard_s - self._walked_s) >= scene.num_ranks * WALK_S:
            self._walked_s, passed_s, found = guard_s, 0.0, find_waiting(scene, guard_s)
            self._waiting = found if found is not None and found.waited_s >= STUCK_S else None
        if (last := self._waiting) is None:
            return None
        return replace(last, waited_s=last.waited_s + passed_s, stuck_s=last.stuck_s + passed_s)

    def _find_hang(self, stuck: Stuck | None, slow_s: float) -> dict[str, object] | None:
        """Return the fields of an event `hang`, once for the same ranks."""
        if stuck is None:
            self._hung = None
            return None
        if stuck.for_s < slow_s or stuck.ranks == self._hung:
            return None
        self._hung = stuck.ranks
        told = {name: getattr(stuck, name) for name in ("op", "for_s", "num_waiting", "ranks", "place", "ends_in_s")}
        return {name: value for name, value in told.items() if value not in ("", None)}

    def _find_save(self, known: Known, scene: Scene, now_s: float) -> dict[str, object] | None:
        """Return the fields of an event `checkpoint`, where a script without a session has saved."""
        first = scene.ranks.get(0)
        if first is None or known.steps:  # a session tells of its checkpoints itself
            return None
        is_over = known.phase not in (Phase.RUNNING, Phase.STOPPING)  # ranks save also when they are to stop
        saved = self._saves.look(first.beat.pace, now_s, is_over=is_over)
        return None if saved is None else saved._asdict() | {"generation": self._generation, "is_verified": False}

    def _find_stragglers(self, warnings: tuple[Finding, ...]) -> list[dict[str, object]]:
        """Return the fields of events `straggler`, for each rank that was named since the last look."""
        new = [finding for finding in warnings if finding not in self._warnings]
        self._warnings = warnings
        told = [(rank, finding) for finding in new for rank in finding.ranks]
        return [{"rank": rank, "node": finding.node, "message": finding.message} for rank, finding in told]

    def _make(
        self, known: Known, scene: Scene, now_s: float, guard_s: float, waiting: Waiting | None, stuck: Stuck | None
    ) -> JobStatus:
        is_running = known.phase is Phase.RUNNING
        lately = self.books.lately() if is_running else None
        wait_share = lately.wait_share if lately is not None else None
        if now_s >= self._rows_due_s or waiting is not None or not is_running:
            self._rows_due_s = now_s + ROWS_FOR_RANK_S * scene.num_ranks - STATUS_S / 2
            late = lately.late if lately is not None else {}
            self._rows = see_ranks(scene, guard_s, waiting=waiting, steps=known.steps, late=late, cpu=self._cpu)
        step = max(known.steps.values(), default=None)
        is_of_session = step is not None
        if step is None:
            paces = [view.beat.pace for view in scene.ranks.values() if view.beat.pace is not None]
            step = max((pace.steps for pace in paces), default=0) or None
        rate = self._rate.look(step, now_s) if is_running else None
        total, eta_s = known.total_steps if is_of_session else None, None
        if total is not None and step is not None and rate:
            eta_s = round(max(0, total - step) / rate, 1)
        status = JobStatus(
            job=known.job,
            written_s=now_s,
            started_s=0.0,
            phase=str(known.phase),
            attempt=known.plan.attempt,
            generation=known.plan.generation,
            num_ranks=scene.num_ranks,
            num_up=sum(rank not in scene.ended for rank in scene.ranks),
            num_nodes=len(scene.nodes),
            step=step,
            is_step_of_session=is_of_session,
            total_steps=total,
            steps_per_s=None if rate is None else round(rate, 4),
            rates=tuple(self._rate.rates),
            eta_s=eta_s,
            checkpoint=known.checkpoint,
            checkpoint_s=known.complete[1] if known.complete[0] == known.checkpoint is not None else None,
            num_restarts=known.num_restarts,
            max_restarts=known.plan.max_restarts,
            wait_share=None if wait_share is None else round(min(1.0, max(0.0, wait_share)), 4),
            waits_for=lately.waits_for if lately is not None else None,
            stuck=stuck,
            missing=known.missing,
            gives_up_in_s=None if known.gives_up_s is None else round(max(0.0, known.gives_up_s - now_s), 1),
            rows=self._rows,
            nodes=see_nodes(scene, guard_s),
            events=tuple(self._events),
            ledger=None if self._ledger is None else shorten_ledger(self._ledger),
            exit_code=known.exit_code,
        )
        return fit(status)


def shorten_ledger(ledger: Ledger) -> Ledger:
    """Return the ledger without its rows of ranks, which goodput.json has."""
    return msgspec.structs.replace(
        ledger,
        ranks=(),
        losses=ledger.losses[:SHOWN_LOSSES],
        waited_for=ledger.waited_for[:SHOWN_CULPRITS],
        restarts=ledger.restarts[-SHOWN_RESTARTS:],
    )


def fit(status: JobStatus, at_most: int = MAX_BYTES) -> JobStatus:
    """Return a status of at most so many bytes: rows, nodes and old events are left out, the least bad first."""
    for _ in range(16 if len(status.rows) + len(status.nodes) > SMALL else 0):
        if len(write_status(status)) <= at_most:
            break
        status = msgspec.structs.replace(
            status,
            rows=status.rows[: max(1, len(status.rows) * 3 // 4)],
            nodes=status.nodes[: len(status.nodes) // 2],
            events=status.events[len(status.events) // 2 :],
        )
    return status


def on_wall_clock(status: JobStatus, *, offset_s: float, started_s: float) -> JobStatus:
    """Return a status with times since the epoch.

    Args:
        offset_s: what is to be added to the leader's clock.
        started_s: when the job began, since the epoch.
    """
    return msgspec.structs.replace(
        status,
        written_s=round(status.written_s + offset_s, 3),
        started_s=round(started_s, 3),
        checkpoint_s=None if status.checkpoint_s is None else round(status.checkpoint_s + offset_s, 3),
        events=tuple(
            msgspec.structs.replace(event, time_s=round(event.time_s + offset_s, 3)) for event in status.events
        ),
    )


def describe_event(event: str, fields: Mapping[str, object]) -> str:
    """Return what an event says, as a few words.

    >>> describe_event("checkpoint", {"step": 1800, "write_s": 3.14}), describe_event("node_lost", {"node": "node03"})
    ('step 1800, written in 3.1 s', 'node03')
    """
    match dict(fields):
        case {"step": step, "write_s": float() as write_s} if event == "checkpoint":
            return f"step {step}, written in {write_s:.{1 if write_s >= 1 else 3}f} s"
        case {"step": step} if event == "checkpoint":
            return f"step {step}"
        case {"optimizer_steps": steps, "save_s": float() as save_s} if event == "checkpoint":
            return f"about step {steps}, saved in {save_s:.{1 if save_s >= 1 else 2}f} s, not verified"
        case {"generation": number, "members": list() as members} if event == "restarting":
            checkpoint = fields.get("checkpoint")
            begins = "" if checkpoint is None else f", from step {checkpoint}"
            return f"generation {number} on {len(members)} node{'s' * (len(members) != 1)}{begins}"
        case {"op": op, "for_s": float() as for_s, "ranks": ranks} if event == "hang":
            for_whom = f" for rank {_join(ranks)}" if ranks else ""
            return f"{fields.get('num_waiting')} ranks wait in {op}{for_whom}, {for_s:.0f} s"
        case {"cause": cause, "message": message} if event == "verdict":
            return f"{cause}: {message}"
        case {"rank": rank, "node": node, "message": message}:
            return f"rank {rank} on {node} {message}"
        case {"rank": rank, "node": node, "exit_code": exit_code}:
            return f"rank {rank} on {node}, exit code {exit_code}"
        case {"rank": rank, "node": node, "lines": lines}:
            return f"{lines} lines of rank {rank} on {node}"
        case {"signum": int() as signum, "node": node}:
            return f"{name_signal(signum)} on {node}"
    told = [fields.get(name) for name in ("node", "leader", "missing", "reason", "why", "after")]
    return ": ".join(str(word) for word in told if word)


def _join(ranks: object) -> str:
    shown = [str(rank) for rank in ranks] if isinstance(ranks, Sequence) else []
    return ", ".join(shown[:4]) + (" ..." if len(shown) > 4 else "")
