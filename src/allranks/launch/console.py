"""Follow the workers' output files and print them, each line with its prefix `[node03 r3]`; no reader stops the agent.

    console = Console()
    with contextlib.redirect_stderr(console.screen["err"].as_text()):   print(..., file=sys.stderr) goes through it, too
        console.follow(path, start=0, stream="out", prefix="[node03 r3] ")
        console.pump()               shows what is new and has room
    console.close(is_over=...)       shows the rest, until it is told that it took too long

The output of a single worker is printed byte by byte. With several workers, lines stay whole. A terminal has one row
below the lines, redrawn in place: what the job does (`headline`, on standard error), and of the progress bars of all
ranks that of the slowest one (launch/row.py). A file or pipe gets each bar as a line every REDRAW_S. Both get the last
state once more at the end.

Threads write to the terminal: a pipe that nobody reads, Ctrl-S and a paused pager block `write(2)`. O_NONBLOCK does not
help: it belongs to the open file, which the shell and the other tasks of a step share. A slow reader delays no worker:
output that the screen has no room for stays in the files until there is room again. Whatever workers write, each buffer
here has a limit; what is beyond it is in the files only, and is counted.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allranks.launch.bars import FinishedLine, fold_last
from allranks.launch.followed import Followed
from allranks.launch.row import CLEAR, Headline, Paint, compose
from allranks.report.text import describe_size

PUMP_S = 0.05
"""How long one pump goes on while there is more: a worker that writes much must not keep the agent from watching."""
DRAW_S = 0.5
"""How often a terminal's row is redrawn, and when first: often enough for people, and rare on a slow ssh."""
MAX_COLUMNS = 200
"""Of the row."""
FOLD_S = 0.5
"""How long the last state of a bar waits for those of other ranks."""
HELD_S = 3.8
"""How long a traceback waits for the verdict, which has the one that counts: when a rank breaks, all others lose it,
and say so in as many tracebacks. Longer than LINGERS_S (launch.workers), after which the verdict may come."""
HELD_BYTES = 1 << 18
"""Of one stream of a rank: the stacks of 1,000 threads. What follows them within HELD_S is in the file only."""
MAX_WAITING = 1000
"""Lines that wait with the last state of a bar for those of other ranks; with more, nothing waits."""
MAX_BEHIND = 256
"""Files of workers that have ended which the screen still has to show; of more, the oldest are in the files only. Each
takes a descriptor."""
_TRACEBACK = re.compile(
    rb"(?:^|\r[^\r\n]*)(?:\[rank\d+\]: ?)?Traceback \(most recent call last\):|^Fatal Python error: "
    rb"|^  File \"[^\"\n]+\", line \d+$",
    re.MULTILINE,
)
"""How one begins, also behind a bar; the second form is faulthandler's, the third one that of a script that Python
cannot parse."""
ROOM_BYTES = 1 << 20
"""How much waits in memory before `has_room` says no."""
FULL_BYTES = 16 << 20
"""How much waits at most, with lines of allranks itself, which ask for no room: hours of them."""
PIECE_BYTES = 1 << 14
"""Written at once: small, so that a slow reader is told from one that has stopped."""
LOOK_S = 0.1
"""How often `drain` looks whether it is over."""
STUCK_S = 1.0
"""A reader that has taken nothing for so long, when time is over, gets nothing more."""
CLEAR_S = 0.2
"""How long a stop from the terminal waits for the row to be taken away."""
FINISH_S = 0.5
"""How long the start of other workers may wait for what the ones before have written to be shown."""


