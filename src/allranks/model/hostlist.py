"""Expand and fold SLURM host lists.

    >>> expand_hosts("master-node,node[01-02,04]")
    ['master-node', 'node01', 'node02', 'node04']
    >>> fold_hosts(["master-node", "node01", "node02", "node04"])
    'master-node,node[01-02,04]'

Order is kept and so are duplicates, because ranks hang on both. The order is that of `scontrol show hostnames`
(SLURM 22.05). We read more than it does in one place, text after the last bracket (`n[1-3]-int`; scontrol does since
23.11), and refuse what it guesses at: empty elements, blanks between names, unclosed brackets, `n[1-]`, and ranges
whose end is padded otherwise than the start (`n[1-010]`, `n[01-9]`).
"""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from allranks.model.errors import HostlistError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_NAMES = 1 << 18
"""Names that one list may stand for, made in 0.3 s; more is a typing error, and is refused before any is made."""

MAX_NAME_LENGTH = 253
"""Characters of a full host name. Source: RFC 1035 section 2.3.4, less the two bytes that only the wire form has."""

MAX_DIGITS = 18
"""Digits of a number in a bracket; scontrol silently turns what passes 64 bits into 2**64 - 1."""

_BLANKS = " \t\r\n"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_DIGITS = re.compile(r"([0-9]+)")


def is_host_name(text: str) -> bool:
    """Tells whether the text can be one node's name: ASCII letters, digits, `_`, `.` and `-`, the last two not first.

    >>> is_host_name("node01.cluster"), is_host_name("-oProxyCommand"), is_host_name("n[1-2]")
    (True, False, False)
    """
    return len(text) <= MAX_NAME_LENGTH and _NAME.fullmatch(text) is not None


def expand_hosts(text: str) -> list[str]:
    """Names that a host list stands for, in the order in which scontrol prints them.

    With two brackets in a name the left one varies slowest. With three or more scontrol has an order of its own,
    which is followed here: the last bracket varies fastest, then the first, then the second, and so on.

    Args:
        text: as in SLURM_JOB_NODELIST or behind `--nodelist`; blanks around commas and around the whole are fine.

    Raises:
        HostlistError: the text cannot be read without guessing, or stands for more than MAX_NAMES names.
    """
    patterns = [_read_pattern(text, start, end) for start, end in _elements(text)]
    num_names = sum(pattern.num_names for pattern in patterns)
    if num_names > MAX_NAMES:
        raise HostlistError(f"host list {_show(text, 0)}: {num_names} names: expected at most {MAX_NAMES}")
    return [name for pattern in patterns for name in pattern.names()]


def fold_hosts(names: Sequence[str]) -> str:
    """Host list for display: neighbours that differ in one number share a bracket, order and duplicates stay.

    For names that are host names, `expand_hosts` gives back exactly these; no names give the empty text.
    """
    folded: list[str] = []
    group: list[list[str]] = []
    place: int | None = None  # of the number that differs within the group; None while all of it are equal
    for name in names:
        parts = _DIGITS.split(name)  # text, digits, text, digits, ..., text
        if group:
            differing = [i for i, (a, b) in enumerate(zip(group[-1], parts, strict=False)) if a != b]
            is_numbered = len(parts) == len(group[-1]) > 1 and len(differing) <= 1
            if is_numbered and all(
                i % 2 and place in (None, i) and _is_foldable(group[0], parts, i) for i in differing
            ):
                place = differing[0] if differing else place
                group.append(parts)
                continue
            folded.append(_fold_group(group, place))
        group, place = [parts], None
    if group:
        folded.append(_fold_group(group, place))
    return ",".join(folded)


class _Range(NamedTuple):
    """Numbers low to high, both included, padded with zeros to `width` digits."""

    low: int
    high: int
    width: int

    @property
    def num_names(self) -> int:
        return self.high - self.low + 1


class _Pattern(NamedTuple):
    """One element of the list: texts[0] brackets[0] texts[1] brackets[1] ... texts[-1]."""

    texts: list[str]
    brackets: list[list[_Range]]

    @property
    def num_names(self) -> int:
        total = 1
        for ranges in self.brackets:
            total *= sum(r.num_names for r in ranges)
        return total

    def names(self) -> Iterator[str]:
        values = [[f"{i:0{r.width}d}" for r in ranges for i in range(r.low, r.high + 1)] for ranges in self.brackets]
        first = self.texts[0]
        # scontrol peels brackets off from the right, but keeps the last one innermost: see expand_hosts.
        for *others, last in product(*reversed(values[:-1]), *values[-1:]) if values else ():
            numbers = [*reversed(others), last]
            yield first + "".join(n + t for n, t in zip(numbers, self.texts[1:], strict=True))
        if not values:
            yield first


