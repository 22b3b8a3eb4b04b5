"""Joins the lines of a log that a terminal cut at the width of its screen. Pure.

unwrap(data)                        # keeps the numbers of lines
"""

from __future__ import annotations

import re

MAX_WRAPPED_BYTES = 1 << 16
"""Larger logs come from files, not from screens."""
_WIDTHS = range(60, 400)
_LEAST = 3
"""Minimum number of different lines with full width."""
_BEGINNING = 4


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
