"""Which 64 bits stand for all bits of a tensor? A checksum that every single flipped bit changes, at memory speed.

    fingerprint([weight, bias])        # [-3304958732104913745, 881293450185923343]

The bytes of a tensor, in logical order, little-endian and padded with zeros, are rows of 512 words: of 64 bits, or of
32 where an element has 8 bytes or more, since a negated tensor of float64 would leave all sums of 64 bits as they are.
The sum of each row and of each column, plus a constant of its own, goes through a bijection (murmur's finalizer), and
all of them are added modulo 2^64, with a number for dtype and shape. Without the bijection, two flipped signs in one
row would cancel out. -0.0 and the payloads of NaN are bits like any others. The number is the same on every device and
in every layout.

A CPU sums up blocks that stay in its cache by rows, then by columns, so memory is read once. Small tensors with equally
many rows are copied together, since each call costs more than what it computes there. On a GPU all but the largest are
small in this sense: hundreds of launches would take longer than the copies.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from allranks.state.truth.odd_one import UPDATE_SHARE

WORDS = 512
"""Of a row."""
BLOCK_BYTES = 2 << 20
"""What each thread of a CPU sums up at once: few enough calls, since all threads wait for each other in each."""
SMALL_BYTES, COPY_BYTES = 64 << 10, 4 << 20
GPU_SMALL_BYTES, GPU_COPY_BYTES = 16 << 20, 64 << 20
"""Smaller tensors are copied together, so much at once; the same holds for layouts that must be copied."""
_ROW = 0x9E3779B97F4A7C15 - (1 << 64)
_COLUMN = 0xC2B2AE3D27D4EB4F - (1 << 64)
"""Odd numbers; times the number of a row or column they are its constant. Source: splitmix64, xxh64."""
_FACTORS = 0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64)
"""Source: MurmurHash3, fmix64."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Dtypes as which elements of so many bytes are read; all others as int64, in words of 32 bits."""
_PART_OF_BYTE = re.compile(r"torch\.(?:u?int[1-7]|float4_\w+)")
"""Dtypes that torch cannot copy."""


def can_watch(tensor: Tensor) -> bool:
    """Whether it has a fingerprint: sparse, quantized, nested and meta tensors have none."""
    is_odd = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta
    return not is_odd and not _PART_OF_BYTE.fullmatch(str(tensor.dtype))


