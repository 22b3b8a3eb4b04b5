"""From what streams carried to the link, node or port that is at fault: pure."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from allranks.comm.bench import confirm, count_untested, join_reports, mark
from allranks.comm.bench_table import BenchTable, Pair
from allranks.comm.streams import RoundReport, read_spread
from allranks.launch.check.matrix import describe_busy, describe_untested, render_streams
from allranks.launch.check.member_step import MemberAddress
from allranks.launch.check.network_streams import StreamOrder, judge_network, plan_again, plan_streams
from allranks.launch.srun import decode, encode
from allranks.model.finding import Confidence
from allranks.preflight.matchings import matchings

NODES = tuple(f"node0{i}" for i in range(1, 7))
ENDS = {name: MemberAddress(address=f"10.0.0.{i}", interface=f"eth{i % 2}") for i, name in enumerate(NODES)}


def streams(
    change: Callable[[str, str], dict[str, float]] = lambda a, b: {}, nodes: tuple[str, ...] = NODES
) -> list[Pair]:
    """All carry 950 Mbit/s and lose nothing, except for what is said of some."""
    usual = {"mbit_s": 950.0, "peak_mbit_s": 1000.0, "segments": 22000}
    return [Pair(source=a, target=b, **{**usual, **change(a, b)}) for a in nodes for b in nodes if a != b]  # type: ignore[arg-type]


SLOW = {"mbit_s": 95.0, "peak_mbit_s": 99.0, "segments": 2200}
OWN_QUEUE = {**SLOW, "retransmitted": 75, "lost_at": 0.4}
LOSSY = {"retransmitted": 430, "mbit_s": 700.0, "lost_at": 1.0}

PLANTED = {
    "nothing": (lambda a, b: {}, []),
    "a slow node, whose queue drops what does not fit": (
        lambda a, b: {**SLOW, **({"retransmitted": 112, "lost_at": 1.0} if (a, b) == ("node01", "node03") else {})}
        if "node03" in (a, b) else {},
        ["AR213 slow-link node03"],
    ),
    "a slow node that loses packets, too": (
        lambda a, b: {**SLOW, **({"retransmitted": 112, "lost_at": 1.0, "mbit_s": 40.0} if b == "node03" else {})}
        if "node03" in (a, b) else {},
        ["AR212 packet-loss node03", "AR213 slow-link node03"],
    ),
    "a slow link, one way": (
        lambda a, b: SLOW if (a, b) == ("node01", "node04") else {},
        ["AR213 slow-link node01 -> node04"],
    ),
    "a slow link": (lambda a, b: SLOW if {a, b} == {"node01", "node04"} else {}, ["AR213 slow-link node01 <-> node04"]),
    "a slow node": (lambda a, b: SLOW if "node03" in (a, b) else {}, ["AR213 slow-link node03"]),
    "a node that sends slowly": (lambda a, b: SLOW if a == "node03" else {}, ["AR213 slow-link node03"]),
    "its own queue loses": (lambda a, b: OWN_QUEUE if b == "node03" else {}, ["AR213 slow-link node03"]),
    "a lossy port": (lambda a, b: LOSSY if "node05" in (a, b) else {}, ["AR212 packet-loss node05"]),
    "a lossy port that TCP makes slow": (
        lambda a, b: {**SLOW, "retransmitted": 44, "lost_at": 1.0} if "node05" in (a, b) else {},
        ["AR212 packet-loss node05"],
    ),
    "a lossy port and a slow node": (
        lambda a, b: SLOW if "node02" in (a, b) else LOSSY if "node05" in (a, b) else {},
        ["AR212 packet-loss node05", "AR213 slow-link node02"],
    ),
    "busy machines": (lambda a, b: {"mbit_s": 60.0, "peak_mbit_s": 900.0} if a < "node03" else {}, []),
    "traffic of others": (lambda a, b: {**SLOW, "others_mbit_s": 800.0} if b == "node03" else {}, []),
    "full queues": (lambda a, b: {"retransmitted": 300, "lost_at": 0.5} if a == "node06" else {}, []),
    "some lose a little": (lambda a, b: {"retransmitted": 60, "lost_at": 1.0} if a == "node06" else {}, []),
    "all lose alike": (lambda a, b: {"retransmitted": 300, "lost_at": 1.0}, []),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_what_was_planted_is_named_and_nothing_else(planted: str) -> None:
    change, expected = PLANTED[planted]
    pairs = streams(change)
    found = judge_network(pairs, mark(pairs), ENDS)
    assert [f"{each.cause} {each.node}" for each in found] == expected


def test_a_finding_says_what_the_link_carries_and_where_to_look() -> None:
    pairs = streams(PLANTED["a slow link, one way"][0])
    (found,) = judge_network(pairs, mark(pairs), ENDS)
    assert found.message == "the link of node01 and node04 carries 95 Mbit/s, those of the other nodes 950 Mbit/s"
    assert (found.fix or "").startswith("on node01 and node04, ethtool shows the Speed; low: ")
    assert [each.seen for each in found.evidence] == ["node01 -> node04: 95 Mbit/s"]
    assert found.confidence is Confidence.CERTAIN


def test_other_traffic_is_said_and_blames_nobody() -> None:
    marks = mark(streams(PLANTED["traffic of others"][0]))
    assert (marks.slow, len(marks.unjudged)) == ((), 5)
    (line,) = describe_busy(marks)
    assert line.startswith(
        "the network is busy: node01 -> node03 met 800 Mbit/s of other traffic; 5 slow or lossy streams cannot"
    )


def test_machines_that_are_busy_are_said_and_no_link_is_blamed() -> None:
    marks = mark(streams(PLANTED["busy machines"][0]))
    (line,) = describe_busy(marks)
    assert line.startswith("the machines are busy: 10 streams of 30 waited for a core")


def test_other_traffic_is_said_where_no_stream_was_slow_too() -> None:
    marks = mark(streams(lambda a, b: {"others_mbit_s": 300.0, "mbit_s": 640.0}))
    assert describe_busy(marks) == ("the network is busy: node01 -> node02 met 300 Mbit/s of other traffic",)


def test_the_slowest_stream_of_a_table_is_no_stream_that_waited_for_a_core() -> None:
    starved = streams(lambda a, b: {"mbit_s": 60.0, "peak_mbit_s": 3000.0} if a == "node02" else {})
    assert BenchTable(backend="", nodes=NODES, ranks=6, pairs=tuple(starved)).slowest_mbit_s() == 950
    slow = streams(lambda a, b: SLOW if a == "node02" else {})
    assert BenchTable(backend="", nodes=NODES, ranks=6, pairs=tuple(slow)).slowest_mbit_s() == 99
    assert BenchTable(backend="", nodes=NODES, ranks=6).slowest_mbit_s() is None


def test_a_second_look_has_the_odd_pairs_and_no_node_twice_in_a_round() -> None:
    plan = plan_streams(ENDS, port=29500)
    again = plan_again(plan, mark(streams(PLANTED["a slow node"][0])))
    assert sorted(pair for pairs in again.rounds for pair in pairs) == sorted(
        tuple(sorted((name, "node03"))) for name in NODES if name != "node03"
    )
    assert all(len({name for pair in pairs for name in pair}) == 2 * len(pairs) for pairs in again.rounds)
    assert again.times == 2


def test_what_is_slow_or_lossy_only_once_is_not_blamed() -> None:
    first = streams(lambda a, b: SLOW if a == "node01" else LOSSY if a == "node02" else {})
    again = streams()
    pairs = confirm(first, again)
    assert judge_network(pairs, mark(pairs), ENDS) == ()
    assert confirm(first, []) == tuple(first)


def test_all_pairs_of_70_nodes_fit_into_a_minute_and_the_rest_is_called_untested() -> None:
    nodes = {f"n{i}": MemberAddress(address=f"10.0.0.{i}", interface="eth0") for i in range(72)}
    all_of_70 = plan_streams(dict([*nodes.items()][:70]), port=1)
    assert sum(map(len, all_of_70.rounds)) == 70 * 69 / 2
    plan = plan_streams(nodes, port=1)
    assert len(plan.rounds) == 70
    assert 59 < plan.expected_s <= 60
    told = [
        RoundReport(node=a, peer=b, mbit_s=950.0) for pairs in plan.rounds for way in pairs for a, b in (way, way[::-1])
    ]
    pairs = join_reports([*nodes], plan.rounds, told)
    assert (len(pairs), count_untested([*nodes], pairs)) == (5040, 72)
    assert describe_untested(pairs) == ""
    assert "72 of 5112 not tested, for lack of time" in render_streams([*nodes], pairs, mark(pairs))


def test_the_order_of_a_thousand_nodes_fits_into_a_variable() -> None:
    nodes = {
        f"gpu-b{i:04}": MemberAddress(address=f"10.{i >> 8}.{i & 255}.17", interface="ens1f0np0") for i in range(1024)
    }
    plan = plan_streams(nodes, port=29500)
    order = encode(StreamOrder.of(plan))
    assert len(order) < 128 << 10
    assert decode(order, StreamOrder).full_plan() == plan
    again = plan_again(plan, mark(streams(PLANTED["a slow node"][0])))
    assert decode(encode(StreamOrder.of(again)), StreamOrder).full_plan() == again


def test_a_stream_that_failed_is_told_with_its_reason() -> None:
    rounds = matchings(["a", "b"])
    pairs = join_reports(["a", "b"], rounds, [RoundReport(node="a", peer="b", why="b has ended")])
    assert describe_untested(pairs) == "2 of 2 streams failed: a -> b: b has ended"
    assert pairs[1].why == "no report from b"


def test_the_end_that_met_more_traffic_of_others_counts() -> None:
    told = [
        RoundReport(node="a", peer="b", mbit_s=10.0, sent_by_others_mbit_s=1.0, got_by_others_mbit_s=7.0),
        RoundReport(node="b", peer="a", mbit_s=20.0, sent_by_others_mbit_s=3.0, got_by_others_mbit_s=5.0),
    ]
    assert [pair.others_mbit_s for pair in join_reports(["a", "b"], matchings(["a", "b"]), told)] == [5.0, 7.0]


def test_the_matrix_marks_what_is_odd() -> None:
    nodes = NODES[:4]
    pairs = streams(lambda a, b: SLOW if (a, b) == ("node01", "node04") else {}, nodes)
    pairs[0] = replace(pairs[0], mbit_s=None, why="node02 has ended")
    assert render_streams(nodes, pairs, mark(pairs)).splitlines() == [
        "Mbit/s from, to   1    2    3    4",
        "1 node01          -    .  950   95*",
        "2 node02        950    -  950  950",
        "3 node03        950  950    -  950",
        "4 node04        950  950  950    -",
        "* slow; . not tested",
        "streams: median 950 Mbit/s, slowest node01 -> node04 95 Mbit/s; 0 % of all segments were sent again",
    ]


@pytest.mark.parametrize(
    ("rises", "spread"), [([], 0.0), (range(100), 1.0), (range(30, 50), 0.2), ([5], 0.1)],
)  # fmt: skip
def test_lost_segments_are_counted_by_the_tenths_in_which_they_were_lost(rises: range, spread: float) -> None:
    samples = [(at / 100, sum(each < at for each in rises)) for at in range(101)]
    assert read_spread(samples) == pytest.approx(spread, abs=0.11)
