"""Which lines of a log are source code: below a frame of a traceback, at a prompt, of a shell with -x? Pure.

    is_code_of_frame(line, hit, chunk, 0)       # True: `    if "CUDA out of memory" in str(error):`
    find_end(line, hit, chunk)                  # a frame: the line that ends its traceback, if no other frame follows

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
_FRAME = re.compile(r'File "[^"]+", line \d+(?:, in .+)?$')
_BREAK = re.compile(rb"[\r\n]")
_MARGIN = " |"
"""Before the lines of an exception group."""
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


def is_code_of_frame(line: Line, hit: Hit, chunk: Chunk, margin: int) -> bool:
    """Whether a line is code below a frame: all that its writer said since then is indented more than the frame.

    Args:
        margin: number of characters before each line of the writer's traceback: of `> `, of a time; mostly 0.
    """
    before = chunk.data[max(0, hit.begin - MAX_BETWEEN) : hit.begin]
    if not (indent := _indent(line.text[margin:])) or b'File "' not in before:
        return False
    for raw in reversed(_BREAK.split(before)):
        if raw.strip() and writer_of(other := read_line(raw, line.source, line.number)) == writer_of(line):
            if _FRAME.match(other.text[margin:].lstrip(_MARGIN)):
                return _indent(other.text[margin:]) < indent
            if not (indent := min(indent, _indent(other.text[margin:]))):
                return False
    return False


def find_end(line: Line, hit: Hit, chunk: Chunk) -> Line | None:
    """Return the line after the last frame of a traceback and its code; None after other frames."""
    stop = hit.begin + len(hit.raw)
    following = chunk.data[stop : stop + MAX_BETWEEN].split(b"\n", MAX_AHEAD + 1)
    for ahead, raw in enumerate(following[1 : MAX_AHEAD + 1], start=1):
        if b'  File "' in raw:
            return None
        if not raw.strip() or b"    " in raw:  # code
            continue
        other = read_line(raw.rstrip(b"\r"), line.source, line.number + ahead)
        if writer_of(other) == writer_of(line):
            return other
    return None


def read_exception(text: str, named: re.Pattern[str]) -> dict[str, str] | None:
    """Return the class and the text of an exception; None if a line has not the form of one.

    Most exceptions are found by their names (`named`); this also reads `ShardMismatch: 5 columns` and `Stop`.
    """
    match = named.match(text) or _ENDS_TRACEBACK.match(text)
    return {name: text for name, text in match.groupdict().items() if text} if match else None


def writer_of(line: Line) -> object:
    """Return what tells the writers of one source apart."""
    return line.node, line.pod, line.rank, line.local_rank, line.pid


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip(_MARGIN))
