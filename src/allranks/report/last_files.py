"""The files of an attempt that say how a job went and ended, written also on a full disk: verdict, exit code, events.

    files = LastFiles(run_dir.hold_attempt)
    files.keep()                                  takes blocks and inodes for them; again every few seconds
    files.publish("verdict.json", data)           whole, or not at all
    files.append(lines)                           to events.jsonl
    files.close()                                 `not written to ... (No space left on device): 3 events`

No call raises OSError: a full, broken or removed directory stops no job. `on_error` is told why a write failed; where
there is no room, it may make some (launch.room gives the ballast back), and the write is tried again. Events are kept,
and tried again with the next ones. What could not be written after all is counted.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Protocol

from allranks.files.folder import Folder
from allranks.report.ballast import VERDICT_BYTES, Draft, is_full, keep_behind
from allranks.report.text import count_of

EVENTS, VERDICT, EXIT_CODE = "events.jsonl", "verdict.json", "exit_code"
EVENTS_BYTES = 1 << 16
"""That events.jsonl can still grow by on a full disk; some 500 events."""
MOST_PENDING = 1 << 20
"""Bytes of events that wait for room."""
_KEPT = {VERDICT: VERDICT_BYTES, EXIT_CODE: 1 << 12}


class OpenAttempt(Protocol):
    """Returns the directory of the attempt."""

    def __call__(self, *, make: bool = True) -> Folder:
        """Make it anew if it is gone, or raise OSError."""


class LastFiles:
    """Writes the files of one attempt, from any thread.

    Args:
        hold: returns the directory.
    """

    def __init__(self, hold: OpenAttempt) -> None:
        self._hold = hold
        self.on_error: Callable[[OSError], None] = lambda _: None
        """Makes room, if it can."""
        self._drafts: dict[str, tuple[Folder, Draft]] = {}
        self._is_kept = False
        self._lock = threading.Lock()
        """Of what is below: events come from several threads."""
        self._pending = b""
        self._num_dropped = 0
        self._kept_up_to: int | None = None
        """Size of events.jsonl up to which it has blocks; None: this process has written no event."""
        self._lost: dict[str, None] = {}
        self._reason = ""

    def keep(self) -> None:
        """Take blocks for what is to be written later, and write what waits for room."""
        with contextlib.suppress(OSError):
            folder = self._hold(make=False)
            if not self._is_kept:
                self._is_kept = True
                for name, size_bytes in _KEPT.items():
                    self._drafts[name] = folder, Draft.keep(folder.fd, size_bytes)
            self._keep_for_events(folder)

    def _keep_for_events(self, folder: Folder) -> None:
        if not self._lock.acquire(blocking=False):  # its holder may wait for this thread to make room
            return
        try:
            if self._pending:
                self._write_pending(makes_room=False)
            if self._kept_up_to is not None and folder.status(EVENTS).st_size + EVENTS_BYTES // 2 > self._kept_up_to:
                with folder.append(EVENTS) as file:
                    keep_behind(file.fileno(), EVENTS_BYTES)
                    self._kept_up_to = file.tell() + EVENTS_BYTES
        finally:
            self._lock.release()

    def publish(self, name: str, data: bytes, *, replaces: bool = True) -> bool:
        """Write a whole file; returns False if there is one of that name that is not to be replaced.

        For a verdict, a directory that somebody has deleted is made anew.
        """
        try:
            return self._publish(name, data, replaces=replaces)
        except OSError as exc:
            again = self._publish if is_full(exc) else self._publish_plainly
            self.on_error(exc)
        try:
            return again(name, data, replaces=replaces)
        except OSError as exc:
            self._note(exc, name)
            return True  # who cannot write must speak

    def _publish(self, name: str, data: bytes, *, replaces: bool) -> bool:
        folder, (kept_in, draft) = self._hold(make=name == VERDICT), self._drafts.get(name, (None, None))
        if draft is None or kept_in is not folder:  # or that directory is gone
            draft = Draft.keep(folder.fd, len(data))
            self._drafts[name] = folder, draft
        is_first = draft.publish(data, name, replaces=replaces)
        self._drafts.pop(name, None)
        return is_first

    def _publish_plainly(self, name: str, data: bytes, *, replaces: bool) -> bool:
        """Write a file where the file system can neither link a file nor do without a name."""
        folder = self._hold(make=name == VERDICT)
        if replaces:
            folder.write_whole(name, data)
            return True
        try:
            with folder.open_new(name) as file:
                file.write(data)
        except FileExistsError:
            return False
        except OSError:
            folder.unlink(name)  # no half of a verdict may stay as the verdict
            raise
        return True

    def append(self, lines: str) -> None:
        """Append lines to events.jsonl, now or as soon as there is room."""
        with self._lock:
            self._pending += lines.encode()
            self._write_pending(makes_room=True)

    def _write_pending(self, *, makes_room: bool) -> None:
        for is_again in (False, True):
            try:
                fd = self._hold(make=False).open(EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                try:
                    while self._pending:
                        self._pending = self._pending[os.write(fd, self._pending) :]
                finally:
                    os.close(fd)
            except OSError as exc:
                self._note(exc, None)
                if is_again or not makes_room:
                    break
                self.on_error(exc)
            else:
                self._kept_up_to = self._kept_up_to or 0
                return
        if len(self._pending) > MOST_PENDING:
            kept = self._pending[: self._pending.rfind(b"\n", 0, MOST_PENDING) + 1]
            self._num_dropped += self._pending.count(b"\n", len(kept))
            self._pending = kept

    def close(self) -> str:
        """Give up what was kept; returns what could not be written, and why, as a line; empty if nothing was lost."""
        while self._drafts:
            self._drafts.popitem()[1][1].drop()
        num_events = self._pending.count(b"\n") + self._num_dropped
        lost = [*([count_of(num_events, "event")] if num_events else []), *self._lost]
        return f"not written to the run directory ({self._reason}): {', '.join(lost)}" if lost else ""

    def _note(self, exc: OSError, name: str | None) -> None:
        self._reason = exc.strerror or str(exc)
        if name is not None:
            self._lost[name] = None
