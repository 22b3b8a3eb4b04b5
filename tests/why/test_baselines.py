"""Do the logs of plain torchrun, which names nobody, lead to the lab's fault, or is it said that they cannot tell?

baselines/<fault>.txt.gz is what `allranks lab drill <fault> --baseline` kept, without the C++ frames; baselines.toml
says what follows from each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from click.testing import CliRunner
from tests.why.asking import HERE, Told, ask, has_one_of, list_wrong, read_table

from allranks.cli.main import cli
from allranks.why.logs.log_events import Pattern
from allranks.why.logs.match import Matcher

BASELINES = HERE / "baselines"
CASES = read_table("baselines.toml")
Asked = Mapping[str, Told]


@pytest.fixture(scope="module")
def told(patterns: tuple[Pattern, ...], matcher: Matcher) -> Asked:
    return {fault: ask([BASELINES / f"{fault}.txt.gz"], patterns, matcher) for fault in CASES}


def is_right(told: Told, truth: str) -> bool:
    """Whether an answer is what the lab planted, cause and culprit."""
    cause, _, culprit = truth.partition(", ")
    return told.cause in cause.split(" or ") and bool(culprit) and has_one_of(culprit, told.culprits)


def test_each_log_has_its_answer_in_the_table() -> None:
    assert {path.name.removesuffix(".txt.gz") for path in BASELINES.iterdir()} == CASES.keys()


@pytest.mark.parametrize("fault", CASES)
def test_the_answer_is_the_strongest_that_the_log_allows(fault: str, told: Asked) -> None:
    assert list_wrong(told[fault], CASES[fault]) == [], f"{told[fault].verdict}: {CASES[fault]['why']}"


def test_cause_and_culprit_of_ten_are_right_and_no_certain_answer_is_wrong(told: Asked) -> None:
    right = {fault for fault, case in CASES.items() if is_right(told[fault], case["truth"])}
    failed = {fault for fault, one in told.items() if one.confidence == "certain" and one.exit_code == 1}
    assert failed <= right
    assert len(right) >= 10


def test_the_command_line_says_the_same(told: Asked) -> None:
    command = ["why", "--json", str(BASELINES / "interface-down.txt.gz")]
    result = CliRunner().invoke(cli, command, standalone_mode=False, catch_exceptions=False)
    first = json.loads(result.stdout)["findings"][0]
    one = told["interface-down"]
    assert (int(result.return_value), first["cause_id"], first["confidence"]) == (1, one.cause, one.confidence)
