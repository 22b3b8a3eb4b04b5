"""Writes down what the ranks of this node have spent their time on, in a thread: a slow file server delays nobody.

    writer = BookWriter(run_dir.last_files.on_error)
    writer.write(folder, book.pack())        # every BOOK_S, and when the workers of a generation have ended
    writer.end()

A book that waits to be written is replaced by a newer one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from allranks.files.folder import Folder
from allranks.host.threads import start_thread
from allranks.model.time_book import FILE, parse_books

EARLIER_BYTES = 1 << 20
"""Of the books that a node's earlier agents have left: as much is kept."""
END_S = 1.0


class BookWriter:
    """Writes the newest book that it is given.

    Args:
        on_error: is told why it could not be written.
    """

    def __init__(self, on_error: Callable[[OSError], None] = lambda _: None) -> None:
        self._on_error = on_error
        self._next: tuple[Folder, bytes] | None = None
        self._earlier: bytes | None = None
        """What other agents of this node wrote; None: not looked yet."""
        self._is_over = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, folder: Folder, data: bytes) -> None:
        """Write this into the node's directory soon, instead of what was written before."""
        with self._changed:
            self._next = folder, data
            self._changed.notify_all()
        if self._thread is None:
            self._thread = start_thread(self._run, name="allranks-book")

    def end(self) -> None:
        """Wait a moment until all is written."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(END_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._is_over)
                task, self._next = self._next, None
            if task is None:
                return
            try:
                self._write(*task)
            except OSError as exc:
                self._on_error(exc)

    def _write(self, folder: Folder, data: bytes) -> None:
        if self._earlier is None:
            self._earlier = _read_earlier(folder)
        folder.write_whole(FILE, self._earlier + data)


def _read_earlier(folder: Folder) -> bytes:
    """Return the sound file that other agents of this node have left; empty if there is none, or it is too large."""
    with contextlib.suppress(OSError):
        data = folder.read(FILE, at_most=EARLIER_BYTES)
        if parse_books(data)[1] is None:
            return data
    return b""
