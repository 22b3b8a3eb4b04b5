"""1,024 ranks for a virtual week: what a beat grows by, what the ledger costs the leader, and how large its files get.

The leader is the product's own (launch.lead.leader, the guard and its books, status.json and goodput.json in a run
directory), and so are the books of the nodes' agents; only the agents are virtual (week_job.py), and time. A week has
1.2 million beats of each node, too many to reckon. So every beat is heard in some windows: at the beginning, around two
restarts, and at the end. In between each node sends one beat every three hours, with the totals that it would have by
then. To the leader this looks as if it had been suspended; its books take in running totals, so nothing is lost for
them. The book of one node is noted every 30 s then. Those of the others are noted every 450 s: their columns have 512 s
at the end.

What the ledger costs is the difference of two leaders that hear the same beats by turns, in the frames in which they
come: one as it is, and one whose beats lack what the ledger and `top` added to them, and that keeps no books and writes
no status. Processor time is that of the whole process, so of the thread that writes the files, too, as a share of the
virtual time: beats come as often as the guard asks for with so many nodes.

A job on GPUs tells no times of collectives. Another short job does, with Gloo: there the books have the most to do.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from allranks.files.folder import Folder
from allranks.guard.goodput.clocks import NodeClock
from allranks.guard.goodput.ledger import Books
from allranks.guard.node.booking import NodeBook
from allranks.guard.verdict import Guard
from allranks.launch import events
from allranks.launch.lead.assignment import make_group
from allranks.launch.lead.course import Phase, Terms
from allranks.launch.lead.leader import Leader
from allranks.launch.lead.members import ConnectedNode
from allranks.launch.lead.status import MAX_BYTES, StatusKeeper, on_wall_clock
from allranks.model.beat import LoadSeen, NodeBeat
from allranks.model.cluster import GuardTable
from allranks.model.curve import FILE as CURVES
from allranks.model.curve import MAX_POINTS, CurvePoint
from allranks.model.errors import Exit
from allranks.model.finding import Verdict
from allranks.model.job_status import FILE as STATUS
from allranks.model.ledger import Ledger
from allranks.model.past import History, Past
from allranks.model.time_book import FILE as BOOK
from allranks.model.time_book import MAX_BYTES_PER_RANK
from allranks.report.page import render
from allranks.report.page_data import read_page
from allranks.report.readback import parse_ledger
from allranks.report.rundir import RunDir
from allranks.report.status_files import GOODPUT, StatusFiles
from allranks.wire.connection import decode_frames, encode_frame
from allranks.wire.protocol import Beat, Ended, Message, Plan, Stopped, WorkerEnd

from ..many_agents import card_of
from .jobs import Check, MeasurementError, Part
from .week_job import CALLS, LATE_RANK, NODES, PER_NODE, RANKS, STEP_US, VirtualJob

MOST_BYTES, MOST_POINTS, MOST_REPORT_MB = 100, 2.0, 10
WEEK_S, HOUR_S, JUMP_S = 7 * 86400.0, 3600.0, 10_800.0
FIRST_S, AROUND_S, LAST_S, WITH_TIMES_S = 120.0, (10.0, 90.0), 60.0, 30.0
"""How long every beat is heard: at the beginning, before and after a fault, at the end, and in the job with Gloo."""
FAULTS = ((26.5 * HOUR_S, 77, -9), (98.25 * HOUR_S, 900, -9))
"""When, which rank, and its exit code."""
BEGUN_S = 100_000.0
"""By the leader's clock: since its machine was started."""
BEAT_S = GuardTable().for_nodes(NODES).beat_s
TURN_S, CHUNK_S = 0.1, 10.0
"""Between two turns of the leader's loop at most; of beats that the two leaders hear by turns."""
OWN_BOOK_S, BOOK_S, OTHER_BOOKS_S = 30.0, 60.0, 450.0
VALUES = ("loss", "lr", "grad_norm", "tokens_per_s")

Told = tuple[float, int, bytes, bytes]
"""When, which node, its frame, and the same without what the ledger added; without frames: the leader's turn."""


@dataclass
class Sizes:
    """The largest of each kind, in bytes."""

    largest: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, size: float) -> None:
        self.largest[name] = max(size, self.largest.get(name, 0))


class MeasuredFiles(StatusFiles):
    """Notes the size of each file that is written."""

    def __init__(self, hold: Callable[..., Folder], sizes: Sizes) -> None:
        super().__init__(hold)
        self._sizes = sizes

    def _put(self, name: str, data: bytes) -> None:
        self._sizes.note(name, len(data))
        super()._put(name, data)


class NoBooks(Books):
    """Takes in nothing."""

    def hear(self, beat: NodeBeat, told_s: float, *, clock: NodeClock | None = None) -> None:
        pass


