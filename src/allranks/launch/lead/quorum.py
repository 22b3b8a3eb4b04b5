"""Which agents may go on when some are lost, so that never two groups do? Pure.

Every agent is connected to one leader at a time. A leader may begin a generation only with members that are the
majority of the last one: a member counts 2, that one's leader 3, and more than half is needed. So of two equal halves
the leader's goes on, and of two nodes only the leader's. Ranks train only if all members of their generation have begun
it. Two generations that each have the majority of the last one share a member, and a member begins only one of them.

While the leader does not know that all members have begun a generation, it needs the majority of the one before, too:
the others may not have got that Plan. Dead members count as missing, however sure it is that they are dead: they may
have begun a generation before. An agent that was started again is a new one, and no member.

Source: weighted voting, Gifford 1979; joint majorities of two configurations, Ongaro 2014 (Raft), 4.3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def has_majority(here: Collection[int], electors: Iterable[Sequence[int]]) -> bool:
    """Tell whether these nodes are the majority of each of several generations.

    Args:
        here: nodes whose agents follow one leader, its own included, by their index in the job.
        electors: the nodes of each generation, its leader's first.
    """
    return all(_weight(here, nodes) > len(nodes) for nodes in electors)


def _weight(here: Collection[int], nodes: Sequence[int]) -> int:
    """Two for each member that is here, and one more for the leader; the sum of all is 2 n + 1."""
    return 2 * sum(node in here for node in nodes) + (nodes[0] in here if nodes else 0)
