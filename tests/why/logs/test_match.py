"""Which lines hit: never less than what `re` finds, however lines end and often they hit, with either engine."""

from __future__ import annotations

import gzip
import random
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from benchmarks.why.labeled import read_cases
from hypothesis import given
from hypothesis import strategies as st

from allranks.causes.book import all_causes
from allranks.why.logs import match
from allranks.why.logs.log_events import list_patterns
from allranks.why.logs.match import Engine, Hit, HyperscanEngine, Matcher, PlainEngine
from allranks.why.logs.read import Chunk

PATTERNS = [pattern.scan for pattern in list_patterns(all_causes())]
SIGNS = [sign.pattern for cause in all_causes() for sign in cause.signs if "log" in sign.where]
EXACT = [re.compile(pattern.encode()) for pattern in SIGNS]
LINES = [line for cause in all_causes() for text in (*cause.hits, *cause.misses) for line in text.splitlines()]


@pytest.fixture(scope="module")
def signs() -> Matcher:
    return Matcher(SIGNS)


def scan(patterns: Sequence[str], data: bytes) -> list[Hit]:
    """Return the hits, which are the same for both engines."""
    hits = Matcher(patterns, HyperscanEngine).scan(Chunk(data, 1))
    assert Matcher(patterns, PlainEngine).scan(Chunk(data, 1)) == hits
    return hits


def test_what_only_an_end_says_is_not_looked_for_in_lines() -> None:
    looked_for = [pattern.sign for pattern in list_patterns(all_causes()) if pattern.sign is not None]
    assert [sign.pattern for sign in looked_for] == SIGNS
    assert len(SIGNS) < sum(len(cause.signs) for cause in all_causes())


# What hits


def test_a_hit_says_line_text_and_patterns() -> None:
    hits = scan(["no such text", "lost its mind", "rank [0-9]+"], b"ok\n\nrank 3 lost its mind today\nrank 4\n")
    assert hits == [Hit(3, b"rank 3 lost its mind today", (1, 2)), Hit(4, b"rank 4", (2,))]


def test_lines_are_counted_from_the_chunks_first() -> None:
    assert Matcher(["needle"]).scan(Chunk(b"a\nneedle\n", 1000))[0].number == 1001


def test_carriage_returns_end_segments_but_no_lines() -> None:
    hits = scan(["needle"], b"bar 1\rneedle 1\rbar 2\rneedle 2\nneedle 3\r\n")
    assert hits == [Hit(1, b"needle 1", (0,)), Hit(1, b"needle 2", (0,)), Hit(2, b"needle 3", (0,))]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
@pytest.mark.parametrize(
    "pattern",
    [
        r"needle\s+thread", r"needle[^x]{1,9}thread", r"needle.{0,9}thread", r"needle[\s:]thread",
        r"needle\n?\s?thread\d",
    ],
)  # fmt: skip
def test_no_match_goes_from_one_line_into_the_next(pattern: str, end: bytes) -> None:
    assert scan([pattern], b"needle" + end + b"thread" + end) == []
    assert [hit.raw for hit in scan([pattern, "needle :thread"], b"needle :thread")] == [b"needle :thread"]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
@pytest.mark.parametrize("pattern", [r"^needle$", r"^needle\b", r"\bneedle$", r"(?i)^NEEDLE$"])
def test_the_end_is_that_of_a_segment_and_a_prefix_may_stand_before_the_beginning(pattern: str, end: bytes) -> None:
    hits = scan([pattern], b"hay" + end + b"needle" + end + b"needless" + end + b"3: needle")
    assert [hit.raw for hit in hits] == [b"needle", b"3: needle"]


def test_lines_that_end_in_carriage_returns_hit_each() -> None:
    assert [hit.raw for hit in scan([r"^needle$"], b"needle\rneedle\rneedle\n")] == [b"needle"] * 3


def test_a_long_line_gives_a_part_around_each_match() -> None:
    data = b"x" * 100_000 + b"needle" + b"y" * 100_000 + b"needle needle" + b"z" * 10
    first, second = scan(["needle"], data)
    assert (first.number, second.number) == (1, 1)
    assert len(first.raw) <= 16_384
    assert re.search(b"xneedley", first.raw)
    assert second.raw.endswith(b"needle needlezzzzzzzzzz")


def test_a_segment_hits_once_where_one_match_takes_its_carriage_return() -> None:
    (hit,) = scan(["first", "last$"], b"first last\rother\n")
    assert (hit.raw, hit.patterns) == (b"first last", (0, 1))


def test_nothing_hits_in_nothing() -> None:
    assert scan(["needle"], b"") == []


# All signs

noise = st.text("abc 019:.-[]()\t\x1b", max_size=30).map(str.encode) | st.binary(max_size=20)
line = st.tuples(noise, st.sampled_from(LINES).map(str.encode) | noise, noise).map(b"".join)
text = st.lists(st.tuples(line, st.sampled_from([b"\n", b"\r", b"\r\n", b""])).map(b"".join), max_size=12).map(b"".join)


def expected_of(data: bytes) -> list[tuple[int, bytes, set[int]]]:
    found = []
    for number, whole in enumerate(data.split(b"\n"), start=1):
        for segment in whole.split(b"\r"):
            found.append((number, segment, {i for i, sign in enumerate(EXACT) if sign.search(segment)}))
    return [each for each in found if each[2]]


