"""Which lines of a log may match which patterns? One pass of hyperscan over a whole chunk.

    matcher = Matcher([r"fallen off the bus", r"NVRM: Xid .{3,60}: (?P<code>[0-9]+),"])
    for chunk in read_chunks(source):
        for hit in matcher.scan(chunk):
            hit.number, hit.raw, hit.patterns        # 4711, b"[rank3]: ... has fallen off the bus", (0,)

If `re` finds a pattern in a segment (the text between newlines and carriage returns), it is reported for that segment.
Further patterns may be reported, so the caller verifies the few reported lines with `re`. Bytes count, not characters:
`.{0,80}` ends after 80 bytes of UTF-8.

Floods: once a pattern has hit `FLOOD` lines since the last reset, only one hit per block is kept. Blocks halve a chunk:
its first half, half of the rest, and so on down to `LAST_BLOCK`. So each source still gives its first hit, and the
samples are denser near its end. All other patterns are reported as before, and the matcher need not know where a source
ends. Memory stays bounded by one chunk.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hyperscan

from allranks.why.logs.read import COUNT_BYTES, Chunk

FLOOD = 50_000
"""Lines that one pattern may hit before it is only sampled: some 0.5 s of what is done for a hit, and more lines than
4,096 ranks have to say about one failure."""
LAST_BLOCK = 1024
"""Bytes in the last block of a chunk, if floods are sampled: a few lines."""
REACH = 2000
"""Bytes before and after the end of a match that belong to its hit, in a segment that is longer: less than a line of
`line.py` holds."""

CACHED_FROM_S = 0.1
"""A database that takes this long to compile is cached."""
CACHED_DATABASES = 8
"""Maximum number of cached databases, the newest: the causes of some versions, 1 MB each."""

LITERAL = 6
"""Length of a literal that is rare enough to search for alone; all signs have one."""

_ID_BITS = 16
"""A match's end and its pattern's index share one integer: half the time of a tuple, an eighth of its memory."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One segment of a line, and the patterns that may match in it."""

    number: int
    """Number of the physical line in its source, from 1."""
    raw: bytes
    """The segment, at most `REACH` bytes before and after the match; a longer one gives a hit for each such part."""
    patterns: tuple[int, ...]
    """Indexes of the matcher's patterns, ascending."""


