"""Hyperscan's databases: what it refuses, and what is cached. Does `re` alone report what hyperscan reports?"""

from __future__ import annotations

import gzip
import random
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from benchmarks.why.labeled import read_cases

from allranks.causes.book import all_causes
from allranks.why.logs import engines, match
from allranks.why.logs.engines import HyperscanEngine, PlainEngine
from allranks.why.logs.log_events import list_patterns
from allranks.why.logs.match import Hit, Matcher
from allranks.why.logs.read import Chunk


def scan(patterns: Sequence[str], data: bytes) -> list[Hit]:
    return Matcher(patterns, HyperscanEngine).scan(Chunk(data, 1, 0))


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("needle(?!s)", "Zero-width"), (r"(needle)\1", "Back-references"), ("a*", "empty"), ("needle[", "class")],
)
def test_a_pattern_that_cannot_be_is_named(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        Matcher(["fine", pattern, "fine, too"])
    assert f"refuses the pattern {pattern!r}: " in str(caught.value)


# The cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    monkeypatch.setattr(engines, "CACHED_FROM_S", 0)
    return tmp_path / "a cache" / "allranks"


def test_a_compiled_database_is_loaded_the_next_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scan(["needle"], b"a needle") == [Hit(1, b"a needle", (0,))]
    (kept,) = cache.iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    monkeypatch.setattr(engines, "_compile", lambda *_: pytest.fail("compiled again"))
    assert scan(["needle"], b"a needle") == [Hit(1, b"a needle", (0,))]
    assert list(cache.iterdir()) == [kept]


def test_other_patterns_are_another_database(cache: Path) -> None:
    scan(["needle"], b"")
    assert scan(["thread"], b"a needle\na thread") == [Hit(2, b"a thread", (0,))]
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", [b"", b"no database", None])
def test_a_damaged_database_is_compiled_anew(cache: Path, damage: bytes | None) -> None:
    scan(["needle"], b"")
    (kept,) = cache.iterdir()
    good = kept.read_bytes()
    kept.write_bytes(damage if damage is not None else good[:100] + bytes(10) + good[110:])
    assert scan(["needle"], b"a needle") == [Hit(1, b"a needle", (0,))]
    assert kept.read_bytes() == good


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "CACHED_FROM_S", 0)
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert scan(["needle"], b"a needle") == [Hit(1, b"a needle", (0,))]


def test_old_databases_go(cache: Path) -> None:
    for number in range(engines.CACHED_DATABASES + 3):
        scan([f"needle {number}"], b"")
    assert len(list(cache.iterdir())) == engines.CACHED_DATABASES


def test_a_database_that_compiles_fast_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(engines, "CACHED_FROM_S", 60)
    scan(["needle"], b"")
    assert not list(tmp_path.iterdir())


# Without hyperscan

HERE = Path(__file__).parents[1]
PATTERNS = [pattern.scan for pattern in list_patterns(all_causes())]
SAMPLES = [text.encode() for cause in all_causes() for text in (*cause.hits, *cause.misses)]

Pair = tuple[Matcher, Matcher]


@pytest.fixture(scope="module")
def both(matcher: Matcher) -> Pair:
    return matcher, Matcher(PATTERNS, PlainEngine)


def compare(both: Pair, data: bytes) -> int:
    """Return the number of hits, which is the same for both, as are their lines and patterns."""
    fast, plain = (matcher.scan(Chunk(data, 1, 0)) for matcher in both)
    assert plain == fast
    return len(fast)


def real_logs() -> Iterator[bytes]:
    """A part of them: `re` reads 1.6 MB in a second."""
    for path in sorted((HERE / "baselines").glob("*.txt.gz"))[:3]:
        yield gzip.decompress(path.read_bytes())[:100_000]
    for name in ("reports.jsonl", "later_reports.jsonl"):
        yield b"\n".join(case["log"].encode() for case in read_cases(HERE / name)[::4])


def test_real_logs_have_the_same_hits(both: Pair) -> None:
    counts = [compare(both, data) for data in real_logs()]
    assert sum(counts) > 0


def test_hits_of_all_causes_are_the_same(both: Pair) -> None:
    dice = random.Random(1)
    lines = [line for sample in SAMPLES for line in sample.splitlines()]
    assert compare(both, b"\n".join(dice.choices(lines, k=5000))) > 1000


def test_samples_of_floods_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "FLOOD", 20)
    few = PATTERNS[::10]
    both = Matcher(few, HyperscanEngine), Matcher(few, PlainEngine)
    dice = random.Random(2)
    lines = [line for sample in SAMPLES for line in sample.splitlines()]
    for _ in range(3):
        compare(both, b"\n".join(dice.choices(lines, k=3000)))
    assert len(both[0]._flooding) >= 3


@pytest.mark.parametrize("gap", [0, 10, match.REACH - 60, match.REACH, 3 * match.REACH])
@pytest.mark.parametrize("filler", [b"x", b" ", b"rank 3 "])
def test_in_a_line_longer_than_any_window_each_match_is_reported(both: Pair, gap: int, filler: bytes) -> None:
    """Where the parts of such a line begin may differ by some bytes; what is found in them may not."""
    texts = [b"Traceback (most recent call last)", b"exits with return code = 1", b"Exit code: 9"] * 3
    space = (filler * gap)[:gap]
    data = filler * 2000 + space.join(texts) + filler * 2000
    reported = []
    for matcher in both:
        hits = matcher.scan(Chunk(data, 1, 0))
        reported.append({index for hit in hits for index in hit.patterns})
        covered = b"\n".join(hit.raw for hit in hits)
        assert all(text in covered for text in texts)
        assert {hit.number for hit in hits} == {1}
    assert reported[0] == reported[1] != set()


def test_one_huge_line_takes_no_more_than_its_size(both: Pair) -> None:
    """A literal in every fourth word of 2 MB, and no match: each is looked at once, with a little around it."""
    assert compare(both, b"CUDA error: no, exits with return code x " * 50_000) == 0
