"""What a leader says and writes of the network, and what `allranks status` makes of that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks.guard.verdict import Guard
from allranks.launch.batch.follow import report_job
from allranks.launch.events import Due, Effect, Heard, Record, Say
from allranks.launch.lead.assignment import make_group
from allranks.launch.lead.course import Terms
from allranks.launch.lead.leader import Leader
from allranks.launch.lead.members import ConnectedNode
from allranks.model.beat import InterfaceSeen, NodeBeat, RankBeat
from allranks.model.card import Card
from allranks.model.cluster import GuardTable
from allranks.model.pace import Pace
from allranks.model.past import History, Past
from allranks.report.machine import to_json
from allranks.report.readback import parse_events
from allranks.report.rundir import RunDir, event_line
from allranks.report.runs import read_run
from allranks.wire.protocol import Beat, Ended, Stopped, WorkerEnd
from conftest import Allranks

NAMES = ("node01", "node02", "node03")
FULL = InterfaceSeen(
    name="ens1f1", sent_mbit_s=760, received_mbit_s=760, limit_mbit_s=1000, busy_share=0.77, busy_mbit_s=980
)
SAID = "63 % of the time {} spent waiting for the network (node01 ens1f1 at 98 % of 1 Gbit/s): allranks advise"


def lead() -> Leader:
    """Of a job that runs since 0 s."""
    cards = {
        index: Card(host=name, pid=800 + index, node_index=index, num_workers=1, num_gpus=0)
        for index, name in enumerate(NAMES)
    }
    store = {"store_address": "127.0.0.1", "store_port": 29501}
    return Leader(
        Terms(job="train", wanted_backend="gloo", num_nodes=3, min_nodes=3, capacity_s=30.0, **store),
        guard=Guard(GuardTable()),
        past=Past(history=History(restarts_left=0)),
        nodes={index: ConnectedNode(card=each, name=each.host, address="127.0.0.1") for index, each in cards.items()},
        plan=make_group(cards, wanted_backend="gloo", attempt=0, **store)[0],
        now_s=0.0,
    )


def pace(for_s: float, free_s: float = 0.0) -> Pace | None:
    """Of a rank that has trained for so long, with 0.4 s a step, of which it is blocked for 63 % after the first."""
    if for_s < 0:
        return None
    start_us, rest_us = min(1, round(1e6 * for_s)), max(0, round(1e6 * for_s) - 1)
    blocked_us = round(0.63 * max(rest_us - 1e6 * free_s, 0))
    totals = (start_us, rest_us - blocked_us, 0, 0, 0, 0, blocked_us)
    return Pace(state=1, state_us=0, steps=round(for_s / 0.4), totals_us=totals)


def live(leader: Leader, *, for_s: int, steps_from_s: float = 0.0, free_s: float = 0.0) -> list[tuple[float, Effect]]:
    """Beats of all nodes, twice a second, and the end."""
    effects: list[tuple[float, Effect]] = []
    for half in range(1, 2 * for_s):
        now_s = half / 2
        for node in range(3):
            told = RankBeat(rank=node, pace=pace(now_s - steps_from_s, free_s), segments=100 * half, retransmits=half)
            beat = NodeBeat(node_index=node, generation=0, ranks=(told,), interfaces=(FULL,))
            effects += [(now_s, each) for each in leader.step(Heard(now_s=now_s, node=node, message=Beat(node=beat)))]
        effects += [(now_s, each) for each in leader.step(Due(now_s=now_s))]
    for node, name in enumerate(NAMES):
        end = WorkerEnd(rank=node, node=name, exit_code=0, time_s=for_s)
        effects += [
            (for_s, each) for each in leader.step(Heard(now_s=for_s, node=node, message=Ended(end=end, age_s=0)))
        ]
    effects += [(for_s, each) for each in leader.step(Due(now_s=for_s))]
    for node in range(3):
        effects += [(for_s, each) for each in leader.step(Heard(now_s=for_s, node=node, message=Stopped()))]
    effects += [(for_s, each) for each in leader.step(Due(now_s=for_s))]
    assert leader.verdict is not None
    assert leader.verdict.exit_code == 0
    return effects


def test_a_slow_network_is_said_once_and_at_the_end_and_written_down_rarely() -> None:
    effects = live(lead(), for_s=650)
    said = [(at, each.text) for at, each in effects if isinstance(each, Say)]
    assert said == [(8.5, SAID.format("is")), (650, SAID.format("was"))]
    told = [(at, each.fields) for at, each in effects if isinstance(each, Record) and each.event == "network"]
    assert [at for at, _ in told] == [12.0, 312.0, 612.0]
    assert told[0][1]["wait_share"] == 0.63


def test_what_steps_wait_is_written_down_as_soon_as_it_is_known() -> None:
    effects = live(lead(), for_s=360, steps_from_s=40.0)
    told = [(at, each.fields.get("wait_share")) for at, each in effects if isinstance(each, Record)]
    assert [each for each in told if each[0] < 360] == [(12.0, None), (44.0, 0.63), (344.0, 0.63)]


def test_a_share_that_is_known_better_is_written_down_again() -> None:
    effects = live(lead(), for_s=360, free_s=16.0)
    told = [(at, each.fields.get("wait_share")) for at, each in effects if isinstance(each, Record)]
    known = [(12.0, 0.0), (20.0, 0.116), (28.0, 0.268), (44.0, 0.403), (76.0, 0.63)]
    assert [each for each in told if each[0] < 360] == known


def test_a_job_that_tells_of_neither_steps_nor_network_writes_nothing_of_it() -> None:
    leader = lead()
    for half in range(1, 60):
        for node in range(3):
            beat = NodeBeat(node_index=node, generation=0, ranks=(RankBeat(rank=node),))
            for effect in leader.step(Heard(now_s=half / 2, node=node, message=Beat(node=beat))):
                assert not isinstance(effect, Record)


def test_status_shows_the_newest_of_it_and_prints_it_as_json(allranks: Allranks, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "runs", job := "20261123-031500-977")
    run_dir.create()
    run_dir.create_attempt(None)
    run_dir.add_event("started", job=job, command=["train.py"], members=NAMES)
    for _, each in live(lead(), for_s=350):
        if isinstance(each, Record):
            run_dir.add_event(each.event, **each.fields)
    ended = allranks("status", "latest")
    assert (
        "network   63 % of the time is spent waiting for communication, and a step takes 398 ms (at step 780), "
        in ended.stdout
    )
    words = (
        "            node03: ens1f1 760 Mbit/s out, 760 Mbit/s in, 77 % of the time at 98 % of 1 Gbit/s; "
        "623 of 62300 segments sent again (1 %)"
    )
    assert words in ended.stdout.splitlines()
    (told,) = json.loads(to_json(report_job(read_run(run_dir.path), log_dir=tmp_path)))
    assert told["network"]["nodes"][0]["interfaces"][0]["busy_share"] == 0.77
    assert told["network"]["least_wait_share"] == 0.63


@pytest.mark.parametrize(
    "nonsense",
    [
        {"wait_share": 7.0},
        {"nodes": [{"node": "n" * 400}]},
        {"nodes": [{"node": "n", "interfaces": [{"name": "e", "sent_mbit_s": -1, "received_mbit_s": 0}]}]},
        {"nodes": [{"node": "n"}] * 17},
        {"iteration": -1},
        {"time_s": 1e300},
    ],
)
def test_nonsense_of_the_network_is_skipped_and_counted(nonsense: dict[str, object]) -> None:
    lines = event_line("network", wait_share=0.5) + event_line("network", **nonsense)
    found = parse_events(lines.encode())
    assert (found.num_damaged, found.num_unknown, found.lines) == (1, 0, ())
    assert found.network is not None
    assert found.network.wait_share == 0.5


def test_of_thousands_of_such_events_the_newest_counts_and_none_crowds_out_others() -> None:
    lines = "".join(event_line("network", wait_share=number / 4000) for number in range(4000))
    found = parse_events((lines + event_line("ended", exit_code=0)).encode())
    assert [each["event"] for each in found.lines] == ["ended"]
    assert found.network is not None
    assert found.network.wait_share == 3999 / 4000
