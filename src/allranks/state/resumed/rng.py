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
    """Return where all of them stand, as plain data and tensors."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
    }
    if numpy := sys.modules.get("numpy"):
        kind, keys, place, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [kind, keys.tolist(), place, has_gauss, cached]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put all of them back; what this machine does not have stays out."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        kind, keys, place, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), place, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(seed: int) -> None:
    """Begin all of them anew from one number."""
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Have the generators of the CPU begin at this seed, and stand where they stood afterwards."""
    with untouched():
        random.seed(seed)
        torch.random.default_generator.manual_seed(seed)  # torch.manual_seed would start CUDA in a DataLoader worker
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)
        yield


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Have the generators of the CPU stand afterwards where they stood before."""
    numpy = sys.modules.get("numpy")
    python, cpu, legacy = random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpy:
            numpy.random.set_state(legacy)
