"""Whose link is broken, from connections that are stuck and a round of tries?"""

from __future__ import annotations

import itertools

import pytest

from allranks.guard.links import Episode, find_stalled, find_stuck_at, judge_links, plan_round, round_s
from allranks.guard.scene import Tried
from allranks.model.beat import LinkSeen, TrySeen
from allranks.model.finding import Confidence

from .scenes import NOW_S, address, away, beat, scene

NUM = 4


def link(own: int, peer: int, stalled_s: float = 2.0, **more) -> LinkSeen:
    own_address, peer_address = more.get("addresses", (address(own), address(peer)))
    return LinkSeen(
        own_address=own_address, peer_address=peer_address, unacked_bytes=4000, stalled_s=stalled_s, retransmits=3
    )


def picture(*links: tuple[int, int], num: int = NUM, stalled_s: float = 2.0):
    return scene(
        [
            beat(i, away(i, num=num), links=[link(own, peer, stalled_s) for own, peer in links if own == i])
            for i in range(num)
        ]
    )


def a_round(suspects, *, num: int = NUM, silent=(), large=()):
    """What every node's tries of the suspects show; pairs in `silent` and `large` are bad both ways."""
    found: dict[tuple[int, int], list[Tried]] = {}
    for source, target in itertools.product(range(num), suspects):
        if source == target:
            continue
        pair = min(source, target), max(source, target)
        seen = TrySeen(
            target=target,
            network="data",
            connects=pair not in silent,
            carries=None if pair in silent else pair not in large,
        )
        found.setdefault(pair, []).append(Tried(seen, NOW_S))
    return found


def pairs_of(node: int, num: int = NUM):
    return {(min(node, other), max(node, other)) for other in range(num) if other != node}


def judge(made, *rounds, suspects=(1, 2)):
    return judge_links(made, Episode(set(suspects), rounds=list(rounds)), find_stalled(made, NOW_S))


CUT = pairs_of(2)
TABLE = {
    # name: (rounds, cause or None, node, confidence, left out)
    "one node cut off": ([a_round((1, 2), silent=CUT)], "AR210", "node03", "certain", (2,)),
    "one node, large packets": ([a_round((1, 2), large=CUT)], "AR204", "node03", "certain", (2,)),
    "a pair, first round": ([a_round((1, 2), silent={(1, 2)})], None, None, None, None),
    "a pair, twice": ([a_round((1, 2), silent={(1, 2)})] * 2, "AR211", "node02 or node03", "undecided", (2,)),
    "a pair, large packets": ([a_round((1, 2), large={(1, 2)})] * 2, "AR204", "node02 or node03", "undecided", (2,)),
    "two nodes cut off": (
        [a_round((1, 2, 3), silent=CUT | pairs_of(3))] * 2,
        "AR210",
        "node03",
        "certain",
        (2, 3),
    ),
    "two halves": (
        [a_round((0, 1, 2, 3), silent={(0, 2), (0, 3), (1, 2), (1, 3)})] * 2,
        "AR211",
        "node[01-02] or node[03-04]",
        "undecided",
        (2, 3),
    ),
    "now and then": (
        [a_round((1, 2), silent={(1, 2), (2, 3)}), a_round((1, 2), silent={(0, 2)})],
        "AR212",
        "node03",
        "likely",
        (2,),
    ),
    "all tries pass": ([a_round((1, 2))] * 4, None, None, None, None),
}


@pytest.mark.parametrize("case", TABLE)
def test_who_is_apart_is_named(case):
    rounds, cause, node, confidence, nodes = TABLE[case]
    judged = judge(picture((1, 2), (2, 1)), *rounds)
    if cause is None:
        assert judged is None
        return
    finding = judged.findings[0]
    assert (finding.cause_id, finding.node, str(finding.confidence), judged.nodes) == (cause, node, confidence, nodes)
    assert (judged.cures, judged.exit_code) == (True, 75)
    assert "node02 -> node03: 4000 bytes unacknowledged for 2.0 s, 3 retransmits" in [e.seen for e in finding.evidence]
    assert finding.fix


