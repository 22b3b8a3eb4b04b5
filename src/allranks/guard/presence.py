"""Is a node gone, or a process stopped? Pure.

One sign is none: a connection that breaks, or beats that fail to come, may be a hiccup of one network or a busy agent.
A node is gone where a second way says the same:

    sign                                  second sign                                      verdict
    connection lost, or silent            its machine refuses tries, or resets them        the agent is dead
    connection lost, or silent gone_s     tries on every network come to nothing, also     the node is gone
                                          those of a node that is not the leader's
    lost, or silent 3 x gone_s            its machine answers; ranks wait for its ranks,   its processes are stopped
                                          or none has moved for hang_s
    silent 3 x gone_s                     its machine answers; all other ranks are done    its agent is stopped

Where every other node falls silent at once, it is the leader's own network; where half of all nodes or more do, nobody
can tell. Nodes whose ranks are done count for that, too. Nor can anybody tell whether a node is gone whose machine was
not tried, or why an agent was lost before its workers began: one that waits for its first Plan ends when it loses its
connection.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import cache
from typing import Any

import msgspec

from allranks.guard.faults import LINK_DOWN, NODE_FAILURE, PARTITION, PROCESS_STOPPED
from allranks.guard.guard_verdict import FIX_OF_LOST_AGENT, GuardVerdict, name_fault
from allranks.guard.scene import NodeView, Scene, Tried
from allranks.guard.waits import find_waiting
from allranks.model.beat import ProcessState
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Finding
from allranks.model.fix import Fix
from allranks.model.hostlist import fold_hosts

MUTE_FACTOR = 3
"""So many times gone_s may an agent be silent whose machine answers: a busy machine is no lost one."""
START_S = 15.0
"""How long the first beat of a generation may take."""
OVERSLEPT_S = 3.0
"""An agent may give up a leader that does not run for so long (launch.succession)."""
NOT_COME = "it has not come to the new leader"
"""An agent that the last leader had started again may have ended with it: only the silence of its machine counts."""
UNLED = "nobody led for"
"""Part of the reason: the last leader may have left, because it found itself cut off."""
HOLD_S = 1.0
"""How long the verdict on one node waits for that on another one that is silent, too."""


def find_suspects(scene: Scene, now_s: float) -> list[NodeView]:
    """Return the nodes that may be gone: connection lost, or longer silent than usual."""
    return [node for node in _find_silent(scene, now_s) if not _is_done(scene, node)]


def _find_silent(scene: Scene, now_s: float) -> list[NodeView]:
    """The same, with those that are done."""
    heard_s = now_s - _patience_s(scene)  # most nodes are heard, and looked at no further
    return [
        node
        for node in scene.nodes
        if node.heard_s is None or node.lost_s is not None or node.heard_s < heard_s
        if _suspected_since_s(scene, node, now_s) is not None
    ]


def judge_gone(scene: Scene, now_s: float) -> tuple[GuardVerdict | None, bool]:
    """Return the verdict on nodes that are gone, and whether it can wait for others that may be gone with them."""
    silent = _find_silent(scene, now_s)
    suspects = [node for node in silent if not _is_done(scene, node)]
    are_most_silent = 2 * (len(silent) + _count_unheard(scene, now_s)) > len(scene.nodes) > 2
    if are_most_silent:
        scene.deaf_s = now_s
    needed = cache(lambda: _waited_for(scene, now_s))
    found = {node.index: _Suspect(scene, node, now_s).judge(needed) for node in suspects}
    proven = {index: finding for index, finding in found.items() if finding is not None}
    if not proven:
        return None, False
    is_open = any(node.index not in proven and not answers(scene, node, now_s) for node in suspects)
    tried = [result for i in proven for _, result in _tries_of(scene, scene.nodes[i], scene.nodes[i].lost_s or 0.0)]
    if are_most_silent and not any(result.seen.refused for result in tried):
        are_all_silent = len(silent) == len(scene.nodes) - 1 and len(proven) == len(suspects)
        is_deaf = are_all_silent and not any(result.seen.connects for result in tried)
        lost = tuple(node.index for node in silent)
        split = GuardVerdict(findings=(_lose_part(scene, silent),), exit_code=Exit.NODE_FAULT, lost=lost)
        return _blame_leader(scene) if is_deaf else split, is_open
    gone = tuple(sorted(proven))
    ranks = tuple(rank for index in gone for rank in scene.nodes[index].ranks)
    victims = scene.others(*ranks)
    findings = tuple(msgspec.structs.replace(proven[index], victims=victims) for index in gone)
    part = [node for node in silent if node.index in proven or _is_done(scene, node)]
    if 2 * len(part) == len(scene.nodes) > 2 and not any(result.seen.refused for result in tried):
        findings = (_lose_part(scene, part),)
    judged = GuardVerdict(
        findings=findings,
        exit_code=Exit.NODE_FAULT,
        ranks=ranks,
        nodes=gone,
        lost=tuple(index for index in gone if not _is_there(scene, scene.nodes[index], now_s)),
        cures=True,
        is_over=all(_is_last(scene, scene.nodes[index]) for index in gone),
    )
    return judged, is_open


def _count_unheard(scene: Scene, now_s: float) -> int:
    """Return how many nodes a leader that has succeeded another one should have heard by now: a split may hide them."""
    if not scene.leader:
        return 0
    unheard = [node for node in scene.nodes if node.heard_s is None and node.lost_s is None]
    return sum(node.index != scene.leader and node.silent_s(now_s) > _patience_s(scene) for node in unheard)


_FIX_OF_STOPPED = Fix(
    text="find what stopped pid {pid} on {node}: somebody's kill -STOP, or a frozen cgroup",
    slurm=", or SLURM (scontrol show job: SUSPENDED)",
    pod="",
    none="",
)


def judge_stopped(scene: Scene) -> GuardVerdict | None:
    """Return the verdict on processes that are stopped for longer than a look with a debugger takes."""
    held = scene.held(ProcessState.STOPPED, ProcessState.TRACED, for_s=scene.settings.stopped_s)
    if not held:
        return None
    first, ranks = held[0], tuple(beat.rank for beat in held)
    nodes = tuple(sorted({scene.node_of(rank).index for rank in ranks}))
    is_traced = first.state is ProcessState.TRACED
    what = "held by a debugger" if is_traced else "stopped (SIGSTOP, or a frozen cgroup)"
    what = f"the process has been {what} for {first.state_for_s:.1f} s: it exists, but does not run"
    state = f"state {'t' if is_traced else 'T'} in /proc"
    seen = [f"rank {beat.rank}, pid {beat.pid}: {state} for {beat.state_for_s:.1f} s" for beat in held[:8]]
    # When this is read, the process has been ended with the job: nothing is left to continue or to look at.
    node, pid = scene.nodes[nodes[0]].name, first.pid
    fix = _FIX_OF_STOPPED.tell(scene.reader, {"pid": pid, "node": node})
    if is_traced:
        fix = f"find the debugger (gdb, strace, py-spy) that held pid {pid}; on {node}: ps -ef | grep -w {pid}"
    finding = scene.fault(PROCESS_STOPPED, what, *ranks, evidence=seen, fix=fix)
    return GuardVerdict(findings=(finding,), exit_code=Exit.NODE_FAULT, ranks=ranks, nodes=nodes, cures=False)


def _patience_s(scene: Scene) -> float:
    """How long a node that has spoken may be silent."""
    return min(max(4 * scene.settings.beat_s, 0.8), scene.settings.gone_s / 2)


def _suspected_since_s(scene: Scene, node: NodeView, now_s: float) -> float | None:
    """Since when a node may be gone, whether it is done or not; None: it may not."""
    if node.lost_s is not None:
        return node.lost_s
    patience_s = _patience_s(scene)
    if node.heard_s is None:
        patience_s = max(START_S, MUTE_FACTOR * scene.settings.gone_s)
    silent_s = node.silent_s(now_s)
    if silent_s <= patience_s or node.index == scene.leader:
        return None
    return now_s - silent_s


def _is_done(scene: Scene, node: NodeView) -> bool:
    """Whether nobody needs this node any more, although its agent still beats."""
    return node.lost_s is None and all(rank in scene.left for rank in node.ranks)


class _Suspect:
    """A node that may be gone: what was seen of it, and what is wrong with it."""

    def __init__(self, scene: Scene, node: NodeView, now_s: float) -> None:
        self._scene, self._node, self._now_s = scene, node, now_s
        self._silent_s, self._is_lost = node.silent_s(now_s), node.lost_s is not None
        self._is_late = self._is_lost or self._silent_s >= scene.settings.gone_s
        self._tried = _tries_of(scene, node, _suspected_since_s(scene, node, now_s) or 0.0)
        self._first = node.lost_reason if self._is_lost else f"no word from its agent for {self._silent_s:.1f} s"
        self._has_slept = scene.slept_s >= OVERSLEPT_S and (node.heard_s or 0.0) <= scene.woke_s
        """Whether the leader did not run, so that its agent may have given it up."""
        self._has_begun = node.heard_s is not None or scene.leader != 0  # the leader before this one may have heard it
        # An agent that was told to stop looks for no leader: it ends its workers, and leaves.
        self._may_have_left = self._is_lost and scene.may_leave

    def judge(self, needed: Callable[[], Set[int]]) -> Finding | None:
        """Return what is wrong with it, None while nothing is proven; `needed` returns the ranks waited for."""
        is_refusing = any(result.seen.refused for _, result in self._tried)
        if is_refusing and self._first != NOT_COME and not self._may_have_left:
            return self._tell_dead_agent()
        if self._is_late and self._is_unreachable():
            return self._tell_unreachable()
        if self._is_late and self._mute_s() >= (MUTE_FACTOR if self._tried else 2) * self._scene.settings.gone_s:
            return self._tell_mute(needed)
        return None

    def _is_unreachable(self) -> bool:
        """Whether tries came to nothing on all networks on which it can be reached."""
        networks = {result.seen.network for _, result in self._tried}
        is_silent = bool(self._tried) and not any(result.seen.connects for _, result in self._tried)
        return is_silent and networks >= {target.network for target in self._node.targets()}

    def _mute_s(self) -> float:
        """How long its agent has said nothing, although others could be heard."""
        lost_s = self._now_s if self._node.lost_s is None else self._node.lost_s
        mute_s = max(self._silent_s, self._now_s - lost_s)
        if self._scene.deaf_s < self._now_s:  # most have come back since: one after another
            mute_s = min(mute_s, self._now_s - self._scene.deaf_s)
        return mute_s

    def _tell_dead_agent(self) -> Finding:
        fix = FIX_OF_LOST_AGENT.tell(self._scene.reader, {"node": self._node.name})
        if self._has_slept or UNLED in self._first or not self._has_begun:
            return self._tell_given_up(fix=fix)
        what = "the node's agent died, but the machine answers: somebody killed it, or the kernel did, out of memory"
        return self._tell(what, fix=fix)

    def _tell_given_up(self, **about: Any) -> Finding:
        what = "the node's agent ended before its workers began: it was killed, or lost the connection to its leader"
        if self._has_begun:
            what = "the node's agent ended while no leader ran: it was killed, or gave up"
        return self._tell_undecided(what, **about)

    def _tell_unreachable(self) -> Finding | None:
        scene, networks = self._scene, {result.seen.network for _, result in self._tried}
        way = "answers on no network" if len(networks) > 1 else f"does not answer on the {networks.pop()} network"
        what = f"the node is gone: its machine {way}"
        if len(scene.nodes) == 2 or any(index != scene.leader for index, _ in self._tried):
            return self._tell(what)
        # Only the leader's own tries say so: its link may be at fault, if no other node can be asked.
        gone_s = scene.settings.gone_s
        others = [other for other in scene.nodes if other.index not in (scene.leader, self._node.index)]
        can_ask = any(other.lost_s is None and other.silent_s(self._now_s) < gone_s for other in others)
        if can_ask and self._silent_s < 2 * gone_s:
            return None
        return self._tell_undecided(f"{what}, and no other node could try it")

    def _tell_mute(self, needed: Callable[[], Set[int]]) -> Finding | None:
        scene, node = self._scene, self._node
        if self._tried and _is_last(scene, node):
            what = f"the node's agent has been stopped (SIGSTOP), or gets no processor time, for {self._silent_s:.0f} s"
            what += ": its machine answers, and all other ranks have finished"
            fix = f"on {node.name}: ps -eo pid,stat,args | grep allranks; continue a process in state T with kill -CONT"
            return self._tell(what, cause_id=PROCESS_STOPPED, fix=fix, confidence=Confidence.LIKELY)
        is_still = scene.moved_s + scene.settings.hang_s <= self._now_s
        if self._first == NOT_COME or self._may_have_left:
            return None
        if not (self._is_lost or is_still or (needed() and needed() <= set(node.ranks))):
            return None
        if self._is_lost and (self._has_slept or not self._has_begun):
            return self._tell_given_up()
        if not self._tried:
            return self._tell_undecided("the node's agent is gone, and no other node could test its machine")
        what = "the machine answers, but its agent does not: the processes there are stopped, or get no processor time"
        return self._tell(what, confidence=Confidence.LIKELY)

    def _tell_undecided(self, what: str, **about: Any) -> Finding:
        node = f"{self._scene.nodes[self._scene.leader].name} or {self._node.name}"
        return self._tell(what, node=node, confidence=Confidence.UNDECIDED, **about)

    def _tell(self, what: str, *, cause_id: str = NODE_FAILURE, **about: Any) -> Finding:
        """Return a finding about the node; who its victims are depends on what else is gone."""
        seen = [self._first, *[_say(self._scene, index, result) for index, result in self._tried]]
        if self._has_slept:
            seen.append(f"the leader's agent did not run for {self._scene.slept_s:.0f} s")
        return self._scene.fault(cause_id, what, *self._node.ranks, evidence=seen, victims=(), **about)


def answers(scene: Scene, node: NodeView, now_s: float) -> bool:
    """Whether the machine of a silent node has accepted a connection since: its agent is stopped, or starved."""
    return any(
        result.seen.connects for _, result in _tries_of(scene, node, _suspected_since_s(scene, node, now_s) or 0.0)
    )


def _is_there(scene: Scene, node: NodeView, now_s: float) -> bool:
    """Whether the machine of a silent node has accepted or refused a connection since."""
    tried = _tries_of(scene, node, _suspected_since_s(scene, node, now_s) or 0.0)
    return any(result.seen.connects or result.seen.refused for _, result in tried)


def _is_last(scene: Scene, node: NodeView) -> bool:
    """Whether the ranks of all other nodes have ended with 0, and nobody waits for this one; it is not lost."""
    if node.lost_s is not None or not scene.left:
        return False
    return all(rank in scene.left for other in scene.nodes if other.heard_later(node) for rank in other.ranks)


def _tries_of(scene: Scene, node: NodeView, since_s: float) -> list[tuple[int, Tried]]:
    """The newest tries of each node to reach this one, made since it is suspected."""
    return [
        (other.index, tried)
        for other in scene.triers
        for (target, _), tried in other.tries.items()
        if target == node.index and tried.at_s >= since_s
    ]


def _waited_for(scene: Scene, now_s: float) -> frozenset[int]:
    """The ranks that others have waited for long; empty: nobody has."""
    waiting = find_waiting(scene, now_s, names_unknown=True)
    is_long = waiting is not None and waiting.waited_s >= scene.settings.gone_s
    return frozenset(waiting.sinks) if waiting is not None and is_long else frozenset()


def _say(scene: Scene, index: int, result: Tried) -> str:
    seen = result.seen
    where = f"{scene.nodes[index].name} -> {scene.nodes[seen.target].name} on the {seen.network} network"
    if seen.refused:
        return f"{where}: {seen.error.lower() or 'connection refused'}"
    if not seen.connects:
        return f"{where}: {seen.error or 'no answer'}"
    return f"{where}: answers" + ("" if seen.carries is not False else ", but acknowledges nothing of full size")


def _blame_leader(scene: Scene) -> GuardVerdict:
    leader = scene.nodes[scene.leader]
    told = [_say(scene, leader.index, tried) for tried in leader.tries.values()]
    silent = fold_hosts([node.name for node in scene.nodes if node is not leader])
    what = "the node receives nothing: all other nodes became silent at once, so its own link is at fault"
    seen, ranks = [f"no word from {silent}", *told[:4]], tuple(leader.ranks)
    finding = scene.fault(LINK_DOWN, what, *ranks, evidence=seen, confidence=Confidence.LIKELY)
    return GuardVerdict(findings=(finding,), exit_code=Exit.NODE_FAULT, ranks=ranks, nodes=(leader.index,), cures=True)


def _lose_part(scene: Scene, silent: list[NodeView]) -> Finding:
    """Half of the nodes or more are lost at once: as likely as their end is that of the path to the leader's."""
    lost = {node.index for node in silent}
    here, there = (
        fold_hosts([other.name for other in scene.nodes if (other.index in lost) == is_lost])
        for is_lost in (False, True)
    )
    part = "half" if 2 * len(silent) == len(scene.nodes) else "most"
    what = f"{here} lost {there} at once: the network between them failed, or {part} of the nodes did"
    fix = f"from {scene.nodes[scene.leader].name}, ping {there}; look for errors of the switch between them"
    return name_fault(PARTITION, what, node=f"{here} or {there}", confidence=Confidence.UNDECIDED, fix=fix)
