"""Which lines of a log may match which patterns? An engine's matches in a chunk (`engines.py`) become lines.

    matcher = Matcher([r"fallen off the bus", r"NVRM: Xid .{3,60}: (?P<code>[0-9]+),"])
    for chunk in read_chunks(source):
        for hit in matcher.scan(chunk):
            hit.number, hit.raw, hit.patterns        # 4711, b"[rank3]: ... has fallen off the bus", (0,)

If `re` finds a pattern in a segment (the text between newlines and carriage returns), it is reported for that segment.
Further patterns may be reported, so the caller verifies the few reported lines with `re`. Bytes count, not characters:
`.{0,80}` ends after 80 bytes of UTF-8.

Floods: once a pattern has hit `FLOOD` lines since the last reset, only one of its hits per block is kept. Blocks halve
a chunk: its first half, half of the rest, and so on down to `LAST_BLOCK`. So each source still gives its first hit, and
the samples are denser near its end. All other patterns are reported as before, and the matcher need not know where a
source ends. Memory stays bounded by one chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from allranks.why.logs.engines import ID_BITS, Engine, HyperscanEngine, PlainEngine, has_hyperscan
from allranks.why.logs.read import COUNT_BYTES, Chunk

FLOOD = 50_000
"""Lines that one pattern may hit before it is only sampled: some 0.5 s of what is done for a hit, and more lines than
4,096 ranks have to say about one failure."""
LAST_BLOCK = 1024
"""Bytes in the last block of a chunk, if floods are sampled: a few lines."""
_ID = (1 << ID_BITS) - 1
REACH = 2000
"""Bytes before and after the end of a match that belong to its hit, in a segment that is longer: less than a line of
`line.py` holds."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One segment of a line, and the patterns that may match in it."""

    number: int
    """Number of the physical line in its source, from 1."""
    raw: bytes
    """The segment, at most `REACH` bytes before and after the match; a longer one gives a hit for each such part."""
    patterns: tuple[int, ...]
    """Indexes of the matcher's patterns, ascending."""
    begin: int = field(default=0, compare=False)
    """Where the segment begins in its chunk."""


class Matcher:
    """Patterns, compiled. Not thread-safe.

    Args:
        patterns: regular expressions of `re`, but without look-around and back-references.
        engine: what finds them; by default hyperscan, or `re` where hyperscan is missing.
    Raises:
        ValueError: hyperscan rejects a pattern; the message says which one and why.
    """

    def __init__(self, patterns: Sequence[str], engine: type[Engine] | None = None) -> None:
        assert len(patterns) < 1 << ID_BITS
        self._engine = (engine or (HyperscanEngine if has_hyperscan() else PlainEngine))(patterns)
        self._counts: Counter[int] = Counter()
        self._flooding: frozenset[int] = frozenset()

    def forget(self) -> None:
        """Reset: no pattern has hit anything yet."""
        self._counts.clear()
        self._flooding = frozenset()

    def scan(self, chunk: Chunk) -> list[Hit]:
        """Return the segments that hit, in the order of lines, each once."""
        hits = list(_to_hits(chunk, sorted(self._find_ends(chunk.data))))
        if hits:
            for hit in hits:
                self._counts.update(hit.patterns)
            self._flooding = frozenset(pattern for pattern, count in self._counts.items() if count >= FLOOD)
        return hits

    def _find_ends(self, text: bytes) -> Iterator[int]:
        """Yield end << ID_BITS | pattern for all matches; of a pattern that floods, one in each block."""
        if not self._flooding:
            yield from self._engine.find(text)
            return
        begin = 0
        while begin < len(text):  # blocks end with a line, so that no match is cut
            is_last = len(text) - begin <= LAST_BLOCK
            end = len(text) if is_last else text.find(b"\n", (begin + len(text)) // 2) + 1 or len(text)
            for found in self._engine.find(text[begin:end], self._flooding):
                yield found + (begin << ID_BITS)
            begin = end


def _to_hits(chunk: Chunk, ends: Sequence[int]) -> Iterator[Hit]:
    """Merge the ends of matches in one segment."""
    data = chunk.data
    index = at = 0
    number = chunk.first_line
    while index < len(ends):
        last = (ends[index] >> ID_BITS) - 1  # the last byte of the match
        lowest = max(0, last - REACH)
        begin = max(data.rfind(b"\n", lowest, last), data.rfind(b"\r", lowest, last)) + 1 or lowest
        stop = data.find(b"\n", last, last + REACH)
        if stop < 0:
            stop = min(len(data), last + REACH)
        until = stop - 1
        if (state := data.find(b"\r", last, stop)) >= 0:
            until = stop = state  # end of the line, if the match ends with its line
        patterns = set()
        while index < len(ends) and (ends[index] >> ID_BITS) - 1 <= max(last, until):
            patterns.add(ends[index] & _ID)
            index += 1
        # Hits are close together: usually a few lines are counted.
        number = chunk.number_at(begin) if begin - at > COUNT_BYTES else number + data.count(b"\n", at, begin)
        at = begin
        yield Hit(number, data[begin:stop], tuple(sorted(patterns)), begin)
