"""What the book's lines state: each sign has what its kind of fact needs, and how a process ended is read alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest

from allranks.causes.book import all_causes
from allranks.causes.cause import Sign
from allranks.model.fact_kind import FactKind, Said
from allranks.model.finding import Confidence
from allranks.why.facts_of_lines import HowEnded, read_ending

SIGNS = [(cause, sign) for cause in all_causes() for sign in cause.signs]
PEOPLE = frozenset({"rank", "ranks", "node", "pid", "local_rank", "address"})
SELF, KERNEL, SCHEDULER, LAUNCHER, OBSERVER = Said.SELF, Said.KERNEL, Said.SCHEDULER, Said.LAUNCHER, Said.OBSERVER

SPEAKERS: Mapping[FactKind, set[Said]] = {
    FactKind.ENDED: {SELF, KERNEL, SCHEDULER, LAUNCHER, OBSERVER},
    FactKind.RAISED: {SELF, KERNEL, SCHEDULER, LAUNCHER, OBSERVER},
    FactKind.ENQUEUED: {SELF},
    FactKind.WAITED: {SELF, LAUNCHER, OBSERVER},
    FactKind.PEER_LOST: {SELF},  # nobody else knows it
    FactKind.STORE_GONE: {SELF, LAUNCHER},  # an agent has its own connection
    FactKind.DEVICE_FAULT: {SELF, KERNEL, SCHEDULER, OBSERVER},
    FactKind.LINK_FAULT: {SELF, KERNEL, OBSERVER},
    FactKind.NODE_LOST: {SELF, KERNEL, SCHEDULER, LAUNCHER},
    FactKind.SCHEDULER_END: {KERNEL, SCHEDULER, LAUNCHER, OBSERVER},
    FactKind.LAUNCHER_KILL: {LAUNCHER},
    FactKind.RECOVERED: {SELF, KERNEL},
    FactKind.FINISHED: {SELF, LAUNCHER},
    FactKind.MISSING: {KERNEL, SCHEDULER, LAUNCHER, OBSERVER},  # who is missing says nothing
    FactKind.SETTING: {SELF, KERNEL, SCHEDULER, LAUNCHER, OBSERVER},
}
"""Who can state what."""


def test_who_states_a_fact_can_know_it() -> None:
    assert [
        (cause.id, sign.pattern) for cause, sign in SIGNS if sign.fact and sign.said not in SPEAKERS[sign.fact]
    ] == []


def has_how_it_ended(sign: Sign) -> bool:
    """Whether signal or code are read where its lines have one, or it says neither."""
    return bool({"signal", "code"} & sign.groups or sign.signal) or not any(map(_HOW.search, sign.hits))


_HOW = re.compile(
    r"SIG(?:KILL|SEGV|ABRT|BUS|TERM)\b|signal:? -?[0-9]|exit ?code\W{0,12}-?[0-9]"
    r"|segfault|Segmentation|Aborted|: Killed$"
)

NEEDS: Mapping[str, Callable[[Sign], bool]] = {
    "an end: its signal or code where the line has one": lambda sign: (
        sign.fact is not FactKind.ENDED or has_how_it_ended(sign)
    ),
    "a signal: that a process ended": lambda sign: sign.signal is None or sign.fact is FactKind.ENDED,
    "a peer: a process that complains about it": lambda sign: (
        "peer" not in sign.groups or sign.said in {SELF, OBSERVER}
    ),
    "a count of who came: nobody who only reports it": lambda sign: (
        sign.fact is not FactKind.MISSING or "present" not in sign.groups or not PEOPLE & sign.groups
    ),
    "what a rank said last: that it lost another one, or waited": lambda sign: (
        "end" not in sign.where
        or sign.fact in {FactKind.PEER_LOST, FactKind.STORE_GONE, FactKind.WAITED, FactKind.MISSING}
    ),
}


@pytest.mark.parametrize("need", NEEDS)
def test_a_sign_has_what_its_fact_needs(need: str) -> None:
    assert [(cause.id, sign.pattern) for cause, sign in SIGNS if not NEEDS[need](sign)] == []


def test_only_a_healthy_job_has_finished() -> None:
    assert {cause.name for cause, sign in SIGNS if sign.fact is FactKind.FINISHED} == {"healthy"}


def test_a_kill_that_nobody_claims_is_never_certain() -> None:
    ends = [
        (cause.id, sign.pattern)
        for cause, sign in SIGNS
        if sign.fact is FactKind.ENDED and sign.said in {SELF, LAUNCHER} and sign.confidence is Confidence.CERTAIN
        for hit in sign.hits
        if (match := re.search(sign.pattern, hit, re.MULTILINE)) and read_ending(sign, match.groupdict("")).signal == 9
    ]
    assert ends == []


@pytest.mark.parametrize(
    ("values", "ending"),
    [
        ({"code": "-9"}, HowEnded(9)),
        ({"code": "137"}, HowEnded(9)),
        ({"code": "3"}, HowEnded(None, 3)),
        ({"code": "255"}, HowEnded(None, 255)),
        ({"signal": "11"}, HowEnded(11)),
        ({"signal": "139"}, HowEnded(11)),
        ({"signal": "SIGTERM"}, HowEnded(15)),
        ({"signal": "ABRT"}, HowEnded(6)),
        ({"signal": "Bus error"}, HowEnded(7)),
        ({"signal": "Unknown"}, HowEnded()),
        ({"signal": "", "code": "2"}, HowEnded(None, 2)),
        ({}, HowEnded()),
    ],
)
def test_how_a_process_ended_is_read_alike(values: dict[str, str], ending: HowEnded) -> None:
    assert read_ending(Sign(pattern="", source=""), values) == ending


def test_a_line_that_says_it_in_words_has_its_signal_from_the_sign() -> None:
    assert read_ending(Sign(pattern="", source="", fact=FactKind.ENDED, signal=9), {"pid": "4711"}) == HowEnded(9)
