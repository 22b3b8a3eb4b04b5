"""Ranks that repeat each other's batches: is the one that computes wrongly named, and is everything put back?"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from allranks.guard.named import NamedRanks, read_named
from allranks.model.errors import UsageError
from allranks.model.finding import Confidence
from allranks.state.resumed import rng
from allranks.state.resumed.tracked_parts import Parts
from allranks.state.truth.contents import Contents
from allranks.state.truth.corruption import OnCorruption, ReplicaError, describe_gradients
from allranks.state.truth.odd_one import ReplicaReport
from allranks.state.truth.replay_run import Attribute, check, pack, run, try_out
from state.test_loops import tracked
from state.truth.test_flips import SCRIPTS, run_lives

pytestmark = pytest.mark.torch

# Real ranks

IN_ONE_GROUP = "plain,replayed,nested,unlike,by_rank,wrong0,wrong1,wrong2,flipped,random,talks,outside"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What four lives of ranks said: three ranks with many trainings, two ranks, and two jobs that lose a rank."""
    cases = {"CASES": f"{IN_ONE_GROUP} wrong1 raises leaves"}
    return run_lives(tmp_path_factory.mktemp("ranks"), "3,2,3,3", SCRIPTS / "replayed.py", within_s=250, **cases)


def of(said: str, case: str) -> list[str]:
    """What each rank has of a case, in the order of ranks."""
    return [text for _, text in sorted(re.findall(rf"^{case} (\d) (.*)$", said, re.M))]


def test_a_run_with_replays_ends_with_the_bits_of_one_without(said: str):
    """Of weights, statistics, counters, generators and a GradScaler, though f unscales and the last batch is uneven."""
    bits, repeated = zip(*(text.split(" ", 1) for text in of(said, "replayed")), strict=True)
    assert repeated == ("repeated True own True",) * 3, said
    assert [text.split()[0] for text in of(said, "plain")] == [*bits]


def test_plain_ddp_inside_a_module_is_replayed_from_the_first_steps_on(said: str):
    """Its second forward pass talks to all ranks, and one of them computes other bits."""
    assert [text.split()[2] for text in of(said, "nested")] == ["True", "True", "False"], said


@pytest.mark.parametrize(("rank", "others"), [(0, "ranks 1-2"), (1, "ranks 0,2"), (2, "ranks 0-1")])
def test_of_three_ranks_the_one_that_computes_wrongly_is_named_at_the_next_replay(said: str, rank: int, others: str):
    (told,) = {*of(said, f"wrong{rank}")} - {of_two(said)}
    assert re.fullmatch(
        rf"78 allranks: AR611 wrong-arithmetic: rank {rank} on \S+ computed other gradients than {others} from the "
        r"batch of rank 1, in model/head.weight at step 8; not retried: there is no checkpoint on which "
        "replicas agreed",
        told,
    )


def of_two(said: str) -> str:
    """What two ranks said of `wrong1`, which three ranks have, too."""
    (told,) = {text for text in of(said, "wrong1") if "no majority" in text}
    return told


def test_of_two_ranks_nobody_is_named(said: str):
    assert of_two(said).startswith(
        "78 allranks: AR611 wrong-arithmetic: ranks 0-1 computed different gradients, and no majority tells which "
        "are wrong, from the batch of rank 0, in model/head.weight at step 8; not retried"
    )


def test_other_weights_are_told_as_such(said: str):
    (told,) = {*of(said, "flipped")}
    assert re.match(r"78 allranks: AR610 replica-differs: rank 2 on \S+ has other bits than 2 others", told)


def test_of_three_different_results_nobody_is_named(said: str):
    (told,) = {*of(said, "unlike")}
    assert told.startswith(
        "78 allranks: AR611 wrong-arithmetic: ranks 0-2 computed different gradients, and no majority tells which "
        "are wrong, from the batch of rank 1, in "
    )


