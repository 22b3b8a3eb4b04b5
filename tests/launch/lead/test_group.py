"""Who is which rank, once all have come."""

from __future__ import annotations

import pytest

from allranks.launch.lead.assignment import make_group
from allranks.model.card import Card
from allranks.model.data_network import DataNetwork
from allranks.model.errors import SetupError
from allranks.model.membership import Member
from allranks.wire.protocol import Plan
from cards import make_card


def card(index: int, **more: object) -> Card:
    return make_card(index + 1, **({"pid": 800 + index, "num_workers": 2} | more))


def group(*cards: Card, backend: str = "auto", attempt: int = 0) -> dict[int, Plan]:
    by_index = {each.node_index: each for each in cards}
    return make_group(by_index, wanted_backend=backend, attempt=attempt, store_address="10.0.0.1", store_port=29501)


def test_everybody_gets_the_same_plan_with_an_index_of_its_own():
    plans = group(card(1, num_workers=1), card(0), attempt=3)
    assert {index: plan.node_index for index, plan in plans.items()} == {0: 0, 1: 1}
    assert (
        plans[0].members
        == plans[1].members
        == (
            Member(name="node01", first_rank=0, num_workers=2, host="node01"),
            Member(name="node02", first_rank=2, num_workers=1, host="node02"),
        )
    )
    assert (plans[1].attempt, plans[1].store_address, plans[1].store_port) == (3, "10.0.0.1", 29501)
    assert (plans[1].backend, plans[1].backend_reason) == ("gloo", "node01 has 0 GPUs for 2 ranks")


@pytest.mark.parametrize(
    ("cards", "members"),
    [
        ([("node01", 6)], (Member(name="node01", first_rank=0, num_workers=6, host="node01"),)),
        (
            [("node02", 4), ("node01", 1), ("node03", 8)],
            (
                Member(name="node02", first_rank=0, num_workers=4, host="node02"),
                Member(name="node01", first_rank=4, num_workers=1, host="node01"),
                Member(name="node03", first_rank=5, num_workers=8, host="node03"),
            ),
        ),
        (
            [("a", 2), ("b", 1), ("a", 3)],
            (
                Member(name="a.0", first_rank=0, num_workers=2, host="a"),
                Member(name="b", first_rank=2, num_workers=1, host="b"),
                Member(name="a.1", first_rank=3, num_workers=3, host="a"),
            ),
        ),
    ],
)
def test_ranks_follow_the_order_of_the_nodes(cards, members):
    plans = group(*(card(index, host=host, num_workers=number) for index, (host, number) in enumerate(cards)))
    assert plans[0].members == members


def test_a_thousand_nodes_have_eight_thousand_ranks():
    members = group(*(card(index, host=f"n{index:04d}", num_workers=8) for index in range(1024)))[0].members
    assert members[1023] == Member(name="n1023", first_rank=8184, num_workers=8, host="n1023")


def test_gaps_close_where_fewer_nodes_came_than_could():
    plans = group(card(0), card(2), card(4))
    assert [(m.name, m.first_rank) for m in plans[0].members] == [("node01", 0), ("node03", 2), ("node05", 4)]
    assert {index: plan.node_index for index, plan in plans.items()} == {0: 0, 2: 1, 4: 2}
    assert plans[4].world_size == 6


def test_one_node_without_gpus_decides_the_backend_for_all():
    plans = group(card(0, num_gpus=2), card(1, num_gpus=1))
    assert (plans[1].backend, plans[1].backend_reason) == ("gloo", "node02 has 1 GPU for 2 ranks")


def test_two_agents_on_a_host_have_names_of_their_own():
    plans = group(card(0, host="login"), card(1, host="login"))
    assert [member.name for member in plans[0].members] == ["login.0", "login.1"]


def test_nccl_without_gpus_names_the_nodes_that_have_too_few():
    with pytest.raises(SetupError) as refused:
        group(card(0, num_gpus=2), card(1, num_gpus=1, num_promised_gpus=2), card(2, num_gpus=1), backend="nccl")
    assert "node02 has 1 GPU for 2 ranks" in str(refused.value)
    finding = refused.value.finding
    assert finding is not None
    assert (finding.cause, finding.node) == ("AR111 backend-device-mismatch", "node[02-03]")
    assert finding.message == "backend nccl needs a GPU for each rank; 2 of 3 nodes have too few"
    assert [evidence.seen for evidence in finding.evidence] == [
        "node02: 1 GPU for 2 ranks, although SLURM says 2",
        "node03: 1 GPU for 2 ranks",
    ]


@pytest.mark.parametrize(
    ("leader", "here", "order"),
    [
        (0, [0, 1, 2, 3, 4, 5], (0, 2, 4, 1, 3, 5)),
        (3, [1, 2, 3, 4, 5], (3, 5, 2, 4, 1)),  # another leader: the ring begins with its node
        (0, [0, 1, 3, 4, 5, 6], (0, 4, 1, 3, 5, 6)),  # a node that the ring does not know comes last
    ],
)
def test_nodes_get_their_ranks_in_the_order_of_the_ring_from_the_leader_on(leader, here, order):
    network = DataNetwork(ring=(0, 2, 4, 1, 3, 5), interfaces=dict.fromkeys(range(6), ("eth0", "eth1")))
    plans = make_group(
        {index: card(index) for index in here},
        leader=leader,
        wanted_backend="gloo",
        network=network,
        attempt=0,
        store_address="",
        store_port=1,
    )
    assert plans[leader].nodes == order
    assert [member.name for member in plans[leader].members] == [f"node{index + 1:02}" for index in order]
    own = ("eth0", "eth1") if 6 not in here else ()  # one that came later has tried no second interface
    assert {plan.own_interfaces for plan in plans.values()} == {own}
