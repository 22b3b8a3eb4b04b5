"""Did a rank fail because a disk was full? From its end, and from what its node tells of the disk's room. Pure.

    find_shortage(end, node)  -> Shortage, or None where nothing says so

Three things say it, the surest first:

- an exception of the rank, anywhere in its chain (a cause with the trait `ends_ranks`): ENOSPC, EDQUOT, or what a
  library makes of them. Libraries that hide the errno only make it likely, until the node tells of a full disk, too.
- an end that says nothing, or only that another process ended, while a disk that the rank writes to was full: its last
  words may have been for that disk.
- SIGBUS while /dev/shm or another disk was full: a page of a file in memory that could not be had.

An exception of the script's own stays what it is, whatever the disks do; a note then says that one was full.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from allranks.causes.book import all_causes, find_cause
from allranks.causes.cause import Cause, Sign, Trait
from allranks.guard.failure import describe, find_evidence
from allranks.guard.faults import DISK_FULL, SHM_TOO_SMALL
from allranks.guard.guard_verdict import name_fault
from allranks.guard.origin import killed_by
from allranks.guard.scene import NodeView
from allranks.model.fact_kind import FactKind
from allranks.model.finding import Confidence, Evidence, Finding, Severity
from allranks.model.hostlist import fold_hosts
from allranks.model.raised import last_printed
from allranks.model.room import FullPlace, Room
from allranks.model.safe_text import size_text
from allranks.report.text import count_of, fold_ranks
from allranks.wire.protocol import WorkerEnd

LATELY_S = 30.0
"""So long before the end of a rank its run directory may have been seen full: whoever dies of it makes room."""
SHM_FULL = 0.9
"""Of /dev/shm: what a batch needs is more than what is left then, so a SIGBUS is of that."""
SHM_ALL = 0.99
"""And this is what a rank may have died of that says nothing."""
_RUN_DIR, _SHM = "run directory", "/dev/shm"  # noqa: S108

_LOCAL = ("TMPDIR", _SHM)
_SAYS_NOTHING = re.compile(
    # torch 2.13, torch/multiprocessing/spawn.py; subprocess; concurrent/futures/process.py
    r"^(?:ProcessExitedException: process \d+ terminated with exit code \d+"
    r"|CalledProcessError: Command .* returned non-zero exit status \d+"
    r"|BrokenProcessPool: )",
    re.DOTALL,
)
"""Exceptions that only tell of the end of another process, whose own words may have been for the full disk."""
_NAMED = re.compile(r"(?:No space left on device|[Qq]uota exceeded): (?:'[^'\n]+' -> )?'([^'\n]+)'")
_QUOTA = re.compile(r"EDQUOT|[Qq]uota exceeded|errno = 122|os error 122")
_ORDER = (Confidence.CERTAIN, Confidence.LIKELY, Confidence.UNDECIDED)
_FIXES = {
    _RUN_DIR: "allranks clean deletes old runs; --log-dir takes another disk",
    "checkpoint directory": "delete old checkpoints, keep fewer (track(keep=2)), or use another disk "
    "(--checkpoint-dir)",
    "TMPDIR": "delete old files there, or set TMPDIR to a directory on another disk",
    "working directory": "delete what is not needed there, or start the job in a directory on another disk",
    _SHM: "delete files of dead processes there, or make it larger: mount -o remount,size=8G /dev/shm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A full disk, as the reason why a rank ended."""

    cause_id: str
    message: str
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    fix: str | None
    """None: what the cause says."""
    is_local: bool
    """Only this node is short of room, as far as is known: the job may run elsewhere."""


def find_shortage(end: WorkerEnd, node: NodeView) -> Shortage | None:
    """Return what a full disk did to a rank; None: nothing says that one ended it."""
    if killed_by(end):
        return _explain_bus_error(end, node) if killed_by(end) == signal.SIGBUS else None
    places = find_full(node, end)
    found = [(text, *known) for text in _exceptions(end) if (known := _find_in_exception(text)) is not None]
    if found:
        text, cause, sign, match = min(found, key=lambda shortage: _ORDER.index(shortage[2].confidence))
        confidence = sign.confidence
        if confidence is not Confidence.CERTAIN and places:
            confidence = Confidence.LIKELY if confidence is Confidence.UNDECIDED else Confidence.CERTAIN
        if confidence is not Confidence.UNDECIDED:
            named = match.groupdict().get("thing") or ""
            headline = describe(end)[1]
            message = headline if text in headline else f"{text}; it ended with {headline.removeprefix('ended with ')}"
            return _shortage(end, cause.id, message, places, confidence, named=named, text=text)
    is_mute = not end.before and not last_printed(end.stderr_tail or "") and not end.could_not_start
    if places and ((is_mute and not end.message) or _SAYS_NOTHING.match(end.message or "")):
        message = f"{describe(end)[1]} while {_name(places[0])} was full"
        return _shortage(end, DISK_FULL, message, places, Confidence.LIKELY)
    return None


