"""What does the last row of a terminal show, below the output: what the job does, and a progress bar? Pure.

compose(headline, [(b"[r0] ", [b"45%|##|"])], 77)       headline and bar in one row, as far as there is room
paint.draw(row), paint.write(b"a line\\n")              the bytes for the terminal: lines stay above the row
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from allranks.launch.bars import GAP, MIN_BAR_COLUMNS, State, as_row, fit, shown_width

CLEAR = b"\r\x1b[K"
"""Empties the line of the cursor."""
Headline = Callable[[int, int], str]
"""Returns what stands at the begin of the row: in so many columns, of which so many should be left for a bar."""


def compose(headline: Headline | None, states: Sequence[State], columns: int) -> bytes:
    """Return the one row below the lines: the headline, and behind it the bar of the slowest rank.

    Args:
        headline: None: there is none, and the bar has the row.
        states: of the bars, one a rank.
        columns: of the row, at most.
    """
    bar, words = as_row(states) if states else ("", "")
    if headline is None or not (head := headline(columns, 0)):
        return fit(bar.encode(), words, columns + 1) if bar else b""
    if bar:
        wanted = shown_width(bar + words) + len(GAP)
        short = headline(columns, max(wanted, MIN_BAR_COLUMNS + len(GAP)))
        left = columns - shown_width(short) - len(GAP)
        if left >= MIN_BAR_COLUMNS:
            return f"{short}{GAP}".encode(errors="replace") + fit(bar.encode(), words, left + 1)
    return head.encode(errors="replace")


class Paint:
    """Turns lines and a row into what a terminal gets, so that the row stays below the lines.

    Lines and row are one piece, and the cursor never goes up: a terminal that has become narrower shows a row twice,
    but no line is lost.
    """

    def __init__(self) -> None:
        self.row = b""
        self.is_shown = False
        """The row is on the screen, the cursor at its end."""
        self._is_inside = False
        """A line has been begun and not ended: nothing is drawn behind it."""

    def write(self, data: bytes) -> bytes:
        """Return what prints this above the row."""
        cleared = CLEAR if self.is_shown else b""
        self._is_inside = not data.endswith(b"\n") if data else self._is_inside
        self.is_shown = bool(self.row) and not self._is_inside
        return cleared + data + (self.row if self.is_shown else b"")

    def draw(self, row: bytes) -> bytes:
        """Return what draws the row anew in place; an empty one is taken away."""
        if row == self.row and self.is_shown == (bool(row) and not self._is_inside):
            return b""
        was_shown, self.row = self.is_shown, row
        self.is_shown = bool(row) and not self._is_inside
        return CLEAR + row if self.is_shown else CLEAR if was_shown else b""

    def forget(self) -> None:
        """Something else has taken the row from the screen."""
        self.is_shown = False

    def reset(self) -> bytes:
        """Return what clears the line, after something was left out."""
        self.row, self.is_shown, self._is_inside = b"", False, False
        return CLEAR
