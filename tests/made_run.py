"""A run directory as a job leaves it, of any size: what the reports of the tests are made from."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import msgspec

from allranks.model.beat import InterfaceSeen
from allranks.model.finding import Confidence, Evidence, Finding, Severity, Verdict
from allranks.model.job_status import JobStatus, NodeRow, write_status
from allranks.model.ledger import Category, Chronic, Ledger, LostTime, RankLedger, RestartCost
from allranks.model.pair import PairResult
from allranks.model.time_book import BookRow, LaneState, RankBook, TimeBook, pack_book, pack_rows

BEGUN_S = 1795858874.0
HANG = Finding(
    cause="AR420 hang",
    severity=Severity.FAIL,
    confidence=Confidence.CERTAIN,
    node="node03",
    ranks=(3,),
    message="rank 3 never called all_reduce number 1841 of the world group; 5 ranks waited 600 s for it",
    evidence=(Evidence(seen="rank 3 is in evaluate.py:88 in run", source="py-spy"),),
    fix="let all ranks evaluate, or call dist.barrier() with a longer timeout around it",
    victims=(0, 1, 2, 4, 5),
)
STACK = """Process {pid}: state S, 0.{rank}2 cores

Thread {pid} (idle): "MainThread"
    {last}
    train (train.py:141)
    <module> (train.py:190)
