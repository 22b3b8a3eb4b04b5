"""What goes on, and what begins anew, when the checkpoint is of another number of ranks: loaders that are not ours."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from allranks.state.resumed.track import Tracked
from allranks.state.saved.checkpoint import Checkpointer
from allranks.state.saved.commit import Attempt, gather_parts, seal, write_part
from allranks.state.saved.manifest import part_name

SAMPLES = list(range(5))


class Life:
    """One life of a training that shuffles with torch's own DistributedSampler: five steps an epoch."""

    def __init__(self, folder: Path, total: int, *, drawn: int = 0, seed: int = 1) -> None:
        torch.manual_seed(seed)
        for _ in range(drawn):  # what the script has drawn by itself until then
            torch.rand(1), numpy.random.rand(), random.random()
        loader = DataLoader(
            SAMPLES,  # type: ignore[arg-type]
            batch_size=1,
            sampler=DistributedSampler(SAMPLES, num_replicas=1, rank=0, seed=3),  # type: ignore[arg-type]
        )
        self.seen: list[tuple[int, int]] = []
        self.noise: list[tuple[float, float, float]] = []
        with Checkpointer(folder) as checkpoints:
            state = Tracked({}, checkpoints=checkpoints)
            state.load()
            self.first_step = state.step
            for step in state.steps(loader, total=total):
                with step as batch:
                    self.seen.append((step.epoch, int(batch)))
                    self.noise.append((torch.rand(1).item(), float(numpy.random.rand()), random.random()))


def as_of_two_ranks(one: Path, two: Path, *, step: int) -> None:
    """Make the checkpoint of one rank one that two ranks have written."""
    part = (one / f"step_{step}" / part_name(0)).read_bytes()
    attempts = [Attempt(root=two, step=step, name="abc-1", rank=rank, world_size=2) for rank in range(2)]
    for attempt in attempts:
        write_part(attempt, memoryview(part))
    seal(
        attempts[0],
        gather_parts(attempts[0], is_orphaned=lambda: False, is_next_due=lambda: False),
        torch=torch.__version__,
    )


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """A checkpoint of two ranks at step 7, two steps into the second epoch."""
    Life(tmp_path / "one", 7)
    as_of_two_ranks(tmp_path / "one", tmp_path / "two", step=7)
    return tmp_path / "two"


def test_every_epoch_of_a_distributed_sampler_has_an_order_of_its_own(tmp_path: Path) -> None:
    life = Life(tmp_path, 10)
    orders = [[sample for epoch, sample in life.seen if epoch == which] for which in range(2)]
    for epoch, order in enumerate(orders):
        sampler: Any = DistributedSampler(SAMPLES, num_replicas=1, rank=0, seed=3)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        assert order == list(sampler)
    assert orders[0] != orders[1]


def test_at_another_size_the_epoch_begins_again_in_its_own_order(
    cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Life(tmp_path / "whole", 15)
    resumed = Life(cut, 17)
    assert resumed.first_step == 7
    assert resumed.seen == whole.seen[5:15]
    assert "epoch 1 begins again" in capsys.readouterr().err


def test_at_another_size_the_generators_begin_anew_from_the_scripts_seed_and_the_step(
    cut: Path, tmp_path: Path
) -> None:
    copies = [tmp_path / name for name in ("again", "other")]
    for copy in copies:
        as_of_two_ranks(tmp_path / "one", copy, step=7)
    begun = Life(tmp_path / "begun", 1).noise
    first = Life(cut, 9).noise
    again = Life(copies[0], 9, drawn=3).noise
    other = Life(copies[1], 9, seed=2).noise
    assert again == first  # whatever the script drew before
    for kind in range(3):
        assert other[0][kind] != first[0][kind]  # another seed of the script's
        assert begun[0][kind] not in [noise[kind] for noise in first]  # not the first steps' numbers again
