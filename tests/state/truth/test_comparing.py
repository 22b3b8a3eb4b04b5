"""Do ranks learn what is replicated, and name the one that has other bits? Ranks are threads, their talks a barrier."""

from __future__ import annotations

import copy
import json
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allranks.model.errors import UsageError
from allranks.model.membership import Membership
from allranks.state.truth import comparing as module
from allranks.state.truth.comparing import Comparing, choose_exponent
from allranks.state.truth.corruption import OnCorruption, ReplicaError
from allranks.state.truth.odd_one import Role
from conftest import HANG_S

State = dict[str, dict[str, Any]]
Strike = Callable[[int, int, State], None]
"""What happens to the state of a rank after a step: step, rank, state."""


class Talks:
    """What Agreement does, between threads."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.membership = Membership.spread(rank, len(shared))
        self._shared, self._barrier = shared, barrier

    def gather(self, word: Any) -> list[Any]:
        self._barrier.wait()
        self._shared[self.membership.rank] = word
        self._barrier.wait()
        return list(self._shared)

    def largest(self, *numbers: int) -> list[int]:
        return list(map(max, zip(*self.gather(numbers), strict=True)))

    def give(self, tensors: Iterable[torch.Tensor], source: int = 0) -> None:
        sent = self.gather([own.clone() for own in tensors])[source]
        for own, data in zip(tensors, sent, strict=True):
            own.copy_(data)


def live(num_ranks: int, life: Callable[[int, Talks], Any]) -> list[Any]:
    """Return what each rank's life returns. If one raises, the others' talks break, and its error is raised."""
    shared: list[Any] = [None] * num_ranks
    barrier = threading.Barrier(num_ranks, timeout=HANG_S)

    def live_or_leave(rank: int) -> Any:
        try:
            return life(rank, Talks(rank, shared, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        ends = [pool.submit(live_or_leave, rank) for rank in range(num_ranks)]
    errors = [error for end in ends if (error := end.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [end.result() for end in ends]


def comparing_of(
    read: Callable[[], State],
    talks: Any,
    *,
    verified: Sequence[str] = (),
    policy: OnCorruption = OnCorruption.ROLL_BACK,
    say: Callable[[str], object] = str,
) -> Comparing:
    parts: Any = SimpleNamespace(state=read, optimizers=[], parameters=lambda: read()["model"], roles=roles_of)
    checkpoints: Any = SimpleNamespace(roll_back=lambda: verified, directory=Path("/nowhere"))
    return Comparing(parts, checkpoints, policy=policy, talks=talks, say=say if talks.membership.is_leader else str)


def roles_of(names: Iterable[str]) -> dict[str, Role]:
    """As Parts has it, of these states: all other names are buffers."""
    known = {"model": Role.TRAINED, "optimizer": Role.TRAINED, "best": Role.WEIGHT}
    return {name: Role.OTHER if "_" in name else known.get(name.split("/")[0], Role.OTHER) for name in names}


def state_of_training() -> State:
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(30, 20, generator=generator) for name in ("w", "v", "frozen", "ema")}
    return {"model": weights, "optimizer": {"m": torch.zeros(600, dtype=torch.bfloat16), "lr": 0.1}}


def make_step(step: int, state: State) -> None:
    """What all ranks do alike."""
    for own in (state["model"]["w"], state["model"]["v"], state["optimizer"]["m"]):
        own += 0.25
    state["optimizer"]["lr"] *= 0.9


def train(
    num_ranks: int,
    strike: Strike,
    *,
    policy: OnCorruption = OnCorruption.ROLL_BACK,
    steps: int = 12,
    verified: Sequence[str] = ("step 5",),
    saves_at: int | None = None,
    begin: Callable[[Comparing], object] = id,
    read: Callable[[State], State] = lambda state: state,
) -> tuple[list[Any], list[str]]:
    """Return the state, or the error, of each rank, and what rank 0 said."""
    said = list[str]()

    def life(rank: int, talks: Talks) -> Any:
        state = state_of_training()
        own = comparing_of(lambda: read(state), talks, policy=policy, verified=verified, say=said.append)
        begin(own)
        try:
            for step in range(steps):
                if words := own.words(step):
                    own.heard(step, talks.largest(*words))
                if step == saves_at:
                    own.compare_now(step)
                make_step(step, state)
                strike(step, rank, state)
        except ReplicaError as error:
            return error
        return state, own

    return live(num_ranks, life), said


@pytest.fixture(autouse=True)
def _below_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLRANKS_AGENT_PID", "1")
    monkeypatch.setenv("ALLRANKS_NODE", "n07")
    monkeypatch.setattr(module, "choose_exponent", lambda *_: 0)


def at(step: int, rank: int, change: Callable[[State], None]) -> Strike:
    def strike(now: int, own: int, state: State) -> None:
        if (now, own) == (step, rank):
            change(state)

    return strike


def flip(part: str, name: str, place: int = 5, bit: int = 3) -> Callable[[State], None]:
    def change(state: State) -> None:
        own = state[part][name]
        words = own.view(-1).view(torch.int16 if own.element_size() == 2 else torch.int32)
        words[place] ^= 1 << bit

    return change


def message_of(ranks: list[Any]) -> str:
    """The words that all ranks raise."""
    assert all(isinstance(own, ReplicaError) for own in ranks), ranks
    (message,) = {str(own) for own in ranks}
    return message


@pytest.mark.parametrize(
    ("part", "name", "of"), [("model", "w", 600), ("model", "frozen", 600), ("optimizer", "m", 600)]
)
@pytest.mark.parametrize("rank", [0, 2])
def test_of_three_ranks_the_one_with_a_flipped_bit_is_named_at_the_next_check(part: str, name: str, of: int, rank: int):
    ranks, said = train(3, at(6, rank, flip(part, name)))
    assert message_of(ranks) == (
        f"allranks: AR610 replica-differs: rank {rank} on n07 has other bits than 2 others, in {part}/{name}: "
        f"1 of {of} elements at step 7, equal at step 6; may go on from the checkpoint of step 5"
    )
    assert {own.exit_code for own in ranks} == {75}
    assert (ranks[0].finding.ranks, ranks[0].finding.node) == ((rank,), "n07")
    assert said == []


def test_of_two_ranks_nobody_is_named_but_for_what_never_changed():
    ranks, _ = train(2, at(6, 1, flip("model", "w")))
    assert " ranks 0-1 have different bits, and no majority tells which is wrong, in model/w: 1 of 600" in message_of(
        ranks
    )
    ranks, _ = train(2, at(6, 1, flip("model", "frozen")))
    assert " rank 1 on n07 has other bits than rank 0, in model/frozen: 1 of 600 " in message_of(ranks)


@pytest.mark.parametrize(
    ("policy", "verified", "then"),
    [
        (OnCorruption.STOP, ["step 5"], 'on_corruption="stop"'),
        (OnCorruption.ROLL_BACK, [], "there is no checkpoint on which replicas agreed"),
    ],
)
def test_where_it_must_not_go_on_it_is_not_retried(policy: OnCorruption, verified: Sequence[str], then: str):
    ranks, _ = train(3, at(6, 2, flip("model", "v")), policy=policy, verified=verified)
    assert message_of(ranks).endswith(f"; not retried: {then}")
    assert {own.exit_code for own in ranks} == {78}


def test_healing_gives_the_bits_of_the_others_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ALLRANKS_ATTEMPT_DIR", str(tmp_path))
    ranks, said = train(3, at(6, 0, flip("optimizer", "m")), policy=OnCorruption.HEAL)
    undisturbed, _ = train(3, lambda *_: None)
    for state, own in ranks:
        assert torch.equal(state["optimizer"]["m"], undisturbed[0][0]["optimizer"]["m"])
        assert own.healed == [{"step": 7, "names": ["optimizer/m"], "ranks": [0]}]
        assert own.about() == {"verified": True, "healed": 1}
        assert own.equal_step == 11
    assert [line.rpartition("; ")[2] for line in said] == ["healed: the run is no longer the undisturbed one"]
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert event | {"time_s": 0} == {
        "time_s": 0,
        "event": "healed",
        "step": 7,
        "ranks": [0],
        "tensors": ["optimizer/m"],
    }


def test_a_tensor_on_the_cpu_is_healed_beside_others_elsewhere():
    """Adam's `step` beside weights on a GPU; here, whatever names no device is on one that takes no bits."""

    def strike(step: int, rank: int, state: State) -> None:
        if (step, rank) == (6, 1):
            flip("optimizer", "m")(state)
            torch.set_default_device("meta")  # of this thread

    ranks, _ = train(3, strike, policy=OnCorruption.HEAL)
    assert [own.healed for _, own in ranks] == [[{"step": 7, "names": ["optimizer/m"], "ranks": [1]}]] * 3


