"""Values of step.log in a file: how many points stay, what a restart and a full directory do to them."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from allranks.model.curve import FILE, MAX_POINTS, read_curves
from allranks.state.resumed import step_values as module
from allranks.state.resumed.step_values import Curves, own_curves
from allranks.state.resumed.steps import Progress

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def told(folder: Path, name: str = "loss") -> list[tuple[int, float | None]]:
    return [
        (point.step, point.values[name]) for point in read_curves((folder / FILE).read_bytes()) if name in point.values
    ]


def test_values_are_appended_in_the_order_of_the_steps(tmp_path: Path) -> None:
    curves = Curves(tmp_path)
    curves.note(1, {"loss": torch.tensor(0.5), "lr": 0.1})
    curves.flush()
    curves.note(2, {"loss": float("nan")})
    curves.note(3, {"loss": 0.25, "words": "none", "many": torch.ones(3)})
    curves.flush()
    assert told(tmp_path) == [(1, 0.5), (2, None), (3, 0.25)]
    assert told(tmp_path, "lr") == [(1, 0.1)]
    assert told(tmp_path, "words") == told(tmp_path, "many") == []


def test_at_most_so_many_points_of_a_name_are_kept_evenly(tmp_path: Path) -> None:
    curves = Curves(tmp_path)
    for step in range(1, 3 * MAX_POINTS):
        curves.note(step, {"loss": 1.0} | ({"score": 2.0} if step % 1000 == 0 else {}))
    curves.flush()
    steps = [step for step, _ in told(tmp_path)]
    assert MAX_POINTS / 2 < len(steps) <= MAX_POINTS
    assert {after - before for before, after in itertools.pairwise(steps)} == {4}
    assert [step for step, _ in told(tmp_path, "score")] == [1000 * number for number in range(1, 30)]


def test_after_a_restart_the_curve_goes_on_at_the_checkpoint(tmp_path: Path) -> None:
    first = Curves(tmp_path)
    for step in range(1, 7):
        first.note(step, {"loss": float(step)})
    first.flush()
    again = Curves(tmp_path)
    again.note(4, {"loss": 40.0})
    again.note(5, {"loss": 50.0})
    again.flush()
    assert told(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0)]


def test_a_directory_that_cannot_be_written_costs_nothing_and_is_tried_again(tmp_path: Path) -> None:
    curves = Curves(tmp_path / "later")
    curves.note(1, {"loss": 1.0})
    curves.flush()
    (tmp_path / "later").mkdir()
    curves.note(2, {"loss": 2.0})
    curves.flush()
    assert told(tmp_path / "later") == [(1, 1.0), (2, 2.0)]


def test_rank_0_below_an_agent_has_the_file_and_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLRANKS_ATTEMPT_DIR", str(tmp_path))
    monkeypatch.setenv("ALLRANKS_AGENT_PID", str(os.getppid()))
    monkeypatch.setattr(module.atexit, "register", lambda _: None)
    own_curves.cache_clear()
    try:
        for is_first in (True, False):
            progress = Progress(is_shown=is_first, total=None)
            progress.note(7 if is_first else 8, {"loss": 1.5})
            assert progress.curves is not None
            progress.curves.flush()
        assert told(tmp_path) == [(7, 1.5)]
        own_curves.cache_clear()
        monkeypatch.delenv("ALLRANKS_AGENT_PID")
        assert Progress(is_shown=True, total=None).curves is None
    finally:
        own_curves.cache_clear()
