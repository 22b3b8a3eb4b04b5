"""Drills: ranks that break by themselves at the same time are all named, and a rank that only lost another one never.

    make test-by-hand                                                       a few of each kind
    DRILLS=60 pytest -m by_hand tests/launch/test_independent_deaths.py     more of them

Each job is of real processes with real connections. Its plan is drawn from a seed: who dies when and how, what the
others do when they lose a connection, on one node or two, beside busy processes or not.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from allranks.model.finding import Verdict
from conftest import agents_in_background, free_port

NUM_DRILLS = int(os.environ.get("DRILLS", "10"))
SEED = int(os.environ.get("SEED", "1"))

DEATHS = ("SIGKILL", "SIGSEGV", "SIGTERM", "SIGABRT", "raise", "raise in handler", "sys.exit", "os._exit")
VICTIMS = (
    *("uncaught", "wrapped", "from none", "cleanup fails", "sys.exit", "os._exit", "flag, then exit", "log, then exit"),
    *(
        "flag, then raise",
        "finally barrier",
        "backward",
        "backward, sys.exit",
        "async wait",
        "object",
        "send",
        "destroy",
    ),
)

SCRIPT = """
import json, os, signal, sys, time, traceback
import torch
import torch.distributed as dist

plan = json.load(open("plan.json"))
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
ones = torch.ones(4)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for _ in range(3):
    model(ones).sum().backward()
    dist.all_reduce(ones)
dist.barrier()


class TrainerError(Exception):
    pass


def die(how):
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(60)
    if how == "raise":
        raise ValueError(f"bad batch on rank {rank}")
    if how == "raise in handler":
        try:
            {}["label"]
        except KeyError as exc:
            raise RuntimeError(f"no label in shard {rank}") from exc
    if how == "sys.exit":
        sys.exit(3 + rank)
    os._exit(3 + rank)


def train():
    while True:
        dist.all_reduce(ones)
        time.sleep(0.001)


def backward():
    while True:
        model(ones).sum().backward()
        time.sleep(0.001)


def caught(lose=train):
    try:
        lose()
    except Exception as exc:
        return exc


def suffer(how):
    if how == "uncaught":
        train()
    if how == "wrapped":
        try:
            train()
        except RuntimeError as exc:
            raise TrainerError("step 3 failed") from exc
    if how == "from none":
        try:
            train()
        except RuntimeError:
            raise TrainerError("step 3 failed") from None
    if how == "cleanup fails":
        try:
            train()
        except RuntimeError:
            {}["writer"]
    if how == "sys.exit":
        try:
            train()
        except RuntimeError:
            sys.exit(1)
    if how == "os._exit":
        try:
            train()
        except RuntimeError:
            os._exit(1)
    if how == "flag, then exit" and caught():
        sys.exit(1)
    if how == "log, then exit":
        try:
            train()
        except RuntimeError:
            traceback.print_exc()
        sys.exit(1)
    if how == "flag, then raise" and caught():
        raise TrainerError("training failed")
    if how == "finally barrier":
        try:
            train()
        finally:
            dist.barrier()
    if how == "backward":
        backward()
    if how == "backward, sys.exit":
        try:
            backward()
        except RuntimeError:
            sys.exit(1)
    if how == "async wait":
        while True:
            dist.all_reduce(ones, async_op=True).wait()
            time.sleep(0.001)
    if how == "object":
        while True:
            dist.all_gather_object([None] * dist.get_world_size(), {"rank": rank})
            time.sleep(0.001)
    if how == "send":
        other = plan["first"]
        dist.recv(ones, src=other)
    if how == "destroy":
        try:
            train()
        except RuntimeError:
            dist.destroy_process_group()
            raise


if rank == plan.get("leaves"):
    sys.exit(0)
death = plan["deaths"].get(str(rank))
if death is not None:
    time.sleep(death["after_s"])
    die(death["how"])
