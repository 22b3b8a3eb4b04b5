"""What does a rank do for a bucket of gradients in a wire format, beside sending it? For join/collectives.py.

    reduce = reduce_alone("int8", rank=2, gradients=torch.randn(1 << 20))
    reduce().wait()

It is comm/hooks.py itself, in a process group of this rank alone: packing, taking the mean, unpacking, error feedback.
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


def reduce_alone(wire_format: str, *, rank: int, gradients: Any) -> Callable[[], Any]:
    """Return a function that begins to reduce the gradients, and returns the future of the result.

    Args:
        rank: of this process in the default group.
        gradients: float32, a multiple of WIDTH * HEIGHT.
    Raises:
        RuntimeError: this Python or torch does not support the format.
    """
    import torch
    import torch.distributed as dist

    try:
        hooks = runpy.run_path(os.path.join(os.path.dirname(os.path.dirname(__file__)), "comm", "hooks.py"))
        group: Any = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
        module, backend = _Module(group), group._get_backend(torch.device("cpu"))
        compressor = hooks["Compressor"](module, wire_format, backend, has_lane=True)
        compressor.load_state_dict(compressor.state_dict() | {"iter": hooks["POWERSGD_PLAIN_STEPS"]})
    except Exception as exc:
        raise RuntimeError(f"{wire_format} is not supported here: {exc}") from exc
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
