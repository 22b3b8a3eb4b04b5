"""Does an optimizer's state belong to the parameters by name, whatever is wrapped around them and in whatever order?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from allranks.model.errors import UsageError
from allranks.state.resumed.track import Tracked
from allranks.state.resumed.tracked_parts import Parts
from allranks.state.saved.checkpoint import Checkpointer
from allranks.state.truth.contents import Contents
from allranks.state.truth.odd_one import Role

pytestmark = pytest.mark.torch


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


def stepped(optimizer: torch.optim.Optimizer) -> Any:
    """Give each parameter a gradient of its own, and make a step; typed as Any, since tests look into it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach().square() + 1
    optimizer.step()
    return optimizer


def saved(folder: Path, parts: Parts) -> Any:
    """Return the state of these parts as a checkpoint gives it back."""
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, parts.state(), wait=True)
        loaded = checkpoints.load(parts.like())
    assert loaded is not None
    return loaded.common


def test_an_optimizers_state_is_the_one_that_torch_gives_by_name():
    model = layers()
    groups = [{"params": [*model[2].parameters()], "lr": 0.5}, {"params": [*model[0].parameters()]}]
    optimizer = stepped(torch.optim.AdamW(groups, lr=0.1))
    state = Parts({"model": model, "optimizer": optimizer}).state()["optimizer"]
    assert [group["params"] for group in state["param_groups"]] == [["2.weight", "2.bias"], ["0.weight", "0.bias"]]
    theirs: Any = get_optimizer_state_dict(model, optimizer)
    assert state["param_groups"] == theirs["param_groups"]
    assert {name: own.keys() for name, own in state["state"].items()} == {
        name: own.keys() for name, own in theirs["state"].items()
    }
    assert state["state"]["2.bias"]["exp_avg"] is optimizer.state[model[2].bias]["exp_avg"]


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("is_first_wrapped", [False, True])
def test_wrappers_inside_and_around_the_model_are_in_no_name(tmp_path: Path, *, is_first_wrapped: bool):
    def make(seed: int, *, is_wrapped: bool) -> tuple[torch.nn.Sequential, Any, Parts]:
        model = layers(seed)
        whole: torch.nn.Module = model
        if is_wrapped:
            model[0] = checkpoint_wrapper(model[0])
            model[1] = torch.compile(model[1], backend="eager")  # type: ignore[call-overload]
            model[2] = DistributedDataParallel(model[2])
            whole = torch.compile(model, backend="eager")
        optimizer = stepped(torch.optim.AdamW(whole.named_parameters(), lr=0.1))
        return model, optimizer, Parts({"model": whole, "optimizer": optimizer})

    _, first_optimizer, first = make(1, is_wrapped=is_first_wrapped)
    kept = saved(tmp_path, first)
    names = [f"{layer}.{name}" for layer in range(3) for name in ("weight", "bias")]
    assert list(kept["model"]) == list(kept["optimizer"]["state"]) == names
    model, optimizer, second = make(2, is_wrapped=not is_first_wrapped)
    own_names = optimizer.param_groups[0]["param_names"]
    second.load(kept)
    assert optimizer.param_groups[0]["param_names"] == own_names
    for name, parameter, theirs in zip(
        names, model.parameters(), first_optimizer.param_groups[0]["params"], strict=True
    ):
        assert parameter.equal(theirs), name
        assert optimizer.state[parameter]["exp_avg"].equal(first_optimizer.state[theirs]["exp_avg"]), name


def test_parameters_in_another_order_get_their_own_state(tmp_path: Path):
    model, again = layers(1), layers(2)
    optimizer = stepped(torch.optim.AdamW(model.parameters()))
    shuffled: Any = torch.optim.AdamW([*again.parameters()][::-1])  # of equal shapes: by number nobody would notice
    given: list[Any] = []
    shuffled.register_load_state_dict_pre_hook(lambda _, state: given.append(state))
    Parts({"model": again, "optimizer": shuffled}).load(
        saved(tmp_path, Parts({"model": model, "optimizer": optimizer}))
    )
    assert sorted(given[0]["state"]) == given[0]["param_groups"][0]["params"] == list(range(6))  # its own form
    for theirs, mine in zip(model.parameters(), again.parameters(), strict=True):
        assert shuffled.state[mine]["exp_avg_sq"].equal(optimizer.state[theirs]["exp_avg_sq"])
    stepped(optimizer), stepped(shuffled)
    for theirs, mine in zip(model.parameters(), again.parameters(), strict=True):
        assert mine.equal(theirs)


