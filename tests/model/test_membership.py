"""Is one value enough to know who trains together, and which rank this process is?"""

from __future__ import annotations

import pytest

from allranks.model.errors import UsageError
from allranks.model.membership import ALONE, Membership, read_members


def test_ranks_are_spread_over_nodes_and_the_last_node_may_have_fewer():
    own = Membership.spread(4, 5, per_node=2)
    assert [(member.first_rank, member.num_workers) for member in own.members] == [(0, 2), (2, 2), (4, 1)]
    assert (own.world_size, own.num_nodes, own.local_world_size, own.is_leader) == (5, 3, 1, False)


def test_nodes_of_different_sizes_are_read_from_the_environment():
    members = read_members("gpu-a=0+2,gpu-b=2+4")
    places = [Membership(rank=rank, members=members) for rank in range(6)]
    assert [own.local_world_size for own in places] == [2, 2, 4, 4, 4, 4]
    assert {own.world_size for own in places} == {6}
    assert read_members("") == ()


def test_a_node_whose_ranks_are_dealt_out_in_turn_is_one_node():
    own = Membership(rank=2, members=read_members("a=0+1,b=1+1,a=2+1,b=3+1,a=4+1"))
    assert (own.num_nodes, own.world_size, own.local_world_size) == (2, 5, 3)


def test_one_process_is_a_world_of_one():
    assert (ALONE.rank, ALONE.world_size, ALONE.local_world_size, ALONE.is_leader) == (0, 1, 1, True)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_not_there_is_refused(rank):
    with pytest.raises(UsageError, match=f"rank {rank} of 2; expected 0 to 1"):
        Membership.spread(rank, 2)


def test_members_of_a_file_that_somebody_has_damaged_are_left_out() -> None:
    damaged = f"n1=0+2,n2={'1' * 5000}+2,=1+1,n3=2+,n4=2+1,{'9' * 200_000}"
    assert [member.name for member in read_members(damaged)] == ["n1", "n4"]
