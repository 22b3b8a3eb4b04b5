"""From pair tests to culprits: tables of hand-made observations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import msgspec
import pytest
from seen import NO_ANSWER, PORTS, Results, around, brief, card, change, facts, good, judged, nic, silence, stall

from allranks.model.card import Card
from allranks.model.pair import PairResult

Row = tuple[str, str, str, str]


def silent_node(node: int, num_nodes: int) -> Callable[[Results], None]:
    return lambda results: silence(results, around(node, num_nodes))


def silent_pairs(*pairs: tuple[int, int]) -> Callable[[Results], None]:
    return lambda results: silence(results, pairs)


def partition(first: Iterable[int], second: Iterable[int]) -> Callable[[Results], None]:
    across = [*itertools.product(first, second)]
    return lambda results: silence(results, [*across, *((b, a) for a, b in across)])


def filter_ports(pairs: Iterable[tuple[int, int]], count: int = 6) -> Callable[[Results], None]:
    def fault(results: Results) -> None:
        change(results, pairs, num_open=8 - count, closed=dict.fromkeys(PORTS[:count], NO_ANSWER))

    return fault


def blackhole(pairs: Iterable[tuple[int, int]]) -> Callable[[Results], None]:
    return lambda results: stall(results, pairs)


def heavy_loss(pairs: Iterable[tuple[int, int]], lost: int = 14) -> Callable[[Results], None]:
    """20 % each way: about a third of what is echoed, some ports, and the large transfer."""

    def fault(results: Results) -> None:
        change(results, pairs, datagrams_lost=lost, num_open=7, closed={PORTS[0]: NO_ANSWER}, retransmits=9)
        stall(results, itertools.islice(pairs, 0, None, 2))

    return fault


def store_filtered(sources: Iterable[int]) -> Callable[[Results], None]:
    return lambda results: change(results, [(source, 0) for source in sources], store=NO_ANSWER)


ALL_TO_FIRST = range(1, 6)
BOTH = [(1, 3), (3, 1)]

# Fault -> number of nodes, what it makes of the results, the findings, the exit code.
FAULTS: dict[str, tuple[int, tuple[Callable[[Results], None], ...], list[Row], int]] = {
    "silent node of 3": (3, (silent_node(2, 3),), [("AR210", "node03", "fail", "certain")], 75),
    "silent node of 6": (6, (silent_node(3, 6),), [("AR210", "node04", "fail", "certain")], 75),
    "silent leader of 6": (6, (silent_node(0, 6),), [("AR210", "node01", "fail", "certain")], 75),
    "silent node of 70": (70, (silent_node(41, 70),), [("AR210", "node42", "fail", "certain")], 75),
    "two silent nodes of 6": (
        6,
        (silent_node(1, 6), silent_node(4, 6)),
        [("AR210", "node02", "fail", "certain"), ("AR210", "node05", "fail", "certain")],
        75,
    ),
    "two nodes, nothing between them": (
        2,
        (silent_pairs((0, 1), (1, 0)),),
        [("AR210", "node01 or node02", "fail", "undecided")],
        75,
    ),
    "silent link of 6": (
        6,
        (silent_pairs(*BOTH),),
        [("AR211", "node02 <-> node04", "fail", "certain")],
        75,
    ),
    "one way of a link of 6": (
        6,
        (silent_pairs((1, 3)),),
        [("AR211", "node02 -> node04", "fail", "certain")],
        75,
    ),
    "partition of 6": (
        6,
        (partition(range(3), range(3, 6)),),
        [("AR211", "node[01-03] | node[04-06]", "fail", "certain")],
        75,
    ),
    "partition of 6 into 2 and 4": (
        6,
        (partition((1, 2), (0, 3, 4, 5)),),
        [("AR211", "node[01,04-06] | node[02-03]", "fail", "certain")],
        75,
    ),
    "filtered link of 6": (
        6,
        (filter_ports(BOTH),),
        [("AR206", "node02 <-> node04", "fail", "certain")],
        78,
    ),
    "filtered node of 6": (6, (filter_ports(around(2, 6)),), [("AR206", "node03", "fail", "certain")], 78),
    "store port filtered for all": (6, (store_filtered(ALL_TO_FIRST),), [("AR206", "node01", "fail", "certain")], 78),
    "store port filtered for one": (6, (store_filtered([4]),), [("AR206", "node05 -> node01", "fail", "certain")], 78),
    "black hole at a node of 6": (6, (blackhole(around(2, 6)),), [("AR204", "node03", "fail", "certain")], 75),
    "black hole at a node of 3": (3, (blackhole(around(2, 3)),), [("AR204", "node03", "fail", "certain")], 75),
    "black hole of a link": (6, (blackhole(BOTH),), [("AR204", "node02 <-> node04", "fail", "certain")], 75),
    "black hole between two nodes": (
        2,
        (blackhole([(0, 1), (1, 0)]),),
        [("AR204", "node01 or node02", "fail", "undecided")],
        75,
    ),
    "20 % loss explains closed ports and stalled transfers": (
        6,
        (heavy_loss(around(2, 6)),),
        [("AR212", "node03", "fail", "certain")],
        75,
    ),
    "20 % loss on one link": (6, (heavy_loss(BOTH),), [("AR212", "node02 <-> node04", "fail", "certain")], 75),
    "clock off on one node": (
        6,
        (
            lambda results: change(results, [(a, 2) for a in range(6)], clock_offset_s=5.0),
            lambda results: change(results, [(2, a) for a in range(6)], clock_offset_s=-5.0),
        ),
        [("AR007", "node03", "warn", "certain")],
        0,
    ),
    "silent node, and another one that loses": (
        6,
        (heavy_loss(around(4, 6)), silent_node(1, 6)),
        [("AR210", "node02", "fail", "certain"), ("AR212", "node05", "fail", "certain")],
        75,
    ),
    "silent node, and a filtered link elsewhere": (
        6,
        (filter_ports(BOTH), silent_node(5, 6)),
        [("AR206", "node02 <-> node04", "fail", "certain"), ("AR210", "node06", "fail", "certain")],
        78,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_between_nodes_is_named(fault):
    num_nodes, faults, rows, exit_code = FAULTS[fault]
    judgement = judged(num_nodes, *faults)
    assert brief(judgement) == rows
    assert judgement.exit_code == exit_code


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 6, 64, 200])
def test_healthy_nodes_have_no_findings(num_nodes):
    judgement = judged(num_nodes)
    assert judgement.findings == ()
    assert judgement.exit_code == 0
    assert judgement.is_go
    assert {str(result.status) for result in judgement.results} <= {"pass", "skip", "unknown"}


def with_mtu(index: int, mtu: int) -> Card:
    return card(index, with_facts={"interfaces": (nic(index, mtu=mtu),)})


def test_a_size_above_the_smaller_mtu_is_no_black_hole():
    def lose_jumbo(results: Results) -> None:
        for a, b in around(2, 6):
            change(results, [(a, b)], datagrams={1500: True} if a == 2 else {1500: True, 9000: False})

    judgement = judged(6, lose_jumbo, cards={2: with_mtu(2, 1500)})
    assert brief(judgement) == [("AR205", "node03", "warn", "certain")]
    assert judgement.exit_code == 0


def test_a_size_that_both_mtus_allow_is_a_black_hole():
    cards = {index: with_mtu(index, 9000 if index < 3 else 4000) for index in range(6)}

    def lose(results: Results) -> None:
        change(results, around(4, 6), datagrams={1500: True, 4000: True})
        stall(results, around(4, 6), lost=(4000,))

    assert ("AR204", "node05", "fail", "certain") in brief(judged(6, lose, cards=cards))


def quiet_look(suspect: int, num_nodes: int = 6, **fields: object) -> list[PairResult]:
    """A second look at one node with three witnesses, and what is usual."""
    witnesses = [node for node in range(num_nodes) if node != suspect][:4]
    looked = [pair for node in witnesses[:3] for pair in ((suspect, node), (node, suspect))]
    quiet = {"datagrams_sent": 200, "datagrams": {}, "large_sent": 98304, "large_back": 98304, "store": None}
    usual = [good(a, b, **quiet) for a, b in itertools.pairwise(witnesses)]
    return [*(good(a, b, **(quiet | fields)) for a, b in looked), *usual]


def few_lost(node: int) -> Callable[[Results], None]:
    return lambda results: change(results, around(node, 6), datagrams_lost=1)


@pytest.mark.parametrize("name", ["20 % loss on one link", "black hole of a link"])
def test_the_fix_names_the_interface_that_the_nodes_share_also_where_no_single_node_is_named(name: str) -> None:
    num_nodes, faults, _, _ = FAULTS[name]
    (finding,) = judged(num_nodes, *faults).findings
    assert finding.interface is None
    assert "ens1f1" in (finding.fix or "")


def test_2_percent_of_loss_is_told_by_the_quiet_look():
    judgement = judged(6, few_lost(2), quiet=quiet_look(2, datagrams_lost=8, retransmits=2))
    assert brief(judgement) == [("AR212", "node03", "fail", "certain")]
    assert judgement.findings[0].message.startswith("2 % of the packets between node03 and ")
    assert judgement.exit_code == 75


def test_what_a_quiet_look_does_not_see_again_was_a_busy_machine():
    assert judged(6, few_lost(2), quiet=quiet_look(2)).findings == ()
    assert judged(6, few_lost(2), quiet=quiet_look(2, datagrams_lost=1)).findings == ()
    # Lost by a busy agent: the kernels had nothing to send again.
    assert judged(6, few_lost(2), quiet=quiet_look(2, datagrams_lost=8)).findings == ()


def test_without_a_quiet_look_a_few_lost_datagrams_say_nothing():
    assert judged(6, few_lost(2)).findings == ()


def test_a_slow_node_is_told_by_the_quiet_look():
    judgement = judged(6, quiet=quiet_look(2, delivery_mbit_s=90.0, large_s=0.02))
    assert brief(judgement) == [("AR213", "node03", "fail", "certain")]
    assert judgement.findings[0].message == "the link of node03 carries 90 Mbit/s, those of the other nodes 900 Mbit/s"
    assert judgement.findings[0].interface == "ens1f1"


def test_a_node_that_used_up_its_token_bucket_before_the_others_is_not_slow():
    quiet = quiet_look(2, delivery_mbit_s=90.0, large_s=0.02)  # the buckets of the others were full
    again = [msgspec.structs.replace(each, delivery_mbit_s=95.0, large_sent=4 * each.large_sent) for each in quiet]
    assert judged(6, quiet=[*quiet, *again]).findings == ()


def test_a_node_that_loses_is_not_also_slow():
    judgement = judged(6, few_lost(2), quiet=quiet_look(2, datagrams_lost=8, retransmits=2, delivery_mbit_s=90.0))
    assert [row[:2] for row in brief(judgement)] == [("AR212", "node03")]


def test_a_silent_link_says_that_both_ends_reach_the_others():
    (finding,) = judged(6, silent_pairs(*BOTH)).findings
    assert finding.message == (
        "no packets pass between node02 and node04 on the data network; the agents still reach each other over "
        "another path"
    )
    assert finding.waiting == "node[01,03,05-06]"
    assert finding.interface is None


def test_nobody_waits_for_a_partition_but_its_own_groups():
    (finding,) = judged(6, partition(range(3), range(3, 6))).findings
    assert finding.waiting is None
    assert finding.evidence[0].seen == (
        "both groups have the same subnet, interface, MTU and kernel: check the switches between them"
    )


def test_a_partition_says_what_differs_between_its_groups():
    cards = {index: card(index, with_facts={"kernel": "6.1"}) for index in range(3, 6)}
    (finding,) = [
        each for each in judged(6, partition(range(3), range(3, 6)), cards=cards).findings if each.cause_id == "AR211"
    ]
    assert finding.evidence[0].seen == "the groups differ in kernel: node[01-03] 6.18, node[04-06] 6.1"


def test_a_black_hole_is_told_with_its_figures():
    (finding,) = judged(6, blackhole(around(2, 6))).findings
    assert finding.message == (
        "packets above 1500 bytes are lost between node03 and every other node; the interfaces have MTU 9000"
    )
    assert [evidence.seen for evidence in finding.evidence] == [
        "datagrams of 1500 bytes pass, those of 9000 bytes do not",
        "node01 -> node03: 0 of 49152 bytes came back, 49152 unacknowledged, 3 retransmits",
        "10 pair tests failed; 0 tests of the same nodes passed",
    ]


def test_a_filtered_link_is_told_with_its_ports():
    (finding,) = judged(6, filter_ports(BOTH)).findings
    assert finding.message == ("12 of 16 TCP ports of the ephemeral range do not answer between node02 and node04")
    assert finding.evidence[0].seen == (
        "for example port 40001, 40002, 40003, 40004: no answer in 1.6 s; other packets pass"
    )
    assert finding.fix is not None
    assert "TCP ports 32768 to 60999" in finding.fix


def test_udp_that_is_closed_altogether_says_nothing():
    def fault(results: Results) -> None:
        change(results, around(2, 6), datagrams_lost=40, datagrams={1500: False, 9000: False}, clock_offset_s=None)

    assert judged(6, fault).findings == ()


def test_agents_that_are_too_busy_to_answer_are_no_firewall():
    def fault(results: Results) -> None:
        late = dict.fromkeys(PORTS[:3], "connected, but no answer in 1.6 s")
        change(results, around(2, 6), num_open=5, closed=late, store="connected, but no answer in 1.6 s")

    assert judged(6, fault).findings == ()


def test_a_filtered_store_port_is_told_with_who_gets_no_answer():
    (finding,) = judged(6, store_filtered(ALL_TO_FIRST)).findings
    assert finding.message == ("port 29500 of node01 answers none of 5 nodes, but its other ports answer")
    (finding,) = judged(6, store_filtered([4])).findings
    assert finding.message == "port 29500 of node01 does not answer node05, but its other ports answer"


def test_the_sign_of_a_clock_offset_is_the_culprits():
    for offset_s in (5.0, -3600.0):

        def shift(results: Results, offset_s: float = offset_s) -> None:
            change(results, [(a, 2) for a in range(6)], clock_offset_s=offset_s)
            change(results, [(2, a) for a in range(6)], clock_offset_s=-offset_s)

        (finding,) = judged(6, shift).findings
        assert f"{offset_s:+.1f}" in finding.message


def test_results_of_nodes_that_have_left_say_nothing():
    results = [good(a, b) for a, b in around(2, 4)] + [good(9, 1), good(1, 9)]
    cards = {2: card(2, facts=None)}
    judgement = judged(3, quiet=results, cards=cards)
    assert judgement.findings == ()


def test_what_was_not_tried_is_no_failure():
    def not_tried(results: Results) -> None:
        silence(results, around(2, 6))
        change(results, around(2, 6), problem="not tried: the 3 s were over")

    assert judged(6, not_tried).findings == ()


def test_a_node_without_facts_is_judged_like_any_other():
    cards = {index: card(index, facts=None) for index in range(6)}
    assert brief(judged(6, silent_node(3, 6), cards=cards)) == [("AR210", "node04", "fail", "certain")]
    assert facts(0).host_name == "node01"
