"""Does the program that times collectives do so with NCCL, and does it name a rank that dies? Two ranks, one GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import allranks.join
from allranks.join.collectives import list_cases
from conftest import free_port

from .conftest import Note
from .job import PATIENCE_S, is_rehearsal, suite_env

BACKEND = "gloo" if is_rehearsal() else "nccl"
TRIAL = Path(allranks.join.__path__[0]) / "trial.py"


def start(cases: list[dict[str, Any]], **more: Any) -> list[subprocess.Popen[str]]:
    """Start both ranks; each is a host of its own to NCCL, which refuses a GPU that two ranks of one host use."""
    port, ranks = free_port(), []
    for rank in range(2):
        work = {
            "step": 0, "round": 0, "backend": BACKEND, "rank": rank, "names": ["n1", "n2"], "address": "127.0.0.1",
            "port": port, "interface": "lo", "device": 0, "cases": cases, "budget_s": 15, **more,
        }  # fmt: skip
        times = {"start_s": PATIENCE_S, "group_s": PATIENCE_S, "timeout_s": 5}
        command = [sys.executable, str(TRIAL), json.dumps({"work": [work], **times})]
        env = suite_env(NCCL_HOSTID=f"host-{rank}")
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    return ranks


def said_by(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    assert process.stdout is not None
    with process:
        return [json.loads(line) for line in process.stdout]


@pytest.mark.rehearsable
def test_every_collective_is_timed_and_right(note: Note):
    """Expected: a row for each collective and size, #wrong 0; eight all-reduces in flight in one group end, too."""
    cases = list_cases(bucket_sizes=[1 << 19, 1 << 22], sizes=[1 << 20])
    said, other = map(said_by, start(cases))
    note("rows", json.dumps(said))
    assert (said[-1]["status"], other[-1]["status"]) == ("ok", "ok"), said[-1]
    rows = [line["row"] for line in said if "row" in line]
    assert [(row["collective"], row["in_flight"]) for row in rows] == [
        (case["collective"], case["in_flight"]) for case in cases
    ]
    assert [row["wrong"] for row in rows] == [0] * (len(cases) - 1) + [None]
    assert all(row["time_s"] > 0 for row in rows)


@pytest.mark.rehearsable
def test_a_rank_that_dies_is_named(note: Note):
    """Expected: the other rank says who is missing after 5 s, before NCCL would end it."""
    case = {"collective": "all_reduce", "size_bytes": 1 << 20, "in_flight": 1}
    ranks = start([case] * 300, repeat=[1, 1], budget_s=3 * PATIENCE_S)
    assert ranks[0].stdout is not None
    assert "row" in json.loads(ranks[0].stdout.readline())
    (child,) = Path(f"/proc/{ranks[1].pid}/task/{ranks[1].pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    said, lost = said_by(ranks[0])[-1], said_by(ranks[1])[-1]
    note("what the other rank says", said["what"])
    assert lost["what"] == "the process of the group crashed (exit -9)"
    assert said["what"].startswith("n2 did not finish all_reduce of 1 MiB")
