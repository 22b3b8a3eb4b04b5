"""Which lines of a log are source code: below a frame of a traceback, at a prompt, of a shell with -x? Pure.

    quoted = QuotedCode()
    quoted.covers(line, hit, chunk)             # True: `    if "CUDA out of memory" in str(error):`
    quoted.note(line, hit)                      # a frame: what is indented more, below it, is its code

Python prints below `  File "train.py", line 88, in main` the source of that line, indented more than the frame; since
3.13, all lines of a statement. Lines of other writers may stand between. Such a line tells nothing but itself. The line
that ends a traceback is an exception, whatever its class is called.
"""

from __future__ import annotations

import re

from allranks.why.logs.line import Line, read_line
from allranks.why.logs.match import Hit
from allranks.why.logs.read import Chunk

MAX_BETWEEN = 16 << 10
"""Bytes of other writers between a frame and its code."""
MAX_AHEAD = 16
"""Number of lines after a frame in which its traceback may end."""
_ENDS_TRACEBACK = re.compile(r"(?P<type>(?:[A-Za-z_]\w*\.)*(?!Exception$)[A-Z]\w*[a-z]\w*)(?:: ?(?P<text>.*))?$")
_FRAME = re.compile(r'[ |]*File "[^"]+", line \d+(?:, in .+)?$')
_BREAK = re.compile(rb"[\r\n]")
_CODE = re.compile(
    r">>> |\++ (?=[\w./\"'-])"  # Python's prompt; sh -x
    r"|[|\u2502] *(?:\u2771|>)? *\d+ [|\u2502]|-+> *\d+ "  # rich, IPython
    r"|(?:el)?if [^:]+ in \w[\w.]*(?:\(\w*\))?:|(?:el)?if .+:$|except\b.*:$"
    r"|while .+:$|for \w.* in .+:$|with .+:$|def \w+\(|class \w+[(:]"
    r"|raise [\w.]+\(f?[\"'].*\)$|assert .+, f?[\"']|return f?[\"']|(?:print|warnings\.warn)\(.*\)$"
    r"|(?:self\.)?log(?:ger|ging)?\.\w+\(.*\)$|echo (?:-e )?[\"'].*[\"'](?: *>&2)?$|#!/",
)
"""Statements of Python and of a shell, whole in one line."""


def is_code(text: str) -> bool:
    """Whether a line without its prefix is a statement, as a script or a shell with -x writes it.

    >>> is_code('+ grep "CUDA out of memory" train.log'), is_code("RuntimeError: CUDA out of memory")
    (True, False)
    """
    return _CODE.match(text.lstrip()) is not None


class QuotedCode:
    """Follows the tracebacks of one source."""

    def __init__(self) -> None:
        self._frames: dict[object, tuple[int, int]] = {}
        """Writer -> the end of its last frame in the chunk, and how far that is indented."""
        self._open: dict[object, str] = {}
        """Writers of tracebacks that have begun, and what stands before each of their lines: `> `, mostly nothing.

        Stacks that a program prints have no exception."""

    def begin(self) -> None:
        """Go on with the next chunk."""
        self._frames = {writer: (0, indent) for writer, (_, indent) in self._frames.items()}

    def note(self, line: Line, hit: Hit) -> None:
        """Note a line in which a frame was found."""
        text = self._own_text(line)
        if _FRAME.match(text):
            self._frames[_writer(line)] = (hit.begin + len(hit.raw), _indent(text))

    def open(self, line: Line) -> None:
        """Note a line in which a traceback begins."""
        self._open[_writer(line)] = line.text.partition("Traceback (")[0]

    def end(self, line: Line, hit: Hit, chunk: Chunk) -> tuple[Line, dict[str, str]] | None:
        """Return the exception after a frame, with the name of its class and its text; None after other frames.

        Most exceptions are found by their names; this finds `ShardMismatch: 5 columns` and `Stop`.
        """
        writer = _writer(line)
        if writer not in self._open:
            return None
        stop = hit.begin + len(hit.raw)
        following = chunk.data[stop : stop + MAX_BETWEEN].split(b"\n", MAX_AHEAD + 1)
        for ahead, raw in enumerate(following[1 : MAX_AHEAD + 1], start=1):
            if b'  File "' in raw:
                return None
            if not raw.strip() or b"    " in raw:  # code
                continue
            other = read_line(raw.rstrip(b"\r"), line.source, line.number + ahead)
            if _writer(other) != writer:
                continue
            ended = _ENDS_TRACEBACK.match(self._own_text(other))
            del self._open[writer]
            return (other, {name: text for name, text in ended.groupdict().items() if text}) if ended else None
        return None

    def covers(self, line: Line, hit: Hit, chunk: Chunk) -> bool:
        """Whether a line is the code of the last frame of its writer."""
        if not self._frames or (frame := self._frames.get(writer := _writer(line))) is None:
            return False
        end, indent = frame
        if _indent(self._own_text(line)) <= indent:
            del self._frames[writer]
            return False
        between = chunk.data[end : hit.begin]
        if len(between) > MAX_BETWEEN or any(
            _writer(other) == writer and _indent(self._own_text(other)) <= indent
            for raw in _BREAK.split(between)
            if raw.strip() and (other := read_line(raw, line.source, line.number))
        ):
            del self._frames[writer]
            return False
        self._frames[writer] = (hit.begin + len(hit.raw), indent)
        return True

    def _own_text(self, line: Line) -> str:
        """Return a line without what stands before each line of its writer's traceback."""
        return line.text.removeprefix(self._open.get(_writer(line), ""))


def _writer(line: Line) -> object:
    return line.node, line.pod, line.rank, line.local_rank, line.pid


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip(" |"))  # the margin of an exception group
