"""Since when does each thing hold that the looks show? Pure: it hears looks, and touches nothing.

    history = LookHistory()
    history.hear(look, now_s)          each node's look, in any order of nodes; `now_s` is one clock of the listener's

Times in here are of the listener's clock. The shortest way that a look ever had is the difference of a node's clock. A
gap between two looks of a node is a sleep of the watcher (SIGSTOP, a laptop's lid): everything there begins anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from allranks.causes.book import find_cause
from allranks.causes.cause import Trait
from allranks.facts.fact import NEVER_SAID, When
from allranks.model.beat import ProcessState
from allranks.model.errors import name_signal
from allranks.model.finding import Confidence, Finding
from allranks.model.node_look import EndSeen, NodeLook, ProcessLook, ProcessRole, SocketSeen, StackSeen
from allranks.recorder.wait_graph import Standstill
from allranks.report.text import describe_time

GAP_S = 2.0
"""Looks of one node that are further apart do not tell what was between them, unless they come so anyhow."""
GAPS = 3.0
"""How much later than the one before it a look may come: of very many nodes, looks are seconds apart."""
WINDOW_S = 3.0
"""Over which the use of the processor is measured."""
PASSED_S = 2.0
"""After so long without a proven fault, a job whose ranks talk to each other has got over it."""
FOLLOWS_S = 30.0
"""What breaks so shortly after a proven fault may have followed from it, and is not named beside it."""
QUIET_EVERY_S, BUSY_EVERY_S = 2.0, 15.0
"""Between two reads of a rank's stack."""
MAX_OFTEN, MAX_AT_ONCE = 8, 8
"""Ranks on a node that are read every BUSY_EVERY_S (of more, as many in the same time, in turn), and those at once."""
LOOKS_S = 0.6
"""What has not changed since so shortly after the first look held at it, and before."""
DRIFT = 1e-4
"""Seconds that two clocks may drift apart each second."""
WAYS, STOOD_S = 8, 5.0
"""So many looks in turn that all come so late were not held up: the node's clock stood still (its machine paused)."""
QUIET_S, IDLE_CPU_S, IDLE_SHARE = 2.0, 0.02, 0.03
"""A process that has done nothing visible for so long is quiet; most steps are shorter. Two ticks of the kernel's count
of processor time are nothing, and neither is this share of a core: threads that wake up now and then use some (NCCL's
watchdog, a progress bar that is redrawn ten times a second)."""
MAIN = (ProcessRole.WORKER, ProcessRole.LAUNCHER, ProcessRole.STORE)
"""Not the children of ranks: nobody asks where these are, or whom they talk to."""
_PLACE = attrgetter("operation", "place", "counters")
Ends = tuple[str, int, str, int]
"""Of a connection: own address and port, peer's address and port."""


@dataclass(slots=True)
class Flow:
    """One TCP socket of a process."""

    seen: SocketSeen
    moved_s: float
    """When bytes last went through it, either way."""
    stuck_s: float
    """Since when bytes are unacknowledged, and no more of them get acknowledged; now if none are."""
    unread_s: float
    """Since when as many bytes as now wait to be read; now if none do."""

    def hear(self, seen: SocketSeen, told_s: float) -> None:
        """Take in what is seen of it now."""
        before, self.seen = self.seen, seen
        if seen.carried != before.carried:
            self.moved_s = told_s
        is_acked = seen.acked_bytes != before.acked_bytes or seen.unacked_bytes < before.unacked_bytes
        if is_acked or not (seen.unacked_bytes and before.unacked_bytes):
            self.stuck_s = told_s
        if not seen.unread_bytes or seen.unread_bytes != before.unread_bytes:
            self.unread_s = told_s


