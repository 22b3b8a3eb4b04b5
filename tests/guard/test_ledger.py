"""Do the books say of each second of each rank what it was spent on, and of waits, for whom?"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from allranks.guard.ledger import Books
from allranks.model.finding import Confidence, Finding, Severity
from allranks.model.ledger import Category, Ledger, Loss

from .ledger_world import Told, live, plan

CASES: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("ledger_cases.toml").read_text())["case"]


def run(case: dict[str, Any]) -> tuple[Books, Ledger]:
    """Live one case; returns the books and what they say at its end."""
    books, workers = Books(), case.get("workers", 1)
    end_s = 0.0
    for number, generation in enumerate(case["generations"]):
        programs = [program for many, program in generation["ranks"] for _ in range(many)]
        begun_s, judged_s = generation.get("begins_s", 0.0), generation.get("judged_s")
        books.begin(plan(len(programs) // workers, workers, number), begun_s)
        ranks = live(programs, begun_s=begun_s, until_s=generation.get("end_s", judged_s or 1e6))
        told = Told(books, ranks, workers=workers, session=generation.get("session"), is_async="is_async" in case)
        silent, silent_s = generation.get("silent", (0, None))
        dead, dies_s = generation.get("dies", (0, None))
        end_s = judged_s or max(rank.now_s for rank in ranks)
        told.until(begun_s, min(filter(None, (silent_s, dies_s, end_s))))
        if silent_s is not None:
            told.silent.add(silent)
            told.until(silent_s, end_s)
            books.lost(silent)
        if dies_s is not None:
            told.end(dead, dies_s, exit_code=-9)
        if judged_s is None:
            for at, rank in enumerate(ranks):
                told.end(at, rank.now_s)
        else:
            books.fault(judged_s, [Finding(cause="AR407 dead-rank", severity=Severity.FAIL, confidence=Confidence.CERTAIN, message="it died", node="node02")])
            end_s = generation.get("end_s", judged_s)
    books.end(end_s)
    return books, books.snapshot(end_s + 100)


def tell(loss: Loss) -> str:
    """`wait for 3 on node04`."""
    ranks, nodes = ",".join(map(str, loss.ranks)), ",".join(loss.nodes)
    whose = f" {'for' if loss.category is Category.WAIT else 'of'} {ranks}" if ranks else ""
    return f"{loss.category}{whose}{f' on {nodes}' if nodes else ''}"


@pytest.mark.parametrize("case", CASES, ids=[case["what"] for case in CASES])
def test_the_books_say_where_the_time_went(case: dict[str, Any]) -> None:
    books, ledger = run(case)
    num_ranks = sum(many for many, _ in case["generations"][0]["ranks"])
    tolerance_s = case.get("tolerance", 0.05 * num_ranks)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.rank_s, rel=1e-3)
    for category in Category:
        expected_s = case["seconds"].get(category, 0.0)
        assert ledger.seconds.get(category, 0.0) == pytest.approx(expected_s, rel=0.05, abs=tolerance_s), category
    waited_for = {row.rank: row.waited_for_s for row in ledger.waited_for if row.waited_for_s > tolerance_s}
    expected = {int(rank): seconds for rank, seconds in case.get("waited_for", {}).items() if seconds > tolerance_s}
    assert waited_for == pytest.approx(expected, rel=0.05, abs=tolerance_s)
    if "losses" in case:
        assert [tell(loss) for loss in ledger.losses if loss.rank_s > tolerance_s] == case["losses"]
    named = books.named()
    assert [straggler.rank for straggler in named] == [case["chronic"]["rank"] for _ in range("chronic" in case)]
    for straggler in named:
        assert straggler.share == pytest.approx(case["chronic"]["share"], abs=0.01)
        assert 1e3 * straggler.lag_s == pytest.approx(case["chronic"]["late_ms"], rel=0.1)
    for cost, want in zip(ledger.restarts, case.get("restarts", ()), strict=True):
        assert (cost.cause, cost.node) == ("AR407 dead-rank", "node02")
        assert cost.restart_s == pytest.approx(want["restart_s"], abs=0.1)
        assert cost.redo_s == (pytest.approx(want["redo_s"], abs=0.3) if "redo_s" in want else None)
        assert cost.redo_steps == want.get("redo_steps")
        assert cost.is_redo_guessed is want.get("is_redo_guessed", False)
    assert ledger.is_estimated is case.get("is_estimated", False)
    assert ledger.is_steps_seen is case.get("is_steps_seen", True)
    assert ledger.num_checkpoints == case.get("num_checkpoints", 0)
    assert ledger.steps == case.get("steps", ledger.steps)
