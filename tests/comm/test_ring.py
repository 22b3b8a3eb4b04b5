"""Which order of the nodes keeps those of one switch side by side?"""

from __future__ import annotations

import itertools

import pytest

from allranks.comm.ring import order_by_rates, order_by_topology, parse_topology

# Source: SLURM's topology guide, topology/tree; spelled as slurmctld 22.05 and 24.05 print it.
TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=node[01,03,05]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=node[02,04,06]
SwitchName=s2 Level=1 LinkSpeed=1 Nodes=node[01-06] Switches=s[0-1]
"""
THREE_LEVELS = """\
SwitchName=a Level=0 LinkSpeed=1 Nodes=n[1,5]
SwitchName=b Level=0 LinkSpeed=1 Nodes=n[2,6]
SwitchName=c Level=0 LinkSpeed=1 Nodes=n[3,7]
SwitchName=d Level=0 LinkSpeed=1 Nodes=n[4,8]
SwitchName=left Level=1 LinkSpeed=1 Nodes=n[1,3,5,7] Switches=a,c
SwitchName=right Level=1 LinkSpeed=1 Nodes=n[2,4,6,8] Switches=b,d
SwitchName=top Level=2 LinkSpeed=1 Nodes=n[1-8] Switches=left,right
"""
BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=node[01,03,05] BlockSize=3
BlockName=b2 BlockIndex=1 Nodes=node[02,04,06] BlockSize=3
"""
SIX = [f"node0{number}" for number in range(1, 7)]
EIGHT = [f"n{number}" for number in range(1, 9)]


@pytest.mark.parametrize(
    ("nodes", "text", "order"),
    [
        (SIX, TREE, (0, 2, 4, 1, 3, 5)),
        (SIX, BLOCKS, (0, 2, 4, 1, 3, 5)),
        (["node02", *SIX[:1], *SIX[2:]], TREE, (0, 3, 5, 1, 2, 4)),  # another leader
        (SIX[:2], TREE, None),
        (["node01", "node03", "node02"], TREE, None),
        (EIGHT, THREE_LEVELS, (0, 4, 2, 6, 1, 5, 3, 7)),
        ([*SIX, "new"], TREE, (0, 2, 4, 1, 3, 5, 6)),
        (SIX, "No topology information available\n", None),
        (SIX, "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=node[01\n", None),
        (SIX, "", None),
    ],
)
def test_nodes_of_one_switch_stand_side_by_side(nodes, text, order):
    assert order_by_topology(nodes, parse_topology(text)) == order


def rates_of(nodes, *, slow=(), usual=500.0, uplink=250.0):
    """Rates between nodes of two switches: those with an even number, and those with an odd one."""
    found = {}
    for (i, a), (j, b) in itertools.permutations(enumerate(nodes), 2):
        found[a, b] = usual * (1 + (i * j) % 3 / 50) if (i - j) % 2 == 0 else uplink
    return found | dict.fromkeys(slow, usual / 10)


def test_the_rates_tell_the_switches_too():
    order = order_by_rates(SIX, rates_of(SIX))
    assert order is not None
    assert order[0] == 0
    assert sum((a - b) % 2 for a, b in itertools.pairwise([*order, 0])) == 2  # hops over the uplink


def test_a_slow_link_is_left_out_of_the_ring():
    order = order_by_rates(SIX, rates_of(SIX, uplink=500.0, slow=[("node03", "node04")]))
    assert order is not None
    assert {2, 3} not in [{a, b} for a, b in itertools.pairwise([*order, 0])]


def test_rates_that_differ_by_chance_change_nothing():
    assert order_by_rates(SIX, rates_of(SIX, uplink=480.0)) is None
    assert order_by_rates(SIX, {}) is None
    assert order_by_rates(SIX[:3], rates_of(SIX[:3])) is None


def test_of_64_nodes_and_two_switches_two_hops_are_left_over_the_uplink():
    nodes = [f"n{number}" for number in range(64)]
    order = order_by_rates(nodes, rates_of(nodes))
    assert sum((a - b) % 2 for a, b in itertools.pairwise([*order, 0])) == 2
