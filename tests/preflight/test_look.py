"""Between more nodes than are tried with all others: is a path that swallows large packets found, and who is it?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from seen import brief, card, good, terms

from allranks.model.pair import FULL, LARGE, SPARSE, PairResult
from allranks.preflight.judge import Judgement, Observations, judge
from allranks.preflight.look import FULL_UP_TO, RoundOfTests, plan_first_look
from allranks.preflight.second_look import MAX_LARGE, merge, plan_confirmation, plan_large_look, plan_quiet_look

Passes = Callable[[int, int], bool]
"""Whether packets of 9000 bytes come from one node to another and back."""


def test_up_to_64_nodes_everything_is_tried_with_everybody():
    look = plan_first_look(range(64), seed=1)
    assert (len(look.pairs), look.effort, look.within_s, look.probed) == (4032, FULL, 3.0, frozenset())


def test_above_each_node_sends_one_packet_of_the_mtu():
    nodes = range(10, 10 + FULL_UP_TO + 1)
    look = plan_first_look(nodes, seed=1)
    assert (look.effort, look.within_s) == (SPARSE, 6.0)
    assert look.probed <= set(look.pairs)
    assert sorted(source for source, _ in look.probed) == sorted(target for _, target in look.probed) == [*nodes]


def test_the_deadline_can_be_another():
    assert plan_first_look(range(100), seed=1, within_s=60.0).within_s == 60.0


def do(look: RoundOfTests, passes: Passes) -> list[PairResult]:
    """What the mesh reports of a look."""
    return [seen(pair, look, is_whole=passes(*pair)) for pair in look.pairs]


def seen(pair: tuple[int, int], look: RoundOfTests, *, is_whole: bool) -> PairResult:
    if look.effort == SPARSE:
        is_probed = pair in look.probed
        size = 0 if is_probed else 1024
        probe = {9000: is_whole} if is_probed else {}
        return good(
            *pair, num_open=1, large_sent=size, large_back=size, large_s=None if is_probed else 1e-4, datagrams_sent=4,
            datagrams=probe,
        )  # fmt: skip
    assert look.effort == LARGE
    if is_whole:
        return good(*pair, num_open=1, datagrams_sent=4)
    return good(
        *pair, num_open=1, datagrams_sent=4, datagrams={1500: True, 9000: False}, large_s=None, large_back=0,
        unacked_bytes=49152, retransmits=3, delivery_mbit_s=None,
    )  # fmt: skip


def hold(num_nodes: int, at_first: Passes, then: Passes | None = None) -> tuple[Judgement, RoundOfTests | None]:
    """Go the way of a roll call: the verdict, and the look that followed lost packets."""
    first = plan_first_look(range(num_nodes), seed=0)
    results = do(first, at_first)
    assert plan_confirmation(results) is None
    look = plan_large_look(results, seed=0)
    if look is not None:
        results = merge(results, do(look, then or at_first))
    assert plan_quiet_look(results) is None
    cards = {index: card(index) for index in range(num_nodes)}
    return judge(Observations(cards=cards, results=tuple(results)), terms(num_nodes)), look


@pytest.mark.parametrize("num_nodes", [65, 100, 200])
def test_where_all_is_well_nothing_large_is_sent(num_nodes):
    judgement, look = hold(num_nodes, lambda a, b: True)
    assert (judgement.findings, look) == ((), None)


@pytest.mark.parametrize("culprit", [0, 41, 99])
def test_one_node_of_a_hundred_that_swallows_large_packets_is_named(culprit):
    judgement, look = hold(100, lambda a, b: culprit not in (a, b))
    assert brief(judgement) == [("AR204", f"node{culprit + 1:02d}", "fail", "certain")]
    assert judgement.findings[0].message.startswith("packets above 1500 bytes are lost between node")
    assert judgement.exit_code == 75
    assert len(look.pairs) < 20


def test_so_are_three():
    judgement, _ = hold(100, lambda a, b: not {a, b} & {7, 8, 61})
    assert sorted(row[:2] for row in brief(judgement)) == [
        ("AR204", "node08"), ("AR204", "node09"), ("AR204", "node62"),
    ]  # fmt: skip


def test_an_agent_that_missed_the_packet_is_not_named():
    judgement, look = hold(100, lambda a, b: 41 not in (a, b), lambda a, b: True)
    assert judgement.findings == ()
    assert look is not None


def test_two_halves_are_a_partition():
    judgement, _ = hold(100, lambda a, b: (a < 50) == (b < 50))
    (finding,) = judgement.findings
    assert finding.node == "node[01-50] | node[51-100]"


def test_where_no_large_packet_passes_at_all_the_follow_up_stays_bounded():
    _, look = hold(400, lambda a, b: False)  # 200 nodes stay below the bound
    assert len(look.pairs) <= 3 * MAX_LARGE


def test_where_datagrams_are_closed_nothing_is_concluded():
    first = plan_first_look(range(100), seed=0)
    results = [good(*pair, datagrams_lost=40, datagrams={9000: False}, large_sent=0) for pair in first.pairs]
    assert plan_large_look(results, seed=0) is None


def test_what_sent_a_large_payload_has_said_all():
    assert plan_large_look([good(0, 1, datagrams={1500: True, 9000: False})], seed=0) is None
