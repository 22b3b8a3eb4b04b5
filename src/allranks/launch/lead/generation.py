"""One start of the workers, as the leader has it: what is decided, asked and ordered. Data, and no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from allranks.guard.judged import Judged
from allranks.launch import events
from allranks.launch.events import Effect
from allranks.launch.lead.course import Reason
from allranks.launch.lead.recovery import Decision
from allranks.wire.protocol import Order, Plan, Stop


@dataclass(slots=True)
class Generation:
    """From one Plan to the next."""

    plan: Plan
    began_s: float
    judged: Judged | None = None
    decision: Decision | None = None
    asked: Reason | None = None
    """Why all ranks were ordered to save and leave; None: they were not, or they are ended without that."""
    asked_until_s: float | None = None
    order: Order | None = None
    stop: Stop | None = None
    ahead_s: dict[int, float] = field(default_factory=dict)
    """By node: how far the leader's clock is ahead of that node's, by the age of the node's first failure."""
    is_finished: bool = False
    """Whether the workers have completed all their steps."""
    is_cut_short: bool = False
    """Whether an agent that got a signal has ended its workers before anybody else did."""

    @property
    def number(self) -> int:
        """0, and one more after each restart."""
        return self.plan.generation

    @property
    def without(self) -> frozenset[int]:
        """Nodes that are left out of the next generation."""
        return self.decision.without if self.decision is not None else frozenset()

    def tell_again(self, node: int, generation: int) -> list[Effect]:
        """Return what an agent may have missed while it had lost its leader; it ignores what it knows.

        Args:
            node: its index in the job.
            generation: of its workers.
        """
        messages = [each for each in (self.order, self.stop) if each is not None]
        missed: list[Effect] = []
        if generation < self.number and node in self.plan.nodes:
            plan = msgspec.structs.replace(self.plan, node_index=self.plan.nodes.index(node))
            missed.append(events.Send(node=node, message=plan))
        return [*missed, *(events.Send(node=node, message=each) for each in messages)]
