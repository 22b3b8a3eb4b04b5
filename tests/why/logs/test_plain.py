"""Does `re` alone report what hyperscan reports? On real logs, in long lines, and where blocks and windows end."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.causes.book import all_causes
from allranks.why.evaluate import read_cases
from allranks.why.logs import match
from allranks.why.logs.hyper import HyperscanEngine
from allranks.why.logs.log_events import list_patterns
from allranks.why.logs.match import Matcher
from allranks.why.logs.plain import BLOCK_BYTES, WINDOW_BYTES, PlainEngine
from allranks.why.logs.read import Chunk

HERE = Path(__file__).parents[1]
CORPUS = Path(__file__).parents[4] / "shared/corpus/dev"
PATTERNS = [pattern.scan for pattern in list_patterns(all_causes())]
SAMPLES = [text.encode() for cause in all_causes() for text in (*cause.hits, *cause.misses)]

Pair = tuple[Matcher, Matcher]


@pytest.fixture(scope="module")
def both() -> Pair:
    return Matcher(PATTERNS, HyperscanEngine), Matcher(PATTERNS, PlainEngine)


def compare(both: Pair, data: bytes) -> int:
    """Return the number of hits, which is the same for both, as are their lines and patterns."""
    fast, plain = (matcher.scan(Chunk(data, 1, 0)) for matcher in both)
    assert plain == fast
    return len(fast)


def real_logs() -> Iterator[bytes]:
    for path in sorted((HERE / "baselines").glob("*.txt.gz")):
        yield gzip.decompress(path.read_bytes())
    for name in ("reports.jsonl", "later_reports.jsonl"):
        yield from (case["log"].encode() for case in read_cases(HERE / name))
    for path in sorted((HERE / "probes").rglob("*")):
        if path.is_file():
            yield path.read_bytes()


def test_real_logs_have_the_same_hits(both: Pair) -> None:
    counts = [compare(both, data) for data in real_logs()]
    assert sum(counts) > 0


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus is not part of this repository")
def test_the_corpus_has_the_same_hits(both: Pair) -> None:
    counts = [compare(both, json.loads(path.read_text())["log"].encode()) for path in sorted(CORPUS.glob("*.json"))]
    assert sum(counts) > 0


def test_hits_are_the_same_wherever_a_block_ends(both: Pair) -> None:
    """Hits of all causes in random order, over several blocks; the matchers may begin to take samples."""
    dice = random.Random(1)
    lines = [line for sample in SAMPLES for line in sample.splitlines()]
    data = b"\n".join(dice.choices(lines, k=5 * BLOCK_BYTES // 60))
    assert len(data) > 4 * BLOCK_BYTES
    assert compare(both, data) > 1000


def test_samples_of_floods_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "FLOOD", 20)
    few = PATTERNS[::10]  # hyperscan compiles them again for each set of floods
    both = Matcher(few, HyperscanEngine), Matcher(few, PlainEngine)
    dice = random.Random(2)
    lines = [line for sample in SAMPLES for line in sample.splitlines()]
    for _ in range(3):
        compare(both, b"\n".join(dice.choices(lines, k=3 * BLOCK_BYTES // 60)))
        assert both[0].flooding == both[1].flooding
    assert len(both[0].flooding) >= 3


@pytest.mark.parametrize(
    "gap", [0, 10, match.REACH - 60, match.REACH, WINDOW_BYTES - 30, WINDOW_BYTES, 3 * WINDOW_BYTES]
)
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