def test_what_has_no_majority_is_not_healed():
    ranks, _ = train(2, at(6, 1, flip("model", "w")), policy=OnCorruption.HEAL)
    assert "; may go on from the checkpoint of step 5" in message_of(ranks)


def test_a_part_that_gives_copies_of_its_tensors_is_not_said_to_be_healed():
    ranks, said = train(3, at(6, 1, flip("model", "w")), policy=OnCorruption.HEAL, read=copy.deepcopy)
    assert " rank 1 on n07 has other bits than 2 others, in model/w: " in message_of(ranks)
    assert said == []


@pytest.mark.parametrize("policy", OnCorruption)
def test_a_comparison_that_a_save_asks_for_needs_no_check_that_is_due(
    policy: OnCorruption, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "choose_exponent", lambda *_: 20)
    ranks, _ = train(3, at(8, 1, flip("model", "w")), policy=policy, saves_at=9)
    if policy is OnCorruption.HEAL:
        assert [own.healed[0]["step"] for _, own in ranks] == [9, 9, 9]
    else:
        assert " rank 1 on n07 has other bits than 2 others, in model/w: 1 of 600 elements at step 9" in message_of(
            ranks
        )


def test_only_ranks_that_compute_the_same_bits_are_compared(monkeypatch: pytest.MonkeyPatch):
    """Three ranks on one kind of GPU, and two on another one, from step 5 on: the bits differ by kind."""
    monkeypatch.setattr(module, "_describe_group", lambda contents: str(contents.texts.get("gpu/numbers")))

    def strike(step: int, rank: int, state: State) -> None:
        state["gpu"] = {"kind": "ab"[rank % 2] if step >= 5 else "a"}
        state["model"]["w"] += rank % 2 * (step >= 5)
        if (step, rank) == (8, 4):
            flip("model", "v")(state)

    ranks, said = train(5, strike)
    assert " rank 4 on n07 has other bits than 2 others, in model/v: 1 of 600 " in message_of(ranks)
    assert said == []


