"""Which lines of a log may match which patterns? Hyperscan finds them in one pass; Python's `re` where it is missing.

    matcher = Matcher([r"fallen off the bus", r"NVRM: Xid .{3,60}: (?P<code>[0-9]+),"])
    for chunk in read_chunks(source):
        for hit in matcher.scan(chunk):
            hit.number, hit.raw, hit.patterns        # 4711, b"[rank3]: ... has fallen off the bus", (0,)

If `re` finds a pattern in a segment (the text between newlines and carriage returns), it is reported for that segment.
Further patterns may be reported, so the caller verifies the few reported lines with `re`. Bytes count, not characters:
`.{0,80}` ends after 80 bytes of UTF-8.

Floods: once a pattern has hit `FLOOD` lines since the last reset, as in a log of NCCL_DEBUG=INFO, only one of its hits
per block is kept. Blocks halve a chunk: its first half, half of the rest, and so on down to `LAST_BLOCK`. So each
source still gives its first hit, and the samples are denser near its end. All other patterns are reported as before.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from allranks.files.folder import Folder, RefusedError, why_not_ours
from allranks.why.logs import rewrite
from allranks.why.logs.read import Chunk
from allranks.why.logs.rewrite import find_literal, to_hyperscan

try:
    import hyperscan
except ImportError:  # no wheel for this machine; or, on a musl system, a library that it needs is missing
    hyperscan: Any = None  # type: ignore[no-redef]

FLOOD = 50_000
"""Lines that one pattern may hit before it is only sampled: some 0.5 s of what is done for a hit, and more lines than
4,096 ranks have to say about one failure."""
LAST_BLOCK = 1024
"""Bytes in the last block of a chunk, if floods are sampled: a few lines."""
REACH = 2000
"""Bytes before and after the end of a match that belong to its hit, in a segment that is longer: less than a line of
`line.py` holds."""
CACHED_FROM = 100
"""Number of patterns whose database is cached: compiling takes 1.4 ms for each."""
CACHED_DATABASES = 8
"""Maximum number of cached databases, the newest: the causes of some versions, 2 MB each."""
_ID_BITS = 16
"""A match's end and its pattern's index share one integer: half the time of a tuple, an eighth of its memory."""
_ID = (1 << _ID_BITS) - 1


def has_hyperscan() -> bool:
    """Whether the fast engine is there. Without it the answer is the same, and takes longer."""
    return hyperscan is not None


@dataclass(slots=True)
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
        assert len(patterns) <= _ID
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
        self._counts.update(chain.from_iterable(hit.patterns for hit in hits))
        if hits:
            self._flooding = frozenset(pattern for pattern, count in self._counts.items() if count >= FLOOD)
        return hits

    def _find_ends(self, text: bytes) -> Iterator[int]:
        """Yield end << _ID_BITS | pattern for all matches; of a pattern that floods, one in each block."""
        begin = 0
        while begin < len(text):  # blocks end with a line, so that no match is cut
            is_last = not self._flooding or len(text) - begin <= LAST_BLOCK
            end = len(text) if is_last else text.find(b"\n", (begin + len(text)) // 2) + 1 or len(text)
            for found in self._engine.find(text[begin:end], self._flooding):
                yield found + (begin << _ID_BITS)
            begin = end


def _to_hits(chunk: Chunk, ends: Sequence[int]) -> Iterator[Hit]:
    """Merge the ends of matches in one segment."""
    data = chunk.data
    index = 0
    while index < len(ends):
        last = (ends[index] >> _ID_BITS) - 1  # the last byte of the match
        lowest = max(0, last - REACH)
        begin = max(data.rfind(b"\n", lowest, last), data.rfind(b"\r", lowest, last)) + 1 or lowest
        stop = data.find(b"\n", last, last + REACH)
        if stop < 0:
            stop = min(len(data), last + REACH)
        until = stop - 1
        if (state := data.find(b"\r", last, stop)) >= 0:
            until = stop = state  # end of the line, if the match ends with its line
        patterns = set()
        while index < len(ends) and (ends[index] >> _ID_BITS) - 1 <= max(last, until):
            patterns.add(ends[index] & _ID)
            index += 1
        yield Hit(chunk.number_at(begin), data[begin:stop], tuple(sorted(patterns)), begin)


# --- Engines: both find at least one match for each pattern in each segment of a line in which `re` finds one ---------


class HyperscanEngine:
    """Patterns, compiled for hyperscan. Large sets are cached below `XDG_CACHE_HOME/allranks` and loaded in 1 ms."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._load = cache(partial(_load_or_compile, tuple(patterns)))
        self._load(frozenset())

    def find(self, text: bytes, flooding: frozenset[int]) -> array[int]:
        """Return `end << _ID_BITS | index` for all matches, unordered; for the first only of patterns that flood."""
        found = array("Q")
        add = found.append

        def note(pattern: int, start: int, end: int, flags: int, context: object) -> None:
            add(end << _ID_BITS | pattern)  # 0.2 us per match: nothing else is done here

        # If hyperscan fails here, our own arguments are wrong: its errors need no translation.
        self._load(flooding).scan(text, match_event_handler=note)
        return found


