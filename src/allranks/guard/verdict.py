"""What is wrong with the running job, and whose fault is it? Pure: the leader feeds it, asks it, and obeys it.

    guard = Guard(cluster.guard)
    guard.begin(plan, now_s, addresses=...)  each generation of workers
    guard.hear(beat, now_s)                  each node's Beat, the leader's own node too
    guard.ended(end, now_s)                  a worker's end, whichever
    guard.lost(node_index, reason, now_s)    an agent's connection is gone
    guard.returned(node_index, now_s)        it is there again
    guard.expect_leaving()                   the job was told to stop: each rank may leave by itself
    guard.wants(now_s)                       which tries to order from which node
    guard.lines(now_s)                       what to say aloud: slow ranks, stragglers
    guard.judge(now_s)                       a proven fault, or None

`now_s` is one clock of the leader's, which never steps back (time.monotonic()). `Ping.sent_ns` must be of that clock,
too, and `WorkerEnd.time_s` be translated to it: the end's age counts back from now. Ask at least once a second: a
longer gap is taken for the leader's own sleep, and nobody else is blamed for it.

What is proven is judged at once, the surest first:

    ends.py        a worker broke by itself: an exception, an exit code, a signal
    presence.py    a node is gone, by two signs; a process is stopped
    mismatch.py    ranks called different collectives
    links.py       a way between nodes carries nothing
    waits.py       ranks wait for each other; nothing has moved for hang_s, and who keeps the others waiting
    idle.py        nothing has moved for hang_s, whoever waits for whom

Where workers only say that they lost others (`Connection closed by peer`), what was known before explains it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from allranks.guard import disk, idle, links, mismatch, presence, waits
from allranks.guard.ends import find_aborted, judge_ends, should_stop, sort_ends
from allranks.guard.failure import is_killed
from allranks.guard.faults import TORCH_LIMIT
from allranks.guard.goodput.clocks import NodeClock
from allranks.guard.goodput.ledger import Books
from allranks.guard.goodput.network_wait import NetworkSpeech, see_traffic
from allranks.guard.guard_verdict import GuardVerdict
from allranks.guard.rooms import RoomSpeech
from allranks.guard.scene import Scene
from allranks.guard.settled import SETTLED_S, Settled
from allranks.guard.speech import Speech
from allranks.guard.try_orders import TryOrders
from allranks.model.beat import HELD_STATES, ProcessState
from allranks.model.cluster import GuardTable
from allranks.model.finding import Confidence, Finding
from allranks.model.fix import ANYBODY, Reader
from allranks.model.membership import Membership
from allranks.model.room import FullPlace
from allranks.model.traffic import Traffic
from allranks.recorder.wait_graph import Standstill
from allranks.wire.protocol import Beat, Plan, Try, WorkerEnd

ASLEEP_S = 2.0
"""Nobody asked for so long: the leader itself did not run."""
AFTER_KILL_S = 0.6
"""How long a SIGKILL waits for the next word of its node: did the kernel run out of memory, or is the node gone?"""
LOOK_EVERY_S = 0.25
SMALL = 256
"""Ranks of a job in which each beat may bring a look for what explains the ends."""
ONE_LOOK_S = 3e-6
"""For each rank, that one such look takes at most: 6 ms with 2,048 ranks on a core at 2.5 GHz."""
LOOKS_SHARE = 0.1
"""Of the leader's time, that those looks may take."""
MAX_WAY_S = 60.0
"""A beat is no older than this, whatever the clocks say."""
EXPLAIN_S = 3.0
"""How long victims' failures may wait, beyond SETTLE_S, for a node that is suspected, or has not spoken since, to be
proven gone."""
LEAVE_S = 10.0
"""How long they wait for a rank whose interpreter is on its way out: it may be the one that broke."""