suffer(plan["victims"][str(rank)])
"""


def draw(seed: int, *, num_deaths: int, num_ranks: int, victims: tuple[str, ...] = VICTIMS) -> dict[str, Any]:
    """Return who dies when, and what the others do."""
    rng = random.Random(f"{num_deaths} deaths {seed}")
    dying = rng.sample(range(num_ranks), num_deaths)
    last_s = rng.choice([0.0, 0.02, 0.05, 0.1])
    # Who loses a connection must not have got the collective that it is in from one that goes on with another one.
    alike = rng.choice(victims)
    others = [rank for rank in range(num_ranks) if rank not in dying]
    return {
        "seed": seed,
        "deaths": {
            str(rank): {"how": rng.choice(DEATHS), "after_s": 0.5 + last_s * at} for at, rank in enumerate(dying)
        },
        "first": dying[0],
        "victims": {str(rank): rng.choice([alike, *_alternatives(alike)]) for rank in others},
        "nodes": 2 if num_ranks % 2 == 0 and rng.random() < 0.5 else 1,
        "busy": rng.choice([0, 0, 4]),
    }


def _alternatives(how: str) -> list[str]:
    """Other ways to take the loss of a connection in the same collective."""
    alone = ("backward", "backward, sys.exit"), ("async wait",), ("object",), ("send",)
    own = next((each for each in alone if how in each), None)
    return list(own or [each for each in VICTIMS if not any(each in others for others in alone)])


@contextmanager
def busy(num: int) -> Iterator[None]:
    """Processes that take all the time that they get."""
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for each in load:
            each.kill()
            each.wait()


def run(path: Path, plan: Mapping[str, Any], num_ranks: int) -> tuple[Verdict, str]:
    """Run the job of a plan; return its verdict, and what the leader printed."""
    path.mkdir(parents=True)
    (path / "train.py").write_text(SCRIPT)
    (path / "plan.json").write_text(json.dumps(plan))
    num_nodes, endpoint = plan["nodes"], f"127.0.0.1:{free_port()}"
    with agents_in_background() as begin, busy(plan["busy"]):
        agents = [
            begin(
                path, "--ignore", "AR011", "--nproc-per-node", num_ranks // num_nodes, "--nnodes", num_nodes,
                "--node-rank", node, "--rdzv-id", "job", "--rdzv-endpoint", endpoint, "train.py",
                SLURMD_NODENAME=f"n{node}",
            )
            for node in range(num_nodes)
        ]  # fmt: skip
        _, said = agents[0].communicate(timeout=120)
        for agent in agents[1:]:
            agent.communicate(timeout=30)
    verdict = Verdict.from_json((path / "runs/job/attempt_0/verdict.json").read_bytes())
    return verdict, said


def named(verdict: Verdict) -> list[int]:
    """Return all ranks that a verdict names, each as often as it does."""
    return sorted(rank for finding in verdict.findings for rank in finding.ranks)


@pytest.mark.torch
@pytest.mark.by_hand
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("num_deaths", "num_ranks"), [(2, 4), (1, 6)], ids=["two deaths", "five victims"])
def test_all_that_broke_by_themselves_are_named_and_no_victim(tmp_path: Path, num_deaths: int, num_ranks: int) -> None:
    wrong = []
    for seed in range(SEED, SEED + NUM_DRILLS):
        plan = draw(seed, num_deaths=num_deaths, num_ranks=num_ranks)
        verdict, said = run(tmp_path / str(seed), plan, num_ranks)
        is_right = named(verdict) == sorted(map(int, plan["deaths"]))
        print(f"{'right' if is_right else 'WRONG'} {json.dumps(plan)}: {named(verdict)}", flush=True)
        if not is_right:
            wrong.append(seed)
            print(said, flush=True)
    assert not wrong


@pytest.mark.torch
@pytest.mark.by_hand
@pytest.mark.timeout(3600)
def test_a_rank_that_ends_with_0_while_others_enter_a_collective_is_named(tmp_path: Path) -> None:
    wrong = []
    for seed in range(SEED, SEED + NUM_DRILLS):
        plan = draw(seed, num_deaths=1, num_ranks=4, victims=("uncaught", "wrapped", "sys.exit", "object", "backward"))
        plan = plan | {"leaves": plan["first"], "deaths": {}}
        verdict, said = run(tmp_path / str(seed), plan, 4)
        is_right = plan["leaves"] in named(verdict)
        print(f"{'right' if is_right else 'WRONG'} {json.dumps(plan)}: {named(verdict)}", flush=True)
        if not is_right:
            wrong.append(seed)
            print(said, flush=True)
    assert not wrong
