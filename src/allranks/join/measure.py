"""What does a training script compute in a step? Runs it for a few steps, and reads DistributedDataParallel's own log.

    python measure.py OUT train.py --epochs 3          `allranks advise --measure` has `allranks run` start this

Rank 0 writes OUT, a JSON object, and all ranks end, inside the forward pass after the last measured step: a script has
no say in it, and prints no traceback. Without any DistributedDataParallel, OUT says so when the script has ended, or
after a number of optimizer steps. Runs in the script's Python: standard library and torch only.

torch fills its log in the first ten steps: forward pass of the module, backward pass (from then on up to the last
gradient, so with the loss), communication, and how much of that the backward pass hides. Source: torch 2.13, logger.cpp
of c10d.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

STEPS = 8
"""Measured ones."""
SKIPPED = 2
"""First ones: DDP's first buckets are others, and a GPU makes its kernels ready."""
UNWRAPPED_STEPS = 20
"""Optimizer steps after which no DistributedDataParallel is to be expected."""
END_S = 20.0
"""For all ranks to come to the end; then each ends alone."""
POWERSGD_RANK = 4
TIMES = ("forward_compute_time", "backward_compute_time", "backward_comm_time", "backward_compute_comm_overlap_time")


def main() -> None:
    """Run the script that the command line names."""
    out, script, *arguments = sys.argv[1:]
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.optimizer import register_optimizer_step_post_hook

    watch = DdpWatch(out)
    construct = DistributedDataParallel.__init__

    def construct_watched(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        watch.add(self)

    DistributedDataParallel.__init__ = construct_watched
    register_optimizer_step_post_hook(watch.count_step)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).absolute().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exc:
        if not exc.code:
            watch.write()
        raise
    watch.write()


class DdpWatch:
    """Every DistributedDataParallel of this process, and what its log said."""

    def __init__(self, out: str) -> None:
        self._out = out
        self._logs: list[Log] = []
        self._optimizer_steps = 0

    def add(self, ddp: Any) -> None:
        """Read the log of a new one from now on."""
        log = Log(ddp)
        self._logs.append(log)

        def read(module: Any, args: Any) -> None:
            if log.read() and all(len(one.times) in (0, STEPS) for one in self._logs):
                self.end()

        ddp.register_forward_pre_hook(read)

    def count_step(self, *args: Any) -> None:
        """Take note of an optimizer's step."""
        self._optimizer_steps += 1
        if self._optimizer_steps == UNWRAPPED_STEPS and not self._logs:
            self.end()

    def end(self) -> NoReturn:
        """End this process, together with the others: who ends first takes the network of the rest away."""
        self.write()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        with contextlib.suppress(Exception):
            _meet()
        os._exit(0)

    def write(self) -> None:
        """Write what was measured, on rank 0."""
        if os.environ.get("RANK", "0") != "0":
            return
        told = {
            "modules": [log.told() for log in self._logs if log.times],
            "num_modules": len(self._logs),
            "optimizer_steps": self._optimizer_steps,
        }
        draft = Path(f"{self._out}.part")
        draft.write_text(json.dumps(told), encoding="utf-8")
        draft.replace(self._out)


class Log:
    """What torch logs about one DistributedDataParallel."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp
        self._seen = 0
        self._began_s: list[float] = []
        self.times: list[list[float]] = []
        """Seconds of each measured step, as TIMES has them."""

    def read(self) -> bool:
        """Read it before a forward pass; return whether all steps have been measured."""
        if not self._ddp.require_backward_grad_sync or not self._ddp.training:
            return False  # torch logs none
        log = self._ddp._get_ddp_logging_data()
        if (number := int(log.get("iteration", 0))) > self._seen:
            self._seen = number
            if number > SKIPPED and len(self.times) < STEPS:
                self.times.append([float(log.get(name, 0)) / 1e9 for name in TIMES])
        if self._seen >= SKIPPED:
            self._began_s.append(time.perf_counter())
        return len(self.times) == STEPS

    def told(self) -> dict[str, Any]:
        """Return medians, and what the module is."""
        log = self._ddp._get_ddp_logging_data()
        own = [parameter for parameter in self._ddp.module.parameters() if parameter.requires_grad]
        steps_s = [after - before for before, after in zip(self._began_s, self._began_s[1:], strict=False)]
        times_s = [median(column) for column in zip(*self.times, strict=True)]
        buckets = str(log.get("rebuilt_bucket_sizes") or log.get("bucket_sizes") or "")
        return {
            "tensor_bytes": [parameter.numel() * parameter.element_size() for parameter in reversed(own)],
            "element_bytes": own[0].element_size(),
            "low_rank_bytes": sum(map(_low_rank_bytes, own)),
            "has_vectors": any(
                _low_rank_bytes(parameter) == parameter.numel() * parameter.element_size() for parameter in own
            ),
            "bucket_bytes": [int(size) for size in buckets.split(",") if size.strip()],
            "step_s": median(steps_s) if steps_s else 0.0,
            **dict(zip(("forward_s", "backward_s", "comm_s", "overlap_s"), times_s, strict=True)),
            "steps": len(self.times),
            "ranks": int(log.get("world_size", 1)),
            "hook": str(log.get("comm_hook", "")),
        }


def _low_rank_bytes(parameter: Any) -> int:
    """Return what PowerSGD sends of one gradient; torch sends what is not twice as large as it is."""
    rows = parameter.shape[0] if parameter.dim() > 1 else 1
    numbers: int = parameter.numel()
    low = (rows + numbers // max(rows, 1)) * POWERSGD_RANK
    size: int = parameter.element_size()
    return (low if parameter.dim() > 1 and 2 * low < numbers else numbers) * size


def _meet() -> None:
    """Wait until all ranks have come to their end."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    arrived: Callable[[int], int] = lambda number: store.add("allranks/measured", number)  # noqa: E731
    arrived(1)
    end_s = time.monotonic() + END_S
    while arrived(0) < dist.get_world_size() and time.monotonic() < end_s:
        time.sleep(0.02)
    if dist.get_rank() == 0:  # the store may be its own
        time.sleep(0.2)


if __name__ == "__main__":
    main()
