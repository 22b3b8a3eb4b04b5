"""What is worth a line on the terminal while the job goes on: slow ranks, silent nodes, stragglers? Pure.

A matter is said again ever more rarely: at 30 s, 60 s, 120 s of the same wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from allranks.guard import presence, waits
from allranks.guard.faults import STRAGGLER_RANK
from allranks.guard.goodput.stragglers import Straggler
from allranks.guard.idle import find_idle, say_idle
from allranks.guard.scene import Scene
from allranks.model.finding import Confidence, Finding, Severity

LATER_FACTOR = 2.0
"""Each line on one matter comes so many times later than the one before."""
LOOK_EVERY_S = 1.0
"""The walk over all groups costs milliseconds with many ranks."""
STRAGGLER_FIX = (
    "find what only rank {rank} does between collectives (data, evaluation, logging); if nothing, compare clocks, load "
    "and disks of {node} with another node"
)
"""Also of a run that has ended; no timeout is to blame."""


class Speech:
    """What was said, and what comes next."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._next_look_s = 0.0
        self._next_idle_look_s = self._idle_at_s = 0.0
        self._seen: tuple[int, ...] = ()
        """Who kept the others waiting at the last look."""
        self._slow_at_s: dict[tuple[int, ...], float] = {}
        self._mute_at_s: dict[int, float] = {}
        self.warnings: dict[int, Finding] = {}
        """Stragglers that were named, by rank."""

    def say(self, now: float, stragglers: Iterable[Straggler]) -> list[str]:
        """Return the lines to say now, given who was found to be late since the last time."""
        return [
            *self._say_slow(now),
            *self._say_idle(now),
            *self._say_mute(now),
            *self._say_stragglers(stragglers),
        ]

    def _say_slow(self, now: float) -> list[str]:
        slow_s = self._scene.settings.slow_s
        if waits.longest_wait_s(self._scene, now) < slow_s:
            self._slow_at_s.clear()
            self._seen = ()
            return []
        if now < self._next_look_s:
            return []
        self._next_look_s = now + LOOK_EVERY_S
        waiting = waits.find_waiting(self._scene, now)
        if waiting is None or waiting.waited_s < slow_s:
            return []
        fresh_s, ranks = now - self._scene.fresh_s, self._scene.ranks
        is_old = {rank for rank, view in ranks.items() if view.told_s < fresh_s and rank not in self._scene.left}
        known = tuple(rank for rank in waiting.sinks if rank not in is_old)
        if waiting.sinks and not known:
            return []  # of a node that is not heard: who knows where they are now
        waiting = replace(waiting, sinks=known)
        who = waiting.sinks or waiting.waiting
        before, self._seen = self._seen, who
        # Two looks must show the same: beats of different nodes cross.
        if before != who or waiting.waited_s < self._slow_at_s.get(who, slow_s):
            return []
        self._slow_at_s[who] = LATER_FACTOR * waiting.waited_s
        return [waits.say_slow(self._scene, waiting, now)]

    def _say_idle(self, now: float) -> list[str]:
        settings = self._scene.settings
        if waits.longest_wait_s(self._scene, now) >= settings.slow_s or now < self._next_idle_look_s:
            return []
        self._next_idle_look_s = now + LOOK_EVERY_S
        idle = find_idle(self._scene, now, for_s=min(settings.slow_s, settings.hang_s))
        if idle is None:
            self._idle_at_s = 0.0
            return []
        if idle.for_s < max(self._idle_at_s, settings.slow_s if idle.is_worth_a_look else settings.hang_s):
            return []
        self._idle_at_s = LATER_FACTOR * idle.for_s
        return [say_idle(idle)]

    def _say_mute(self, now: float) -> list[str]:
        suspects = presence.find_suspects(self._scene, now)
        gone_s = self._scene.settings.gone_s
        self._mute_at_s = {node.index: self._mute_at_s.get(node.index, gone_s) for node in suspects}
        lines = []
        for node in suspects:
            silent_s = node.silent_s(now)
            if silent_s >= self._mute_at_s[node.index]:
                self._mute_at_s[node.index] = LATER_FACTOR * silent_s
                does = "others try to reach it"
                if presence.answers(self._scene, node, now):
                    does = "its machine answers, so its agent is stopped (SIGSTOP) or gets no processor time"
                lines.append(f"no word from {node.name} for {silent_s:.0f} s; {does}")
        return lines

    def _say_stragglers(self, stragglers: Iterable[Straggler]) -> list[str]:
        lines = []
        for straggler in stragglers:
            finding = self.warnings[straggler.rank] = self._name_straggler(straggler)
            lines.append(f"straggler: rank {straggler.rank} on {finding.node} {finding.message}")
        return lines

    def _name_straggler(self, straggler: Straggler) -> Finding:
        rank, lag_ms = straggler.rank, straggler.lag_s * 1e3
        late_ms = f"{lag_ms:.{0 if lag_ms >= 10 else 1}f} ms"
        node = self._scene.node_of(rank).name
        message = f"calls collectives {late_ms} (median) after all other ranks, which wait for it "
        seen = f"the last of all ranks, by {late_ms} (median), in {straggler.num_late} of "
        seen += f"{straggler.num_collectives} collectives"
        if straggler.is_by_loads:
            message = f"loads and saves {late_ms} a step longer than the median of all ranks, which wait for it "
            more = f"{100 * straggler.share:.0f} % more"
            seen = f"the DataLoader and saving take {more} of its time than of the median rank's"
        return self._scene.fault(
            STRAGGLER_RANK,
            f"{message}{100 * straggler.share:.0f} % of the time",
            rank,
            victims=(),
            evidence=[seen],
            fix=STRAGGLER_FIX.format(rank=rank, node=node),
            confidence=Confidence.LIKELY,
            severity=Severity.WARN,
        )
