"""Which value do most of the nodes have, and which nodes have another one? Pure.

>>> majority({"n1": "2.27", "n2": "2.27", "n3": "2.21"}).odd
{'2.21': ('n3',)}
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

NOT_SET = "not set"
"""How a value reads that only other nodes have."""
V = TypeVar("V", bound=Hashable)


class Majority(NamedTuple, Generic[V]):
    """What most nodes have, and who has it not."""

    value: V
    nodes: tuple[str, ...]
    odd: dict[V, tuple[str, ...]]
    """The other values with their nodes, the most common first; empty where all are alike."""


def majority(values: Mapping[str, V]) -> Majority[V] | None:
    """Return what more than half of the nodes have; None where no value is so common, and for no nodes.

    Args:
        values: by node.
    """
    groups = group_by_value(values)
    if not groups or len(groups[0][1]) * 2 <= len(values):
        return None
    (value, nodes), *odd = groups
    return Majority(value, nodes, dict(odd))


def group_by_value(values: Mapping[str, V]) -> list[tuple[V, tuple[str, ...]]]:
    """Values with their nodes, the most common first, equally common ones in the order of their first node."""
    nodes: dict[V, list[str]] = {}
    for node, value in values.items():
        nodes.setdefault(value, []).append(node)
    return [(value, tuple(nodes[value])) for value in sorted(nodes, key=lambda value: -len(nodes[value]))]
