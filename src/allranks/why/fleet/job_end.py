"""How one job ended, and which node was at fault: one line of the file that `allranks why --epilog --to` fills. Pure.

    >>> end = JobEnd(version=1, time_s=1795858874.0, job="12", state="COMPLETED", nodes="node[01-02]")
    >>> parse_ends(encode_end(end)).ends == (end,)
    True

A line has no text of the job's logs, so that all users may read the file. A healthy job has a line, too: without it
nobody could tell how often a node ran, and so how much of its share of failures is chance.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta

from allranks.model.errors import HostlistError
from allranks.model.finding import Confidence, Finding, Severity
from allranks.model.foreign import Unreadable, decode_json
from allranks.model.hostlist import expand_hosts, is_host_name
from allranks.report.readback import Count, Name, TimeS

VERSION = 1
MAX_LINE_BYTES = 1 << 20
"""The names of 16,384 nodes, if none of them can be folded, take less."""
MAX_FILE_BYTES = 1 << 30
"""Two million jobs; what comes behind it is counted as one damaged line."""
MAX_DAMAGED = 100_000
"""After so many damaged lines this is another kind of file: the rest is not read."""


class NodeFault(msgspec.Struct, frozen=True, kw_only=True):
    """The culprit of a job, or of one of its restarts."""

    cause: Name
    """Id and name: `AR105 gpu-hardware`."""
    node: Name
    """One node; a fault of several nodes, or of none, accuses none."""
    confidence: Confidence


class JobEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a job ended. Fields may be added; none is changed or removed within one `version`."""

    version: Annotated[int, Meta(ge=VERSION, le=VERSION)]
    time_s: TimeS
    """Unix time at which it was written."""
    job: Name
    """`12`, `12_4` for a task of an array, or the id of a run without SLURM."""
    restarts: Count = 0
    """How often SLURM had put the job back into the queue."""
    user: Name = ""
    state: Name = ""
    """SLURM's: COMPLETED, FAILED, NODE_FAIL ..."""
    nodes: Annotated[str, Meta(max_length=MAX_LINE_BYTES)] = ""
    """Host list of the nodes that it had."""
    is_failed: bool = False
    faults: Annotated[tuple[NodeFault, ...], Meta(max_length=64)] = ()
    unexplained: Annotated[str, Meta(max_length=300)] = ""
    """Why its logs were not read: `no log was found`; empty if they were, or if it ended well."""


@dataclass(frozen=True, slots=True)
class ReadEnds:
    """What a file says."""

    ends: tuple[JobEnd, ...] = ()
    num_damaged: int = 0
    """Lines that are no ends of jobs: cut, damaged, of another program or of a newer version."""


def encode_end(end: JobEnd) -> bytes:
    """Return an end as one line."""
    return msgspec.json.encode(end) + b"\n"


def parse_ends(data: bytes) -> ReadEnds:
    """Return the ends in the bytes of a file; it raises nothing, whatever they are."""
    return read_ends(io.BytesIO(data))


def read_ends(file: BinaryIO) -> ReadEnds:
    """Return the ends in an open file, which is read line by line."""
    ends: list[JobEnd] = []
    num_damaged, left, is_rest = 0, MAX_FILE_BYTES, False
    while left > 0 and num_damaged < MAX_DAMAGED and (line := file.readline(min(left, MAX_LINE_BYTES))):
        left -= len(line)
        was_rest, is_rest = is_rest, not line.endswith(b"\n")
        if was_rest or not line.strip():  # the rest of a line that is too long was counted with its beginning
            continue
        end = parse_end(line)
        if end is None:
            num_damaged += 1
        else:
            ends.append(end)
    return ReadEnds(tuple(ends), num_damaged)


def parse_end(line: bytes) -> JobEnd | None:
    """Return the end in one line; None if it has none."""
    try:
        end = decode_json(line, JobEnd)
        if end.nodes:
            expand_hosts(end.nodes)
    except (Unreadable, HostlistError):
        return None
    return end if isinstance(end, JobEnd) else None


def find_faults(findings: tuple[Finding, ...]) -> tuple[NodeFault, ...]:
    """Return the faults of single nodes in the findings of one job, each once.

    A warning counts, too: it may be a fault that a restart has cured. What is undecided accuses nobody.
    """
    faults = {
        finding.node: NodeFault(cause=finding.cause, node=finding.node, confidence=finding.confidence)
        for finding in reversed(findings)
        if finding.node
        and is_host_name(finding.node)
        and finding.severity is not Severity.NOTE
        and finding.confidence is not Confidence.UNDECIDED
    }
    return tuple(reversed(faults.values()))
