"""`allranks advise` through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from allranks.cli.advise import advise, guess_step
from allranks.comm.bench_table import BenchRow, BenchTable, Pair, to_json
from allranks.model.errors import UsageError
from conftest import Allranks

MIB = 1 << 20
NODES = tuple(f"node0{number}" for number in range(1, 7))
ROWS = tuple(
    BenchRow(
        collective="all_reduce", size_bytes=size, count=size // 4, in_flight=8, time_s=size / 7e6, p95_s=size / 7e6
    )
    for size in (MIB // 2, 32 * MIB)
)
TABLE = BenchTable(backend="gloo", nodes=NODES, ranks=6, rows=ROWS, began_s=1.8e9)
FIGURES = ("--params", "13.1M", "--step-ms", "150")


def write_table(folder: Path, table: BenchTable = TABLE) -> Path:
    path = folder / "runs" / "bench.json"
    path.parent.mkdir()
    path.write_bytes(to_json(table))
    return path


def test_figures_become_a_ranked_list_and_times_for_each_number_of_nodes(allranks: Allranks, tmp_path: Path) -> None:
    write_table(tmp_path)
    result = allranks("advise", *FIGURES, "--batch", "64")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("network  node[01-06], 6 ranks, gloo (runs/bench.json, ")
    assert lines[1] == "step     computes 150 ms (forward 50, backward 100, other 0); 52 MB of gradients"
    assert '   write: s.ddp(model, compress="int8")' in lines
    assert "   or:    allranks run --compress int8 --bucket-mb auto SCRIPT" in lines
    assert "   cost:  validation loss -0.4 % after as many samples; 52 MB more memory on each rank; 52 MB more" in (
        result.stdout
    )
    assert any(line.startswith("   DiLoCo 25 ") and "give --steps" in line for line in lines)
    nodes = next(line for line in lines if line.startswith("nodes "))
    assert nodes.split() == ["nodes", "1", "2*", "3*", "4*", "5*", "6"]
    assert any(line.startswith("now, samples/s") and line.split()[2] == "426.7" for line in lines)
    assert lines[-1].startswith("losses: ")
    assert result.stderr == ""


def test_json_has_each_method_with_its_time_for_programs(allranks: Allranks, tmp_path: Path) -> None:
    path = write_table(tmp_path).rename(tmp_path / "table.json")
    figures = ("--params", "3275000", "--forward-ms", "50", "--backward-ms", "100")
    result = allranks("advise", "--bench", path, *figures, "--json", "--nodes", "2")
    told: dict[str, Any] = json.loads(result.stdout)
    times = {each["name"]: each["step_ms"] for each in told["methods"]}
    assert times.keys() >= {"compute", "torch", "equal", "s.ddp", "bf16", "int8", "powersgd", "accumulate 8"}
    assert times["compute"] == 150.0
    assert [each["nodes"] for each in told["by_nodes"]] == [1, 2]
    ranked = [each for each in told["methods"] if each["rank"]]
    assert [each["rank"] for each in ranked] == list(range(1, len(ranked) + 1))
    assert sorted(ranked, key=lambda each: -each["to_equal_loss"]) == ranked
    assert all(each["why_not"] for each in told["methods"] if each["rank"] is None and each["name"] != "compute")


def mistake(*arguments: str) -> str:
    with pytest.raises((UsageError, click.UsageError)) as caught:
        advise.main(list(arguments), standalone_mode=False)
    text = caught.value.format_message() if isinstance(caught.value, click.UsageError) else str(caught.value)
    assert "\n" not in text
    return text


MISTAKES = """
| expected --measure with a script, or --params with --step-ms
--params 13M | --params: expected --step-ms, or --forward-ms and --backward-ms
--params 13M --forward-ms 5 | --params: expected --step-ms, or --forward-ms and --backward-ms
--params 13M --step-ms 10 --forward-ms 20 | --step-ms 10 is less than its forward and backward pass
--params 13M --step-ms 10 --forward-ms 5 --backward-ms 6 | --step-ms 10 is less than its forward and backward pass
--params many --step-ms 10 | 'many': expected a positive number, for example 13100000, 13.1M or 7B
--params 0 --step-ms 10 | '0': expected a positive number, for example 13100000, 13.1M or 7B
--params nan --step-ms 10 | 'nan': expected a positive number, for example 13100000, 13.1M or 7B
--params 13M --step-ms nan | 'nan': expected a number, for example 150
--params 13M --step-ms 10 --noise-scale nan | 'nan': expected a number, for example 150
--params 13M --step-ms 10 --nodes 99999999999 | is not in the range 1<=x<=1048576
--params 13M --step-ms 0 | 0.0 is not in the range
--params 13M --step-ms 10 --nodes 0 | 0 is not in the range
--measure | --measure: expected a script, for example allranks advise --measure train.py
--measure gone.py | --measure gone.py: no such script; expected a Python file and its arguments
--measure --params 13M train.py | --measure measures parameters and times; remove --params and --step-ms
train.py --params 13M | train.py: to measure a script, write --measure before it
--params 13M --step-ms 10 --nproc-per-node 2 | --nproc-per-node is for --measure
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_a_mistake_is_told_in_one_line(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path)
    monkeypatch.chdir(tmp_path)
    words, _, said = line.partition("| ")
    assert said in mistake(*words.split())


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (None, "runs/bench.json: no such file; measure the network first: allranks bench"),
        (b"{}", "runs/bench.json: not a table of allranks bench (Object missing required field `backend`); measure"),
        (b"\xff", "runs/bench.json: not a table of allranks bench ("),
        (
            msgspec.structs.replace(TABLE, began_s=1e300),
            "not a table of allranks bench (Expected `float` < 4294967296.0 - at `$.began_s`); measure",
        ),
        (
            msgspec.structs.replace(TABLE, pairs=(Pair(source="a", target="b", mbit_s=-7.0),)),
            "not a table of allranks bench (Expected `float` >= 0.0 - at `$.pairs[0].mbit_s`); measure",
        ),
        (
            msgspec.structs.replace(TABLE, ranks=1 << 60),
            "not a table of allranks bench (Expected `int` <= 16777216 - at `$.ranks`); measure",
        ),
        (msgspec.structs.replace(TABLE, version=7), "written by another allranks: version 7, expected 1; measure the"),
        (msgspec.structs.replace(TABLE, rows=()), "runs/bench.json has no all-reduce between two ranks; measure again"),
        (msgspec.structs.replace(TABLE, ranks=1), "runs/bench.json: 1 rank on 6 nodes: expected at least one on each"),
        (
            msgspec.structs.replace(TABLE, nodes=()),
            "runs/bench.json: 6 ranks on 0 nodes: expected at least one on each",
        ),
    ],
)
def test_a_table_that_cannot_be_used_is_told_in_one_line(
    table: BenchTable | bytes | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path)
    if table is None:
        path.unlink()
    else:
        path.write_bytes(table if isinstance(table, bytes) else to_json(table))
    monkeypatch.chdir(tmp_path)
    assert said in mistake(*FIGURES)


