"""Does `why` answer to each log of probes/ what probes.toml says? Whole logs, as real jobs write them."""

from __future__ import annotations

import pytest
from tests.why.asking import PROBES, ask, list_wrong, read_table

from allranks.why.logs.log_events import Pattern
from allranks.why.logs.match import Matcher

CASES = read_table("probes.toml")


def test_each_log_has_its_answer_in_the_table() -> None:
    assert {path.name for path in PROBES.iterdir()} == CASES.keys()


@pytest.mark.parametrize("probe", CASES)
def test_the_answer_is_the_one_in_the_table(probe: str, patterns: tuple[Pattern, ...], matcher: Matcher) -> None:
    told = ask([PROBES / probe], patterns, matcher)
    assert list_wrong(told, CASES[probe]) == [], f"{told.verdict}, beside it {told.beside}: {CASES[probe]['why']}"
    assert len({finding.cause for finding in told.all}) == len(told.all), "a cause is told twice"


def test_a_crash_that_srun_and_the_kernel_tell_is_told_once(patterns: tuple[Pattern, ...], matcher: Matcher) -> None:
    told = ask([PROBES / "one-crash-told-by-srun-and-the-kernel"], patterns, matcher)
    assert not [note for note in told.printed[0].notes if "also by itself" in note]


@pytest.mark.parametrize("probe", ["exit-beside-another-nodes-error", "tags-lines-below-an-error-of-nccl"])
def test_an_exit_has_no_words_of_another_node(probe: str, patterns: tuple[Pattern, ...], matcher: Matcher) -> None:
    told = ask([PROBES / probe], patterns, matcher)
    assert told.printed[0].message == "the script itself failed; no evidence points to the cluster"


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        ("container-fails-on-two-of-four", "401 Unauthorized"),
        ("container-fails-on-all", "No such file or directory"),
        ("container-import-fails-twice", "503 Service Unavailable"),
    ],
)
def test_the_line_that_says_why_no_container_started_is_evidence(
    probe: str, why: str, patterns: tuple[Pattern, ...], matcher: Matcher
) -> None:
    told = ask([PROBES / probe], patterns, matcher)
    assert [line for line in told.printed[0].evidence if why in line.seen]
