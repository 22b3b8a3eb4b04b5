"""`allranks bench` on a real SLURM: what was planted in the network is named, and busy machines are not blamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from allranks.comm.bench_table import from_json
from allranks.lab.hosts import LINK_GBIT_S, shape
from conftest import clean_env

from .conftest import SIX_NODE, TestLab
from .test_check import on

pytestmark = pytest.mark.lab

BENCH = (sys.executable, "-m", "allranks", "bench", "--cluster", str(SIX_NODE), "--timeout", "60", "--json")
TENTH = ("root handle 1: htb default 10", "parent 1: classid 1:10 htb rate 1gbit burst 128kb",
         "parent 1: classid 1:20 htb rate 100mbit burst 16kb",
         "parent 1: protocol ip u32 match ip dst 192.168.20.17/32 flowid 1:20")  # fmt: skip


@contextmanager
def slow_link_to_node02(lab: TestLab) -> Iterator[None]:
    """What node01 sends to node02 has a tenth of the link."""
    try:
        for kind, words in zip(("qdisc replace", "class add", "class add", "filter add"), TENTH, strict=True):
            lab.on("node01", "tc", *kind.split(), "dev", "ens1f1", *words.split())
        yield
    finally:
        assert shape(lab.lab.find_init("node01"), "ens1f1", LINK_GBIT_S)


@contextmanager
def busy_cores() -> Iterator[None]:
    with ExitStack() as left:
        for _ in os.sched_getaffinity(0):
            spinner = left.enter_context(
                subprocess.Popen([sys.executable, "-c", "while True: pass"], env=clean_env({}))
            )
            left.callback(spinner.kill)
        yield


def test_a_slow_link_a_slow_node_and_a_lossy_port_are_named_and_no_other(six_nodes: TestLab, tmp_path: Path) -> None:
    with slow_link_to_node02(six_nodes):
        try:
            six_nodes.run("inject", "slow-link", "--on", "node03")
            six_nodes.run("inject", "packet-loss-2", "--on", "node05")
            done = on(six_nodes, "master-node", *BENCH, "--nodes", "6", "--network-only", cwd=tmp_path)
        finally:
            six_nodes.run("heal")
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert sorted((each["cause"], each["node"]) for each in found["findings"]) == [
        ("AR212 packet-loss", "node05"), ("AR213 slow-link", "node01 -> node02"), ("AR213 slow-link", "node03"),
    ]  # fmt: skip
    table = from_json((tmp_path / "runs/bench.json").read_bytes())
    assert not isinstance(table, str)
    (planted,) = [pair for pair in table.pairs if (pair.source, pair.target) == ("node01", "node02")]
    assert 80 < (planted.mbit_s or 0) < 110


def test_a_healthy_network_with_busy_cores_is_not_blamed(six_nodes: TestLab, tmp_path: Path) -> None:
    with busy_cores():
        done = on(six_nodes, "master-node", "salloc", "--quiet", "--nodes=6", *BENCH, "--sizes", "64K", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["findings"], found["problem"]) == ([], "")
    assert all(pair["mbit_s"] for pair in found["table"]["pairs"])
