"""Is the order of samples a function of seed and epoch alone, and does each come once, whoever takes part?"""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from allranks.model.errors import UsageError
from allranks.model.membership import Membership
from allranks.state.resumed.sampler import Sampler, SeededDataset, slice_of


def ranks(world_size: int, samples: int, batch: int, **more: object) -> list[Sampler]:
    return [
        Sampler(samples, global_batch_size=batch, membership=Membership.spread(rank, world_size), **more)  # type: ignore[arg-type]
        for rank in range(world_size)
    ]


def take_step(samplers: list[Sampler], lists: list[object]) -> list[int]:
    """One step of all ranks: the samples that count, in their order."""
    taken: list[int] = []
    for sampler, batches in zip(samplers, lists, strict=True):
        for size in sampler.share().parts:
            taken += [int(index) for index in next(batches)[:size]]  # type: ignore[call-overload]
    for sampler in samplers:
        sampler.advance()
    return taken


def run(segments: list[tuple[int, int]], *, samples: int, batch: int, **more: object) -> list[list[int]]:
    """Steps of a run that is started again with other numbers of ranks: (ranks, steps) each."""
    steps, state = [], None
    for world_size, num_steps in segments:
        samplers = ranks(world_size, samples, batch, **more)
        if state:
            for sampler in samplers:
                sampler.load_state_dict(state)
        epoch = None
        for _ in range(num_steps):
            if epoch != samplers[0].epoch:
                epoch, lists = samplers[0].epoch, [iter(sampler) for sampler in samplers]
            steps.append(take_step(samplers, lists))
        state = samplers[0].state_dict()
    return steps


sizes = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 9)), min_size=1, max_size=5)


@given(sizes, st.integers(1, 60), st.integers(1, 20), st.integers(0, 2**40), st.none() | st.integers(1, 5))
def test_every_step_has_the_same_samples_at_any_sizes_and_across_any_restarts(segments, samples, batch, seed, micro):
    count = sum(steps for _, steps in segments)
    alone = run([(1, count)], samples=samples, batch=batch, seed=seed)
    assert run(segments, samples=samples, batch=batch, seed=seed, micro_batch_size=micro) == alone


@given(sizes, st.integers(1, 60), st.integers(1, 20))
def test_each_sample_comes_exactly_once_an_epoch(segments, samples, batch):
    steps = run(segments, samples=samples, batch=batch)
    taken = [index for step in steps for index in step]
    for start in range(0, len(taken) - samples + 1, samples):
        assert sorted(taken[start : start + samples]) == list(range(samples))


@given(st.integers(0, 200), st.integers(1, 40))
def test_slices_cover_everything_and_differ_by_one_at_most(count, parts):
    slices = [slice_of(count, part, parts) for part in range(parts)]
    assert [place for piece in slices for place in piece] == list(range(count))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


def test_five_of_six_ranks_share_the_same_global_batch():
    assert [len(sampler.share().own) for sampler in ranks(6, 100, 16)] == [2, 3, 3, 2, 3, 3]
    assert [len(sampler.share().own) for sampler in ranks(5, 100, 16)] == [3, 3, 3, 3, 4]
    assert {sampler.share().total for sampler in ranks(5, 100, 16)} == {16}


def test_a_rank_without_a_sample_in_the_last_batch_runs_with_one_that_does_not_count():
    samplers = ranks(3, 7, 3)
    lists = [list(sampler) for sampler in samplers]
    for sampler in samplers:
        sampler.position = 6
    assert [sampler.share().parts for sampler in samplers] == [(0,), (0,), (1,)]
    assert [len(batches) for batches in lists] == [3, 3, 3]
    assert len({tuple(batches[2]) for batches in lists}) == 1


def test_micro_batches_are_as_even_as_can_be():
    sampler = Sampler(100, global_batch_size=20, micro_batch_size=8)
    assert sampler.share().parts == (6, 7, 7)
    assert [len(batch) for batch in sampler][:4] == [6, 7, 7, 6]
    assert len(sampler) == len(list(sampler)) == 15


