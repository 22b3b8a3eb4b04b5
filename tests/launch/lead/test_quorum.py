"""Who may go on when some are lost: the table of the cases that matter, and what must hold for all."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.launch.lead.members import has_majority


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
