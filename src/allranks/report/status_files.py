"""status.json and goodput.json of a run: the newest of each, written whole by a thread of its own.

    files = StatusFiles(run_dir.hold)
    files.show(status)                 # once a second; never waits
    files.keep(ledger)
    files.close()

A file server that does not answer delays nobody: what comes meanwhile replaces what waits. A directory that is full,
read-only or gone costs the files, never the job. A killed leader leaves at most one draft (`.status.json.<hex>`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Protocol

import msgspec

from allranks.files.folder import Folder
from allranks.model.job_status import FILE, JobStatus, write_status
from allranks.model.ledger import Ledger
from allranks.report.mask import mask_secrets
from allranks.report.readback import MAX_STATUS_BYTES, parse_job_status, parse_ledger

GOODPUT = "goodput.json"
CLOSE_S = 2.0
"""How long the end of a job waits for a slow file server."""


_mask = functools.lru_cache(256)(mask_secrets)  # a status has the same events many times


class OpenRun(Protocol):
    """Returns the directory of the run."""

    def __call__(self, *below: str, make: bool = True) -> Folder:
        """Make it anew if it is gone, or raise OSError."""


class StatusFiles:
    """Writes what a run does now, and where its time went.

    Args:
        hold: returns the directory.
    """

    def __init__(self, hold: OpenRun) -> None:
        self._hold = hold
        self.newest: JobStatus | None = None
        """The last one that was shown, whether or not it could be written."""
        self._waiting: dict[str, bytes] = {}
        """By name: what is to be written next."""
        self._turn = threading.Condition()
        self._is_over = self._is_writing = False
        self._thread: threading.Thread | None = None

    def show(self, status: JobStatus) -> None:
        """Write what the job does now, without secrets."""
        told = tuple(msgspec.structs.replace(event, text=_mask(event.text)) for event in status.events)
        self.newest = status = msgspec.structs.replace(status, events=told)
        self._put(FILE, write_status(status))

    def keep(self, ledger: Ledger) -> None:
        """Write where its time went."""
        self._put(GOODPUT, msgspec.json.encode(ledger))

    def read_ledger(self) -> Ledger | None:
        """Return what the last leader of this run, or its last attempt, has written; None: nothing that can be read."""
        with contextlib.suppress(OSError):
            return parse_ledger(self._hold(make=False).read(GOODPUT, at_most=MAX_STATUS_BYTES))
        return None

    def read_status(self) -> JobStatus | None:
        """Return the last status that was written; None: there is none that can be read."""
        with contextlib.suppress(OSError):
            return parse_job_status(self._hold(make=False).read(FILE, at_most=MAX_STATUS_BYTES))
        return None

    def close(self, within_s: float = CLOSE_S) -> None:
        """Have the last ones written, if that takes no longer than this; later ones are not written."""
        with self._turn:
            self._is_over = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: not (self._waiting or self._is_writing), within_s if self._thread else 0.0)

    def _put(self, name: str, data: bytes) -> None:
        with self._turn:
            if self._is_over:
                return
            self._waiting[name] = data
            self._turn.notify_all()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="allranks-status", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started now: workers may have used them up
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            with self._turn:
                self._is_writing = False
                self._turn.notify_all()
                self._turn.wait_for(lambda: bool(self._waiting) or self._is_over)
                if not self._waiting:
                    return
                name, data = self._waiting.popitem()
                self._is_writing = True
            with contextlib.suppress(OSError):
                self._hold(make=False).write_whole(name, data)
