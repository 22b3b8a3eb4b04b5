"""What does a training gain that moves from `hvd.elastic` to `session()`? Counts samples after a lost worker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import Allranks, allranks_command, clean_env
from lab.conftest import SIX_NODE, TestLab, lab_command, unique

from .marks import NEEDS_HOROVOD

EXAMPLES = Path(__file__).parents[2] / "examples" / "horovod"
SAMPLES, EPOCHS = 960, 2
STRUCK = "1:37"
"""Rank 1 gets SIGKILL in step 37 of 80; both save every 5 steps."""


@dataclass(frozen=True)
class Counts:
    """Samples of a run with a lost worker, over all epochs."""

    twice: int
    """That the resulting model has seen more than once in an epoch."""
    never: int
    again: int
    """That were computed once more, after the model went back to its last saved state."""


def count(path: Path) -> Counts:
    """Count from the lines `EPOCH STEP RANK SAMPLES`; of a step that was made again, the last time counts."""
    rows = [line.split() for line in path.read_text().splitlines()]
    made: dict[int, dict[int, tuple[int, list[str]]]] = {}
    num_lines = 0
    for epoch, step, rank, samples in rows:
        for later in [number for number in made if number > int(step)]:
            num_lines += sum(len(each[1]) for each in made.pop(later).values())
        ranks = made.setdefault(int(step), {})
        if int(rank) in ranks:  # this step is made again, perhaps by fewer
            num_lines += sum(len(each[1]) for each in made.pop(int(step)).values())
            ranks = made.setdefault(int(step), {})
        ranks[int(rank)] = int(epoch), samples.split(",")
    seen = Counter((epoch, each) for ranks in made.values() for epoch, samples in ranks.values() for each in samples)
    twice = sum(number > 1 for number in seen.values())
    return Counts(twice=twice, never=EPOCHS * SAMPLES - len(seen), again=num_lines)


def test_samples_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    path.write_text("0 0 0 1,2\n0 0 1 3,4\n0 1 0 5,6\n0 1 1 7,8\n0 1 0 5,6\n0 1 1 7,1\n")
    found = count(path)
    assert (found.twice, found.again) == (1, 4)
    assert found.never == EPOCHS * SAMPLES - 7


@pytest.mark.torch
@pytest.mark.by_hand
def test_the_session_sees_each_sample_once(allranks: Allranks, tmp_path: Path) -> None:
    flags = ("--nproc-per-node", "3", "--max-restarts", "1")
    result = allranks("run", *flags, EXAMPLES / "session.py", tmp_path / "seen", STRUCK, timeout_s=300)
    assert result.returncode == 0, result.stderr
    found = count(tmp_path / "seen")
    print(f"session: {found}")
    assert (found.twice, found.never) == (0, 0)
    assert 0 < found.again <= 5 * 24


@pytest.fixture
def lab() -> Iterator[TestLab]:
    lab = TestLab(unique("moved"))
    try:
        lab.run("up", "--cluster", SIX_NODE)
        yield lab
    finally:
        lab.run("down")


@pytest.mark.lab
@pytest.mark.torch
@pytest.mark.by_hand
@pytest.mark.timeout(600)
@NEEDS_HOROVOD
def test_horovod_runs_to_its_end_after_a_lost_worker(lab: TestLab, tmp_path: Path) -> None:
    words = ("horovod", "--min-np", "2", "--max-np", "3", "-np", "3", "--network", "192.168.20.0/24")
    job = allranks_command(*words, EXAMPLES / "elastic.py", tmp_path / "seen", STRUCK)
    command = lab_command(
        "exec", "--name", lab.name, "master-node", "--", "salloc", "-N3", "--no-kill", "--quiet", *job
    )
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean_env(os.environ),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "AR407 dead-rank" in result.stdout
    print(f"Horovod: {count(tmp_path / 'seen')}", file=sys.stderr)
