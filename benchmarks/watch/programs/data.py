"""The data of train.py, and four ways in which a rank can be held up in it."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch
from board import Board

HOLD_S = 9
"""How long one call holds the GIL: longer than a verdict may take, short enough to be waited for."""


def load_batch(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def read_shard(path: str) -> bytes:
    """As from a file system that does not answer: a FIFO into which nothing is written."""
    with Path(path).open("rb") as shard:
        return shard.read()  # place: read


def shuffle(board: Board) -> int:
    count = 0
    while not board.is_released:
        count += sum(number % 2 for number in range(100_000))  # place: loop
    return count


def decode() -> None:
    """As an extension that waits for a device and does not give the GIL back."""
    ctypes.PyDLL(None).usleep(HOLD_S * 1_000_000)  # place: gil


def clean(text: str) -> bool:
    return re.match(r"(a+)+$", text) is not None  # place: regex
