from __future__ import annotations

import pytest

from allranks.model.safe_text import as_one_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("node02", "node02"),
        ("", ""),
        ("a\nb\tc", r"a\nb\tc"),
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("\u202enode", r"\u202enode"),
        ("caf\u00e9 \u65e5", "caf\u00e9 \u65e5"),
        ("x" * 500, "x" * 297 + "..."),
        ("\x1b" * 500, r"\x1b" * 74 + "\\..."),
    ],
)
def test_what_strangers_say_becomes_one_short_line(text, line):
    assert as_one_line(text) == line
