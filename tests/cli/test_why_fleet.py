"""`why --md`, `why --history` and `submit --exclude-suspects` through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.model.finding import Confidence, Finding, Severity, Verdict
from allranks.why.fleet.job_end import JobEnd, NodeFault, encode_end
from conftest import Tell
from fake_slurm import FakeSlurm, assert_one_line, fake_slurm  # noqa: F401  (a fixture)

GPU = "AR105 gpu-hardware"
OOM = (
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of "
    "79.15 GiB of which 1.2 GiB is free.\n"
)


def write_ends(path: Path, *, bad: int, well: int = 30, age_s: float = 0.0, node: str = "node03") -> None:
    """Jobs on six nodes, of which `node` broke some."""
    fault = NodeFault(cause=GPU, node=node, confidence=Confidence.CERTAIN)
    ends = [
        JobEnd(
            version=1,
            time_s=time.time() - age_s,
            job=str(number),
            nodes="node[01-06]",
            is_failed=number < bad,
            faults=(fault,) if number < bad else (),
        )
        for number in range(bad + well)
    ]
    path.write_bytes(b"".join(map(encode_end, ends)))


def write_run(folder: Path, job: str, *, culprit: str | None = None) -> None:
    """A run on six nodes, as far as the history reads it."""
    attempt = folder / job / "attempt_0"
    for number in range(1, 7):
        (attempt / f"node0{number}").mkdir(parents=True)
    finding = Finding(cause=GPU, severity=Severity.FAIL, confidence=Confidence.CERTAIN, node=culprit, message="Xid 79")
    findings = (finding,) if culprit else ()
    verdict = Verdict(job=job, attempt=0, exit_code=75 if culprit else 0, findings=findings)
    (attempt / "verdict.json").write_bytes(verdict.to_json())


# --- Markdown ---------------------------------------------------------------------------------------------------------


def test_md_has_the_culprit_first_and_with_all_the_others(tell: Tell, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(OOM + "[rank0]: RuntimeError: Connection closed by peer [10.0.0.3]:5000\n")
    result = tell("why", "--md", "a.log")
    assert result.code == 1, result.err
    lines = result.out.splitlines()
    assert lines[0] == "### AR109 cuda-oom: rank 3 \u00b7 GPU 3 (certain)"
    assert "```text" in lines
    assert "from `a.log:1`" in lines
    assert "Explained by `allranks explain AR109`" in lines
    everything = tell("why", "--md", "--all", "--timeline", "a.log").out
    assert everything.startswith(lines[0])
    assert everything.count("\n### ") >= result.out.count("\n### ")
    assert everything.rstrip().endswith("```")  # the timeline


@pytest.mark.parametrize("other", [["--json"], ["--html", "a.html"]])
def test_md_is_one_of_three_forms(tell: Tell, tmp_path: Path, other: list[str]) -> None:
    (tmp_path / "a.log").write_text(OOM)
    result = tell("why", "--md", *other, "a.log")
    assert result.code == 2
    assert_one_line(result.err)


# --- History ----------------------------------------------------------------------------------------------------------


def test_a_node_that_breaks_jobs_is_named_with_its_commands(tell: Tell, tmp_path: Path) -> None:
    write_ends(tmp_path / "ends.jsonl", bad=7)
    result = tell("why", "--history", "ends.jsonl")
    assert result.code == 1, result.err
    lines = result.out.splitlines()
    assert lines[0] == "node03 is the culprit in 7 of 7 failures of jobs that ran on it"
    assert lines[1] == "  causes  AR105 gpu-hardware (7)"
    assert lines[4:6] == [
        "  drain   scontrol update nodename=node03 state=drain "
        "'reason=allranks: culprit in 7 of 7 failures, AR105 gpu-hardware in 7'",
        "  exclude sbatch --exclude=node03",
    ]
    assert lines[-1] == "37 jobs of the last 30 days on 6 nodes, 7 with a failure"


def test_a_history_without_a_suspect_is_one_line(tell: Tell, tmp_path: Path) -> None:
    write_ends(tmp_path / "ends.jsonl", bad=2)
    with (tmp_path / "ends.jsonl").open("ab") as file:
        file.write(b'{"version":9}\n{"vers')
    result = tell("why", "--history", "ends.jsonl")
    assert (result.code, result.out) == (
        0,
        "no node stands out: 32 jobs of the last 30 days on 6 nodes, 2 with a failure\n\n"
        "lines that could not be read: ends.jsonl (2)\n",
    )


def test_a_failure_stops_to_count(tell: Tell, tmp_path: Path) -> None:
    write_ends(tmp_path / "ends.jsonl", bad=7, age_s=10 * 86400)
    assert tell("why", "--history", "ends.jsonl").code == 1
    assert tell("why", "--history", "--within", "7d", "ends.jsonl").code == 0


def test_runs_and_files_are_one_history_and_a_job_in_both_counts_once(tell: Tell, tmp_path: Path) -> None:
    for number in range(5):
        write_run(tmp_path / "runs", str(number), culprit="node03")
    write_run(tmp_path / "runs", "100")
    (tmp_path / "ends").mkdir()
    write_ends(tmp_path / "ends" / "node01.jsonl", bad=3)
    told = json.loads(tell("why", "--history", "--json", "runs", "ends").out)
    (suspect,) = told["fleet"]["suspects"]
    assert (told["version"], suspect["node"], suspect["culprit_in"], suspect["failed"]) == (1, "node03", 5, 5)
    assert told["fleet"]["jobs"] == 34  # 0 to 32, and 100
    assert told["damaged"] == {}
    assert tell("why", "--history").out.startswith("node03 is the culprit in 5 of 5")  # runs/ by default


@pytest.mark.parametrize("arguments", [[], ["nix"], ["empty"], ["a.jsonl", "nix"], ["--to", "a.jsonl"]])
def test_a_history_that_is_not_there_is_one_line(tell: Tell, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    write_ends(tmp_path / "a.jsonl", bad=1)
    result = tell("why", "--history", *arguments)
    assert (result.code, result.out) == (2, "")
    assert_one_line(result.err)


# --- Submitting -------------------------------------------------------------------------------------------------------


@pytest.fixture
def history(slurm: FakeSlurm, tmp_path: Path) -> Path:
    """Where cluster.toml says that the history is; the partition has six nodes."""
    names = [f"node0{number}" for number in range(1, 7)]
    slurm.answer("sinfo", out="".join(f"{name}\x1fidle\x1fnone\x1fmain*\x1f(null)\n" for name in names))
    (tmp_path / "cluster.toml").write_text(f'[slurm]\nhistory = "{tmp_path}/ends.jsonl"\n')
    (tmp_path / "train.py").write_text("")
    return tmp_path / "ends.jsonl"


def test_submit_leaves_a_suspect_out_and_says_why(slurm: FakeSlurm, tell: Tell, history: Path) -> None:
    write_ends(history, bad=7)
    result = tell("submit", "--dry-run", "--exclude-suspects", "--exclude", "node01", "--nodes", "2", "train.py")
    assert result.code == 0, result.err
    assert "#SBATCH --exclude=node[01,03]\n" in result.out
    assert "allranks: excluded node03: culprit in 7 of 7 failures, AR105 gpu-hardware in 7\n" in result.err
    assert "--exclude" not in tell("submit", "--dry-run", "--nodes", "2", "train.py").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes", "6"], "node03 is suspect and not excluded (6 nodes are in service, and the job needs 6): culprit"),
        (["--nodelist", "node[03-04]"], "node03 is suspect and not excluded (--nodelist asks for it): culprit"),
    ],
)
def test_submit_never_excludes_what_the_job_needs(
    slurm: FakeSlurm, tell: Tell, history: Path, arguments: list[str], said: str
) -> None:
    write_ends(history, bad=7)
    result = tell("submit", "--dry-run", "--exclude-suspects", *arguments, "train.py")
    assert result.code == 0
    assert "--exclude" not in result.out
    assert said in result.err


def test_submit_goes_on_without_a_history_or_without_slurm(slurm: FakeSlurm, tell: Tell, history: Path) -> None:
    result = tell("submit", "--dry-run", "--exclude-suspects", "train.py")
    assert result.code == 0
    assert "allranks: --exclude-suspects: nobody is excluded: no history in " in result.err
    write_ends(history, bad=7)
    slurm.answer("sinfo", err="Unable to contact slurm controller\n", code=1)
    result = tell("submit", "--dry-run", "--exclude-suspects", "train.py")
    assert result.code == 0
    assert "nobody is excluded: sinfo: Unable to contact slurm controller" in result.err
    assert "--exclude" not in result.out


def test_an_epilog_needs_nothing_that_explains_jobs() -> None:
    """It starts at the end of every job: hyperscan, torch and the book would cost each of them a second."""
    code = "import allranks.cli.main, allranks.cli.why_epilog, allranks.why.fleet.epilog, sys; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    loaded = {name.partition(".")[0] for name in modules.split()}
    assert not {"torch", "hyperscan", "numpy", "psutil", "jinja2"} & loaded
