"""Which lines of progress bars (tqdm, rich, ...) stay, and what would a terminal show of them? Pure.

    lines = TerminalLines()
    lines.feed(b"\\r 10%|#   |\\r 20%|##  |")     []: nothing has ended
    lines.feed(b"\\r100%|####|\\ndone\\n")        [(b"100%|####|", True), (b"done", False)]

A bar moves with carriage returns; several bars below one another, with the cursor up, too. Of the bars of several
ranks a terminal shows one, that of the slowest rank, and what the others differ in (`fold`). `launch.row` puts it on
the terminal's last row.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from allranks.model.safe_text import width_of

LINE_LIMIT_BYTES = 1 << 16
"""Longer lines are shown in pieces; the file has them whole."""
BAR_LIMIT_BYTES = 1 << 12
"""Of a line that redraws itself: 1,000 columns in UTF-8 with colors. What follows is not shown."""
MAX_ROWS = 16
"""Bars below one another; a cursor that goes up further overwrites what has been shown, and none goes down further."""
MIN_BAR_COLUMNS = 24
"""A terminal that leaves less for the bar does not get the words about other ranks."""
HIDE = b"\x1b[?25l"
"""Hides the cursor."""
GAP = "  "
"""Between two parts of a row."""
# Parameters of a control sequence have at most 32 characters, and numbers 18 digits: without a limit, a line of digits
# takes the square of its length to read, and Python converts none of more than 4,300.
_TOKEN = re.compile(rb"\n|\r|\x1b\[([0-9;?]{0,32})([@-~])|[^\n\r\x1b]+|\x1b")
MAX_PROMPT = 64
"""Bytes of the end of a line that show whether it asks for input."""
_PROMPT = re.compile(
    rb"[^0-9 ][?:>] ?\Z|\(Pdb\) \Z|(?i:\by(?:es)?/no?[])]? ?\Z|\bpress (?:any key|enter|return)\b[^\n]*\Z)"
)
"""`Epoch 1: ` asks for nothing; `Overwrite? [y/N] ` does, and `Press Enter to continue...`."""
_MOVES = re.compile(rb"\r(?!\n|\Z)|\x1b\[[0-9;?]{0,32}[A-HJK]")
_UP = re.compile(rb"(?:\x1b\[[0-9]{0,32}[AF](?:\r|\x1b\[[0-9]{0,32}K)*)+")
_UP_ONCE = re.compile(rb"\x1b\[([0-9]{0,32})[AF]")
_CUT = re.compile(rb"\x1b(?:\[[0-9;?]{0,32})?\Z")
"""The begin of a control sequence, the rest of which is still to be read."""
_BEHIND_BAR = re.compile(rb"(?:\[rank[0-9]{1,9}\]: ?)?Traceback \(most recent call last\):\Z")
"""What Python writes when a bar has not ended: it begins behind the bar."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_COLOURS = re.compile(rb"\x1b\[[0-9;]*m")
_GRAPHICS = re.compile(r"[|\u2501\u2578\u257a\u2588\u2591\x1b]|[-#=]{3}")
"""Where what a bar draws begins."""
_EPOCH = re.compile(rb"(?i)\bepochs?\W{0,3}([0-9]{1,18})(?:/[0-9]{1,18})?(?![0-9./]{0,40}\s{0,9}%)")
_PERCENT = re.compile(rb"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?%")
_COUNT = re.compile(rb"(?<![0-9:.])([0-9]{1,18})/([0-9]{1,18})(?![0-9:])")
_NUMBER = re.compile(rb"[0-9]{1,18}")
_NO_NUMBER = re.compile(rb"[^0-9]*")
_NO_LETTER = re.compile(rb"[^A-Za-z]+")

Source = TypeVar("Source")
State = tuple[bytes, Sequence[bytes]]
"""Prefix of a rank, and the rows of its bar."""


class FinishedLine(NamedTuple):
    """A line that nothing will change any more, or several."""

    text: bytes
    """Without the last newline."""
    is_redrawn: bool
    """It is the last state of a bar, no line that took its place."""


class _Row:
    __slots__ = ("is_redrawn", "restarts", "text", "whole")

    def __init__(self, text: bytes = b"") -> None:
        self.text = text
        self.whole = b""
        """The last state that a carriage return has ended."""
        self.restarts = False
        """What is written next replaces it."""
        self.is_redrawn = False

    def restart(self) -> None:
        if self.text.strip():
            self.whole = self.text
        self.restarts = True

    def write(self, text: bytes) -> None:
        self.is_redrawn = self.is_redrawn or self.restarts
        if self.restarts or not self.is_redrawn or len(self.text) < BAR_LIMIT_BYTES:
            self.text = text if self.restarts else self.text + text
        if self.is_redrawn:
            self.text = self.text[:BAR_LIMIT_BYTES]
        self.restarts = False

    def end(self) -> list[FinishedLine]:
        if not self.is_redrawn:
            return [FinishedLine(self.text, is_redrawn=False)]
        text = self.text.rstrip()
        found = _BEHIND_BAR.search(text)
        text = text[: found.start()].rstrip() if found else text
        place = find_place([text])
        is_bar = bool(self.whole) and find_place([self.whole]).kind == place.kind
        if found and not (is_bar or "%" in place.units):  # the user's own words before it, or none
            return [FinishedLine(self.text.rstrip(), is_redrawn=False)]
        bar = [FinishedLine(text, is_redrawn=is_bar)] if text else []
        return [*bar, FinishedLine(found.group(), is_redrawn=False)] if found else bar


class TerminalLines:
    """What a worker has written into one stream, as a terminal would show it: lines that have ended, and rows below
    them that may still change."""

    def __init__(self) -> None:
        self._rows = [_Row()]
        self._at = 0
        """Row of the cursor."""
        self._depth = 0
        """How many rows the cursor goes up to redraw what is above."""
        self._is_hidden = False
        """The cursor is, so it is about to go up, nobody knows how far."""
        self._cut = b""

    @property
    def is_deep(self) -> bool:
        """Whether lines wait because the cursor may come back to them."""
        return self._depth > 0 or self._is_hidden

    @property
    def rows(self) -> list[bytes]:
        """The rows of a bar as they are now; none where the rest is a line that has not ended."""
        texts = [row.text.rstrip() for row in self._rows]
        return [text for text in texts if text] if any(row.is_redrawn for row in self._rows) else []

    @property
    def is_prompt(self) -> bool:
        """Whether what has come of the last line asks for input: `name? `, `(Pdb) `."""
        row = self._rows[0]
        return (
            len(self._rows) == 1
            and not row.is_redrawn
            and bool(_PROMPT.search(_COLOURS.sub(b"", row.text[-MAX_PROMPT:])))
        )

    def take_whole(self) -> list[bytes]:
        """Return the same as they were at the last carriage return, which ends what may be written in part; once."""
        whole = [row.whole.rstrip() for row in self._rows if row.whole]
        for row in self._rows:
            row.whole = b""
        return whole

    def feed(self, data: bytes) -> list[FinishedLine]:
        """Take in what was written, and return the lines that have ended."""
        data, self._cut = self._cut + data, b""
        if b"\x1b" in data and (cut := _CUT.search(data)):
            data, self._cut = data[: cut.start()], cut.group()
        ended: list[FinishedLine] = []
        if b"\x1b" in data or self._is_hidden:
            ups = [sum(int(count or 1) for count in _UP_ONCE.findall(run)) for run in _UP.findall(data)]
            self._depth = min(MAX_ROWS, max([self._depth, *ups]))
            if self._is_hidden and b"\r" in data:  # the second time that it draws: now it would have gone up
                self._is_hidden = False
                ended = self._scroll()
            self._is_hidden = (self._is_hidden or HIDE in data) and not ups
        if self.is_deep or len(self._rows) > 1:
            return [*ended, *self._draw(data)]
        row = self._rows[0]
        if b"\r" not in data and b"\x1b" not in data and not row.is_redrawn and not row.restarts:
            data, newline, rest = data.rpartition(b"\n")
            if newline:
                ended, self._rows = [FinishedLine(row.text + data, is_redrawn=False)], [_Row()]
            return [*ended, *self._draw(rest)]
        *lines, rest = data.split(b"\n")
        for line in lines:
            row = self._rows[self._at]
            if self._at or row.is_redrawn or row.restarts or _MOVES.search(line):
                ended += self._draw(line + b"\n")
            else:
                ended.append(FinishedLine((row.text + line).rstrip(b"\r"), False))
                self._rows = [_Row()]
        return [*ended, *self._draw(rest)]

    def settle(self) -> list[FinishedLine]:
        """The cursor has not gone up for a while: return what is above it, unless it stands in the last of several
        bars."""
        if self._rows[self._at].text.strip() and any(row.is_redrawn for row in self._rows[: self._at]):
            return []
        self._depth, self._is_hidden = 0, False
        return self._scroll()

    def forget(self) -> None:
        """Drop a bar that has been shown as it is now."""
        if any(row.is_redrawn for row in self._rows):
            self._rows, self._at = [_Row()], 0

    def end(self) -> list[FinishedLine]:
        """Nothing more is written: return what is left."""
        ended = [(row, line) for row in self._rows if row.text for line in row.end()]
        left = [line._replace(is_redrawn=row.is_redrawn and not _BEHIND_BAR.search(line.text)) for row, line in ended]
        self._rows, self._at = [_Row()], 0
        return left

    def _draw(self, data: bytes) -> list[FinishedLine]:
        ended: list[FinishedLine] = []
        for token in _TOKEN.finditer(data):
            text, row = token.group(), self._rows[self._at]
            if text == b"\n":
                self._move(1)
                ended += self._scroll()
            elif text == b"\r":
                row.restart()
            elif token[2] in (None, b"m"):
                row.write(text)
                while not row.is_redrawn and len(row.text) > LINE_LIMIT_BYTES:
                    ended.append(FinishedLine(row.text[:LINE_LIMIT_BYTES], False))
                    row.text = row.text[LINE_LIMIT_BYTES:]
            else:
                self._control(token[1], token[2])
        return ended

    def _control(self, argument: bytes, kind: bytes) -> None:
        row, number = self._rows[self._at], int(argument) if argument.isdigit() else None
        if kind in b"AF":
            self._move(-(number or 1))
        elif kind in b"BE":
            self._move(min(number or 1, max(0, MAX_ROWS - self._at)))
        elif kind == b"G":
            row.restart()
        elif kind == b"K" and (number in (1, 2) or row.restarts):
            row.restart()
            row.write(b"")
        elif kind == b"J" and not number:
            del self._rows[self._at + 1 :]

    def _move(self, by: int) -> None:
        self._at = max(0, self._at + min(by, MAX_ROWS))
        self._rows += [_Row() for _ in range(self._at + 1 - len(self._rows))]
        row = self._rows[self._at]
        if by < 0:
            row.restart()
        elif row.text:
            row.restarts = True

    def _scroll(self) -> list[FinishedLine]:
        """Return the rows that the cursor does not come back to."""
        num_gone = max(0, self._at - (MAX_ROWS if self._is_hidden else self._depth))
        gone = [ended for row in self._rows[:num_gone] for ended in row.end()]
        del self._rows[:num_gone]
        self._at -= num_gone
        return gone


# --- One bar for several ranks ----------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """How far a bar is; the smallest is the slowest."""

    numbers: tuple[float, ...]
    units: tuple[str, ...]
    words: tuple[bytes, ...]
    """What it is called: bars of the same name can be compared."""

    @property
    def epochs(self) -> tuple[float, ...]:
        return tuple(number for number, unit in zip(self.numbers, self.units, strict=True) if unit == "epoch")

    @property
    def kind(self) -> tuple[tuple[str, ...], tuple[bytes, ...]]:
        return self.units, self.words


def find_place(rows: Sequence[bytes]) -> _Place:
    """Return how far a bar is: its epoch, and the percentage, count or first number of each row."""
    numbers: list[float] = []
    units: list[str] = []
    rows = [_COLOURS.sub(b"", row) for row in rows]
    for row in rows:
        if epoch := _EPOCH.search(row):
            numbers.append(int(epoch[1]))
            units.append("epoch")
            row = row[epoch.end() :]
        if percent := _PERCENT.search(row):
            numbers.append(round(float(percent[1])))
            units.append("%")
        elif (counts := _COUNT.findall(row)) and int(counts[-1][1]):
            numbers.append(100 * int(counts[-1][0]) // int(counts[-1][1]))
            units.append("%")
        elif not epoch and (number := _NUMBER.search(row)):
            numbers.append(int(number.group()))
            units.append("")
    words = tuple(_NO_LETTER.sub(b"", _NO_NUMBER.match(row).group()) for row in rows)  # type: ignore[union-attr]
    return _Place(tuple(numbers), tuple(units), words)


def fold(states: Sequence[State]) -> list[bytes]:
    """Return the lines that stay of the bars of several ranks: the slowest one, and how many others are how far.

    Args:
        states: one a rank.
    """
    if not states:
        return []
    (prefix, rows), words = _pick(states)
    return [fit(prefix + row, words if number == len(rows) else "", None) for number, row in enumerate(rows, 1)]


def as_row(states: Sequence[State]) -> tuple[str, str]:
    """Return the bar of the slowest rank as one row, and the words about others; of bars below one another, the
    outer ones go without their graphics. One that is complete and names no epoch is no outer bar: tqdm leaves an inner
    one that has ended above the others."""
    (prefix, rows), words = _pick(states)
    outer = [row.decode(errors="replace") for row in rows[:-1] if find_place([row]).numbers != (100,)]
    begins = [_GRAPHICS.split(row, maxsplit=1)[0].rstrip() for row in outer]
    inner = rows[-1].decode(errors="replace")
    return prefix.decode(errors="replace") + GAP.join([*begins, inner]), words


def _pick(states: Sequence[State]) -> tuple[State, str]:
    """Return the bar of the slowest rank, and words about the others."""
    places = [find_place(rows) for _, rows in states]
    kind = Counter(place.kind for place in places).most_common(1)[0][0]
    same = [(place.numbers, index) for index, place in enumerate(places) if place.kind == kind]
    slowest = states[min(same)[1]]
    words = _describe_others(sorted(numbers for numbers, _ in same), kind[0], len(states) - len(same))
    return slowest, words


def fold_last(waiting: Iterable[tuple[Source, bytes, FinishedLine]]) -> list[tuple[Source | None, bytes]]:
    """Return the lines that stay: last states of several ranks' bars as one, and each rank's lines in their order.

    Args:
        waiting: where it comes from, the rank's prefix, and what has ended, in the order in which it did.
    Returns:
        Lines, each with its newline, and where they come from; None: they have their prefix.
    """
    queues: dict[bytes, deque[tuple[Source, FinishedLine]]] = {}
    for source, prefix, ended in waiting:
        queues.setdefault(prefix, deque()).append((source, ended))
    shown: list[tuple[Source | None, bytes]] = []
    while any(queues.values()):
        kinds: dict[object, list[State]] = {}
        for prefix, queue in queues.items():
            if queue and queue[0][1].is_redrawn:
                rows = [queue.popleft()[1].text]
                place = find_place(rows)
                kinds.setdefault((place.kind, place.epochs), []).append((prefix, rows))
        shown += [(None, row + b"\n") for states in kinds.values() for row in fold(states)]
        for queue in queues.values():
            while queue and not queue[0][1].is_redrawn:
                source, ended = queue.popleft()
                shown.append((source, ended.text + b"\n"))
    return shown


def _describe_others(numbers: Sequence[tuple[float, ...]], units: Sequence[str], num_others: int) -> str:
    """` +3 alike`, ` +3 ranks: 45-48%`, ` +3 ranks: epoch 0-1`; numbers ascend, the slowest is the first."""
    other = f" +{num_others} other" if num_others else ""
    if len(numbers) < 2:
        return other
    low, high = numbers[1], numbers[-1]
    if numbers[0] == high:
        return f" +{len(numbers) - 1} alike{other}"
    differs = next(i for i, (first, last) in enumerate(zip(numbers[0], high, strict=True)) if first != last)
    span = f"{low[differs]:.0f}-{high[differs]:.0f}" if low[differs] != high[differs] else f"{high[differs]:.0f}"
    span = f"epoch {span}" if units[differs] == "epoch" else span + units[differs]
    count = len(numbers) - 1
    return f" +{count} rank{'s' * (count > 1)}: {span}{other}"


def fit(row: bytes, words: str, columns: int | None) -> bytes:
    """Return a row with words after it, cut so that it does not wrap; colors end with it."""
    text = row.decode(errors="replace")
    if columns is not None:
        if columns - 1 - len(words) < MIN_BAR_COLUMNS:
            words = ""
        text = _cut(text, columns - 1 - len(words))
    end = "\x1b[0m" if "\x1b" in text else ""
    return (text + end + words).encode(errors="replace")


def shown_width(text: str) -> int:
    """Return how many columns a text with colors takes."""
    return width_of(_COLOUR.sub("", text))


def _cut(text: str, columns: int) -> str:
    if text.isascii() and "\x1b" not in text:
        return text[: max(0, columns)]
    taken, at = 0, 0
    while at < len(text):
        if colour := _COLOUR.match(text, at):
            at = colour.end()
            continue
        taken += width_of(text[at])
        if taken > columns:
            return text[:at]
        at += 1
    return text
