"""What is said of the group's causes, which no card shows: whoever finds one fills its message."""

from __future__ import annotations

import pytest

from allranks.causes.book import all_causes, find_cause
from allranks.causes.cause import Cause
from allranks.causes.outcome import failed, warned
from allranks.model.finding import Severity

GROUP: list[Cause] = [cause for cause in all_causes() if cause.id.startswith("AR4")]


@pytest.mark.parametrize(
    "cause",
    [
        find_cause("AR401"),
        find_cause("AR402"),
        find_cause("AR404"),
        find_cause("AR405"),
        find_cause("AR406"),
        find_cause("AR407"),
        find_cause("AR490"),
        find_cause("AR491"),
    ],
)
def test_whoever_finds_it_says_what_it_saw(cause: Cause) -> None:
    finding = failed("seen", what="node03 wanted to join").to_finding(cause, node="node03")
    assert (finding.message, finding.severity) == ("node03 wanted to join", Severity.FAIL)
    assert (finding.fix is None) == cause.is_outcome


@pytest.mark.parametrize("cause", [find_cause("AR404"), find_cause("AR405"), find_cause("AR406")])
def test_who_was_refused_is_a_warning_of_the_caller(cause: Cause) -> None:
    assert warned(what="it was refused").to_finding(cause, node="10.0.0.9").severity is Severity.WARN


def test_a_timeout_and_a_silence_are_outcomes_and_a_dead_rank_is_a_cause() -> None:
    assert find_cause("AR490").is_outcome
    assert find_cause("AR491").is_outcome
    assert find_cause("AR407").aliases == ("MN3",)


@pytest.mark.parametrize("cause", GROUP, ids=lambda cause: cause.id)
def test_what_a_log_told_has_words_of_its_own(cause: Cause) -> None:
    assert cause.told or not (cause.signs or cause.is_outcome)