class Guard:
    """Everything that is known of the running workers, and the verdict that follows."""

    def __init__(self, settings: GuardTable, *, reader: Reader = ANYBODY, books: Books | None = None) -> None:
        self._table = self._settings = settings
        self._reader, self.books = reader, books or Books()
        self._next_word_s = AFTER_KILL_S
        """How long a node's next word is waited for, when a worker there has ended."""
        self._asked_s: float | None = None
        self._slept_s = 0.0
        self._rooms = RoomSpeech()
        self._network = NetworkSpeech()
        self._start(Scene(settings, Membership(members=()), {}, 0.0, reader=reader))

    def begin(
        self,
        plan: Plan,
        now_s: float,
        *,
        addresses: Mapping[int, Mapping[str, str]] | None = None,
        leader: int = 0,
        ports: Mapping[int, int] | None = None,
    ) -> None:
        """New workers start, or another leader begins; what was known before is forgotten.

        Args:
            addresses: of each node, by its index and `data` or `control`: where others can try it; `interface`: the
                name of its data interface.
            leader: index of the leader's node in this generation.
            ports: of the nodes' agents, by index: where they can be tried before their first beat.
        """
        membership = Membership(epoch=plan.generation, members=plan.members)
        self._settings = self._table.for_nodes(len(plan.members))
        self._next_word_s = max(AFTER_KILL_S, 2 * self._settings.beat_s)
        where, now = addresses or {}, self._now(now_s)
        self._start(Scene(self._settings, membership, where, now, reader=self._reader, leader=leader, ports=ports))
        self.books.begin(plan, now_s)

    def _start(self, scene: Scene) -> None:
        self._scene = scene
        self._judged: GuardVerdict | None = None
        self._clocks = [NodeClock() for _ in scene.nodes]
        self._end_offsets: dict[int, float | None] = {}
        self._speech = Speech(scene)
        self._orders = TryOrders(scene)
        self._mismatch = Settled[mismatch.Mismatch]()
        self._circle = Settled[Standstill]()
        self._calls_version = 0
        self._hold_until_s: float | None = None
        self._looked: dict[str, float] = {}
        self._explained: GuardVerdict | None = None

    # What is told

    def hear(self, beat: Beat, now_s: float) -> None:
        """A node told of its workers. A beat of another generation, or one that makes no sense, is not believed."""
        now = self._now(now_s)
        scene = self._scene
        if self._explained is None and self._judged is None and scene.ends and self._may_explain(now):
            found = self._explain(now)  # while what it follows from can still be seen
            if found is not None and found.findings[0].confidence is not Confidence.UNDECIDED:
                self._explained = found
        is_timed = 0 <= beat.node.node_index < len(self._clocks) and beat.ping_ns > 0
        clock = self._clocks[beat.node.node_index] if is_timed else NodeClock()
        sent_s, held_s, node_s = beat.ping_ns / 1e9, beat.held_ns / 1e9, beat.node.time_ns / 1e9
        if is_timed and clock.hear(sent_s=sent_s, held_s=held_s, node_s=node_s, now_s=now_s):
            self.books.forget_clocks()
        way_s = 0.0 if clock.offset_s is None else min(max(now_s - node_s + clock.offset_s, 0.0), MAX_WAY_S)
        if (heard := scene.hear(beat.node, now, told_s=now - way_s)) is not None:
            self.books.hear(heard, now_s - way_s, clock=clock)

    def ended(self, end: WorkerEnd, now_s: float, *, wall_s: float | None = None) -> None:
        """A worker ended, well or badly.

        Args:
            end: its `time_s` is on the same clock as `now_s`, as far as the message tells.
            wall_s: the same by its node's own clock, which tells more where it is known.
        """
        now, then_s = self._now(now_s), end.time_s
        if end.rank in self._scene.everybody and wall_s is not None:
            node = self._scene.node_of(end.rank)
            clock = self._clocks[node.index]
            # Ends of one node keep their order: what its clock is known to be at the first one counts for all.
            offset_s = self._end_offsets.setdefault(node.index, clock.offset_s)
            if offset_s is not None:
                then_s, node.clock_error_s = min(now_s, wall_s - offset_s), clock.error_s
        self._scene.end(msgspec.structs.replace(end, time_s=now - (now_s - then_s)), now)
        self.books.ended(end, min(now_s, then_s))

    def lost(self, node_index: int, reason: str, now_s: float) -> None:
        """The connection to a node's agent is gone: the first of the two signs that a node is."""
        now = self._now(now_s)
        node = self._scene.nodes[node_index]
        if node.lost_s is None:
            node.lost_reason, node.lost_s = reason, now
            self.books.lost(node_index)

    def returned(self, node_index: int, now_s: float) -> None:
        """A node's agent has taken up its connection again: it lives, whatever its next beat tells."""
        node = self._scene.nodes[node_index]
        node.lost_reason, node.lost_s = "", None
        if node.heard_s is None:  # its first beat may still take its time
            node.began_s = self._now(now_s)
        else:
            node.heard_s = self._now(now_s)

    def expect_leaving(self) -> None:
        """The job was told to stop: ranks that handle the signal may end with 0 one after another, and others wait."""
        self._scene.may_leave = True

    # What follows

    def look(self, now_s: float) -> tuple[Scene, float]:
        """Return all that is known of nodes and ranks, and now by the guard's clock: its times are of that."""
        return self._scene, self._now(now_s)

    @property
    def beat_s(self) -> float:
        """How often each node tells of itself, and hears the leader, in this generation."""
        return self._settings.beat_s

    @property
    def is_all_well(self) -> bool:
        """Whether every worker ended with 0."""
        return self._scene.is_all_well

    def find_full(self) -> list[tuple[str, FullPlace]]:
        """Return the directories that were full when a rank failed, and have too little room still; with their nodes.

        To be asked after a verdict that `needs_room`: nodes go on telling.
        """
        return [
            (node.name, place) for node in self._scene.nodes for place in disk.find_full(node) if place.room.is_short()
        ]

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What was found and did not end the job: stragglers. For the verdict, after the culprit."""
        return tuple(self._speech.warnings.values())

    def judge(self, now_s: float) -> GuardVerdict | None:
        """Return the proven fault, None while there is none.

        Once there is one it stays; where it is not `is_final`, the end of a worker that came late can still name a
        better culprit, so ask again when all have ended.
        """
        now = self._now(now_s)
        if self._judged is None:
            if (found := self._find(now)) is not None:
                self._judged = replace(found, blocked=self._blocked(now))
        elif not self._judged.is_final:
            self._judged = replace(self._judge_ends(now) or self._judged, blocked=self._judged.blocked)
        if self._judged is not None:
            self.books.fault(now_s, self._judged.findings)
        return self._judged

    def lines(self, now_s: float) -> list[str]:
        """Return what to say aloud now; each line once."""
        now = self._now(now_s)
        if self._judged is not None or self._scene.is_all_well:
            return []
        rooms = ((node.name, node.beat.room) for node in self._scene.nodes if node.beat and node.beat.room)
        said = self._speech.say(now, self.books.named())
        return [*said, *self._rooms.say(now, rooms), *self._network.say(now, self._scene.nodes, self.books.lately)]

    def last_words(self) -> list[str]:
        """Return what to say again when the job has ended."""
        return [*self._network.last_words()]

    @property
    def traffic(self) -> Traffic | None:
        """What the nodes send and how long ranks wait for that; None: nobody tells of it."""
        return see_traffic(self._scene.nodes, self.books.lately())

    def wants(self, now_s: float) -> Mapping[int, Try]:
        """Return the tries to order now, by the index of the node that is to make them; each once."""
        now = self._now(now_s)
        if self._judged is not None or self._scene.is_all_well:
            return {}
        return self._orders.wants(now)

    # Judging

    def _find(self, now: float) -> GuardVerdict | None:
        if (found := self._judge_ends(now)) is not None:
            return found
        if sort_ends(self._scene).own and not should_stop(self._scene, now):
            return None  # others may break, too
        return (
            self._judge_gone(now)
            or presence.judge_stopped(self._scene)
            or self._judge_mismatch(now)
            or self._judge_circle(now)
            or self._judge_links(now)
            or waits.judge_never_came(self._scene)
            or self._judge_waits(now)
        )

    def _judge_ends(self, now: float) -> GuardVerdict | None:
        scene = self._scene
        if scene.is_all_well or not should_stop(scene, now):
            return None
        if own := sort_ends(scene).own:
            return self._judge_own(own, now)
        if not scene.ends:
            return judge_ends(scene)  # all were ended by us
        if not self._has_heard_last_words(now):
            return None
        if (explained := self._explained or self._explain(now)) is not None:
            return explained
        first_s = min(heard_s for _, heard_s in scene.ends.values())
        waited_s = now - first_s
        may_wait = waited_s < EXPLAIN_S + self._settings.gone_s
        if may_wait and (not scene.have_all_told(first_s) or presence.find_suspects(scene, now)):
            return None
        is_one_leaving = any(view.is_leaving and view.beat.state is not ProcessState.GONE for view in scene.running())
        if is_one_leaving and waited_s < LEAVE_S:
            return None
        if (aborted := find_aborted(scene)) is not None:
            return replace(mismatch.explain_abort(scene, aborted.rank), is_final=False)
        return judge_ends(scene)

    def _has_heard_last_words(self, now: float) -> bool:
        """Whether the nodes of those that ended have told what they called last."""
        return all(
            (view := self._scene.ranks.get(rank)) is None
            or view.beat.state is ProcessState.GONE
            or view.told_s > ended_s
            or now > ended_s + self._next_word_s
            for rank, (_, ended_s) in self._scene.ends.items()
        )

    def _judge_own(self, own: Sequence[WorkerEnd], now: float) -> GuardVerdict | None:
        """Workers broke by themselves; of a SIGKILL the node's next word says whose it is."""
        for end in filter(is_killed, own):
            node, (_, heard_s) = self._scene.node_of(end.rank), self._scene.ends[end.rank]
            if node.lost_s is not None and end is own[0]:
                patience_s = EXPLAIN_S + self._settings.gone_s
                return self._judge_gone(now) if now < heard_s + patience_s else judge_ends(self._scene)
            has_spoken = node.heard_s is not None and node.heard_s > heard_s
            if not has_spoken and now < heard_s + self._next_word_s:
                return None
        return judge_ends(self._scene)

    def _explain(self, now: float) -> GuardVerdict | None:
        """Say why workers lost others, from what was known before and since."""
        found = mismatch.find_mismatch(self._scene)
        differs = found and mismatch.judge_mismatch(self._scene, found)
        return (
            (differs if find_aborted(self._scene) else None)
            or self._judge_gone(now)
            or presence.judge_stopped(self._scene)
            or differs
            or self._judge_links(now)
            or self._explain_timeout(now)
        )

    def _may_explain(self, now: float) -> bool:
        """Whether to look again: always in a small job, whose looks cost nothing; with n ranks come n beats, though."""
        num_ranks = self._scene.num_ranks
        return num_ranks <= SMALL or self._may_look("explanation", now, num_ranks * ONE_LOOK_S / LOOKS_SHARE)

    def _explain_timeout(self, now: float) -> GuardVerdict | None:
        """Collectives that timed out by torch's own deadline: who had not come?"""
        gave_up = waits.who_gave_up(self._scene)
        waiting = waits.find_waiting(self._scene, now, gave_up=gave_up) if gave_up else None
        if waiting is None or not waiting.sinks or not set(waiting.sinks).isdisjoint(self._scene.ends):
            return None
        return waits.judge_hang(self._scene, waiting, now, limit=TORCH_LIMIT)

    def _judge_gone(self, now: float) -> GuardVerdict | None:
        found, may_grow = presence.judge_gone(self._scene, now)
        if found is None:
            return None
        if self._hold_until_s is None:
            self._hold_until_s = now + presence.HOLD_S
        return None if may_grow and now < self._hold_until_s else found

    def _judge_mismatch(self, now: float) -> GuardVerdict | None:
        if waits.longest_wait_s(self._scene, now) < SETTLED_S or not self._may_look("mismatch", now, LOOK_EVERY_S):
            return None
        if self._calls_version != self._scene.calls_version:
            self._calls_version = self._scene.calls_version
            self._mismatch.see(mismatch.find_mismatch(self._scene), now)
        found = self._mismatch.find(now)
        return mismatch.judge_mismatch(self._scene, found) if found else None

    def _judge_circle(self, now: float) -> GuardVerdict | None:
        if not self._may_look("circle", now, max(LOOK_EVERY_S, self._scene.num_ranks * waits.WALK_S)):
            return None
        found = self._circle.see(waits.find_circle(self._scene, now), now)
        return waits.judge_circle(self._scene, found) if found else None

    def _judge_links(self, now: float) -> GuardVerdict | None:
        episode = self._orders.episode
        if episode is None or not episode.rounds or presence.find_suspects(self._scene, now):
            return None
        stalled = links.find_stalled(self._scene, now)
        return links.judge_links(self._scene, episode, stalled) if stalled else None

    def _judge_waits(self, now: float) -> GuardVerdict | None:
        if not self._may_look("waits", now, 1.0):
            return None
        if (blocked := waits.judge_blocked(self._scene)) is not None:
            return blocked
        return self._judge_waiting(now) or idle.judge_idle(self._scene, now)

    def _judge_waiting(self, now: float) -> GuardVerdict | None:
        least_s = waits.LEFT_S if self._scene.left else self._settings.hang_s
        if self._scene.may_leave or waits.longest_wait_s(self._scene, now) < least_s:
            return None
        if (waiting := waits.find_waiting(self._scene, now)) is None:
            return None
        if (left := waits.judge_left(self._scene, waiting)) is not None:
            return left
        if min(waiting.waited_s, waiting.stuck_s) < self._settings.hang_s or waits.is_typed_at(self._scene, waiting):
            return None
        return waits.judge_hang(self._scene, waiting, now)

    def _blocked(self, now: float) -> tuple[int, ...]:
        views = self._scene.running()
        stuck = (view for view in views if view.waits_s(now) > 0 or view.beat.state in HELD_STATES or view.is_deaf)
        return tuple(sorted(view.beat.rank for view in stuck))

    # Time

    def _now(self, now_s: float) -> float:
        """The guard's own clock: it stands still while the leader did not run."""
        if self._asked_s is not None and now_s - self._asked_s > ASLEEP_S:
            self._slept_s += now_s - self._asked_s
            self._scene.slept_s, self._scene.woke_s = now_s - self._asked_s, now_s - self._slept_s
        self._asked_s = now_s if self._asked_s is None else max(now_s, self._asked_s)
        return self._asked_s - self._slept_s

    def _may_look(self, what: str, now: float, every_s: float) -> bool:
        """Whether it is time for a costly look; it is after `every_s`."""
        if may := now >= self._looked.get(what, now):
            self._looked[what] = now + every_s
        return may
