"""Does a training that is started again come to the same numbers, and does it say what it cannot go on with?"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from allranks.model.errors import UsageError
from allranks.model.membership import ALONE
from allranks.report.refusal import SessionError
from allranks.state.resumed import rng
from allranks.state.resumed.averaging import Averaging
from allranks.state.resumed.sampler import Sampler
from allranks.state.resumed.steps import StepLost
from allranks.state.resumed.track import Tracked
from allranks.state.saved.checkpoint import Checkpointer


class Training:
    """One life of a small training in this process."""

    def __init__(self, folder: Path, *, every: int | None = None, cell: Any = None, lr: float = 0.01) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        self.sampler = Sampler(20, global_batch_size=6)
        self.checkpoints = Checkpointer(folder)
        parts = {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "scaler", "sampler")}
        self.state = Tracked(parts, checkpoints=self.checkpoints, every=every, cell=cell)
        self.state.load()
        self.noise: list[float] = []
        self.samples: list[list[float]] = []

    def loader(self, **arguments: Any) -> DataLoader[Any]:
        data = TensorDataset(torch.arange(20.0).reshape(20, 1).expand(20, 4))
        return DataLoader(data, batch_sampler=self.sampler, **arguments)  # type: ignore[arg-type]

    def train(self, total: int, *, stop_at: int | None = None, loader: Any = None) -> list[bytes]:
        for step in self.state.steps(loader or self.loader(), total=total):
            if step.number == stop_at:
                break
            with step as batch:
                (inputs,) = batch
                self.samples.append(inputs[:, 0].tolist())
                self.scaler.scale(self.model(inputs / 20).square().mean()).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.noise += [random.random(), float(numpy.random.rand()), torch.rand(1).item()]
        self.checkpoints.close()
        return self.weights()

    def weights(self) -> list[bytes]:
        return [parameter.detach().numpy().tobytes() for parameter in self.model.parameters()]


@pytest.mark.parametrize("stop_at", [1, 4, 7, 8])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path: Path, stop_at: int, num_workers: int):
    whole = Training(tmp_path / "whole", every=100)
    random.seed(5), numpy.random.seed(5)
    expected = whole.train(12, loader=whole.loader(num_workers=num_workers))
    random.seed(5), numpy.random.seed(5)
    first = Training(tmp_path / "cut", every=1)
    first.train(12, stop_at=stop_at, loader=first.loader(num_workers=num_workers))
    random.seed(6), numpy.random.seed(6)
    second = Training(tmp_path / "cut", every=100)
    assert second.state.step == stop_at
    assert second.train(12, loader=second.loader(num_workers=num_workers)) == expected
    assert second.samples == whole.samples[stop_at:]
    assert second.noise == whole.noise[3 * stop_at :]
    assert second.scheduler.get_last_lr() == whole.scheduler.get_last_lr()
    assert second.scaler.get_scale() == whole.scaler.get_scale()


def test_a_step_does_not_depend_on_the_length_of_the_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    training = Training(tmp_path)
    loader = training.loader()
    monkeypatch.setattr(Sampler, "__len__", lambda sampler: pytest.fail("a step asked for the length"))
    for step in training.state.steps(loader, total=6):
        with step as (inputs,):
            training.samples.append(inputs[:, 0].tolist())
    assert len(training.samples) == 6
    training.checkpoints.close()


def test_a_finished_training_does_nothing_more_and_a_longer_one_goes_on(tmp_path: Path):
    Training(tmp_path).train(4)
    again = Training(tmp_path)
    again.train(4)
    assert again.samples == []
    longer = Training(tmp_path)
    longer.train(7)
    assert len(longer.samples) == 3


def test_the_learning_rate_stays_the_one_that_the_run_began_with(tmp_path: Path):
    Training(tmp_path).train(4)
    training = Training(tmp_path, lr=0.05)  # a script that scales with the number of ranks, started on more of them
    assert training.optimizer.param_groups[0]["lr"] == 0.005
    assert training.scheduler.base_lrs == [0.01]


def test_epochs_end_the_run_where_total_is_left_out(tmp_path: Path):
    training = Training(tmp_path)
    steps = []
    for step in training.state.steps(training.loader(), epochs=2):
        with step:
            steps.append((step.number, step.epoch))
    assert steps == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1), (7, 1)]
    training.checkpoints.close()


def test_micro_batches_come_to_the_whole_batch(tmp_path: Path):
    gradients = []
    for micro in (None, 4, 1):
        sampler = Sampler(20, global_batch_size=6, micro_batch_size=micro)
        model = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
        checkpoints = Checkpointer(tmp_path / str(micro))
        state = Tracked({"model": model, "sampler": sampler}, checkpoints=checkpoints)
        loader = DataLoader(torch.arange(20.0).reshape(20, 1), batch_sampler=sampler)  # type: ignore[arg-type]
        seen = []
        for step in state.steps(loader, total=4):  # the last one has 2 samples
            with step as batches:
                for batch in batches if micro else [batches]:
                    model(batch).square().mean().backward()
                assert model.weight.grad is not None
                seen.append(model.weight.grad.item())
                model.zero_grad()
        gradients.append(seen)
        checkpoints.close()
    assert gradients[1] == pytest.approx(gradients[0], rel=1e-6)
    assert gradients[2] == pytest.approx(gradients[0], rel=1e-6)


# Other loaders


class Counting:
    """A loader with a state of its own, as torchdata's StatefulDataLoader has one."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 5:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("make", [Counting, lambda: list(range(5))], ids=["with a state", "any iterable"])