@pytest.mark.parametrize("check_s", [0.04, 0.06, 0.068, 0.08])
def test_checks_take_at_most_half_a_percent_of_the_time_although_checks_and_steps_vary_and_saves_come(check_s: float):
    draw, exponent, checks_s, saves_s, now_s, last = random.Random(1), 0, 0.0, 0.0, 0.0, (0, 0.0)
    for step in range(1, 8_000):
        now_s += draw.uniform(0.35, 0.6)
        if step % 700 == 0:
            now_s, saves_s = now_s + 40, saves_s + 40
        if step >> exponent != last[0] >> exponent:
            took_s = check_s * draw.uniform(1, 1.5)
            exponent = choose_exponent(took_s, (now_s - last[1]) / (step - last[0]))
            checks_s, now_s = checks_s + took_s, now_s + took_s
            last = step, now_s
    assert module.SHARE / 3 < checks_s / (now_s - saves_s) < module.SHARE


def test_a_state_is_sharded_where_a_dimension_of_a_mesh_cuts_it():
    own = comparing_of(dict, Talks(0, [None], threading.Barrier(1)))
    for shards, is_sharded in ((set(), False), ({(-1,)}, False), ({(-1,), (-1, 2)}, True)):
        own._contents.shards = shards
        assert own.is_sharded is is_sharded