def test_a_function_that_depends_on_its_rank_names_nobody_and_training_goes_on(said: str):
    assert (
        said.count("allranks: steps are not replayed: the first replays already differ between ranks: f depends") == 1
    )
    assert [text.split()[0] for text in of(said, "by_rank")] == [text.split()[0] for text in of(said, "plain")]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("random", "the same batch gave other gradients the second time, in model/body.0.weight: the model is not "),
        ("talks", "it talks to other ranks (c10d.allreduce_.default), and only some of them repeat a step; track the "),
        (
            "outside",
            "it talks to other ranks (c10d.broadcast_.default), and only some of them repeat a step; track the ",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_all_ranks(said: str, case: str, why: str):
    (told,) = {*of(said, case)}
    assert told.startswith(f"2 track(replay=): {why}")


@pytest.mark.parametrize(("case", "codes"), [("raises", "[0, 0, 1]"), ("leaves", "[1, 1, 3]")])
def test_where_a_rank_fails_in_a_replay_it_raises_its_own_and_the_others_lose_the_step(
    said: str, case: str, codes: str
):
    assert said.count(f"codes {codes}") == 1
    assert [re.sub(r"failed;.*", "", text) for text in of(said, case)] == [
        f"1 rank {rank}: step 8 does not count, a collective " for rank in (0, 1)
    ]
    assert len(re.findall(r"^ValueError: a sample of rank 2$", said, re.M)) == 1


# Who is wrong


ONE, OTHER = {"model/w": 1, "model/v": 2}, {"model/w": 1, "model/v": 3}
REPORTS = [ReplicaReport(entries={}, node="n07", device="GPU-1")] * 8


@pytest.mark.parametrize(
    ("told", "ranks", "right", "words", "named"),
    [
        (
            {4: ONE, 5: OTHER, 6: ONE},
            [5],
            [4, 6],
            "rank 5 on n07 (GPU-1) computed other gradients than ranks 4,6 from the batch of rank 4, in model/v "
            "at step 40",
            NamedRanks((5,), Confidence.CERTAIN, True, "model/v at step 40"),
        ),
        (
            {5: OTHER | {"model/w": 2}, 6: OTHER | {"model/w": 2}, 4: {}},
            [4],
            [5, 6],
            "rank 4 on n07 (GPU-1) computed other gradients than ranks 5-6 from the batch of rank 5, in model/w "
            "(and in 1 more) at step 40",
            NamedRanks((4,), Confidence.CERTAIN, True, "model/w at step 40"),
        ),
        (
            {4: {"model/w": 7, "model/v": 2}, 5: OTHER},
            [4, 5],
            [],
            "ranks 4-5 computed different gradients, and no majority tells which are wrong, from the batch of rank "
            "4, in model/w (and in 1 more) at step 40",
            NamedRanks((4, 5), Confidence.UNDECIDED, True, "model/w at step 40"),
        ),
        (
            {4: ONE, 5: ONE, 6: OTHER, 7: OTHER},
            [4, 5, 6, 7],
            [],
            "ranks 4-7 computed different gradients, and no majority tells which are wrong, from the batch of rank "
            "4, in model/v at step 40",
            NamedRanks((4, 5, 6, 7), Confidence.UNDECIDED, True, "model/v at step 40"),
        ),
    ],
)
def test_the_guard_reads_whom_the_words_name(told: Any, ranks: Any, right: Any, words: str, named: NamedRanks):
    how: Any = {"is_decided": bool(right), "policy": OnCorruption.ROLL_BACK, "verified": ["step 30"]}
    gradients = [told.get(rank, {}) for rank in range(8)]
    what = describe_gradients(gradients, next(iter(told)), ranks, right, 40, REPORTS)
    error = ReplicaError("AR611", what, ranks, REPORTS, **how)
    assert str(error).startswith(f"allranks: AR611 wrong-arithmetic: {words}; may go on from")
    assert read_named("AR611", str(error)) == named
    assert (error.exit_code, error.finding.ranks) == (75, named.ranks)  # type: ignore[union-attr]


# One rank: what is sent, and put back


class Counting(torch.nn.Module):
    """State of each kind that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.out = torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 1)
        self.calls, self.kept = 0, torch.zeros(2)
        self.register_buffer("history", torch.zeros(1), persistent=False)
        self.ones = torch.ones(1).expand(3)  # which nobody can write to in place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.kept += random.random() + numpy.random.random()
        self.history = torch.cat((self.history, torch.ones(1)))
        y: torch.Tensor = self.out(self.drop(self.norm(x)))
        return y * (self.calls + self.kept.sum() + self.history.sum())


class Life:
    """A model with its optimizer and scaler, in the middle of a training."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = Counting()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.parts = Parts({"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler})
        self.batch: dict[str, Any] = {"x": torch.randn(4, 3), "place": [7]}
        self.f(copy.deepcopy(self.batch))

    def f(self, batch: dict[str, Any]) -> None:
        self.scaler.scale(self.model(batch.pop("x")).square().mean()).backward()
        batch["place"][0] += 1
        self.scaler.unscale_(self.optimizer)

    def f_anew(self, batch: dict[str, Any]) -> None:
        self.scaler._per_optimizer_states.clear()  # it unscales once a step
        self.f(batch)

    def everything(self) -> dict[str, int]:
        state = [*self.model.parameters(), *self.model.buffers(), self.model.kept, self.model.calls]
        state += [own.grad for own in self.model.parameters()] + [vars(self.scaler)["_scale"], self.batch]
        return Contents.of({"all": [state, repr(self.scaler._per_optimizer_states), rng.capture()]}).numbers()

    def identities(self) -> list[int]:
        own = [own.grad for own in self.model.parameters()]
        return [id(tensor) for tensor in (*own, *self.model.buffers(), self.model.kept)]


