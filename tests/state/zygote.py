"""Trainers that start at once: torch is imported here once, and every trainer is a fork.

Reads one JSON line a trainer on stdin, answers with its pid. A trainer saves step after step; every tensor of step n
is full of n, so that whoever loads can tell a whole state from a mixture. After each save that has returned it writes
the step to its progress file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from allranks.model.membership import Membership
from allranks.state.saved.checkpoint import Checkpointer


def common_of(step: int, size: int) -> dict[str, Any]:
    """A state that is all of one step."""
    return {
        "step": step,
        "model": {f"layer {i}": torch.full((size, i + 1), float(step)) for i in range(5)},
        "optimizer": [{"exp_avg": torch.full((size * 3,), float(step))}, step],
    }


def is_of(step: int, common: Any) -> bool:
    """Whether all of it is of this step."""
    tensors = [*common["model"].values(), common["optimizer"][0]["exp_avg"]]
    return common["step"] == step == common["optimizer"][1] and all(bool((tensor == step).all()) for tensor in tensors)


def train(told: dict[str, Any]) -> None:
    rank, world_size = told["rank"], told["world_size"]
    store: Store | None = None
    if world_size > 1:
        server = TCPStore("127.0.0.1", told["port"], world_size, False, timeout=timedelta(seconds=20))
        store = PrefixStore(told["directory"], server)
    progress = Path(told["progress"])
    own = Membership.spread(rank, world_size)
    with Checkpointer(told["directory"], own, store=store, keep=told["keep"]) as made:
        for step in range(told["first"], told["first"] + told["steps"]):
            made.save(step, common_of(step, told["size"]), {"rank": rank, "step": step})
            fresh = Path(f"{progress}.new")
            fresh.write_text(str(step))
            fresh.rename(progress)
            time.sleep(told["pause_s"])
        if told["stays"]:
            signal.pause()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                train(json.loads(line))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
