"""What finds patterns in a chunk: hyperscan, in one pass, or Python's `re` where that is missing.

    engine = HyperscanEngine(patterns)            # compiling takes 1.4 ms per pattern, so large sets are cached
    engine.find(b"...")                           # end << ID_BITS | index, for each match

Both find at least one match for each pattern in each segment of a line in which `re` finds one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import platform
import re
import time
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from allranks.files.folder import Folder, RefusedError, why_not_ours
from allranks.why.logs import rewrite
from allranks.why.logs.rewrite import find_literal, to_hyperscan

try:
    import hyperscan
except ImportError:  # no wheel for this machine; or, on a musl system, a library that it needs is missing
    hyperscan: Any = None  # type: ignore[no-redef]

ID_BITS = 16
"""A match's end and its pattern's index share one integer: half the time of a tuple, an eighth of its memory."""
_NONE: frozenset[int] = frozenset()
CACHED_FROM_S = 0.1
"""A database that takes this long to compile is cached."""
CACHED_DATABASES = 8
"""Maximum number of cached databases, the newest: the causes of some versions, 1 MB each."""


def has_hyperscan() -> bool:
    """Whether the fast engine is there. Without it the answer is the same, and takes longer."""
    return hyperscan is not None


class HyperscanEngine:
    """Patterns, compiled for hyperscan. They are cached below `XDG_CACHE_HOME/allranks` and loaded in 1 ms.

    Raises:
        ValueError: hyperscan rejects a pattern; the message says which one and why.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = tuple(patterns)
        self._flooding: frozenset[int] = frozenset()
        try:
            self._database = _load_or_compile(self._patterns, self._flooding)
        except hyperscan.error as exc:
            for pattern in patterns:  # the error does not name the pattern
                _compile_alone(pattern)
            raise ValueError(f"hyperscan refuses these {len(patterns)} patterns together: {exc}") from exc

    def find(self, text: bytes, flooding: frozenset[int] = _NONE) -> array[int]:
        """Return `end << ID_BITS | index` for all matches, unordered; for the first only of patterns that flood."""
        if flooding != self._flooding:
            self._flooding, self._database = flooding, _load_or_compile(self._patterns, flooding)
        found = array("Q")
        add = found.append

        def note(pattern: int, start: int, end: int, flags: int, context: object) -> None:
            add(end << ID_BITS | pattern)  # 0.2 us per match: nothing else is done here

        # If hyperscan fails here, our own arguments are wrong: its errors need no translation.
        self._database.scan(text, match_event_handler=note)
        return found


class PlainEngine:
    """Patterns for `re`: one is tried where a text that each of its matches contains occurs. 1.6 MB/s."""

    def __init__(self, patterns: Sequence[str]) -> None:
        expressions = list(map(to_hyperscan, patterns))
        self._sought = [(find_literal(expression).encode(), expression.encode()) for expression in expressions]

    def find(self, text: bytes, flooding: frozenset[int] = _NONE) -> array[int]:
        """Return `end << ID_BITS | index` for matches, unordered; for the first only of patterns that flood."""
        found = array("Q")
        for index, (literal, expression) in enumerate(self._sought):
            if literal in text:
                matches = itertools.islice(_compile_plain(expression).finditer(text), 1 if index in flooding else None)
                found.extend(match.end() << ID_BITS | index for match in matches)
        return found


Engine = HyperscanEngine | PlainEngine


@cache
def _compile_plain(expression: bytes) -> re.Pattern[bytes]:
    return re.compile(expression, re.MULTILINE)


def _compile(patterns: Sequence[str], flooding: frozenset[int]) -> hyperscan.Database:
    expressions = [to_hyperscan(pattern).encode() for pattern in patterns]
    once = hyperscan.HS_FLAG_MULTILINE | hyperscan.HS_FLAG_SINGLEMATCH
    ids = list(range(len(expressions)))
    database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    database.compile(expressions, ids, flags=[once if i in flooding else hyperscan.HS_FLAG_MULTILINE for i in ids])
    return database


def _load_or_compile(patterns: Sequence[str], flooding: frozenset[int]) -> hyperscan.Database:
    """Compile, or load from the cache. A cache that cannot be used is no error: it only costs time."""
    version = hyperscan.__version__  # type: ignore[attr-defined]
    # Rewriting a thousand patterns takes 50 ms, so the key has how they are rewritten instead.
    rules = Path(rewrite.__file__).read_bytes()
    key = repr((patterns, rules, sorted(flooding), version, platform.machine()))
    name = f"signs-{hashlib.sha256(key.encode()).hexdigest()[:32]}.hs"
    folder = _cache_folder()
    if folder:
        try:
            # Hyperscan detects damage and other processors: it verifies a checksum, and the target of the database.
            database = hyperscan.loadb(_open_own(folder).read(name), hyperscan.HS_MODE_BLOCK)
            database.scratch = hyperscan.Scratch(database)
            return database
        except (OSError, hyperscan.error):
            pass
    began_s = time.perf_counter()
    database = _compile(patterns, flooding)
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


def _open_own(path: Path) -> Folder:
    """Open the cache, which another user could have made where it is in a shared directory."""
    folder = Folder.at(path)
    if (why := why_not_ours(folder.owner, os.geteuid())) is not None:
        raise RefusedError(errno.EPERM, why, str(path))
    return folder


def _keep(folder: Path, name: str, data: bytes) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Many ranks may start at once on one file system: the last rename wins, and all write the same content.
    _open_own(folder).write_whole(name, data)
    kept = sorted(folder.glob("signs-*.hs"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in kept[CACHED_DATABASES:]:
        path.unlink(missing_ok=True)


def _compile_alone(pattern: str) -> None:
    try:
        _compile([pattern], _NONE)
    except hyperscan.error as exc:
        reason = str(exc).rstrip(".")
        raise ValueError(
            f"hyperscan refuses the pattern {pattern!r}: {reason}; "
            "expected an expression that needs a character, without look-around and back-references"
        ) from exc
