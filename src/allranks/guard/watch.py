"""How are this node's workers, and what does its kernel say of their connections? One NodeBeat when it is due.

    watch = Watch(cluster.guard, data_address="192.168.20.13", control_address="10.0.0.13")
    watch.begin(plan.generation, workers, now_s, node_index=plan.node_index)
    while running:
        if (beat := watch.turn(now_s)) is not None: ...      # every beat_s; never waits
    watch.keep(directory)                                    # at a verdict: last calls and stacks

Everything is read from outside the workers, so that it answers when they cannot. `now_s` is time.monotonic().
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from allranks.model.beat import NodeBeat, RankBeat
from allranks.model.cluster import GuardTable
from allranks.wire.protocol import Try


class Watched(Protocol):
    """One worker as the watch reads it: its cell and /proc."""

    @property
    def rank(self) -> int:
        """Global."""

    @property
    def pid(self) -> int:
        """Of the worker itself."""

    def read(self, now_s: float) -> RankBeat:
        """Return how it is now; never waits, whatever the worker does."""


class Watch:
    """Watches one node's workers.

    Args:
        settings: how often to tell.
        data_address: of this node on the network that carries gradients.
        control_address: where the leader reaches this node's agent, or comes from; equal where there is one network.
    """

    def __init__(self, settings: GuardTable, *, data_address: str, control_address: str) -> None:
        self._settings = settings
        self._node_index = 0
        self._generation = 0
        self._workers: Sequence[Watched] = ()
        self._next_s = 0.0

    def begin(self, generation: int, workers: Sequence[Watched], now_s: float, *, node_index: int) -> None:
        """Watch these workers from now on; the node may have another index in each generation."""
        self._generation, self._workers, self._node_index = generation, workers, node_index
        self._next_s = now_s

    def order(self, order: Try, now_s: float) -> None:
        """Begin the tries that the leader asked for; what came of them is in the next beats."""

    def turn(self, now_s: float) -> NodeBeat | None:
        """Return a beat when one is due. Call it often (every 50 ms): tries go on in it, too."""
        if now_s < self._next_s:
            return None
        self._next_s = now_s + self._settings.beat_s
        return NodeBeat(
            node_index=self._node_index,
            generation=self._generation,
            ranks=tuple(worker.read(now_s) for worker in self._workers),
        )

    def keep(self, directory: Path, *, within_s: float) -> list[Path]:
        """Write each rank's last calls and stack into a directory: `rank_N.recorder.json`, `rank_N.stack.txt`.

        Args:
            directory: exists already.
            within_s: what has not been read by then is left out.
        Returns:
            The files written.
        """
        return []

    def close(self) -> None:
        """Close the sockets of tries."""
