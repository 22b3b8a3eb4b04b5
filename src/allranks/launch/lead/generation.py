"""What a leader has decided, asked and ordered in one start of the workers. Data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from allranks.guard.guard_verdict import GuardVerdict
from allranks.launch.lead.recovery import Decision
from allranks.launch.queue.ending import Ending
from allranks.model.past import History
from allranks.wire.protocol import Order, Plan, Stop


@dataclass(slots=True)
class Generation:
    """One start of the workers: what is decided, asked and ordered, from its Plan to the next one."""

    plan: Plan
    began_s: float
    judged: GuardVerdict | None = None
    told_by_s: float | None = None
    """When the verdict is told at the latest; None: it has been, or there is none."""
    history: History | None = None
    """The job's before that verdict."""
    decision: Decision = field(default_factory=Decision)
    asked: Ending | None = None
    """Why all ranks were ordered to save and leave; None: they were not, or they are ended without that."""
    asked_until_s: float | None = None
    order: Order | None = None
    stop: Stop | None = None
    ahead_s: dict[int, float] = field(default_factory=dict)
    """By node: how far the leader's clock is ahead of that node's, by the age of the first end that it told."""
    ended_s: float = math.inf
    """When its workers were told to end."""
    is_cut_short: bool = False
    """Whether an agent that got a signal has ended its workers before anybody else did."""

    @property
    def number(self) -> int:
        """0, and one more after each restart."""
        return self.plan.generation