class NoStatus(StatusKeeper):
    """Is due at a new phase only."""

    def is_due(self, now_s: float, phase: Phase) -> bool:
        return phase is not self._phase


class Led:
    """One leader, whose effects are carried out as far as they write files.

    Args:
        sizes: None: it keeps no ledger.
    """

    def __init__(self, run_dir: RunDir, wall_s: float, sizes: Sizes | None) -> None:
        self._wall_s, self._sizes = wall_s, sizes
        self.run_dir = run_dir
        self.files = MeasuredFiles(run_dir.hold, sizes or Sizes())
        self.newest: Ledger | None = None
        self.stragglers: list[int] = []
        self.checkpoint = 0
        """That its driver finds."""
        books = (NoBooks if sizes is None else Books)(epoch_s=wall_s)
        self.guard = Guard(GuardTable(), books=books)
        store = {"store_address": "127.0.0.1", "store_port": 29501}
        cards = {node: card_of(node) for node in range(NODES)}
        terms = Terms(job="week", wanted_backend="nccl", num_nodes=NODES, min_nodes=NODES, capacity_s=60.0, **store)
        self.plan: Plan = make_group(cards, wanted_backend="nccl", attempt=0, max_restarts=3, **store)[0]
        nodes = {node: ConnectedNode(card=card, name=card.host, address="127.0.0.1") for node, card in cards.items()}
        past = Past(history=History(restarts_left=3))
        self.leader = Leader(terms, guard=self.guard, past=past, nodes=nodes, plan=self.plan, now_s=BEGUN_S)
        if sizes is None:
            self.leader._status = NoStatus(books)

    def hear(self, node: int, data: bytes, now_s: float) -> None:
        for message in decode_frames(bytearray(data)):
            self.tell(node, message, now_s)

    def tell(self, node: int, message: Message, now_s: float) -> None:
        self._step(events.Heard(now_s=now_s, node=node, message=message))

    def turn(self, now_s: float) -> None:
        self._step(events.Due(now_s=now_s))

    def _step(self, event: events.Event) -> None:
        for effect in self.leader.step(event):
            match effect:
                case events.Send(message=Plan() as plan):
                    self.plan = plan
                case events.FindCheckpoint():
                    self._step(events.CheckpointFound(now_s=event.now_s, step=self.checkpoint))
                case _ if self._sizes is None:
                    pass
                case events.Record(event=name, fields=fields):
                    self.run_dir.add_event(name, **fields)
                    if name == "straggler":
                        self.stragglers.append(int(str(fields["rank"])))
                case events.WriteStatus(status=status, ledger=ledger):
                    self.newest = ledger
                    self.files.show(on_wall_clock(status, offset_s=self._wall_s, started_s=self._wall_s + BEGUN_S))
                case events.WriteLedger(ledger=ledger):
                    self.files.keep(ledger)


