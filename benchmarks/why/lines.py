"""What somebody wrote, and what it tells of a fault. Frozen data, and the fields of wordings."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

Speaker = tuple[str, int]
"""rank, agent, stepd, kernel (each with its number of rank or node), srun, events (with 0)."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What a line tells of a fault."""

    fault: int
    """Index of the fault in the job."""
    causes: tuple[str, ...] = ()
    """Causes that it shows; several if it cannot tell which."""
    level: int = 0
    """2: it shows the cause itself. 1: it shows how the culprit ended, which fits these causes. 0: that may have other
    reasons, so nobody can be certain of the cause."""
    is_of_speaker: bool = True
    """Whether the culprit says it itself."""
    address: bool = False
    """It names the culprit's address and neither rank nor node."""


@dataclass(frozen=True, slots=True)
class Line:
    """What somebody wrote at a time, maybe several lines of text."""

    at_s: float
    speaker: Speaker
    text: str
    stream: str = "err"
    mark: Mark | None = None
    names: frozenset[str] = frozenset()
    """Fields that its wording shows: rank, node, local, pid ..."""
    attempt: int = 0
    stuck: tuple[Any, ...] = ()
    """What it says of a collective: (timeout, rank, group, seq, op) or (behind, rank, enqueued)."""


class Fields(dict[str, Any]):
    """Values of a wording's fields; times are written when they are asked for."""

    when: datetime
    nanos: int

    def __missing__(self, key: str) -> str:
        when = self.when
        match key:
            case "glog":
                return f"{when.month}{when:%d %H:%M:%S}.{when.microsecond:06d}{self.nanos:03d}"
            case "tlog":
                return f"{when:%m%d %H:%M:%S}.{when.microsecond // 1000:03d}000"
            case "iso":
                return f"{when:%Y-%m-%dT%H:%M:%S}"
            case "iso_s":
                return f"{when:%Y-%m-%d %H:%M:%S}"
            case "milli":
                raise KeyError(key)  # a number: set by the caller
            case "logms":
                return f"{when:%Y-%m-%d %H:%M:%S},{when.microsecond // 1000:03d}"
            case "torch_time":
                return f"{when:%Y-%m-%d_%H:%M:%S}"
            case "rfc":
                return f"{when:%a, %d %b %Y %H:%M:%S} +0000"
        raise KeyError(key)
