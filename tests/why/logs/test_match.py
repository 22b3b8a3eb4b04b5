"""Which lines hit: never less than what `re` finds, whatever the lines end in and however often they hit."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.causes.book import all_causes
from allranks.why.logs import match
from allranks.why.logs.engines import Engine, HyperscanEngine, PlainEngine
from allranks.why.logs.log_events import list_patterns
from allranks.why.logs.match import Hit, Matcher
from allranks.why.logs.read import Chunk

SIGNS = [sign.pattern for cause in all_causes() for sign in cause.signs if "log" in sign.where]
EXACT = [re.compile(pattern.encode()) for pattern in SIGNS]
LINES = [line for cause in all_causes() for text in (*cause.hits, *cause.misses) for line in text.splitlines()]


@pytest.fixture(scope="module")
def signs() -> Matcher:
    return Matcher(SIGNS)


@pytest.fixture(scope="module")
def plain_signs() -> Matcher:
    return Matcher(SIGNS, PlainEngine)


@pytest.fixture(params=[HyperscanEngine, PlainEngine])
def engine(request: pytest.FixtureRequest) -> type[Engine]:
    return request.param


def scan(patterns: Sequence[str], data: bytes) -> list[Hit]:
    """Return the hits, which are the same for both engines."""
    hits = Matcher(patterns, HyperscanEngine).scan(Chunk(data, 1, 0))
    assert Matcher(patterns, PlainEngine).scan(Chunk(data, 1, 0)) == hits
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
@pytest.mark.parametrize("pattern", [r"^needle$", r"needle\Z", r"^needle\b", r"\bneedle$", r"(?i)^NEEDLE$"])
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
    hits = signs.scan(Chunk(data, 1, 0))
    reported = {(hit.number, hit.raw): set(hit.patterns) for hit in hits}
    for number, segment, found in expected_of(data):
        assert found <= reported.get((number, segment), set()), segment
    assert [hit.number for hit in hits] == sorted(hit.number for hit in hits)


@given(data=text)
def test_without_hyperscan_the_same_is_reported(signs: Matcher, plain_signs: Matcher, data: bytes) -> None:
    chunk = Chunk(data, 1, 0)
    assert plain_signs.scan(chunk) == signs.scan(chunk)


def test_every_line_that_a_cause_knows_is_found(signs: Matcher) -> None:
    data = "\n".join(LINES).encode()
    reported = {(hit.number, hit.raw): set(hit.patterns) for hit in signs.scan(Chunk(data, 1, 0))}
    for number, segment, found in expected_of(data):
        assert found <= reported[number, segment]


# Floods


def test_a_flood_is_sampled_and_all_else_is_not(engine: type[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "FLOOD", 500)
    matcher = Matcher(["flood", "needle"], engine)
    lines = [b"flood %d" % number if number % 100 else b"flood and needle" for number in range(1000)]
    chunk = Chunk(b"\n".join(lines), 1, 0)
    assert len(matcher.scan(chunk)) == 1000  # memory is bounded by the chunk; it is the next one that is thinned
    hits = matcher.scan(chunk)
    assert [hit.number for hit in hits if 1 in hit.patterns] == list(range(1, 1001, 100))
    sampled = [hit.number for hit in hits if 0 in hit.patterns]
    assert sampled[0] == 1
    assert 3 <= len(sampled) <= 20
    assert sampled[-1] > 1000 - match.LAST_BLOCK // len(b"flood 100\n") - 2


def test_each_source_gives_the_first_of_a_flood_and_one_near_its_end(
    engine: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(match, "FLOOD", 1)
    matcher = Matcher(["flood"], engine)
    matcher.scan(Chunk(b"flood\n", 1, 0))
    assert matcher.scan(Chunk(b"flood 1\nflood 2\n", 1, 0)) == [Hit(1, b"flood 1", (0,))]
    data = b"".join(b"%d flood\n" % number for number in range(100_000))
    numbers = [hit.number for hit in matcher.scan(Chunk(data, 1, 0))]
    assert numbers[0] == 1
    assert numbers[-1] > 99_800
    assert len(numbers) < 25


@given(data=text)
def test_patterns_that_do_not_flood_are_reported_as_before(engine: type[Engine], data: bytes) -> None:
    calm, flooded = (Matcher(["[a-c]+", "NCCL WARN", "[Ee]rror"], engine) for _ in range(2))
    flooded._flooding = frozenset([0])
    chunk = Chunk((data + b"\n") * 50, 1, 0)
    before, after = (
        {(hit.number, pattern) for hit in matcher.scan(chunk) for pattern in hit.patterns if pattern != 0}
        for matcher in (calm, flooded)
    )
    assert before == after
