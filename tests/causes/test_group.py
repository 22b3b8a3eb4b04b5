from __future__ import annotations

import re

import pytest

from allranks.causes.catalogue import all_causes
from allranks.causes.cause import Cause, failed, warned
from allranks.causes.group.arrival import DuplicateRank, MissingRank, RendezvousTimeout, StaleStore, Stranger
from allranks.causes.group.death import DeadRank
from allranks.causes.group.timeout import CollectiveTimeout, SilentHang
from allranks.model.finding import Severity

GROUP: list[type[Cause]] = [cause for cause in all_causes() if cause.id.startswith("AR4")]


@pytest.mark.parametrize(
    "cause",
    [MissingRank, RendezvousTimeout, StaleStore, DuplicateRank, Stranger, DeadRank, CollectiveTimeout, SilentHang],
)
def test_whoever_finds_it_says_what_it_saw(cause: type[Cause]) -> None:
    finding = cause.find(failed("seen", what="node03 wanted to join"), node="node03")
    assert (finding.message, finding.severity) == ("node03 wanted to join", Severity.FAIL)
    assert (finding.fix is None) == cause.is_outcome


@pytest.mark.parametrize("cause", [StaleStore, DuplicateRank, Stranger])
def test_who_was_refused_is_a_warning_of_the_caller(cause: type[Cause]) -> None:
    assert cause.find(warned(what="it was refused"), node="10.0.0.9").severity is Severity.WARN


def test_a_timeout_and_a_silence_are_outcomes_and_a_dead_rank_is_a_cause() -> None:
    assert CollectiveTimeout.is_outcome
    assert SilentHang.is_outcome
    assert DeadRank.aliases == ("MN3",)


@pytest.mark.parametrize("cause", GROUP, ids=lambda cause: cause.id)
def test_what_a_log_told_is_one_line_with_groups_that_every_sign_fills(cause: type[Cause]) -> None:
    named = (
        set.intersection(*(set(re.compile(sign.pattern).groupindex) for sign in cause.signs)) if cause.signs else set()
    )
    assert "\n" not in cause.told
    assert set(re.findall(r"\{(\w+)\}", cause.told)) <= named
    if cause.signs or cause.is_outcome:
        assert cause.told
