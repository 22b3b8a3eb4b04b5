"""Outcome, restarts and goodput of a run go where its training logs, and cost it nothing where they cannot go.

The stand-ins have the calls of W&B 0.31, MLflow 3.17 and TensorBoard 2.21; docs/how-to/wandb.md says how these were
tried.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.model.job_status import JobStatus
from allranks.model.ledger import Ledger
from allranks.state.resumed import trackers
from allranks.state.resumed.trackers import GOODPUT, OUTCOME, RESTARTS, Trackers
from state.test_loops import tracked

pytestmark = pytest.mark.torch


class Run:
    """A run of W&B: `wandb.init()` returns it."""

    def __init__(self) -> None:
        self.summary: Any = Summary()
        self._is_finished = False

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Take the values of a step."""

    def finish(self) -> None:
        """End it; what is written then is refused."""
        self._is_finished = self.summary.is_finished = True


class Summary(dict[str, Any]):
    is_finished = False

    def update(self, values: dict[str, Any]) -> None:  # type: ignore[override]
        assert not self.is_finished, "Run is finished. The call to `_summary_update_callback` will be ignored."
        super().update(values)
        self.setdefault("told", []).append(values[OUTCOME])


class Board:
    """A SummaryWriter of TensorBoard."""

    def __init__(self) -> None:
        self.written: list[tuple[str, object, int]] = []
        self.is_flushed = False

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written.append((tag, scalar_value + 0.0, global_step))

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        self.written.append((tag, text_string, global_step))

    def flush(self) -> None:
        self.is_flushed = True


class Mlflow:
    """The module mlflow, whose active run is one of the calling thread."""

    def __init__(self) -> None:
        self._local, self.written = threading.local(), list[tuple[object, ...]]()
        self._local.run = SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def active_run(self) -> object:
        return getattr(self._local, "run", None)

    def MlflowClient(self) -> Any:
        return SimpleNamespace(
            log_metric=lambda run_id, key, value, step: self.written.append((run_id, key, value, step)),
            set_tag=lambda run_id, key, value: self.written.append((run_id, key, value)),
        )


def status(*, is_async: bool = False) -> JobStatus:
    seconds = {"step": 90.0, "start": 10.0}
    ledger = Ledger(begun_s=0.0, until_s=1.0, rank_s=100.0, seconds=seconds, is_steps_seen=True, is_async=is_async)
    return JobStatus(job="4", written_s=1.0, started_s=0.0, phase="running", num_restarts=2, ledger=ledger)


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is imported but what a test puts there."""
    for name in ("wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)


@pytest.mark.parametrize(("is_async", "name"), [(False, GOODPUT), (True, f"{GOODPUT}_at_most")])
def test_an_active_run_of_wandb_gets_them_in_its_summary(
    is_async: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run, summary=run.summary))
    for log in (run, sys.modules["wandb"]):
        run.summary.clear()
        Trackers(log, status=lambda: status(is_async=is_async)).tell("finished", 30)
    assert run.summary == {OUTCOME: "finished", RESTARTS: 2, name: 0.9, "told": ["finished"]}  # once, not twice


def test_mlflow_gets_metrics_and_a_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    Trackers(None, status=status).tell("running", 7)
    assert mlflow.written == [("r1", OUTCOME, "running"), ("r1", RESTARTS, 2, 7), ("r1", GOODPUT, 0.9, 7)]


def test_without_a_status_restarts_are_those_of_this_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    Trackers(board, status=lambda: None).tell("running", 7)
    assert (board.written, board.is_flushed) == ([(OUTCOME, "running", 7), (RESTARTS, 3.0, 7)], True)


def test_a_run_that_is_finished_gets_nothing_more_and_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = Run(), list[str]()
    run.finish()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    told = Trackers(run, status=lambda: asked.append("status") or None)  # type: ignore[func-returns-value]
    told.tell("finished", 3)
    Trackers(lambda step, values: None).tell("finished", 3)
    assert (run.summary, asked, "mlflow" in sys.modules) == ({}, [], False)


def test_a_library_that_fails_or_hangs_costs_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "LIMIT_S", 0.05)
    ends = threading.Event()

    class Hangs(Board):
        def add_text(self, tag: str, text_string: str, global_step: int) -> None:
            ends.wait(30)

    class Fails(Board):
        def add_text(self, tag: str, text_string: str, global_step: int) -> None:
            raise OSError("no\nspace")

    class Breaks:
        @property
        def summary(self) -> object:
            raise RuntimeError("no service")

    for log in (Hangs(), Fails(), Breaks()):
        told = Trackers(log, status=status)
        told.tell("running", 1)
        told.tell("finished", 2)
    ends.set()
    said = capfd.readouterr().err.splitlines()
    assert [line.partition("allranks: ")[2] for line in said] == [
        "TensorBoard did not take allranks/outcome within 0 s",
        "TensorBoard did not take allranks/outcome: no space",
        "what the training logs to did not take allranks/outcome: no service",
    ]


def test_of_several_libraries_the_one_that_hangs_is_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "LIMIT_S", 0.2)
    board, mlflow, ends = Board(), Mlflow(), threading.Event()
    mlflow.MlflowClient = lambda: SimpleNamespace(set_tag=lambda *_: ends.wait(30))  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    told = Trackers(board, status=lambda: None)
    told.tell("running", 1)
    told.tell("finished", 2)
    ends.set()
    assert "allranks: MLflow did not take allranks/outcome within 0 s" in capfd.readouterr().err
    assert [value for name, value, _ in board.written if name == OUTCOME] == ["running", "finished"]


def test_a_session_tells_how_it_goes(tmp_path: Path) -> None:
    """Also one that is left in the middle, and goes on from its checkpoint."""
    first, second = Run(), Run()
    with contextlib.suppress(KeyError), tracked(tmp_path, log=first) as state:
        for step in state.steps([0] * 9, total=4):
            with step:
                state.save_now()
            if step.number == 2:
                state.checkpoints.wait()
                try:
                    raise KeyError
                except KeyError as exc:
                    state._telling.end(exc)
                    raise
    assert first.summary["told"] == ["running", "failed (KeyError)"]
    with tracked(tmp_path, log=second) as state:
        for step in state.steps([0] * 9, total=4):
            with step:
                pass
        assert second.summary["told"] == ["running", "finished"]  # before a script calls run.finish()
        second.finish()
        state._telling.end(None)
    for epochs in (1, 2):  # a loop over epochs in the script: it goes on
        board = Board()
        with tracked(tmp_path / "epochs", log=board) as state:
            for step in state.steps([0] * 2, epochs=epochs):
                with step:
                    pass
        assert [(value, step) for name, value, step in board.written if name == OUTCOME] == [
            ("running", 2 * epochs - 2),
            ("finished", 2 * epochs),
        ]
