"""Who works with whom, in pairs and in rounds, so that a failure tells which of the two it was? Pure.

The circle method: one node stays, the others turn around it, and every round is a perfect matching. Two rounds give
every node two different partners, so that a node that fails with both is not its partners' fault.

    >>> matchings(["n1", "n2", "n3", "n4"])
    ((('n1', 'n4'), ('n2', 'n3')), (('n1', 'n3'), ('n4', 'n2')))
"""

from __future__ import annotations

from collections.abc import Sequence

NUM_ROUNDS = 2
Pair = tuple[str, str]


def matchings(nodes: Sequence[str], num_rounds: int = NUM_ROUNDS) -> tuple[tuple[Pair, ...], ...]:
    """Return the pairs of each round; no pair comes twice, and no node is twice in a round.

    With an odd number of nodes one of them rests in each round, another one each time. Two nodes have one round, one
    node has none.

    Args:
        nodes: their names, each once.
        num_rounds: at most; there are not more than nodes, less one where their number is even.
    """
    if len(nodes) < 2:
        return ()
    circle: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    size, rounds = len(circle), []
    for _ in range(min(num_rounds, size - 1)):
        facing = [(circle[i], circle[size - 1 - i]) for i in range(size // 2)]
        rounds.append(tuple((a, b) for a, b in facing if a is not None and b is not None))
        circle.insert(1, circle.pop())
    return tuple(rounds)