class Matcher:
    """Patterns, compiled for hyperscan. Not thread-safe.

    Compiling takes 1.4 ms per pattern, so large sets are cached below `XDG_CACHE_HOME/allranks` and loaded in 1 ms.

    Args:
        patterns: regular expressions of `re`, but without look-around and back-references.
    Raises:
        ValueError: hyperscan rejects a pattern; the message says which one and why.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        assert len(patterns) < 1 << _ID_BITS
        self._expressions = [to_hyperscan(pattern).encode() for pattern in patterns]
        self._counts: Counter[int] = Counter()
        self._flooding: frozenset[int] = frozenset()
        try:
            self._database = _load_or_compile(self._expressions, self._flooding)
        except hyperscan.error as exc:
            for pattern in patterns:  # the error does not name the pattern
                _compile_alone(pattern)
            raise ValueError(f"hyperscan refuses these {len(patterns)} patterns together: {exc}") from exc

    def forget(self) -> None:
        """Reset: no pattern has hit anything yet."""
        self._counts.clear()
        self._sample(frozenset())

    @property
    def flooding(self) -> frozenset[int]:
        """Indexes of the patterns of which only samples are kept now."""
        return self._flooding

    def scan(self, chunk: Chunk) -> list[Hit]:
        """Return the segments that hit, in the order of lines, each once."""
        hits = list(_to_hits(chunk, sorted(self._find_ends(chunk.data))))
        if hits:
            for hit in hits:
                self._counts.update(hit.patterns)
            flooding = frozenset(pattern for pattern, count in self._counts.items() if count >= FLOOD)
            self._sample(flooding)
        return hits

    def _sample(self, flooding: frozenset[int]) -> None:
        """From now on, keep only samples of the hits of these patterns."""
        if flooding != self._flooding:
            self._flooding = flooding
            self._database = _load_or_compile(self._expressions, flooding)

    def _find_ends(self, text: bytes) -> array[int]:
        """Return end << _ID_BITS | pattern for all matches, unordered."""
        ends = array("Q")
        add = ends.append
        base = 0

        def note(pattern: int, start: int, end: int, flags: int, context: object) -> None:
            add((base + end) << _ID_BITS | pattern)  # 0.2 us per match: nothing else is done here

        # If hyperscan fails here, our own arguments are wrong: its errors need no translation.
        if not self._flooding:
            self._database.scan(text, match_event_handler=note)
            return ends
        for begin, end in _blocks(text):
            base = begin
            self._database.scan(text[begin:end], match_event_handler=note)
        return ends


def to_hyperscan(pattern: str) -> str:
    """Rewrite an expression of `re` so that hyperscan finds in many lines at once what `re` finds in one.

    No class matches a newline or a carriage return, which also ends a line: hyperscan knows only the newline, and
    replacing the others costs a third of the matching time. Python's own notations are translated to PCRE. Two changes
    may find more: a repetition at the end is shortened (hyperscan calls back for every possible end of a match, so
    `error: (.+)` would call for each character), and an unbounded beginning is dropped if a literal follows
    (`: +[0-9]+ Bus error` would run on every byte, and two such patterns halve the total rate).

    >>> print(to_hyperscan(r"error:\\s(?P<what>[^;]+)"))
    error:[ \\t\\x0b\\f](?P<what>[^\\r\\n;])
    """
    parts = [_rewrite(part) for part in _PART.findall(pattern)]
    parts = parts[_unbounded_beginning(parts) :]
    closing = 0
    while len(parts) > closing + 1:
        if parts[-1 - closing] == ")":
            closing += 1
            continue
        place = len(parts) - 1 - closing
        if not _QUANTIFIER.fullmatch(parts[place]) or not _is_class(parts[place - 1]):
            break
        least = _least(parts[place])
        parts[place - (least == 0) : place + 1] = [f"{{{least}}}"] if least > 1 else []
        if least:
            break
    return "".join(parts)


_QUANTIFIER = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\}|\{,[0-9]*\})[?+]?")
_PART = re.compile(rf"(?s)\\.|\[\^?\]?(?:\\.|[^]\\])*\]|{_QUANTIFIER.pattern}|.")
_BEGIN, _END = r"(?:^|\r)", r"(?:\r|$)"
_IN_PCRE = {
    ".": r"[^\r\n]",
    r"\s": r"[ \t\x0b\f]",
    r"\D": r"[^\d\r\n]",
    r"\W": r"[^\w\r\n]",
    "^": _BEGIN,
    r"\A": _BEGIN,
    "$": _END,
    r"\Z": _END,
    r"\v": r"\x0b",
}
_IN_PCRE_CLASS = {r"\s": r" \t\x0b\f", r"\v": r"\x0b"}


def _rewrite(part: str) -> str:
    if part.startswith("{,"):
        return "{0" + part[1:]
    if not part.startswith("["):
        return _IN_PCRE.get(part, part)
    inside = re.sub(r"(?s)\\.", lambda escape: _IN_PCRE_CLASS.get(escape[0], escape[0]), part[1:-1])
    if not inside.startswith("^"):
        return f"[{inside}]"
    # A bracket or dash in the first position is literal, but not after other characters.
    escaped = re.sub(r"^[]-]", lambda first: "\\" + first[0], inside[1:])
    return rf"[^\r\n{escaped}]"


def _unbounded_beginning(parts: Sequence[str]) -> int:
    """Return the number of parts before the first literal, if they may match any length; else 0."""
    if re.match(r"\(\?[a-zA-Z]+\)", "".join(parts)):  # flags, which apply to all of it
        return 0
    depth = run = start = 0
    for index, part in enumerate(parts):
        depth += (part == "(") - (part == ")")
        if depth == 0 and part == "|":
            return 0
        is_last = index + 1 == len(parts)
        is_repeated = not is_last and _QUANTIFIER.fullmatch(parts[index + 1])
        is_plain = re.fullmatch(r"[^\\()|.^$*+?]|\\[^A-Za-z0-9]", part)
        run = run + 1 if depth == 0 and is_plain and not is_repeated else 0
        if run == LITERAL and not start:
            start = index + 1 - LITERAL
            if not any(before[0] in "*+" or re.match(r"\{[0-9]+,\}", before) for before in parts[:start]):
                return 0
    return start


def _is_class(part: str) -> bool:
    return part == "." or len(part) > 2 or part in {r"\S", r"\w", r"\d"}


def _least(quantifier: str) -> int:
    """Return the minimum number of repetitions: 0 for `*?`, 1 for `+`, 3 for `{3,80}`."""
    if quantifier[0] == "{":
        return int(re.split("[{,}]", quantifier)[1] or 0)
    return int(quantifier[0] == "+")


def _compile(expressions: Sequence[bytes], flooding: frozenset[int]) -> hyperscan.Database:
    flags = [
        hyperscan.HS_FLAG_MULTILINE | (hyperscan.HS_FLAG_SINGLEMATCH if index in flooding else 0)
        for index in range(len(expressions))
    ]
    database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    database.compile(expressions, ids=list(range(len(expressions))), flags=flags)
    return database


def _load_or_compile(expressions: Sequence[bytes], flooding: frozenset[int]) -> hyperscan.Database:
    """Compile, or load from the cache. A cache that cannot be used is no error: it only costs time."""
    version = hyperscan.__version__  # type: ignore[attr-defined]
    key = repr((expressions, sorted(flooding), version, platform.machine()))
    name = f"signs-{hashlib.sha256(key.encode()).hexdigest()[:32]}.hs"
    folder = _cache_folder()
    if folder:
        try:
            # Hyperscan detects damage and other processors: it verifies a checksum, and the target of the database.
            database = hyperscan.loadb((folder / name).read_bytes(), hyperscan.HS_MODE_BLOCK)
            database.scratch = hyperscan.Scratch(database)
            return database
        except (OSError, hyperscan.error):
            pass
    began_s = time.perf_counter()
    database = _compile(expressions, flooding)
    if folder and time.perf_counter() - began_s >= CACHED_FROM_S:
        with contextlib.suppress(OSError):
            _keep(folder, name, hyperscan.dumpb(database))
    return database


def _cache_folder() -> Path | None:
    """Return the user's cache directory by the XDG base directory specification; None if there is none."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the specification says to ignore a relative one
        return base / "allranks"
    try:
        return Path.home() / ".cache" / "allranks"
    except RuntimeError:
        return None


