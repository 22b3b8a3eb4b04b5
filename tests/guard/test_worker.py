"""Do a cell and /proc together become the right beat?"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from allranks.guard.inside.cell import Cell
from allranks.guard.inside.pace_words import BEGAN, LEFT, STATE, STEPS
from allranks.guard.node.worker import WatchedWorker
from allranks.model.beat import CallSeen, GpuSeen, LoadSeen, NodeBeat, ProcessState, RankBeat
from allranks.model.pace import Pace
from allranks.wire.connection import encode_frame
from allranks.wire.protocol import Beat

SECOND_NS = 10**9


@pytest.fixture
def cell() -> Iterator[Cell]:
    made = Cell.create()
    made.claim()
    yield made
    made.close()


def proc(root: Path, pid: int, letter: str, *, parent: int = 1, switches: int = 1, ticks: int = 10) -> None:
    own = root / f"proc/{pid}"
    own.mkdir(parents=True, exist_ok=True)
    fields = [letter, str(parent), *["0"] * 9, str(ticks), "0", *["0"] * 30]
    (own / "stat").write_text(f"{pid} (python) {' '.join(fields)}\n")
    (own / "status").write_text(f"voluntary_ctxt_switches:\t{switches}\n")


def watched(cell: Cell, root: Path, pid: int = 70) -> WatchedWorker:
    return WatchedWorker(rank=3, pid=pid, cell=cell, root=root)


def tell(cell: Cell, **what: object) -> None:
    told = {"at": "train.py:7 in step", "groups": [], **what}
    assert cell.tell(json.dumps(told).encode())


def call(cell: Cell, **what: object) -> int:
    return cell.enter_call(json.dumps({"group": "0", "place": "train.py:9 in step", **what}).encode())


def test_ages_are_by_the_clock_and_not_by_when_they_were_told(cell: Cell, tmp_path: Path):
    proc(tmp_path, 70, "S")
    tell(cell, groups=[["0", [0, 1], 8, 7, time.monotonic_ns() - 5 * SECOND_NS]])
    cell.step(12)
    cell.saved(10)
    cell.phase("training")
    beat = watched(cell, tmp_path).look()
    assert (beat.rank, beat.pid, beat.state, beat.step, beat.checkpoint) == (3, 70, ProcessState.SLEEPING, 12, 10)
    assert (beat.main_at, beat.phase) == ("train.py:7 in step", "training")
    (group,) = beat.groups
    assert (group.ranks, group.enqueued, group.completed) == ((0, 1), 8, 7)
    assert 5 <= group.waiting_s < 8


def test_still_states_last_only_while_nothing_moves(cell: Cell, tmp_path: Path):
    view = watched(cell, tmp_path)
    proc(tmp_path, 70, "D", switches=1)
    view.look()
    time.sleep(0.1)
    assert view.look().state_for_s >= 0.1
    proc(tmp_path, 70, "D", switches=2)  # it got its bytes, and waits for the next ones
    assert view.look().state_for_s < 0.1


def test_the_process_that_claimed_the_cell_is_looked_at_where_it_is_below_the_worker(cell: Cell, tmp_path: Path):
    own = cell.read().pid
    proc(tmp_path, 70, "S")
    assert watched(cell, tmp_path).look().pid == 70
    proc(tmp_path, own, "R", parent=70)
    beat = watched(cell, tmp_path).look()
    assert (beat.pid, beat.state) == (own, ProcessState.RUNNING)


def test_a_python_call_that_no_recorder_has_is_added_and_counts_as_called(cell: Cell, tmp_path: Path):
    tell(cell, groups=[["0", [0, 1], 4, 4, 0]])
    call(cell, seq=5, op="all_reduce", sizes=[[2, 3]], dtypes=["Float"])
    beat = watched(cell, tmp_path).look()
    assert beat.groups[0].enqueued == 5
    assert beat.groups[0].waiting_s > 0
    (seen,) = beat.calls
    assert (seen.group, seen.seq, seen.op, seen.sizes, seen.dtypes, seen.is_done, seen.place) == (
        "0", 5, "all_reduce", ((2, 3),), ("Float",), False, "train.py:9 in step",
    )  # fmt: skip


def test_a_call_that_returned_is_over_where_no_recorder_counts(cell: Cell, tmp_path: Path):
    """As with Gloo of torch before 2.8; where a recorder counts, an asynchronous call may still run."""
    tell(cell, groups=[["0", [0, 1], -1, -1, 0]])
    cell.leave_call(call(cell, seq=5, op="all_reduce", sizes=[[2, 3]], dtypes=["Float"]))
    assert watched(cell, tmp_path).look().calls[0].is_done
    tell(cell, groups=[["0", [0, 1], 5, 4, 0]])
    assert not watched(cell, tmp_path).look().calls[0].is_done


def test_a_call_blocks_as_long_as_the_main_thread_is_in_it(cell: Cell, tmp_path: Path):
    view = watched(cell, tmp_path)
    recorded = {"group": "0", "seq": 5, "op": "all_reduce", "created_ns": 1}
    tell(cell, groups=[["0", [0, 1], 5, 4, 0]], calls=[recorded])
    call(cell, seq=5, op="all_reduce", blocks=False)  # an asynchronous one, or another thread's
    assert [(seen.blocks, seen.is_done) for seen in view.look().calls] == [(False, False)]
    number = call(cell, seq=5, op="all_reduce", blocks=True)
    assert [(seen.blocks, seen.is_done) for seen in view.look().calls] == [(True, False)]
    cell.leave_call(number)
    assert [(seen.blocks, seen.is_done) for seen in view.look().calls] == [(False, False)]


def test_a_receive_that_waits_is_no_collective_of_the_group(cell: Cell, tmp_path: Path):
    tell(cell, groups=[["0", [0, 1], 4, 4, 0]])
    call(cell, seq=9, op="recv", sizes=[[1]], dtypes=["Float"], peer=1)
    beat = watched(cell, tmp_path).look()
    assert beat.groups[0].enqueued == 4
    assert beat.groups[0].waiting_s > 0
    assert (beat.calls[0].op, beat.calls[0].peer, beat.calls[0].is_done) == ("recv", 1, False)


@pytest.mark.parametrize(("open_seqs", "completed"), [((), 8), ((8,), 7), ((7, 8), 6)])
def test_a_count_that_lags_behind_its_own_entries_is_brought_up(cell: Cell, tmp_path: Path, open_seqs, completed):
    calls = [
        {"group": "0", "seq": seq, "op": "all_reduce", "is_done": seq not in open_seqs, "created_ns": seq}
        for seq in (6, 7, 8)
    ]
    tell(cell, groups=[["0", [0, 1], 8, 6, time.monotonic_ns() - 5 * SECOND_NS]], calls=calls)
    (group,) = watched(cell, tmp_path).look().groups
    assert (group.enqueued, group.completed, group.waiting_s > 0) == (8, completed, bool(open_seqs))


def test_last_words_go_before_what_was_told_earlier(cell: Cell, tmp_path: Path):
    call = {"group": "0", "seq": 1, "op": "broadcast", "sizes": [[1]], "dtypes": ["Long"], "created_ns": 100}
    tell(cell, calls=[{**call, "is_done": False}])
    words = {"calls": [{**call, "is_done": True}, {**call, "seq": 2, "created_ns": 200}]}
    cell.last_words(json.dumps(words).encode())
    beat = watched(cell, tmp_path).look()
    assert beat.state is ProcessState.GONE
    assert [(each.seq, each.is_done) for each in beat.calls] == [(1, True), (2, False)]
    assert beat.calls[0] == CallSeen(
        group="0", seq=1, op="broadcast", sizes=((1,),), dtypes=("Long",), is_done=True, created_ns=100
    )


def test_lags_are_handed_on_once(cell: Cell, tmp_path: Path):
    view = watched(cell, tmp_path)
    tell(cell, lags=[["0", 4, 111]])
    assert view.look().lags == (("0", 4, 111),)
    tell(cell, lags=[["0", 4, 111]])
    assert view.look().lags == ()
    tell(cell, lags=[["0", 8, 222]])
    assert view.look().lags == (("0", 8, 222),)


def test_what_cannot_be_read_is_as_if_it_were_not_there(cell: Cell, tmp_path: Path):
    cell.tell(b"{no json")
    cell.last_words(b"\xff")
    beat = watched(cell, tmp_path).look()
    assert (beat.groups, beat.calls, beat.main_at) == ((), (), "")
    assert beat.silent_s is not None


def test_what_makes_no_sense_costs_itself_alone(cell: Cell, tmp_path: Path):
    sound = {"group": "0", "seq": 1, "op": "broadcast"}
    calls = [sound, {**sound, "seq": "x"}, {**sound, "place": "x" * 301}, {**sound, "dtypes": ["Long"] * 65}, 7]
    tell(
        cell,
        at="evil\x1b[2J.py:1 in f",
        calls=calls,
        groups=[["0", [0, 1], 8, 7, 0], ["1", None], ["x" * 301, [], 8, 7, 0]],
    )
    cell.last_words(json.dumps({"calls": [{**sound, "seq": 2}, {**sound, "seq": None}]}).encode())
    cell.phase("\x1b[2J")
    beat = watched(cell, tmp_path).look()
    assert [each.seq for each in beat.calls] == [1, 2]
    assert [group.name for group in beat.groups] == ["0"]
    assert (beat.main_at, beat.phase) == (r"evil\x1b[2J.py:1 in f", r"\x1b[2J")


def test_what_a_worker_has_booked_goes_on_until_it_ends(cell: Cell, tmp_path: Path):
    proc(tmp_path, 70, "S")
    assert watched(cell, tmp_path).look().pace is None
    view, began_ns = watched(cell, tmp_path), time.monotonic_ns()
    for word, value in {STEPS: 3, BEGAN: began_ns, STATE: 1 + 3}.items():  # `data`
        cell.pace[word] = value
    first = view.look().pace
    time.sleep(0.02)
    second = view.look().pace
    assert first is not None
    assert second is not None
    assert (second.steps, second.totals_us[3]) == (3, second.state_us)
    assert second.total_us - first.total_us >= 20_000
    assert not second.has_left
    cell.pace[LEFT] = time.monotonic_ns()
    left = view.look().pace
    assert left is not None
    assert left.has_left
    cell.pace[LEFT] = 0
    (tmp_path / "proc/70/stat").unlink()
    ended = view.look().pace
    time.sleep(0.02)
    assert view.look().pace == ended


WEEK_US, MINUTE_US = 7 * 86400 * 10**6, 60 * 10**6
LOADED = LoadSeen(2**17).with_gpu(GpuSeen(97, 8 * 160_695, 8 * 183_359))


@pytest.mark.parametrize(
    "beat",
    [
        # in its first minute, of which all is `start`; and where each state has had hours, the last one in a row
        RankBeat(rank=0, begun_ago_s=59.9, pace=Pace(0, MINUTE_US, 0, (MINUTE_US, *(0,) * 6)), load=LOADED),
        RankBeat(rank=0, begun_ago_s=59.9, pace=Pace(6, MINUTE_US, 9**6, (MINUTE_US,) * 7, 500), load=LOADED),
        RankBeat(rank=0, pace=Pace(1, 99 * MINUTE_US, 10**7, (WEEK_US // 7,) * 7, 500, has_left=True), load=LOADED),
    ],
    ids=["start", "first minute", "last beat of a week"],
)
def test_what_the_ledger_and_top_add_to_a_beat_is_at_most_100_bytes_a_rank(beat: RankBeat):
    plain = msgspec.structs.replace(beat, begun_ago_s=None, pace=None, load=LoadSeen())
    sizes = [
        len(encode_frame(Beat(node=NodeBeat(node_index=0, generation=0, ranks=(rank,))))) for rank in (plain, beat)
    ]
    assert sizes[1] - sizes[0] <= 100


def test_a_flood_of_calls_is_as_long_as_the_cell(cell: Cell, tmp_path: Path):
    calls = [{"group": "0", "seq": seq, "op": "x"} for seq in range(9000)]
    assert not cell.tell(json.dumps({"calls": calls}).encode())
    assert watched(cell, tmp_path).look().calls == ()


@pytest.mark.parametrize("number", [2**64, -(2**64), 10**30])
def test_numbers_that_no_message_can_carry_are_dropped(cell: Cell, tmp_path: Path, number: int):
    proc(tmp_path, 70, "S")
    odd = {"group": "0", "seq": number, "op": "all_reduce", "created_ns": 1}
    sound = odd | {"seq": 5}
    tell(cell, groups=[["0", [0, 1], 5, 5, 0], ["1", [number], 1, 1, 0]], calls=[odd, sound], lags=[["0", number, 1]])
    beat = watched(cell, tmp_path).look()
    assert ([group.name for group in beat.groups], [each.seq for each in beat.calls], beat.lags) == (["0"], [5], ())
    encode_frame(Beat(node=NodeBeat(node_index=0, generation=0, ranks=(beat,))))
