"""What do the marks of the training thread cost, a step and a collective?

python benchmarks/marks_cost.py [--rounds 201] [--calls 500]

A process has a cell and the hook, as a worker has, and a Gloo group of its own. Functions that do nothing stand for
DataLoader, backward pass and optimizer, so that what is measured is the marks alone: those of a step with one batch,
one backward pass and one optimizer step; and those of a collective that blocks, inside of which torch waits for its
work. Processor time, since a mark never waits: rounds with and without marks alternate, in random order, and their
differences have a median and quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import allranks
from allranks.guard.inside.cell import Cell

SITE = Path(allranks.__file__).parent / "join" / "site"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--calls", type=int, default=500, help="of each kind, in a round")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        measure(arguments.rounds, arguments.calls, as_json=arguments.json)
        return
    cell = Cell.create()
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {
        **os.environ, "ALLRANKS_CELL_FD": str(cell.fd), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RANK": "0",
        "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo",
        "ALLRANKS_BEAT_S": "1000",
    }  # fmt: skip
    command = [sys.executable, __file__, "--inside", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=env, pass_fds=(cell.fd,), check=False).returncode)


def measure(num_rounds: int, num_calls: int, *, as_json: bool) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    marks = sys.modules["_allranks_inside.thread_marks"]
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    optimizer.step()

    owner = SimpleNamespace(fetch=lambda: None, backward=lambda: None, wait=lambda: None)
    plain = SimpleNamespace(**vars(owner))
    book = marks.book
    marks._mark(owner, "fetch", marks.DATA, leave=book.leave_batch)
    marks._mark(owner, "backward", marks.BACKWARD, enter=book.enter_backward, leave=book.leave_backward)
    marks._mark(owner, "wait", marks.BLOCKED)

    def step_with() -> None:
        owner.fetch()
        owner.backward()
        book.step_ended(optimizer, (), {})

    def step_without() -> None:
        plain.fetch()
        plain.backward()

    def collective_with() -> None:
        before = book.enter(marks.BLOCKED)
        try:
            owner.wait()
        finally:
            book.leave(before)

    def cost_us(do: Callable[[], object]) -> float:
        began_ns = time.thread_time_ns()  # a mark never waits
        for _ in range(num_calls):
            do()
        return (time.thread_time_ns() - began_ns) / 1000 / num_calls

    kinds = {"step": (step_with, step_without), "collective": (collective_with, lambda: plain.wait())}
    seen: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(num_rounds):
        for kind, ways in kinds.items():
            costs = {is_on: cost_us(ways[1 - is_on]) for is_on in random.sample((0, 1), 2)}
            seen[kind].append(costs[1] - costs[0])
    found = {kind: statistics.quantiles(costs) for kind, costs in seen.items()}
    assert book._steps > num_rounds * num_calls
    if as_json:
        print(json.dumps({kind: [round(cost, 3) for cost in costs] for kind, costs in found.items()}))
        return
    print(f"{num_rounds} rounds of {num_calls} calls, median (quartiles)")
    for kind, (low, middle, high) in found.items():
        print(f"  marks of a {kind:12} {middle:5.2f} us ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