synchronized = contextlib.nullcontext


def test_everything_is_put_back_also_where_f_raises():
    life = Life()
    parcel, before, identities = pack(life.batch, life.parts), life.everything(), life.identities()

    def f(batch: dict[str, Any]) -> None:
        life.f_anew(batch)
        raise ValueError("f's own")

    first = run(life.f_anew, parcel, life.parts, synchronized)
    with pytest.raises(ValueError, match="f's own"):
        run(f, parcel, life.parts, synchronized)
    assert life.identities() == identities
    assert life.everything() == before
    assert run(life.f_anew, parcel, life.parts, synchronized) == first
    assert sorted(first) == ["model/norm.bias", "model/norm.weight", "model/out.bias", "model/out.weight"]


def test_another_rank_computes_the_same_bits_whatever_it_had_itself():
    owner, other = Life(), Life()
    for _ in range(2):
        other.model(torch.randn(5, 3))  # other statistics, another counter, generators that stand elsewhere
    changing = set[Attribute]()
    assert try_out(owner.f_anew, owner.batch, owner.parts, synchronized, changing) == ""
    assert changing == {(1, "calls")}
    parcel = pack(owner.batch, owner.parts, changing)
    assert run(other.f_anew, parcel, other.parts, synchronized) == run(owner.f_anew, parcel, owner.parts, synchronized)


class Lazy(torch.nn.Module):
    """Makes state at its first call, and has numbers of its rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.out, self.local_rank, self.require_backward_grad_sync = torch.nn.Linear(3, 1), rank, True
        self.seen = list[Any]()
        self.register_buffer("edges", torch.eye(3).to_sparse_csr(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((self.local_rank, self.require_backward_grad_sync))
        self.calls, self.last = getattr(self, "calls", 0) + 1, x
        self.mean = x.mean() if not hasattr(self, "mean") else self.mean * 0.5 + x.mean()
        if not hasattr(self, "ones"):
            self.register_buffer("ones", torch.ones(1))
        y: torch.Tensor = self.out(self.edges @ x) * self.mean
        return y


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_a_replay_adds_goes_and_numbers_of_a_rank_stay_its_own():
    owner, own = Lazy(0), Lazy(1)
    f, x = (lambda batch: own(batch).sum().backward()), torch.ones(3, 3)

    @contextlib.contextmanager
    def unsynchronized() -> Any:
        own.require_backward_grad_sync = False
        yield
        own.require_backward_grad_sync = True

    numbers = {(1, "require_backward_grad_sync")}
    run(f, pack(x, Parts({"model": owner}), numbers), Parts({"model": own}), unsynchronized)
    assert own.seen == [(1, False)]
    assert not {"mean", "calls", "last", "ones"} & {*vars(own), *own._buffers}
    numbers.clear()
    assert try_out(f, x, Parts({"model": own}), unsynchronized, numbers) == ""
    assert numbers == {(1, "calls")}


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch 2.6")
@pytest.mark.filterwarnings("ignore")
def test_trying_out_leaves_compiled_code_compiled():
    graphs = list[Any]()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = torch.compile(torch.nn.Linear(3, 1), backend=backend, fullgraph=True)
    parts = Parts({"model": model})
    assert parts.is_compiled
    assert not Life().parts.is_compiled
    assert try_out(lambda batch: model(batch).sum().backward(), torch.ones(2, 3), parts, synchronized, set()) == ""
    assert len(graphs) == 1


class Sample:
    """An object of the script."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids = ids


