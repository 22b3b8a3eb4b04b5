"""Gradients and parameters that become NaN or infinite: is it said once, is nothing of it saved, is a replica named?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allranks.state.saved.checkpoint import Checkpointer
from allranks.state.saved.commit import Attempt, gather_parts, seal, write_part
from allranks.state.saved.manifest import Manifest
from allranks.state.saved.parts import list_checkpoints, read_manifest
from allranks.state.saved.tidy import Keeper, roll_back
from allranks.state.saved.writer_link import WriterLink
from allranks.state.truth import comparing
from allranks.state.truth.comparing import Comparing
from allranks.state.truth.corruption import OnCorruption, ReplicaError
from allranks.state.truth.finite import Finiteness, NotFiniteError
from conftest import wait_until
from state.test_loops import tracked
from state.truth.test_comparing import Talks, live, roles_of

NAN, INF = float("nan"), float("inf")


def looker(*values: Any, dtype: torch.dtype = torch.float32) -> tuple[Finiteness, torch.optim.Optimizer]:
    weights = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for _ in values]
    for own, value in zip(weights, values, strict=True):
        own.grad = None if value is None else torch.tensor(value, dtype=dtype).expand(4).clone()
    optimizer = torch.optim.SGD(weights, lr=0.0)
    return Finiteness([optimizer], lambda: dict(zip("abc", weights, strict=False)), lambda: {"w": 7}), optimizer


@pytest.mark.parametrize(
    ("values", "dtype", "is_seen"),
    [
        ([0.0, 1.0, None], torch.float32, False),
        ([0.0, [1.0, 2.0, NAN, 3.0]], torch.float32, True),
        ([[1.0, 1.0, 1.0, -INF]], torch.bfloat16, True),
        ([[INF, -INF, 0.0, 0.0]], torch.float64, True),
        ([65504.0], torch.float16, False),  # whose sum is more than float16 has
        ([3e38], torch.float32, False),
        ([[3e38, 3e38, 3e38, NAN]], torch.float32, True),
        ([complex(1, NAN)], torch.complex64, False),  # not looked at
    ],
)
def test_gradients_are_seen_before_the_update_where_one_element_is_not_finite(
    values: list[Any], dtype: torch.dtype, is_seen: bool
):
    own, optimizer = looker(*values, dtype=dtype)
    optimizer.step()
    assert own.poll(5) is is_seen
    assert own.take() == ((1, {"w": 7}) if is_seen else (0, None))
    assert own.poll(5) is False


def test_a_parameter_counts_that_became_not_finite_and_not_one_that_began_so():
    weights = {"mask": torch.tensor([0.0, -INF]), "w": torch.ones(3), "large": torch.full((4,), 3e38)}
    own = Finiteness([], lambda: weights, dict)
    assert own.find_bad_parameter() == ""
    weights["w"][1] = NAN
    assert own.find_bad_parameter() == "w"


# A whole training


class Life:
    """A model whose gradients are NaN at one step, and, once its parameters are, at all later ones."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, folder: Path, *, nan_at: int, total: int, is_skipped: bool = False) -> None:
        with tracked(folder, every=1, model=self.model, optimizer=self.optimizer) as state:
            for step in state.steps([torch.ones(3, 2)] * 9, total=total):
                with step as batch:
                    self.model(batch).square().sum().backward()
                    if step.number == nan_at:
                        self.model.bias.grad.fill_(NAN)  # type: ignore[union-attr]
                    if not is_skipped or step.number != nan_at:
                        self.optimizer.step()
                    self.optimizer.zero_grad()


def test_what_is_not_finite_is_said_once_and_never_saved_and_the_same_step_again_ends_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ALLRANKS_AGENT_PID", "1")
    Life().train(tmp_path, nan_at=3, total=6)
    said = capsys.readouterr().err
    assert said.count("AR604 nan-loss: gradients are NaN or infinite at step 4, and then model/bias is: look at ") == 1
    assert said.count("AR604") == 1
    assert (
        "the checkpoint of step 4 is not written: model/bias is NaN or infinite, so the last finite checkpoint" in said
    )
    assert list_checkpoints(tmp_path)[0].name == "step_3"
    with pytest.raises(NotFiniteError) as raised:
        Life().train(tmp_path, nan_at=3, total=6)
    assert str(raised.value) == (
        "allranks: AR604 nan-loss: gradients are NaN or infinite at step 4, and then model/bias is, as before the "
        "checkpoint was loaded: a restart does not help"
    )
    Life().train(tmp_path, nan_at=4, total=6)  # another step: it goes on


