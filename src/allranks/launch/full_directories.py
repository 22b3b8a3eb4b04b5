"""Which directories that ranks write to are full, now that a rank has failed? Looked at in a thread: a disk may hang.

    places = PlaceWatch({"TMPDIR": Path("/tmp")}, cwd=os.getcwd())
    places.look(end, within_s=0.1)      a rank has failed; its exception may name a file
    places.full()                       goes into the node's beats

Nothing is asked before a rank fails. Once something was full, it is looked at again every AGAIN_S until there is room:
the leader waits for that before it starts the ranks again. The run directory is watched all the time (launch.room);
here it is one of the places, for what that look could not answer in time.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from allranks.guard.disk import find_named
from allranks.host.limits import read_place
from allranks.host.threads import start_thread
from allranks.model.card import JobDirectory
from allranks.model.room import FullPlace, Room
from allranks.model.safe_text import MIB, as_one_line, size_text
from allranks.wire.protocol import WorkerEnd

AGAIN_S = 2.0
MOST_FILES = 500
"""Entries of a directory that the search for the largest file looks at."""
MOST_CHARS = 300


class PlaceWatch:
    """Looks at some directories when it is asked.

    Args:
        places: by purpose; the first of several on one file system stands for it.
        cwd: of the workers; empty: it was removed.
    """

    def __init__(self, places: Mapping[str, Path], *, cwd: str) -> None:
        self._cwd = Path(cwd) if cwd else None
        self._places = dict(places) | ({"working directory": Path(cwd)} if cwd else {})
        self._named: dict[str, Path] = {}
        self._full: tuple[FullPlace, ...] = ()
        self._thread: threading.Thread | None = None
        self._looked_s = 0.0

    def look(self, end: WorkerEnd, within_s: float) -> None:
        """Look now, also where an exception of this worker names a file, and wait so long for the answer."""
        named = find_named(end)
        folder = Path(named).parent
        if named and (folder.is_absolute() or self._cwd is not None):
            self._named = {str(folder)[:MOST_CHARS]: (self._cwd or Path()) / folder}
        self._begin()
        if self._thread is not None:
            self._thread.join(within_s)

    def full(self) -> tuple[FullPlace, ...]:
        """Return what was full at the last look; where that is old, another one begins."""
        if self._full and time.monotonic() - self._looked_s > AGAIN_S:
            self._begin()
        return self._full

    def _begin(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._looked_s = time.monotonic()
            self._thread = start_thread(self._run, name="allranks-places")

    def _run(self) -> None:
        self._full = tuple(self._find_full())

    def _find_full(self) -> Iterator[FullPlace]:
        before = {(place.purpose, place.path) for place in self._full}
        devices = set[int]()
        wanted = [*(("directory", folder, path) for folder, path in self._named.items())]
        wanted += [(purpose, str(path), path) for purpose, path in self._places.items()]
        for purpose, name, path in wanted:
            with contextlib.suppress(OSError, ValueError):
                device = path.stat().st_dev
                room = as_room(read_place(purpose, path))
                # Once it was full, it counts until there is room for more than the last words of a rank.
                if device not in devices and (room.is_full or ((purpose, name) in before and room.is_short())):
                    yield FullPlace(
                        purpose=purpose, path=as_one_line(name)[:MOST_CHARS], room=room, largest=_largest(path)
                    )
                devices.add(device)


def as_room(place: JobDirectory) -> Room:
    """Return what is left in a place."""
    problem = place.problem or ""
    code = {"No space left": "ENOSPC", "quota exceeded": "EDQUOT"}
    told = next((name for words, name in code.items() if words in problem), None)
    return Room(
        free_bytes=place.free_bytes or 0,
        size_bytes=place.size_bytes or 0,
        free_inodes=place.free_inodes,
        problem=f"{told}: {problem}"[:MOST_CHARS] if told else None,
    )


def _largest(path: Path) -> str:
    """Return the largest file of a directory, or of the one where its file system begins; empty: none is large."""
    top = path.absolute()
    while not os.path.ismount(top):
        top = top.parent
    found = [(0, "", 0)]
    for folder in {path.absolute(), top}:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry, _ in zip(entries, range(MOST_FILES), strict=False):
                with contextlib.suppress(OSError):
                    stat = entry.stat(follow_symlinks=False)
                    found.append((stat.st_blocks * 512, entry.path, stat.st_uid))
    size_bytes, name, uid = max(found)
    if size_bytes < MIB:
        return ""
    owner = str(uid)
    with contextlib.suppress(KeyError):
        owner = pwd.getpwuid(uid).pw_name
    return as_one_line(f"{name} ({size_text(size_bytes)}, of {owner})")[:MOST_CHARS]
