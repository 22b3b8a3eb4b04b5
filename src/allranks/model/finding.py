"""What was found: findings with their evidence, and the verdict of a job made of them."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """How bad it is."""

    FAIL = "fail"
    WARN = "warn"


class Confidence(StrEnum):
    """How sure we are that this is the culprit."""

    CERTAIN = "certain"
    LIKELY = "likely"
    UNDECIDED = "undecided"


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was seen, and where."""

    seen: str
    """As observed; may have several lines (a traceback)."""
    source: str | None = None
    """`path:line`, or what was measured."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One observed instance of a cause."""

    cause: str
    """Id and name of the catalogue, `AR590 user-code-error`."""
    severity: Severity
    confidence: Confidence
    node: str | None = None
    ranks: tuple[int, ...] = ()
    message: str
    """One line: what happened."""
    evidence: tuple[Evidence, ...] = ()
    fix: str | None = None
    victims: tuple[int, ...] = ()
    """Ranks that merely failed or were ended because of it."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of one job, culprit first, and the exit code that follows."""

    job: str
    attempt: int
    exit_code: int
    findings: tuple[Finding, ...] = ()

    def to_json(self) -> bytes:
        """JSON, indented for people who open the file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> Verdict:
        """Read what `to_json` wrote.

        Raises:
            msgspec.DecodeError: it is something else.
        """
        return msgspec.json.decode(text, type=cls)
