"""Which node should test its connection to which other node now? Pure; the leader sends the result as Try.

Two matters ask for tries: a node that fell silent (presence.py), and connections that get nothing across (links.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from allranks.guard import links, presence
from allranks.guard.scene import Scene
from allranks.wire.protocol import Try, TryTarget

NUM_TRIERS = 4
"""Nodes that try to reach a silent one: the leader's, and others that are heard."""
_NEVER_S = float("inf")


class TryOrders:
    """What was ordered, and what comes next."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._again_s: dict[int, float] = {}
        """By silent node: when it is to be tried again."""
        self.episode: links.Episode | None = None
        """The rounds of tries around connections that are stuck; None: none is."""

    def wants(self, now: float) -> dict[int, Try]:
        """Return the tries to order now, by the node that is to make them; each once."""
        silent, silent_s = self._want_silent(now)
        stuck, stuck_s = self._want_stuck(now)
        within_s = max(silent_s, stuck_s)
        return {
            index: Try(targets=(*silent.get(index, ()), *stuck.get(index, ())), within_s=within_s)
            for index in silent.keys() | stuck.keys()
        }

    def _want_silent(self, now: float) -> tuple[Mapping[int, tuple[TryTarget, ...]], float]:
        scene = self._scene
        within_s = min(max(scene.settings.gone_s / 3, 0.5), 2.0)
        if not (suspects := presence.find_suspects(scene, now)):
            self._again_s.clear()
            return {}, 0.0
        self._again_s = {node.index: self._again_s.get(node.index, now) for node in suspects}
        due = [node for node in suspects if now >= self._again_s[node.index]]
        for node in due:
            self._again_s[node.index] = now + within_s + 2 * scene.settings.beat_s
        targets = tuple(target for node in due for target in node.targets())
        if not targets:
            return {}, 0.0
        heard = (node.index for node in scene.nodes if node.index not in self._again_s)
        triers = [*itertools.islice(heard, NUM_TRIERS)]
        return dict.fromkeys(triers, targets), within_s

    def _want_stuck(self, now: float) -> tuple[Mapping[int, tuple[TryTarget, ...]], float]:
        """Open, go on with, or close the rounds."""
        scene, episode = self._scene, self.episode
        stalled = links.find_stalled(scene, now, share=links.TRIED_EARLY)
        if episode is not None and links.is_round_over(scene, episode, now):
            episode.rounds.append(links.collect_round(scene, episode))
            del episode.rounds[: -links.MAX_ROUNDS]
            episode.until_s = _NEVER_S
            if not stalled:
                self.episode, scene.stuck_at = None, {}
        if not stalled or (episode is not None and episode.until_s != _NEVER_S):
            return {}, 0.0
        if episode is None:
            episode = self.episode = links.Episode()
        episode.suspects |= {index for stall in stalled for index in (stall.own, stall.peer)}
        scene.stuck_at = links.find_stuck_at(scene, stalled)
        within_s = links.round_s(scene, len(episode.rounds))
        episode.ordered_s = now
        episode.until_s = now + within_s + links.ROUND_SLACK_S + 2 * scene.settings.beat_s
        return links.plan_round(scene, episode.suspects), within_s
