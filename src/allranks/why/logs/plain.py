"""Patterns with Python's `re` alone, for machines without hyperscan: the same matches, many times as slow.

A thousand expressions cannot all be tried on each line. So each has literals, of which every match contains one, and
each literal has grams: its aligned groups of `GRAM` bytes, for each way that it may lie in the text. Of a block of text
the set of aligned grams is made in one go; only literals whose grams are all in it are searched for, and only lines
that contain a literal meet its expressions.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property

from allranks.why.logs.engine import ID_BITS
from allranks.why.logs.rewrite import list_literals, to_hyperscan

GRAM = 4
"""Bytes of a gram: an unsigned int of `memoryview.cast`."""
LEAST_LITERAL = 2 * GRAM - 1
"""A literal of this length holds a whole aligned gram wherever it lies. Shorter ones are searched for in any case."""
BLOCK_BYTES = 1 << 16
"""Small enough that most grams of the literals are not in it."""
WINDOW_BYTES = 4000
"""In a longer line, only so much before and after a literal is searched; a hit has at most as much."""


class PlainEngine:
    """Patterns, compiled with `re` when their literals first occur: of a thousand, a log needs a few dozen."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._sought = [_Sought(index, to_hyperscan(pattern)) for index, pattern in enumerate(patterns)]
        self._flooding: frozenset[int] = frozenset()
        by_literal: defaultdict[bytes, list[_Sought]] = defaultdict(list)
        for sought in self._sought:
            for literal in sought.literals:
                by_literal[literal].append(sought)
        self._by_literal = dict(by_literal)
        self._always = [sought for sought in self._sought if not sought.literals]
        self._short = [literal for literal in by_literal if len(literal) < LEAST_LITERAL]
        self._by_gram = _index(literal for literal in by_literal if len(literal) >= LEAST_LITERAL)
        self._grams = frozenset(self._by_gram)

    def sample(self, flooding: frozenset[int]) -> None:
        """From now on, report only the first match of these patterns in each text."""
        self._flooding = flooding

    def find(self, text: bytes, base: int, ends: array[int]) -> None:
        """Append `base + end << ID_BITS | pattern` for the matches, unordered: for each segment all that match."""
        done: set[int] = set()  # patterns of which only the first match counts, and was found
        begin = 0
        while begin < len(text):
            end = text.find(b"\n", begin + BLOCK_BYTES) + 1 or len(text)
            block = text[begin:end]
            for sought, places in self._candidates(block):
                if sought.index in done:
                    continue
                found = list(sought.find(block, places))
                if found and sought.index in self._flooding:
                    done.add(sought.index)
                    found = [min(found)]
                ends.extend((base + begin + at) << ID_BITS | sought.index for at in found)
            begin = end

    def _candidates(self, block: bytes) -> Iterator[tuple[_Sought, list[int] | None]]:
        """Yield the patterns that may match, with the places where one of their literals begins; None: anywhere."""
        lowered = block.lower()
        grams = frozenset(memoryview(lowered)[: len(lowered) // GRAM * GRAM].cast("I"))
        literals = set(self._short)
        for gram in self._grams & grams:
            literals.update(literal for literal, needed in self._by_gram[gram] if needed <= grams)
        places: defaultdict[int, list[int]] = defaultdict(list)
        for literal in literals:
            if found := _find_all(lowered, literal):
                for sought in self._by_literal[literal]:
                    places[sought.index] += found
        for sought in self._always:
            yield sought, None
        for index, starts in places.items():
            yield self._sought[index], starts


class _Sought:
    """One pattern."""

    def __init__(self, index: int, expression: str) -> None:
        self.index = index
        self.literals = [literal.encode() for literal in list_literals(expression)]
        self._expression = expression

    @cached_property
    def _compiled(self) -> re.Pattern[bytes]:
        return re.compile(self._expression.encode(), re.MULTILINE)

    def find(self, block: bytes, places: list[int] | None) -> Iterator[int]:
        """Yield ends of matches: at least one for each segment that matches near one of the places."""
        if places is None:
            yield from self._find_between(block, 0, len(block))
            return
        covered = 0
        for place in sorted(places):
            if place < covered:
                continue
            lowest = max(0, place - WINDOW_BYTES)
            begin = block.rfind(b"\n", lowest, place) + 1 or lowest
            end = covered = block.find(b"\n", place, place + WINDOW_BYTES)
            if end < 0:
                end = min(len(block), place + WINDOW_BYTES)
                covered = end - WINDOW_BYTES // 2  # a match that begins later may be cut by the window's end
            is_cut = covered < end < len(block)
            yield from (at for at in self._find_between(block, begin, end) if not (is_cut and at == end))

    def _find_between(self, block: bytes, begin: int, end: int) -> Iterator[int]:
        while match := self._compiled.search(block, begin, end):
            yield match.end()
            # A carriage return that ended this match may begin the next one.
            begin = max(match.start() + 1, match.end() - match[0].endswith(b"\r"))


def _index(literals: Iterator[bytes]) -> dict[int, list[tuple[bytes, frozenset[int]]]]:
    """Return literals by one gram that they have, with all the grams that they have if they lie that way."""
    ways = [(literal, _grams_from(literal, start)) for literal in literals for start in range(GRAM)]
    counts = Counter(gram for _, grams in ways for gram in grams)
    found: defaultdict[int, list[tuple[bytes, frozenset[int]]]] = defaultdict(list)
    for literal, grams in ways:
        found[min(grams, key=counts.__getitem__)].append((literal, grams))
    return dict(found)


def _grams_from(literal: bytes, start: int) -> frozenset[int]:
    whole = range(start, len(literal) - GRAM + 1, GRAM)
    return frozenset(int.from_bytes(literal[at : at + GRAM], sys.byteorder) for at in whole)


def _find_all(text: bytes, literal: bytes) -> list[int]:
    """Return where a literal begins, once for each line."""
    places = []
    at = text.find(literal)
    while at >= 0:
        places.append(at)
        line = text.find(b"\n", at, at + WINDOW_BYTES)
        at = text.find(literal, line if line >= 0 else at + 1)
    return places