def find_named(end: WorkerEnd) -> str:
    """Return the file that an exception of a rank names as the one that could not be written; empty: none does."""
    for text in (end.message or "", *reversed(end.before), end.traceback or ""):
        if named := _NAMED.findall(text):
            return str(named[-1])
    return ""


def find_full(node: NodeView, end: WorkerEnd | None = None, *, shm_full: float = SHM_ALL) -> tuple[FullPlace, ...]:
    """Return the directories on a node that were full when a rank of it ended.

    Args:
        shm_full: share of /dev/shm that counts as full; what a dead process had there is free at once.
    """
    beat = node.beat
    if beat is None:
        return ()
    places = list(beat.full)
    if beat.shm_used >= shm_full and all(place.purpose != _SHM for place in places):
        places.append(FullPlace(purpose=_SHM, path=_SHM, room=Room(problem=f"{100 * beat.shm_used:.0f} % were in use")))
    if beat.room is not None and (beat.room.was_full(LATELY_S) or beat.room.freed_bytes):
        path = (end.stderr_path or "").rpartition("/")[0] if end is not None else ""
        own = next(
            (place for place in places if place.purpose == _RUN_DIR),
            FullPlace(purpose=_RUN_DIR, path=path, room=beat.room),
        )
        places = [msgspec.structs.replace(own, room=beat.room), *(place for place in places if place is not own)]
    return tuple(places)


def say_full(places: tuple[FullPlace, ...]) -> str:
    """Return a note on a rank that failed for another reason: `its TMPDIR (/tmp) was full at that time`."""
    return f"{' and '.join(map(_name, places))} was full at that time"


def describe_room(place: FullPlace, node: str) -> str:
    """`run directory runs/7 on node01: 0 KiB of 100 MiB free`, `TMPDIR /tmp on node01: 0 inodes free`."""
    room, where = place.room, " ".join(dict.fromkeys(filter(None, (place.purpose, place.path)))) + f" on {node}"
    if _QUOTA.search(room.problem or ""):
        what = f"a quota is used up; {size_text(room.free_bytes)} of {size_text(room.size_bytes)} free on the disk"
    elif room.freed_bytes:
        what = f"{size_text(room.free_bytes)} of {size_text(room.size_bytes)} free since allranks, when it was full, "
        what += f"gave back {size_text(room.freed_bytes)} that it had kept there"
    elif _lacks_inodes(room):
        what = f"{room.free_inodes} inodes free" + (f" of {room.size_inodes}" if room.size_inodes else "")
    elif room.size_bytes:
        what = f"{size_text(room.free_bytes)} of {size_text(room.size_bytes)} free"
        if not room.is_full and room.full_ago_s is not None:
            what += f"; it was full {room.full_ago_s:.0f} s before"
    else:
        what = room.problem or "full"
    return f"{where}: {what}" + (f"; largest there: {place.largest}" if place.largest else "")


def advise(place: FullPlace | None) -> str:
    """Return how to make room in a place; None: it is not known which one."""
    return _FIXES.get(place.purpose if place else "", "delete what is not needed there, or write to another disk")


def describe_full(full: Sequence[tuple[str, FullPlace]]) -> str:
    """`run directory runs/7 on node01: 0 KiB of 100 MiB free; allranks clean deletes old runs`; empty for none.

    Args:
        full: names of nodes, with what is full there.
    """
    told = [describe_room(msgspec.structs.replace(place, largest=""), node) for node, place in full]
    if not told:
        return ""
    more = f" (and {count_of(len(told) - 1, 'more directory')} on other disks or nodes)" if len(told) > 1 else ""
    return f"too little room: {told[0]}{more}; {advise(full[0][1])}"


def describe_lost(lost: Mapping[int, tuple[int, str]]) -> str:
    """`516 lines of rank 3 could not be written: the disk was full`; empty for none.

    Args:
        lost: by rank, how many lines, and why the kernel did not take them.
    """
    if not lost:
        return ""
    why = list(lost.values())[-1][1]
    words = {"No space left on device": "the disk was full", "Disk quota exceeded": "the quota was used up"}
    reason = words.get(why, why)
    num_lines = sum(lines for lines, _ in lost.values())
    return f"{count_of(num_lines, 'line')} of {fold_ranks(lost)} could not be written: {reason}"


