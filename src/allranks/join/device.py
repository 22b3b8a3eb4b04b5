"""What does a rank of a session compute with, if nobody has said it: which device and backend, how many threads?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def choose_backend(dist: ModuleType, num_local: int) -> str:
    """Return what this node alone can tell, for a world of one and under torchrun.

    Args:
        dist: torch.distributed.
        num_local: ranks on this node.
    """
    import torch

    return "nccl" if dist.is_nccl_available() and torch.cuda.device_count() >= num_local else "gloo"


def leave_cores(on_exit: contextlib.ExitStack, num_threads: int) -> None:
    """Compute with so many threads at most: a torch that was imported before has not seen OMP_NUM_THREADS."""
    import torch

    if (before := torch.get_num_threads()) > num_threads:
        torch.set_num_threads(num_threads)
        on_exit.callback(torch.set_num_threads, before)


def take_device(backend: str, place: Callable[[int], int]) -> torch.device:
    """Return this rank's GPU, made the current one, where the backend is nccl; else the CPU.

    Args:
        place: returns which of so many GPUs is this rank's, or raises why it has none.
    """
    import torch

    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", place(torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device