@pytest.mark.parametrize("micro", [None, 3, 8])
@pytest.mark.parametrize("samples", [5, 20, 43])
def test_the_length_is_the_number_of_batches_with_a_short_last_one_and_in_later_epochs(samples: int, micro: int | None):
    for sampler in ranks(3, samples, 20, micro_batch_size=micro):
        sampler.position = 2 * samples
        assert len(sampler) == len(list(sampler))


def test_the_length_of_a_huge_epoch_is_told_at_once():
    assert len(Sampler(10**15 + 1, global_batch_size=10, micro_batch_size=4)) == 3 * 10**14 + 1


def test_the_order_is_another_one_each_epoch_and_for_each_seed_and_stays_what_it_is():
    sampler = Sampler(8, global_batch_size=4, seed=3)
    assert sampler.order(0).tolist() == [7, 3, 5, 0, 1, 6, 2, 4]
    assert sampler.order(1).tolist() != sampler.order(0).tolist()
    assert Sampler(8, global_batch_size=4, seed=4).order(0).tolist() != sampler.order(0).tolist()
    assert Sampler(8, global_batch_size=4, shuffle=False).order(5).tolist() == list(range(8))


def test_drop_last_leaves_out_what_does_not_fill_a_batch():
    sampler = Sampler(10, global_batch_size=4, drop_last=True)
    assert [len(batch) for batch in sampler] == [4, 4]
    with pytest.raises(UsageError, match="drop_last leaves nothing of 3 samples"):
        Sampler(3, global_batch_size=4, drop_last=True)


def test_what_the_loader_has_fetched_is_not_consumed():
    sampler = Sampler(32, global_batch_size=4)
    batches = iter(DataLoader(list(range(32)), batch_sampler=sampler, num_workers=2, prefetch_factor=3))  # type: ignore[arg-type]
    next(batches)
    sampler.advance()
    assert sampler.state_dict()["position"] == 4


def test_a_position_in_another_order_is_refused():
    state = Sampler(32, global_batch_size=4, seed=1).state_dict()
    with pytest.raises(UsageError, match="seed is 2, but the checkpoint was made with 1"):
        Sampler(32, global_batch_size=4, seed=2).load_state_dict(state)
    with pytest.raises(UsageError, match="epoch_size is 33, but the checkpoint was made with 32"):
        Sampler(33, global_batch_size=4, seed=1).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dataset": 0, "global_batch_size": 1}, "the dataset's length is 0"),
        ({"dataset": 5, "global_batch_size": 0}, "global_batch_size is 0"),
        ({"dataset": 5, "global_batch_size": 1, "micro_batch_size": 0}, "micro_batch_size is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, said):
    with pytest.raises(UsageError, match=said):
        Sampler(**arguments)


class Noisy(Dataset[tuple[int, float, float, float]]):
    """Augments with every generator that people use."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(numpy.random.rand()), torch.rand(1).item()


def augmented(world_size: int, num_workers: int, *, skip: int = 0) -> dict[int, tuple[float, ...]]:
    seen = {}
    for sampler in ranks(world_size, 24, 6, seed=5):
        sampler.position = skip
        for batch in DataLoader(SeededDataset(Noisy()), batch_sampler=sampler, num_workers=num_workers):  # type: ignore[arg-type]
            for index, *noise in zip(*(column.tolist() for column in batch), strict=True):
                seen[index] = tuple(noise)
    return seen


def test_augmentation_depends_on_seed_epoch_and_index_alone():
    whole = augmented(1, 0)
    assert len(set(whole.values())) == 24
    assert augmented(5, 2) == whole
    later = augmented(3, 1, skip=12)
    assert {index: whole[index] for index in later} == later
    assert augmented(1, 0, skip=24)[0] != whole[0]


def test_seeded_samples_leave_the_generators_around_them_alone():
    dataset = SeededDataset(Noisy())
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    expected = torch.rand(1), random.random(), numpy.random.rand()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    for batch in Sampler(24, global_batch_size=6):
        [dataset[index] for index in batch]
    assert (torch.rand(1), random.random(), numpy.random.rand()) == expected
