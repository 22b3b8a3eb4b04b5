"""An agent without its leader: whom does it look for, and when does it lead itself? Pure.

    lost            after a connection ended: the agent looks for its leader, and for the successors in the Plan
    RETURN_S later  the first successor accepts others that have lost the leader; the second one OPENS_S later, ...
    majority        of the members, with this agent: it leads (launch.lead.members)
    SEEK_S          nobody was found: the agent ends its workers, and leaves

A leader on whose node srun runs may live on without the majority (launch.lead.members), and where its machine is lost,
SLURM does not learn the job's end. So whoever succeeds it must have proof that only its agent has ended: for PROVEN_S,
its machine refuses connections to the agent's port, and srun accepts one (launch.loop).

Whoever still hears its leader, or is not to succeed it yet, refuses the others, and they try again. An agent follows
the first one that accepts it, and no other while that connection lasts. After Resign nobody waits for the old leader.

An agent that found no leader, and all that a cut-off leader has led, ask the run directory whether others go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from allranks.guard.presence import UNLED
from allranks.launch import events
from allranks.launch.events import Effect
from allranks.launch.lead.course import RETURN_S
from allranks.launch.lead.members import has_majority
from allranks.wire.protocol import Contact, Plan, Srun

AGENT_ENDED = "agent_ended"
"""The event that an agent was killed (launch.sweeper)."""
OPENS_S = 1.0
"""Seconds between two successors: the first one that is there has the time to be found by all."""
PROVEN_S = 3.0
"""Seconds until all nodes see in the run directory what a leader wrote before it ended: it may have gone on without
them."""
SEEK_S = 20.0
"""Seconds to look for a leader: all successors have had their turn by then."""
UNLED_S = 10.0
"""After so many seconds the last leader may have left, because it found itself cut off."""
RETRY_S = 2.0
"""Seconds beyond RETURN_S, where nobody can succeed the leader."""


@dataclass(slots=True, kw_only=True)
class Succession:
    """From the loss of a leader to the next one."""

    own: int
    """Index of this node in the job."""
    leader: int
    """The one that is lost."""
    plan: Plan
    """Of this agent's generation."""
    confirmed: int
    """The newest generation that all of its members have begun, as far as this agent knows."""
    reason: str
    lost_s: float
    has_resigned: bool = False
    was_stopped: bool = False
    """Whether the leader had ordered the workers' end: it may have left since, because it found itself cut off."""
    succeeded: frozenset[int] = frozenset()
    """Leaders of this generation before that one: whoever has followed another does not go back to them."""
    joined: dict[int, events.Joined] = field(default_factory=dict)
    """Agents that were accepted, by node."""
    proven_s: float | None = None
    """Since when the leader's agent is known to have ended, where that must be proven."""
    knocked: events.Knocked | None = None
    """What its machine answered last."""
    is_outdated: bool = False
    """Whether another agent knows a newer generation: this one can follow, but not lead."""

    @property
    def contacts(self) -> tuple[Contact, ...]:
        """Agents to look for: the leader, unless it has resigned, and its successors."""
        skipped = {self.own, *self.succeeded, *([self.leader] if self.has_resigned else [])}
        can_change = self.has_resigned or self.is_replaceable
        reachable = [
            successor for successor in self.plan.successors if successor.port and successor.node not in skipped
        ]
        return tuple(successor for successor in reachable if can_change or successor.node == self.leader)

    @property
    def is_replaceable(self) -> bool:
        """Whether the other members are a majority without the leader, and restarts are allowed."""
        others = set(self.plan.nodes) - self._leaders
        has_heirs = len(self.plan.successors) > 1
        return has_heirs and self.plan.max_restarts > 0 and has_majority(others, self._electors)

    @property
    def gives_up_s(self) -> float:
        """When this agent stops looking."""
        is_silent = self.knocked is not None and self.knocked.listens is None
        return self.lost_s + (SEEK_S if self.is_replaceable and not is_silent else RETURN_S + RETRY_S)

    @property
    def srun(self) -> Srun | None:
        """Where srun is beside the leader: whoever leads next must prove that only the leader's agent has ended."""
        srun = self.plan.srun
        return srun if srun is not None and srun.node == self.leader and not self.has_resigned else None

    def weigh(self, knocked: events.Knocked) -> None:
        """Take in what the leader's machine answers."""
        self.knocked = knocked
        if knocked.listens is not False:
            self.proven_s = None
        elif self.proven_s is None:
            self.proven_s = knocked.now_s

    def describe(self) -> str:
        """Return why the leader is lost, and what its machine has answered since."""
        if self.knocked is None:
            return self.reason
        answers = {True: "its port answers", False: "its port is closed", None: "its machine does not answer"}
        return f"{self.reason}; {answers[self.knocked.listens]}"

    def is_open(self, now_s: float) -> bool:
        """Whether this agent accepts others."""
        heirs = [
            successor.node
            for successor in self.plan.successors
            if successor.node not in self._leaders and successor.port
        ]
        if self.is_outdated or self.own not in heirs or not self.is_replaceable:
            return False
        if self.srun is not None and (self.proven_s is None or now_s < self.proven_s + PROVEN_S):
            return False
        return now_s >= self.lost_s + (0.0 if self.has_resigned else RETURN_S) + OPENS_S * heirs.index(self.own)

    def join(self, joined: events.Joined) -> list[Effect]:
        """Another agent has lost the leader, too: accept it, or not."""
        card, node, why = joined.card, joined.card.node_index, ""
        if card.generation > self.plan.generation:
            self.is_outdated = True
            why = f"its generation {card.generation} is newer than that of this agent"
        elif node is None or node == self.own or node not in self.plan.nodes or card.generation < 0:
            why = f"it has no ranks in generation {self.plan.generation}"
        if why or node is None:
            return [events.Reject(connection=joined.connection, reason=why)]
        before, self.joined[node] = self.joined.get(node), joined
        return [events.Reject(connection=before.connection, reason="it has connected again")] if before else []

    def lead(self, now_s: float) -> events.Lead:
        """Return what makes this agent the leader of those that have joined it."""
        joined, self.joined = self.joined, {}
        unled_s = now_s - self.lost_s
        # A process that is killed closes its connections.
        may_have_left = self.was_stopped or "timed out" in self.reason or unled_s >= UNLED_S
        reason = f"{self.reason}; {UNLED} {unled_s:.0f} s" if may_have_left else self.reason
        plan = msgspec.structs.replace(self.plan, electors=self._electors[:-1])
        return events.Lead(joined=joined, plan=plan, lost=(self.leader, reason), has_resigned=self.has_resigned)

    def let_go(self, reason: str) -> list[Effect]:
        """Disconnect those that have joined: this agent does not lead."""
        joined, self.joined = self.joined, {}
        return [events.Reject(connection=joiner.connection, reason=reason) for joiner in joined.values()]

    def withdraw(self, connection: int) -> None:
        """An agent that had joined is gone."""
        self.joined = {node: joiner for node, joiner in self.joined.items() if joiner.connection != connection}

    @property
    def can_lead(self) -> bool:
        """Whether those that have joined are a majority, together with this agent."""
        return not self.is_outdated and has_majority({self.own, *self.joined}, self._electors)

    @property
    def _leaders(self) -> set[int]:
        """The one that is lost, and those before it."""
        return {self.leader, *self.succeeded}

    @property
    def _electors(self) -> tuple[tuple[int, ...], ...]:
        is_confirmed = self.confirmed >= self.plan.generation
        return (self.plan.nodes,) if is_confirmed else (*self.plan.electors, self.plan.nodes)


