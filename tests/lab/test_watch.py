"""`allranks watch` on a real SLURM: a fault in a job of `srun python` on three nodes, seen from one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.watch.stage import play_apart

from watch.test_planted import SPREAD, say_wrong

from .conftest import TestLab

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.healthy]


def test_a_rank_of_another_node_is_named_by_a_watch_on_one_node_without_the_job_s_id(
    six_nodes: TestLab, tmp_path: Path
) -> None:
    assert say_wrong(play_apart("srun", SPREAD["srun"], tmp_path / "drill", lab=six_nodes.name)) == []
