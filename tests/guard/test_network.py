"""What is said of a network that makes steps wait, and what is not: a table of jobs of three nodes, one rank each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from allranks.guard.goodput.lately import Lately
from allranks.guard.goodput.network_wait import NetworkSpeech, find_reason, see_traffic
from allranks.guard.scene import NodeView
from allranks.model.beat import InterfaceSeen, RankBeat
from allranks.model.traffic import MAX_NODES, Traffic
from allranks.report.traffic import describe_traffic

from .scenes import NOW_S, beat, scene


def link(busy: float = 0.8, *, at: float = 980, limit: float | None = 1000, **more: Any) -> InterfaceSeen:
    return InterfaceSeen(
        name=more.pop("name", "ens1f1"),
        sent_mbit_s=busy * at,
        received_mbit_s=busy * at,
        limit_mbit_s=limit,
        busy_share=busy,
        busy_mbit_s=at if busy else 0.0,
        **more,
    )


IDLE = link(0.04)
Told = tuple[float | None, tuple[InterfaceSeen, ...]]
"""Of one node: the share of the time that its rank waits, and its interfaces."""


def nodes(*told: Told) -> list[NodeView]:
    beats = [
        beat(index, RankBeat(rank=index, segments=1000, retransmits=index), interfaces=links)
        for index, (_, links) in enumerate(told)
    ]
    return scene(beats).nodes


def lately(*told: Told, steps: int | None = 10) -> Lately:
    shares = {rank: share for rank, (share, _) in enumerate(told) if share is not None}
    whole = sum(shares.values()) / len(shares) if shares else None
    step_s = 0.4 if shares else None
    return Lately(wait_share=whole, wait_shares=shares, waits_for=None, late={}, step_s=step_s, steps=steps)


def see(*told: Told, steps: int | None = 10) -> Traffic | None:
    return see_traffic(nodes(*told), lately(*told, steps=steps))


BUSY = (0.63, (link(),))
WAITS = (0.63, (IDLE,))
LATE = (0.05, (link(0.06),))
"""The rank that the others wait for."""
CASES = {
    "all wait, and all links are full": (
        [BUSY, BUSY, (0.63, (link(0.9),))],
        "63 % of the time is spent waiting for the network (node03 ens1f1 at 98 % of 1 Gbit/s): allranks advise",
    ),
    "one link of a tenth is full, and all wait for it": (
        [WAITS, (0.63, (link(0.8, at=97, limit=100, name="eth0"),)), WAITS],
        "63 % of the time is spent waiting for the network (node02 eth0 at 97 % of 100 Mbit/s): allranks advise",
    ),
    "the busier one of two interfaces": (
        [WAITS, (0.63, (link(0.5), link(0.7, name="ens1f2"))), WAITS],
        "63 % of the time is spent waiting for the network (node02 ens1f2 at 98 % of 1 Gbit/s): allranks advise",
    ),
    "an interface that reports no speed": (
        [(0.63, (link(0.8, at=470, limit=500, is_measured=True),)), WAITS, WAITS],
        "63 % of the time is spent waiting for the network (node01 ens1f1 at 94 % of the 500 Mbit/s that "
        "its connections reach): allranks advise",
    ),
    "what counts is the rank that waits least": (
        [(0.8, (link(),)), (0.41, (link(),)), (0.7, (link(),))],
        "41 % of the time is spent waiting for the network (node01 ens1f1 at 98 % of 1 Gbit/s): allranks advise",
    ),
    "just enough": (
        [(0.3, (link(0.15),))] * 3,
        "30 % of the time is spent waiting for the network (node01 ens1f1 at 98 % of 1 Gbit/s): allranks advise",
    ),
    "it sends more than its speed, as counters of frames may say": (
        [(0.63, (link(at=1030),))] * 3,
        "63 % of the time is spent waiting for the network (node01 ens1f1 at 100 % of 1 Gbit/s): allranks advise",
    ),
    "not enough of a step": ([(0.29, (link(),))] * 3, None),
    "a late rank: no link is full": ([WAITS, (0.05, (IDLE,)), WAITS], None),
    "a late rank, whose own link is full while it sends": ([WAITS, LATE, WAITS], None),
    "a late rank, and full links": ([BUSY, LATE, BUSY], None),
    "slow by themselves, all alike: no link is full": ([WAITS] * 3, None),
    "a link is full for much less than they wait": ([(0.63, (link(0.3),))] * 3, None),
    "nobody knows what the link can carry": ([(0.63, (link(0.0, limit=None),))] * 3, None),
    "it is not known how long ranks wait: a full link says nothing of that": ([(None, (link(),))] * 3, None),
    "nothing is told": ([(None, ())] * 3, None),
}


@pytest.mark.parametrize("what", CASES)
def test_a_line_needs_ranks_that_all_wait_and_an_interface_that_is_full(what: str) -> None:
    told, line = CASES[what]
    speech, seen = NetworkSpeech(), nodes(*told)
    said = [(at, words) for at in range(60) for words in speech.say(NOW_S + at, seen, lambda: lately(*told))]
    assert said == ([] if line is None else [(6, line)])
    assert (find_reason(see(*told)) is None) == (line is None)


def live(*shares: float) -> tuple[list[str], list[str]]:
    """Forty seconds of each of these; returns the beginnings of the lines, and of the last words."""
    speech, lines = NetworkSpeech(), list[str]()
    for number, share in enumerate(shares):
        for second in range(40):
            told = [(share, (link(),))] * 3
            lines += speech.say(NOW_S + 40 * number + second, nodes(*told), partial(lately, *told))
    return [line[:8] for line in lines], [line.partition("(")[0] for line in speech.last_words()]


@pytest.mark.parametrize(
    ("shares", "said", "last"),
    [
        ([0.5], ["50 % of "], None),  # it has just been said
        ([0.5, 0.5], ["50 % of "], "50 % of the time was spent waiting for the network "),
        ([0.5, 0.69, 0.5, 0.31, 0.5], ["50 % of "], "50 % of the time was spent waiting for the network "),
        ([0.5, 0.71, 0.75], ["50 % of ", "71 % of "], "75 % of the time was spent waiting for the network "),
        ([0.9, 0.5, 0.5], ["90 % of ", "50 % of "], "50 % of the time was spent waiting for the network "),
        ([0.5, 0.1, 0.5], ["50 % of "], "50 % of the time was spent waiting for the network "),
        ([0.5, 0.1], ["50 % of "], None),  # it was mended
        ([0.1, 0.2], [], None),
    ],
)
def test_it_is_said_once_and_again_after_a_large_change_and_at_the_end(
    shares: list[float], said: list[str], last: str | None
) -> None:
    assert live(*shares) == ([line[:8] for line in said], [last] if last else [])


def test_a_short_burst_is_no_line() -> None:
    speech, full, idle, waits = NetworkSpeech(), nodes(*[BUSY] * 3), nodes(*[WAITS] * 3), lately(*[BUSY] * 3)
    looks = (speech.say(NOW_S + at, full if at % 8 < 4 else idle, lambda: waits) for at in range(60))
    assert [line for lines in looks for line in lines] == []


def test_what_is_written_down_has_the_ranks_middle_and_the_busiest_nodes() -> None:
    told: Sequence[Told] = [(0.6 + index / 100, (link(index / 30),)) for index in range(20)]
    traffic = see(*told, steps=29)
    assert traffic is not None
    assert (traffic.iteration, traffic.step_s, traffic.wait_share, traffic.least_wait_share) == (29, 0.4, 0.695, 0.6)
    assert [node.node for node in traffic.nodes] == [f"node{number:02}" for number in range(5, 21)]
    assert (len(traffic.nodes), traffic.num_nodes) == (MAX_NODES, 20)
    assert (traffic.nodes[-1].segments, traffic.nodes[-1].retransmits, traffic.nodes[-1].wait_share) == (1000, 19, 0.79)
    lines = describe_traffic(traffic, at="2026-11-28T13:05:01")
    assert lines[0] == (
        "70 % of the time is spent waiting for communication, and a step takes 400 ms (at step 29), 2026-11-28T13:05:01"
    )
    assert lines[-2] == (
        "node20: ens1f1 621 Mbit/s out, 621 Mbit/s in, 63 % of the time at 98 % of 1 Gbit/s; "
        "19 of 1000 segments sent again (1.9 %)"
    )
    assert lines[-1] == "4 nodes with less traffic"
    bare = see((None, ()), steps=None)
    assert bare is not None
    assert (bare.iteration, bare.step_s, bare.wait_share, bare.least_wait_share) == (None, None, None, None)
    assert see_traffic(scene([beat(0)]).nodes, lately(steps=None)) is None


def test_a_job_whose_waits_are_not_known_is_described_too() -> None:
    traffic = see((None, (link(0.0),)), steps=None)
    assert traffic is not None
    assert describe_traffic(traffic) == [
        "it is not known how long ranks wait",
        "node01: ens1f1 0 Mbit/s out, 0 Mbit/s in; 0 of 1000 segments sent again",
    ]