def test_a_table_of_other_nodes_is_refused_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_table(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[05-08]")
    assert mistake(*FIGURES) == (
        "advise: runs/bench.json was measured on node[01-06], and this job has node[05-08]: measure its network with "
        "allranks bench, or use the table anyway with --bench runs/bench.json"
    )
    advise.main([*FIGURES, "--bench", str(path)], standalone_mode=False)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[05-06]")  # a part of them has the same links
    advise.main(list(FIGURES), standalone_mode=False)
    assert capsys.readouterr().out.count("network  node[01-06]") == 2


# Milliseconds: of a step, its forward and its backward pass, as given and as taken.
SPLITS = """
given           taken           other
150   -    -     50 100           0
150  60    -     60  90           0
150   -   80     70  80           0
150  50   80     50  80          20
  -  50   80     50  80           0
"""


@pytest.mark.parametrize("line", SPLITS.strip().splitlines()[1:])
def test_a_step_is_split_into_a_third_forward_and_two_thirds_backward_where_nothing_else_is_said(line: str) -> None:
    *given, forward, backward, other = (None if word == "-" else float(word) for word in line.split())
    step = guess_step(1_000_000, *given)
    times_ms = [time_s * 1e3 for time_s in (step.forward_s, step.backward_s, step.other_s)]
    assert times_ms == pytest.approx([forward, backward, other])
    assert step.gradient_bytes == 4_000_000