@torch.no_grad()  # type: ignore[untyped-decorator]
def fingerprint(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of each tensor, which `can_watch` allows, as int64 has it."""
    numbers = [0] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        found = _on_one_device([tensors[place] for place in places]).tolist()
        for place, number in zip(places, found, strict=True):
            numbers[place] = number
    return numbers


def bytes_of(tensor: Tensor) -> Tensor:
    """Return all bytes in logical order, in the tensor's own memory if they stand so there."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def count_differences(own: Tensor | None, other: Tensor | None) -> tuple[int, int, int]:
    """Return the first three fields of `odd_one.Difference`; of tensors of two forms, one element differs.

    Where so many differ that it is an update, only how many.
    """
    if own is None or other is None or (own.dtype, own.shape) != (other.dtype, other.shape):
        return 1, 0, 0
    if other.is_complex():
        own, other = (torch.view_as_real(one.resolve_conj().resolve_neg()) for one in (own, other))
    odd = (bytes_of(own) ^ bytes_of(other)).view(-1, own.element_size())
    is_odd = (odd != 0).any(1)
    elements = int(is_odd.count_nonzero())
    if not 0 < elements <= max(1, own.numel() * UPDATE_SHARE) or not other.is_floating_point():
        return elements, 0, 0
    odd = odd[is_odd]  # few: a GPU may have no room for more copies of a large tensor
    before, after = (one.reshape(-1)[is_odd].double() for one in (other, own))
    bits, are_fractions = sum(int((odd >> place & 1).sum()) for place in range(8)), bool((before % 1 > 0).all())
    if bits < 2:
        return elements, bits * are_fractions, 0
    last_bit = torch.finfo(other.dtype).eps * other.float().abs().max()
    return elements, bits * are_fractions, int(bool((after - before).abs().max() <= last_bit))


def hash_numbers(numbers: Mapping[str, int]) -> int:
    """Return 64 bits of numbers and their names, whatever their order."""
    return hash_text(*(f"{name}={numbers[name]}" for name in sorted(numbers)))


def hash_text(*texts: str) -> int:
    """Return 64 bits of texts, as int64 has them."""
    return hash_bytes("\0".join(texts).encode())


def hash_bytes(data: bytes) -> int:
    """Return 64 bits of bytes, as int64 has them."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


@lru_cache(4096)
def _hash_form(dtype: torch.dtype, shape: torch.Size) -> int:
    return hash_text(str(dtype), str(tuple(shape)))


def _on_one_device(tensors: Sequence[Tensor]) -> Tensor:
    """Return the numbers of tensors of one device, there."""
    device, forms = tensors[0].device, [_hash_form(tensor.dtype, tensor.shape) for tensor in tensors]
    none = torch.zeros(0, dtype=torch.int64, device=device)
    runs, by_row, by_column = list[tuple[int, int, int]](), [none], [none.view(0, WORDS)]
    for words, own_runs in _batches(tensors):
        if words.size(1) < WORDS:  # of 64 bits, where those of 32 are meant
            words = torch.stack((words & 0xFFFFFFFF, words >> 32 & 0xFFFFFFFF), 2).flatten(1)
        runs += own_runs
        by_row.append(words.sum(1))
        by_column.append(words.view(len(own_runs), -1, WORDS).sum(1))
    owner, first, count = torch.tensor(runs, dtype=torch.int64, device=device).view(-1, 3).T
    rows, columns = torch.cat(by_row), torch.zeros(len(tensors), WORDS, dtype=torch.int64, device=device)
    columns.index_add_(0, owner, torch.cat(by_column)).add_(torch.arange(1, WORDS + 1, device=device).mul_(_COLUMN))
    of_row = torch.stack((owner, first - count.cumsum(0) + count + 1)).repeat_interleave(
        count, dim=1, output_size=len(rows)
    )
    number = torch.arange(len(rows), device=device).add_(of_row[1])  # of a row in its tensor, from 1 on
    totals = _mix(columns).sum(1).index_add_(0, of_row[0], _mix(rows.add_(number.mul_(_ROW))))
    return totals + torch.tensor(forms, device=device)


def _mix(numbers: Tensor) -> Tensor:
    """Replace each number by what the bijection makes of it."""
    shifted = torch.empty_like(numbers)
    for factor in (*_FACTORS, 1):
        torch.bitwise_right_shift(numbers, 33, out=shifted)
        numbers.bitwise_xor_(shifted.bitwise_and_(0x7FFFFFFF)).mul_(factor)  # a shift of int64 copies the sign
    return numbers


def _batches(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[tuple[int, int, int]]]]:
    """Yield all rows; and for equal shares of them the tensor, the number of the first row there, and how many."""
    is_cpu = tensors[0].device.type == "cpu"
    small_bytes, copy_bytes = (SMALL_BYTES, COPY_BYTES) if is_cpu else (GPU_SMALL_BYTES, GPU_COPY_BYTES)
    num_threads = torch.get_num_threads() if is_cpu else 1
    block_rows = (num_threads * BLOCK_BYTES if is_cpu else copy_bytes) // (WORDS * 8)
    small: dict[tuple[torch.dtype, int], list[tuple[int, int, Tensor]]] = {}
    """By dtype and number of rows: tensor, number of the first row there, elements."""
    for owner, tensor in enumerate(tensors):
        first, row_bytes = 0, _row_bytes(tensor)
        for data in _pieces(tensor, copy_bytes):
            length = row_bytes // data.element_size()
            whole = len(data) // length if tensor.nbytes >= small_bytes else 0
            if whole:
                for block in data[: whole * length].view(torch.int64).view(whole, -1).split(block_rows):
                    count = len(block) // num_threads if len(block) % num_threads == 0 else len(block)
                    yield block, [(owner, first + at, count) for at in range(0, len(block), count)]
                    first += len(block)
            if whole * length < len(data):
                data = data[whole * length :].clone() if whole else data  # a view may keep a large copy
                count = -(-len(data) // length)
                parts = small.setdefault((data.dtype, count), [])
                parts.append((owner, first, data))
                first += count
                if len(parts) * count * row_bytes >= copy_bytes:
                    yield _copy_together(small.pop((data.dtype, count)), count)
    for (_, count), parts in small.items():
        yield _copy_together(parts, count)


def _copy_together(parts: Sequence[tuple[int, int, Tensor]], count: int) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """Return what `_batches` yields, of parts that have so many rows each once they are padded with zeros."""
    *_, one = parts[0]
    length = count * _row_bytes(one) // one.element_size()
    padded = torch.zeros(len(parts) * length, dtype=one.dtype, device=one.device)
    slots = padded.split([size for *_, data in parts for size in (len(data), length - len(data))])[::2]
    torch._foreach_copy_(slots, [data for *_, data in parts])
    rows = padded.view(torch.int64).view(len(parts) * count, -1)
    return rows, [(owner, first, count) for owner, first, _ in parts]


def _row_bytes(tensor: Tensor) -> int:
    return WORDS * (4 if tensor.element_size() >= 8 else 8)


def _pieces(tensor: Tensor, copy_bytes: int) -> Iterator[Tensor]:
    """Yield all bits in logical order, as integers; all pieces but the last are whole rows, and aligned to 8 bytes."""
    size = tensor.element_size()
    dtype = _INTEGERS.get(size, torch.int64)
    is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if tensor.numel() == 0:
        return
    if is_plain and tensor.storage_offset() * size % 8 == 0:
        yield tensor.view(-1).view(dtype)
        return
    tensor = tensor.view(1) if tensor.dim() == 0 else tensor
    slice_bytes = tensor[0].numel() * size
    least = _row_bytes(tensor) // math.gcd(slice_bytes, _row_bytes(tensor))
    for part in tensor.split(max(least, copy_bytes // slice_bytes // least * least)):
        yield part.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1).view(dtype)