@given(data=text)
def test_all_that_re_finds_in_a_segment_is_reported_for_it(signs: Matcher, data: bytes) -> None:
    hits = signs.scan(Chunk(data, 1))
    reported = {(hit.number, hit.raw): set(hit.patterns) for hit in hits}
    for number, segment, found in expected_of(data):
        assert found <= reported.get((number, segment), set()), segment
    assert [hit.number for hit in hits] == sorted(hit.number for hit in hits)


def test_every_line_that_a_cause_knows_is_found(signs: Matcher) -> None:
    data = "\n".join(LINES).encode()
    reported = {(hit.number, hit.raw): set(hit.patterns) for hit in signs.scan(Chunk(data, 1))}
    for number, segment, found in expected_of(data):
        assert found <= reported[number, segment]


# Floods


@pytest.mark.parametrize("engine", [HyperscanEngine, PlainEngine])
def test_a_flood_is_sampled_and_all_else_is_not(engine: type[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "FLOOD", 500)
    matcher = Matcher(["flood", "needle"], engine)
    lines = [b"flood %d" % number if number % 100 else b"flood and needle" for number in range(1000)]
    chunk = Chunk(b"\n".join(lines), 1)
    assert len(matcher.scan(chunk)) == 1000  # memory is bounded by the chunk; it is the next one that is thinned
    hits = matcher.scan(chunk)
    assert [hit.number for hit in hits if 1 in hit.patterns] == list(range(1, 1001, 100))
    sampled = [hit.number for hit in hits if 0 in hit.patterns]
    assert sampled[0] == 1
    assert 3 <= len(sampled) <= 20
    assert sampled[-1] > 1000 - match.LAST_BLOCK // len(b"flood 100\n") - 2
    matcher.forget()
    assert len(matcher.scan(chunk)) == 1000


# What is refused, and what is cached


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("needle(?!s)", "Zero-width"), (r"(needle)\1", "Back-references"), ("a*", "empty"), ("needle[", "class")],
)
def test_a_pattern_that_cannot_be_is_named(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        Matcher(["fine", pattern, "fine, too"])
    assert f"refuses the pattern {pattern!r}: " in str(caught.value)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    monkeypatch.setattr(match, "CACHED_FROM", 1)
    return tmp_path / "a cache" / "allranks"


def find_needle() -> None:
    assert Matcher(["needle"], HyperscanEngine).scan(Chunk(b"a needle", 1)) == [Hit(1, b"a needle", (0,))]


def test_a_compiled_database_is_loaded_the_next_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_needle()
    (kept,) = cache.iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    monkeypatch.setattr(match, "_compile", lambda *_: pytest.fail("compiled again"))
    find_needle()
    assert list(cache.iterdir()) == [kept]


def test_other_patterns_are_another_database_and_old_ones_go(cache: Path) -> None:
    for number in range(match.CACHED_DATABASES + 3):
        Matcher([f"thread {number}"], HyperscanEngine)
        find_needle()
    assert len(list(cache.iterdir())) == match.CACHED_DATABASES


@pytest.mark.parametrize("damage", [b"", b"no database", None])
def test_a_damaged_database_is_compiled_anew(cache: Path, damage: bytes | None) -> None:
    find_needle()
    (kept,) = cache.iterdir()
    good = kept.read_bytes()
    kept.write_bytes(damage if damage is not None else good[:100] + bytes(10) + good[110:])
    find_needle()
    assert kept.read_bytes() == good


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.parent.write_text("no directory")
    find_needle()


# Without hyperscan

HERE = Path(__file__).parents[1]
SAMPLES = [text.encode() for cause in all_causes() for text in (*cause.hits, *cause.misses)]

Pair = tuple[Matcher, Matcher]


@pytest.fixture(scope="module")
def both(matcher: Matcher) -> Pair:
    return matcher, Matcher(PATTERNS, PlainEngine)


def compare(both: Pair, data: bytes) -> int:
    """Return the number of hits, which is the same for both, as are their lines and patterns."""
    fast, plain = (matcher.scan(Chunk(data, 1)) for matcher in both)
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


@given(data=text)
def test_any_text_has_the_same_hits(both: Pair, data: bytes) -> None:
    compare(both, data)


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


@pytest.mark.parametrize("gap", [0, 10, match.REACH - 60, match.REACH, 3 * match.REACH])
@pytest.mark.parametrize("filler", [b"x", b" ", b"rank 3 "])
def test_in_a_line_longer_than_any_window_each_match_is_reported(both: Pair, gap: int, filler: bytes) -> None:
    """Where the parts of such a line begin may differ by some bytes; what is found in them may not."""
    texts = [b"Traceback (most recent call last)", b"exits with return code = 1", b"Exit code: 9"] * 3
    space = (filler * gap)[:gap]
    data = filler * 2000 + space.join(texts) + filler * 2000
    reported = []
    for matcher in both:
        hits = matcher.scan(Chunk(data, 1))
        reported.append({index for hit in hits for index in hit.patterns})
        covered = b"\n".join(hit.raw for hit in hits)
        assert all(text in covered for text in texts)
        assert {hit.number for hit in hits} == {1}
    assert reported[0] == reported[1] != set()


def test_one_huge_line_takes_no_more_than_its_size(both: Pair) -> None:
    """A literal in every fourth word of 2 MB, and no match: each is looked at once, with a little around it."""
    assert compare(both, b"CUDA error: no, exits with return code x " * 50_000) == 0
