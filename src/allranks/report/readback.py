"""What do the files of a run directory say? They are decoded as what anybody may have written: typed and bounded.

    >>> parse_events(b'{"event": "node_lost", "node": "node03"}').lines
    ({'event': 'node_lost', 'node': 'node03'},)
    >>> parse_events(b'{"event": "started", "pid": "x"}' + bytes([10])).num_damaged
    1

What does not fit is left out and counted: nothing acts on it. Every parser is pure, and raises nothing.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec
from msgspec import Meta

from allranks.model.finding import Evidence, Finding, Verdict
from allranks.model.foreign import Unreadable, decode_json
from allranks.model.job_status import JobStatus
from allranks.model.ledger import Ledger
from allranks.model.setting import Setting
from allranks.model.traffic import Traffic

MAX_EVENTS_BYTES = 512 << 20
"""Of events.jsonl: 131,072 ranks that end in 30 generations take 400 MB."""
MAX_LINE_BYTES = 16 << 20
"""The names of 16,384 nodes take 1 MB."""
MAX_EVENTS = 200_000
"""Of those that are read: each of 16,384 nodes is lost ten times."""
MAX_BYTES = 8 << 20
"""Of any other file: a verdict on 16,384 nodes takes 1 MB."""
MAX_FINDINGS, MAX_EVIDENCE, MAX_TEXT = 64, 64, 64 << 10
"""Of a verdict: findings, pieces of evidence of one, and characters of one text."""
MAX_ROLL_CALL_BYTES = 64 << 20
MAX_STATUS_BYTES = 1 << 20
"""Of status.json and goodput.json: a leader writes at most 64 KB."""
MAX_DAMAGED = 10_000
"""So many lines that are no events: the rest is not read."""
MAX_TIME_S = 4e9
"""Unix time of the year 2096."""

Name = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=128 << 10)]
"""As long as the kernel lets an argument be (MAX_ARG_STRLEN)."""
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
"""Users give `--max-restarts 1000000000`."""
Rank = Annotated[int, Meta(ge=0, lt=1 << 24)]
Pid = Annotated[int, Meta(ge=1, lt=1 << 31)]
"""An agent may be the first process of a container."""
TimeS = Annotated[float, Meta(ge=0, le=MAX_TIME_S)]
SignalNumber = Annotated[int, Meta(ge=1, le=64)]
ExitCode = Annotated[int, Meta(ge=0, le=255)]
Names = Annotated[tuple[Name, ...], Meta(max_length=1 << 17)]
Ranks = Annotated[tuple[Rank, ...], Meta(max_length=1 << 22)]

T = TypeVar("T")

# Events that are read, with what is read of them. All fields but those that name somebody have defaults: a run may be
# of an older version.


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A line of events.jsonl."""

    time_s: TimeS | None = None


class JobStarted(RunEvent, frozen=True):
    """The first ranks begin; from the leader's agent."""

    members: Names = ()
    command: Annotated[tuple[Text, ...], Meta(max_length=1 << 16)] = ()
    cwd: Text = ""
    job: Name = ""
    generation: Count = 0
    max_restarts: Count | None = None
    pid: Pid | None = None
    start_ticks: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    boot_id: Name = ""


class TookOver(RunEvent, frozen=True):
    """Another agent leads."""

    leader: Name
    generation: Count
    after: Name = ""


class Paused(RunEvent, frozen=True):
    """A leader waits for nodes."""

    leader: Name
    generation: Count


class Restarting(RunEvent, frozen=True):
    """The ranks begin again."""

    generation: Count
    leader: Name = ""
    lost_s: TimeS | None = None
    is_tracked: bool = False
    checkpoint: Count | None = None


class GuardFinding(RunEvent, frozen=True):
    """A finding of the guard."""

    generation: Count = 0
    cause: Name = ""
    node: Name | None = None
    ranks: Ranks = ()
    confidence: Name = ""
    message: Text = ""


class AgentEnded(RunEvent, frozen=True):
    """An agent was killed, as the process beside it has seen."""

    node: Name
    pid: Pid | None = None
    signal: SignalNumber | None = None
    oom_kills: Count | None = None
    is_oom: bool = False


class AgentInterrupted(RunEvent, frozen=True):
    """An agent got a signal from outside."""

    signum: SignalNumber
    node: Name = ""


class JobEnded(RunEvent, frozen=True):
    """The job is over."""

    exit_code: ExitCode
    leader: Name = ""
    is_cut_off: bool = False


class OfLeader(RunEvent, frozen=True):
    """What a leader says of itself."""

    leader: Name
    generation: Count = 0


class OfNode(RunEvent, frozen=True):
    """What a leader says of a node."""

    node: Name


class CheckpointWritten(RunEvent, frozen=True):
    """A session's checkpoint is complete, or a script without one has saved."""

    step: Count | None = None
    write_s: TimeS | None = None
    is_verified: bool = True
    """Older runs tell of sessions only."""
    optimizer_steps: Count | None = None
    save_s: TimeS | None = None


class StragglerNamed(RunEvent, frozen=True):
    """A rank is late most of the time."""

    rank: Rank
    node: Name = ""
    message: Text = ""


class HangSeen(RunEvent, frozen=True):
    """Ranks wait in a collective for long."""

    op: Name = ""
    for_s: TimeS = 0.0
    num_waiting: Count = 0
    ranks: Ranks = ()
    place: Name = ""


class NetworkEvent(Traffic, frozen=True):
    """What nodes send and how long steps wait for that."""

    time_s: TimeS | None = None


