"""What came out of looking for a cause, the finding that it stands for, and the functions that look.

failed(what="agent did not join").to_finding(find_cause("AR001"), node="node03", reader=card.reader)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from allranks.causes.cause import Cause
from allranks.model.card import Card
from allranks.model.finding import Confidence, Evidence, Finding, Severity, Status
from allranks.model.fix import ANYBODY, Reader


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out of looking at one card, or at all of them."""

    status: Status
    note: str = ""
    """One line for the table: why it was skipped, what was seen."""
    values: Mapping[str, object] = field(default_factory=dict)
    """What fills the cause's message and fix."""
    evidence: tuple[str, ...] = ()
    interface: str | None = None
    confidence: Confidence = Confidence.CERTAIN

    def to_finding(
        self,
        cause: Cause,
        *,
        node: str | None = None,
        reader: Reader = ANYBODY,
        ranks: Sequence[int] = (),
        waiting: str | None = None,
        victims: Sequence[int] = (),
    ) -> Finding:
        """Return the finding that an outcome of FAIL or WARN stands for.

        Args:
            reader: for whom its fix is.
        Raises:
            KeyError: message or fix ask for a value that the outcome does not have.
        """
        known = {name: value for name, value in (("node", node), ("interface", self.interface)) if value}
        values = known | dict(self.values)
        return Finding(
            cause=cause.label,
            severity=Severity.WARN if self.status is Status.WARN else Severity.FAIL,
            confidence=self.confidence,
            node=node,
            interface=self.interface,
            ranks=tuple(ranks),
            message=cause.message.format_map({"node": "the node"} | values),
            evidence=tuple(Evidence(seen=seen) for seen in self.evidence),
            fix=cause.fix.tell(reader, values),
            waiting=waiting,
            victims=tuple(victims),
        )


PASSED = Outcome(Status.PASS)


def skipped(reason: str) -> Outcome:
    """There is nothing to look at: no GPU, no permission."""
    return Outcome(Status.SKIP, reason)


def unknown(reason: str) -> Outcome:
    """It was looked at and cannot be told."""
    return Outcome(Status.UNKNOWN, reason)


def failed(*evidence: str, interface: str | None = None, **values: object) -> Outcome:
    """The cause is there, and the job cannot run so; `values` fill its message and fix."""
    return Outcome(Status.FAIL, values=values, evidence=evidence, interface=interface)


def warned(*evidence: str, interface: str | None = None, **values: object) -> Outcome:
    """The cause is there; the job can run all the same."""
    return Outcome(Status.WARN, values=values, evidence=evidence, interface=interface)


Alike: TypeAlias = "Mapping[str, str | None] | None"
"""What must be the same on all nodes, by what to call it. A value of None: could not be read there; a name that a node
lacks is "not set" there. None: nothing to compare on this node."""
Surveyed: TypeAlias = "Sequence[tuple[tuple[str, ...], Outcome]]"
"""The culprits (hosts of the cards) with each outcome that is not PASS."""


def _always_fail(_: str) -> Severity:
    return Severity.FAIL


class Checks(NamedTuple):
    """How a cause is looked for: pure functions of cards, so that the leader judges all nodes alike."""

    probe: Callable[[Card], Outcome | None] | None = None
    """Judges one node alone: limits, GPUs, disks; None: nothing to say of this node."""
    alike: Callable[[Card], Alike] | None = None
    """What must be the same on all nodes: the majority is right, the odd nodes are the culprits."""
    severity_of: Callable[[str], Severity] = _always_fail
    """How bad it is when the nodes differ in this key of `alike`."""
    survey: Callable[[Sequence[Card]], Surveyed] | None = None
    """Judges all nodes together, where it shows only when their cards lie side by side: the same name twice."""
