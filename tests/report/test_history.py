"""How often were the ranks of a run started again, why, and what did that cost?"""

from __future__ import annotations

from typing import Any

import pytest

from allranks.model.finding import Confidence, Finding, Severity, Verdict
from allranks.report.history import describe_restarts, list_restarts, open_findings
from allranks.report.runs import name_script


def verdict(cause: str, **fields: object) -> dict[str, Any]:
    return {"event": "verdict", "cause": cause, "node": "node03", "ranks": [], **fields}


def again(generation: int, **fields: object) -> dict[str, Any]:
    return {"event": "restarting", "generation": generation, "leader": "node01", "checkpoint": None, **fields}


DEAD = verdict("AR407 dead-rank", ranks=[2])
GONE = verdict("AR012 node-failure")
KNOWN = {"lost_s": 72.4, "is_tracked": True}


@pytest.mark.parametrize(
    ("events", "allowed", "text"),
    [
        ([], 3, ""),
        ([DEAD, {"event": "ended", "exit_code": 137}], 3, ""),
        ([DEAD, again(1, **KNOWN)], 3, "1 restart (AR407, rank 2, 1:12 lost)"),
        ([DEAD, again(1, **KNOWN)], 1, "1 of 1 restart used (AR407, rank 2, 1:12 lost)"),
        ([DEAD, again(1, lost_s=72.4, is_tracked=False)], None, "1 restart (AR407, rank 2, at most 1:12 lost)"),
        ([DEAD, again(1)], None, "1 restart (AR407, rank 2)"),  # of an older version
        ([DEAD, verdict("AR215 broken"), again(1, **KNOWN)], None, "1 restart (AR407, rank 2, 1:12 lost)"),
        (
            [DEAD, again(1, **KNOWN), GONE, again(2, **KNOWN), DEAD, again(3, **KNOWN)],
            3,
            "3 of 3 restarts used (AR407, rank 2, 2 times; AR012, node03, 3:37 lost)",
        ),
        ([again(1, **KNOWN)], 3, "1 restart (more nodes, 1:12 lost)"),
        ([{"event": "restarting", "generation": "one"}, {"event": 7}, {}], 3, ""),
        ([again(1, **KNOWN)], 1, "1 restart (more nodes, 1:12 lost)"),  # it costs none of the allowed ones
        (
            [line for n in range(5) for line in (verdict("AR407 dead-rank", ranks=[n]), again(n + 1, lost_s=2000))],
            9,
            "5 restarts (2 more; AR407, rank 2; AR407, rank 3; AR407, rank 4, at most 2:46:40 lost)",
        ),
    ],
)
def test_restarts_are_told_in_a_few_words(events: list[dict[str, Any]], allowed: int | None, text: str) -> None:
    assert describe_restarts(list_restarts(events), allowed=allowed) == text


def test_a_fault_that_a_restart_cured_is_told_with_the_restart_and_nowhere_else() -> None:
    def finding(cause: str, severity: Severity, *ranks: int) -> Finding:
        certain = Confidence.CERTAIN
        return Finding(cause=cause, severity=severity, confidence=certain, node="node03", ranks=ranks, message="x")

    cured = finding("AR407 dead-rank", Severity.WARN, 2)
    again_ = finding("AR407 dead-rank", Severity.FAIL, 2)
    other = finding("AR205 mtu-unequal", Severity.WARN)
    told = Verdict(job="7", attempt=0, exit_code=1, findings=(again_, cured, other))
    assert open_findings(told, list_restarts([DEAD, again(1)])) == (again_, other)
    assert open_findings(told, ()) == (again_, cured, other)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/v/bin/python train.py", "train.py"),
        ("python -u -X dev -W error dir/train.py --module x", "train.py"),
        ("python -m pkg.train --lr 1", "pkg.train"),
        ("python .", "gpt"),
        ("python ./", "gpt"),
        ("python ..", "ada"),
        ("python dir/", "dir"),
        ("python3.12 -c print(1)", "python3.12 -c"),
        ("python", "python"),
        ("./serve dir/a.cfg", "serve"),
        ("/bin/bash -c x", "bash"),
        ("", ""),
    ],
)
def test_a_run_is_called_by_what_it_runs(command: str, name: str) -> None:
    assert name_script(command.split(), "/home/ada/gpt") == name
