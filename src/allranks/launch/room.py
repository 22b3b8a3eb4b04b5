"""How much room has this node's run directory, and what is kept back in it? A thread that asks every few seconds.

    with RoomWatch(run_dir) as rooms:
        rooms.begin(folder, names, position)  this node's directory, and the job's nodes
        rooms.seen()                          the latest answer: goes into the node's beats
        rooms.look(within_s=0.05)             asks now: a worker has failed, perhaps for want of room
        rooms.note(exc)                       a write of our own has failed: is it full? then give the ballast back

The thread owns the ballast (report.ballast): it takes it soon after the workers' start, gives it back when the disk is
full, and takes it again when there is room again. Whatever it calls may hang with the file system, so nobody waits for
it longer than he says, and its end is not waited for either: the kernel gives the blocks back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Sequence
from typing import Self

import msgspec

from allranks.files.folder import Folder
from allranks.host.threads import start_thread
from allranks.model.room import Room
from allranks.report.ballast import Ballast, choose_size, describe, is_full, is_in_memory, look, try_to_write
from allranks.report.rundir import RunDir, as_file_name

ASK_S = 2.0
"""Between two looks."""
ASK_SHORT_S = 0.5
"""While there is little room: a disk that is full is told before ranks have died of it."""
ASK_SHARED_S, ASK_LONGEST_S = 0.01, 10.0
"""For each node that asks the same file server, and at most: 1,000 nodes ask every 10 s, also while there is little."""
SETTLE_S = 2.0
"""After this, the directories of other nodes are there, where they share the run directory: the ballast is taken."""
HANG_S = 15.0
"""A file system that has not answered for so long is told as one that does not."""
END_S = 0.5
NOTE_S = 1.0
"""For the thread to give the ballast back, when a write has found no room."""


class RoomWatch:
    """Owns the thread that asks, and the ballast.

    Args:
        run_dir: is told how to make room, and writes again then what it could not write.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._folder: Folder | None = None
        self._names: Sequence[str] = ()
        self._position = 0
        self._room: Room | None = None
        self._asked_s: float | None = None
        """Since when the file system is asked; None: it has answered."""
        self._full_s: float | None = None
        """When it was last seen full."""
        self._is_doubtful = False
        """A write of our own has failed: the file system's figures do not tell a quota, or a broken disk."""
        self._ballast = Ballast(0)
        self._freed_bytes = 0
        self._takes_ballast, self._gives_up = True, False
        self._began_s = time.monotonic()
        self._is_over = False
        self._wanted, self._turn = threading.Event(), threading.Condition()
        self._num_begun = self._num_done = 0
        self._thread: threading.Thread | None = None
        run_dir.last_files.on_error = self.note

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread; one that hangs with its file system is left to the end of this process, like the ballast."""
        self._is_over = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(END_S)

    def begin(self, folder: Folder, names: Sequence[str], position: int) -> None:
        """Watch this node's directory from now on; again for each generation.

        Args:
            names: of the job's nodes.
            position: of this one among them.
        """
        self._folder, self._names, self._position = folder, names, position
        if self._thread is None:
            self._began_s = time.monotonic()
            self._thread = start_thread(self._run, name="allranks-room")
        self._wanted.set()

    def seen(self) -> Room | None:
        """Return the latest answer; None: there is none yet."""
        now_s, room, asked_s = time.monotonic(), self._room, self._asked_s
        if asked_s is not None and now_s - asked_s > HANG_S:
            text = f"ETIMEDOUT: no answer of its file system for {now_s - asked_s:.0f} s"
            return msgspec.structs.replace(room or Room(), problem=text)
        if room is None or self._full_s is None:
            return room
        return msgspec.structs.replace(room, full_ago_s=max(0.0, now_s - self._full_s))

    def look(self, within_s: float) -> Room | None:
        """Ask now, and return the answer, or the latest one if it takes longer; not if the last one takes long."""
        asked_s, is_alive = self._asked_s, self._thread is not None and self._thread.is_alive()
        if is_alive and (asked_s is None or time.monotonic() < asked_s + within_s):
            with self._turn:
                before = self._num_begun  # a turn that has begun already may have looked already
                self._wanted.set()
                self._turn.wait_for(lambda: self._num_done > before, within_s)
        return self.seen()

    def note(self, exc: OSError, within_s: float = NOTE_S) -> None:
        """A write of our own has failed; where it found no room, give the ballast back, within this time."""
        self._is_doubtful = True
        if is_full(exc):
            self._full_s, self._gives_up = time.monotonic(), True
            self.look(within_s)

    # The thread

    def _run(self) -> None:
        while not self._is_over:
            with self._turn:
                self._wanted.clear()
                self._num_begun += 1
            self._asked_s = time.monotonic()
            with contextlib.suppress(OSError):
                self._room = self._ask(self._asked_s)
            self._asked_s = None
            with self._turn:
                self._num_done += 1
                self._turn.notify_all()
            self._wanted.wait(self._interval_s)
        self._ballast.free()

    @property
    def _interval_s(self) -> float:
        room = self._room
        is_urgent = room is not None and room.is_short(was_short=True)
        until_ballast_s = SETTLE_S if self._takes_ballast and self._is_among_many else ASK_S
        shared_s = ASK_SHARED_S * len(self._names) if room is not None and room.is_shared else 0.0
        return max(ASK_SHORT_S if is_urgent else until_ballast_s, min(shared_s, ASK_LONGEST_S))

    @property
    def _is_among_many(self) -> bool:
        return len(self._names) > 1

    def _ask(self, now_s: float) -> Room:
        folder, room = self._folder, self._look()
        assert folder is not None
        if room.is_full or self._gives_up:
            self._full_s = now_s if room.is_full else self._full_s
            # Blocks are of no use where inodes are lacking.
            if (self._gives_up or not room.lacks_inodes) and (freed := self._ballast.free()):
                self._freed_bytes, room = freed, self._look()
            self._gives_up, self._takes_ballast = False, True
        elif room.problem is None and not room.is_short(was_short=True):
            self._freed_bytes = 0
            if self._takes_ballast and (not self._is_among_many or now_s >= self._began_s + SETTLE_S):
                self._takes_ballast = False
                self._ballast = Ballast.keep(folder.fd, self._choose_size(room))
        self._run_dir.last_files.keep()
        return msgspec.structs.replace(room, kept_bytes=self._ballast.size_bytes, freed_bytes=self._freed_bytes)

    def _choose_size(self, room: Room) -> int:
        assert self._folder is not None
        sharers = len(self._names) if room.is_shared else 1
        in_memory = is_in_memory(self._folder.fd)
        return choose_size(room, sharers=sharers, position=self._position, is_in_memory=in_memory)

    def _look(self) -> Room:
        folder = self._folder
        assert folder is not None
        room = look(folder.fd)
        if room.problem is None and not folder.is_in_place:
            room = msgspec.structs.replace(room, problem=describe(OSError(errno.ENOENT, os.strerror(errno.ENOENT))))
        if room.problem is None and self._is_doubtful and not room.is_full:
            try:
                try_to_write(folder.fd)
                self._is_doubtful = False
            except OSError as exc:
                room = msgspec.structs.replace(room, problem=describe(exc))
        return msgspec.structs.replace(room, is_shared=self._is_shared(folder))

    def _is_shared(self, folder: Folder) -> bool:
        """Whether the directory of another node of the job is beside this one's."""
        others = [name for name in self._names[:2] if as_file_name(name) != folder.path.name]
        return any(folder.path.with_name(as_file_name(name)).is_dir() for name in others)
