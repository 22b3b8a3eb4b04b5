"""What is the smallest life in which the same rule falls?

    small, num_lives = shrink(life, lambda life: live(life)[1])      # as_literal(small) goes into a table of lives

First ddmin over the faults (Zeller, Hildebrandt 2002: leave out halves, quarters, single ones), then fewer nodes and
workers, plainer terms, and rounder times, again and again until nothing more can be left out. A literal keeps its seed:
what the generators of the other purposes draw stays the same.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from enum import StrEnum
from typing import Any

from .lives import FOREVER_S, Fault, Kind, Life

MOST_LIVES = 400
"""To shrink one; a few hundred are lived in some seconds."""


def rule_of(broken: str) -> str:
    """Return what fell, without the particulars of one life."""
    return re.sub(r"\d+", "N", broken.partition(" Here: ")[0])


def shrink(life: Life, live: Callable[[Life], str]) -> tuple[Life, int]:
    """Return the smallest life found in which the same rule falls, and how many were lived for that.

    Args:
        live: lives a life, and returns what fell.
    """
    num_lives, rule = 1, rule_of(live(life))
    assert rule, "no rule falls in this life"

    def falls(other: Life) -> bool:
        nonlocal num_lives
        if other == life or num_lives >= MOST_LIVES:
            return False
        num_lives += 1
        return rule_of(live(other)) == rule

    before = None
    while life != before:
        before = life
        life = _leave_out(life, falls)
        for change in _changes(life):
            if falls(other := change(life)):
                life = other
    return life, num_lives


def _leave_out(life: Life, falls: Callable[[Life], bool]) -> Life:
    size = len(life.faults)
    while size:
        at = 0
        while at < len(life.faults):
            other = replace(life, faults=life.faults[:at] + life.faults[at + size :])
            if falls(other):
                life = other
            else:
                at += size
        size //= 2
    return life


def _changes(life: Life) -> Iterator[Callable[[Life], Life]]:
    """Yield what may make a life simpler; each is tried on what the ones before have left."""
    for most in (1, 2, 3, life.num_nodes // 2, life.num_nodes - 1):
        yield lambda life, most=most: _on_fewer_nodes(life, most)
    for name, plain in _usual(Life).items():
        yield lambda life, name=name, plain=plain: replace(life, **{name: plain})
    for most in (life.num_steps // 2, life.num_steps - 1):
        yield lambda life, most=most: replace(life, num_steps=min(life.num_steps, max(most, 1)))
    for at, fault in enumerate(life.faults):
        usual = _usual(Fault) | ({"signum": int(signal.SIGTERM)} if fault.kind is Kind.SIGNAL else {})
        for name, plain in usual.items():
            yield lambda life, at=at, name=name, plain=plain: _with(life, at, **{name: plain})
    for digits in (0, 1):
        for name in ("answer_s", "sweep_s", "start_s"):
            yield lambda life, name=name, digits=digits: replace(life, **{name: round(getattr(life, name), digits)})
        for at in range(len(life.faults)):
            for name in ("at_s", "for_s"):
                yield lambda life, at=at, name=name, digits=digits: _with(
                    life, at, **{name: round(getattr(life.faults[at], name), digits)}
                )


def _usual(kind: type[Life | Fault]) -> dict[str, Any]:
    return {each.name: each.default for each in fields(kind) if each.default is not MISSING and each.name != "faults"}


def _with(life: Life, at: int, **changes: Any) -> Life:
    return replace(life, faults=(*life.faults[:at], replace(life.faults[at], **changes), *life.faults[at + 1 :]))


def _on_fewer_nodes(life: Life, most: int) -> Life:
    num_nodes = min(life.num_nodes, max(most, 1))
    faults = tuple(replace(fault, node=min(fault.node, num_nodes - 1)) for fault in life.faults)
    return replace(life, num_nodes=num_nodes, min_nodes=min(life.min_nodes, num_nodes), faults=faults)


def as_literal(value: Any) -> str:
    """Return a life or a fault as Python; what is as usual is left out."""
    if isinstance(value, Life | Fault):
        told = [(each, getattr(value, each.name)) for each in fields(value)]
        return f"{type(value).__name__}({', '.join(f'{f.name}={as_literal(v)}' for f, v in told if v != f.default)})"
    if isinstance(value, StrEnum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, tuple):
        return f"({', '.join(map(as_literal, value))}{',' * (len(value) == 1)})"
    return "FOREVER_S" if value == FOREVER_S else repr(value if isinstance(value, bool | float | str) else int(value))
