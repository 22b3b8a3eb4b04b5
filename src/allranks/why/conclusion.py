"""What one reading of the logs comes to, before all of them are held against each other."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.causes.cause import Cause
from allranks.causes.sign import Role
from allranks.model.finding import Confidence
from allranks.why.logs.line import Line
from allranks.why.people import Culprit


@dataclass(frozen=True, slots=True)
class Conclusion:
    """One cause, and what speaks for it."""

    cause: type[Cause]
    role: Role
    """How much the strongest line proves."""
    confidence: Confidence
    culprit: Culprit
    message: str
    evidence: tuple[Line, ...]
    """The lines that say so, the first one first."""
    victims: frozenset[int] = frozenset()
    ask: str = ""
    """What would tell more: what to run, where to look."""
    has_context: bool = False
    """Lines that prove nothing alone support it: of two that begin with the same line it comes first."""
    weight: int = 0
    """Of two conclusions with the same role the one with more comes first, before the earlier one."""

    @property
    def first(self) -> Line:
        """The line that stands for it when it is asked what came first."""
        return self.evidence[0]
