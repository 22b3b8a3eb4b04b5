"""Which lines hit: never less than what `re` finds, whatever the lines end in and however often they hit."""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.causes.catalogue import all_causes
from allranks.why.logs import match
from allranks.why.logs.match import Hit, Matcher, to_hyperscan
from allranks.why.logs.read import Chunk

SIGNS = [sign.pattern for cause in all_causes() for sign in cause.signs]
EXACT = [re.compile(pattern.encode()) for pattern in SIGNS]
LINES = [line for cause in all_causes() for text in (*cause.hits, *cause.misses) for line in text.splitlines()]


@pytest.fixture(scope="module")
def signs() -> Matcher:
    return Matcher(SIGNS)


def scan(patterns: Sequence[str], data: bytes) -> list[Hit]:
    return Matcher(patterns).scan(Chunk(data, 1, 0))


# What hits


def test_a_hit_says_line_text_and_patterns() -> None:
    hits = scan(["no such text", "lost its mind", "rank [0-9]+"], b"ok\n\nrank 3 lost its mind today\nrank 4\n")
    assert hits == [Hit(3, b"rank 3 lost its mind today", (1, 2)), Hit(4, b"rank 4", (2,))]


def test_lines_are_counted_from_the_chunks_first() -> None:
    assert Matcher(["needle"]).scan(Chunk(b"a\nneedle\n", 1000, 4711))[0].number == 1001


def test_carriage_returns_end_segments_but_no_lines() -> None:
    hits = scan(["needle"], b"bar 1\rneedle 1\rbar 2\rneedle 2\nneedle 3\r\n")
    assert hits == [Hit(1, b"needle 1", (0,)), Hit(1, b"needle 2", (0,)), Hit(2, b"needle 3", (0,))]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
@pytest.mark.parametrize(
    "pattern",
    [
        r"needle\s+thread", r"needle[^x]{1,9}thread", r"needle\Wthread", r"needle\D+thread", r"needle.{0,9}thread",
        r"needle[\s:]thread", r"needle[^]]thread", r"needle[^-]thread", r"needle\n?\s?thread\d",
    ],
)  # fmt: skip
def test_no_match_goes_from_one_line_into_the_next(pattern: str, end: bytes) -> None:
    assert scan([pattern], b"needle" + end + b"thread" + end) == []
    assert [hit.raw for hit in scan([pattern, "needle :thread"], b"needle :thread")] == [b"needle :thread"]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
@pytest.mark.parametrize("pattern", [r"^needle$", r"\Aneedle\Z", r"^needle\b", r"\bneedle$", r"(?i)^NEEDLE"])
def test_anchors_are_those_of_a_segment(pattern: str, end: bytes) -> None:
    hits = scan([pattern], b"hay" + end + b"needle" + end + b"a needles" + end + b"needle")
    assert [hit.raw for hit in hits] == [b"needle", b"needle"]


