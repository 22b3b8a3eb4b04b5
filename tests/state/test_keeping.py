"""Which checkpoints stay, and which ones a training goes on from?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from allranks.model.errors import UsageError
from allranks.state.resumed.track import Tracked
from allranks.state.saved.checkpoint import Checkpointer
from state.test_loops import tracked

pytestmark = pytest.mark.torch


def test_the_best_checkpoint_outlives_the_newest_ones_and_a_restart(tmp_path: Path):
    values = [0.5, 0.2, 0.4, float("nan"), 0.3, 0.3]
    for upto in (4, 6):  # a second life knows the first one's best value
        with tracked(tmp_path, keep_best=("loss", "min")) as state:
            for step in state.steps([0] * 9, total=6):
                with step:
                    pass
                assert state.save(loss=torch.tensor(values[step.number]))
                if state.step == upto:
                    break
    assert {path.name for path in tmp_path.glob("step_*")} == {"step_2", "step_4", "step_5", "step_6"}
    assert (tmp_path / "best").readlink() == Path("step_2")
    with tracked(tmp_path, keep_best=("accuracy", "max")) as state:  # another value begins anew
        assert state.save(accuracy=0.1)
    assert (tmp_path / "best").readlink() == Path("step_6.2")


def test_a_value_that_keep_best_does_not_name_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r'^track\(keep_best=\(.*\)\): expected a name and "min" or "max"'):
        Tracked({}, checkpoints=Checkpointer(tmp_path), rank=0, world_size=1, keep_best=("loss", "low"))
    with tracked(tmp_path, keep_best=("loss", "min")) as state, pytest.raises(UsageError, match=r"names loss$"):
        state.save(los=0.1)
    with tracked(tmp_path) as state, pytest.raises(UsageError, match=r"is not set$"):
        state.save(loss=0.1)
