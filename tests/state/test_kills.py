"""Whatever is killed, and when: there is a checkpoint to go on from, and it is all of one step."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from allranks.state.saved.checkpoint import Checkpointer, Loaded
from allranks.state.saved.commit import started_ticks
from allranks.state.saved.parts import list_checkpoints
from conftest import wait_until
from state.conftest import Zygote, handed_over, kill, writers_of
from state.zygote import is_of

pytestmark = pytest.mark.torch


def seeds(in_ci: int, by_hand: int) -> list[Any]:
    """Seeds of a moment: some in CI, and many more by hand."""
    return [*range(in_ci), *(pytest.param(seed, marks=pytest.mark.by_hand) for seed in range(in_ci, by_hand))]


def load(directory: Path) -> Loaded | None:
    with Checkpointer(directory, say=lambda line: None) as checkpoints:
        return checkpoints.load()


@pytest.mark.parametrize("seed", seeds(6, 30))
def test_a_killed_trainers_writer_finishes_what_was_handed_over(zygote: Zygote, tmp_path: Path, seed: int) -> None:
    directory = tmp_path / "run"
    trainer = zygote.start(directory)
    wait_until(lambda: handed_over(directory) >= 1, "the first save")
    time.sleep(random.Random(seed).uniform(0, 0.1))
    kill(trainer)
    wait_until(lambda: not writers_of(directory), "the writer's end")
    loaded = load(directory)
    assert loaded is not None
    assert loaded.step >= handed_over(directory)
    assert is_of(loaded.step, loaded.common)
    assert loaded.per_rank == {"rank": 0, "step": loaded.step}


@pytest.mark.parametrize("seed", seeds(8, 40))
def test_a_node_that_dies_in_a_save_leaves_the_one_before_it(zygote: Zygote, tmp_path: Path, seed: int) -> None:
    directory = tmp_path / "run"
    trainer = zygote.start(directory)
    wait_until(lambda: list_checkpoints(directory), "the first checkpoint")
    time.sleep(random.Random(seed).uniform(0, 0.1))
    kill(*writers_of(directory), trainer)
    wait_until(lambda: not writers_of(directory), "the writer's end")
    loaded = load(directory)
    assert loaded is not None
    assert loaded.step >= handed_over(directory) - 2  # one being copied, one being written
    assert is_of(loaded.step, loaded.common)


@pytest.mark.parametrize("seed", seeds(4, 16))
def test_of_three_ranks_all_or_none_is_whole(zygote: Zygote, tmp_path: Path, seed: int) -> None:
    directory, chance = tmp_path / "run", random.Random(seed)
    trainers = [zygote.start(directory, rank=rank, world_size=3, size=2_000) for rank in range(3)]
    wait_until(lambda: list_checkpoints(directory), "the first checkpoint")
    time.sleep(chance.uniform(0, 0.2))
    kill(trainers[chance.randrange(3)])
    time.sleep(chance.uniform(0, 0.02))
    kill(*trainers)
    handed = min(handed_over(directory, rank) for rank in range(3))
    are_writers_killed = bool(seed % 2)
    if are_writers_killed:
        kill(*writers_of(directory))
    wait_until(lambda: not writers_of(directory), "the writers' end")
    loaded = load(directory)
    assert loaded is not None
    assert loaded.world_size == 3
    assert is_of(loaded.step, loaded.common)
    assert are_writers_killed or loaded.step >= handed


def test_a_run_goes_on_where_the_killed_one_was_and_sweeps_up_after_it(zygote: Zygote, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    trainer = zygote.start(directory)
    wait_until(lambda: handed_over(directory) >= 3, "three saves")
    (writer,) = writers_of(directory)
    wait_until(lambda: is_stopped_in_a_save(writer, directory), "a save in its middle")
    kill(writer, trainer)
    wait_until(lambda: started_ticks(writer) is None, "the writer's end")
    resumed = zygote.start(directory, first=1000, steps=3, stays=True)  # a writer without a trainer does not tidy
    whole = {"step_1000", "step_1001", "step_1002"}
    wait_until(lambda: {path.name for path in directory.glob("step_*")} == whole, "three checkpoints and nothing else")
    kill(resumed)


def is_stopped_in_a_save(writer: int, directory: Path) -> bool:
    """Stop the writer where it has said that it writes; before that, a save's directory stays for an hour."""
    os.kill(writer, signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{writer}/stat").read_text().rpartition(")")[2].split()[0] == "T", "its stop")
    if any(directory.glob("*.tmp.*/rank_00000.json")):
        return True
    os.kill(writer, signal.SIGCONT)
    return False


def test_a_load_waits_for_a_writer_that_outlived_its_trainer(zygote: Zygote, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    trainer = zygote.start(directory, size=1_000_000, pause_s=0.3)
    wait_until(lambda: handed_over(directory) >= 2, "two saves")
    wait_until(lambda: any(directory.glob("*.tmp.*")), "the second one's directory")
    kill(trainer)
    loaded = load(directory)
    assert loaded is not None
    assert loaded.step >= handed_over(directory)
    assert is_of(loaded.step, loaded.common)


def test_a_part_that_never_comes_is_not_waited_for_when_the_trainers_are_dead(zygote: Zygote, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    trainers = [zygote.start(directory, rank=rank, world_size=3) for rank in (0, 1)]
    wait_until(lambda: all(handed_over(directory, rank) for rank in (0, 1)), "both saves")
    kill(*trainers)
    wait_until(lambda: not writers_of(directory), "the writers' end")
    assert not list_checkpoints(directory)
    assert load(directory) is None
