"""Who may go on when some are lost: the table of the cases that matter, and what must hold for all."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.launch.lead.assignment import make_group
from allranks.launch.lead.members import ConnectedNode, Members, has_majority
from allranks.model.card import Card, Facts


@pytest.mark.parametrize(
    ("here", "electors", "expected"),
    [
        pytest.param({0}, [(0,)], True, id="one node"),
        pytest.param({0}, [(0, 1)], True, id="of two nodes, the leader's"),
        pytest.param({1}, [(0, 1)], False, id="of two nodes, the other one"),
        pytest.param({1, 2}, [(0, 1, 2)], True, id="two of three without the leader"),
        pytest.param({0}, [(0, 1, 2)], False, id="the leader alone of three"),
        pytest.param({0, 1, 2}, [(0, 1, 2, 3, 4, 5)], True, id="the leader's half of six"),
        pytest.param({3, 4, 5}, [(0, 1, 2, 3, 4, 5)], False, id="the other half"),
        pytest.param({1, 2, 3, 4, 5}, [(0, 1, 2, 3, 4, 5)], True, id="all but the leader"),
        pytest.param({0, 5}, [(5, 0, 1, 2)], True, id="after a change of leaders its weight is the new one's"),
        pytest.param({0, 7, 8, 9}, [(0, 1, 2)], False, id="nodes that came later do not count"),
        pytest.param({0, 1}, [(0, 1, 2), (0, 1)], True, id="two generations"),
        pytest.param({0, 1}, [(0, 1, 2, 3, 4, 5), (0, 1)], False, id="the majority of the second alone"),
    ],
)
def test_who_is_the_majority(here: set[int], electors: list[tuple[int, ...]], expected: bool):
    assert has_majority(here, electors) is expected


@given(st.integers(1, 40), st.data())
def test_two_groups_without_a_common_member_are_never_both_the_majority(num_nodes: int, data: st.DataObject):
    nodes = tuple(data.draw(st.permutations(range(num_nodes))))
    one = data.draw(st.sets(st.sampled_from(nodes)))
    assert not (has_majority(one, [nodes]) and has_majority(set(nodes) - one, [nodes]))


@pytest.mark.parametrize("num_nodes", range(1, 8))
def test_of_a_job_cut_in_two_exactly_one_part_is_the_majority(num_nodes: int):
    nodes = tuple(range(num_nodes))
    for size in range(num_nodes + 1):
        for part in itertools.combinations(nodes, size):
            assert has_majority(part, [nodes]) != has_majority(set(nodes) - set(part), [nodes])


@pytest.mark.parametrize(
    ("here", "begins", "is_succeeded"),
    [
        pytest.param((0, 1, 2), True, True, id="three of five: as everywhere"),
        pytest.param((0, 1), True, False, id="two: it goes on, but nobody may succeed it"),
    ],
)
def test_a_leader_beside_srun_needs_no_majority(here: tuple[int, ...], begins: bool, is_succeeded: bool):
    cards = {index: Card(host=f"n{index}", pid=1, node_index=index, num_workers=1, num_gpus=0) for index in range(5)}
    plan = make_group(cards, wanted_backend="gloo", attempt=0, store_address="", store_port=1)[0]
    nodes = {index: ConnectedNode(card=cards[index], name=f"n{index}", address="") for index in here}
    members = Members(num_nodes=5, nodes=nodes, needs_majority=False)
    members.begin(plan)
    assert members.have_majority() is begins
    assert (members.give_up_succession(), members.may_be_succeeded) == (not is_succeeded, is_succeeded)
    members.electors = ((0, 1),)
    assert (members.give_up_succession(), members.may_be_succeeded) == (False, is_succeeded), "for good"


@pytest.mark.parametrize(("generation", "expected"), [(0, 2), (-1, None)])
def test_an_agent_that_was_started_again_is_no_member_that_missed_the_first_plan(generation: int, expected: int | None):
    """It would hold the first leader for its own, whoever leads now."""
    members = Members(num_nodes=3, nodes={}, group={0: "n0", 1: "n1", 2: "n2"})
    members.miss(2, "it has not come to the new leader", 6.0)
    card = Card(host="n2", pid=1, node_index=2, num_workers=1, num_gpus=0, incarnation=7, generation=generation)
    assert members.take_back(card, "10.0.0.2", generation=0, may_return=False) == expected


def test_a_new_node_that_sends_gradients_in_another_format_is_turned_away():
    def node(index, **flags):
        facts = Facts(environment=flags)
        return Card(host=f"n{index}", pid=1, node_index=index, num_workers=1, num_gpus=0, facts=facts)

    job = node(0, ALLRANKS_COMPRESS="int8")
    members = Members(num_nodes=3, nodes={0: ConnectedNode(card=job, name="n0", address="")})
    assert members.admit(node(1, ALLRANKS_COMPRESS="int8", LD_PRELOAD="x")) == 1
    assert members.admit(node(1, ALLRANKS_COMPRESS="bf16", ALLRANKS_BUCKET_MB="4")) == (
        "it was started with --compress bf16 (in the job int8), --bucket-mb 4 (in the job unset): all nodes must send "
        "gradients alike"
    )
    assert members.admit(msgspec.structs.replace(node(1), facts=None)) == 1
