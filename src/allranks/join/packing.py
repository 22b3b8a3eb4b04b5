"""What does a rank do for a bucket of gradients in a wire format, beside sending it? For join/collectives.py.

    reduce = make_reduce("int8", torch.randn(1 << 20), is_alone=True)
    reduce().wait()

It is comm/hooks.py itself: packing, taking the mean, unpacking, error feedback. In a process group of this rank alone
it sends nothing; in that of all ranks it is the whole reduction.
Standard library and torch only: both files are loaded by path.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from typing import Any

WIDTH = 512
"""Of the matrices that the gradients are taken for: PowerSGD works on matrices."""
HEIGHT = 256


def make_reduce(wire_format: str, gradients: Any, *, is_alone: bool) -> Callable[[], Any]:
    """Return a function that begins to reduce the gradients, and returns the future of the result.

    All ranks call it together, unless each of them is alone.

    Args:
        gradients: float32, a multiple of WIDTH * HEIGHT.
        is_alone: without the other ranks of the default group.
    Raises:
        RuntimeError: the Python or torch of a rank does not support the format.
    """
    import torch
    import torch.distributed as dist

    obstacle, failed = "another rank lacks it", torch.zeros(1)
    try:
        hooks = runpy.run_path(os.path.join(os.path.dirname(os.path.dirname(__file__)), "comm", "hooks.py"))
    except Exception as exc:
        obstacle, failed = str(exc), torch.ones(1)
    if not is_alone:
        dist.all_reduce(failed)  # else the other ranks would wait for this one
    if failed:
        raise RuntimeError(f"{wire_format} is not supported here: {obstacle}")
    group: Any = dist.group.WORLD
    if is_alone:
        group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    module, backend = _Module(group), group._get_backend(torch.device("cpu"))
    compressor = hooks["Compressor"](module, wire_format, backend, has_lane=True)
    compressor.load_state_dict(compressor.state_dict() | {"iter": hooks["POWERSGD_PLAIN_STEPS"]})
    bucket, keeps_module = _Bucket(gradients), module  # the compressor does not
    return lambda: keeps_module and compressor.reduce(bucket)


class _Module:
    """What a compressor asks of DistributedDataParallel."""

    static_graph = False

    def __init__(self, group: Any) -> None:
        self.process_group, self.module = group, self

    def named_parameters(self) -> list[Any]:
        return []


class _Bucket:
    """What a compressor asks of a bucket of gradients."""

    def __init__(self, gradients: Any) -> None:
        self._gradients, self._parameters = gradients, list(gradients.view(-1, HEIGHT, WIDTH))

    def buffer(self) -> Any:
        return self._gradients

    def parameters(self) -> Any:
        return self._parameters

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True
