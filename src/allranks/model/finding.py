"""Findings with their evidence, and the verdict of a job."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM
from typing import Any

import msgspec

_SIGNALS = {128 + number: number.name for number in (SIGHUP, SIGINT, SIGQUIT, SIGTERM)}


class Severity(StrEnum):
    """How bad it is."""

    FAIL = "fail"
    """The job cannot run so."""
    WARN = "warn"
    """The job runs; it may slow down or fail later."""
    NOTE = "note"
    """No failure, for example in the answer of `allranks why`."""


class Status(StrEnum):
    """What came out of looking for one cause on one node, or between nodes."""

    PASS = "pass"  # noqa: S105
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"
    """There is nothing to look at here: no GPU, no permission; the reason says what."""
    UNKNOWN = "unknown"
    """It was looked at, and cannot be told."""
    CRASH = "crash"
    """The check itself broke: a bug of ours, never taken for a pass."""


class Confidence(StrEnum):
    """How sure we are that this is the culprit."""

    CERTAIN = "certain"
    LIKELY = "likely"
    UNDECIDED = "undecided"

    @cached_property
    def doubt(self) -> int:
        """How unsure that is: 0 of what is certain."""
        return list(Confidence).index(self)

    def at_most(self, most: Confidence) -> Confidence:
        """Return this, or `most` if that is less sure."""
        return max(self, most, key=lambda sureness: sureness.doubt)


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was seen, and where."""

    seen: str
    """As observed; may have several lines (a traceback)."""
    source: str | None = None
    """`path:line`, or what was measured."""


def fill_cause_id(record: Any) -> None:
    """Set `cause_id` from `cause`: the only place that takes a label apart, also for what an earlier version wrote."""
    msgspec.structs.force_setattr(record, "cause_id", record.cause.partition(" ")[0])


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One observed instance of a cause."""

    cause: str
    """Id and name of the cause, `AR590 user-code-error`."""
    cause_id: str = ""
    """The id alone, for programs; always that of `cause`."""
    severity: Severity
    confidence: Confidence
    node: str | None = None
    """The culprit; several nodes folded, `node[01-03]`, two that cannot be told apart `node01 or node02`."""
    interface: str | None = None
    """The culprit's interface, where it is one."""
    ranks: tuple[int, ...] = ()
    subject: str | None = None
    """What else is the culprit, as what was seen calls it: `GPU 0000:10:1c`, `address 127.0.1.1`, `process 4711`."""
    message: str
    """One line: what happened."""
    evidence: tuple[Evidence, ...] = ()
    fix: str | None = None
    ask: str | None = None
    """What would tell more, where this is not certain: what to run, where to look."""
    notes: tuple[str, ...] = ()
    """What else is known of who failed, one line each: `all 4 ranks failed alike`."""
    victims: tuple[int, ...] = ()
    """Ranks that merely failed or were ended because of it."""
    waiting: str | None = None
    """Nodes that merely waited because of it, folded."""

    def __post_init__(self) -> None:
        fill_cause_id(self)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came out of looking for one cause on one node: a cell of the table."""

    cause: str
    """Id and name of the cause."""
    cause_id: str = ""
    """The id alone, for programs; always that of `cause`."""
    node: str
    status: Status
    note: str = ""
    """Why it was skipped, what was seen."""

    def __post_init__(self) -> None:
        fill_cause_id(self)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of one job, culprit first, and the exit code that follows."""

    job: str
    attempt: int
    exit_code: int
    findings: tuple[Finding, ...] = ()

    @property
    def ended_by(self) -> str | None:
        """Name of the signal from outside that ended a job without a failure, from its exit code; None if none did."""
        has_failed = any(finding.severity is Severity.FAIL for finding in self.findings)
        return None if has_failed else _SIGNALS.get(self.exit_code)

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
