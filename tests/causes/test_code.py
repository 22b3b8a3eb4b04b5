"""Is code that differs between nodes found, named and not over-stated?"""

from __future__ import annotations

from typing import Any

import pytest

from allranks.causes.book import find_cause
from allranks.causes.probes import checks_of
from allranks.causes.probes.job import SCRIPT, collect_code_differs, survey_code_differs
from allranks.model.card import MAX_CODE_FILES, Card, Code, Facts
from allranks.model.finding import Confidence, Severity, Status
from allranks.preflight.compare import compare
from cards import make_card

SAME = {"data.py": "d" * 16, "model.py": "a" * 16}


def node(number: int, digest: str = "0123456789abcdef", beside: dict[str, str | None] | None = None) -> Card:
    files = SAME if beside is None else beside
    return with_facts(number, code=Code(script="train.py", digest=digest, beside=files))


def with_facts(number: int, **facts: Any) -> Card:
    return make_card(number, facts=Facts(**facts))


def many(own: Card, count: int) -> list[Card]:
    return [own, *(node(number) for number in range(2, count + 1))]


def message(outcome: Any) -> str:
    return outcome.to_finding(find_cause("AR513"), node="node01").message


@pytest.mark.parametrize("count", [1, 2, 6])
def test_nodes_with_the_same_code_are_alike(count: int) -> None:
    cards = [node(number) for number in range(1, count + 1)]
    assert survey_code_differs(cards) == []
    assert compare(checks_of(find_cause("AR513")), cards) == []


def test_another_script_fails_and_names_the_odd_node() -> None:
    [(hosts, outcome)] = compare(checks_of(find_cause("AR513")), many(node(1, "fedcba9876543210"), 6))
    assert (hosts, outcome.status, outcome.confidence) == (("node01",), Status.FAIL, Confidence.CERTAIN)
    assert message(outcome) == (
        "the training script differs: 5 of 6 nodes have sha256 0123456789ab; node01 has sha256 fedcba987654"
    )
    assert checks_of(find_cause("AR513")).severity_of(SCRIPT) is Severity.FAIL


def test_of_two_scripts_nobody_can_say_which_is_right() -> None:
    [(hosts, outcome)] = compare(checks_of(find_cause("AR513")), many(node(1, "f" * 16), 2))
    assert (hosts, outcome.confidence) == (("node01", "node02"), Confidence.UNDECIDED)


def test_without_a_script_nothing_is_compared() -> None:
    assert collect_code_differs(with_facts(1)) is None
    assert collect_code_differs(Card(host="a", pid=1, node_index=0, num_workers=1, num_gpus=0)) is None
    assert survey_code_differs([with_facts(1), node(2), node(3)]) == []


def test_a_script_that_could_not_be_read_is_none_and_no_culprit() -> None:
    silent = with_facts(1, unread={"code": "no answer within 3 s"})
    assert collect_code_differs(silent) == {SCRIPT: None}
    assert compare(checks_of(find_cause("AR513")), many(silent, 4)) == []


OTHER = {**SAME, "model.py": "b" * 16}


@pytest.mark.parametrize(
    ("beside", "files"),
    [
        (OTHER, "model.py"),
        ({"data.py": "d" * 16}, "model.py"),
        ({**SAME, "new.py": "c" * 16}, "new.py"),
        ({}, "data.py, model.py"),
    ],
)
def test_a_file_beside_it_that_differs_warns(beside: dict[str, str | None], files: str) -> None:
    [(hosts, outcome)] = survey_code_differs(many(node(1, beside=beside), 6))
    assert (hosts, outcome.status, outcome.confidence) == (("node01",), Status.WARN, Confidence.CERTAIN)
    assert message(outcome) == f"code beside the script ({files}) differs: 5 of 6 nodes have the same; node01 differs"


def test_the_evidence_says_who_has_what() -> None:
    [(_, outcome)] = survey_code_differs(many(node(1, beside={**OTHER, "new.py": "c" * 16}), 4))
    assert outcome.evidence == (
        "model.py: node[02-04] aaaaaaaaaaaa; node01 bbbbbbbbbbbb",
        "new.py: node[02-04] missing; node01 cccccccccccc",
    )


def test_many_files_are_one_finding_with_some_names() -> None:
    beside = {f"m{number}.py": "c" * 16 for number in range(9)} | SAME
    [(_, outcome)] = survey_code_differs(many(node(1, beside=beside), 3))
    assert "(m0.py, m1.py, m2.py, m3.py, and 5 more)" in message(outcome)
    assert len(outcome.evidence) == 8


def test_without_a_majority_all_are_named_undecided() -> None:
    [(hosts, outcome)] = survey_code_differs(many(node(1, beside=OTHER), 2))
    assert (hosts, outcome.confidence) == (("node01", "node02"), Confidence.UNDECIDED)
    assert message(outcome).endswith("(model.py) differs: no version has a majority; node[01-02] differ")


@pytest.mark.parametrize(
    "beside",
    [
        {**SAME, "model.py": None},
        {f"a{number:03}.py": None for number in range(MAX_CODE_FILES)},
    ],
)
def test_what_was_not_looked_at_is_no_difference(beside: dict[str, str | None]) -> None:
    assert survey_code_differs(many(node(1, beside=beside), 4)) == []


def test_a_directory_that_may_not_be_listed_is_no_difference() -> None:
    blind = with_facts(1, code=Code(script="train.py", digest="0123456789abcdef"))
    assert survey_code_differs(many(blind, 4)) == []
