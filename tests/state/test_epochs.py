"""What goes with the steps: a call after each epoch, values for a logger, and a validation over all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from allranks.guard.inside.cell import Cell
from allranks.model.errors import UsageError
from allranks.state.resumed.sampler import Sampler
from allranks.state.resumed.track import Tracked
from allranks.state.resumed.validation import share_batches
from allranks.state.saved.checkpoint import Checkpointer
from state.test_loops import tracked

pytestmark = pytest.mark.torch
DATA = TensorDataset(torch.arange(6.0))


def life(folder: Path, kind: str, within: Callable[[Tracked, str], None]) -> list[str]:
    """Three epochs of three steps; returns what was done, in order."""
    events: list[str] = []
    sampler = Sampler(6, global_batch_size=2)
    loader = DataLoader(DATA, batch_sampler=sampler) if kind == "ours" else DataLoader(DATA, batch_size=2)  # type: ignore[arg-type]

    def told(state: Tracked, event: str) -> None:
        events.append(event)
        within(state, event)

    with tracked(folder, sampler=sampler) as state:
        for step in state.steps(loader, epochs=3, after_epoch=lambda epoch: told(state, f"epoch {epoch}")):
            with step:
                told(state, f"step {step.number}")
    return events


WHOLE = ["step 0", "step 1", "step 2", "epoch 0", "step 3", "step 4", "step 5", "epoch 1"]
WHOLE += ["step 6", "step 7", "step 8", "epoch 2"]


@pytest.mark.parametrize("kind", ["ours", "plain"])
@pytest.mark.parametrize("at", ["step 2", "epoch 0", "step 3", "epoch 1", "step 8", "epoch 2"])
def test_each_epoch_ends_once_in_what_is_resumed(tmp_path: Path, kind: str, at: str):
    """The state is saved after each step; then the process fails in the middle of something, and begins again."""

    class Killed(Exception):
        pass

    def fail(state: Tracked, event: str) -> None:
        state.save_now()
        if event == at:
            state.checkpoints.wait()
            raise Killed

    assert life(tmp_path / "whole", kind, lambda state, event: None) == WHOLE
    with pytest.raises(Killed):
        life(tmp_path / "cut", kind, fail)
    rest = life(tmp_path / "cut", kind, lambda state, event: None)
    assert rest == WHOLE[-len(rest) :]
    assert WHOLE.index(at) - (len(WHOLE) - len(rest)) in (0, 1)  # what failed is done again, and at most a step more


def test_what_is_saved_in_a_call_after_an_epoch_is_not_done_again(tmp_path: Path):
    def fail(state: Tracked, event: str) -> None:
        if event == "epoch 1":
            state.save()
            raise KeyError

    with pytest.raises(KeyError):
        life(tmp_path, "ours", fail)
    assert life(tmp_path, "ours", lambda state, event: None) == WHOLE[8:]


@pytest.mark.parametrize(
    ("kind", "asked", "totals"),
    [
        ("plain", {"epochs": 3}, 9),
        ("ours", {"epochs": 3}, 9),
        ("ours", {"epochs": 3, "total": 7}, 7),
        ("plain", {"epochs": 3, "total": 70}, 9),
        ("without a length", {"epochs": 3}, None),
        ("plain", {"epochs": 1}, None),  # a loop over epochs in the script asks so at first
    ],
)
def test_the_agent_is_told_the_steps_of_all_epochs(
    tmp_path: Path, kind: str, asked: dict[str, int], totals: int | None
):
    class Stream(IterableDataset[int]):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            return iter(range(6))

    def loop() -> list[int | None]:
        sampler = Sampler(6, global_batch_size=2)
        loaders = {
            "ours": lambda: DataLoader(DATA, batch_sampler=sampler),  # type: ignore[arg-type]
            "plain": lambda: DataLoader(DATA, batch_size=2),
            "without a length": lambda: DataLoader(Stream(), batch_size=2),
        }
        cell, found = Cell.create(), list[int | None]()
        cell.claim()
        with contextlib.closing(cell), tracked(tmp_path, cell=cell, sampler=sampler) as state:
            for step in state.steps(loaders[kind](), **asked):
                with step:
                    found.append(cell.read().total)
                if len(found) == 4:  # in the second epoch; it is saved, and goes on there
                    break
        return found

    assert {*loop(), *loop()} == {totals}


class Board:
    """As TensorBoard's SummaryWriter and W&B's run take values."""

    def __init__(self) -> None:
        self.seen: list[Any] = []


class SummaryWriter(Board):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.seen.append((global_step, {tag: scalar_value}))


class Run(Board):
    def log(self, data: dict[str, float], step: int) -> None:
        self.seen.append((step, data))


@pytest.mark.parametrize("kind", [SummaryWriter, Run, Board])
def test_logged_values_go_to_a_board_too(tmp_path: Path, kind: type[Board]):
    board = kind()
    log = board if kind is not Board else lambda step, values: board.seen.append((step, values))
    with tracked(tmp_path, log=log) as state:
        for step in state.steps([0] * 2, total=2):
            with step:
                step.log(loss=torch.tensor(step.number / 2, requires_grad=True))
    assert board.seen == [(1, {"loss": 0.0}), (2, {"loss": 0.5})]


def test_what_takes_no_values_is_refused(tmp_path: Path):
    with pytest.raises(
        UsageError, match=r"track\(log='runs/1'\): expected a run of W&B, a SummaryWriter, mlflow, or f\(step"
    ):
        Tracked({}, checkpoints=Checkpointer(tmp_path), log="runs/1")


@pytest.mark.parametrize(("count", "batch_size", "num_ranks"), [(1, 1, 3), (5, 2, 3), (7, 2, 3), (9, 2, 2), (64, 8, 5)])
def test_a_validation_has_each_sample_once_in_as_many_batches_on_each_rank(count: int, batch_size: int, num_ranks: int):
    shares = [share_batches(count, batch_size, rank, num_ranks) for rank in range(num_ranks)]
    assert len({len(batches) for batches, _ in shares}) == 1
    assert [at for batches, counted in shares for own in batches[:counted] for at in own] == list(range(count))
    assert all(0 < len(own) <= batch_size for batches, _ in shares for own in batches)