@pytest.mark.parametrize("stop_at", [2, 4, 5, 7])
def test_other_loaders_go_on_where_they_were(tmp_path: Path, make: Any, stop_at: int):
    seen = []
    for total in (stop_at, 12):
        with Checkpointer(tmp_path) as checkpoints:
            state = Tracked({}, checkpoints=checkpoints)
            state.load()
            for step in state.steps(make(), total=total):
                with step as batch:
                    seen.append((step.epoch, batch))
    assert seen == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 0), (2, 1)]


def test_a_loader_with_nothing_in_it_is_refused(tmp_path: Path):
    with Checkpointer(tmp_path) as checkpoints:
        state = Tracked({}, checkpoints=checkpoints)
        with pytest.raises(SessionError, match="the loader gave no batch for step 0"):
            next(state.steps([], total=3))


# What cannot be gone on with


def test_a_checkpoint_of_other_parts_is_refused(tmp_path: Path):
    Training(tmp_path).train(2)
    with Checkpointer(tmp_path) as checkpoints:
        state = Tracked({"model": torch.nn.Linear(1, 1)}, checkpoints=checkpoints)
        with pytest.raises(UsageError, match="also holds optimizer, sampler, scaler, scheduler; track the same"):
            state.load()


def test_what_has_no_state_is_refused_by_name(tmp_path: Path):
    with pytest.raises(
        UsageError, match=r"track\(step=int\): expected something with state_dict, or an option of track\(\)$"
    ):
        Tracked({"step": 3}, checkpoints=Checkpointer(tmp_path))


def test_a_sampler_that_is_not_tracked_is_refused(tmp_path: Path):
    sampler = Sampler(20, global_batch_size=6)
    state = Tracked({}, checkpoints=Checkpointer(tmp_path))
    with pytest.raises(SessionError, match="the loader's sampler is not tracked"):
        next(state.steps(DataLoader(list(range(20)), batch_sampler=sampler), total=3))  # type: ignore[arg-type]


def test_a_loader_that_would_batch_the_batches_of_our_sampler_is_refused(tmp_path: Path):
    sampler = Sampler(20, global_batch_size=6)
    state = Tracked({"sampler": sampler}, checkpoints=Checkpointer(tmp_path))
    with pytest.raises(SessionError, match=r"DataLoader.*whole batches; write batch_sampler="):
        next(state.steps(DataLoader(torch.arange(20), sampler=sampler, batch_size=6), total=3))  # type: ignore[arg-type]


def test_what_was_saved_before_the_first_step_is_resumed_there(tmp_path: Path):
    expected = Training(tmp_path / "whole").train(4)
    first = Training(tmp_path / "cut")
    first.state.save()
    first.checkpoints.close()
    assert Training(tmp_path / "cut").train(4) == expected


def test_a_step_that_is_taken_for_its_batch_names_the_with(tmp_path: Path):
    training = Training(tmp_path)
    step: Any = next(training.state.steps(training.loader(), total=3))
    with pytest.raises(UsageError, match="a step is not its batch: write `with step as batch:`"):
        _inputs, _targets = step
    with pytest.raises(UsageError, match="a step is not its batch: write `with step as batch:`"):
        step["inputs"]
    with pytest.raises(AttributeError, match="a step has no 'to'; its batch is what `with step as batch:` gives"):
        step.to("cpu")
    training.checkpoints.close()


def test_a_loop_without_an_end_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    training = Training(tmp_path)
    for _ in range(2):
        next(training.state.steps(training.loader()))
    assert capsys.readouterr().err.count("no total= and no epochs=: the loop goes on until `break`") == 1
    training.checkpoints.close()


def test_a_step_whose_error_was_caught_does_not_count(tmp_path: Path):
    training = Training(tmp_path)
    steps = training.state.steps(training.loader(), total=3)
    with pytest.raises(ValueError, match="bad batch"), next(steps):
        raise ValueError("bad batch")
    with pytest.raises(SessionError, match="step 0 was not done"):
        next(steps)
    training.checkpoints.close()


