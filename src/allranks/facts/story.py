"""What happened, according to the solver: what broke first, what followed from what, who only suffered. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import msgspec

from allranks.facts.fact import NOBODY, Fact, FactKind, Who
from allranks.model.finding import Confidence


class StoryEnd(StrEnum):
    """How the attempt ended."""

    FAILED = "failed"
    HANGS = "hangs"
    """Ranks wait, or gave up waiting, and nothing else is known to have broken."""
    FINISHED = "finished"
    NOTHING_KNOWN = "nothing known"


class RootPart(StrEnum):
    """What a root is in the story."""

    CULPRIT = "culprit"
    """It broke the job. Two of them: both broke by themselves, and nothing tells which was first."""
    UNDECIDED = "undecided"
    """One of several candidates for one end."""
    ALSO = "also by itself"
    """It broke by itself, after the culprit."""
    WARNING = "warning"
    """It did not end the job: it was survived, or explains nothing of the end."""


class Root(msgspec.Struct, frozen=True):
    """Facts that no other fact explains; equal ones of several ranks are one root."""

    facts: tuple[Fact, ...]
    """The first one, by time where that is known, and its equals."""
    part: RootPart
    confidence: Confidence
    """How sure we are, all facts considered; never more than the first fact alone makes us."""
    blamed: tuple[Who, ...] = ()
    """Who is to be named; who only reports is not. Empty: nothing tells."""

    @property
    def fact(self) -> Fact:
        """The fact that stands for the root."""
        return self.facts[0]


class CauseEdge(msgspec.Struct, frozen=True, gc=False):
    """One fact explains another."""

    cause: Fact
    effect: Fact
    is_named: bool
    """The effect names it (its peer, its group, its own process); otherwise it is only possible."""


@dataclass(frozen=True)
class Story:
    """One attempt of a job."""

    outcome: StoryEnd
    roots: tuple[Root, ...] = ()
    """The culprit first, then others that broke by themselves, then warnings."""
    edges: tuple[CauseEdge, ...] = ()
    victims: tuple[int, ...] = ()
    """Ranks that only suffered from what others did."""
    attempt: int = 0

    @property
    def culprits(self) -> tuple[Root, ...]:
        """The roots that broke the job, or may have."""
        return tuple(root for root in self.roots if root.part in {RootPart.CULPRIT, RootPart.UNDECIDED})

    @cached_property
    def chain(self) -> tuple[tuple[Fact, ...], ...]:
        """Return what followed from the first root, link by link; all facts of one kind are one link.

        `rank 72 was OOM-killed -> gpu-b12 lost it -> 126 ranks aborted` has three links, of 1, 1 and 126 facts. How a
        process ended that broke by itself is no link of its own.
        """
        if not self.roots:
            return ()
        effects: dict[int, list[Fact]] = {}  # by identity: to compare facts takes long, and there may be 100,000
        for edge in self.edges:
            effects.setdefault(id(edge.cause), []).append(edge.effect)
        layer = list(self.roots[0].facts)
        told = {_process(fact) for fact in layer if fact.kind not in _SUFFERED} - {NOBODY}
        seen = set(map(id, layer))
        links = {_what(layer[0]): layer}
        while layer:
            following = {id(effect): effect for fact in layer for effect in effects.get(id(fact), ())}
            layer = sorted((effect for key, effect in following.items() if key not in seen), key=_what)
            seen.update(map(id, layer))
            for effect in layer:
                if _process(effect) not in told:
                    links.setdefault(_what(effect), []).append(effect)
        return tuple(tuple(link) for link in links.values())


_ORDER = {kind: number for number, kind in enumerate(FactKind)}


_SUFFERED = frozenset((FactKind.WAITED, FactKind.PEER_LOST, FactKind.STORE_GONE))


def _what(fact: Fact) -> tuple[int, int, int]:
    """Tell facts of one link from others: how a process ended is part of it."""
    return _ORDER[fact.kind], fact.signal or 0, fact.code or 0


def _process(fact: Fact) -> object:
    return fact.who if fact.who.rank is None else fact.who.rank
