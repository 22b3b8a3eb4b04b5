"""Joins lines that a terminal cut at its width, as in text pasted from a screen. Pure.

    joined, numbers = unwrap(data)          # numbers[i]: the line in `data` at which joined line i begins

A text looks wrapped if several lines have exactly the length of the longest one.
"""

from __future__ import annotations

MAX_BYTES = 1 << 16
"""Larger logs come from files, not from screens."""
_WIDTHS = range(60, 400)
_LEAST = 3
"""Minimum number of lines with full width."""


def unwrap(data: bytes) -> tuple[list[bytes], list[int]] | None:
    """Return the lines with those of full width joined to the next, or None if nothing looks wrapped."""
    lines = data.split(b"\n")
    widths = [len(line.decode(errors="replace")) for line in lines]
    # One line may be longer: the first, after a quotation mark.
    usual = [width for width in sorted(set(widths), reverse=True)[:2] if widths.count(width) >= _LEAST]
    if not usual or usual[0] not in _WIDTHS or sum(width > usual[0] for width in widths) > 1:
        return None
    width = usual[0]
    joined: list[bytes] = []
    numbers: list[int] = []
    goes_on = False
    for number, (line, length) in enumerate(zip(lines, widths, strict=True), start=1):
        if goes_on:
            joined[-1] += line
        else:
            joined.append(line)
            numbers.append(number)
        goes_on = length >= width
    return joined, numbers
