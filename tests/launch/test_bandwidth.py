"""What pairs carry, held against their links and each other: pure."""

from __future__ import annotations

import pytest

from allranks.comm.bench_table import BenchRow
from allranks.launch.check.deep import compare, describe_speed, find_slow
from allranks.launch.check.pair_collectives import Meeting, MemberAddress, PairOrder, Report, list_meetings
from allranks.model.finding import Confidence, Severity
from allranks.preflight.matchings import matchings

SIX = ["n1", "n2", "n3", "n4", "n5", "n6"]
ENDS = {name: MemberAddress(address=f"10.0.0.{name[1:]}", interface="eth0") for name in SIX}
GB = 10**9


def carry(
    rates: dict[str, float], *, nodes: list[str] = SIX, links: dict[str, float] | None = None, usual: float = 1.0
) -> dict[Meeting, float]:
    """Two rounds of pairs that carry `usual` GB/s, and those of some nodes or pairs (`n1 n2`) something else."""
    meetings = []
    for number, pairs in enumerate(matchings(nodes)):
        for a, b in pairs:
            rate = min(rates.get(key, usual) for key in (a, b, f"{a} {b}", f"{b} {a}"))
            link = min(links.get(a, 100.0), links.get(b, 100.0)) if links is not None else None
            meetings.append(Meeting("gloo", number, (a, b), (), link, size_bytes=GB, time_s=1 / rate))
    return compare(meetings)


def test_bus_bandwidth_of_two_ranks_is_that_of_nccl_tests() -> None:
    assert Meeting("gloo", 0, ("n1", "n2"), (), None, size_bytes=2 * GB, time_s=2.0).busbw_gb_s == 1.0


NODE_3 = [("n3", Severity.FAIL, Confidence.LIKELY)]
WARNED_3 = [("n3", Severity.WARN, Confidence.LIKELY)]
DECISIONS = {
    "all alike": ({}, None, []),
    "all alike, far below their links": ({}, dict.fromkeys(SIX, 10.0), []),
    "a node at 85 %": ({"n3": 0.85}, None, []),
    "a node at 79 %": ({"n3": 0.79}, None, WARNED_3),
    "a node at 51 %": ({"n3": 0.51}, None, WARNED_3),
    "a node at 49 %": ({"n3": 0.49}, None, NODE_3),
    "one of its pairs at 60 %, the other at 20 %": ({"n3": 0.6, "n3 n4": 0.2}, None, WARNED_3),
    "one pair at 60 %": ({"n3 n4": 0.6}, None, []),
    "one pair at 20 %": ({"n3 n4": 0.2}, None, [("n3 <-> n4", Severity.WARN, Confidence.UNDECIDED)]),
    "a slower link that is fully used": ({"n3": 0.1}, {"n3": 0.1}, []),
    "a slower link that is used to 40 %": ({"n3": 0.04}, {"n3": 0.1}, NODE_3),
    "over RDMA, past the data interface": ({"n3": 0.3}, dict.fromkeys(SIX, 0.1), NODE_3),
}


@pytest.mark.parametrize("what", DECISIONS)
def test_who_is_slow(what: str) -> None:
    rates, links, named = DECISIONS[what]
    found = find_slow(carry(rates, links=links), ENDS)
    assert [(each.node, each.severity, each.confidence) for each in found] == named


def test_two_slow_nodes_of_eight_are_both_named() -> None:
    found = find_slow(carry({"n1": 0.2, "n4": 0.2}, nodes=[*SIX, "n7", "n8"]), ENDS)
    assert [(each.node, each.severity) for each in found] == [("n1", Severity.FAIL), ("n4", Severity.FAIL)]


def test_of_four_nodes_the_slow_one_is_named_and_of_three_nobody() -> None:
    assert [each.node for each in find_slow(carry({"n2": 0.2}, nodes=SIX[:4]), ENDS)] == ["n2"]
    assert list(find_slow(carry({"n2": 0.2}, nodes=SIX[:3]), ENDS)) == []
    assert list(find_slow({}, ENDS)) == []


def test_nodes_that_rest_in_one_round_have_a_single_pair_and_are_not_named_by_it() -> None:
    five = carry({"n1 n5": 0.2}, nodes=SIX[:5])
    assert all(each.severity is Severity.WARN for each in find_slow(five, ENDS))


def test_a_pair_is_held_against_the_smaller_of_link_and_median() -> None:
    shares = carry({"n3": 0.1}, links={"n3": 0.1})
    assert list(shares.values()) == pytest.approx([1.0] * 6)


def test_the_fastest_run_counts_and_both_ends_must_have_come_to_the_end() -> None:
    order = PairOrder(
        ends={
            "n1": MemberAddress(address="10.0.0.1", interface="eth0", link_mbit_s=1000),
            "n2": MemberAddress(address="10.0.0.2", interface="eth0", link_mbit_s=10000),
        },
        rounds=((("n1", "n2"),),),
        backends=("gloo",),
        port=29500,
    )
    row = BenchRow(collective="all_reduce", size_bytes=16 << 20, count=4 << 20, time_s=0.16, p95_s=0.2, best_s=0.15)
    measured, one, two = (
        Report(node=node, backend="gloo", row=each) for node, each in (("n1", row), ("n1", None), ("n2", None))
    )
    (speed,) = compare(list_meetings(order, [measured, one, two]))
    assert (speed.time_s, speed.link_gb_s) == (0.15, 0.125)
    assert describe_speed(speed) == "16 MiB in 150 ms, busbw 0.112 GB/s, 89 % of the link"
    assert compare(list_meetings(order, [measured, one])) == {}


@pytest.mark.parametrize("link", [None, -1, 0])
def test_a_link_that_says_nothing_is_none(link: int | None) -> None:
    ends = {name: MemberAddress(address="10.0.0.1", interface="eth0", link_mbit_s=link) for name in ("n1", "n2")}
    order = PairOrder(ends=ends, rounds=((("n1", "n2"),),), backends=("gloo",), port=29500)
    row = BenchRow(collective="all_reduce", size_bytes=16 << 20, count=4 << 20, time_s=0.1, p95_s=0.1, best_s=0.1)
    reports = [
        Report(node="n1", backend="gloo", row=row),
        *(Report(node=node, backend="gloo") for node in ("n1", "n2")),
    ]
    assert [each.link_gb_s for each in compare(list_meetings(order, reports))] == [None]
