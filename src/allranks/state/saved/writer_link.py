"""How does a rank tell its writer what to write, and learn the result? Starts the writer, and talks over a socket pair.

Messages are JSON over a socket pair that keeps their bounds, so none can be torn: a request that was sent before the
trainer died is served, and there is no half one. A thread listens, so that a failure is said when it happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import allranks
from allranks.state.saved.writer import LARGEST_MESSAGE_BYTES

_LEAVE_S = 5.0


class WriterGoneError(Exception):
    """The writer's process has ended; nobody should have ended it."""


class WriterLink:
    """One writer, and what it has said."""

    def __init__(self, memory: int, hear: Callable[[dict[str, Any]], None], **options: object) -> None:
        """Start the writer, which reads the memory of this descriptor; `hear` gets its messages, in a thread."""
        self._hear = hear
        self._changed = threading.Condition()
        self._asked, self._written, self._settled = 0, 0, 0  # numbers of saves
        self.is_gone = False
        """The writer has ended."""
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            told = {**options, "memory": memory, "connection": theirs.fileno(), "trainer": os.getpid()}
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-P", "-m", "allranks.state.saved.writer", json.dumps(told)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(memory, theirs.fileno()),
                env={**os.environ, "PYTHONPATH": str(Path(allranks.__file__).parent.parent)},
                cwd="/",
                start_new_session=True,
            )
        self._listener = threading.Thread(target=self._listen, name="allranks-checkpoint", daemon=True)
        self._listener.start()

    def ask(self, number: int, request: dict[str, object]) -> None:
        """Hand over the save whose name ends with this number; WriterGoneError: nobody takes it, the link is closed."""
        with self._changed:
            self._asked = number
        try:
            if self.is_gone:
                raise BrokenPipeError
            self._connection.send(json.dumps(request).encode())
        except OSError as exc:
            self.close()
            raise WriterGoneError(f"pid {self._process.pid}") from exc

    def wait_written(self, timeout_s: float) -> bool:
        """Wait until this rank's part of the last save is written or given up: the memory is free again."""
        return self._wait(lambda: self._written >= self._asked, timeout_s)

    def wait_settled(self, timeout_s: float) -> bool:
        """Wait until it is known what became of the last save."""
        return self._wait(lambda: self._settled >= self._asked, timeout_s)

    def close(self, *, wait: bool = True) -> None:
        """Let the writer go; it ends by itself when it is done. Wait for that only briefly."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(_LEAVE_S if wait else 0)
        except subprocess.TimeoutExpired:
            self._process.returncode = 0  # not ours to wait for any more; it holds nothing that we need
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._listener.join(_LEAVE_S)
        self._connection.close()

    def _wait(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: is_so() or self.is_gone, timeout_s)
            return is_so()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._connection.recv(LARGEST_MESSAGE_BYTES):
                message = json.loads(data)
                self._hear(message)
                number = int(message["attempt"].rpartition("-")[2])
                with self._changed:
                    self._written = max(self._written, number)
                    if not message.get("is_written"):
                        self._settled = max(self._settled, number)
                    self._changed.notify_all()
        with self._changed:
            self.is_gone = True
            self._changed.notify_all()