_EVENTS: dict[str, type[RunEvent | NetworkEvent]] = {
    "started": JobStarted, "took_over": TookOver, "paused": Paused, "restarting": Restarting, "verdict": GuardFinding,
    "agent_ended": AgentEnded, "interrupted": AgentInterrupted, "ended": JobEnded, "minority": OfLeader,
    "node_lost": OfNode, "network": NetworkEvent, "checkpoint": CheckpointWritten, "straggler": StragglerNamed,
    "hang": HangSeen,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunEvents:
    """What events.jsonl says."""

    lines: tuple[dict[str, Any], ...] = ()
    """Of the events in `_EVENTS`, with fields of the right types."""
    network: NetworkEvent | None = None
    """The newest one; a long job has thousands."""
    num_damaged: int = 0
    """Lines that are no events, or have impossible fields."""
    num_unknown: int = 0
    """Events that nobody reads, and those of a newer version."""


def parse_events(data: bytes, *, until: str = "") -> RunEvents:
    """Return the events of a file, all or up to the first one of that name."""
    return read_events(io.BytesIO(data), until=until)


def read_events(file: BinaryIO, *, until: str = "") -> RunEvents:
    """Return the events of an open file, as `parse_events`; it is read line by line, since a large job writes much."""
    lines, num_damaged, num_unknown = list[dict[str, Any]](), 0, 0
    network: NetworkEvent | None = None
    left = MAX_EVENTS_BYTES
    while left > 0 and num_damaged < MAX_DAMAGED and len(lines) < MAX_EVENTS:
        raw = file.readline(min(left, MAX_LINE_BYTES))
        if not raw:
            break
        left -= len(raw)
        if not raw.strip():
            continue
        told = _decode(raw, dict[str, msgspec.Raw]) or {}
        event = _decode(told.get("event", b""), str)
        if event is not None and event not in _EVENTS:
            num_unknown += 1
            continue
        known = _decode(raw, _EVENTS[event]) if event is not None else None
        if event is None or known is None:
            num_damaged += raw.endswith(b"\n")  # the last line may be half written
            continue
        if isinstance(known, NetworkEvent):
            network = known
            continue
        # A default and a null are no words of the line: a reader may ask whether it has said something.
        values = {name: getattr(known, name) for name in known.__struct_fields__ if name in told}
        fields = {name: value for name, value in values.items() if value is not None}
        lines.append({"event": event} | fields)
        if event == until:
            break
    return RunEvents(tuple(lines), network, num_damaged, num_unknown)


def parse_verdict(data: bytes) -> Verdict | None:
    """Return a verdict; None if this is none."""
    verdict = _decode(data[: MAX_BYTES + 1], Verdict)
    if verdict is None or not 0 <= verdict.exit_code <= 255 or not 0 <= verdict.attempt < 1 << 31:
        return None
    ranks = [rank for finding in verdict.findings for rank in (*finding.ranks, *finding.victims)]
    if not all(0 <= rank < 1 << 24 for rank in ranks):
        return None
    findings = verdict.findings[:MAX_FINDINGS]
    return msgspec.structs.replace(verdict, job=verdict.job[:MAX_TEXT], findings=tuple(map(_shorten, findings)))


def parse_job_status(data: bytes) -> JobStatus | None:
    """Return what a job did; None if this is none."""
    return _decode(data, JobStatus)


def parse_ledger(data: bytes) -> Ledger | None:
    """Return the ledger of a job; None if this is none."""
    return _decode(data, Ledger)


def _shorten(finding: Finding) -> Finding:
    """Return a finding whose texts are no longer than those that allranks writes."""
    names = ("cause", "node", "interface", "subject", "message", "fix", "ask", "waiting")
    told = {name: getattr(finding, name) for name in names}
    evidence = finding.evidence[:MAX_EVIDENCE]
    return msgspec.structs.replace(
        finding,
        **{name: text[:MAX_TEXT] for name, text in told.items() if text},
        notes=tuple(note[:MAX_TEXT] for note in finding.notes[:MAX_EVIDENCE]),
        evidence=tuple(
            Evidence(seen=shown.seen[:MAX_TEXT], source=shown.source and shown.source[:MAX_TEXT]) for shown in evidence
        ),
    )


class _Card(msgspec.Struct):
    host: Name


class _RollCall(msgspec.Struct):
    cards: dict[Annotated[str, Meta(pattern=r"^[0-9]{1,9}$")], _Card]


def parse_hosts(data: bytes) -> tuple[str, ...] | None:
    """Return the nodes of a roll call, in the order of their numbers; None if this is none."""
    told = _decode(data, _RollCall)
    return None if told is None else tuple(told.cards[number].host for number in sorted(told.cards, key=int))


class _Variable(msgspec.Struct):
    name: Name
    value: Text
    reason: Text = ""
    source: Text = ""


def parse_settings(data: bytes) -> tuple[Setting, ...]:
    """Return the variables of an env.json, with their reasons; none if this is none."""
    rows = _decode(data, list[_Variable]) or ()
    return tuple(Setting(row.name, row.value, reason=row.reason, source=row.source) for row in rows)


def parse_environment(data: bytes) -> dict[str, str]:
    """Return the variables of an env.json; none if this is none."""
    return {setting.name: setting.value for setting in parse_settings(data)}


def _decode(data: bytes | msgspec.Raw, kind: type[T]) -> T | None:
    try:
        return decode_json(data, kind)
    except Unreadable:
        return None
