"""The card of a node, as its agent would hand it in, with what a test does not ask about filled in."""

from __future__ import annotations

from typing import Any

from allranks.model.card import Card


def make_card(number: int | None = None, **fields: Any) -> Card:
    """Return the card of node `number`, counted from 1; None: nobody said which one it is, and it is called node01."""
    usual: dict[str, Any] = {
        "host": f"node{number or 1:02}",
        "pid": 1,
        "node_index": None if number is None else number - 1,
        "num_workers": 1,
        "num_gpus": 0,
    }
    return Card(**usual | fields)