class PlainEngine:
    """Patterns for `re`: one is tried where a text that each of its matches contains occurs. 1.6 MB/s."""

    def __init__(self, patterns: Sequence[str]) -> None:
        expressions = list(map(to_hyperscan, patterns))
        self._sought = [(find_literal(expression).encode(), expression.encode()) for expression in expressions]
        self._compile = cache(partial(re.compile, flags=re.MULTILINE))

    def find(self, text: bytes, flooding: frozenset[int]) -> array[int]:
        """Return `end << _ID_BITS | index` for matches, unordered; for the first only of patterns that flood."""
        found = array("Q")
        for index, (literal, expression) in enumerate(self._sought):
            if literal in text:
                matches = islice(self._compile(expression).finditer(text), 1 if index in flooding else None)
                found.extend(match.end() << _ID_BITS | index for match in matches)
        return found


Engine = HyperscanEngine | PlainEngine


def _compile(patterns: Sequence[str], flooding: frozenset[int]) -> hyperscan.Database:
    database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    expressions = [to_hyperscan(pattern).encode() for pattern in patterns]
    ids = list(range(len(patterns)))
    flags = [hyperscan.HS_FLAG_MULTILINE | (hyperscan.HS_FLAG_SINGLEMATCH if i in flooding else 0) for i in ids]
    try:
        database.compile(expressions, ids, flags=flags)
    except hyperscan.error as exc:
        for pattern in patterns if len(patterns) > 1 else ():  # the error does not name the pattern
            _compile([pattern], frozenset())
        raise ValueError(
            f"hyperscan refuses the pattern {patterns[0]!r}: {str(exc).rstrip('.')}; "
            "expected an expression that needs a character, without look-around and back-references"
        ) from exc
    return database


def _load_or_compile(patterns: tuple[str, ...], flooding: frozenset[int]) -> hyperscan.Database:
    """Compile, or load from the cache. A cache that cannot be used is no error: it only costs time."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111  (never raises)
    if len(patterns) < CACHED_FROM or not base.is_absolute():
        return _compile(patterns, flooding)
    path = base / "allranks"
    # Rewriting a thousand patterns takes 50 ms, so the key has how they are rewritten instead.
    rules = Path(rewrite.__file__).read_bytes()
    key = repr((patterns, rules, sorted(flooding), hyperscan.__version__))  # type: ignore[attr-defined]
    name = f"signs-{importlib.util.source_hash(key.encode()).hex()}.hs"  # hashlib loads OpenSSL, which takes 3 ms
    with contextlib.suppress(OSError, hyperscan.error):
        # Hyperscan detects damage and other processors: it verifies a checksum, and the target of the database.
        database = hyperscan.loadb(_open_own(path).read(name), hyperscan.HS_MODE_BLOCK)
        database.scratch = hyperscan.Scratch(database)
        return database
    database = _compile(patterns, flooding)
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Many ranks may start at once on one file system: the last rename wins, and all write the same content.
        _open_own(path).write_whole(name, hyperscan.dumpb(database))
        for old in sorted(path.glob("signs-*.hs"), key=lambda file: -file.stat().st_mtime)[CACHED_DATABASES:]:
            old.unlink(missing_ok=True)
    return database


def _open_own(path: Path) -> Folder:
    """Open the cache, which another user could have made where it is in a shared directory."""
    folder = Folder.at(path)
    if (why := why_not_ours(folder.owner, os.geteuid())) is not None:
        raise RefusedError(errno.EPERM, why, str(path))
    return folder