def test_a_step_that_the_script_skips_is_no_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    Life().train(tmp_path, nan_at=3, total=6, is_skipped=True)
    assert "AR604" not in capsys.readouterr().err
    assert list_checkpoints(tmp_path)[0].name == "step_6"


def test_what_a_grad_scaler_lets_a_fused_optimizer_skip_is_no_loss():
    own, optimizer = looker([NAN] * 4)
    for found, is_seen in ((1.0, False), (0.0, True)):
        optimizer.found_inf = torch.tensor([found])  # type: ignore[attr-defined]
        own.look(optimizer)
        assert own.poll(5) is is_seen


# Replicas


@pytest.mark.parametrize("flips", [True, False])
def test_where_all_became_nan_the_replica_that_differed_before_is_named(flips: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ALLRANKS_AGENT_PID", "1")
    monkeypatch.setenv("ALLRANKS_NODE", "n07")
    monkeypatch.setattr(comparing, "choose_exponent", lambda *_: 0)
    said = list[str]()

    def life(rank: int, talks: Talks) -> str:
        model = torch.nn.Linear(8, 8, bias=False)
        torch.nn.init.constant_(model.weight, 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts: Any = SimpleNamespace(
            roles=roles_of,
            state=lambda: {"model": model.state_dict()},
            optimizers=[optimizer],
            parameters=lambda: {"w": model.weight},
        )
        steps = ["step 4", "step 8 once that is written"]
        checkpoints: Any = SimpleNamespace(roll_back=lambda: steps, directory=Path("/nowhere"))
        own = Comparing(
            parts, checkpoints, policy=OnCorruption.HEAL, talks=talks, say=said.append if rank == 0 else str
        )
        try:
            for step in range(8):
                is_checked = step < 5
                looks, *words = talks.largest(own.looks(step), *(own.words(step) if is_checked else ()))
                own.heard(step, words, looks=bool(looks))
                if step == 6 and rank == 1 and flips:
                    model.weight.data.view(torch.int32)[3, 2] ^= 1 << 30
                model.weight.grad = torch.full((8, 8), NAN if step == 6 else 0.25)
                optimizer.step()
        except ReplicaError as error:
            return str(error)
        return ""

    (message,) = {*live(3, life)}
    if flips:
        assert message == (
            "allranks: AR610 replica-differs: rank 1 on n07 has other bits than 2 others, in model/weight: before "
            "gradients were not finite, at step 7, equal at step 4; may go on from the checkpoint of step 4, or "
            "of step 8 once that is written"
        )
    else:
        assert message == ""
        (line,) = said
        assert line.startswith(
            "AR604 nan-loss: gradients are NaN or infinite at step 7, and then w is, on all ranks alike"
        )


def test_ranks_that_train_apart_are_not_accused_where_gradients_become_nan(monkeypatch: pytest.MonkeyPatch):
    """They are not compared any more, also before the next check would be due."""
    monkeypatch.setattr(comparing, "choose_exponent", lambda *_: 0)
    said = list[str]()

    def life(rank: int, talks: Talks) -> None:
        model = torch.nn.Linear(8, 8)
        for weight in model.parameters():
            torch.nn.init.constant_(weight, 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts: Any = SimpleNamespace(
            roles=roles_of,
            state=lambda: {"model": model.state_dict()},
            optimizers=[optimizer],
            parameters=lambda: dict(model.named_parameters()),
        )
        checkpoints: Any = SimpleNamespace(roll_back=list, directory=Path("/nowhere"))
        say: Any = said.append if rank == 0 else str
        own = Comparing(parts, checkpoints, policy=OnCorruption.ROLL_BACK, talks=talks, say=say)
        for step in range(10):
            looks, *words = talks.largest(own.looks(step), *(own.words(step) if step < 7 else ()))
            own.heard(step, words, looks=bool(looks))
            for weight in model.parameters():
                weight.grad = torch.full_like(weight, NAN if step == 8 else 0.25 + rank * (step >= 5))
            optimizer.step()

    live(2, life)
    assert said == [
        "at step 6 most tensors differ between all ranks: they are not compared any more",
        "AR604 nan-loss: gradients are NaN or infinite at step 9, and then bias is: look at the data, the learning "
        "rate and the precision",
    ]


# Manifests


def checkpoint(root: Path, step: int, **about: Any) -> None:
    attempt = Attempt(root=root, step=step, name=f"abc-{step}", rank=0, world_size=1)
    write_part(attempt, memoryview(b"bytes"))
    parts = gather_parts(attempt, is_orphaned=lambda: False, is_next_due=lambda: False)
    seal(attempt, parts, torch="2.13.0", **about)


def test_the_newest_checkpoint_on_which_replicas_agreed_stays(tmp_path: Path):
    for step, verified in ((1, True), (2, True), (3, False), (4, False), (5, False)):
        checkpoint(tmp_path, step, verified=verified, healed=0)
    Keeper(tmp_path, keep=2).retain(bool)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_5", "step_4", "step_2"]


def test_a_roll_back_takes_the_newest_checkpoint_on_which_replicas_agreed(tmp_path: Path):
    said = list[str]()
    with Checkpointer(tmp_path, say=said.append) as checkpoints:
        assert checkpoints.roll_back() == []
        for step, verified in ((1, True), (2, True), (3, False), (4, False)):
            checkpoint(tmp_path, step, verified=verified, healed=0)
        (tmp_path / "unverified_step_4").mkdir()
        assert checkpoints.roll_back() == ["step 2"]
        assert [path.name for path in list_checkpoints(tmp_path)] == ["step_2", "step_1"]
        assert sorted(path.name for path in tmp_path.glob("unverified_*")) == [
            "unverified_step_3",
            "unverified_step_4",
            "unverified_step_4.1",
        ]
        assert checkpoints.roll_back() == ["step 2"]
    assert [line.rpartition("/")[2] for line in said] == ["unverified_step_4.1", "unverified_step_3"]


def test_a_roll_back_passes_over_what_cannot_be_read_and_drops_a_link_to_what_it_sets_aside(tmp_path: Path):
    said = list[str]()
    for root in (tmp_path, tmp_path / "tidied"):
        for step, verified in ((1, True), (2, True), (3, False), (4, False)):
            checkpoint(root, step, verified=verified, healed=0)
        (root / "step_2" / read_manifest(root / "step_2").parts[0].name).write_bytes(b"other")
    Keeper(tmp_path / "tidied", keep=2).retain(bool)
    assert [path.name for path in list_checkpoints(tmp_path / "tidied")] == ["step_4", "step_3", "step_1"]
    (tmp_path / "best").symlink_to("step_3")
    assert roll_back(tmp_path, said.append) == 1
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_1"]
    assert not (tmp_path / "best").is_symlink()
    assert "best led to step_3, which is set aside" in said[0]
    (tmp_path / "best").symlink_to("step_1")
    assert roll_back(tmp_path, said.append) == 1
    assert (tmp_path / "best").readlink() == Path("step_1")


@pytest.mark.parametrize("is_verified", [True, False])
def test_a_save_that_is_still_being_written_is_named_if_replicas_agreed_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_verified: bool
):
    """Meanwhile the other ranks would wait, and may fail for another reason than the corruption."""
    newer = ["step 9 once that is written"] * is_verified
    with Checkpointer(tmp_path) as checkpoints:
        with monkeypatch.context() as slow:
            slow.setattr(WriterLink, "wait_settled", lambda *_: False)
            slow.setattr(checkpoints, "wait", None)
            checkpoints.save(9, {"w": torch.ones(3)}, about=lambda: {"verified": is_verified, "healed": 0})
            wait_until(lambda: list_checkpoints(tmp_path), "the checkpoint")
            (tmp_path / "step_9").rename(tmp_path / "not_yet")
            assert checkpoints.roll_back() == newer
            checkpoint(tmp_path, 1, verified=True, healed=0)
            assert checkpoints.roll_back() == ["step 1", *newer]
        (tmp_path / "not_yet").rename(tmp_path / "step_9")
        checkpoints.wait()
        assert checkpoints.roll_back() == [f"step {9 if is_verified else 1}"]


def test_a_manifest_without_what_is_new_is_read(tmp_path: Path):
    checkpoint(tmp_path, 1, verified=True, healed=2)
    manifest = read_manifest(tmp_path / "step_1")
    assert (manifest.verified, manifest.healed) == (True, 2)
    older = manifest.to_bytes().partition(b"\n")[0].replace(b', "verified": true, "healed": 2', b"") + b"\n"
    from allranks.state.saved import manifest as module

    read = Manifest.from_bytes(older + module._checksum_line(older))
    assert (read.verified, read.healed, read.parts) == (False, 0, manifest.parts)
