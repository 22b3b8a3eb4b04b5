"""What a pattern becomes before it is searched for, and which text each of its matches contains."""

from __future__ import annotations

import re

import pytest

from allranks.causes.book import all_causes
from allranks.why.logs.log_events import list_patterns
from allranks.why.logs.rewrite import UNKNOWN, find_literal, to_hyperscan

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
        (r"error (?:[a-z]+ )?", "error "),
        (r"line [0-9]+(?:, in (?P<function>.+)(?: \([a-z]\))?)?", "line [0-9]"),
        (r"error (?:[a-z]+ )?now", r"error (?:[a-z]+ )?now"),
        (r"[^:]error[^x-]\w", r"[^\r\n:]error[^\r\nx-]\w"),
        (r"error[\s:]\Sx{0,3}y", r"error[ \t\x0b\f:]\Sx{0,3}y"),
    ],
)
def test_expressions_are_rewritten_for_many_lines_and_few_calls(pattern: str, rewritten: str) -> None:
    assert to_hyperscan(pattern) == rewritten


@pytest.mark.parametrize(
    ("pattern", "literal"),
    [
        ("needle", "needle"),
        ("Needle (?:in|under) haystack", " haystack"),
        ("(?:needle|thread)s?x", "x"),
        ("needle|[a-z]+", ""),
        (r"needles?\b thread", " thread"),
        ("needle{3}x", "needl"),
        ("needle{0,3}x", "needl"),
        (r"a\.b\[c\]\d", "a.b[c]"),
        (r"a[\x0b]needle[\x0b]", "needle"),
        ("(?i)NeedLe", ""),
        ("(?i:NeedLe)x", "x"),
        ("[^a]", ""),
        ("^$", ""),
    ],
)
def test_each_match_contains_this_text(pattern: str, literal: str) -> None:
    assert find_literal(pattern) == literal


def test_no_pattern_has_what_is_not_translated() -> None:
    assert [pattern for pattern in PATTERNS if UNKNOWN.search(pattern)] == []


def test_nearly_all_patterns_have_a_text() -> None:
    without = [pattern for pattern in PATTERNS if len(find_literal(to_hyperscan(pattern))) < 4]
    assert len(without) < 40, "re searches all of a log for each of them"


def test_all_hits_contain_the_texts_of_the_signs_that_they_show() -> None:
    lines = [line for cause in all_causes() for text in cause.hits for line in text.splitlines()]
    shown = 0
    for pattern in PATTERNS:
        for line in filter(re.compile(pattern).search, lines):
            shown += 1
            assert find_literal(to_hyperscan(pattern)) in line, (pattern, line)
    assert shown > 1000
