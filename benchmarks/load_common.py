"""How long do all ranks take to load the state that is common to them: each reads it, or rank 0 reads and sends it?

python benchmarks/load_common.py [--ranks 4] [--megabytes 256] [--rounds 7] [--server-mb-s 0]

Without --server-mb-s the file is in the page cache, as for the ranks of one node. With it, each rank stands for a node,
and all of them share a file server of that bandwidth: every block that a rank reads waits for its turn there.
"of it sent" is rank 0's broadcast without its reading. The group is Gloo over loopback. Both ways load the same
checkpoint in every round, in an order that changes; a round's time is that of its slowest rank. Ratios are to each rank
reading for itself, in the same round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from allranks.model.membership import Membership
from allranks.state.resumed.agree import Agreement
from allranks.state.saved import parts
from allranks.state.saved.checkpoint import Checkpointer


class SlowServer:
    """`os` for the module that reads parts: reads wait in one queue, as at a file server that all nodes share."""

    def __init__(self, free_at: Any, bytes_s: float) -> None:
        self._free_at, self._bytes_s = free_at, bytes_s

    def pread(self, *told: int) -> bytes:
        data = os.pread(*told)
        with self._free_at.get_lock():
            self._free_at.value = max(self._free_at.value, time.monotonic()) + len(data) / self._bytes_s
            ready_s = self._free_at.value
        time.sleep(max(0.0, ready_s - time.monotonic()))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def in_group(rank: int, told: argparse.Namespace, port: int, directory: str, free_at: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, told.ranks, False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=told.ranks, timeout=timedelta(seconds=300))
    if told.server_mb_s:
        parts.os = SlowServer(free_at, told.server_mb_s * 1e6)  # type: ignore[attr-defined, assignment]
    agreement = Agreement(Membership.spread(rank, told.ranks), device=torch.device("cpu"))
    sent_s: list[float] = []

    def give(tensors: Sequence[torch.Tensor]) -> None:
        began_s = time.perf_counter()
        agreement.give(tensors)
        sent_s.append(time.perf_counter() - began_s)

    ways = {"each reads": None, "one reads": give}
    times: dict[str, list[float]] = {way: [] for way in ways}
    chance = random.Random(0)
    with Checkpointer(directory, Membership.spread(rank, told.ranks), store=store, say=lambda _: None) as checkpoints:
        for _ in range(told.rounds + 1):
            for way in chance.sample(list(ways), len(ways)):
                dist.barrier()
                began_s = time.perf_counter()
                loaded = checkpoints.load(share=ways[way])
                took = torch.tensor(time.perf_counter() - began_s)
                assert loaded is not None
                assert float(loaded.common["0"][-1]) == 0.5
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times[way].append(float(took))
    if rank == 0:
        ratios = [one / each for one, each in zip(times["one reads"][1:], times["each reads"][1:], strict=True)]
        where = f"a server of {told.server_mb_s} MB/s" if told.server_mb_s else "the page cache"
        print(f"{told.ranks} ranks, {told.megabytes} MB from {where}, load {os.getloadavg()[0]:.1f}")
        for way, took in times.items():
            print(f"  {way:11} {statistics.median(took[1:]):7.2f} s ({min(took[1:]):.2f} to {max(took[1:]):.2f})")
        print(f"  of it sent  {statistics.median(sent_s[1:]):7.2f} s ({min(sent_s[1:]):.2f} to {max(sent_s[1:]):.2f})")
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"  ratio       {middle:7.2f}   (quartiles {low:.2f} to {high:.2f})")
    dist.destroy_process_group()


def save(directory: str, ranks: int, megabytes: int) -> None:
    """Many tensors of some megabytes each, and as many single numbers, as AdamW has them; other ranks have little."""
    state = {str(index): torch.full((megabytes * 10**6 // 64 // 4,), 0.5) for index in range(64)}
    state |= {f"step {index}": torch.tensor(float(index)) for index in range(64)}
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(_save, (ranks, server.port, directory, state), ranks, start_method="fork")


def _save(rank: int, ranks: int, port: int, directory: str, state: dict[str, torch.Tensor]) -> None:
    store = dist.TCPStore("127.0.0.1", port, ranks, False)
    with Checkpointer(directory, Membership.spread(rank, ranks), store=store) as checkpoints:
        checkpoints.save(1, state, wait=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--server-mb-s", type=int, default=0)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        save(directory, told.ranks, told.megabytes)
        assert (Path(directory) / "step_1").is_dir()
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        free_at = multiprocessing.get_context("fork").Value("d", 0.0)
        mp.start_processes(in_group, (told, server.port, directory, free_at), told.ranks, start_method="fork")


if __name__ == "__main__":
    main()
