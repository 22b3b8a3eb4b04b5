"""Which checkpoints stay, and which ones a training goes on from?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import allranks
from allranks.model.errors import UsageError
from allranks.session import SessionError
from allranks.state.resumed.experiment import Named
from allranks.state.resumed.steps import describe_left
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
        Tracked({}, checkpoints=Checkpointer(tmp_path), keep_best=("loss", "low"))
    with tracked(tmp_path, keep_best=("loss", "min")) as state, pytest.raises(UsageError, match=r"names loss$"):
        state.save(los=0.1)
    with tracked(tmp_path) as state, pytest.raises(UsageError, match=r"is not set$"):
        state.save(loss=0.1)


# What a training goes on from


def net(size: int = 4, **arguments: Any) -> torch.nn.Module:
    return torch.nn.Linear(size, 1, **arguments)


def one_step(folder: Path, **parts: Any) -> None:
    with tracked(folder, **parts) as state:
        for step in state.steps([0], total=1):
            with step:
                pass


def test_a_part_more_or_less_is_refused_and_taken_with_partial(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    old, new = net(), net()
    one_step(tmp_path, model=old, teacher=net())
    with pytest.raises(UsageError, match="step_1 lacks ema and also holds teacher; track the same parts, or"):
        one_step(tmp_path, model=new, ema=net())
    ema = net()
    before = ema.weight.clone()
    with tracked(tmp_path, model=new, ema=ema, partial=True) as state:
        assert state.step == 1
    assert new.weight.equal(old.weight)
    assert ema.weight.equal(before)
    said = capsys.readouterr().err
    assert "begins anew, since the checkpoint lacks it: ema\n" in said
    assert "in the checkpoint, but not tracked: teacher\n" in said


@pytest.mark.parametrize("is_default", [True, False])
def test_another_script_is_refused_in_the_default_directory_and_said_in_one_that_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_default: bool
):
    def life(script: str) -> None:
        path = tmp_path / script
        path.parent.mkdir(exist_ok=True)
        path.touch()
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)
        one_step(tmp_path / "checkpoints", model=net(), named=Named(is_default=is_default))

    life("a/train.py")
    life("a/train.py")
    assert "changed" not in capsys.readouterr().err
    moved = f"script: {tmp_path}/a/train.py -> {tmp_path}/b/train.py"
    if is_default:
        with pytest.raises(UsageError) as refused:
            life("b/train.py")
        advice = "to begin anew, pass --checkpoint-dir NEW_DIRECTORY; to go on from it, pass --checkpoint-dir"
        assert str(refused.value).endswith(f"step_1 is another experiment's ({moved}); {advice} {tmp_path}/checkpoints")
    else:
        life("b/train.py")
        assert f"allranks: changed since that checkpoint: {moved}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (net(5), "model.weight is of shape (1, 4) there, of shape (1, 5) here"),
        (net(bias=False), "model.bias is of shape (1,) there, missing here"),
    ],
    ids=["shape", "name"],
)
def test_other_parameters_are_refused_in_the_default_directory(tmp_path: Path, other: torch.nn.Module, differs: str):
    one_step(tmp_path, model=net())
    with pytest.raises(UsageError) as refused:
        one_step(tmp_path, model=other, named=Named(is_default=True))
    assert f"step_1 is another experiment's ({differs}); " in str(refused.value)


def test_an_edited_script_with_other_arguments_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    script = tmp_path / "train.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    for text, arguments in (("a", []), ("b", ["--lr", "0.1 x"])):
        script.write_text(text)
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        one_step(tmp_path, model=net(), named=Named(is_default=True))
    said = "changed since that checkpoint: train.py was edited, arguments: none -> --lr '0.1 x'"
    assert f"allranks: {said}\n" in capsys.readouterr().err


def test_only_a_directory_that_nobody_named_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def life(script: str, **told: Any) -> None:
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / script), raising=False)
        with allranks.session(backend="gloo") as s:
            state = s.track(model=net(), **told)
            for step in state.steps([0], total=1):
                with step:
                    pass

    monkeypatch.chdir(tmp_path)
    life("a.py")
    with pytest.raises(SessionError, match="another experiment's") as refused:
        life("b.py", other=net())  # of the same experiment this would be wrong, too
    here = tmp_path / "checkpoints"
    assert refused.value.code == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"error: {here}/step_1 is another experiment's (script: {tmp_path}/a.py -> {tmp_path}/b.py; lacks other); to "
        f"begin anew, set ALLRANKS_CHECKPOINT_DIR=NEW_DIRECTORY; to go on from it, set ALLRANKS_CHECKPOINT_DIR={here}"
    ]
    life("b.py", checkpoint_dir="checkpoints")
    monkeypatch.setenv("ALLRANKS_CHECKPOINT_DIR", "checkpoints")
    life("b.py")
    monkeypatch.delenv("ALLRANKS_CHECKPOINT_DIR")


def test_without_a_launcher_it_says_where_it_saves_and_how_much_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def life(total: int) -> list[str]:
        with allranks.session(backend="gloo") as s:
            for step in s.track(model=net()).steps([0, 0, 0], total=total):
                with step:
                    pass
        return capsys.readouterr().err.splitlines()

    monkeypatch.chdir(tmp_path)
    here = tmp_path / "checkpoints"
    assert life(2) == [f"allranks: begins at step 0, and saves checkpoints in {here}"]
    assert life(2) == [
        f"allranks: resumed at step 2 from {here}/step_2",
        "allranks: 0 of 2 steps are left: the body of the loop does not run; to begin anew, set "
        "ALLRANKS_CHECKPOINT_DIR=NEW_DIRECTORY",
    ]
    assert life(3)[1:] == ["allranks: 1 of 3 steps are left"]


def test_loops_over_epochs_say_what_is_left_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def life(epochs: int) -> list[str]:
        with allranks.session(backend="gloo") as s:
            state = s.track(model=net())
            for epoch in range(epochs):
                for step in state.steps([0], epochs=epoch + 1):
                    with step as last:
                        pass
            assert last == 0  # unbound where no loop had a step
        return capsys.readouterr().err.splitlines()[1:]

    monkeypatch.chdir(tmp_path)
    assert life(2) == []
    assert life(4) == ["allranks: 1 of 3 epochs are left"]
    with pytest.raises(UnboundLocalError):
        life(4)
    assert capsys.readouterr().err.splitlines()[1:] == [
        "allranks: 0 of 4 epochs are left: the body of the loop does not run; to begin anew, set "
        "ALLRANKS_CHECKPOINT_DIR=NEW_DIRECTORY"
    ]


@pytest.mark.parametrize(
    ("step", "epoch", "total", "epochs", "is_over", "words"),
    [
        (100, 2, 150, None, False, "50 of 150 steps are left"),
        (100, 2, 100, None, True, "0 of 100 steps are left"),
        (150, 2, 100, None, True, "0 of 100 steps are left"),
        (100, 2, None, 3, False, "1 of 3 epochs are left"),
        (100, 3, None, 3, True, "0 of 3 epochs are left"),
        (100, 2, 150, 3, False, "at most 50 of 150 steps and 1 of 3 epochs are left"),
        (100, 3, 150, 3, True, "at most 50 of 150 steps and 0 of 3 epochs are left"),
    ],
)
def test_what_is_left_of_a_training(
    step: int, epoch: int, total: int | None, epochs: int | None, is_over: bool, words: str
):
    assert describe_left(step, epoch, total=total, epochs=epochs) == (is_over, words)
