"""Whose words does a failure use that no sign knows?"""

from __future__ import annotations

from allranks.causes.catalogue import all_causes
from allranks.why.resemblance import resembling


def test_a_sample_line_is_most_like_its_own_cause() -> None:
    causes = [cause for cause in all_causes() if cause.hits and not cause.is_outcome]
    right = sum(next(resembling([cause.hits[0]]), None) is cause for cause in causes)
    assert right / len(causes) > 0.8


def test_other_words_for_a_known_failure_are_like_it() -> None:
    names = [cause.name for cause in resembling(["plugin: interface eth7 was not found, set NCCL_SOCKET_IFNAME"])]
    assert "nic-not-found" in names or "wrong-nic" in names


def test_words_of_nobody_are_like_nothing() -> None:
    assert not list(resembling(["zxqv brrt", ""]))
    assert not list(resembling([]))
