"""Training loops as users write them: epochs, `break`, shuffling, accumulation; each is resumed as it would go on."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from allranks.guard.inside.cell import Cell
from allranks.model.errors import UsageError
from allranks.model.membership import Membership
from allranks.state.resumed.averaging import Averaging
from allranks.state.resumed.sampler import Sampler
from allranks.state.resumed.track import Tracked
from allranks.state.saved.checkpoint import Checkpointer
from allranks.state.saved.consensus import Consensus

pytestmark = pytest.mark.torch


TOLD, LOADED = ("accumulates", "keep_best", "log", "on_corruption", "replay", "replay_every"), ("partial", "named")
"""What `tracked` takes beside the parts."""


@contextlib.contextmanager
def tracked(folder: Path, cell: Cell | None = None, every: int | None = None, **parts: Any) -> Iterator[Tracked]:
    """One life of a training on one rank, as `s.track` makes it and as leaving the session ends it."""
    told, loaded = ({name: parts.pop(name) for name in names if name in parts} for names in (TOLD, LOADED))
    with Checkpointer(folder) as checkpoints:
        made = Tracked(parts, checkpoints=checkpoints, cell=cell, every=every, **told)
        made.load(**loaded)
        yield made
        made.leave()


# What can be saved


def test_every_scheduler_of_torch_can_be_saved_and_comes_back_as_it_was(tmp_path: Path):
    def made() -> dict[str, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        milestones = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])
        chained = torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.MultiStepLR(optimizer, [3])])
        return {"optimizer": optimizer, "milestones": milestones, "chained": chained}

    first, second = made(), made()
    with tracked(tmp_path, every=1, **first) as state:
        for step in state.steps([0] * 9, total=3):
            with step:
                first["optimizer"].step()
                first["milestones"].step()
    with tracked(tmp_path, **second) as state:
        assert state.step == 3
        assert second["milestones"].state_dict() == first["milestones"].state_dict()
        assert type(second["milestones"].milestones) is type(first["milestones"].milestones)
        second["optimizer"].step()
        second["milestones"].step()  # counts with `milestones[epoch]`, which a plain dict would not have


class Odd:
    """A part whose state becomes what no checkpoint can hold."""

    def __init__(self, *, is_odd: bool) -> None:
        self.is_odd = is_odd

    def state_dict(self) -> dict[str, Any]:
        return {"hooks": [{1, 2} if self.is_odd else 0]}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_state_that_cannot_be_saved_is_refused_when_it_is_tracked(tmp_path: Path):
    with pytest.raises(UsageError, match=r"^track\(\): mine\['hooks'\]\[0\] is a builtins\.set, which a checkpoint"):
        Tracked({"mine": Odd(is_odd=True)}, checkpoints=Checkpointer(tmp_path))


def test_a_state_that_cannot_be_saved_later_fails_that_save_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    part = Odd(is_odd=False)
    with tracked(tmp_path, part=part) as state:
        for step in state.steps([0] * 9, total=6):
            with step:
                part.is_odd = step.number == 1
            if step.number < 5:
                assert state.save() == (step.number != 1)
    assert {path.name for path in tmp_path.iterdir()} == {"step_4", "step_5", "step_6", "trace"}
    [line] = [line for line in capsys.readouterr().err.splitlines() if "not written" in line]
    assert "the checkpoint of step 2 is not written: common['parts']['part']['hooks'][0] is a builtins.set" in line


def test_a_compiled_model_has_the_keys_of_the_model_itself(tmp_path: Path):
    class Compiled(torch.nn.Module):
        """As torch.compile wraps a module, without the seconds that it takes to import."""

        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self._orig_mod = module

    plain = torch.nn.Sequential(torch.nn.Linear(2, 2))
    inner = torch.nn.Sequential(Compiled(torch.nn.Linear(2, 2)))
    with tracked(tmp_path, whole=Compiled(plain), inner=inner) as state:
        for step in state.steps([0], total=1):
            with step:
                pass
    with Checkpointer(tmp_path) as checkpoints:
        loaded = checkpoints.load()
        assert loaded is not None
        assert {name: list(part) for name, part in loaded.common["parts"].items()} == {
            "whole": ["0.weight", "0.bias"],
            "inner": ["0.weight", "0.bias"],
        }
    again = {"whole": copy.deepcopy(plain), "inner": torch.nn.Sequential(Compiled(torch.nn.Linear(2, 2)))}
    with tracked(tmp_path, **again):
        assert again["inner"][0]._orig_mod.weight.equal(inner[0]._orig_mod.weight)


# Loaders


class Noisy(Dataset[Any]):
    """A dataset that augments with the generators of the process."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.rand(1).item(), random.random(), numpy.random.rand()], dtype=torch.float64)