class Week:
    """One job, told to both leaders.

    Args:
        directory: of its files.
    """

    def __init__(self, directory: Path, *, is_async: bool) -> None:
        wall_s = time.time() - WEEK_S - BEGUN_S
        self.sizes = Sizes()
        run_dirs = [RunDir(directory, name) for name in ("week", "without")]
        for run_dir in run_dirs:
            run_dir.create()
            run_dir.create_attempt(None)
        self.run_dir = run_dirs[0]
        self.job = VirtualJob(wall_s, is_async=is_async)
        self.job.begin(0, BEGUN_S, 0)
        self.led, self.without = Led(run_dirs[0], wall_s, self.sizes), Led(run_dirs[1], wall_s, None)
        self.books = [NodeBook() for _ in range(NODES)]
        self.now_s = BEGUN_S
        self.points: dict[str, list[tuple[float, float]]] = {}
        """By window: of each chunk, what each leader used, in points of a core."""
        self._chance = random.Random(7)

    def listen(self, window: str, until_s: float) -> None:
        """Hear every beat until then."""
        while self.now_s < until_s:
            since_s, self.now_s = self.now_s, min(until_s, self.now_s + CHUNK_S)
            told = [*self._tell(since_s, self.now_s)]
            used = {led: self._feed(led, told) for led in self._chance.sample((self.led, self.without), 2)}
            passed_s = self.now_s - since_s
            points = 100 * used[self.led] / passed_s, 100 * used[self.without] / passed_s
            self.points.setdefault(window, []).append(points)

    def jump(self, until_s: float) -> None:
        """Go on to then; each node sends one beat every three hours."""
        while self.now_s < until_s:
            since_s, self.now_s = self.now_s, min(until_s, self.now_s + JUMP_S)
            for node in range(NODES):
                every_s = OTHER_BOOKS_S if node else OWN_BOOK_S
                for number in range(1, round((self.now_s - since_s) / every_s)):
                    self._note(node, since_s + number * every_s)
            told = [self._word(node, self.now_s, is_noted=True) for node in range(NODES)]
            for led in (self.led, self.without):
                self._feed(led, [*told, (self.now_s, -1, b"", b"")])
            self._pack()

    def fail(self, rank: int, exit_code: int) -> None:
        """A rank dies, the job restarts."""
        self.job.dead = rank
        for led in (self.led, self.without):
            led.checkpoint = self.job.checkpoint_at(self.now_s)
            self._end(led, rank, exit_code, is_ours=False)
        failed_s, generation = self.now_s, self.job.generation
        while any(led.leader.phase is Phase.RUNNING for led in (self.led, self.without)):
            self.listen("a fault", self.now_s + BEAT_S)
            if self.now_s > failed_s + 60:
                raise MeasurementError(f"the death of rank {rank} is no fault")
        self._stop([other for other in range(RANKS) if other != rank], exit_code=-15)
        for led in (self.led, self.without):
            for turn in range(1, 100):
                led.turn(self.now_s + turn * TURN_S)
            if led.plan.generation != generation + 1:
                raise MeasurementError(f"no restart after rank {rank}: {led.leader.phase}")
        self.now_s += 10.0
        self.job.begin(generation + 1, self.now_s, self.led.checkpoint)

    def end(self) -> None:
        """All scripts are over, then all processes."""
        self.job.has_left = True
        self.listen("the end", self.now_s + 2 * BEAT_S)
        self._stop(range(RANKS), exit_code=0)
        for led in (self.led, self.without):
            led.turn(self.now_s)
            if led.leader.phase is not Phase.OVER:
                raise MeasurementError(f"the job has not ended: {led.leader.phase}")
            led.files.close()

    def write(self) -> None:
        """Write what others than the leader do, for the report."""
        for node, book in enumerate(self.books):
            name = self.led.plan.members[node].name
            self.run_dir.create_node(name).write_whole(BOOK, book.pack())
        verdict = Verdict(job="week", attempt=0, exit_code=Exit.OK)
        self.run_dir.write_verdict(verdict, node=self.led.plan.members[0].name)
        values = (
            CurvePoint(50 * at, self.job.wall_s + BEGUN_S + 60 * at, {name: self._chance.random() for name in VALUES})
            for at in range(MAX_POINTS)
        )
        self.run_dir.hold_attempt().write_whole(CURVES, b"\n".join(map(msgspec.json.encode, values)) + b"\n")

    # Inside

    def _tell(self, since_s: float, until_s: float) -> Iterator[Told]:
        """Yield all words of a time, and the leader's turns."""
        for beat in range(round((until_s - since_s) / BEAT_S)):
            for node in range(NODES):
                now_s = since_s + BEAT_S * (beat + node / NODES)
                yield self._word(node, now_s, is_noted=node == 0 or beat == 0)
                if node % round(NODES * TURN_S / BEAT_S) == 0:
                    yield now_s, -1, b"", b""
        yield until_s, -1, b"", b""
        if round(until_s) % round(BOOK_S) == 0:
            self._pack()

    def _word(self, node: int, now_s: float, *, is_noted: bool) -> Told:
        word = self.job.beat(node, now_s)
        plain = [
            msgspec.structs.replace(rank, pace=None, begun_ago_s=None, load=LoadSeen()) for rank in word.node.ranks
        ]
        without = msgspec.structs.replace(word, node=msgspec.structs.replace(word.node, ranks=tuple(plain)))
        frame, short = encode_frame(word), encode_frame(without)
        kind = "week"
        if self.job.has_left:
            kind = "last beat"
        elif now_s - self.job.begun_s < 60:
            kind = "first minute"
        self.sizes.note(kind, (len(frame) - len(short)) / PER_NODE)
        if is_noted:
            self._note(node, now_s, word)
        return now_s, node, frame, short

    def _note(self, node: int, now_s: float, word: Beat | None = None) -> None:
        told = (word or self.job.beat(node, now_s)).node
        wall_s = self.job.wall_s + now_s
        self.books[node].note(told.ranks, generation=told.generation, now_s=now_s, wall_s=wall_s)

    def _pack(self) -> None:
        self.sizes.note(BOOK, len(self.books[0].pack()) / PER_NODE)

    def _feed(self, led: Led, told: list[Told]) -> float:
        """Let a leader hear this; return the processor time that it takes."""
        began_s, is_led = time.process_time(), led is self.led
        for now_s, node, frame, short in told:
            if node < 0:
                led.turn(now_s)
            else:
                led.hear(node, frame if is_led else short, now_s)
        time.sleep(0.02)  # its files are written
        return time.process_time() - began_s

    def _end(self, led: Led, rank: int, exit_code: int, *, is_ours: bool) -> None:
        node = rank // PER_NODE
        name, generation = led.plan.members[node].name, self.job.generation
        message = "RuntimeError: CUDA error: an illegal memory access was encountered" if exit_code == 1 else None
        wall_s = self.job.wall_s + self.now_s
        end = WorkerEnd(
            rank=rank, node=name, exit_code=exit_code, time_s=wall_s, ended_by_us=is_ours, message=message
        )  # fmt: skip
        led.tell(node, Ended(end=end, age_s=0.0, generation=generation), self.now_s)

    def _stop(self, ranks: range | list[int], exit_code: int) -> None:
        for led in (self.led, self.without):
            for rank in ranks:
                self._end(led, rank, exit_code, is_ours=exit_code != 0)
            led.turn(self.now_s)
            for node in range(NODES):
                led.tell(node, Stopped(generation=self.job.generation), self.now_s)


