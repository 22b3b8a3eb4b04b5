"""What do the files of a run directory say? They are decoded as what anybody may have written: typed and bounded.

    >>> parse_events(b'{"event": "node_lost", "node": "node03"}').lines
    ({'event': 'node_lost', 'node': 'node03'},)
    >>> parse_events(b'{"event": "started", "pid": "x"}' + bytes([10])).num_damaged
    1

What does not fit is left out and counted: nothing acts on it. Every parser is pure, and raises nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from allranks.model.finding import Verdict

MAX_EVENTS_BYTES = 64 << 20
"""Of events.jsonl: 131,072 ranks that end in five generations take 60 MB."""
MAX_BYTES = 8 << 20
"""Of any other file: a verdict on 16,384 nodes takes 1 MB."""
MAX_ROLL_CALL_BYTES = 64 << 20
MAX_DAMAGED = 10_000
"""So many lines that are no events: the rest is not read."""
MAX_TIME_S = 4e9
"""Unix time of the year 2096."""

Name = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=128 << 10)]
"""As long as the kernel lets an argument be (MAX_ARG_STRLEN)."""
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
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


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A line of events.jsonl."""

    time_s: TimeS | None = None


class Started(Event, frozen=True):
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


class TookOver(Event, frozen=True):
    """Another agent leads."""

    leader: Name
    generation: Count
    after: Name = ""


class Paused(Event, frozen=True):
    """A leader waits for nodes."""

    leader: Name
    generation: Count


class Restarting(Event, frozen=True):
    """The ranks begin again."""

    generation: Count
    leader: Name = ""
    lost_s: TimeS | None = None
    is_tracked: bool = False
    checkpoint: Count | None = None


class Judged(Event, frozen=True):
    """A finding of the guard."""

    generation: Count = 0
    cause: Name = ""
    node: Name | None = None
    ranks: Ranks = ()


class AgentEnded(Event, frozen=True):
    """An agent was killed, as the process beside it has seen."""

    node: Name
    pid: Pid | None = None
    signal: SignalNumber | None = None
    oom_kills: Count | None = None
    is_oom: bool = False


class Interrupted(Event, frozen=True):
    """An agent got a signal from outside."""

    signum: SignalNumber
    node: Name = ""


class Ended(Event, frozen=True):
    """The job is over."""

    exit_code: ExitCode
    leader: Name = ""
    is_cut_off: bool = False


class OfLeader(Event, frozen=True):
    """What a leader says of itself."""

    leader: Name
    generation: Count = 0


class OfNode(Event, frozen=True):
    """What a leader says of a node."""

    node: Name


_EVENTS: dict[str, type[Event]] = {
    "started": Started, "took_over": TookOver, "paused": Paused, "restarting": Restarting, "verdict": Judged,
    "agent_ended": AgentEnded, "interrupted": Interrupted, "ended": Ended, "minority": OfLeader, "node_lost": OfNode,
}  # fmt: skip


class _Head(msgspec.Struct, frozen=True):
    event: str


@dataclass(frozen=True, slots=True)
class Events:
    """What events.jsonl says."""

    lines: tuple[dict[str, Any], ...] = ()
    """Of the events in `_EVENTS`, with fields of the right types."""
    num_damaged: int = 0
    """Lines that are no events, or have impossible fields."""
    num_unknown: int = 0
    """Events that nobody reads, and those of a newer version."""


def parse_events(data: bytes, *, until: str = "") -> Events:
    """Return the events of a file, all or up to the first one of that name."""
    lines, num_damaged, num_unknown = list[dict[str, Any]](), 0, 0
    at = 0
    while at < len(data) and num_damaged < MAX_DAMAGED:
        end = data.find(b"\n", at)
        raw, is_whole = data[at : end if end >= 0 else None], end >= 0
        at = end + 1 if is_whole else len(data)
        if not raw.strip():
            continue
        head = _decode(raw, type=_Head)
        if head is not None and head.event not in _EVENTS:
            num_unknown += 1
            continue
        known = _decode(raw, type=_EVENTS[head.event]) if head is not None else None
        if known is None:
            num_damaged += is_whole  # the last line may be half written
            continue
        assert head is not None
        lines.append({"event": head.event} | _fields_of(known, raw))
        if head.event == until:
            break
    return Events(tuple(lines), num_damaged, num_unknown)


def _fields_of(event: Event, raw: bytes) -> dict[str, Any]:
    """Return the fields that a line has, of those that its event may have: a default is no word of the line."""
    told = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return {name: getattr(event, name) for name in event.__struct_fields__ if name in told}


def parse_verdict(data: bytes) -> Verdict | None:
    """Return a verdict; None if this is none."""
    verdict = _decode(data[: MAX_BYTES + 1], type=Verdict)
    if verdict is None or not 0 <= verdict.exit_code <= 255 or not 0 <= verdict.attempt < 1 << 31:
        return None
    ranks = [rank for finding in verdict.findings for rank in (*finding.ranks, *finding.victims)]
    return verdict if all(0 <= rank < 1 << 24 for rank in ranks) else None


class _Card(msgspec.Struct):
    host: Name


class _RollCall(msgspec.Struct):
    cards: dict[Annotated[str, Meta(pattern=r"^[0-9]{1,9}$")], _Card]


def parse_hosts(data: bytes) -> tuple[str, ...] | None:
    """Return the nodes of a roll call, in the order of their numbers; None if this is none."""
    told = _decode(data, type=_RollCall)
    return None if told is None else tuple(told.cards[number].host for number in sorted(told.cards, key=int))


class _Variable(msgspec.Struct):
    name: Name
    value: Text


def parse_environment(data: bytes) -> dict[str, str]:
    """Return the variables of an env.json; none if this is none."""
    return {row.name: row.value for row in _decode(data, type=list[_Variable]) or ()}


def _decode(data: bytes, *, type: type[T]) -> T | None:  # noqa: A002  (msgspec's word)
    try:
        return msgspec.json.decode(data, type=type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
