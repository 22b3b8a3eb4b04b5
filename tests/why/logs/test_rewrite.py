"""What a pattern becomes before it is searched for, and which texts each of its matches contains."""

from __future__ import annotations

import re

import pytest

from allranks.causes.book import all_causes
from allranks.why.logs.log_events import list_patterns
from allranks.why.logs.plain import LEAST_LITERAL
from allranks.why.logs.rewrite import list_literals, to_hyperscan

PATTERNS = [pattern.scan for pattern in list_patterns(all_causes())]


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


@pytest.mark.parametrize(
    ("pattern", "literals"),
    [
        ("needle", {"needle"}),
        ("Needle (?:in|under) haystack", {" haystack"}),
        ("(?:needle|thread)s?", {"needle", "thread"}),
        ("(?:needle|thread)?s", {"s"}),
        ("(?:needle|thread)*s+", {"s"}),
        ("(?:needle|thread){2}", {"needle", "thread"}),
        ("needle|[a-z]+", set()),
        ("(?:a|[bc])", set()),
        ("(?P<what>needle)[0-9]", {"needle"}),
        (r"needles?\b thread", {" thread"}),
        (r"needles?\bthread", {"needle", "thread"}),
        ("needle{3}x", {"needle"}),
        ("needle{,3}x", {"needl"}),
        (r"a\.b\[c\]\d", {"a.b[c]"}),
        (r"a\x0bneedle\x0b", {"needle"}),
        ("(?i)NeedLe", {"needle"}),
        ("(?i:NeedLe)x", {"needle"}),
        ("(?:(?:needle|thread) (?:and|or) a|(?:pins|cloth) only) thing", {"needle", "thread", " only"}),
        ("[^a]", set()),
        ("^$", set()),
    ],
)
def test_each_match_contains_one_of_these_texts(pattern: str, literals: set[str]) -> None:
    found = list_literals(pattern)
    assert found == literals or max(map(len, found)) == max(map(len, literals))


def test_all_patterns_have_literals_and_nearly_all_have_long_ones() -> None:
    literals = [list_literals(to_hyperscan(pattern)) for pattern in PATTERNS]
    assert [pattern for pattern, found in zip(PATTERNS, literals, strict=True) if not found] == []
    short = {text for found in literals for text in found if len(text) < LEAST_LITERAL}
    assert len(short) < 60, "each of them costs a search in every block"


def test_all_hits_contain_the_literals_of_the_signs_that_they_show() -> None:
    lines = [line for cause in all_causes() for text in cause.hits for line in text.splitlines()]
    shown = 0
    for pattern in PATTERNS:
        for line in filter(re.compile(pattern).search, lines):
            shown += 1
            assert any(text in line.lower() for text in list_literals(to_hyperscan(pattern))), (pattern, line)
    assert shown > 1000
