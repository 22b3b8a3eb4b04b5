from __future__ import annotations

import re

import pytest

from allranks.causes.cause import Cause, failed, warned
from allranks.causes.group import (
    CollectiveTimeout,
    DeadRank,
    DuplicateRank,
    MissingRank,
    RendezvousTimeout,
    StaleStore,
    Stranger,
)
from allranks.causes.net.link import PeerConnectionLost
from allranks.model.finding import Severity

ALL: list[type[Cause]] = [
    MissingRank, RendezvousTimeout, StaleStore, DuplicateRank, Stranger, DeadRank, CollectiveTimeout,
    PeerConnectionLost,
]  # fmt: skip


@pytest.mark.parametrize("cause", ALL)
def test_whoever_finds_it_says_what_it_saw(cause: type[Cause]) -> None:
    finding = cause.find(failed("seen", what="node03 wanted to join"), node="node03")
    assert (finding.message, finding.severity) == ("node03 wanted to join", Severity.FAIL)
    assert (finding.fix is None) == cause.is_outcome


@pytest.mark.parametrize("cause", [StaleStore, DuplicateRank, Stranger])
def test_who_was_refused_is_a_warning_of_the_caller(cause: type[Cause]) -> None:
    assert cause.find(warned(what="it was refused"), node="10.0.0.9").severity is Severity.WARN


def test_a_timeout_is_an_outcome_and_a_dead_rank_its_cause() -> None:
    assert CollectiveTimeout.is_outcome
    assert DeadRank.aliases == ("MN3",)


@pytest.mark.parametrize("cause", ALL)
def test_lines_are_told_apart(cause: type[Cause]) -> None:
    for hit in cause.hits:
        firing = {other.id for other in ALL if any(re.search(sign.pattern, hit) for sign in other.signs)}
        assert firing == {cause.id}
    for sign in cause.signs:
        assert any(re.search(sign.pattern, hit) for hit in cause.hits)
