"""`allranks bench`: who measures what, and who is named where it fails: pure, and on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import psutil
import pytest

from allranks.causes.book import find_cause
from allranks.causes.outcome import failed, warned
from allranks.cli.bench import _Run
from allranks.cli.main import cli
from allranks.comm.bench_table import BenchRow, from_json
from allranks.join.collectives import FORMATS
from allranks.launch.check.group_collectives import (
    Counters,
    GroupResult,
    RankReport,
    find_end_alone,
    find_problem,
    plan_group,
    works_of,
)
from allranks.launch.check.member_step import MemberAddress
from allranks.launch.check.network_streams import find_gaps, find_obstacles
from allranks.model.card import Card, Facts, Interface
from allranks.model.errors import UsageError
from cards import make_card
from conftest import clean_env, wait_until

ENDS = {
    name: MemberAddress(address=f"10.0.0.{i}", interface="eth0", num_gpus=2)
    for i, name in enumerate(("n1", "n2"), start=1)
}
ALONE = {"n1": MemberAddress(address="127.0.0.1", interface="lo")}
BASIC = {"wanted": "auto", "ranks_per_node": None, "sizes": None, "port": 29500, "budget_s": 5.0}


def test_each_gpu_has_a_rank_and_a_machine_without_gpus_has_two() -> None:
    order = plan_group(ENDS, **BASIC)  # type: ignore[arg-type]
    assert (order.backend, order.names) == ("nccl", ["n1", "n1", "n2", "n2"])
    order = plan_group(ENDS, **{**BASIC, "wanted": "gloo"})  # type: ignore[arg-type]
    assert order.names == ["n1", "n2"]
    assert plan_group(ALONE, **BASIC).names == ["n1", "n1"]  # type: ignore[arg-type]


def test_the_ranks_of_a_node_follow_each_other_and_have_a_gpu_each() -> None:
    order = plan_group(ENDS, **{**BASIC, "sizes": (4096,)})  # type: ignore[arg-type]
    works = [work for order_of_rank in works_of(order, "n2") for work in order_of_rank["work"]]
    assert [(work["rank"], work["device"], work["address"]) for work in works] == [
        (2, 0, "10.0.0.1"),
        (3, 1, "10.0.0.1"),
    ]
    assert {case["size_bytes"] for case in works[0]["cases"]} == {4096, 0}
    assert json.loads(json.dumps(works_of(order, "n2")))[0]["work"][0]["names"] == ["n1", "n1", "n2", "n2"]


@pytest.mark.parametrize(
    ("ends", "flags", "said"),
    [
        (ALONE, {"ranks_per_node": 1}, "--nproc-per-node 1: expected at least 2 ranks"),
        (ENDS, {"wanted": "nccl", "ranks_per_node": 4}, "4 ranks a node need as many GPUs, and n1 has 2"),
    ],
)
def test_a_size_that_cannot_be_is_refused(ends: dict[str, MemberAddress], flags: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan_group(ends, **{**BASIC, **flags})  # type: ignore[arg-type]


def test_the_rank_that_was_killed_is_named_and_not_those_that_lost_it() -> None:
    reports = [
        RankReport(node="n1", rank=0, status="failed", what="n2 did not finish all_reduce of 4096 B"),
        RankReport(node="n2", rank=1, status="failed", what="its process was killed by SIGKILL"),
        RankReport(node="n3", rank=2, status="failed", what="Connection closed by peer"),
    ]
    assert find_problem(reports, []) == "rank 1 (n2): its process was killed by SIGKILL"
    assert find_problem(reports[:1], ["n2"]) == "rank 0 (n1): n2 did not finish all_reduce of 4096 B"
    assert find_problem([RankReport(node="n1")], ["n2"]) == "n2 did not finish"
    assert find_problem([RankReport(node="n1")], []) == ""
    no_torch = RankReport(node="n3", rank=2, no_torch="torch is not installed")
    assert find_problem([*reports, no_torch], []) == "rank 2 (n3): torch is not installed"


def test_segments_that_were_sent_again_during_the_collectives_are_told_by_node() -> None:
    counters = {"n1": Counters(segments=100_000, retransmitted=4), "n2": Counters(segments=50_000, retransmitted=1_000)}
    assert GroupResult(counters=counters).describe_lost() == "segments sent again during the collectives: n2 2 %"
    assert GroupResult(counters={"n1": counters["n1"]}).describe_lost() == ""


def test_what_bench_measures_itself_is_no_obstacle() -> None:
    found = [
        outcome.to_finding(find_cause(cause), node="n1")
        for cause, outcome in {
            "AR210": failed(what="down"),
            "AR212": failed(percent=1, culprit="n1", peers="n2"),
            "AR213": failed(culprit="n1", mbit_s=1, usual_mbit_s=2),
            "AR205": warned(what="MTUs", wanted=1500),
        }.items()
    ]
    assert [each.cause for each in find_obstacles(found)] == ["AR210 link-down"]


def card(number: int, *, has_second: bool) -> Card:
    nics = [
        Interface(f"eth{i}", (f"10.0.{i}.{number}",), is_up=i == 0 or has_second, networks=(f"10.0.{i}.0/24",))
        for i in range(2)
    ]
    return make_card(number, facts=Facts(interfaces=tuple(nics)))


def test_an_interface_of_two_that_is_gone_is_said_by_name() -> None:
    (line,) = find_gaps([card(1, has_second=True), card(2, has_second=True), card(3, has_second=False)])
    assert line.startswith("node03 has no working interface in 10.0.1.0/24, and 2 of 3 nodes have one")
    assert find_gaps([card(1, has_second=True), card(2, has_second=True)]) == ()
    assert find_gaps([card(1, has_second=True), card(2, has_second=False)]) == ()


def test_one_machine_measures_over_loopback_at_a_free_port() -> None:
    ends, port = find_end_alone(make_card(1))
    assert ends == {"node01": MemberAddress(address="127.0.0.1", interface="lo")}
    assert port > 1023


# --- The command


def bench(*flags: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "allranks", "bench", *flags],
        cwd=cwd,
        env=clean_env(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--sizes", "3Q"), "'3Q': expected sizes from 4 bytes to 4G, for example 4K,1M,16M"),
        (("--plot", "no/such/plot.svg"), "--plot no/such/plot.svg: no such directory: no/such"),
        (("--network-only",), "--network-only: one node has no network to others"),
        (("--plot", "-", "--json"), "--plot - prints bars, and --json only JSON"),
    ],
)
def test_wrong_flags_are_refused(
    flags: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    with pytest.raises((UsageError, click.UsageError), match=re.escape(said)):
        cli.main(["bench", *flags], standalone_mode=False)


def test_bars_are_a_plot_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _Run(place=None, queue_s=1.0, as_json=False)
    row = BenchRow(collective="broadcast", size_bytes=1 << 20, count=1 << 18, root=0, time_s=0.01, p95_s=0.01, wrong=0)
    run.ends, run.group = {"n1": MemberAddress(address="127.0.0.1", interface="lo")}, GroupResult(rows=[row])
    assert run.finish(tmp_path, Path("-")) == 0
    assert re.search(r"^broadcast\n +1 MiB  [\u2588#]+ +0\.105 GB/s$", capsys.readouterr().out, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_a_table_that_cannot_be_written_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _Run(place=None, queue_s=1.0, as_json=True)
    row = BenchRow(collective="broadcast", size_bytes=4, count=1, root=0, time_s=0.01, p95_s=0.01, wrong=0)
    run.ends, run.group = {"n1": MemberAddress(address="127.0.0.1", interface="lo")}, GroupResult(rows=[row])
    (tmp_path / "bench.json").mkdir()
    assert run.finish(tmp_path, None) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["problem"] == f"{tmp_path}/bench.json cannot be written: is a directory"
    assert err == f"allranks: {tmp_path}/bench.json cannot be written: is a directory\n"
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.torch
def test_ranks_of_one_machine_are_measured_and_the_table_is_kept(tmp_path: Path) -> None:
    process = bench("--nproc-per-node", "2", "--sizes", "4K", "--plot", "bench.svg", "--json", cwd=tmp_path)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    found = json.loads(out)
    table = from_json((tmp_path / "runs/bench.json").read_bytes())
    assert not isinstance(table, str)
    assert {row.collective for row in table.rows} >= {"all_reduce", "all_gather", "barrier"}
    formats = [row for row in table.rows if row.collective in FORMATS]
    assert [(row.collective, row.size_bytes >> 20) for row in formats] == [
        ("pack_bf16", 4), ("pack_int8", 4), ("reduce_powersgd", 4), ("reduce_powersgd", 16),
    ]  # fmt: skip
    assert all(row.time_s > 0 and row.wrong is None for row in formats)
    assert {row.wrong for row in table.rows if row.size_bytes and row not in formats} == {0}
    assert (found["problem"], found["exit_code"], found["table"]["ranks"]) == ("", 0, 2)
    assert (tmp_path / "bench.svg").read_text().startswith("<svg")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bench.json", "bench.svg", "runs"]


@pytest.mark.torch
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "a rank is killed"])
def test_what_ends_it_is_one_line_and_leaves_nothing(signum: signal.Signals, tmp_path: Path) -> None:
    process = bench("--nproc-per-node", "2", "--sizes", "32M", cwd=tmp_path)

    def ranks() -> list[int]:
        """The processes of this bench's ranks: each has a parent that imported torch."""
        own = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if "trial.py" in " ".join(each.cmdline()) and each.cwd() == str(tmp_path):
                    own.append(each.pid)
        return own

    try:
        wait_until(lambda: len(ranks()) >= 4, "two ranks and their parents")
        os.kill(process.pid if signum is signal.SIGINT else max(ranks()), signum)
        _, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == (130 if signum is signal.SIGINT else 1), err
    if signum is signal.SIGKILL:
        assert [line for line in err.splitlines() if "still waiting" not in line] == [
            line for line in err.splitlines() if line.startswith("allranks: collectives: rank ")
        ]
    wait_until(lambda: not ranks(), "the ranks are gone")
    assert not (tmp_path / "runs").exists()  # no half of a table