"""


def name_node(index: int) -> str:
    return f"node{index:02}" if index < 100 else f"node{index:03}"


def make_run(
    root: Path,
    *,
    num_nodes: int = 6,
    per_node: int = 1,
    length_s: float = 7200.0,
    verdict: Verdict | None = None,
    num_values: int = 10_000,
) -> Path:
    """Write the files of a run below `root`, and return its directory."""
    run, nodes, chance = root / "4711", [name_node(index) for index in range(num_nodes)], random.Random(7)
    attempt, num_ranks = run / "attempt_0", num_nodes * per_node
    verdict = verdict or Verdict(job="4711", attempt=0, exit_code=0)
    attempt.mkdir(parents=True)
    for index, node in enumerate(nodes):
        ranks = range(index * per_node, (index + 1) * per_node)
        (attempt / node).mkdir()
        (attempt / node / "book.bin").write_bytes(pack_book(make_book(ranks, length_s, chance)))
        for rank in ranks:
            (attempt / node / f"rank_{rank}.out").write_text(
                f"step 1839 loss 2.31\nstep 1840 loss 2.30 of rank {rank}\n"
            )
            if verdict.exit_code:
                last = (
                    "run (evaluate.py:88)"
                    if rank in HANG.ranks
                    else "all_reduce (torch/distributed/distributed_c10d.py:2810)"
                )
                stack = STACK.format(pid=4000 + rank, rank=rank, last=last)
                (attempt / node / f"rank_{rank}.stack.txt").write_text(stack)
        (attempt / node / "env.json").write_text(json.dumps(make_settings(num_ranks, index)))
    events: list[dict[str, Any]] = [
        {
            "time_s": BEGUN_S,
            "event": "started",
            "generation": 0,
            "members": nodes,
            "max_restarts": 3,
            "job": "4711",
            "command": ["/usr/bin/python3", "train.py", "--lr", "1e-4"],
            "cwd": "/home/ada/gpt",
            "pid": 2351,
        },
        {
            "time_s": BEGUN_S + 3000,
            "event": "verdict",
            "generation": 0,
            "cause": "AR407 dead-rank",
            "node": nodes[1],
            "ranks": [1],
            "message": "killed by SIGKILL",
        },
        {
            "time_s": BEGUN_S + 3002,
            "event": "restarting",
            "generation": 1,
            "lost_s": 312.0,
            "is_tracked": True,
            "checkpoint": 700,
        },
        {
            "time_s": BEGUN_S + length_s,
            "event": "ended",
            "exit_code": verdict.exit_code,
            "leader": nodes[0],
            "is_cut_off": False,
        },
    ]
    events[3:3] = [
        {"time_s": BEGUN_S + 360 * number, "event": "checkpoint", "step": 100 * number, "write_s": 2.5 + number / 10}
        for number in range(9, 19)
    ]
    (attempt / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (attempt / "curves.jsonl").write_bytes(make_values(num_values, chance))
    (attempt / "verdict.json").write_bytes(verdict.to_json())
    (attempt / "roll_call.json").write_bytes(msgspec.json.encode(make_roll_call(nodes, per_node, chance)))
    ledger = make_ledger(num_ranks, per_node, length_s)
    (run / "goodput.json").write_bytes(msgspec.json.encode(ledger))
    (run / "status.json").write_bytes(write_status(make_status(nodes, per_node, length_s, ledger)))
    (run / "checkpoints").mkdir()
    return run


def make_book(ranks: range, length_s: float, chance: random.Random) -> TimeBook:
    """Two generations: the second one begins at 3,010 s."""
    column_s = 0.5 * 2 ** doublings_of(length_s / 1200)
    columns = int(length_s / column_s)
    restart = min(columns - 40, int(3000 / column_s))
    accounts = []
    for rank in ranks:
        is_slow = rank % 8 == 5
        weights = (2, 15, 83) if is_slow else (30, 1, 69)
        states = (LaneState.BLOCKED, LaneState.DATA, LaneState.BACKWARD)
        lane = bytearray([LaneState.START] * 12 + chance.choices(states, weights, k=columns - 12))
        for column in range(83, columns - 3, 83):
            lane[column : column + 3] = bytes([LaneState.EVAL if rank == 0 else LaneState.BLOCKED] * 3)
            lane[column + 20] = LaneState.SAVE
        lane[restart : restart + 2] = bytes([LaneState.GONE if rank == 1 else LaneState.BLOCKED] * 2)
        lane[restart + 2 : restart + 10] = bytes([LaneState.START] * 8)
        for generation, begin, end in ((0, 0, restart), (1, restart + 2, columns)):
            lane_of = bytes(begin) + bytes(lane[begin:end])
            rows = make_rows((end - begin) * column_s, rank % 8)
            accounts.append(RankBook(rank, generation, int(begin * column_s * 1e6), lane_of, pack_rows(rows)))
    return TimeBook(BEGUN_S, int(length_s * 1e6), doublings_of(length_s / 1200), tuple(accounts))


def doublings_of(column_s: float) -> int:
    doublings = 0
    while 0.5 * 2**doublings < column_s:
        doublings += 1
    return doublings


@functools.cache
def make_rows(length_s: float, seed: int) -> list[BookRow]:
    chance = random.Random(seed)
    rows, totals, steps, passed_s = [], [0] * 7, 0, 0.0
    while passed_s < length_s:
        span_s = 60.0
        passed_s += span_s
        shares = [0.0, 0.30, 0.5, 0.02, 0.0, 0.01, 0.17] if rows else [0.5, 0.2, 0.2, 0.0, 0.0, 0.0, 0.1]
        slow = 1 + 0.1 * chance.random() + (0.5 if len(rows) in (17, 18) else 0)
        parts = [int(1e6 * span_s * share) for share in shares]
        parts[6] = int(parts[6] * slow)
        parts[1] = max(0, int(span_s * 1e6) - sum(parts) + parts[1])
        totals = [total + part for total, part in zip(totals, parts, strict=True)]
        steps += int(span_s * 0.26 / slow)
        rows.append(BookRow(tuple(totals), steps))  # type: ignore[arg-type]
    return rows


def make_values(num_values: int, chance: random.Random) -> bytes:
    """Values of `loss` and `lr`; step 4,000 has a peak."""
    lines = []
    for step in range(1, num_values + 1):
        loss = 2.0 + 8.0 / step**0.5 + 0.1 * chance.random() + (5.0 if step == 4000 else 0.0)
        values = {"loss": None if step == 77 else round(loss, 4), "lr": 1e-4 * min(1.0, step / 1000)}
        lines.append(json.dumps({"step": step, "time_s": BEGUN_S + 0.7 * step, "values": values}))
    return "\n".join(lines).encode()


def make_settings(num_ranks: int, index: int) -> list[dict[str, str]]:
    return [
        {"name": "WORLD_SIZE", "value": str(num_ranks), "reason": f"{num_ranks} ranks", "source": "allranks"},
        {"name": "NODE_RANK", "value": str(index), "reason": "index of this node", "source": "allranks"},
        {
            "name": "GLOO_SOCKET_IFNAME",
            "value": "ens1f1",
            "reason": "only interface up on all nodes",
            "source": "cluster.toml:12",
        },
        {
            "name": "WANDB_API_KEY",
            "value": "0123456789abcdef0123456789abcdef01234567",
            "reason": "given",
            "source": "--env",
        },
    ]


def make_roll_call(nodes: list[str], per_node: int, chance: random.Random) -> dict[str, Any]:
    cards = {
        str(index): {
            "host": node,
            "num_workers": per_node,
            "num_gpus": per_node if per_node > 1 else 0,
            "data_interface": "ens1f1",
            "facts": {
                "kernel": "6.1.0-28-amd64",
                "allranks_version": "0.1.0",
                "python_version": "3.11.7",
                "num_cpus": 64,
                "packages": {"torch": "2.13.0", "numpy": "2.4.6" if index != 4 else "2.3.1"},
                "limits": {"memlock_bytes": 8388608 if index != 2 else 65536},
                "environment": {"NCCL_DEBUG": "INFO"} if index == 4 else {},
                "interfaces": [{"name": "ens1f1", "mtu": 1500 if index == 1 else 9000, "speed_mbit_s": 25000}],
            },
        }
        for index, node in enumerate(nodes)
    }
    count = len(nodes)
    pairs = [(source, target) for source in range(count) for target in range(count) if source != target]
    if count > 32:
        pairs = [(source, target) for source, target in pairs if (target - source) % count in (1, 2, 4, 8, 16, 32)]
    results = [
        PairResult(
            source=source,
            target=target,
            num_open=8,
            large_sent=49152,
            large_back=49152,
            datagrams_sent=40,
            large_s=0.001,
            rtt_s=2e-5 * (1 + chance.random()) * (6 if 2 in (source, target) else 1),
            datagrams_lost=3 if (source, target) == (2, 4) else 0,
            problem="no answer in 1.0 s" if (source, target) == (3, 5) else None,
        )
        for source, target in pairs
    ]
    return {"cards": cards, "results": results}


def make_ledger(num_ranks: int, per_node: int, length_s: float) -> Ledger:
    whole_s = num_ranks * length_s
    shares = {
        Category.STEP: 0.712,
        Category.TRANSFER: 0.098,
        Category.WAIT: 0.081,
        Category.DATA: 0.028,
        Category.EVAL: 0.021,
        Category.SAVE: 0.008,
        Category.START: 0.013,
        Category.RESTART: 0.011,
        Category.REDO: 0.0244,
        Category.UNKNOWN: 0.0036,
    }
    ranks = [
        RankLedger(
            rank=rank,
            node=name_node(rank // per_node),
            seconds={key: length_s * share for key, share in shares.items()},
            waited_for_s=0.4 * length_s if rank == 5 else 1.0 * (rank % 7),
            steps=1840,
        )
        for rank in range(min(num_ranks, 64))
    ]
    return Ledger(
        begun_s=BEGUN_S,
        until_s=BEGUN_S + length_s,
        rank_s=whole_s,
        steps=1840,
        is_steps_seen=True,
        is_estimated=True,
        seconds={key: whole_s * share for key, share in shares.items()},
        losses=(
            LostTime(
                category=Category.WAIT,
                rank_s=0.081 * whole_s,
                ranks=(5,),
                nodes=(name_node(5 // per_node),),
                is_estimated=True,
            ),
            LostTime(category=Category.DATA, rank_s=0.028 * whole_s, ranks=(5, 3), nodes=(name_node(5 // per_node),)),
            LostTime(category=Category.EVAL, rank_s=0.021 * whole_s, ranks=(0,), nodes=("node00",)),
        ),
        ranks=tuple(sorted(ranks, key=lambda row: -row.waited_for_s)),
        restarts=(
            RestartCost(
                generation=1,
                cause="AR407 dead-rank",
                node="node01",
                at_s=BEGUN_S + 3000,
                restart_s=68.0,
                redo_s=312.0,
                redo_steps=81,
            ),
        ),
        chronic=(Chronic(rank=5, node=name_node(5 // per_node), share=0.07, late_s=0.012, since_step=240),),
        num_checkpoints=18,
        save_s=57.0,
    )


def make_status(nodes: list[str], per_node: int, length_s: float, ledger: Ledger) -> JobStatus:
    rows = tuple(
        NodeRow(
            name=node,
            num_ranks=per_node,
            segments=1_841_000 + index,
            retransmits=index * 37,
            shm_used=0.04,
            silent_s=14.0 if index == 2 else 0.2,
            is_lost=index == 1,
            interfaces=(InterfaceSeen(name="ens1f1", sent_mbit_s=412.0, received_mbit_s=409.5, busy_share=0.0),),
        )
        for index, node in enumerate(nodes[:96])
    )
    return JobStatus(
        job="4711",
        written_s=BEGUN_S + length_s,
        started_s=BEGUN_S,
        phase="over",
        num_ranks=len(nodes) * per_node,
        num_nodes=len(nodes),
        step=1840,
        total_steps=10_000,
        steps_per_s=0.26,
        rates=tuple(0.2 + number % 7 / 100 for number in range(120)),
        checkpoint=1800,
        checkpoint_s=BEGUN_S + length_s - 180,
        max_restarts=3,
        num_restarts=1,
        nodes=rows,
        ledger=ledger,
        exit_code=0,
    )