def _keep(folder: Path, name: str, data: bytes) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Many ranks may start at once on one file system: the last rename wins, and all write the same content.
    draft = folder / f"{name}.{platform.node()}.{os.getpid()}"
    try:
        draft.write_bytes(data)
        draft.replace(folder / name)
    finally:
        draft.unlink(missing_ok=True)
    kept = sorted(folder.glob("signs-*.hs"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in kept[CACHED_DATABASES:]:
        path.unlink(missing_ok=True)


def _compile_alone(pattern: str) -> None:
    try:
        _compile([to_hyperscan(pattern).encode()], frozenset())
    except hyperscan.error as exc:
        reason = str(exc).rstrip(".")
        raise ValueError(
            f"hyperscan refuses the pattern {pattern!r}: {reason}; "
            "expected an expression that needs a character, without look-around and back-references"
        ) from exc


def _blocks(text: bytes) -> Iterator[tuple[int, int]]:
    """Split in half, and the rest in half again, at line ends, so that no match is cut."""
    begin = 0
    while len(text) - begin > LAST_BLOCK:
        end = text.find(b"\n", (begin + len(text)) // 2) + 1
        if not end or end == len(text):
            break
        yield begin, end
        begin = end
    yield begin, len(text)


def _to_hits(chunk: Chunk, ends: Sequence[int]) -> Iterator[Hit]:
    """Merge the ends of matches in one segment."""
    data = chunk.data
    index = at = 0
    number = chunk.first_line
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
            patterns.add(ends[index] & (1 << _ID_BITS) - 1)
            index += 1
        # Hits are close together: usually a few lines are counted.
        number = chunk.number_at(begin) if begin - at > COUNT_BYTES else number + data.count(b"\n", at, begin)
        at = begin
        yield Hit(number, data[begin:stop], tuple(sorted(patterns)))
