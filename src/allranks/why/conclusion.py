"""The conclusion of one reading of the logs, before all conclusions are combined."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.causes.cause import Cause, Role
from allranks.model.finding import Confidence
from allranks.why.logs.line import Line
from allranks.why.people import Culprit


@dataclass(frozen=True, slots=True)
class Conclusion:
    """One cause, and the evidence for it."""

    cause: Cause
    role: Role
    """How much the strongest line proves."""
    confidence: Confidence
    culprit: Culprit
    message: str
    evidence: tuple[Line, ...]
    """The lines that prove it, the earliest first."""
    victims: frozenset[int] = frozenset()
    ask: str = ""
    """What would give more evidence: what to run, where to look."""
    has_context: bool = False
    """Lines that support it but prove nothing alone: of two conclusions with the same first line, it comes first."""
    weight: int = 0
    """Of two conclusions with the same role, the one with the higher weight comes first, before the earlier one."""

    @property
    def first(self) -> Line:
        """The line that gives its time and place in the order."""
        return self.evidence[0]
