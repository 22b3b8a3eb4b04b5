"""The rules by which jobs in broken surroundings are judged, without a job."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from surroundings.judge import Expect, Facts, Kind, Ran, judge, judge_command
from surroundings.situations import SITUATIONS
from surroundings.workers import CASES

DONE = [{"note": "begun"}, {"note": "done"}]
SUCCEEDED = "allranks: train.py succeeded: 2 ranks, 1.0 s; output in /runs/1/attempt_0; report in /runs/1/report.html\n"
FULL = {"note": "failed", "errno": "ENOSPC", "place": "run", "is_silent": False}


def _finding(cause: str, rank: int, message: str = "") -> dict[str, Any]:
    return {"severity": "fail", "cause": cause, "ranks": [rank], "message": message}


def _facts(*, notes: Any = None, findings: Any = (), verdict: bool = True, **changes: Any) -> Facts:
    usual = {
        "exit_code": 1 if findings else 0,
        "terminal": SUCCEEDED,
        "notes": notes or {0: DONE, 1: DONE},
        "verdict": {"exit_code": 0, "findings": list(findings)} if verdict else None,
        "peak_mb": 37.0,
    }
    return Facts(**{**usual, **changes})


@pytest.mark.parametrize(
    ("facts", "expect", "kinds"),
    [
        (_facts(), Expect(), []),
        (_facts(findings=[_finding("AR590", 1)]), Expect(), [Kind.ENDED]),
        (_facts(exit_code=1), Expect(), [Kind.ENDED]),
        (_facts(notes={0: DONE, 1: DONE[:1]}), Expect(), [Kind.ENDED]),
        (_facts(notes={0: DONE, 1: [FULL]}, findings=[_finding("AR005", 1)]), Expect(), []),
        (_facts(notes={0: DONE, 1: [FULL]}, findings=[_finding("AR590", 1)]), Expect(), [Kind.CULPRIT]),
        (_facts(notes={0: DONE, 1: [FULL]}, findings=[_finding("AR005", 0)]), Expect(), [Kind.CULPRIT]),
        (_facts(notes={0: DONE, 1: [FULL]}), Expect(), [Kind.CULPRIT]),
        (_facts(findings=[_finding("AR590", 1, "exit code 7")]), Expect(rank=1, words="exit code 7"), []),
        (_facts(findings=[_finding("AR590", 1, "exit code 8")]), Expect(rank=1, words="exit code 7"), [Kind.CULPRIT]),
        (_facts(findings=[_finding("AR005", 1, "OSError")]), Expect(rank=1, words="OSError"), [Kind.CULPRIT]),
        (_facts(verdict=False), Expect(), [Kind.NO_VERDICT]),
        (_facts(verdict=False), Expect(needs_file=False), []),
        (_facts(verdict=False, terminal=""), Expect(needs_file=False), [Kind.NO_VERDICT]),
        (_facts(notes={0: []}, exit_code=2, terminal="error: /runs: it is full\n"), Expect(may_refuse=True), []),
        (_facts(notes={0: []}, exit_code=2, terminal=""), Expect(may_refuse=True), [Kind.NO_VERDICT]),
        (_facts(notes={0: [*DONE, {"note": "lost", "lines": 3}], 1: DONE}), Expect(), [Kind.SILENT_LOSS]),
        (_facts(exit_code=None), Expect(), [Kind.HUNG]),
        (_facts(peak_mb=151.0), Expect(), [Kind.MEMORY]),
        (_facts(left=["sleep 300"]), Expect(), [Kind.LEFT]),
        (_facts(has_struck=False), Expect(), [Kind.VOID]),
        (_facts(missing=["/runs/1"]), Expect(), [Kind.FALSE_PATH]),
        (_facts(terminal="Traceback (most recent call last):\n" + SUCCEEDED), Expect(), [Kind.TRACEBACK]),
        (_facts(terminal="[vm r0] Traceback (most recent call last):\n" + SUCCEEDED), Expect(), []),
    ],
)  # fmt: skip
def test_a_job_is_judged_by_what_its_ranks_noted(facts: Facts, expect: Expect, kinds: list[Kind]) -> None:
    assert [fall.kind for fall in judge(facts, expect)] == kinds


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, []),
        ({"exit_code": None}, [Kind.HUNG]),
        ({"exit_code": -9}, [Kind.TRACEBACK]),
        ({"text": "Traceback (most recent call last):\n"}, [Kind.TRACEBACK]),
        ({"text": "JOB\x1b[2J"}, [Kind.CONTROL]),
        ({"peak_mb": 400.0}, [Kind.MEMORY]),
        ({"harmed": ["process 7"]}, [Kind.HARMED]),
    ],
)
def test_a_command_is_judged_by_what_it_did(changes: dict[str, Any], kinds: list[Kind]) -> None:
    ran = Ran(**{"command": "allranks list", "exit_code": 0, "text": "JOB\n", "peak_mb": 40.0, **changes})
    assert [fall.kind for fall in judge_command(ran)] == kinds


def test_at_least_300_situations_of_each_kind_of_surroundings() -> None:
    groups = Counter(name.partition("/")[0] for name in SITUATIONS)
    assert set(groups) == {"disk", "odd", "flood", "forged"}
    assert sum(groups.values()) >= 300


def test_all_cases_can_be_compiled() -> None:
    for cases in CASES.values():
        for name, case in cases.items():
            compile(case["does"], name, "exec")
