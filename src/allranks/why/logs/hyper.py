"""All patterns in one pass of hyperscan. Compiling takes 1.4 ms per pattern, so large sets are cached."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import hyperscan

from allranks.files.folder import Folder, RefusedError, why_not_ours
from allranks.why.logs.engine import ID_BITS
from allranks.why.logs.rewrite import to_hyperscan

CACHED_FROM_S = 0.1
"""A database that takes this long to compile is cached."""
CACHED_DATABASES = 8
"""Maximum number of cached databases, the newest: the causes of some versions, 1 MB each."""


class HyperscanEngine:
    """Patterns, compiled for hyperscan. They are cached below `XDG_CACHE_HOME/allranks` and loaded in 1 ms.

    Raises:
        ValueError: hyperscan rejects a pattern; the message says which one and why.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._expressions = [to_hyperscan(pattern).encode() for pattern in patterns]
        try:
            self._database = _load_or_compile(self._expressions, frozenset())
        except hyperscan.error as exc:
            for pattern in patterns:  # the error does not name the pattern
                _compile_alone(pattern)
            raise ValueError(f"hyperscan refuses these {len(patterns)} patterns together: {exc}") from exc

    def sample(self, flooding: frozenset[int]) -> None:
        """From now on, report only the first match of these patterns in each text."""
        self._database = _load_or_compile(self._expressions, flooding)

    def find(self, text: bytes, base: int, ends: array[int]) -> None:
        """Append `base + end << ID_BITS | pattern` for all matches, unordered."""
        add = ends.append

        def note(pattern: int, start: int, end: int, flags: int, context: object) -> None:
            add((base + end) << ID_BITS | pattern)  # 0.2 us per match: nothing else is done here

        # If hyperscan fails here, our own arguments are wrong: its errors need no translation.
        self._database.scan(text, match_event_handler=note)


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
            database = hyperscan.loadb(_open_own(folder).read(name), hyperscan.HS_MODE_BLOCK)
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
        _compile([to_hyperscan(pattern).encode()], frozenset())
    except hyperscan.error as exc:
        reason = str(exc).rstrip(".")
        raise ValueError(
            f"hyperscan refuses the pattern {pattern!r}: {reason}; "
            "expected an expression that needs a character, without look-around and back-references"
        ) from exc