def shuffled(**arguments: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=3, **arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: shuffled(shuffle=True),
        lambda: shuffled(shuffle=True, num_workers=1),
        lambda: shuffled(shuffle=True, generator=torch.Generator().manual_seed(7)),
        lambda: shuffled(sampler=WeightedRandomSampler([1.0] * 12, 12)),
    ],
    ids=["shuffle", "workers", "generator", "weighted"],
)
def test_a_shuffling_loader_goes_on_in_the_same_order(tmp_path: Path, make: Callable[[], Any]):
    def life(folder: str, seed: int, upto: int, seen: list[Any]) -> None:
        torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)
        with tracked(tmp_path / folder) as state:
            for step in state.steps(make(), total=upto):
                with step as batch:
                    seen.append(batch.tolist())
                    torch.rand(step.number)  # noise of the training itself

    whole: list[Any] = []
    cut: list[Any] = []
    life("whole", 1, 9, whole)
    life("cut", 1, 6, cut)
    life("cut", 2, 9, cut)
    assert cut == whole
    order = [sample[0] for batch in whole[:8] for sample in batch]
    assert order[:12] != order[12:]  # every epoch has an order of its own


@pytest.mark.parametrize("kind", ["ours", "plain", "new each epoch"])
def test_a_loop_over_epochs_goes_on_counting(tmp_path: Path, kind: str):
    cell = Cell.create()
    assert cell.claim()
    sampler = Sampler(4, global_batch_size=2)
    data = TensorDataset(torch.arange(4.0))

    def loader() -> DataLoader[Any]:
        return DataLoader(data, batch_sampler=sampler) if kind == "ours" else DataLoader(data, batch_size=2)  # type: ignore[arg-type]

    one, at, finished = loader(), [], []
    with tracked(tmp_path, cell=cell, sampler=sampler) as state:
        for epoch in range(3):
            for step in state.steps(loader() if kind == "new each epoch" else one, epochs=epoch + 1):
                finished.append(cell.is_finished)
                with step:
                    assert step.epoch == epoch
            at.append(state.step)
            assert cell.is_finished
    assert at == [2, 4, 6]
    assert finished == [False] * 6  # a warning in a later epoch has the job requeued


# Leaving a loop


def test_a_step_counts_when_its_block_ends_and_leaving_saves_what_a_break_left(tmp_path: Path):
    with tracked(tmp_path) as state:
        for step in state.steps([0] * 9, total=9):
            with step:
                assert state.step == step.number
            assert state.step == step.number + 1
            if step.number == 3:
                state.save_now()
                break
        assert not list(tmp_path.glob("step_*"))
    with tracked(tmp_path) as state:
        assert state.step == 4


def test_a_broken_loop_can_be_gone_on_with_and_repeats_the_batch_that_was_not_used(tmp_path: Path):
    seen = []
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=1, shuffle=True)
    with tracked(tmp_path) as state:
        for stop_at in (2, 5, None):
            for step in state.steps(loader, epochs=1):
                if step.number == stop_at:
                    break
                with step as (batch,):
                    seen.append(int(batch))
    assert sorted(seen) == list(range(8))