def why_not_lead(told: Sequence[Mapping[str, Any]], leader: str) -> str | None:
    """Return why events.jsonl says that nobody may succeed a leader; None: somebody may."""
    if has_ended(told):
        return "the job has ended"
    if find_events(told, "minority", leader=leader):
        return f"{leader} had gone on without the majority of the nodes"
    return None


def is_led_elsewhere(told: Sequence[Mapping[str, Any]], generation: int, leader: str) -> bool:
    """Whether events.jsonl says that another leader goes on with the job, or that the job has ended.

    Args:
        told: its lines.
        generation: the last one of the agent that asks.
        leader: name of the node that has led it.
    """
    began = max((at for at, line in enumerate(told) if find_events([line], "took_over", leader=leader)), default=0)
    others = [line for line in told[began:] if line.get("leader") != leader]
    led = [found["generation"] for event in ("took_over", "paused") for found in find_events(others, event)]
    begun = [found["generation"] for found in find_events(others, "restarting")]
    # A generation whose Plan the others did not get: they go on from the one before.
    is_own = find_events(told, "restarting", generation=generation, leader=leader)
    is_passed_over = is_own and find_events(others, "took_over", generation=generation - 1, after=leader)
    is_left_behind = max(led, default=-1) >= generation or max(begun, default=-1) > generation
    return bool(has_ended(told) or is_passed_over or is_left_behind)


def find_end(told: Sequence[Mapping[str, Any]], leader: str) -> Mapping[str, Any] | None:
    """Return what is known of how a leader's agent ended, since it has led; None where it was not killed, or unseen."""
    led = [at for at, event in enumerate(told) if find_events([event], "took_over", leader=leader)]
    ended = find_events(told[led[-1] if led else 0 :], AGENT_ENDED, node=leader)
    return ended[-1] if ended else None


def has_ended(told: Sequence[Mapping[str, Any]], **fields: int) -> bool:
    """Whether the job has ended so; what a leader that was cut off writes is not the job's end."""
    return bool(find_events(told, "ended", is_cut_off=False, **fields))


def find_events(told: Sequence[Mapping[str, Any]], event: str, **fields: object) -> list[Mapping[str, Any]]:
    """Return the lines of events.jsonl with this name and these fields."""
    wanted = {"event": event, **fields}.items()
    return [line for line in told if wanted <= line.items()]
