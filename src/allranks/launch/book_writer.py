"""Writes the book of this node's ranks, in a thread of its own: a slow file server delays nobody.

books = BookWriter(lambda: run_dir.hold_node("node03", make=False), run_dir.last_files.on_error)
books.write(book.pack())        # every BOOK_S, and when the workers of a generation have ended
books.end()
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from allranks.files.folder import Folder
from allranks.host.threads import start_thread
from allranks.model.time_book import FILE, parse_books

EARLIER_BYTES = 1 << 20
"""That an agent which was started again keeps of the books of the ones before it."""
END_S = 1.0


class BookWriter:
    """Writes the newest book that it is given.

    Args:
        hold: returns the node's directory.
        on_error: is told why it could not be written.
    """

    def __init__(self, hold: Callable[[], Folder], on_error: Callable[[OSError], None] = lambda _: None) -> None:
        self._hold, self._on_error = hold, on_error
        self._data: bytes | None = None
        """That waits; newer data replaces it."""
        self._earlier: bytes | None = None
        """What other agents of this node wrote; None: not looked yet."""
        self._is_over = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, data: bytes) -> None:
        """Write this soon, instead of what was written before."""
        with self._changed:
            self._data = data
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
                self._changed.wait_for(lambda: self._data is not None or self._is_over)
                data, self._data = self._data, None
            if data is None:
                return
            try:
                self._write(data)
            except OSError as exc:
                self._on_error(exc)

    def _write(self, data: bytes) -> None:
        folder = self._hold()
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
