"""Where does every generator of random numbers of this process stand, and how does it go back there?

    state = capture()      at a step boundary, into the checkpoint
    restore(state)         after a restart, before the next step

Python's `random`, NumPy's global generator, torch on the CPU, and torch on this rank's own GPU. Generators that a
script made for itself are the script's to track.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """Return where all of them stand, as plain data, arrays and tensors."""
    state: dict[str, Any] = {"cpu": _of_cpu()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put all of them back; what this machine does not have stays out."""
    _put_back(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(seed: int) -> None:
    """Begin all of them anew from one number."""
    _seed_cpu(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Have the generators of the CPU begin at this seed, and stand where they stood afterwards."""
    with untouched():
        _seed_cpu(seed)
        yield


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Have the generators of the CPU stand afterwards where they stood before."""
    before = _of_cpu()
    try:
        yield
    finally:
        _put_back(before)


class Stream:
    """Generators of the CPU that only what runs inside of `with stream:` draws from; they begin at this seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        with seeded(seed):
            self._own = random.getstate(), torch.get_rng_state()
        self._numpy: Any = None

    def _swap(self, *_: object) -> None:
        outer = random.getstate(), torch.get_rng_state()
        random.setstate(self._own[0])
        torch.set_rng_state(self._own[1])
        self._own = outer
        numpy = sys.modules.get("numpy")
        if numpy and hasattr(numpy.random, "set_bit_generator"):  # to copy its state would take 0.3 ms; NumPy 1.24
            own = self._numpy or numpy.random.MT19937(self._seed)
            self._numpy = numpy.random.get_bit_generator()
            numpy.random.set_bit_generator(own)

    __enter__ = __exit__ = _swap


def _seed_cpu(seed: int) -> None:
    random.seed(seed)
    torch.random.default_generator.manual_seed(seed)  # torch.manual_seed would start CUDA in a DataLoader worker
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _of_cpu() -> tuple[Any, Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()


def _put_back(state: tuple[Any, Any, Any]) -> None:
    python, cpu, legacy = state
    random.setstate(python)
    torch.set_rng_state(cpu)
    if legacy:
        import numpy

        numpy.random.set_state(legacy)