def test_an_error_of_the_script_stays_what_it_is_and_a_failed_collective_ends_the_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    training = Training(tmp_path)
    steps = training.state.steps(training.loader(), total=3)
    with pytest.raises(RuntimeError, match="shape"), next(steps):
        raise RuntimeError("shape mismatch")
    own = "GET s3://bucket/shard-00017 failed: Connection reset by peer"
    steps = training.state.steps(training.loader(), total=3)
    with pytest.raises(RuntimeError, match="shard-00017"), next(steps):
        raise RuntimeError(own)
    steps = training.state.steps(training.loader(), total=3)
    said = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by a"
    with pytest.raises(StepLost) as lost, next(steps):
        raise RuntimeError(said)
    assert isinstance(lost.value, SystemExit)
    assert lost.value.code == 1
    assert capsys.readouterr().err == (
        "allranks: rank 0: step 0 does not count, a collective failed; no checkpoint is complete: "
        "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1\n"
    )
    training.checkpoints.close()


# Orders


class Ordered:
    """An agent's cell, as far as a training needs it."""

    def __init__(self) -> None:
        from allranks.guard.inside.cell import Cell

        self.cell = Cell.create()
        assert self.cell.claim()


def test_an_order_is_carried_out_at_its_step_and_leaves_with_a_whole_checkpoint(tmp_path: Path):
    cell = Ordered().cell
    cell.give_order(3, "the time limit is near", leaves=True)
    training = Training(tmp_path, cell=cell)
    with pytest.raises(SystemExit) as left:
        training.train(10)
    assert left.value.code == 0
    assert len(training.samples) == 3
    told = cell.read()
    assert (told.step, told.saved, told.phase) == (3, 3, "leaving")
    training.checkpoints.close()
    assert Training(tmp_path).state.step == 3


def test_an_order_that_does_not_leave_saves_once(tmp_path: Path):
    cell = Ordered().cell
    training = Training(tmp_path, cell=cell)
    steps = []
    for step in training.state.steps(training.loader(), total=6):
        with step:
            if step.number == 1:
                cell.give_order(0, "a node comes back", leaves=False)
        training.checkpoints.wait()
        steps.append(training.checkpoints.last_complete)
    assert steps == [None, None, 2, 2, 2, 2]
    training.checkpoints.close()


def test_save_now_saves_at_the_next_boundary(tmp_path: Path):
    training = Training(tmp_path)
    for step in training.state.steps(training.loader(), total=3):
        with step:
            if step.number == 0:
                training.state.save_now()
        training.checkpoints.wait()
        if step.number == 1:
            assert training.checkpoints.last_complete == 1
    training.checkpoints.close()


class Local:
    """An optimizer that makes local steps and synchronizes after every fourth."""

    is_apart = True

    def __init__(self) -> None:
        self.steps, self.since, self.early, self.samples = 0, 0, list[int](), list[int]()

    @property
    def is_synchronized(self) -> bool:
        return self.since == 0

    def count(self, samples: int) -> None:
        self.samples.append(samples)

    def step(self) -> None:
        self.steps += 1
        self.since = self.steps % 4

    def synchronize(self) -> None:
        if self.since:
            self.early.append(self.steps)
        self.since = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_checkpoints_wait_for_a_synchronization_and_what_cannot_wait_makes_one(tmp_path: Path):
    cell = Ordered().cell
    local, sampler, checkpoints = Local(), Sampler(20, global_batch_size=6), Checkpointer(tmp_path, keep=9)
    state = Tracked({"local": local, "sampler": sampler}, checkpoints=checkpoints, cell=cell)

    def train() -> None:
        for step in state.steps(DataLoader(torch.arange(20.0), batch_sampler=sampler), total=99):
            with step:
                local.step()
            if state.step in (5, 8):
                state.save_now()
            if state.step == 10:
                state.save()
            if state.step == 13:
                cell.give_order(0, "the time limit is near", leaves=True)

    with pytest.raises(SystemExit):
        train()
    checkpoints.close()
    saved = sorted(int(path.name.removeprefix("step_")) for path in tmp_path.glob("step_*"))
    assert saved == [8, 10, 13]  # asked for at 5 and at 8, by save(), by the order
    assert local.early == [10, 13]
    assert local.samples[:4] == [6, 6, 6, 2]


def test_local_steps_are_tracked_whole_and_without_a_scaler(tmp_path: Path):
    checkpoints, ddp = Checkpointer(tmp_path), object.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(ddp)
    ddp.local_optimizer = Local()
    with pytest.raises(UsageError, match="track the optimizer that local_sgd"):
        Averaging({"model": ddp}, ALONE)
    with pytest.raises(UsageError, match="a GradScaler skips steps of single ranks"):
        Tracked({"local": Local(), "scaler": torch.amp.GradScaler("cpu")}, checkpoints=checkpoints)
    checkpoints.close()


def test_generators_go_back_to_where_they_were():
    state = rng.capture()
    drawn = random.random(), numpy.random.rand(), torch.rand(1).item()
    random.random(), numpy.random.rand(), torch.rand(1)
    rng.restore(state)
    assert (random.random(), numpy.random.rand(), torch.rand(1).item()) == drawn
