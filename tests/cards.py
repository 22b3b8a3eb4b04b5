"""The card of a node, as its agent would hand it in, with what a test does not ask about filled in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allranks.causes.cause import Cause
from allranks.causes.outcome import Alike, Outcome, Surveyed
from allranks.causes.probes import checks_of
from allranks.model.card import Card
from allranks.model.errors import Exit


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


def make_cause(identity: str, **fields: Any) -> Cause:
    """Return a cause that is not in the book."""
    base: dict[str, Any] = {
        "name": "made-up",
        "title": "Made up.",
        "sections": {},
        "message": "{what}",
        "traits": frozenset(),
    }
    return Cause(id=identity, exit_code=Exit.SETUP, **{**base, **fields})


def probe(cause: Cause, card: Card) -> Outcome | None:
    """Return what a cause's probe says of one node; None without a probe."""
    look = checks_of(cause).probe
    return look(card) if look else None


def survey(cause: Cause, cards: Sequence[Card]) -> Surveyed:
    """Return what a cause's survey says of all nodes; nothing without a survey."""
    look = checks_of(cause).survey
    return look(cards) if look else []


def collect(cause: Cause, card: Card) -> Alike:
    """Return what must be alike on all nodes; None without a comparison."""
    look = checks_of(cause).alike
    return look(card) if look else None