def test_rank_0_says_how_often_is_checked_one_talk_ahead_and_at_most_8_times_as_rarely(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of many ranks, an outlier would have the checks of all become rarer and rarer."""
    own = threading.local()
    monkeypatch.setattr(module, "choose_exponent", lambda *_: own.wanted)

    def strike(step: int, rank: int, state: State) -> None:
        own.wanted = 20 if rank == slow else 0

    slow = 1
    ranks, _ = train(2, strike, steps=40)
    assert [own._last_step for _, own in ranks] == [39, 39]
    slow = 0
    ranks, _ = train(2, strike, steps=70)
    assert [(own._last_step, own._exponent) for _, own in ranks] == [(64, 9)] * 2


# What is no fault


def of_its_own(step: int, rank: int, state: State) -> None:
    """BatchNorm's statistics: each rank's own from the first step on."""
    state["model"].setdefault("mean_", torch.zeros(3)).add_(rank + 1)
    state["model"].setdefault("count", torch.zeros((), dtype=torch.int64)).add_(1)


def late_average(step: int, rank: int, state: State) -> None:
    """An EMA that begins late, on rank 0 alone, with its counter."""
    state["ema"] = state.get("ema") or {"n": torch.zeros((), dtype=torch.int64), "w": state["model"]["ema"].clone()}
    if step >= 7 and rank == 0:
        state["ema"]["w"].mul_(0.5)
        state["ema"]["n"] += 1


def test_what_each_rank_has_for_itself_is_listed_once_and_never_compared():
    ranks, said = train(3, of_its_own)
    assert said == ["not replicated: 1 tensor (model/mean_); not compared between ranks"]
    assert [own.equal_step for _, own in ranks] == [11, 11, 11]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_average_that_begins_late_on_one_rank_is_an_update(num_ranks: int):
    ranks, said = train(num_ranks, late_average)
    assert said == ["not replicated from step 8 on: 2 tensors (ema/n, ema/w); not compared between ranks"]
    assert [own.equal_step for _, own in ranks] == [11] * num_ranks


def test_what_a_part_computes_from_weights_that_one_rank_changed_is_no_fault():
    """Rank 0 merges an adapter into frozen weights; from then on its BatchNorm sees other numbers."""

    def strike(step: int, rank: int, state: State) -> None:
        own = state.setdefault("own", {"base": torch.ones(100), "mean": torch.full((40,), 0.3)})
        if step > 6 and rank == 0:
            own["base"].fill_(2.0)
        own["mean"][0] += 0.01 + (0.1 if step > 8 and rank == 0 else 0.0)

    ranks, said = train(3, strike)
    assert [line.partition(";")[0] for line in said] == [
        "not replicated from step 8 on: 1 tensor (own/base)", "not replicated from step 10 on: 1 tensor (own/mean)",
    ]  # fmt: skip
    assert [own.equal_step for _, own in ranks] == [11, 11, 11]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_best_loss_that_rank_0_alone_keeps_beside_a_step_is_no_fault(kind: Any, num_ranks: int):
    def best(step: int, rank: int, state: State) -> None:
        state["best"] = {"step": step, "loss": kind(1.0 if step < 7 or rank else 0.5)}

    ranks, said = train(num_ranks, best)
    lines = ["not replicated from step 8 on: 1 tensor (best/loss); not compared between ranks"]
    assert said == ([] if kind is float else lines)
    assert [own.equal_step for _, own in ranks] == [11] * num_ranks


def buffers(step: int, state: State) -> None:
    """Buffers of a model, by the names of their kinds: `_`."""
    position, history = torch.arange(300.0).add(0.5).sin(), torch.zeros(300)
    new = {"pos_": position, "history_": history, "flags_": history > 1, "seen_": torch.zeros(()), "mean_": position}
    state["model"].update({name: own.clone() for name, own in new.items() if name not in state["model"]})
    state["model"]["seen_"] += 1
    state["model"]["mean_"] *= 0.9


def write(name: str, place: int, value: float) -> Callable[[State], None]:
    def change(state: State) -> None:
        state["model"][name].view(-1)[place] = value

    return change


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (write("history_", 7, 0.3), "history_"),  # a place that was empty
        (write("flags_", 7, 1), "flags_"),
        (write("pos_", 7, 0.3), "pos_"),  # of a ring, which was full
        (lambda state: state["model"]["seen_"].add_(1), "seen_"),  # a forward pass on one rank: BatchNorm counts it
        (lambda state: state["model"]["mean_"].mul_(0.9), "mean_"),
    ],
)
def test_what_a_script_writes_into_a_buffer_on_one_rank_alone_is_no_fault(
    change: Callable[[State], None], name: str, num_ranks: int
):
    def strike(step: int, rank: int, state: State) -> None:
        buffers(step, state)
        at(7, 0, change)(step, rank, state)

    ranks, said = train(num_ranks, strike)
    assert said == [f"not replicated from step 8 on: 1 tensor (model/{name}); not compared between ranks"]
    assert [own.equal_step for _, own in ranks] == [11] * num_ranks


UPDATED = ["not replicated from step 8 on: 1 tensor (model/frozen)"]


@pytest.mark.parametrize(("apart", "is_fault"), [(1e-9, False), (0.1, True)])
def test_frozen_weights_that_were_rounded_on_one_rank_are_no_fault(apart: float, is_fault: bool):
    """An adapter was merged into them, and taken out again: few of them are not as before, by their last bit."""

    def merge(state: State) -> None:
        first = state["model"]["frozen"].view(-1)[:3]
        first.copy_(torch.nextafter(first, torch.tensor(9.0)) + apart)

    ranks, said = train(3, at(7, 0, merge))
    assert [line.partition(";")[0] for line in said] == UPDATED[is_fault:]
    assert all(isinstance(own, ReplicaError) for own in ranks) is is_fault


@pytest.mark.parametrize(
    ("change", "name"), [(flip("model", "pos_"), "pos_"), (write("mean_", 7, 0.3), "mean_"), (flip("best", "e"), "e")]
)
def test_one_bit_of_a_frozen_fraction_and_few_watched_ones_are_a_fault_also_in_a_buffer(
    change: Callable[[State], None], name: str
):
    def strike(step: int, rank: int, state: State) -> None:
        buffers(step, state)
        state.setdefault("best", {"e": torch.ones(300)})
        at(7, 1, change)(step, rank, state)

    assert f"/{name}: 1 of 300 elements at step 8, equal at step 7; " in message_of(train(3, strike)[0])


def test_better_weights_that_one_rank_keeps_are_an_update_also_of_the_few_rows_of_an_embedding_that_are_new():
    """Others had kept the same ones twice: each goes by its own loss."""

    def strike(step: int, rank: int, state: State) -> None:
        best = state.setdefault("best", {"rows": torch.zeros(1000), "w": torch.zeros(9)})
        if step in (2, 4) or (step == 7 and rank == 1):
            best["w"] += 1
            best["rows"][step] += 1

    ranks, said = train(3, strike)
    assert said == ["not replicated from step 8 on: 2 tensors (best/rows, best/w); not compared between ranks"]
    assert [own.equal_step for _, own in ranks] == [11, 11, 11]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_begin_to_train_apart_are_no_longer_compared(num_ranks: int):
    def apart(step: int, rank: int, state: State) -> None:
        for own in (*state["model"].values(), state["optimizer"]["m"]):
            own += rank * (step >= 6)

    ranks, said = train(num_ranks, apart)
    assert said == ["at step 7 most tensors differ between all ranks: they are not compared any more"]
    assert [own.about()["verified"] for _, own in ranks] == [False] * num_ranks


def test_a_number_that_was_computed_wrong_once_is_computed_again(monkeypatch: pytest.MonkeyPatch):
    compute, count = module.Contents.numbers, iter(range(1000))

    def wrong_once(self: Any) -> dict[str, int]:
        return {name: number ^ (next(count) == 150) for name, number in compute(self).items()}

    monkeypatch.setattr(module.Contents, "numbers", wrong_once)
    ranks, said = train(3, lambda *_: None)
    assert ([own.equal_step for _, own in ranks], said) == ([11, 11, 11], [])


# After a load


@pytest.mark.parametrize(("num_ranks", "knows"), [(3, False), (2, True)])
def test_after_a_load_everything_must_be_equal_and_the_checkpoint_decides_a_tie(num_ranks: int, knows: bool):
    whole = module.Contents.of(state_of_training()).numbers()

    def life(rank: int, talks: Talks) -> str:
        state = state_of_training()
        state["fresh"] = {"w": torch.full((3,), float(rank))}  # which the checkpoint does not have
        if knows:
            state["model"]["mean"] = torch.full((3,), float(rank))  # which was not compared when it was saved
        own = comparing_of(lambda: state, talks)
        own.loaded(8, ["model", "optimizer"], {"fingerprints": whole} if knows else {})
        if rank == 1:
            flip("model", "v")(state)
        with pytest.raises(ReplicaError) as found:
            own.loaded(8, ["model", "optimizer"], {"fingerprints": whole} if knows else {})
        return str(found.value)

    (message,) = {*live(num_ranks, life)}
    assert " rank 1 on n07 has other bits than " in message
    assert "in model/v: 1 of 600 elements at step 8, never equal before; " in message


def test_after_a_load_what_an_optimizer_changes_is_watched_from_the_first_step_on():
    """Else a device that is faulty again at once, after a roll-back, would only be said to have a state of its own."""

    def begin(own: Comparing) -> None:
        own.loaded(8, ["model"], {"watched": ["model/w"]})

    ranks, said = train(3, at(0, 2, flip("model", "w")), begin=begin)
    assert "rank 2 on n07 has other bits than 2 others, in model/w: 1 of 600 elements at step 1," in message_of(ranks)
    assert said == []


def test_after_a_load_what_was_not_watched_when_it_was_saved_is_learned_again():
    """A rank may merge an adapter into weights that its optimizer knows and never changed."""

    def begin(own: Comparing) -> None:
        own.loaded(8, ["model"], {"watched": []})

    _, said = train(3, at(0, 2, flip("model", "w")), begin=begin)
    fix = "to train one model on all ranks, wrap it in s.ddp()"
    assert said == [f"not replicated: 1 tensor (model/w); not compared between ranks; {fix}"]


def test_without_replicas_numbers_are_taken_at_the_first_boundaries_and_multiples_of_a_power_of_two(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(module, "choose_exponent", lambda *_: 3)
    state, talks, taken = state_of_training(), SimpleNamespace(membership=Membership.spread(0, 1)), dict[int, int]()
    own = comparing_of(lambda: state, talks)
    for step in range(20):
        if own.heard(step, own.words(step)):
            taken[step] = own.numbers["model/w"]
        make_step(step, state)
    assert [*taken] == [0, 1, 2, 3, 8, 16]
    assert len({*taken.values()}) == 6


@pytest.mark.parametrize("asked", ["roll", "", 3])
def test_a_policy_that_there_is_not_is_refused(asked: Any):
    with pytest.raises(UsageError, match=r'expected one of "roll-back", "stop", "heal"'):
        OnCorruption(asked)
