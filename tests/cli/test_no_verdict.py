"""A run that could not write its verdict: what its events tell of its end is what all commands say of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.report.runs import read_run
from conftest import Allranks

SCRIPT = """
import os
os.mkdir("runs/latest/attempt_0/verdict.json")  # where the agent cannot put its own
{end}
"""
WHY = "no readable verdict.json (not written, damaged, or removed): the verdict is what events.jsonl tells"


@pytest.mark.parametrize(
    ("end", "state", "finding"),
    [
        ("raise ValueError('own error')", "FAILED, exit code 1", "AR590 user-code-error"),
        ("", "COMPLETED, exit code 0", None),
    ],
    ids=["failed", "completed"],
)
def test_a_run_that_could_not_write_its_verdict_is_shown_with_its_end(
    end: str, state: str, finding: str | None, allranks: Allranks, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(end=end))
    ended = allranks("run", "--nproc-per-node", "1", "train.py")
    assert "not written to the run directory (Is a directory): verdict.json" in ended.stderr
    shown = allranks("status", "latest").stdout
    assert f"   train.py   {state} on 1 node" in shown
    assert f"\n  missing   {WHY}\n" in shown
    assert ("ValueError: own error" in shown) == (finding is not None)
    assert state.partition(",")[0] in allranks("list").stdout
    assert allranks("report", "latest").returncode == 0
    page = json.loads(allranks("report", "--json", "latest").stdout)
    assert (page["outcome"], [found["cause"] for found in page["findings"]]) == (
        ("failed", [finding]) if finding else ("succeeded", [])
    )
    assert WHY in page["missing"]
    assert "was killed" not in allranks("why", "latest").stdout


def event(name: str, **values: object) -> str:
    return json.dumps({"time_s": 1.0, "event": name, **values}) + "\n"


FOUND = event("verdict", cause="AR590 user-code-error", node="n1", ranks=[0], message="boom", confidence="certain")


@pytest.mark.parametrize(
    ("events", "told"),
    [
        (FOUND + event("ended", exit_code=1), (1, ["boom"])),
        (FOUND + FOUND.replace("boom", "bang") + event("ended", exit_code=1), (1, ["boom", "bang"])),
        (FOUND + event("ended", exit_code=0), (0, [])),
        (FOUND + event("restarting", generation=1) + event("ended", exit_code=143), (143, [])),
        (
            FOUND + event("restarting", generation=1) + FOUND.replace("boom", "bang") + event("ended", exit_code=1),
            (1, ["bang"]),
        ),
        (FOUND.replace("certain", "a guess") + event("ended", exit_code=1), (1, ["boom"])),
        (FOUND, None),
        (FOUND + event("ended", exit_code=1, is_cut_off=True), None),
        (FOUND + event("ended", exit_code=1) + event("took_over", leader="n2", generation=1), None),
    ],
    ids=[
        "failed",
        "two failed",
        "survived",
        "another end",
        "failed again",
        "a damaged word",
        "not ended",
        "cut off",
        "taken over",
    ],
)
def test_only_the_last_word_of_a_leader_is_an_end(
    events: str, told: tuple[int, list[str]] | None, tmp_path: Path, make_events: Callable[[str], None]
) -> None:
    make_events(events)
    run = read_run(tmp_path)
    assert run.is_verdict_of_events == (told is not None)
    assert (run.ended_s is not None) == (told is not None)
    assert told == (run.verdict and (run.verdict.exit_code, [found.message for found in run.verdict.findings]))


@pytest.mark.parametrize("text", ["", '{"job": "x", "exit_co'])
def test_a_damaged_verdict_is_none(text: str, tmp_path: Path, make_events: Callable[[str], None]) -> None:
    make_events(FOUND + event("ended", exit_code=1))
    (tmp_path / "attempt_0/verdict.json").write_text(text)
    run = read_run(tmp_path)
    assert run.is_verdict_of_events
    assert run.ended_s == 1.0


@pytest.fixture
def make_events(tmp_path: Path) -> Callable[[str], None]:
    """Write the events of an attempt."""

    def make(text: str) -> None:
        (tmp_path / "attempt_0").mkdir()
        (tmp_path / "attempt_0/events.jsonl").write_text(event("started", members=["n1"]) + text)

    return make
