"""The process beside each rank that writes its checkpoints, and finishes the one at hand if the rank dies.

    python -S -m allranks.state.saved.writer JSON        started by `allranks.state.saved.writer_link`, never by hand

It gets a number of bytes in shared memory and a name, and knows nothing of what is in them. It

- has a session of its own and ignores SIGTERM, SIGINT and SIGHUP: what ends a job must not tear its last checkpoint;
- ends by itself: at once when its trainer is gone and nothing is to be written, else when that is written. A write that
  waits for other ranks' parts ends ORPHANED_PATIENCE_S after the last of them came on (state/saved/commit.py);
- has `allranks.state.saved.writer` in its command line, so that whoever cleans up after a job knows what to wait for.

It starts in a few hundredths of a second, since it imports the standard library only, without site-packages.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from allranks.state.saved.commit import (
    Attempt,
    AttemptFailedError,
    explain,
    gather_parts,
    give_up,
    seal,
    watch_outcome,
    write_part,
)
from allranks.state.saved.manifest import Damaged
from allranks.state.saved.owner import OWNER, describe, find_other, parse
from allranks.state.saved.parts import Mount, list_checkpoints
from allranks.state.saved.tidy import Keeper, sweep

LARGEST_MESSAGE_BYTES = 1 << 16
NICENESS = 5
"""The training comes first; on a busy machine a save takes longer instead."""


class Writer:
    """Serves one rank until that is gone."""

    def __init__(self, trainer: socket.socket, trainer_pid: int, **options: Any) -> None:
        self._trainer = trainer
        self._root = Path(options["root"])
        self._rank, self._world_size = int(options["rank"]), int(options["world_size"])
        self._torch, self._run = str(options["torch"]), str(options["run"])
        self._memory = int(options["memory"])
        self._owner = parse(json.dumps(options["owner"]).encode())
        self._is_refused = False
        self._mount = Mount(self._root)
        self._keeper = Keeper(self._root, int(options["keep"]))
        self._trainer_process: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it is dead already
            self._trainer_process = os.pidfd_open(trainer_pid)

    def serve(self) -> None:
        """Write what the trainer asks for, until it closes the connection or is gone."""
        while request := self._next_request():
            attempt = Attempt(root=self._root, rank=self._rank, world_size=self._world_size, **request["attempt"])
            outcome = self._save(attempt, request)
            self._tell({"attempt": attempt.name, **outcome})
            if self._rank != 0:
                continue
            if self._is_orphaned():
                if not outcome["is_whole"]:
                    return  # whose part did not come to this one will not come to the next, either
                continue
            if self._is_refused:
                continue
            with contextlib.suppress(OSError):  # what fails here is tried again after the next save
                sweep(self._root, run=self._run, below=int(attempt.name.rpartition("-")[2]))
                self._keeper.retain(self._has_request)

    def _save(self, attempt: Attempt, request: dict[str, Any]) -> dict[str, object]:
        began_s = time.monotonic()
        try:
            if self._mount.is_gone(self._root / OWNER, *list_checkpoints(self._root)):
                raise OSError(errno.ENODEV, "the file system of earlier checkpoints is gone: was it unmounted?")
            write_part(
                attempt,
                memoryview(mmap.mmap(self._memory, request["size_bytes"], prot=mmap.PROT_READ)),
                written=lambda: self._tell({"attempt": attempt.name, "is_written": True}),
                should_stop=self._has_request,
            )
            if self._rank != 0:
                return {"is_whole": None if self._is_orphaned() else watch_outcome(attempt, self._has_news)}
            parts = gather_parts(attempt, is_orphaned=self._is_orphaned, is_next_due=self._has_news)
            self._refuse_others(attempt)
            directory = seal(attempt, parts, torch=self._torch, **request["about"])
        except Exception as exc:  # also what nobody thought of: this process has no terminal to die on
            if self._rank == 0:
                give_up(attempt)
            why = str(exc) if isinstance(exc, AttemptFailedError | Damaged) else f"the writer failed: {exc!r}"
            return {"is_whole": False, "why": explain(exc, self._root) if isinstance(exc, OSError) else why}
        return {"is_whole": True, "directory": str(directory), "write_s": time.monotonic() - began_s}

    def _refuse_others(self, attempt: Attempt) -> None:
        """Raise AttemptFailedError where another run has taken the directory: it thought that this one is dead."""
        other = None if self._owner is None else find_other(self._root, self._owner, fresh=attempt.directory)
        self._is_refused = other is not None
        if other is not None:
            raise AttemptFailedError(f"{self._root} is {describe(other)}'s now")

    # The trainer

    def _next_request(self) -> dict[str, Any] | None:
        """None: there will be no more. What a trainer has asked for before its death still counts."""
        while True:
            watched = [self._trainer] + ([self._trainer_process] if self._trainer_process is not None else [])
            ready, _, _ = select.select(watched, [], [])
            if self._trainer in ready:
                try:
                    data = self._trainer.recv(LARGEST_MESSAGE_BYTES)
                except ConnectionResetError:
                    continue  # it died with words of ours unread; its own may still be here
                return json.loads(data) if data else None
            if ready:
                return None  # a child that it forked may hold the connection open

    def _is_orphaned(self) -> bool:
        if self._trainer_process is None:
            return True
        return bool(select.select([self._trainer_process], [], [], 0)[0])

    def _has_news(self) -> bool:
        """Whether the trainer is gone, has closed the connection, or wants something else."""
        return self._is_orphaned() or bool(select.select([self._trainer], [], [], 0)[0])

    def _has_request(self) -> bool:
        """The same, but one that has closed the connection can wait until all is tidy."""
        return self._has_news() and bool(self._is_orphaned() or self._trainer.recv(1, socket.MSG_PEEK))

    def _tell(self, message: dict[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._trainer.send(json.dumps(message).encode())


def main() -> None:
    """Serve the process that started this one."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    os.nice(NICENESS)
    options = json.loads(sys.argv[1])
    with socket.socket(fileno=options.pop("connection")) as trainer:
        Writer(trainer, options.pop("trainer"), **options).serve()


if __name__ == "__main__":
    main()