def test_other_groups_are_refused(tmp_path: Path):
    model = layers()
    kept = saved(tmp_path, Parts({"model": model, "optimizer": torch.optim.SGD(model.parameters())}))
    split = torch.optim.SGD([{"params": model[0].parameters()}, {"params": [*model[1:].parameters()]}])
    why = "parameter group 0 of optimizer is another one in the checkpoint: only one of the two has 1.bias, 1.weight, 2"
    with pytest.raises(UsageError, match=why):
        Parts({"model": model, "optimizer": split}).load(kept)


def test_of_several_models_each_optimizer_has_the_names_of_its_own_and_a_common_one_those_of_both():
    model, critic = layers(), layers()
    both = torch.optim.SGD([*critic.parameters(), model[0].bias], momentum=0.9)
    parts = Parts({
        "model": model,
        "critic": critic,
        "own": stepped(torch.optim.SGD(critic[1].parameters(), momentum=0.9)),
        "both": stepped(both),
    })  # fmt: skip
    state = parts.state()
    assert list(state["own"]["state"]) == ["1.weight", "1.bias"]
    assert list(state["both"]["state"])[-2:] == ["critic.2.bias", "model.0.bias"]


class Foreign(torch.optim.SGD):
    """An optimizer whose state is in a form of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [own["momentum_buffer"] for own in self.state.values()]}

    def load_state_dict(self, state_dict: Any) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.state.update(zip(parameters, ({"momentum_buffer": own} for own in state_dict["inner"]), strict=True))


def test_an_optimizer_that_has_no_names_keeps_the_state_that_it_gives(tmp_path: Path):
    model, free = layers(), torch.nn.Parameter(torch.ones(3))
    make: Any
    for make in (torch.optim.SGD, Foreign):
        optimizer = stepped(make([free, model[0].bias], lr=0.1, momentum=0.9))
        kept = saved(tmp_path / make.__name__, Parts({"model": model, "optimizer": optimizer}))["optimizer"]
        assert kept.keys() == optimizer.state_dict().keys()
        assert list(kept.get("state", (0, 1))) == [0, 1]
        again = make([free, model[0].bias], lr=0.2, momentum=0.9)
        Parts({"model": model, "optimizer": again}).load({"optimizer": kept})
        assert again.state[free]["momentum_buffer"].equal(optimizer.state[free]["momentum_buffer"])


def test_an_optimizer_makes_no_step_while_it_is_tracked_saved_or_loaded(tmp_path: Path):
    for life in range(2):
        model = layers()
        optimizer: Any = torch.optim.AdamW(model.parameters())
        made: list[object] = []
        optimizer.register_step_pre_hook(lambda *_, made=made: made.append(1))
        with Checkpointer(tmp_path) as checkpoints:
            state = Tracked({"model": model, "optimizer": optimizer}, checkpoints=checkpoints)
            state.load()
            assert (made, len(optimizer.state)) == ([], 6 * life)
            if life == 0:
                stepped(optimizer)
                assert state.save()
        assert {float(own["step"]) for own in optimizer.state.values()} == {1.0}


def test_who_changes_a_tensor_follows_from_the_optimizers_and_without_one_all_parameters_are_trained():
    model, copy, norm = layers(), layers(1), torch.nn.BatchNorm1d(2)
    parts: dict[str, Any] = {"model": model, "best": copy, "norm": norm}
    for optimizer in (None, torch.optim.SGD([*model.parameters(), norm.weight], momentum=0.9)):
        if optimizer is not None:
            stepped(optimizer)
            parts["optimizer"] = optimizer
        own = Parts(parts)
        roles = own.roles(Contents.of(own.state()).tensors)
        expected = {"model/0.weight": Role.TRAINED, "norm/weight": Role.TRAINED, "norm/running_mean": Role.OTHER}
        expected |= {"norm/bias": Role.WEIGHT if optimizer else Role.TRAINED, "best/2.bias": roles["norm/bias"]}
        assert {name: roles[name] for name in expected} == expected
    assert {role for name, role in roles.items() if name.startswith("optimizer/")} == {Role.TRAINED}


class FullyShardedDataParallel(torch.nn.Linear):
    """What torch's FSDP1 is called."""


def test_fsdp1_is_refused_since_a_checkpoint_would_give_all_ranks_rank_0s_optimizer_state():
    with pytest.raises(UsageError, match=r"rank 0's alone: use fully_shard \(FSDP2\)$"):
        Parts({"model": torch.nn.Sequential(FullyShardedDataParallel(2, 2))})
