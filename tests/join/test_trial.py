"""Groups that live for one measurement, for `check --deep` and `bench`: real processes, real Gloo."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import allranks.join
from allranks.join.collectives import list_cases
from allranks.join.trial import find_failure, name_ranks
from conftest import clean_env
from forked import ForkedScript

pytestmark = pytest.mark.torch

SCRIPT = Path(allranks.join.__path__[0]) / "trial.py"
MIB = 1 << 20
IMPORT_S = 120.0


@pytest.fixture
def port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(  # type: ignore[no-untyped-def]
    *work: dict[str, Any],
    start_s: float = IMPORT_S,
    group_s: float = 60.0,
    timeout_s: float = 30.0,
    has_torch: bool = True,
    **env: str,
):
    times = {"start_s": start_s, "group_s": group_s, "timeout_s": timeout_s}
    order, env = json.dumps({"work": work, **times}), clean_env(os.environ, **env)
    if has_torch:
        return ForkedScript(Path.cwd(), SCRIPT, order, env=env, has_pipe=True, start_new_session=True)
    return subprocess.Popen(
        [sys.executable, SCRIPT, order],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def reduce(size_bytes: int) -> dict[str, Any]:
    return {"collective": "all_reduce", "size_bytes": size_bytes, "in_flight": 1}


def part(
    rank: int, *, port: int, step: int = 0, names: tuple[str, ...] = ("n1", "n2"), interface: str = "lo", **more: Any
):  # type: ignore[no-untyped-def]
    return {
        "step": step, "round": step, "backend": "gloo", "rank": rank, "names": names, "address": "127.0.0.1",
        "port": port, "interface": interface, "cases": [reduce(MIB)], "budget_s": 1.0, "repeat": [2, 2], **more,
    }  # fmt: skip


def said_by(process: ForkedScript | subprocess.Popen[str]) -> list[dict[str, Any]]:
    assert process.stdout is not None
    with process:
        lines = [json.loads(line) for line in process.stdout]
    assert process.returncode == 0
    return lines


def test_two_ends_reduce_in_two_rounds_and_rank_0_tells_the_times(port: int) -> None:
    ends = [start(*(part(rank, port=port, step=step) for step in range(2))) for rank in range(2)]
    first, second = map(said_by, ends)
    ok = [{"round": step, "backend": "gloo", "status": "ok", "what": ""} for step in range(2)]
    assert second == ok
    assert [line for line in first if "row" not in line] == ok
    rows = [line["row"] for line in first if "row" in line]
    assert [(row["size_bytes"], row["count"], row["repetitions"], row["wrong"]) for row in rows] == [
        (MIB, MIB // 4, 2, 0)
    ] * 2
    assert all(0 < row["best_s"] <= row["time_s"] <= row["p95_s"] < 10 for row in rows)


def test_every_collective_of_three_ranks_gives_what_it_should(port: int) -> None:
    cases = [case | {"size_bytes": 120_000} for case in list_cases(bucket_sizes=[4], sizes=[4])]
    work = {"names": ("n1", "n2", "n3"), "cases": [*cases, reduce(2)], "budget_s": 60.0}
    ranks = [start(part(rank, port=port, **work)) for rank in range(3)]
    said, *others = map(said_by, ranks)
    assert [line["what"] for lines in (said[-1:], *others) for line in lines] == [""] * 3
    rows = [line["row"] for line in said if "row" in line]
    assert [(row["collective"], row["in_flight"], row["size_bytes"]) for row in rows] == [
        (case["collective"], case["in_flight"], 120_000 if case["collective"] != "barrier" else 0) for case in cases
    ]
    assert [row["wrong"] for row in rows] == [0] * 7 + [None]
    assert [line["why"] for line in said if "skipped" in line] == ["size_bytes = 2: expected at least 4, for 3 ranks"]


def test_a_rank_with_another_order_is_named_and_nobody_hangs(port: int) -> None:
    names = ("n1", "n2", "n3")
    ranks = [start(part(rank, port=port, names=names, cases=[reduce(MIB << (rank == 2))])) for rank in range(3)]
    said = [said_by(process) for process in ranks]
    assert (
        said
        == [[{"round": 0, "backend": "gloo", "status": "failed", "what": "n3: other ranks, cases or times than n1"}]]
        * 3
    )


def test_a_rank_that_dies_is_named_by_the_others(port: int) -> None:
    names = ("n1", "n2", "n3")
    many = {"names": names, "cases": [reduce(MIB)] * 300, "budget_s": 600.0, "repeat": [1, 1]}
    # The group must form, and each collective end, within timeout_s, and rank 0 waits as long for the one that died.
    ranks = [start(part(rank, port=port, **many), timeout_s=10.0) for rank in range(3)]
    assert ranks[0].stdout is not None
    assert "row" in json.loads(ranks[0].stdout.readline())
    (child,) = Path(f"/proc/{ranks[1].pid}/task/{ranks[1].pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    ends = [said_by(process)[-1] for process in ranks]
    assert [end["status"] for end in ends] == ["failed"] * 3
    assert ends[1]["what"] == "the process of the group crashed (exit -9)"
    assert ends[0]["what"].startswith("n2 did not finish all_reduce of 1 MiB; n1")
    assert ends[0]["what"] == ends[2]["what"]
    assert "pair.cc" not in ends[0]["what"]


@pytest.mark.parametrize(
    ("said", "failure"),
    [
        ({0: {}, 1: {}, 2: {}}, ""),
        ({0: {}, 2: {"error": "reset"}}, "b (rank 1) did not finish it; b (rank 2): reset"),
        ({0: {"error": "late"}, 1: {"error": "late"}, 2: {}}, "it: a, b (rank 1): late"),
        ({}, "a, b (rank 1), b (rank 2) did not finish it"),
    ],
    ids=["all did", "missing and failed", "failed alike", "nobody"],
)
def test_who_failed(said: dict[int, dict[str, Any]], failure: str) -> None:
    assert find_failure(["a", "b", "b"], "it", said) == failure
    assert name_ranks(["a", "b"], [1, 0]) == "b, a"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_partner_that_never_comes_is_said_at_the_deadline(port: int, rank: int) -> None:
    began_s = time.monotonic()
    (line,) = said_by(start(part(rank, port=port, names=("n9", "n9") if rank else ("n1", "n9")), start_s=6.0))
    assert time.monotonic() - began_s < IMPORT_S
    assert line["status"] == "failed"
    assert line["what"].startswith(
        f"no store of n9 (rank 0) at 127.0.0.1:{port}: "
        if rank
        else f"n9 did not connect to the store at 127.0.0.1:{port}"
    )


@pytest.mark.parametrize(
    ("group_s", "timeout_s", "what"),
    [
        (5.0, 90.0, "not finished within 5 s after all had joined"),
        (
            90.0,
            5.0,
            "n1, which holds the store, does not answer after init_process_group: "
            "wait timeout after 5000ms, keys: /gloo0/0//cpu//0/0",
        ),
    ],
    ids=["killed", "by its timeout"],
)
def test_a_partner_that_stops_half_way(port: int, group_s: float, timeout_s: float, what: str) -> None:
    # It opens the store, says that it is here, and nothing more.
    code = (
        "import sys, time; from torch.distributed import PrefixStore, TCPStore\n"
        f"s = PrefixStore('gloo0', TCPStore('127.0.0.1', {port}, is_master=True, wait_for_workers=False))\n"
        "s.set('here/0', ''); s.set('go', ''); time.sleep(300)"
    )
    partner = subprocess.Popen([sys.executable, "-c", code], env=clean_env(os.environ))
    try:
        (line,) = said_by(start(part(1, port=port), group_s=group_s, timeout_s=timeout_s))
    finally:
        partner.send_signal(signal.SIGKILL)
        partner.wait()
    assert line["status"] == "failed"
    assert line["what"] == what


def test_an_interface_that_is_not_there_is_said(port: int) -> None:
    ends = [start(part(rank, port=port, interface="nope0")) for rank in range(2)]
    for process in ends:
        (line,) = said_by(process)
        assert line["status"] == "failed"
        assert line["what"] == "init_process_group: n1, n2: ifa != nullptr. Unable to find address for: nope0"


def test_a_port_in_use_says_nothing_of_the_pair(port: int) -> None:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", port))
        listener.listen()
        (line,) = said_by(start(part(0, port=port)))
    assert (line["status"], line["what"]) == ("unknown", f"port {port} is in use here")


def test_without_torch_it_says_so(port: int, tmp_path: Path) -> None:
    words = {
        "ModuleNotFoundError('No module named torch', name='torch')": "torch is not installed",
        "OSError('libcudart.so.12: no such file')": "torch cannot be imported: libcudart.so.12: no such file",
    }
    for number, (error, told) in enumerate(words.items()):
        path = tmp_path / str(number)  # of its own: two files of one second and size are one to Python's cache
        path.mkdir()
        (path / "torch.py").write_text(f"raise {error}\n")
        assert said_by(start(part(0, port=port), has_torch=False, PYTHONPATH=str(path))) == [{"no_torch": told}]
