r"""Undoes what mails, loggers and terminals did to the lines of a log: a margin, and cuts at a screen's width. Pure.

    strip = find_margin(data)           # every line begins with `> `, `| `, `[stderr] `, `INFO: `, `train | `
    unwrap(data)                        # lines that a terminal cut, joined

Both keep the numbers of lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from allranks.why.logs.formats import LineWriter, read_prefixes

_HEAD_BYTES = 1 << 13
"""All lines that begin here must have a margin."""
_MARGIN = re.compile(
    r"[ \t]{1,16}|\d?[>|#*$%-]{1,2} ?|\[[A-Za-z]{2,12}\] ?|[A-Za-z][A-Za-z.-]{1,15} ?\| "
    r"|(?:std(?:out|err)|out|err|log|DEBUG|INFO|WARN(?:ING)?|ERROR): "
)
"""No number, since that may be of a rank, a node, a process or a time; no name of a program, as in `srun: `."""
MAX_WRAPPED_BYTES = 1 << 16
"""Larger logs come from files, not from screens."""
_WIDTHS = range(60, 400)
_LEAST = 3
"""Minimum number of different lines with full width."""
_BEGINNING = 4


def find_margin(data: bytes) -> Callable[[bytes], bytes] | None:
    """Return what strips the margin from chunks of a log that begins with this; None: there is none.

    A margin is not known by its form alone, but because the first lines all have it. Prefixes that `formats.toml` has
    stay, since they tell who wrote a line.
    """
    lines = data[:_HEAD_BYTES].split(b"\n")
    first = next(filter(bytes.strip, lines), b"").decode("ascii", errors="replace")
    if (match := _MARGIN.match(first)) is None or read_prefixes(first, LineWriter()):
        return None
    margin = match[0].encode()
    if margin == b"ERROR: " and len({*filter(bytes.strip, lines)}) == 1:  # it is what the script says
        return None
    if not all(margin.startswith(line[: len(margin)]) for line in lines if line.strip()):  # the last one may be cut
        return None
    return lambda data: data.removeprefix(margin).replace(b"\n" + margin, b"\n")


def unwrap(data: bytes) -> bytes:
    """Return a text with the lines of full width joined to the next; empty lines after them keep the numbers.

    A text looks wrapped if several lines have exactly the length of the longest one and are no padded ones, and the
    next lines begin otherwise: a program that repeats a line repeats its beginning, but for numbers.
    """
    lines = data.split(b"\n")
    widths = [len(line.decode(errors="replace")) for line in lines]
    starts = [re.sub(rb"\d", b"0", line[:_BEGINNING]) for line in lines]
    for width in sorted(set(widths), reverse=True)[:2]:  # one line may be longer: the first, after a quotation mark
        is_cut = [
            length >= width and not line.endswith(b"  ") and start != following
            for length, line, start, following in zip(widths, lines, starts, [*starts[1:], b""], strict=True)
        ]
        full = {line for line, cut, length in zip(lines, is_cut, widths, strict=True) if cut and length == width}
        if width in _WIDTHS and len(full) >= _LEAST and sum(length > width for length in widths) <= 1:
            break
    else:
        return data
    joined = bytearray()
    num_lines = 0
    for line, goes_on in zip(lines, is_cut, strict=True):
        joined += line
        num_lines += 1
        if not goes_on:
            joined += b"\n" * num_lines
            num_lines = 0
    joined += b"\n" * num_lines
    return bytes(joined[:-1])
