"""Does examples/gpt/train.py run alone and with two ranks, learn, stop when told, and report its figures?"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from forked import fork_ranks, fork_script

pytestmark = pytest.mark.torch

TRAIN = Path(__file__).parents[2] / "examples" / "gpt" / "train.py"
TINY = ["--layers=1", "--heads=2", "--width=32", "--context=32", "--batch-size=8", "--max-bytes=400000", "--json"]


def test_two_ranks_learn_and_report_their_figures(tmp_path):
    result = fork_ranks(tmp_path, "2", TRAIN, *TINY, "--steps=60")
    told, codes, _ = result.stdout.rpartition("codes [0, 0]\n")
    assert codes, result.stderr
    losses = [float(loss) for loss in re.findall(r"^step +\d+   loss (\d+\.\d+)", told, re.MULTILINE)]
    assert losses[0] == 5.545  # ln 256: an even guess
    assert losses[-1] < 4.5
    assert re.search(r"^validation [4-7]\.\d+ bits per byte after 60 steps$", told, re.MULTILINE)
    figures = json.loads(told.splitlines()[-1])
    assert (figures["steps"], figures["world_size"], figures["backend"]) == (60, 2, "gloo")
    assert figures["tokens_per_s"] > 0
    assert figures["loss"] < 4.5


def test_it_stops_alone_when_its_seconds_are_over(tmp_path):
    result = fork_script(tmp_path, TRAIN, *TINY, "--steps=1000000", "--seconds=1", "--log-every=5")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert 1 < figures["seconds"] < 100
    assert 1 <= figures["steps"] < 1_000_000
    assert figures["world_size"] == 1


def test_equal_seeds_give_equal_losses(tmp_path):
    result = fork_ranks(tmp_path, "1,1", TRAIN, *TINY, "--steps=3", "--seed=7")
    first, second = (json.loads(line)["loss"] for line in result.stdout.splitlines() if line.startswith("{"))
    assert first == second


def test_heads_must_divide_the_width(tmp_path):
    result = fork_script(tmp_path, TRAIN, "--width=100", "--heads=3")
    assert result.returncode == 2
    assert "--width 100 is not a multiple of --heads 3" in result.stderr
