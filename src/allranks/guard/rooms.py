"""What is worth a line about the run directories: one fills up, is full, or is gone? Pure.

Nodes that share a file system are one matter and one line, with all their names. A matter is said when it gets worse,
and again only after there was room in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum

from allranks.model.hostlist import fold_hosts
from allranks.model.room import Room
from allranks.model.safe_text import size_text
from allranks.report.text import count_of

SHARED = ""
"""The directory that several nodes share, in place of a node's name."""
LOOK_EVERY_S, LOOK_FOR_NODE_S = 1.0, 5e-4
"""Between two looks, with thousands of nodes more: some 1 % of the leader's time."""
GATHER_S = 3.0
"""From the first of several nodes to the line, if nothing is urgent: others find the same a little later."""


class RoomLevel(IntEnum):
    """How bad it is; each is said once on the way up."""

    FINE = 0
    SHORT = 1
    FREED = 2
    """It was full, and an agent gave its ballast back."""
    FULL = 3
    BROKEN = 4
    """The directory is gone, or its file system cannot be written or does not answer."""


_CALM = (RoomLevel.SHORT, RoomLevel.BROKEN)
"""What ranks do not die of at once."""


def level_of(room: Room, *, was: RoomLevel) -> RoomLevel:
    """Return how bad it is.

    Args:
        was: at the last look: a file system that was short is fine again only with some more room.
    """
    if room.is_full:
        return RoomLevel.FULL
    if room.problem is not None:
        return RoomLevel.BROKEN
    if room.freed_bytes:
        return RoomLevel.FREED
    return RoomLevel.SHORT if room.is_short(was_short=was > RoomLevel.FINE) else RoomLevel.FINE


class RoomSpeech:
    """What was said of each directory of a job."""

    def __init__(self) -> None:
        self._now: dict[str, RoomLevel] = {}
        """By node, or SHARED."""
        self._said: dict[str, RoomLevel] = {}
        """The worst that was said since it was fine."""
        self._next_look_s = 0.0
        self._since_s: dict[RoomLevel, float] = {}
        """Since when there is a node of that level which was not told."""

    def say(self, now_s: float, rooms: Iterable[tuple[str, Room]]) -> list[str]:
        """Return the lines to say now.

        Args:
            now_s: of any clock.
            rooms: names of nodes, with what each told last.
        """
        if now_s < self._next_look_s:
            return []
        places: dict[str, list[tuple[str, Room]]] = {}
        for name, room in rooms:
            places.setdefault(SHARED if room.is_shared else name, []).append((name, room))
        self._next_look_s = now_s + max(LOOK_EVERY_S, LOOK_FOR_NODE_S * sum(map(len, places.values())))
        worse: dict[RoomLevel, list[tuple[str, Room]]] = {}
        new: set[RoomLevel] = set()
        for place, told in places.items():
            level = max(level_of(room, was=self._now.get(place, RoomLevel.FINE)) for _, room in told)
            self._now[place] = level
            said = self._said[place] = level if level is RoomLevel.FINE else self._said.get(place, RoomLevel.FINE)
            if level > said:
                new.add(level)
                if level in _CALM and len(places) > 1 and now_s < self._since_s.setdefault(level, now_s) + GATHER_S:
                    continue
                self._said[place] = level
                worse.setdefault(level, []).extend(_those_meant(told, level))
        self._since_s = {level: since_s for level, since_s in self._since_s.items() if level in new}
        return [describe(level, dict(told)) for level, told in sorted(worse.items())]


def _those_meant(told: list[tuple[str, Room]], level: RoomLevel) -> list[tuple[str, Room]]:
    """Return who is named: all that share a full file system, but only those that find it broken."""
    return [item for item in told if level_of(item[1], was=level) is level] if level is RoomLevel.BROKEN else told


def describe(level: RoomLevel, told: Mapping[str, Room]) -> str:
    """Return the line about the run directory of these nodes."""
    nodes, rooms = fold_hosts(list(told)), list(told.values())
    newest = [room for room in rooms if level_of(room, was=level) is level]  # others have not looked since
    least = min(newest or rooms, key=lambda room: (room.free_bytes, room.free_inodes or 0))
    size = size_text(least.size_bytes)
    freed = max(room.freed_bytes for room in rooms)
    on_each = " on each" if len(told) > 1 else ""
    match level:
        case RoomLevel.BROKEN:
            what = next((room.problem or "").partition(": ")[2] or room.problem for room in rooms if room.problem)
            if all(room.is_gone for room in rooms):
                how = "somebody removed or unmounted it; ranks go on, but what they write there is lost"
                return f"the run directory is gone on {nodes} ({what}): {how}"
            return f"the run directory cannot be used on {nodes} ({what}): output of ranks may be lost"
        case RoomLevel.FREED:
            kept = f"allranks gave back {size_text(freed)} that it had kept there{on_each}"
            return f"the run directory was full on {nodes} ({size}): {kept}; make room soon, or ranks that print fail"
        case RoomLevel.FULL:
            kept = f", also the {size_text(freed)} that allranks had kept there{on_each}" if freed else ""
            if least.lacks_inodes:
                return f"the run directory is full on {nodes} (no inode is left): ranks cannot make files there"
            errors = [room.problem.partition(": ")[2] for room in rooms if room.problem]  # a quota, mostly
            what = errors[0] if errors else f"{size}{kept}"
            return f"the run directory is full on {nodes} ({what}): ranks that print or save there fail"
    left = f"{size_text(least.free_bytes)} free (of {size})"
    if least.lacks_inodes:
        left = f"{count_of(least.free_inodes or 0, 'more file')} can be made (free inodes)"
    return f"run directory: {left} on {nodes}; delete what is not needed there: when it is full, ranks that print fail"