class QueuedStream(io.FileIO):
    """A file descriptor with a thread that writes what is queued, in order, and ends with the process."""

    def __init__(self, fd: int) -> None:
        try:
            super().__init__(fd, "wb", closefd=False)
        except OSError:  # it is closed, as after `>&-`
            super().__init__(os.devnull, "wb")
        self._waiting = bytearray()
        self._piece = b""
        """Of which the thread still has to write all."""
        self._changed = threading.Condition()
        self.is_given_up = False
        """`drain` has given the reader up: what is written goes nowhere."""
        self.num_dropped = 0
        """Bytes that were queued and not written."""
        is_terminal = os.isatty(self.fileno()) and os.environ.get("TERM") != "dumb"
        self.paint = Paint() if is_terminal else None
        threading.Thread(target=self._write, args=(self.fileno(),), name="allranks-screen", daemon=True).start()

    @property
    def has_room(self) -> bool:
        """Whether the reader keeps up; a stream whose reader has left always has room."""
        return len(self._waiting) < ROOM_BYTES

    def write(self, data: Any, /) -> int:
        """Queue bytes."""
        with self._changed:
            if self.is_given_up or len(self._waiting) > FULL_BYTES:
                self.num_dropped += len(data)
            else:
                self._waiting += self.paint.write(bytes(data)) if self.paint else data
                self._changed.notify_all()
        return len(data)

    def draw(self, row: bytes) -> None:
        """Show a row below what is written; an empty one takes it away."""
        with self._changed:
            is_slow = len(self._waiting) > PIECE_BYTES  # it gets the lines alone
            if self.paint is None or self.is_given_up or (row and is_slow):
                return
            self._waiting += self.paint.draw(row)
            self._changed.notify_all()

    def leave_line(self) -> None:
        """The process ends at once: what the shell prints next does not stand behind a row. For signal handlers."""
        if self.paint and self.paint.is_shown and select.select([], [self.fileno()], [], 0)[1]:
            with contextlib.suppress(OSError):
                os.write(self.fileno(), CLEAR)
            self.paint.forget()

    def settle(self, within_s: float) -> None:
        """Wait so long for what is queued to be written."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._piece), within_s)

    @property
    def columns(self) -> int:
        """Of a row that does not wrap, also with the `^C` that a terminal shows behind it."""
        columns = 80
        with contextlib.suppress(OSError):
            columns = os.get_terminal_size(self.fileno()).columns or columns
        return max(1, min(columns - 1 - len("^C"), MAX_COLUMNS))

    @property
    def is_in_front(self) -> bool:
        """Whether this process may use the terminal now: not after Ctrl-Z and `bg`."""
        with contextlib.suppress(OSError):  # another session's terminal
            return os.tcgetpgrp(self.fileno()) == os.getpgrp()
        return True

    def drain(self, *, patience_s: float = math.inf, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all is written; else drop what waits, and give a reader that has stopped up.

        Args:
            patience_s: how long the reader may take nothing.
            is_over: asked meanwhile; True ends the wait.
        """
        moved_s = time.monotonic()
        with self._changed:
            while self._waiting or self._piece:
                if self._changed.wait(LOOK_S):
                    moved_s = time.monotonic()
                still_s = time.monotonic() - moved_s
                if (self._waiting or self._piece) and (still_s >= patience_s or is_over()):
                    self.num_dropped += len(self._waiting)
                    self._waiting[:] = self.paint.reset() if self.paint else b""
                    if still_s >= min(patience_s, STUCK_S):
                        self.is_given_up = True
                        self.num_dropped += len(self._piece)
                        self._waiting.clear()
                        self._piece = b""
                    return False
            return True

    def as_text(self) -> io.TextIOWrapper:
        """Return a text file for `sys.stderr`."""
        encoding = sys.stderr.encoding if sys.stderr else "utf-8"
        return io.TextIOWrapper(self, encoding, errors="backslashreplace", write_through=True)

    def _write(self, fd: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                is_all = len(self._waiting) <= PIECE_BYTES  # lines, and the row below them
                end = PIECE_BYTES if is_all else self._waiting.rfind(b"\n", 0, PIECE_BYTES) + 1 or PIECE_BYTES
                self._piece = bytes(self._waiting[:end])
                del self._waiting[:end]
            while self._piece and not self.is_given_up:
                try:
                    written = os.write(fd, self._piece)
                except BlockingIOError:  # whoever shares the file has made it non-blocking
                    select.select([], [fd], [], 1.0)
                    continue
                except OSError:  # the reader has left, as after `| head`; the job goes on
                    fd = os.open(os.devnull, os.O_WRONLY)
                    continue
                with self._changed:
                    self._piece = self._piece[written:]
                    self._changed.notify_all()


class Console:
    """Follows the output files of this node's workers and shows what is new at each `pump`.

    Args:
        out_fd: standard output; `err_fd` standard error. If they are one file, as after `2>&1`, they are one stream, so
            that their order is kept.
    """

    def __init__(self, *, out_fd: int = 1, err_fd: int = 2) -> None:
        is_one = False
        with contextlib.suppress(OSError):
            is_one = os.path.sameopenfile(out_fd, err_fd)
        out = QueuedStream(out_fd)
        self.screen = {"out": out, "err": out if is_one else QueuedStream(err_fd)}
        self._followed: list[Followed] = []
        self._is_muted: set[str] = set()
        self._waiting: list[tuple[Followed, FinishedLine, float]] = []
        """Last states of bars that wait for those of other ranks, what follows them, and since when."""
        self.headline: Headline | None = None
        """What the row on standard error begins with."""
        self.before_draw: Callable[[], None] = lambda: None
        self._drawn_s = time.monotonic()
        self._num_beyond = 0
        """Bytes that are in the files only, since there were too many of them."""

    def follow(self, path: str | Path, *, start: int, stream: str, prefix: str, dir_fd: int | None = None) -> None:
        """Show what a worker writes into this file from `start` on.

        Args:
            stream: `out` or `err`.
            prefix: what stands before each line; empty shows the bytes as they are.
            dir_fd: descriptor of the directory that has it, as for open(2).
        """
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
        has_keyboard = os.isatty(self.screen[stream].fileno()) and os.isatty(0)
        self._followed.append(Followed(Path(path).name, fd, stream, prefix.encode(), start, has_keyboard))

    def mute(self, stream: str) -> None:
        """Show no more of a stream, after its bars as they are now; the files still get it."""
        self._end_bars()
        self._is_muted.add(stream)

    def drop_tracebacks(self) -> None:
        """A verdict has been given: tracebacks that wait, and those that come now, are in the files only. Bars end."""
        for followed in self._followed:
            followed.has_verdict = True
        self._end_bars()

    def pump(self) -> bool:
        """Show what is new and has room, as far as PUMP_S allows; True if there was anything."""
        end_s = time.monotonic() + PUMP_S
        has_news = has_more = self._show_chunks()
        while has_more and time.monotonic() < end_s:
            has_more = self._show_chunks()
        return has_news

    def _show_chunks(self) -> bool:
        """Show the next chunk of each file; True if there was anything."""
        has_news = False
        for followed in self._followed:
            num_skipped = followed.num_skipped
            data = followed.read() if self.screen[followed.stream].has_room else b""
            has_news = has_news or bool(data) or followed.num_skipped > num_skipped
            if followed.num_skipped > num_skipped == 0:
                what = f"{describe_size(followed.num_skipped)} of {followed.name} were never written"
                self._say(f"{what}: this hole, and later ones, are not shown")
            if followed.prefix:
                self._show_lines(followed, followed.take_lines(data))
            elif data:
                self._show_or_hold(followed, data)
        is_full = len(self._waiting) > MAX_WAITING
        self.draw(is_end=is_full or any(followed.is_last for followed in self._followed))
        for followed in list(self._followed):
            if followed.is_last:
                self._leave(followed)
            elif followed.held and time.monotonic() >= followed.held_until_s:
                self._release(followed)
        return has_news

    def clear_row(self) -> None:
        """Take the row away; if the reader keeps up, it is gone when this returns."""
        for screen in set(self.screen.values()):
            screen.draw(b"")
            screen.settle(CLEAR_S)

    def leave_line(self) -> None:
        """The process ends at once; called from a signal handler."""
        for screen in set(self.screen.values()):
            screen.leave_line()

    def finish(self) -> None:
        """The writers have ended: what they have written is shown as far as there is room and time, the rest at later
        pumps."""
        for followed in self._followed:
            followed.end = min(followed.end, os.fstat(followed.file_fd).st_size)
        end_s = time.monotonic() + FINISH_S
        while self.pump() and time.monotonic() < end_s:
            pass
        for followed in self._followed[:-MAX_BEHIND]:
            self._leave(followed)

    def close(self, *, is_over: Callable[[], bool] = lambda: False) -> int:
        """Show everything that is left, also unfinished lines; the writers have ended.

        Args:
            is_over: asked meanwhile; True ends it.
        Returns:
            How many bytes were not shown; the files have them.
        """
        self.finish()
        while self._followed and not is_over():
            if not self.pump():
                for stream in ("err", "out"):
                    self.screen[stream].drain(is_over=is_over)
        for followed in list(self._followed):
            self._leave(followed)
        self.headline = None
        self._end_bars()
        for stream in ("err", "out"):
            self.screen[stream].drain(is_over=is_over)
        return self._num_beyond + sum(screen.num_dropped for screen in set(self.screen.values()))

    def _leave(self, followed: Followed) -> None:
        """Follow a file no more: what is held back of it is shown, what is left is counted."""
        self._release(followed)
        self._num_beyond += max(0, followed.end - followed.position)
        os.close(followed.file_fd)
        self._followed.remove(followed)

    def _show_lines(self, followed: Followed, ended: list[FinishedLine]) -> None:
        """Show the lines that have ended. On a terminal the last state of a bar waits for those of other ranks, and
        with it what follows it."""
        if self.screen[followed.stream].paint is None:
            self._show_or_hold(followed, b"".join(line.text + b"\n" for line in ended))
            self._show(followed, followed.take_redrawn())
            return
        if followed.has_verdict or followed.stream in self._is_muted:
            ended = [line for line in ended if not line.is_redrawn]
        first = next((number for number, line in enumerate(ended) if line.is_redrawn), len(ended))
        if any(waiting.prefix == followed.prefix for waiting, _, _ in self._waiting):
            first = 0
        self._show_or_hold(followed, b"".join(line.text + b"\n" for line in ended[:first]))
        self._waiting += [(followed, line, time.monotonic()) for line in ended[first:]]

    def draw(self, *, is_end: bool = False) -> None:
        """Redraw the row of each terminal, if it is time; print what waits for the last states of other ranks' bars.

        Args:
            is_end: nothing waits any longer.
        """
        self.before_draw()
        now_s = time.monotonic()
        if not is_end and now_s < self._drawn_s + DRAW_S:
            return
        self._drawn_s = now_s
        for name, screen in self.screen.items():
            if screen.paint is None or (name == "err" and screen is self.screen["out"]):
                continue
            own = [
                followed for followed in self._followed if self.screen[followed.stream] is screen and followed.prefix
            ]
            shown = [followed for followed in own if followed.stream not in self._is_muted and not followed.has_verdict]
            live = [(followed.prefix, rows) for followed in shown if (rows := followed.lines.rows)]
            waiting = [entry for entry in self._waiting if self.screen[entry[0].stream] is screen]
            if waiting and (is_end or not live or now_s >= waiting[0][2] + FOLD_S):
                self._waiting = [entry for entry in self._waiting if self.screen[entry[0].stream] is not screen]
                screen.draw(b"")
                for source, lines in fold_last((followed, followed.prefix, line) for followed, line, _ in waiting):
                    if source is None:
                        screen.write(lines)
                    else:
                        self._show_or_hold(source, lines)
            headline = self.headline if screen is self.screen["err"] else None
            screen.draw(compose(headline, live, screen.columns) if screen.is_in_front else b"")

    def _end_bars(self) -> None:
        """Leave the bars on the terminal as they are now."""
        for followed in self._followed:
            if self.screen[followed.stream].paint is not None and followed.prefix:
                rows = followed.lines.rows
                self._waiting += [(followed, FinishedLine(row, is_redrawn=True), time.monotonic()) for row in rows]
                followed.lines.forget()
        self.draw(is_end=True)

    def _show_or_hold(self, followed: Followed, data: bytes) -> None:
        """Show what a worker has written; from the beginning of a traceback on it is held back."""
        begin = 0 if followed.held else len(data)
        can_begin = not followed.held and (followed.prefix or followed.stream == "err")
        if can_begin and (found := _TRACEBACK.search(data)):
            begin, followed.held_until_s = found.start(), time.monotonic() + HELD_S
        self._show(followed, data[:begin])
        kept = data[begin:]
        if len(followed.held) + len(kept) > HELD_BYTES or followed.num_beyond:
            room = 0 if followed.num_beyond else HELD_BYTES - len(followed.held)
            kept = kept[: kept.rfind(b"\n", 0, room) + 1]
            followed.num_beyond += len(data) - begin - len(kept)
        followed.held += kept

    def _release(self, followed: Followed) -> None:
        """Show what was held back, unless a verdict has made it needless."""
        if not followed.has_verdict:
            self._show(followed, bytes(followed.held))
            if followed.num_beyond:
                self._num_beyond += followed.num_beyond
                self._say(f"{describe_size(followed.num_beyond)} after a traceback are not shown; see {followed.name}")
        followed.held.clear()
        followed.num_beyond = 0

    def _say(self, text: str) -> None:
        self.screen["err"].write(f"allranks: {text}\n".encode(errors="replace"))

    def _show(self, followed: Followed, data: bytes) -> None:
        if data and followed.stream not in self._is_muted:
            if prefix := followed.prefix:
                data = prefix + data[:-1].replace(b"\n", b"\n" + prefix) + b"\n"
            self.screen[followed.stream].write(data)
