"""What does a shell offer for a half-typed word of `allranks`? Asked as bash asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.causes.book import all_causes
from allranks.cli.main import VERBS
from allranks.model.finding import Verdict
from allranks.report.rundir import RunDir
from conftest import Allranks
from fake_slurm import FakeSlurm, fake_slurm  # noqa: F401  (a fixture)

RUNS = ("20261123-031500-41", "20261123-040000-42")
Offer = Callable[[str], list[str]]


@pytest.fixture
def offer(allranks: Allranks) -> Offer:
    """What is offered for the last word of a line: `plain,WORD`, or `file,` for the shell's own files."""

    def ask(line: str) -> list[str]:
        count = len(line.split(" ")) - 1
        asked = {"_ALLRANKS_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(count)}
        result = allranks(env=asked)
        assert (result.returncode, result.stderr) == (0, "")
        return [line for line in result.stdout.splitlines() if line]

    return ask


@pytest.fixture
def runs(tmp_path: Path, slurm: FakeSlurm) -> None:
    """Jobs 4711 and 4800 of SLURM, a run that has ended and one that has not."""
    row = "{}\x1fRUNNING\x1fNone\x1f2\x1fn[1-2]\x1fmain\x1fada\x1fs\x1fN/A\x1f2:00\x1f0:02\x1f/h\x1fgpt\n"
    slurm.answer("squeue", out=row.format(4711) + row.format(4800))
    for name in RUNS:
        run_dir = RunDir(tmp_path / "runs", name)
        run_dir.create()
        run_dir.create_attempt(None)
        run_dir.add_event("started", command=["python", "train.py"], members=["n"])
    RunDir(tmp_path / "runs", RUNS[0]).write_verdict(Verdict(job=RUNS[0], attempt=0, exit_code=0), node="n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("allranks s", ["status", "submit", "stack"]),
        ("allranks lab inj", ["inject"]),
        ("allranks explain AR20", [cause.id for cause in all_causes() if cause.id.startswith("AR20")]),
        ("allranks explain ar204", ["AR204"]),
        ("allranks explain mtu-b", ["mtu-blackhole"]),
        ("allranks explain xyzzy", []),
        ("allranks lab inject cab", ["cable-pulled"]),
        ("allranks lab heal cab", ["cable-pulled"]),
    ],
)
def test_verbs_causes_and_faults_are_offered(line: str, words: list[str], offer: Offer) -> None:
    assert sorted(offer(line)) == sorted(f"plain,{word}" for word in words)


def test_all_verbs_are_offered(offer: Offer) -> None:
    assert offer("allranks ") == [f"plain,{verb}" for verb in VERBS]


@pytest.mark.parametrize("verb", ["status", "logs", "why"])
def test_jobs_and_runs_are_offered(verb: str, runs: None, offer: Offer) -> None:
    assert offer(f"allranks {verb} 47") == ["plain,4711"]
    assert sorted(offer(f"allranks {verb} 2026")) == [f"plain,{name}" for name in RUNS]
    assert offer(f"allranks {verb} la") == ["plain,latest"]


@pytest.mark.parametrize("verb", ["cancel", "stack", "watch"])
def test_what_has_ended_is_not_offered_where_something_must_run(verb: str, runs: None, offer: Offer) -> None:
    assert offer(f"allranks {verb} 2026") == [f"plain,{RUNS[1]}"]
    assert offer(f"allranks {verb} 4") == ["plain,4711", "plain,4800"]


def test_runs_are_offered_where_there_is_no_slurm(runs: None, slurm: FakeSlurm, offer: Offer) -> None:
    slurm.answer("squeue", err="squeue: fatal: Could not establish a configuration source\n", code=1)
    assert sorted(offer("allranks logs 2026")) == [f"plain,{name}" for name in RUNS]


@pytest.mark.parametrize(
    "line",
    [
        "allranks run tr",
        "allranks run train.py --data da",
        "allranks submit --nodes 2 tr",
        "allranks render tr",
        "allranks why lo",
    ],
)
def test_files_are_left_to_the_shell(line: str, offer: Offer) -> None:
    assert [words.partition(",")[0] for words in offer(line)] == ["file"]