@pytest.mark.parametrize(
    ("case", "names", "fix"),
    [
        ("one node cut off", ("eth0", "eth0", "ib0", "eth0"), "DOWN: set it up (ip link set ib0 up)"),
        ("one node, large packets", ("eth0",) * NUM, "or lower all nodes' MTU: ip link set eth0 mtu 1500"),
        ("one node, large packets", ("eth0", "eth0", "ib0", "eth0"), "or lower all nodes' MTU"),
        ("now and then", ("eth0", "eth0", "ib0", "eth0"), "ethtool -S ib0;"),
        ("now and then", (), "ip -s link; CRC"),
    ],
)
def test_the_fix_names_the_interface_where_it_is_known(case: str, names: tuple[str, ...], fix: str) -> None:
    made = picture((1, 2), (2, 1))
    for node, name in zip(made.nodes, names, strict=False):
        node.addresses = {"interface": name}
    assert fix in (judge(made, *TABLE[case][0]).findings[0].fix or "")


def test_of_three_nodes_two_that_agree_outweigh_the_third_after_two_rounds():
    one = a_round((1, 2), num=3, silent=pairs_of(2, 3))
    made = picture((1, 2), num=3)
    assert judge(made, one) is None
    assert judge(made, one, one).nodes == (2,)


def test_of_two_nodes_nobody_can_tell():
    one = a_round((0, 1), num=2, silent={(0, 1)})
    judged = judge(picture((0, 1), num=2), one, one, suspects=(0, 1))
    finding = judged.findings[0]
    assert (finding.node, finding.confidence, judged.nodes) == ("node01 or node02", Confidence.UNDECIDED, (1,))


def test_the_leaders_own_link_is_named_too():
    judged = judge(picture((0, 1), (1, 0)), a_round((0, 1), silent=pairs_of(0)), suspects=(0, 1))
    assert (judged.findings[0].node, judged.nodes) == ("node01", (0,))


def test_a_connection_that_is_dropped_alone_is_a_filter():
    judged = judge(picture((1, 2), stalled_s=11.0), *[a_round((1, 2))] * 4)
    assert (judged.findings[0].cause, judged.findings[0].node) == ("AR206 firewall-port", "node02 or node03")


def test_only_connections_to_nodes_of_ours_that_stall_for_long_count():
    made = scene(
        [
            beat(0, away(0, num=2), links=[link(0, 1, 1.4), link(0, 1, 1.6), link(0, 0, 5.0)]),
            beat(1, away(1, num=2), links=[link(1, 0, 9.0, addresses=("192.168.20.2", "8.8.8.8"))]),
        ]
    )
    assert [(each.own, each.peer, each.link.stalled_s) for each in find_stalled(made, NOW_S)] == [(0, 1, 1.6)]
    assert find_stalled(made, NOW_S + 60) == []  # old words


def test_every_node_tries_the_suspects():
    orders = plan_round(picture((1, 2)), {1, 2})
    assert {index: [target.node_index for target in targets] for index, targets in orders.items()} == {
        0: [1, 2],
        1: [2],
        2: [1],
        3: [1, 2],
    }
    assert {(target.network, target.address) for target in orders[0]} == {
        ("data", "192.168.20.2"),
        ("data", "192.168.20.3"),
    }


def second(index: int) -> str:
    return f"192.168.21.{index + 1}"


def test_connections_that_are_stuck_on_a_further_interface_are_tried_there():
    stuck = [link(1, 2, addresses=(second(1), second(2)))]
    made = scene([beat(i, away(i, num=NUM), links=stuck if i == 1 else [], further=(second(i),)) for i in range(NUM)])
    for node in made.nodes:
        node.addresses = {**node.addresses, "interface": "ens1f1", second(node.index): "ens2f1"}
    stalled = find_stalled(made, NOW_S)
    assert find_stuck_at(made, stalled) == {1: second(1), 2: second(2)}
    made.stuck_at = find_stuck_at(made, stalled)
    assert [target.address for target in plan_round(made, {1, 2})[0]] == [second(1), second(2)]
    assert (made.interface(2), made.interface(0)) == ("ens2f1", "ens1f1")
    both = [*stalled, *find_stalled(picture((1, 2)), NOW_S)]
    assert find_stuck_at(made, both) == {}  # the whole node, or all of its interfaces


def test_the_first_round_is_short():
    made = picture((1, 2))
    assert [round_s(made, number) for number in range(3)] == pytest.approx([0.6, 1.2, 1.2])
