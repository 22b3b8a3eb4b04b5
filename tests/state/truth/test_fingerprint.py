"""Does a fingerprint tell every change of bits, and only that?"""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.state.truth import fingerprint as module
from allranks.state.truth.fingerprint import can_watch, fingerprint

WIDTHS = {torch.uint8: 1, torch.int16: 2, torch.int32: 4, torch.int64: 8}


def mixed(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        numbers = (numbers ^ numbers >> np.uint64(33)) * np.uint64(factor)
    return numbers ^ numbers >> np.uint64(33)


def by_numpy(data: bytes, element_bytes: int, dtype: str, shape: tuple[int, ...]) -> int:
    """What the docstring of the module says, written down a second time."""
    word = np.dtype("<u4" if element_bytes >= 8 else "<u8")
    row_bytes = 512 * word.itemsize
    padded = data.ljust(-(-len(data) // row_bytes) * row_bytes, b"\0")
    rows = np.frombuffer(padded, word).reshape(-1, 512).astype(np.uint64)
    with np.errstate(over="ignore"):
        by_row = rows.sum(1, dtype=np.uint64) + np.arange(1, len(rows) + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        by_column = rows.sum(0, dtype=np.uint64) + np.arange(1, 513, dtype=np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
        total = int(mixed(by_row).sum(dtype=np.uint64)) + int(mixed(by_column).sum(dtype=np.uint64))
    head = hashlib.blake2b(f"{dtype}\0{shape}".encode(), digest_size=8).digest()
    total = (total + int.from_bytes(head, "little")) % 2**64
    return total - 2**64 * (total >= 2**63)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Its elements in logical order, one by one."""
    plain = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(plain.reshape(-1).view(torch.uint8).tolist()) if plain.numel() else b""


def assert_as_numpy_has_it(*tensors: torch.Tensor) -> None:
    wanted = [by_numpy(bytes_of(own), own.element_size(), str(own.dtype), tuple(own.shape)) for own in tensors]
    assert fingerprint(tensors) == wanted


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    """Any bits, as a tensor of this dtype."""
    size = torch.empty((), dtype=dtype).element_size()
    drawn = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    drawn = drawn % 2 if dtype is torch.bool else drawn
    return drawn.view(dtype).view(shape)


def all_dtypes() -> list[torch.dtype]:
    found = {own for own in vars(torch).values() if isinstance(own, torch.dtype)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usable = []
        for dtype in sorted(found, key=str):
            try:
                own = torch.empty(3, dtype=dtype)
            except (RuntimeError, NotImplementedError):
                continue
            usable += [dtype] * can_watch(own)
    return usable


def test_all_dtypes_of_this_torch_but_parts_of_bytes_and_quantized_ones_are_watched():
    names = {str(dtype).removeprefix("torch.") for dtype in all_dtypes()}
    assert names >= {
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16"),
        *("float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    }
    assert not names & {"uint1", "uint4", "int4", "qint8", "quint8"}


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_each_dtype_and_layout_has_the_number_that_numpy_computes(dtype: torch.dtype):
    matrix = noise(67, 131, dtype=dtype)
    layouts = [matrix, matrix.T, matrix[3:, 1::3], matrix[0, 5], matrix[:0], matrix.reshape(-1)[1:], matrix[:, 64]]
    assert_as_numpy_has_it(*layouts)


def test_channels_last_expanded_and_conjugated_tensors_have_the_number_of_their_elements_in_logical_order():
    image = noise(2, 3, 9, 40).contiguous(memory_format=torch.channels_last)
    waves = noise(33, 70, dtype=torch.complex64)
    views = [image, noise(1, 700).expand(600, 700), waves.conj(), waves.conj().T, waves.imag, waves.conj().imag]
    assert_as_numpy_has_it(*views, waves[1, 2].conj())
    assert fingerprint([image]) == fingerprint([image.contiguous()])


@pytest.mark.parametrize("sizes", [{"COPY_BYTES": 8192}, {"SMALL_BYTES": 1 << 20}, {"BLOCK_BYTES": 4096}], ids=str)
def test_pieces_and_threads_do_not_change_the_number(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]):
    own = noise(3, 170, 300)
    views = [own, own.transpose(0, 2), own.double(), own[:, :, 1:], own.reshape(-1)[1:-5], own + 1, own[:0]]
    whole = fingerprint(views)
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert fingerprint(views) == whole
    assert_as_numpy_has_it(own.half(), own.transpose(0, 1))


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 40), max_size=3),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex64]),
    order=st.randoms(),
    step=st.integers(1, 3),
)
def test_any_view_has_the_number_that_numpy_computes(shape: list[int], dtype: torch.dtype, order: Any, step: int):
    own = noise(*shape, dtype=dtype)
    axes = list(range(own.dim()))
    order.shuffle(axes)
    own = own.permute(axes)
    assert_as_numpy_has_it(own[::step] if own.dim() else own)


def test_dtype_and_shape_belong_to_the_number_and_bits_that_compare_equal_do_not_count_as_equal():
    zero, nan = torch.zeros(8), torch.full((8,), torch.nan)
    other_nan = (nan.view(torch.int32) + 1).view(torch.float32)
    alike = [zero, -zero, zero.view(2, 4), zero.int(), nan, other_nan, zero[:0], zero[:7]]
    assert len({*fingerprint(alike)}) == len(alike)


def test_sparse_quantized_and_meta_tensors_are_not_watched():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        odd = [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.empty(3, device="meta")]
        odd.append(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    assert not any(map(can_watch, odd))


# The table of the issue: what XOR, and sums without the bijection, miss


def flipped(own: torch.Tensor, places: list[int], bit: int) -> torch.Tensor:
    changed = own.clone()
    words = changed.view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[own.element_size()])
    one = 1 << bit
    width = 8 * own.element_size()
    words[torch.tensor(places)] ^= one - (1 << width if bit == width - 1 and width > 8 else 0)
    return changed


def counted_missed(dtype: torch.dtype, places_of: Any, *, bits: Any) -> int:
    own, draw = noise(12_000, dtype=dtype), np.random.default_rng(1)
    before, changed = fingerprint([own])[0], []
    for _ in range(100):
        place, bit = int(draw.integers(0, 11_000)), int(draw.choice(bits))
        changed.append(flipped(own, places_of(place, draw), bit))
    return sum(number == before for number in fingerprint(changed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_no_flip_is_missed_of_one_bit_of_the_same_bit_in_8_neighbors_or_of_two_signs(dtype: torch.dtype):
    width = 8 * torch.empty((), dtype=dtype).element_size()
    every, sign = range(width), [width - 1]
    assert counted_missed(dtype, lambda place, _: [place], bits=every) == 0
    assert counted_missed(dtype, lambda place, _: [place + step for step in range(8)], bits=every) == 0
    assert counted_missed(dtype, lambda place, draw: [place, place + int(draw.integers(1, 900))], bits=sign) == 0
    assert counted_missed(dtype, lambda place, _: [place, place + 256, place + 512, place + 768], bits=sign) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_a_negated_tensor_is_another_one(dtype: torch.dtype):
    own = noise(64, 1024, dtype=dtype)
    assert fingerprint([own]) != fingerprint([-own])
