"""Which lines of a log are source code: below a frame of a traceback, at a prompt, of a shell with -x? Pure.

    QuotedCode().covers(line, hit, chunk)       # True: `    if "CUDA out of memory" in str(error):`

Python prints below `  File "train.py", line 88, in main` the source of that line, indented more than the frame; since
3.13, all lines of a statement. Lines of other writers may stand between. Such a line tells nothing but itself. The line
that ends a traceback is an exception, whatever its class is called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from allranks.causes.book import all_marks
from allranks.why.logs.line import Line, read_line
from allranks.why.logs.log_events import LogEvent
from allranks.why.logs.match import Hit
from allranks.why.logs.read import Chunk

MAX_BETWEEN = 16 << 10
"""Bytes that are read for a line of code: from the last one on, or from its frame."""
MAX_AHEAD = 16
"""Number of lines after a frame in which its traceback may end."""
MAX_BELOW = 2
"""Number of further lines of an exception's message that are told."""
_NO_REASON = re.compile(r":$|\bvalidation errors? for \w+$")
_NO_MESSAGE = re.compile(r"Traceback |During handling |The above |={4}|-{4}|\[")
"""How a line begins that is no part of a message."""
_ENDS_TRACEBACK = re.compile(
    r"(?P<type>(?:[A-Za-z_]\w*\.)*(?!Exception(?:: ?)?$)[A-Z]\w*[a-z]\w*)"  # no bare "Exception:" of an older mp.spawn
    r"(?:: ?(?P<text>.*))?$"
)
_FRAME = re.compile(r'File "[^"]+", line \d+(?:, in .+)?$')
_BREAK = re.compile(rb"[\r\n]")
_SUMMARY_MARGIN = 2
"""Blanks before the further lines of a traceback in torchrun's summary."""
_MARGIN = " |"
"""Before the lines of an exception group."""
_CODE = re.compile(r">>> |\++ (?=[\w./\"'-])|[|\u2502] *(?:\u2771|>)? *\d+ [|\u2502]|-+> *\d+ ")
"""What Python's prompt, a shell with -x, rich and IPython put before code."""


def is_code(text: str) -> bool:
    """Whether a line is code, by the mark before it.

    >>> is_code('+ grep "CUDA out of memory" train.log'), is_code("RuntimeError: CUDA out of memory")
    (True, False)
    """
    return _CODE.match(text.lstrip()) is not None


class QuotedCode:
    """Follows the tracebacks of one chunk: a line is read once, however many ranks print theirs at once."""

    def __init__(self) -> None:
        self._margins: dict[object, int] = {}
        """Writers of tracebacks that have begun, and how many characters precede each of their lines: of a time, mostly
        none. Stacks that a program prints have no exception."""
        self._frames: dict[object, int] = {}
        """Writers who said only code since their last frame, and how far that is indented."""
        self._read_until = 0

    def begin(self, line: Line) -> None:
        """Note that a traceback begins with a line."""
        before, _, _ = line.text.partition("Traceback (")
        is_summary = before.endswith("traceback : ")
        self._margins[writer_of(line)] = _SUMMARY_MARGIN if is_summary else len(before.removesuffix("Original "))

    def end(self, line: Line, hit: Hit, chunk: Chunk) -> LogEvent | None:
        """Return the exception below a frame if no other frame follows, and its mark does not find it."""
        writer = writer_of(line)
        if writer not in self._margins or (last := _find_end(line, hit, chunk)) is None:
            return None
        text = last.text[self._margins.pop(writer) :]
        match = _exception().match(text) or _ENDS_TRACEBACK.match(text)
        if match is None or _exception().search(last.text):
            return None
        return LogEvent("exception", last, {name: said for name, said in match.groupdict().items() if said})

    def covers(self, line: Line, hit: Hit, chunk: Chunk) -> bool:
        """Whether a line is code below a frame: all that its writer said since then is indented more than the frame."""
        if not (indent := self._indent(line)):
            return False
        if hit.begin - self._read_until > MAX_BETWEEN:
            self._frames.clear()
        unread = chunk.data[max(self._read_until, hit.begin - MAX_BETWEEN) : hit.begin]
        self._read_until = hit.begin
        for raw in _BREAK.split(unread) if self._frames or b'File "' in unread else ():
            if raw.strip():
                other = read_line(raw, line.source, line.number)
                writer = writer_of(other)
                if _FRAME.match(other.text[self._margins.get(writer, 0) :].lstrip(_MARGIN)):
                    self._frames[writer] = self._indent(other)
                elif writer in self._frames and self._indent(other) <= self._frames[writer]:
                    del self._frames[writer]
        return indent > self._frames.get(writer_of(line), indent)

    def _indent(self, line: Line) -> int:
        text = line.text[self._margins.get(writer_of(line), 0) :] if self._margins else line.text
        return len(text) - len(text.lstrip(_MARGIN))


@cache
def _exception() -> re.Pattern[str]:
    """Return the mark of an exception, without which one is known by its traceback only."""
    return re.compile(next(mark.match for mark in all_marks() if mark.name == "exception"))


def _find_end(line: Line, hit: Hit, chunk: Chunk) -> Line | None:
    """Return the line after the last frame of a traceback and its code; None after other frames."""
    for ahead, raw in _rows_below(hit, chunk):
        if b'  File "' in raw:
            return None
        if not raw.strip() or b"    " in raw:  # code
            continue
        other = read_line(raw, line.source, line.number + ahead)
        if writer_of(other) == writer_of(line):
            return other
    return None


def read_below(line: Line, hit: Hit, chunk: Chunk) -> str:
    """Return what says the reason, where the first line of an exception does not: one line below, or two.

    `Error(s) in loading state_dict for Net:` stands above `size mismatch for fc.weight: ...`.
    """
    if not _NO_REASON.search(line.text):
        return ""
    words: list[str] = []
    for _, raw in _rows_below(hit, chunk):
        other = read_line(raw, line.source, line.number)
        if not other.text.strip() or writer_of(other) != writer_of(line):
            continue
        is_logged = other.time is not None and line.time is None
        if is_logged or _NO_MESSAGE.match(other.text) or (words and not other.text[:1].isspace()):
            break
        words.append(other.text.strip())
    return " ".join(words[:MAX_BELOW])


def _rows_below(hit: Hit, chunk: Chunk) -> Iterator[tuple[int, bytes]]:
    """Yield the next lines, with their distances."""
    stop = hit.begin + len(hit.raw)
    rows = chunk.data[stop : stop + MAX_BETWEEN].split(b"\n", MAX_AHEAD + 1)
    return enumerate(rows[1 : MAX_AHEAD + 1], start=1)


def writer_of(line: Line) -> object:
    """Return what tells the writers of one source apart."""
    return line.node, line.pod, line.rank, line.local_rank, line.pid
