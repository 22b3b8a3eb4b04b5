"""What is a rank of a drilled training ordered to do wrong, and when? Its orders, and the log of its steps.

    orders = Orders(Path("drill"), rank=3)
    orders.obey(step)                   # before each step: does what it is ordered to, or nothing
    metrics = orders.reduce(loss)       # the collective in which ranks may do different things
    orders.write(step)                  # after each optimizer step
    if orders.is_last(): ...            # the same answer on all ranks

`order.json` says which rank does what at which step. A rank writes `struck_RANK.json` before it executes an order, so
that the time is known. An executed order is not repeated by a later start of the same rank, unless the order says
`again`. Uses torch and the standard library only.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import random
import resource
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

METRICS = 1000
"""Number of elements in the reduced tensor: enough that a wrong shape or dtype does not fit."""
BALLAST_BYTES = 32 << 20
BLOCKED_S = 3600.0
PAUSE_S = 0.02
"""Added to each step: six ranks share two cores, and the drill is not a benchmark."""


class Orders:
    """Orders and step log of one rank."""

    def __init__(
        self, directory: Path, *, rank: int, seed: int | None = None, weights: Sequence[torch.Tensor] = ()
    ) -> None:
        self._directory, self._weights = directory, weights
        self._rank = rank
        self._diary = os.open(directory / f"steps_{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._order: dict[str, Any] = {}
        self._order_mtime_ns = 0
        self._now, self._step, self._is_ending = "", 0, False
        self._mixed = None if seed is None else Mixture(seed, directory, rank)

    def obey(self, step: int) -> None:
        """Execute the order for this step; most orders never return."""
        time.sleep(PAUSE_S)
        self._step = step
        if self._mixed is not None:
            self._mixed.live(step)
        self._now = self._due(step)
        if self._now:
            self._do(self._now)

    def reduce(self, loss: torch.Tensor) -> float:
        """Return the mean of the loss over all ranks; an order may let this rank do something else."""
        metrics = torch.full((METRICS,), float(loss.detach()))
        # The order to end may come while some ranks have looked for it and others have not: its step may be over then.
        metrics[1] = float(self._should_end())
        match self._now:
            case "skip":
                return 0.0
            case "other-collective":
                dist.broadcast(metrics, src=0)
            case "other-shape":
                dist.all_reduce(torch.zeros(METRICS * 2))
            case "other-dtype":
                dist.all_reduce(metrics.double())
            case _:
                dist.all_reduce(metrics)
        mean: float = metrics[0].item() / dist.get_world_size()
        self._is_ending = metrics[1].item() > 0
        return mean

    def write(self, step: int) -> None:
        """Log that the step is done."""
        line = {
            "step": step,
            "time_s": time.time(),
            "attempt": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            "generation": int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
            "rank": self._rank,
            "world": dist.get_world_size(),
            "node": socket.gethostname(),
            "pid": os.getpid(),
        }
        os.write(self._diary, json.dumps(line).encode() + b"\n")

    def is_last(self) -> bool:
        """Whether the program ends after this step: a rank has seen the order to end before its `reduce`."""
        return self._is_ending

    def _should_end(self) -> bool:
        try:
            return self._step >= int(json.loads((self._directory / "stop.json").read_text())["step"])
        except FileNotFoundError:
            return False

    def _due(self, step: int) -> str:
        path = self._directory / "order.json"
        try:
            changed_ns = path.stat().st_mtime_ns
        except FileNotFoundError:
            return ""
        if changed_ns != self._order_mtime_ns:
            self._order, self._order_mtime_ns = json.loads(path.read_text()), changed_ns
        if self._order["rank"] != self._rank:
            return ""
        struck = self._directory / f"struck_{self._rank}.json"
        if self._order.get("again"):
            is_due = step >= self._order["step"]
        else:
            is_due = step == self._order["step"] and not struck.exists()
        if not is_due:
            return ""
        if not struck.exists():
            draft = struck.with_suffix(".draft")
            draft.write_text(json.dumps({"time_s": time.time(), "step": step}))
            draft.rename(struck)
        return str(self._order["do"])

    def _do(self, what: str) -> None:
        seconds = float(self._order.get("seconds", BLOCKED_S))
        match what:
            case "exit":
                os._exit(13)
            case "raise":
                raise ValueError("loss is not what it was")
            case "segfault":
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # 300 MB, in the job's working directory
                ctypes.string_at(0)
            case "allocate":
                ballast = []
                while True:
                    ballast.append(bytearray(os.urandom(1)) * BALLAST_BYTES)
            case "print":
                while True:
                    print(1000 * "x", flush=True)
            case "fill-tmpdir":
                with tempfile.TemporaryFile(buffering=0) as file:
                    while True:
                        file.write(bytes(1 << 16))
            case "hold-gil":
                sum(itertools.repeat(0))
            case "flip":
                self._weights[0].data.view(torch.int32).view(-1)[100] ^= 1 << 10
            case "err":
                self._weights[0].register_hook(with_wrong_bit)
            case "nan":
                make_nan_once(self._weights[0])
            case "evaluate":
                evaluate(seconds)
            case "late":
                time.sleep(seconds)


def with_wrong_bit(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient with another bit, as a device that computes wrongly has it."""
    wrong = gradient.clone()
    wrong.view(torch.int32).view(-1)[100] ^= 1 << 10
    return wrong


def make_nan_once(weight: torch.Tensor) -> None:
    """Make the next gradient of this weight NaN."""

    def ruin(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return torch.full_like(gradient, math.nan)

    handle = weight.register_hook(ruin)


def evaluate(seconds: float) -> None:
    """Do something else for a long time, like rank 0 when it evaluates alone."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(0.2)


class Mixture:
    """Irregularities of a healthy training: slow steps, pauses of one rank, long evaluations.

    They depend on the seed and the step only, so all ranks agree without communication. A rank that is busy for long
    writes this into `busy_RANK.jsonl`, with which reports of slow ranks are compared.
    """

    def __init__(self, seed: int, directory: Path, rank: int) -> None:
        self._seed = seed
        self._rank = rank
        self._diary = os.open(directory / f"busy_{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def live(self, step: int) -> None:
        """Do what the mixture has for this step."""
        chance = random.Random(f"{self._seed} {step}")
        kind, whom = chance.random(), chance.randrange(dist.get_world_size())
        long_s = chance.uniform(20.0, 50.0)
        if kind < 0.02:  # one rank is late
            if whom == self._rank:
                time.sleep(chance.uniform(0.1, 2.0))
        elif kind < 0.03:  # all are slow
            time.sleep(chance.uniform(0.2, 1.0))
        elif kind < 0.0308 and whom == self._rank:  # one evaluates
            began_s = time.time()
            evaluate(long_s)
            busy = {"rank": self._rank, "from_s": began_s, "to_s": time.time(), "step": step}
            os.write(self._diary, json.dumps(busy).encode() + b"\n")
