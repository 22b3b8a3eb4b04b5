"""Does a long command show its progress on a terminal, after two seconds, and leave nothing of it behind?"""

from __future__ import annotations

import itertools
import sys

import pytest

from allranks.cli.progress_line import counted


@pytest.mark.parametrize(
    ("is_terminal", "step_s", "shown"),
    [(True, 1.0, [f"allranks: {done} of 4 runs read" for done in (1, 2, 3)]), (True, 0.1, []), (False, 1.0, [])],
)
def test_progress_is_shown_where_it_takes_long_and_somebody_looks(
    is_terminal: bool,
    step_s: float,
    shown: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    clock = itertools.count(step=step_s)
    assert list(counted("abcd", "runs read", clock=lambda: float(next(clock)))) == ["a", "b", "c", "d"]
    written = capsys.readouterr().err.split("\r")
    assert [text.strip() for text in written if text.strip()] == shown
    assert written[-1] == ""