def _elements(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of every element between top-level commas, blanks around it left out."""
    start, opened = 0, -1  # opened: where the open bracket is, -1 outside of one
    for mark in re.finditer(r"[\[\],]|\Z", text):
        at, seen = mark.start(), mark.group()
        if seen == "[":
            if opened >= 0:
                _refuse(text, at, "a bracket inside a bracket", "'[' only outside of brackets")
            opened = at
        elif seen == "]":
            if opened < 0:
                _refuse(text, at, "']' without '['", "brackets in pairs")
            opened = -1
        elif seen == "" and opened >= 0:
            _refuse(text, opened, "'[' without ']'", "brackets in pairs")
        elif opened < 0:
            element = text[start:at]
            left, right = len(element) - len(element.lstrip(_BLANKS)), len(element.rstrip(_BLANKS))
            if right == 0:
                _refuse(text, start, "nothing" if text.strip(_BLANKS) == "" else "an empty element", "a host name")
            yield start + left, start + right
            start = at + 1


def _read_pattern(text: str, start: int, end: int) -> _Pattern:
    texts: list[str] = []
    brackets: list[list[_Range]] = []
    at, longest = start, 0
    while True:
        opening = text.find("[", at, end)
        part_end = opening if opening >= 0 else end
        bad = _NOT_IN_NAME.search(text, at, part_end)
        if bad:
            seen = "a blank within a name" if bad.group() in _BLANKS else f"{bad.group()!a} in a name"
            _refuse(text, bad.start(), seen, "letters, digits, '_', '.' and '-'")
        texts.append(text[at:part_end])
        longest += part_end - at
        if opening < 0:
            break
        closing = text.index("]", opening, end)
        brackets.append(_read_bracket(text, opening + 1, closing))
        longest += max(max(r.width, len(str(r.high))) for r in brackets[-1])
        at = closing + 1
    if texts[0][:1] in ("-", "."):
        _refuse(text, start, f"a name that begins with {texts[0][0]!r}", "a letter, digit or '_' first")
    if longest > MAX_NAME_LENGTH:
        _refuse(text, start, f"a name of {longest} characters", f"at most {MAX_NAME_LENGTH}")
    return _Pattern(texts, brackets)


def _read_bracket(text: str, start: int, end: int) -> list[_Range]:
    ranges: list[_Range] = []
    at = start
    for item in text[start:end].split(","):
        found = _RANGE.fullmatch(item)
        if found is None:
            _refuse(text, at, f"{_shorten(item)} in a bracket", "a number or a range such as 01-16")
        low, high = found[1], found[2] or found[1]
        if max(len(low), len(high)) > MAX_DIGITS:
            _refuse(text, at, f"a number of {max(len(low), len(high))} digits", f"at most {MAX_DIGITS}")
        # SLURM itself folds n01 ... n99, n100 to n[01-100]: an end may outgrow the padding, not differ in it.
        if len(high) < len(low) or (len(high) > len(low) and high[0] == "0"):
            _refuse(text, at, f"range {item} with differently padded ends", "both padded alike, such as 08-16")
        if int(high) < int(low):
            _refuse(text, at, f"descending range {item}", "the smaller number first")
        ranges.append(_Range(int(low), int(high), len(low)))
        at += len(item) + 1
    return ranges


def _refuse(text: str, at: int, seen: str, expected: str) -> NoReturn:
    raise HostlistError(f"host list {_show(text, at)}: {seen} at character {at + 1}: expected {expected}")


def _show(text: str, at: int) -> str:
    """The text around a place, escaped; "..." stands for what is left out."""
    start, end = max(0, at - 30), at + 30
    return ("..." if start else "") + ascii(text[start:end]) + ("..." if end < len(text) else "")


def _shorten(item: str) -> str:
    return ascii(item) if len(item) <= 30 else ascii(item[:30]) + "..."


def _is_foldable(first: list[str], parts: list[str], place: int) -> bool:
    return len(first[place]) <= MAX_DIGITS and len(parts[place]) <= MAX_DIGITS


def _fold_group(group: list[list[str]], place: int | None) -> str:
    """One element for names that differ at `place` only; equal names repeat their last number."""
    first = group[0]
    if len(group) == 1:
        return "".join(first)
    if place is None:
        place = len(first) - 2
        if len(first[place]) > MAX_DIGITS:
            return ",".join("".join(parts) for parts in group)
    runs: list[list[str]] = []
    for parts in group:
        digits = parts[place]
        if runs and digits == f"{int(runs[-1][-1]) + 1:0{len(runs[-1][0])}d}":
            runs[-1][1:] = [digits]
        else:
            runs.append([digits])
    bracket = ",".join("-".join(run) for run in runs)
    return "".join(first[:place]) + f"[{bracket}]" + "".join(first[place + 1 :])
