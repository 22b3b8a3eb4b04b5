"""Whose words does a failure use that no sign knows?"""

from __future__ import annotations

import pytest

from allranks.causes.book import all_causes
from allranks.why.resemblance import resembling


def test_a_sample_line_is_most_like_its_own_cause() -> None:
    causes = [cause for cause in all_causes() if cause.hits and not cause.is_outcome]
    right = sum(next(resembling([cause.hits[0]]), None) == (cause, 0) for cause in causes)
    assert right / len(causes) > 0.8


def test_other_words_for_a_known_failure_are_like_it() -> None:
    names = [cause.name for cause, _ in resembling(["plugin: interface eth7 was not found, set NCCL_SOCKET_IFNAME"])]
    assert "nic-not-found" in names or "wrong-nic" in names


def test_words_of_nobody_are_like_nothing() -> None:
    assert not list(resembling(["zxqv brrt", ""]))
    assert not list(resembling([]))


def test_the_line_with_the_words_is_told() -> None:
    lines = ["step 10 loss 0.4", "plugin: interface eth7 was not found, set NCCL_SOCKET_IFNAME", "step 20 loss 0.3"]
    assert {at for _, at in resembling(lines)} == {1}


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: batch 17 has no label",
        "KeyError: 'labels'",
        'File "/home/user/job/train.py", line 3, in <module>',
    ],
)
def test_words_that_many_causes_use_are_like_nothing(line: str) -> None:
    assert list(resembling([line])) == []
