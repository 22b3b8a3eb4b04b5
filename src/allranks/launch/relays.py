"""Which signals does an agent pass on to the ranks that handle them, and to which has SLURM sent them already? Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from allranks.launch.events import RELAYED_S, Effect, EndingFacts, Forward
from allranks.launch.grace import RECEIPT_S, has_begun


class SignalCopies:
    """Which agents have told the leader of a signal: SLURM sends one to all of them."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[float, set[int]]] = {}
        """By signal: when it came, and to which nodes."""

    def is_copy(self, signum: int, node: int, now_s: float) -> bool:
        """Whether another node's agent has told of the same signal; else it is a new one."""
        came_s, nodes = self._told.get(signum, (-math.inf, set[int]()))
        if now_s - came_s < RELAYED_S and node not in nodes:
            nodes.add(node)
            return True
        self._told[signum] = now_s, {node}
        return False


class Relays:
    """Signals that this agent has got, and those that its leader wants to be passed on."""

    def __init__(self) -> None:
        self._came_s: dict[int, float] = {}
        self._asked: list[tuple[int, float, float]] = []
        """Which, since when a rank may have got it, and when it is due."""

    def note(self, signum: int, now_s: float) -> None:
        """This agent has got a signal."""
        self._came_s[signum] = now_s

    def came_s(self, signum: int, otherwise_s: float) -> float:
        """When this agent got a signal last."""
        return self._came_s.get(signum, otherwise_s)

    def ask(self, signum: int, now_s: float) -> None:
        """The leader wants a signal to be passed on."""
        own_s = self.came_s(signum, now_s)
        self._asked.append((signum, own_s if own_s > now_s - RELAYED_S else now_s, now_s + RECEIPT_S))

    def due(self, now_s: float, ranks: Collection[int], holds: Mapping[int, EndingFacts]) -> list[Effect]:
        """Return what is due: signals to ranks that handle them and have not got them."""
        effects: list[Effect] = []
        for signum, since_s, _ in [asked for asked in self._asked if now_s >= asked[2]]:
            handling = [rank for rank in ranks if rank in holds and signum in holds[rank].handles]
            if told := tuple(rank for rank in handling if not has_begun(holds[rank], signum, since_s)):
                effects.append(Forward(signum=signum, ranks=told))
        self._asked = [asked for asked in self._asked if now_s < asked[2]]
        return effects