def test_a_nested_batch_arrives_without_the_memory_that_its_tensors_are_views_of():
    memory = torch.arange(1_000_000.0)
    batch = {
        "x": (memory[10:13], [torch.ones(2, 2, dtype=torch.bfloat16).T]),
        "of": Sample((3, 4)),
        "n": numpy.arange(3),
    }
    life, arrived = Life(), list[Any]()
    parcel = pack(batch, life.parts)
    run(arrived.append, parcel, life.parts, synchronized)
    (own,) = arrived
    assert len(parcel) < 50_000
    assert torch.equal(own["x"][0], torch.tensor([10.0, 11.0, 12.0]))
    assert (own["x"][1][0].dtype, own["x"][1][0].stride()) == (torch.bfloat16, (1, 2))
    assert (own["of"].ids, own["n"].tolist()) == ((3, 4), [0, 1, 2])


def test_a_batch_that_cannot_be_sent_is_refused():
    with pytest.raises(UsageError, match=r"track\(replay=\): the batch cannot be sent to another rank: .*generator"):
        pack({"x": (number for number in range(3))}, Life().parts)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda life: life.optimizer.step(), "it changed model/norm.weight: it must do forward and backward only"),
        (lambda life: life.optimizer.zero_grad(), "it leaves no gradients in the tracked modules"),
        (lambda life: None, ""),
    ],
)
def test_what_f_must_not_do_is_said_at_the_start(change: Any, why: str):
    life = Life()

    def f(batch: dict[str, Any]) -> None:
        life.model(batch["x"]).sum().backward()
        change(life)

    assert try_out(f, life.batch, life.parts, synchronized, set()) == why


def test_gradients_of_what_is_not_tracked_are_refused_since_nobody_puts_them_back():
    life, other, elsewhere = Life(), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    elsewhere(torch.ones(1)).backward()  # of no concern

    def f(batch: dict[str, Any]) -> None:
        other(life.model(batch["x"])).sum().backward()

    why = "it leaves gradients in parameters that are not tracked, which nobody puts back: track their module, too"
    assert try_out(f, life.batch, life.parts, synchronized, set()) == why
    whole = Parts({"model": life.model, "other": other})
    assert try_out(f, life.batch, whole, synchronized, set()) == ""
    also_optimized = Parts({"model": life.model, "sgd": torch.optim.SGD(other.parameters())})
    assert try_out(f, life.batch, also_optimized, synchronized, set()) == ""


def test_tensors_that_come_and_go_with_gradients_of_their_own_are_no_reason_to_refuse():
    life, kept, old = Life(), dict[str, torch.Tensor](), torch.nn.Linear(1, 1)
    old(torch.ones(1)).backward()
    old.itself = [old]  # an earlier model, which the collector finds in f
    old = None

    def f(batch: dict[str, Any]) -> None:
        gc.collect()
        x = batch["x"].clone().requires_grad_()
        life.model(x).sum().backward()
        kept["x"] = x  # a saliency map

    assert try_out(f, life.batch, life.parts, synchronized, set()) == ""


@pytest.mark.parametrize(
    ("function", "every", "module", "why"),
    [
        (len, None, torch.nn.Linear(2, 1), r"replay_every=None\): expected steps, at least 1"),
        (len, 0, torch.nn.Linear(2, 1), r"replay_every=0\): expected steps"),
        (None, 5, torch.nn.Linear(2, 1), r"replay=NoneType\): expected f\(batch\)"),
        ([1], 5, torch.nn.Linear(2, 1), r"replay=list\): expected f\(batch\)"),
        (len, 5, torch.nn.Sequential(torch.nn.SyncBatchNorm(3)), "model has SyncBatchNorm, so no single rank can"),
    ],
)
def test_what_can_never_be_replayed_is_refused(function: Any, every: Any, module: torch.nn.Module, why: str):
    with pytest.raises(UsageError, match=why):
        check(function, every, {"model": module})


def test_one_rank_alone_replays_nothing_and_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    seen, asked = list[Any](), {"replay_every": 1, "on_corruption": "stop"}
    with tracked(tmp_path, replay=seen.append, **asked, model=torch.nn.Linear(2, 1)) as state:
        for step in state.steps([torch.ones(2)] * 3, total=2):
            with step:
                pass
    assert (state.step, seen) == (2, [])
    said = capsys.readouterr().err
    assert said.count("steps are not replayed: no two ranks are known to have the same weights") == 1
    assert said.count("on_corruption='stop' has no effect: one rank has no replica") == 1
