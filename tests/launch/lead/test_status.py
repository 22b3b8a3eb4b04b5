"""What a leader writes down of its job each second: rows, who waits for whom, rates, limits of size."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from allranks.guard.scene import Scene
from allranks.guard.verdict import Guard
from allranks.guard.waits import find_waiting
from allranks.launch.events import Due, Effect, Heard, Record, WriteLedger, WriteStatus
from allranks.launch.lead.assignment import make_group
from allranks.launch.lead.course import Phase, Terms
from allranks.launch.lead.leader import Leader
from allranks.launch.lead.members import ConnectedNode
from allranks.launch.lead.rank_rows import CpuMeter, see_ranks, see_stuck
from allranks.launch.lead.status import MAX_BYTES, describe_event, fit, on_wall_clock
from allranks.launch.lead.step_rate import StepRate
from allranks.model.beat import CallSeen, GpuSeen, GroupSeen, InterfaceSeen, LoadSeen, NodeBeat, ProcessState, RankBeat
from allranks.model.card import Card
from allranks.model.cluster import GuardTable
from allranks.model.job_status import EventSeen, JobStatus, NodeRow, RankRow, write_status
from allranks.model.ledger import Ledger, RankLedger
from allranks.model.membership import Member, Membership
from allranks.model.pace import PACE_STATES, Pace, PaceState
from allranks.model.past import History, Past
from allranks.report.readback import parse_job_status
from allranks.wire.protocol import Beat, Ended, Stopped, WorkerEnd

NOW_S = 1000.0


def pace(state: PaceState, *, steps: int = 40, for_s: float = 0.5) -> Pace:
    totals = tuple(1_000_000 for _ in PACE_STATES)
    return Pace(state=PACE_STATES.index(state), state_us=round(for_s * 1e6), steps=steps, totals_us=totals)


def busy(rank: int, does: PaceState = PaceState.STEP, **more: Any) -> RankBeat:
    """A rank that computes, after seven collectives."""
    group = GroupSeen(name="0", enqueued=7, completed=7)
    told: dict[str, Any] = {"pace": pace(does), "main_at": "train.py:9 in step", "groups": (group,)}
    return RankBeat(rank=rank, pid=100 + rank, silent_s=0.0, **told | more)


def waits(rank: int, *, for_s: float = 10.0, **more: Any) -> RankBeat:
    """A rank in the eighth collective."""
    call = CallSeen(group="0", seq=8, op="all_reduce", place="train.py:12 in step")
    group = GroupSeen(name="0", enqueued=8, completed=7, waiting_s=for_s)
    told: dict[str, Any] = {"pace": pace(PaceState.BLOCKED, for_s=for_s), "groups": (group,), "calls": (call,)}
    return RankBeat(rank=rank, pid=100 + rank, silent_s=0.0, **told | more)


def see(*ranks: RankBeat | None) -> Scene:
    """One rank a node; all have told just now, but None."""
    members = tuple(Member(name=f"n{i}", first_rank=i, num_workers=1, host=f"n{i}") for i in range(len(ranks)))
    scene = Scene(GuardTable(), Membership(members=members), {}, NOW_S - 100)
    for index, rank in enumerate(ranks):
        if rank is not None:
            assert scene.hear(NodeBeat(node_index=index, generation=0, ranks=(rank,)), NOW_S)
    return scene


def rows(scene: Scene, *, steps: Mapping[int, int] | None = None, late: Mapping[int, Any] | None = None) -> Any:
    waiting = find_waiting(scene, NOW_S)
    return see_ranks(scene, NOW_S, waiting=waiting, steps=steps or {}, late=late or {}, cpu=CpuMeter())


@dataclass(frozen=True)
class Late:
    lag_s: float
    share: float


# Rows


@pytest.mark.parametrize(
    ("beat", "state", "place", "for_s"),
    [
        (None, "start", "", 0.0),
        (busy(0), "step", "train.py:9 in step", 0.5),
        (busy(0, PaceState.DATA), "data", "train.py:9 in step", 0.5),
        (busy(0, pace=None, phase="init"), "start", "train.py:9 in step", 0.0),
        (busy(0, pace=None, phase="training"), "running", "train.py:9 in step", 0.0),
        (busy(0, pace=None, phase="saving"), "save", "train.py:9 in step", 0.0),
        (busy(0, phase="leaving"), "leaving", "train.py:9 in step", 0.0),
        (waits(0, for_s=0.1), "all_reduce", "train.py:12 in step", 0.1),
        # DDP blocks inside of `backward`, and so does a script without marks
        (waits(0, for_s=4.0, pace=pace(PaceState.BACKWARD)), "all_reduce", "train.py:12 in step", 4.0),
        (waits(0, for_s=4.0, pace=None), "all_reduce", "train.py:12 in step", 4.0),
        (waits(0, for_s=0.4, pace=pace(PaceState.BACKWARD)), "backward", "", 0.5),
        (waits(0, calls=()), "collective", "", 10.0),
        (busy(0, state=ProcessState.STOPPED, state_for_s=7.0), "stopped", "train.py:9 in step", 7.0),
        (busy(0, state=ProcessState.BLOCKED, state_for_s=7.0), "kernel", "train.py:9 in step", 7.0),
        (busy(0, state=ProcessState.BLOCKED, state_for_s=0.1), "step", "train.py:9 in step", 0.5),
    ],
)
def test_a_row_says_what_a_rank_does(beat: RankBeat | None, state: str, place: str, for_s: float) -> None:
    [row] = rows(see(beat))
    assert (row.state, row.place, row.for_s, row.ranks, row.nodes) == (state, place, for_s, (0,), ("n0",))


@pytest.mark.parametrize(("for_s", "shown_s"), [(0.08, 0.08), (1.5, 3.5)])
def test_a_beat_that_is_old_makes_no_step_longer(for_s: float, shown_s: float) -> None:
    scene = see(busy(0, pace=pace(PaceState.STEP, for_s=for_s)))
    [row] = see_ranks(scene, NOW_S + 2, waiting=None, steps={}, late={}, cpu=CpuMeter())
    assert row.for_s == shown_s


def test_nodes_that_are_lost_silent_or_over_are_told_as_such() -> None:
    scene = see(busy(0), busy(1), busy(2), busy(3))
    scene.nodes[1].lost_s = NOW_S - 2
    scene.nodes[2].heard_s = NOW_S - 8
    end = WorkerEnd(rank=3, node="n3", exit_code=0, time_s=NOW_S)
    scene.end(end, NOW_S)
    seen = [(row.ranks, row.state, row.for_s) for row in rows(scene)]
    assert seen == [((1,), "lost", 2.0), ((2,), "silent", 8.0), ((0,), "step", 0.5), ((3,), "ended", 0.0)]


def test_who_is_waited_for_comes_first_and_then_who_costs_most() -> None:
    scene = see(waits(0), waits(1), busy(2, main_at="evaluate.py:88 in run"), waits(3))
    seen = rows(scene, late={1: Late(0.3, 0.12), 3: Late(0.001, 0.001)})
    assert [(row.ranks, row.is_culprit) for row in seen] == [((2,), True), ((1,), False), ((0,), False), ((3,), False)]
    assert (seen[1].late_s, seen[1].cost_share) == (0.3, 0.12)


def test_1024_ranks_are_folded_and_the_late_ones_stand_alone() -> None:
    late = {17, 512, 513}
    ranks = [busy(i, main_at="evaluate.py:88 in run") if i in late else waits(i) for i in range(1024)]
    first, second = rows(see(*ranks), late={4: Late(0.001, 0.001)})
    assert (first.ranks, first.num_ranks, first.state, first.is_culprit) == ((17, 512, 513), 3, "step", True)
    assert first.place == "evaluate.py:88 in run"
    assert (second.num_ranks, second.state, second.ranks[:3], len(second.ranks)) == (1021, "all_reduce", (0, 1, 2), 64)
    assert (second.late_s, second.cost_share) == (0.001, 0.001)


def test_many_places_of_many_ranks_make_one_row() -> None:
    ranks = [waits(i, calls=(CallSeen(group="0", seq=8, op="send", place=f"pipe.py:{i} in f"),)) for i in range(64)]
    [row] = rows(see(*ranks))
    assert (row.state, row.place, row.num_ranks) == ("send", "", 64)


def test_cores_are_told_from_two_beats() -> None:
    scene, cpu = see(busy(0, cpu_s=5.0)), CpuMeter()
    assert cpu.look(scene.ranks[0]) is None
    scene.hear(NodeBeat(node_index=0, generation=0, ranks=(busy(0, cpu_s=8.0),)), NOW_S + 2)
    assert cpu.look(scene.ranks[0]) == 1.5


def test_the_gpus_of_a_row_are_the_idlest_and_the_fullest() -> None:
    seen = {0: LoadSeen(9, 97, 10, 80), 1: LoadSeen(9, 40, 70, 80), 2: LoadSeen(9, None, 5, 80), 3: LoadSeen(9)}
    scene = see(*(busy(rank, load=seen.get(rank % 64, LoadSeen(9, 97, 20, 80))) for rank in range(64)))
    [row] = rows(scene)
    assert row.gpu == GpuSeen(40, 70 * 16, 80 * 16)
    assert [row.gpu for row in rows(see(busy(0, load=seen[2]), busy(1)))] == [GpuSeen(None, 80, 1280), None]


def test_stuck_says_who_is_missing_and_when_the_job_ends_for_it() -> None:
    scene = see(waits(0, for_s=41), busy(1, main_at="evaluate.py:88 in run"), waits(2, for_s=40))
    scene.ranks[1].moved_s = NOW_S - 41
    waiting = find_waiting(scene, NOW_S)
    assert waiting is not None
    stuck = see_stuck(scene, waiting, NOW_S, is_ended_for_it=True)
    assert (stuck.op, stuck.for_s, stuck.num_waiting, stuck.ranks) == ("all_reduce", 41.0, 2, (1,))
    assert stuck.place == "evaluate.py:88 in run"
    assert stuck.ends_in_s == pytest.approx(600, abs=41)
    assert see_stuck(scene, waiting, NOW_S, is_ended_for_it=False).ends_in_s is None


# Rates


def test_the_rate_is_that_of_ten_seconds_or_ten_steps_whichever_take_longer() -> None:
    rate = StepRate()
    assert rate.look(None, 0.0) is None
    fast = [rate.look(10 * second, float(second)) for second in range(1, 40)]
    assert fast[0] is None
    assert fast[-1] == pytest.approx(10.0)
    rate.begin()
    assert rate.look(0, 100.0) is None
    slow = [rate.look(number, 100.0 + 60.0 * number) for number in range(1, 30)]
    assert slow[-1] == pytest.approx(1 / 60)


def test_a_step_that_does_not_end_lowers_the_rate_and_old_speed_is_forgotten() -> None:
    rate = StepRate()
    for second in range(30):
        rate.look(10 * second, float(second))
    assert rate.look(290, 30.0) == pytest.approx(10.0)
    assert rate.look(290, 60.0) == pytest.approx(100 / 41, abs=0.3)
    for second in range(61, 90):
        rate.look(290 + second - 60, float(second))
    assert rate.look(319, 89.0) == pytest.approx(1.0)
    assert list(rate.rates)[-4:] == [0.2439, 1.0, 1.0, 1.0]


# A leader


class Books:
    """An account that grows."""

    late: Mapping[int, Any] = {1: Late(0.02, 0.1)}
    wait_share, waits_for = 0.25, 1
    ended_s: float | None = None

    def snapshot(self, now_s: float) -> Ledger:
        ranks = tuple(RankLedger(rank=rank, seconds={"step": now_s}) for rank in range(3))
        return Ledger(
            begun_s=0.0, until_s=now_s, rank_s=3 * now_s, seconds={"step": 3 * now_s}, ranks=ranks, is_steps_seen=True
        )

    def lately(self) -> Books:
        return self

    def end(self, now_s: float) -> None:
        self.ended_s = now_s


def lead(num_nodes: int = 3, *, books: Books | None = None) -> Leader:
    cards = {i: Card(host=f"gpu-b{i:04}", pid=1, node_index=i, num_workers=1, num_gpus=0) for i in range(num_nodes)}
    store = {"store_address": "127.0.0.1", "store_port": 29501}
    leader = Leader(
        Terms(job="4711", wanted_backend="gloo", num_nodes=num_nodes, min_nodes=2, capacity_s=30.0, **store),
        guard=Guard(GuardTable()),
        past=Past(history=History(restarts_left=1)),
        nodes={i: ConnectedNode(card=card, name=card.host, address="127.0.0.1") for i, card in cards.items()},
        plan=make_group(cards, wanted_backend="gloo", attempt=2, max_restarts=3, **store)[0],
        now_s=0.0,
    )
    if books is not None:
        leader._status.books = books  # type: ignore[assignment]
    return leader


def tell(leader: Leader, now_s: float, *ranks: RankBeat) -> list[Effect]:
    effects = []
    for rank in ranks:
        beat = NodeBeat(node_index=rank.rank, generation=0, ranks=(rank,))
        effects += leader.step(Heard(now_s=now_s, node=rank.rank, message=Beat(node=beat)))
    return effects + leader.step(Due(now_s=now_s))


def last(effects: list[Effect]) -> JobStatus:
    return [effect.status for effect in effects if isinstance(effect, WriteStatus)][-1]


def test_a_leader_tells_its_job_once_a_second_and_its_end_at_once() -> None:
    books = Books()
    leader = lead(books=books)
    effects: list[tuple[float, Effect]] = []
    for half in range(1, 140):
        now_s = half / 2
        step = 5 * half
        ranks = (busy(rank, step=step, total_steps=1000 if rank == 0 else None) for rank in range(3))
        effects += [(now_s, effect) for effect in tell(leader, now_s, *ranks)]
    told = [now_s for now_s, effect in effects if isinstance(effect, WriteStatus)]
    assert len(told) == 70
    assert all(after - before >= 1 for before, after in itertools.pairwise(told))
    status = last([effect for _, effect in effects])
    assert (status.job, status.phase, status.attempt, status.num_up) == ("4711", "running", 2, 3)
    assert (status.step, status.is_step_of_session, status.total_steps) == (695, True, 1000)
    assert status.steps_per_s == pytest.approx(10.0, rel=0.05)
    assert status.eta_s == pytest.approx(30.5, rel=0.05)
    assert (status.num_restarts, status.max_restarts) == (2, 3)
    assert (status.wait_share, status.waits_for) == (0.25, 1)
    assert status.rows[0].ranks == (1,)
    assert status.ledger is not None
    assert status.ledger.ranks == ()
    kept = [now_s for now_s, effect in effects if isinstance(effect, WriteLedger)]
    assert kept == [0.5, pytest.approx(61, abs=0.5)]

    for rank in range(3):
        end = WorkerEnd(rank=rank, node=f"gpu-b{rank:04}", exit_code=0, time_s=70.0)
        leader.step(Heard(now_s=70.0, node=rank, message=Ended(end=end, age_s=0)))
    leader.step(Due(now_s=70.0))
    final = []
    for node in range(3):
        final += leader.step(Heard(now_s=70.1, node=node, message=Stopped()))
    final += leader.step(Due(now_s=70.1))
    assert (last(final).phase, last(final).exit_code) == ("over", 0)
    assert sum(isinstance(effect, WriteLedger) for effect in final) == 1
    assert books.ended_s == 70.1
    assert leader.step(Due(now_s=75.0)) == []


def test_a_leader_of_many_ranks_looks_at_them_every_few_seconds_and_at_once_where_they_wait() -> None:
    """A status is made at the first word of a second, so it has what the other ranks told in the second before."""
    leader, seen = lead(1024), []
    for second in range(1, 8):
        ranks = (busy(rank, pace=pace(PaceState.STEP, steps=40 + second)) for rank in range(1024))
        seen.append(last(tell(leader, float(second), *ranks)).rows[0].step)
    assert seen == [41, 41, 42, 42, 44, 44, 46]
    places = []
    for second in range(8, 13):
        ranks = (waits(rank) if rank else busy(0, main_at=f"a.py:{second} in f") for rank in range(1024))
        places.append(last(tell(leader, float(second), *ranks)).rows[0].place)
    assert places[2:] == ["a.py:10 in f", "a.py:11 in f", "a.py:12 in f"]


def test_a_script_without_a_session_has_the_steps_of_its_optimizer_and_no_total() -> None:
    leader, ranks = lead(), (busy(0), busy(1, pace=pace(PaceState.STEP, steps=41)), busy(2, pace=None))
    tell(leader, 1.0, *ranks)
    status = last(tell(leader, 2.0, *ranks))
    assert (status.step, status.is_step_of_session, status.total_steps, status.eta_s) == (41, False, None, None)


def test_a_checkpoint_is_an_event_once_with_the_time_of_its_writing() -> None:
    leader = lead()
    effects = tell(leader, 1.0, busy(0, step=9, checkpoint=5))  # loaded: nobody has written it now
    for now_s in (2.0, 3.0, 4.0):
        effects += tell(leader, now_s, busy(0, step=19, checkpoint=15, write_s=3.25), busy(1, step=19, checkpoint=15))
    records = [effect for effect in effects if isinstance(effect, Record)]
    assert [(record.event, record.fields) for record in records] == [
        ("checkpoint", {"step": 15, "write_s": 3.25, "is_verified": True})
    ]
    status = last(effects)
    assert (status.checkpoint, status.checkpoint_s) == (15, 2.0)
    assert status.events == (EventSeen(time_s=2.0, event="checkpoint", text="step 15, written in 3.2 s"),)


def saves_of(
    *looks: tuple[PaceState, int, float], session: bool = False, stops_s: float | None = None
) -> list[dict[str, object]]:
    """Events `checkpoint` of looks a second apart: what rank 0 does, its steps, how long it has saved so far."""
    leader, effects = lead(), list[Effect]()
    for now_s, (state, steps, save_s) in enumerate(looks, start=1):
        totals = list(pace(state).totals_us)
        totals[PACE_STATES.index(PaceState.SAVE)] = round(save_s * 1e6)
        of_0 = msgspec.structs.replace(pace(state, steps=steps), totals_us=tuple(totals))
        effects += tell(leader, float(now_s), busy(0, pace=of_0, step=steps if session else None), busy(1), busy(2))
        if now_s == stops_s:
            end = WorkerEnd(rank=1, node="gpu-b0001", exit_code=1, time_s=stops_s)
            effects += leader.step(Heard(now_s=stops_s, node=1, message=Ended(end=end, age_s=0)))
    if stops_s is not None:
        assert leader.phase is Phase.STOPPING
    records = [effect for effect in effects if isinstance(effect, Record) and effect.event == "checkpoint"]
    return [dict(record.fields) for record in records]


STEP, SAVES = PaceState.STEP, PaceState.SAVE


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        ([(STEP, 5, 0.0), (STEP, 12, 0.03), (STEP, 20, 0.03), (STEP, 30, 0.04), (STEP, 40, 0.04)], []),  # too small
        # nor is a little in each step; beside that, a checkpoint is told
        ([(STEP, 10 * second, 0.01 * second) for second in range(30)], []),
        ([(STEP, 10 * second, 0.01 * second + (second > 9)) for second in range(30)], [(90, 1.01)]),
        # the files of one checkpoint are one event, and a save that takes seconds is told when it is over
        ([(STEP, 5, 0.0), (STEP, 12, 0.04), (STEP, 20, 0.08), (STEP, 30, 0.08), (STEP, 40, 0.08)], [(5, 0.08)]),
        ([(STEP, 5, 0.0), (SAVES, 9, 0.4), (SAVES, 9, 1.4), (STEP, 12, 2.0), (STEP, 20, 2.0)], [(9, 2.0)]),
        # what was saved before this leader's first look is not its event
        ([(STEP, 5, 7.0), (STEP, 12, 7.0), (STEP, 20, 7.0)], []),
        # one that saves in each step
        ([(STEP, 10 * second, 0.2 * second) for second in range(30)], []),
        # one that saves every three seconds is told every ten
        (
            [(STEP, 10 * second, 0.1 * (second // 3)) for second in range(30)],
            [(20, 0.1), (50, 0.3), (140, 0.4)],
        ),
    ],
)  # fmt: skip
def test_a_script_that_saves_noticeably_long_is_an_event_that_is_not_verified(
    looks: list[tuple[PaceState, int, float]], told: list[tuple[int, float]]
) -> None:
    found = saves_of(*looks)
    assert [(event["optimizer_steps"], event["save_s"]) for event in found] == told
    assert all((event["is_verified"], event["generation"]) == (False, 0) for event in found)
    assert saves_of(*looks, session=True) == []


def test_a_checkpoint_that_a_script_writes_while_it_is_stopped_is_one_event() -> None:
    looks = [(STEP, 5, 0.0), (STEP, 9, 0.0), (STEP, 9, 0.3), (STEP, 9, 0.8), (STEP, 9, 1.2), (STEP, 9, 1.2)]
    assert [event["save_s"] for event in saves_of(*looks, stops_s=2.0)] == [1.2]


def test_a_hang_is_an_event_once_for_the_same_ranks() -> None:
    leader = lead()
    effects: list[Effect] = []
    for second in range(1, 50):
        now_s = float(second)
        away = busy(1, main_at="evaluate.py:88 in run")
        effects += tell(leader, now_s, waits(0, for_s=now_s), away, waits(2, for_s=now_s))
    records = [effect for effect in effects if isinstance(effect, Record)]
    [hang] = [record.fields for record in records if record.event == "hang"]
    assert (hang["ranks"], hang["op"], hang["num_waiting"]) == ((1,), "all_reduce", 2)
    assert 30 <= hang["for_s"] <= 31
    status = last(effects)
    assert status.stuck is not None
    assert (status.stuck.ranks, status.stuck.place) == ((1,), "evaluate.py:88 in run")
    assert status.stuck.ends_in_s == pytest.approx(600 - 49, abs=2)
    assert "2 ranks wait in all_reduce for rank 1" in status.events[-1].text


def test_a_paused_job_says_what_it_waits_for_and_how_long() -> None:
    leader = lead()
    leader.phase, leader._capacity_until_s = leader.phase.PAUSED, 30.0
    leader._members.nodes = {0: leader._members.nodes[0]}
    known = leader._known(10.0)
    assert (known.missing, known.gives_up_s) == ("only 1 of at least 2 nodes", 30.0)


# Limits


def test_a_status_of_1024_ranks_that_all_differ_has_at_most_64_kb() -> None:
    nic = tuple(
        InterfaceSeen(
            name=f"ens{i}f1", sent_mbit_s=76012.345, received_mbit_s=76012.345, limit_mbit_s=100000.0, busy_share=0.7777
        )
        for i in range(4)
    )
    status = JobStatus(
        job="4711",
        written_s=1795894787.5,
        started_s=1795894781.0,
        phase="running",
        rates=(5.4321,) * 120,
        rows=tuple(
            RankRow(
                ranks=tuple(range(1000, 1064)), num_ranks=64, nodes=("gpu-b0000",) * 8, state="step", place="x" * 60
            )
            for _ in range(96)
        ),
        nodes=tuple(NodeRow(name=f"gpu-b{i:04}", interfaces=nic) for i in range(96)),
        events=tuple(EventSeen(time_s=1795894787.5, event="verdict", text="x" * 160) for _ in range(24)),
    )
    assert len(write_status(status)) > MAX_BYTES
    data = write_status(fit(status))
    assert MAX_BYTES / 2 < len(data) <= MAX_BYTES
    assert parse_job_status(data).rows[0] == status.rows[0]


def test_a_leader_of_1024_ranks_writes_valid_json_below_64_kb() -> None:
    leader = lead(1024)
    nic = InterfaceSeen(name="ens1f1", sent_mbit_s=760, received_mbit_s=760, limit_mbit_s=1000, busy_share=0.77)
    for now_s in (1.0, 2.0):
        for node in range(1024):
            rank = waits(node, for_s=now_s + 3) if node % 100 else busy(node, main_at=f"train.py:{node} in step")
            beat = NodeBeat(node_index=node, generation=0, ranks=(rank,), interfaces=(nic, nic))
            leader.step(Heard(now_s=now_s, node=node, message=Beat(node=beat)))
    status = last(leader.step(Due(now_s=3.0)))
    data = write_status(status)
    assert len(data) < 64 << 10
    assert parse_job_status(data) == status
    assert (status.num_ranks, len(status.nodes), status.rows[0].is_culprit) == (1024, 96, True)


def test_times_become_those_of_the_wall_clock() -> None:
    event = EventSeen(time_s=90.0, event="checkpoint", text="step 5")
    status = JobStatus(job="1", written_s=100.0, started_s=0.0, phase="running", checkpoint_s=90.0, events=(event,))
    seen = on_wall_clock(status, offset_s=1.7e9, started_s=1.6e9)
    assert (seen.written_s, seen.started_s, seen.checkpoint_s) == (1.7e9 + 100, 1.6e9, 1.7e9 + 90)
    assert seen.events == (msgspec.structs.replace(event, time_s=1.7e9 + 90),)


@pytest.mark.parametrize(
    ("event", "fields", "text"),
    [
        ("restarting", {"generation": 2, "members": ["a", "b"]}, "generation 2 on 2 nodes"),
        ("restarting", {"generation": 1, "members": ["a"], "checkpoint": 8}, "generation 1 on 1 node, from step 8"),
        ("checkpoint", {"step": 60, "write_s": 0.012}, "step 60, written in 0.012 s"),
        ("verdict", {"cause": "AR407 dead-rank", "message": "SIGKILL", "node": "a"}, "AR407 dead-rank: SIGKILL"),
        ("interrupted", {"signum": 15, "node": "a"}, "SIGTERM on a"),
        ("node_lost", {"node": "a", "reason": "it was at fault"}, "a: it was at fault"),
        ("straggler", {"rank": 3, "node": "a", "message": "calls late"}, "rank 3 on a calls late"),
        ("worker_ended", {"rank": 3, "node": "a", "exit_code": 1, "told": False}, "rank 3 on a, exit code 1"),
        ("lines_lost", {"rank": 3, "node": "a", "lines": 7, "why": "full"}, "7 lines of rank 3 on a"),
        ("took_over", {"leader": "b", "generation": 1, "after": "a"}, "b: a"),
    ],
)  # fmt: skip
def test_an_event_in_a_few_words(event: str, fields: dict[str, object], text: str) -> None:
    assert describe_event(event, fields) == text
