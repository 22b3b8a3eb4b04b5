"""One beat of a node: its workers, its connections, its tries; and what is kept at a verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from allranks.files.folder import Folder
from allranks.guard.node.heartbeat import WorkerWatch
from allranks.guard.verdict import Guard
from allranks.model.beat import GroupSeen, ProcessState, RankBeat
from allranks.model.cluster import GuardTable
from allranks.recorder.wait_graph import StandstillKind, find_stops
from allranks.why.dumps import find_dumps, is_dump, read_dumps
from allranks.wire.protocol import Plan, Try, TryTarget

from .scenes import FAST, call, members

STORE = {"node_index": 0, "attempt": 0, "store_address": "", "store_port": 0, "backend": "gloo", "backend_reason": ""}


class Told:
    """A worker that tells what it is given."""

    def __init__(self, beat: RankBeat) -> None:
        self.rank = beat.rank
        self._beat = beat

    def look(self) -> RankBeat:
        return self._beat


@pytest.fixture
def watch():
    watch = WorkerWatch(FAST, data_address="127.0.0.1", control_address="127.0.0.2")
    yield watch
    watch.close()


def rank_in(number: int, *calls, pid: int = 0, **more) -> RankBeat:
    group = GroupSeen(name="0", ranks=(0, 1), enqueued=calls[-1].seq if calls else 4, completed=4)
    return RankBeat(rank=number, pid=pid, groups=(group,), calls=calls, **more)


def test_a_beat_is_due_every_beat_s(watch):
    watch.begin(3, [Told(rank_in(4))], 100.0, node_index=2)
    beats = [watch.turn(100.0 + tick * 0.05) for tick in range(9)]
    assert [beat is not None for beat in beats] == [True, False, False, False, True, False, False, False, True]
    beat = beats[0]
    assert (beat.node_index, beat.generation, beat.ranks[0].rank) == (2, 3, 4)
    assert beat.addresses[0] == "127.0.0.1"
    assert all(port > 0 for port in beat.try_ports)
    assert beat.try_ports[0] != beat.try_ports[1]
    assert abs(beat.time_ns / 1e9 - time.time()) < 10


@pytest.mark.parametrize(
    ("table", "num_nodes", "beat_s"),
    [
        ({}, 1, 0.5),
        ({}, 1024, 0.5),
        ({}, 2048, 1.0),
        ({}, 4096, 2.0),
        ({}, 16384, 2.5),  # a fourth of gone_s: a node that is silent for so long has missed four
        ({"gone_s": 20.0}, 16384, 5.0),
        ({"gone_s": 20.0}, 8192, 4.0),
        ({"beat_s": 5.0}, 16384, 5.0),
        ({"beat_s": 5.0}, 1, 5.0),
    ],
)
def test_the_more_nodes_a_job_has_the_more_rarely_each_tells_of_itself(table, num_nodes, beat_s):
    settings = GuardTable(**table)
    guard, watch = Guard(settings), WorkerWatch(settings, data_address="127.0.0.1", control_address="127.0.0.1")
    try:
        watch.begin(0, [], 100.0, node_index=0, num_nodes=num_nodes)
        dues = [tick / 20 for tick in range(201) if watch.turn(100.0 + tick / 20) is not None]
        guard.begin(Plan(members=members(num_nodes), **STORE), 100.0)
        assert (dues[1] - dues[0], guard.beat_s) == (beat_s, beat_s)
    finally:
        watch.close()
    guard.begin(Plan(members=members(2), generation=1, **STORE), 100.0)
    assert guard.beat_s == settings.beat_s


def test_two_watches_try_each_other(watch):
    other = WorkerWatch(FAST, data_address="127.0.0.3", control_address="127.0.0.3")
    other.begin(0, [], time.monotonic(), node_index=1)
    ports = other.beat(time.monotonic()).try_ports
    assert ports[0] == ports[1]
    targets = (
        TryTarget(node_index=1, network="data", address="127.0.0.3", port=ports[0]),
        TryTarget(node_index=1, network="control", address="127.0.0.3", port=ports[1]),
    )
    watch.begin(0, [], time.monotonic(), node_index=0)
    watch.order(Try(targets=targets, within_s=60.0), time.monotonic())
    end_s = time.monotonic() + 60.0
    while len(seen := watch.beat(time.monotonic()).tries) < 2 and time.monotonic() < end_s:
        watch.turn(time.monotonic())
        other.turn(time.monotonic())
        time.sleep(0.02)
    other.close()
    assert {(each.network, each.connects, each.carries) for each in seen} == {
        ("data", True, True),
        ("control", True, True),
    }


def test_an_address_of_another_machine_opens_no_door():
    watch = WorkerWatch(FAST, data_address="192.0.2.1", control_address="192.0.2.1")
    watch.begin(0, [], 100.0, node_index=0)
    assert watch.beat(100.0).try_ports == (0, 0)
    watch.close()


def test_a_network_on_which_nobody_can_try_this_machine_has_no_port():
    watch = WorkerWatch(FAST, data_address="127.0.0.1", control_address="192.0.2.1")
    watch.begin(0, [], 100.0, node_index=0)
    data_port, control_port = watch.beat(100.0).try_ports
    assert (data_port > 0, control_port) == (True, 0)
    watch.close()


def test_a_beat_says_when_its_clock_was_read_however_long_it_takes():
    """On a busy machine it takes tens of ms. Clocks are compared by it: 5 ms more look like a clock that was set."""

    def see_slowly():
        time.sleep(0.05)
        return ()

    watch = WorkerWatch(FAST, data_address="127.0.0.1", control_address="127.0.0.1", see_full=see_slowly)
    watch.begin(0, [Told(rank_in(0))], 100.0, node_index=0)
    beat = watch.turn(100.0)
    watch.close()
    assert abs(beat.time_ns / 1e9 - watch.looked_s - (time.time() - time.monotonic())) < 0.02


def test_what_is_kept_can_be_read_by_why(watch, tmp_path):
    code = "import time\ndef stuck():\n    print(flush=True); time.sleep(60)\nstuck()\n"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            waiting = rank_in(0, call(5, created_ns=5), pid=child.pid)
            late = rank_in(1, call(4, created_ns=4, is_done=True))
            watch.begin(0, [Told(waiting), Told(late)], 100.0, node_index=0)
            watch.turn(100.0)
            written = set(watch.keep(Folder.at(tmp_path), within_s=10.0))
        finally:
            child.kill()
    assert written == {"recorder_rank_0.json", "recorder_rank_1.json", "rank_0.stack.txt"}
    assert "stuck (<string>:3)" in (tmp_path / "rank_0.stack.txt").read_text()
    assert is_dump(tmp_path / "recorder_rank_0.json")
    assert json.loads((tmp_path / "recorder_rank_0.json").read_text())["entries"][0]["frames"][0]["line"] == 12
    problems = []
    (stop,) = find_stops(read_dumps(find_dumps([str(tmp_path)]), problems))
    assert problems == []
    assert (stop.kind, stop.ranks) == (StandstillKind.MISSING, (1,))


def test_a_directory_that_is_gone_keeps_nothing(watch, tmp_path):
    gone = Folder.at(tmp_path)
    tmp_path.rmdir()
    watch.begin(0, [Told(rank_in(0, call()))], 100.0, node_index=0)
    watch.turn(100.0)
    assert watch.keep(gone, within_s=1.0) == []


def test_the_dead_are_not_asked_for_their_stack(watch, tmp_path):
    watch.begin(0, [Told(rank_in(0, pid=1, state=ProcessState.GONE))], 100.0, node_index=0)
    watch.turn(100.0)
    assert watch.keep(Folder.at(tmp_path), within_s=1.0) == []


def test_the_largest_use_of_shared_memory_is_told_for_a_while(watch, monkeypatch: pytest.MonkeyPatch):
    free = 100
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_blocks=100))
    watch.begin(0, [], 100.0, node_index=0)
    told = []
    for now_s, free in ((100.0, 60), (100.1, 3), (100.2, 60), (105.0, 60), (110.2, 60)):  # noqa: B007
        watch.turn(now_s)
        told.append(round(watch.beat(now_s).shm_used, 2))
    assert told == [0.4, 0.97, 0.97, 0.97, 0.4]
