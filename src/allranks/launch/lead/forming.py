"""Between two generations: which checkpoint is there, which nodes take part next, and as which ranks? No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.launch import events
from allranks.launch.events import Effect
from allranks.launch.lead.course import ANSWER_S, NOTICE_S, Terms
from allranks.launch.lead.generation import Generation
from allranks.launch.lead.group import make_group
from allranks.launch.lead.members import Members
from allranks.launch.lead.outcome import describe_pause
from allranks.model.past import Past
from allranks.wire.protocol import Plan


@dataclass(slots=True)
class Forming:
    """The phases forming and paused."""

    terms: Terms
    members: Members
    is_looking: bool = False
    """Whether the driver has not told yet which checkpoint is there."""
    until_s: float = 0.0
    """The answer is waited for until then."""
    capacity_until_s: float | None = None
    """Nodes are waited for until then; None: they are not, or the generation has begun."""
    next_notice_s: float = 0.0

    def look(self, now_s: float) -> Effect:
        """Begin: ask for the newest checkpoint."""
        self.is_looking, self.until_s = True, now_s + ANSWER_S
        return events.FindCheckpoint()

    def sleep(self, slept_s: float) -> None:
        """The leader's process did not run: nobody was late."""
        self.until_s += slept_s
        if self.capacity_until_s is not None:
            self.capacity_until_s += slept_s

    @property
    def num_nodes(self) -> int:
        """Nodes that could take part."""
        return len(self.members.here) + len(self.members.waiting)

    @property
    def has_enough(self) -> bool:
        """Whether there are enough of them."""
        return self.num_nodes >= self.terms.min_nodes

    def pause(self, now_s: float) -> list[Effect]:
        """Wait for more nodes; a pause that goes on after a look for a checkpoint keeps its deadline."""
        if self.capacity_until_s is not None:
            return []
        self.capacity_until_s, self.next_notice_s = now_s + self.terms.capacity_s, now_s
        fields = {"nodes": self.num_nodes, "at_least": self.terms.min_nodes}
        return [events.Record(event="paused", fields=fields)]

    def notice(self, now_s: float) -> list[Effect]:
        """Say every NOTICE_S what is waited for."""
        terms, until_s = self.terms, self.capacity_until_s
        if until_s is None or now_s < self.next_notice_s:
            return []
        self.next_notice_s = now_s + NOTICE_S
        text = describe_pause(len(self.members.here), terms.min_nodes, until_s - now_s, terms.capacity_s)
        return [events.Say(text=text)]

    def make_plans(self, last: Generation, past: Past) -> dict[int, Plan]:
        """Return the Plan of each node that is here, by its index in the job.

        Raises:
            SetupError: the backend cannot work on these nodes.
        """
        terms, nodes = self.terms, self.members.here | self.members.waiting
        return make_group(
            {index: node.card for index, node in nodes.items()},
            leader=terms.own,
            can_change_leader=terms.can_change_leader,
            addresses={index: node.address for index, node in nodes.items()},
            electors=self.members.electors,
            past=past,
            wanted_backend=terms.wanted_backend,
            attempt=terms.attempt,
            store_address=terms.store_address,
            store_port=terms.store_port,
            generation=last.number + 1,
            max_restarts=terms.max_restarts,
        )