@dataclass(slots=True, eq=False)
class Track:
    """One process that is looked at without a gap, and since when what is seen of it is so."""

    node: str
    look: ProcessLook
    told_s: float
    began_s: float
    """Since when it is looked at."""
    state_s: float = field(init=False)
    place_s: float = field(init=False)
    """Each stack shows the same place, operation and counters."""
    ops_s: float = field(init=False)
    """It has started no collective of NCCL's."""
    awake: ProcessLook = field(init=False)
    """The look since which it has used no processor time, and its main thread has not woken up."""
    busy_s: float = 0.0
    """Processor time since then, beyond the share of one that is idle."""
    still_s: float = field(init=False)
    """When that was."""
    read_s: float = -math.inf
    """When its stack was last asked for."""
    stack_s: float = -math.inf
    """When its last stack was read."""
    first_s: float = field(init=False)
    """Since when its stacks are seen: what held then began at some time before."""
    ended: When = NEVER_SAID
    """When it ended: after the last look that saw it alive."""
    flows: dict[Ends, Flow] = field(default_factory=dict)
    cpu: deque[tuple[float, float]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.state_s = self.place_s = self.ops_s = self.first_s = self.still_s = self.began_s
        self.awake = self.look

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.look.end is None

    @property
    def is_held(self) -> bool:
        """Whether it is stopped, or a debugger holds it."""
        return self.is_alive and self.look.state in {ProcessState.STOPPED, ProcessState.TRACED}

    @property
    def stack(self) -> StackSeen:
        """Its last stack; an empty one if none was read."""
        return self.look.stack or StackSeen(at_s=0.0)

    @property
    def end(self) -> EndSeen:
        """How it ended; without a code if it lives."""
        return self.look.end or EndSeen(at_s=0.0)

    @property
    def how(self) -> str:
        """How it ended: `SIGKILL`, `exit code 3`, `an unknown exit code`."""
        if self.end.signal:
            return name_signal(self.end.signal)
        return "an unknown exit code" if self.end.code is None else f"exit code {self.end.code}"

    @property
    def ended_s(self) -> float:
        """When it ended, at the latest; 0: it lives."""
        return self.ended.latest_s or 0.0

    @property
    def cpu_share(self) -> float | None:
        """Of one core, lately; None: it has not been looked at for long enough."""
        (first_s, first), (last_s, last) = (self.cpu[0], self.cpu[-1]) if self.cpu else ((0.0, 0.0), (0.0, 0.0))
        return (last - first) / (last_s - first_s) if last_s - first_s >= WINDOW_S / 2 else None

    @property
    def is_still(self) -> bool:
        """Whether it has done nothing at all for long."""
        return self.told_s - self.still_s >= QUIET_S

    @property
    def is_quiet(self) -> bool:
        """Whether it is still, or its connections, as far as their bytes are known, carry nothing: it may loop."""
        flows = (flow for flow in self.flows.values() if flow.seen.acked_bytes is not None and flow.seen.peer_address)
        return self.is_still or self.told_s - max((flow.moved_s for flow in flows), default=self.told_s) >= QUIET_S

    def unread_at(self, port: int) -> list[Flow]:
        """Its connections at a port, or the socket that listens there, in which something waits to be read."""
        return [flow for flow in self.flows.values() if flow.seen.own_port == port and flow.seen.unread_bytes]

    def hear(self, look: ProcessLook, told_s: float, offset_s: float) -> None:
        """Take in what is seen of it now."""
        before, lived_s, self.look, self.told_s = self.look, self.told_s, look, told_s
        if look.end is not None:
            if self.ended is NEVER_SAID:
                earliest_s = lived_s + 1e-3 if before.end is None else None
                self.ended = When(earliest_s, max(look.end.at_s + offset_s, earliest_s or -math.inf), "watch")
            return
        if look.state is not before.state:
            self.state_s = told_s
        if look.nccl_ops != before.nccl_ops:
            self.ops_s = told_s
        self.busy_s = max(0.0, self.busy_s + look.cpu_s - before.cpu_s - IDLE_SHARE * (told_s - lived_s))
        if look.num_switches != self.awake.num_switches or self.busy_s > IDLE_CPU_S:
            self.awake, self.still_s, self.busy_s = look, told_s, 0.0
        self.cpu.append((told_s, look.cpu_s))
        while len(self.cpu) > 2 and self.cpu[1][0] <= told_s - WINDOW_S:
            self.cpu.popleft()
        known, self.flows = self.flows, {}
        for seen in look.sockets:
            flow = self.flows[seen.ends] = known.get(seen.ends) or Flow(seen, told_s, told_s, told_s)
            flow.hear(seen, told_s)
        is_first = math.isinf(self.stack_s)
        if look.stack is not None and (is_first or look.stack != before.stack):
            self.stack_s = look.stack.at_s + offset_s
            self.first_s = max(self.stack_s, self.first_s) if is_first else self.first_s
            if before.stack is None or _PLACE(look.stack) != _PLACE(before.stack):
                self.place_s = max(self.stack_s, self.place_s)


@dataclass(slots=True)
class NodeTrack:
    """The last look at one node; what is added to a time of its clock, when the look was taken, and when one came."""

    look: NodeLook
    offset_s: float
    told_s: float
    heard_s: float
    first_s: float
    """When the first look came; it may have taken long, as no later one does."""
    passed_s: float = 0.0
    """Between the last two looks: those of very many nodes come seconds apart."""
    ways_s: deque[float] = field(default_factory=lambda: deque(maxlen=WAYS))
    """Of the last looks, from when they were taken, by the node's clock, until they came."""

    def follow(self, look: NodeLook, now_s: float) -> bool:
        """Take in a newer look; returns whether what is known of the time before it still counts."""
        self.ways_s.append(now_s - look.at_s)
        before_s, drifted_s = self.told_s, self.offset_s + DRIFT * (look.at_s - self.look.at_s)
        has_stood = len(self.ways_s) == WAYS and min(self.ways_s) > drifted_s + STOOD_S
        self.offset_s = min(self.ways_s) if has_stood else min(drifted_s, self.ways_s[-1])
        self.look, self.told_s = look, look.at_s + self.offset_s
        passed_s, known_s = self.told_s - before_s, self.passed_s
        self.passed_s = passed_s
        return passed_s <= max(GAP_S, GAPS * known_s)


class LookHistory:
    """All nodes and processes of one job, since the watch began."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeTrack] = {}
        self.suspended_s = -math.inf
        """When all processes of the job were last seen to be stopped."""
        self.links: list[tuple[int, Flow, int, Flow]] = []
        """Connections between ranks but those to the store, each from both ends: rank, its socket, peer, its socket."""
        self.moved_s = -math.inf
        """When something last moved between ranks, or one called NCCL, or began to be looked at, or all had ended."""
        self.proven: list[Finding] = []
        """The verdicts so far, but those that the job has got over."""
        self.held_s = -math.inf
        """When the last of them was last seen to hold."""
        self.stood: tuple[float, tuple[Any, ...]] = (-math.inf, ())
        """When ranks were last said to wait for others, before any of them ended; and those states."""
        self.told_stops: tuple[object, Sequence[Standstill]] = (None, ())
        """Why ranks wait, by torch's recorders; and which answers of theirs that is from."""
        self.workers: dict[int, Track] = {}
        """The process of each rank; where it was started again, the newest one. In the order of ranks."""
        self.living: dict[int, Track] = {}
        """Of these, those that have not ended."""
        self._tracks: dict[tuple[str, int, int], Track] = {}

    def hear(self, look: NodeLook, now_s: float) -> None:
        """Take in one look; one that is older than the last one of its node does not count."""
        node = self.nodes.setdefault(look.node, NodeTrack(look, now_s - look.at_s, now_s, now_s, now_s))
        node.heard_s = now_s
        if look.at_s <= node.look.at_s and look is not node.look:
            return
        is_continued = node.follow(look, now_s)
        keys = {(look.node, process.pid, process.start_ticks): process for process in look.processes}
        for key in [key for key in self._tracks if key[0] == look.node and key not in keys]:
            del self._tracks[key]
        for key, process in keys.items():
            if key not in self._tracks or not (is_continued or process.end):
                self._tracks[key] = Track(look.node, process, node.told_s, node.told_s)
            self._tracks[key].hear(process, node.told_s, node.offset_s)
        living = [track for track in self.tracks(*MAIN) if track.is_alive]
        if len(living) > 1 and all(track.is_held for track in living):
            self.suspended_s = node.told_s
        self.workers = self._find_workers()
        self.living = {rank: track for rank, track in self.workers.items() if track.is_alive}
        self.links = list(self._find_links(self.living))
        times = [track.ops_s for track in self.living.values()] + [flow.moved_s for _, flow, _, _ in self.links]
        # A connection that closes takes its times with it.
        self.moved_s = max(self.moved_s, *times) if times else node.told_s

    def _find_links(self, ranks: dict[int, Track]) -> Iterator[tuple[int, Flow, int, Flow]]:
        found: dict[Ends, tuple[int, Flow]] = {}
        for rank, track in ranks.items():
            for ends, flow in track.flows.items():
                if ends[2] and self.store_port not in (ends[1], ends[3]):
                    found[ends] = rank, flow
        for ends, end in found.items():
            if (other := found.get((*ends[2:], *ends[:2]))) is not None:
                yield *end, *other

    @property
    def store_port(self) -> int:
        """Of the job's store; 0: not known."""
        return next((node.look.store[1] for node in self.nodes.values() if node.look.store is not None), 0)

    def tracks(self, *roles: ProcessRole) -> Iterator[Track]:
        """Processes of these roles."""
        return (track for track in self._tracks.values() if track.look.role in roles)

    def _find_workers(self) -> dict[int, Track]:
        found: dict[int, Track] = {}
        for track in self.tracks(ProcessRole.WORKER):
            rank = track.look.rank
            if rank is not None and (rank not in found or not found[rank].is_alive):
                found[rank] = track
        return dict(sorted(found.items()))

    def all_workers(self) -> list[Track]:
        """The same, and processes that are ranks, but nobody knows which."""
        nameless = [track for track in self.tracks(ProcessRole.WORKER) if track.look.rank is None]
        return [*self.workers.values(), *nameless]

    def keep(self, found: tuple[Finding, ...], now_s: float) -> None:
        """Remember what is proven now: a fault that is known is told anew, and one that followed from it is not."""
        has_passed = bool(self.living) and self.moved_s > self.held_s
        if not found and now_s - self.held_s > PASSED_S and has_passed:
            # Only processes that live get over it: stopped, no link, no store.
            self.proven = [old for old in self.proven if Trait.PASSES not in find_cause(old.cause_id).traits]
        sure = [finding for finding in found if finding.confidence is not Confidence.UNDECIDED]
        again = [new for new in sure if any(_is_same(new, old) for old in self.proven)]
        if not self.proven or now_s - self.held_s > FOLLOWS_S:
            again = sure
        if again:
            others = [old for old in self.proven if not any(_is_same(new, old) for new in again)]
            self.proven, self.held_s = [*others, *again], now_s


def choose(tracks: Collection[Track], *, now_s: float, num_ranks: int = 1, at_most: int = MAX_AT_ONCE) -> list[Track]:
    """Return those whose stacks are read now, booked as read: quiet ones first, then whoever was not read for longest.

    One read costs some 15 ms of processor time, more than everything else in a look. A rank that does something is
    read rarely. One that is quiet may hang, or wait for one that hangs, so its stack is never old.
    """
    busy_s, due = BUSY_EVERY_S * max(1.0, num_ranks / MAX_OFTEN), list[tuple[bool, float, Track]]()
    for track in tracks:
        if now_s - track.read_s >= (QUIET_EVERY_S if track.is_quiet else busy_s):
            due.append((not track.is_quiet, track.read_s, track))
    chosen = [track for *_, track in sorted(due, key=lambda turn: turn[:2])[:at_most]]
    for track in chosen:
        track.read_s = now_s
    return chosen


def is_open(since_s: float, first_s: float) -> bool:
    """Whether something that holds since then may hold for longer, as it did at the first look already."""
    return since_s <= first_s + LOOKS_S


def say_for(since_s: float, now_s: float, first_s: float) -> str:
    """`for 41 s`, or `for at least 5.2 s`: it was so at the first look."""
    return f"for {'at least ' * is_open(since_s, first_s)}{describe_time(now_s - since_s)}"


def _is_same(finding: Finding, other: Finding) -> bool:
    """Whether both are of one fault, which more ranks may have by now."""
    are_alike = (finding.cause_id, finding.subject) == (other.cause_id, other.subject)
    return are_alike and (not finding.ranks or bool(set(finding.ranks) & set(other.ranks)))