def test_half_a_step_is_not_saved_when_the_session_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with tracked(tmp_path) as state, contextlib.suppress(ValueError):
        for step in state.steps([0] * 9, total=9):
            with step:
                if step.number == 3:
                    raise ValueError("half of it is done")
    assert not list(tmp_path.glob("step_*"))
    assert "steps 1 to 3 are not saved: step 3 was left by an exception" in capsys.readouterr().err


def test_ranks_that_leave_at_different_steps_or_not_at_all_save_nothing():
    store = dist.HashStore()
    ranks = [Consensus(store, Membership.spread(rank, 2), prefix="here", say=lambda line: None) for rank in range(2)]
    store.set("here/a/1", "step 7")
    assert ranks[0].meet("a", "step 7", 5) == "" == ranks[1].meet("a", "step 7", 5)
    store.set("here/b/1", "step 8")
    odd = "the ranks are not at one step (rank 0: step 7, rank 1: step 8)"
    assert ranks[0].meet("b", "step 7", 5) == odd == ranks[1].meet("b", "step 8", 5)
    late = "rank 0 did not leave within 0.1 s"
    assert ranks[1].meet("c", "step 7", 0.1) == late == ranks[0].meet("c", "step 7", 5)


def test_stop_ends_the_training_as_if_all_its_steps_were_made(tmp_path: Path):
    cell = Cell.create()
    assert cell.claim()
    steps = []
    with tracked(tmp_path, cell=cell) as state:
        for _ in range(2):  # also a loop around it
            for step in state.steps([0] * 9, total=9):
                with step:
                    steps.append(step.number)
                if step.number == 2:
                    state.stop()
        assert cell.is_finished
    assert steps == [0, 1, 2]
    assert (tmp_path / "step_3").is_dir()


def test_a_blocking_save_is_complete_when_it_returns_and_refused_inside_of_a_step(tmp_path: Path):
    with tracked(tmp_path) as state:
        for step in state.steps([0] * 9, total=2):
            with step, pytest.raises(UsageError, match=r"state\.save\(\) inside of step"):
                state.save()
            assert state.save()
            assert (tmp_path / f"step_{state.step}" / "MANIFEST.json").is_file()


# Gradients


@pytest.mark.parametrize("stop_at", [1, 5])
def test_gradients_that_go_on_from_step_to_step_are_kept(tmp_path: Path, stop_at: int):
    def life(folder: str, upto: int) -> list[float]:
        model = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with tracked(tmp_path / folder, model=model, optimizer=optimizer, accumulates=True) as state:
            for step in state.steps([torch.full((1, 1), float(at)) for at in range(9)], total=upto):
                with step as batch:
                    (model(batch).square().mean() / 3).backward()
                    if step.number % 3 == 2:
                        optimizer.step()
                        optimizer.zero_grad()
        return [parameter.item() for parameter in model.parameters()]

    expected = life("whole", 7)
    life("cut", stop_at)
    assert life("cut", 7) == expected


def test_a_model_that_no_optimizer_steps_needs_no_even_shares():
    net = torch.nn.Linear(2, 1)
    parts = {"net": net, "ema": copy.deepcopy(net), "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
    for size, micro, drop_last, why in (
        (6, None, True, None),
        (5, None, True, "^net is not in DDP, so only even slices can be averaged: global_batch_size is 5 at 3 ranks"),
        (6, None, False, "^net is not in DDP, .*: the last batch of an epoch has 4 samples for 3 ranks; use drop_last"),
        (6, 1, True, "^net is neither in DDP nor in FSDP2, so micro batches cannot be averaged"),
    ):
        three = Membership.spread(0, 3)
        sampler = Sampler(16, global_batch_size=size, membership=three, micro_batch_size=micro, drop_last=drop_last)
        with pytest.raises(UsageError, match=why) if why else contextlib.nullcontext():
            Averaging(parts, three).check(sampler)
        Averaging({"ema": parts["ema"], "optimizer": parts["optimizer"]}, three).check(sampler)