def find_lost(lost: Mapping[int, tuple[int, str]], nodes: Sequence[str]) -> tuple[Finding, ...]:
    """Return the warning about lines that could not be written; none where no cause is known for why.

    Args:
        nodes: on which that happened.
    """
    why = {why for _, why in lost.values()}
    found = next(filter(None, (_find_in_exception(f"write error: {reason}") for reason in why)), None)
    if found is None:
        return ()
    finding = name_fault(
        found[0].id,
        describe_lost(lost),
        node=fold_hosts(nodes),
        ranks=tuple(sorted(lost)),
        severity=Severity.WARN,
        evidence=["counted where Python could not write; what native code wrote is not counted"],
        fix="make room before the next run: allranks clean deletes old runs",
    )
    return (finding,)


def _explain_bus_error(end: WorkerEnd, node: NodeView) -> Shortage | None:
    if not (places := find_full(node, end, shm_full=SHM_FULL)):
        return None
    in_memory = [place for place in places if place.purpose == _SHM]
    place = (in_memory or places)[0]
    message = f"{describe(end)[1]}, while {_name(place)} was full"
    return _shortage(end, SHM_TOO_SMALL if in_memory else DISK_FULL, message, (place,), Confidence.LIKELY)


def _find_in_exception(text: str) -> tuple[Cause, Sign, re.Match[str]] | None:
    """Return the cause that ends a rank with this exception, by the sign that proves most; None: the script is.

    Args:
        text: the exception's type and message, without the frames.
    """
    found = [
        (cause, sign, match)
        for cause in all_causes()
        if Trait.ENDS_RANKS in cause.traits
        for sign in cause.signs
        if sign.fact is FactKind.RAISED and (match := re.search(sign.pattern, text, re.MULTILINE))
    ]
    return min(found, key=lambda known: _ORDER.index(known[1].confidence), default=None)


def _exceptions(end: WorkerEnd) -> Iterator[str]:
    """What each exception that is known of an end says, without frames; the oldest first."""
    printed = "" if end.message else last_printed(end.stderr_tail or "")
    for text in (*end.before, end.traceback or printed, end.message or ""):
        lines = [line.lstrip("| ") for line in text.splitlines() if not re.match(r"[ |]*  (?:File |  )", line)]
        yield from (line for line in lines if line and not line.startswith("Traceback ("))


def _shortage(
    end: WorkerEnd,
    cause_id: str,
    message: str,
    places: tuple[FullPlace, ...],
    confidence: Confidence,
    *,
    named: str = "",
    text: str = "",
) -> Shortage:
    meant = tuple(place for place in places if named.startswith(f"{place.path.rstrip('/')}/")) or places
    seen = tuple(Evidence(seen=describe_room(place, end.node)) for place in meant)
    if end.lost_lines:
        seen += (Evidence(seen=f"lost of its output: {count_of(end.lost_lines, 'line')} ({end.lost_why})"),)
    return Shortage(
        cause_id=cause_id,
        message=message,
        confidence=confidence,
        evidence=(*seen, *find_evidence(end)),
        fix=_fix(end, cause_id, meant, named, text),
        is_local=bool(meant) and all(place.purpose in _LOCAL for place in meant),
    )


def _fix(end: WorkerEnd, cause_id: str, places: tuple[FullPlace, ...], named: str, text: str) -> str | None:
    place = places[0] if places else None
    path = place.path if place else named.rpartition("/")[0]
    cause = find_cause(cause_id)
    if Trait.FILLS_A_DIRECTORY not in cause.traits:
        return None
    if _QUOTA.search(text) or (place is not None and _QUOTA.search(place.room.problem or "")):
        look = f"quota -s; on Lustre: lfs quota -h -u $USER {path or '.'}"
    else:
        look = f"df -{'i' if place is not None and _lacks_inodes(place.room) else 'h'} {path}".rstrip()
    return f"on {end.node}: {look}; {advise(place)}"


def _name(place: FullPlace) -> str:
    return f"its {place.purpose} ({place.path})" if place.path not in ("", place.purpose) else f"its {place.purpose}"


def _lacks_inodes(room: Room) -> bool:
    return room.free_inodes is not None and Room(free_inodes=room.free_inodes).is_full