def measure(directory: Path) -> Part:
    """Live through both jobs."""
    part = Part()
    week = Week(directory / "gpus", is_async=True)
    until_s = BEGUN_S + WEEK_S
    week.listen("the first minutes", BEGUN_S + FIRST_S)
    for at_s, rank, exit_code in FAULTS:
        week.jump(BEGUN_S + at_s - AROUND_S[0])
        week.listen("before a fault", BEGUN_S + at_s)
        week.fail(rank, exit_code)
        week.listen("after a restart", week.now_s + AROUND_S[1])
    week.jump(until_s - LAST_S)
    week.listen("the last minutes", until_s)
    week.end()
    week.write()
    sizes = week.sizes.largest
    for kind in ("first minute", "week", "last beat"):
        part.add(_at_most(f"beat, a rank: {kind}", sizes[kind], MOST_BYTES, "bytes"))
    for window in ("the first minutes", "after a restart", "the last minutes"):
        part.add(_weigh(week, window))
    with_times = Week(directory / "times", is_async=False)
    with_times.jump(BEGUN_S + HOUR_S)
    with_times.listen("with times of calls", with_times.now_s + WITH_TIMES_S)
    times = _weigh(with_times, "with times of calls")
    for name in (STATUS, GOODPUT):
        part.add(_at_most(name, sizes[name], MAX_BYTES, "bytes"))
    part.add(_at_most(f"{BOOK}, a rank", sizes[BOOK], MAX_BYTES_PER_RANK, "bytes"))
    page = read_page(week.run_dir.path)
    if page.missing or page.lanes is None or len(page.lanes.lanes) != RANKS:
        raise MeasurementError(f"the report lacks {page.missing or 'lanes'}")
    about = (
        f"{len(page.lanes.lanes)} lanes of {page.lanes.num_columns} columns, {len(page.curves)} curves, no roll call"
    )
    part.add(_at_most("report", len(render(page).encode()) / 1e6, MOST_REPORT_MB, "MB", note=about))
    for check in _check_ledger(week):
        part.add(check)
    part.notes.append(f"{NODES} nodes of {PER_NODE} ranks, a beat every {BEAT_S:g} s.")
    part.notes.append(f"A job of that size with Gloo, whose ranks tell the times of {CALLS / STEP_US * 1e6:.1f} "
                      f"collectives a second: {times.told:.2f} points; {times.note}.")  # fmt: skip
    return part


def _at_most(what: str, told: float, limit: float, unit: str, note: str = "") -> Check:
    return Check(what, 0, told, limit, unit=unit, at_most=True, note=note)


def _weigh(week: Week, window: str) -> Check:
    """How much more does the leader with a ledger use?"""
    points = week.points[window]
    more = [one - other for one, other in points]
    in_all = statistics.median(one for one, _ in points)
    note = f"median of {len(points)} times {CHUNK_S:.0f} s ({min(more):.2f} to {max(more):.2f}); in all {in_all:.2f}"
    return _at_most(f"leader: {window}", statistics.median(more), MOST_POINTS, "points", note=note)


def _check_ledger(week: Week) -> Iterator[Check]:
    """Is it the account of that week?"""
    ledger = parse_ledger((week.run_dir.path / GOODPUT).read_bytes())
    if ledger is None:
        raise MeasurementError("goodput.json cannot be read")
    booked = 100 * sum(ledger.seconds.values()) / (RANKS * (week.now_s - BEGUN_S))
    yield Check("sum of all categories", 100, booked, 0.1, unit="%", note="of wall time x ranks")
    yield Check("restarts", len(FAULTS), len(ledger.restarts), 0, unit="restarts")
    named = ", ".join(f"rank {rank}" for rank in dict.fromkeys(week.led.stragglers))
    yield Check("stragglers", 1, len(ledger.chronic), 0, unit="ranks", owed_to=f"rank {LATE_RANK}", named=named)
