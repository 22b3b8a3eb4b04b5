"""What goes into a checkpoint comes out of it, and what cannot is named by its path."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st

from allranks.state.saved import pack
from allranks.state.saved.checkpoint import Checkpointer

pytestmark = pytest.mark.torch

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.complex64, torch.complex128, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path_factory.mktemp("checkpoints") / "of pack's \n tests", keep=2) as made:
        yield made


def around(checkpoints: Checkpointer, value: Any) -> Any:
    checkpoints.save((checkpoints.last_complete or 0) + 1, value, wait=True)
    loaded = checkpoints.load()
    assert loaded is not None
    return loaded.common


def newest(checkpoints: Checkpointer) -> Path:
    loaded = checkpoints.load()
    assert loaded is not None
    return loaded.directory


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    elif isinstance(a, dict):
        assert_same(list(a), list(b))
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif isinstance(a, complex):
        assert_same((a.real, a.imag), (b.real, b.imag))
    elif isinstance(a, float):
        assert repr(a) == repr(b)  # also nan, and -0.0
    else:
        assert a == b


def tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    size_bytes = math.prod(shape) * dtype.itemsize
    if dtype is torch.bool:
        return torch.tensor(list(random.Random(seed).randbytes(size_bytes))).reshape(shape) > 127
    if not size_bytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(size_bytes)), dtype=dtype).reshape(shape)


shapes = st.lists(st.integers(0, 5), max_size=3)
tensors = st.builds(tensor, st.sampled_from(DTYPES), shapes, st.integers(0, 99))
arrays = st.builds(
    lambda kind, shape: np.arange(math.prod(shape)).reshape(shape).astype(kind),
    st.sampled_from(["<f4", ">f8", "i2", "u8", "?", "c16", "U3", "S2", "M8[s]"]),
    shapes,
)
scalars = st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.float64("nan"), np.str_("x")])
texts = st.text(st.characters(exclude_categories=()))  # also halves of characters
numbers = st.integers() | st.floats() | st.complex_numbers()
plain = st.none() | st.booleans() | numbers | texts | st.binary()
keys = (
    st.text(max_size=5)
    | st.integers()
    | st.floats(allow_nan=False)
    | st.tuples(st.integers(), st.text(max_size=2))
    | st.booleans()
    | st.binary(max_size=2)
    | st.none()
)
values = st.recursive(
    plain
    | tensors
    | arrays
    | scalars
    | st.sampled_from([torch.float16, torch.Size([2, 3]), OrderedDict(b=1, a=2), Counter("aab")]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


@given(values)
def test_nested_state_comes_back_as_it_was(checkpoints: Checkpointer, value: Any) -> None:
    assert_same(around(checkpoints, value), value)


def test_a_training_run_comes_back_as_it_was(checkpoints: Checkpointer) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    for _ in range(3):
        net(torch.randn(4, 30)).sum().backward()
        optimizer.step()
        scheduler.step()
    state = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "random": [random.getstate(), np.random.get_state(), np.random.default_rng(3).bit_generator.state],
        "torch": torch.get_rng_state(),
    }
    assert_same(around(checkpoints, state), state)


def test_tensors_that_are_views_come_back_as_their_values(checkpoints: Checkpointer) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    loaded = around(checkpoints, {"t": base.T, "slice": base[::2, 1:3], "all": base[0, 0].expand(3), "neg": base.neg()})
    assert loaded["t"].equal(base.T)
    assert loaded["slice"].equal(base[::2, 1:3])
    assert loaded["all"].tolist() == [0.0, 0.0, 0.0]
    assert loaded["neg"].equal(-base)


def test_tied_tensors_are_stored_once_and_tied_again(checkpoints: Checkpointer) -> None:
    embedding, head = torch.nn.Embedding(500, 16), torch.nn.Linear(16, 500)
    head.weight = embedding.weight
    state = {"embedding": embedding.state_dict(), "head": head.state_dict(), "flat": embedding.weight.detach().view(-1)}
    loaded = around(checkpoints, {key: dict(part) if isinstance(part, dict) else part for key, part in state.items()})
    [saved] = newest(checkpoints).glob("*.safetensors")
    assert 500 * 16 * 4 < saved.stat().st_size < 1.5 * 500 * 16 * 4
    loaded["embedding"]["weight"][0, 0] = 7
    assert loaded["head"]["weight"][0, 0] == 7
    assert loaded["flat"][0] == 7
    assert loaded["head"]["weight"][1:].equal(embedding.weight[1:])


def test_a_part_is_a_safetensors_file(checkpoints: Checkpointer) -> None:
    state = {str(dtype): tensor(dtype, [3, 5], 1) for dtype in DTYPES}
    state |= {"0-dim": torch.tensor(3.0), "empty": torch.empty(0, 4), "odd": tensor(torch.uint8, [7], 2)}
    around(checkpoints, state)
    [path] = newest(checkpoints).glob("*.safetensors")
    with safetensors.safe_open(path, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in state}
        assert json.loads(file.metadata()["allranks"]).keys() == {"common", "own", "shards", "tensors"}
    others = {"torch.float8_e8m0fnu", "torch.complex128"}  # which the library has no name for
    for name, value in state.items():
        assert_same(found[name], value.reshape(-1).view(torch.uint8) if name in others else value)


def test_a_header_larger_than_safetensors_allows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "LARGEST_HEADER_BYTES", 10_000)
    said: list[str] = []
    with Checkpointer(tmp_path, say=said.append) as checkpoints:
        checkpoints.save(1, {"numbers": list(range(10_000))})
        assert not checkpoints.wait()
    assert "numbers and text take 0 MB of this checkpoint, at most 0 are possible: save long lists" in said[0]


def test_what_is_copied_is_what_the_state_was_at_the_call(checkpoints: Checkpointer) -> None:
    weights = torch.zeros(3_000_000)
    checkpoints.save(10_000, weights)
    weights += 1
    checkpoints.wait()
    loaded = checkpoints.load()
    assert loaded is not None
    assert not loaded.common.any()


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"model": {"hook": Odd()}}, r"^common\['model'\]\['hook'\] is a .*\.Odd, which a checkpoint cannot hold"),
        ({"a": [1, {2, 3}]}, r"^common\['a'\]\[1\] is a builtins\.set,"),
        ({"seen": defaultdict(int)}, r"^common\['seen'\] is a collections\.defaultdict,"),
        ({Odd(): 1}, r"^a key of common is a .*\.Odd,"),
        ({"f": lambda: 0}, r"^common\['f'\] is a builtins\.function,"),
        ([np.array([Odd()])], r"^common\[0\] is a numpy\.ndarray,"),
        ([torch.eye(2).to_sparse()], r"^common\[0\] is a torch.sparse_coo tensor; a checkpoint holds"),
        ([torch.empty(2, device="meta")], r"^common\[0\] is a meta tensor;"),
    ],
)
def test_what_cannot_be_saved_is_named_by_its_path(tmp_path: Path, value: Any, what: str) -> None:
    said: list[str] = []
    with Checkpointer(tmp_path / "none", say=said.append) as checkpoints:
        checkpoints.save(1, {"fine": 1}, wait=True)
        checkpoints.save(2, value)
        assert not checkpoints.wait()
        assert checkpoints.last_complete == 1
        checkpoints.save(3, {"fine": 1}, wait=True)
        assert checkpoints.last_complete == 3
    [line] = said
    before, _, after = line.partition(" is not written: ")
    assert before == "the checkpoint of step 2"
    assert re.match(what, after)
    assert line.endswith("; the checkpoint of step 1 is complete")


def test_a_nested_tensor_is_refused_as_one_since_torch_tells_no_shape_of_it() -> None:
    with pytest.warns(UserWarning, match="prototype stage"):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(pack.StateError, match=r"^part is a nested tensor; a checkpoint holds dense tensors with data$"):
        pack.Packer().pack(nested, "part")


def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    state["me"] = state
    said: list[str] = []
    with Checkpointer(tmp_path / "none", say=said.append) as checkpoints:
        checkpoints.save(1, state)
    assert "nested deeper than 100: does it contain itself" in said[0]