@pytest.mark.parametrize(
    ("pattern", "rewritten"),
    [
        (r"error: (?P<what>.+)", r"error: (?P<what>[^\r\n])"),
        (r"error: (?P<what>.*)", r"error: (?P<what>)"),
        (r"error: (?:one|two[^:]{3,80})", r"error: (?:one|two[^\r\n:]{3})"),
        (r"error: \S+?", r"error: \S"),
        (r"error: (?P<code>[0-9]+)\b", r"error: (?P<code>[0-9]+)\b"),
        (r": +(?P<pid>[0-9]+) Bus error", " Bus error"),
        (r"(?P<node>\S+): (?:is )?down, all (?:of it|[a-z]+)", r"down, all (?:of it|[a-z])"),
        (r"the rank [0-9]+ had a Bus error", r"the rank [0-9]+ had a Bus error"),
        (r"[0-9]{1,8} Bus error", r"[0-9]{1,8} Bus error"),
        (r"[0-9]+ errors?", r" errors?"),
        (r"[0-9]+ err", r"[0-9]+ err"),
        (r"[0-9]+ bus error|[0-9]+ segfault", r"[0-9]+ bus error|[0-9]+ segfault"),
        (r"(?i)[0-9]+ bus error", r"(?i)[0-9]+ bus error"),
        (r"error\.*", r"error\.*"),
        (r"error\\.*", r"error\\"),
        (r"error (?:[a-z]+ )?", r"error (?:[a-z]+ )?"),
        (r"[^]]error[^-x]\w", r"[^\r\n\]]error[^\r\n\-x]\w"),
        (r"error[\s:]\Sx{,3}y", r"error[ \t\x0b\f:]\Sx{0,3}y"),
    ],
)
def test_expressions_are_rewritten_for_many_lines_and_few_calls(pattern: str, rewritten: str) -> None:
    assert to_hyperscan(pattern) == rewritten


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


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("needle(?!s)", "Zero-width"), (r"(needle)\1", "Back-references"), ("a*", "empty"), ("needle[", "class")],
)
def test_a_pattern_that_cannot_be_is_named(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        Matcher(["fine", pattern, "fine, too"])
    assert f"refuses the pattern {pattern!r}: " in str(caught.value)


# The catalogue

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
    hits = signs.scan(Chunk(data, 1, 0))
    reported = {(hit.number, hit.raw): set(hit.patterns) for hit in hits}
    for number, segment, found in expected_of(data):
        assert found <= reported.get((number, segment), set()), segment
    assert [hit.number for hit in hits] == sorted(hit.number for hit in hits)


def test_every_line_that_the_catalogue_knows_is_found(signs: Matcher) -> None:
    data = "\n".join(LINES).encode()
    reported = {(hit.number, hit.raw): set(hit.patterns) for hit in signs.scan(Chunk(data, 1, 0))}
    for number, segment, found in expected_of(data):
        assert found <= reported[number, segment]


# Floods


def test_a_flood_is_sampled_and_all_else_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "FLOOD", 500)
    matcher = Matcher(["flood", "needle"])
    lines = [b"flood %d" % number if number % 100 else b"flood and needle" for number in range(1000)]
    chunk = Chunk(b"\n".join(lines), 1, 0)
    assert len(matcher.scan(chunk)) == 1000  # memory is bounded by the chunk; it is the next one that is thinned
    assert matcher.flooding == {0}
    hits = matcher.scan(chunk)
    assert [hit.number for hit in hits if 1 in hit.patterns] == list(range(1, 1001, 100))
    sampled = [hit.number for hit in hits if 0 in hit.patterns]
    assert sampled[0] == 1
    assert 3 <= len(sampled) <= 20
    assert sampled[-1] > 1000 - match.LAST_BLOCK // len(b"flood 100\n") - 2


def test_each_source_gives_the_first_of_a_flood_and_one_near_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "FLOOD", 1)
    matcher = Matcher(["flood"])
    matcher.scan(Chunk(b"flood\n", 1, 0))
    assert matcher.scan(Chunk(b"flood 1\nflood 2\n", 1, 0)) == [Hit(1, b"flood 1", (0,))]
    data = b"".join(b"%d flood\n" % number for number in range(100_000))
    numbers = [hit.number for hit in matcher.scan(Chunk(data, 1, 0))]
    assert numbers[0] == 1
    assert numbers[-1] > 99_800
    assert len(numbers) < 25


@given(data=text)
def test_patterns_that_do_not_flood_are_reported_as_before(data: bytes) -> None:
    calm, flooded = Matcher(["[a-c]+", "NCCL WARN", "[Ee]rror"]), Matcher(["[a-c]+", "NCCL WARN", "[Ee]rror"])
    flooded._flooding = frozenset([0])
    flooded._database = match._compile(flooded._expressions, flooded._flooding)
    chunk = Chunk((data + b"\n") * 50, 1, 0)
    before, after = (
        {(hit.number, pattern) for hit in matcher.scan(chunk) for pattern in hit.patterns if pattern != 0}
        for matcher in (calm, flooded)
    )
    assert before == after


# The cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    monkeypatch.setattr(match, "CACHED_FROM_S", 0)
    return tmp_path / "a cache" / "allranks"


def test_a_compiled_database_is_loaded_the_next_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scan(["needle"], b"a needle") == [Hit(1, b"a needle", (0,))]
    (kept,) = cache.iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    monkeypatch.setattr(match, "_compile", lambda *_: pytest.fail("compiled again"))
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
    monkeypatch.setattr(match, "CACHED_FROM_S", 0)
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert scan(["needle"], b"a needle") == [Hit(1, b"a needle", (0,))]


def test_old_databases_go(cache: Path) -> None:
    for number in range(match.CACHED_DATABASES + 3):
        scan([f"needle {number}"], b"")
    assert len(list(cache.iterdir())) == match.CACHED_DATABASES


def test_a_database_that_compiles_fast_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(match, "CACHED_FROM_S", 60)
    scan(["needle"], b"")
    assert not list(tmp_path.iterdir())
