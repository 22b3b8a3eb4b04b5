"""What a watched job shows and leaves, without a process: rows of looks, the record, the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from allranks.model.beat import ProcessState
from allranks.model.finding import Confidence, Finding, Severity
from allranks.model.job_status import JobStatus
from allranks.model.node_look import EndSeen, NodeLook, ProcessLook, ProcessRole, StackSeen
from allranks.report.text import Style
from allranks.watch.heard_job import HeardJob, make_verdict
from allranks.watch.judge import Opinion, describe
from allranks.watch.standstill import WatchState

WAITS = StackSeen(at_s=1, operation="all_reduce", place="train.py:9 in step", is_collective=True)
READS = StackSeen(at_s=1, operation="sleep", place="data.py:9 in read", counters=(("idx", 3), ("step", 150)))
ENDED = EndSeen(at_s=2, code=0)


def rank(number: int | None, stack: StackSeen | None = WAITS, **seen: object) -> ProcessLook:
    pid = 100 if number is None else 100 + number
    return replace(ProcessLook(pid=pid, role=ProcessRole.WORKER, rank=number, start_ticks=1, stack=stack), **seen)


def look(*processes: ProcessLook, at_s: float = 1.0, node: str = "n1") -> NodeLook:
    return NodeLook(node=node, at_s=at_s, processes=processes)


def see(*looks: NodeLook, opinion: Opinion = Opinion()) -> JobStatus:  # noqa: B008
    heard = HeardJob("7", [])
    for one in looks:
        heard.hear(one, one.at_s)
    heard.opinion = opinion
    return heard.status(60.0)


def test_the_rank_that_the_others_wait_for_is_the_first_row() -> None:
    status = see(look(rank(0), rank(2, READS)), opinion=Opinion(culprits=(2,), exit_code=3))
    first, second = status.rows
    assert (first.ranks, first.state, first.place) == ((2,), "sleep", "data.py:9 in read")
    assert (first.step, first.is_culprit, first.nodes) == (150, True, ("n1",))
    assert (second.ranks, second.state, second.step) == ((0,), "all_reduce", None)


def test_states_and_ends_are_told_and_a_restarted_rank_once() -> None:
    old = rank(0, end=EndSeen(at_s=1, code=-9), pid=50)
    status = see(
        look(rank(4), node="n2"),
        look(rank(0), old, rank(1, state=ProcessState.STOPPED), rank(2, end=EndSeen(at_s=1, code=3)), at_s=13.0),
    )
    told = {row.ranks[0]: (row.state, row.place) for row in status.rows}
    assert told[0] == ("all_reduce", "train.py:9 in step")
    assert told[1] == ("stopped", "train.py:9 in step")
    assert told[2] == ("ended", "exit code 3")
    assert told[4] == ("silent", "")
    assert [(node.name, node.num_ranks, node.silent_s) for node in status.nodes] == [("n2", 1, 12.0), ("n1", 2, 0.0)]


def test_ranks_of_a_large_job_that_do_the_same_are_one_row_and_a_process_without_a_rank_has_one() -> None:
    status = see(look(*map(rank, range(64)), rank(64, READS)))
    assert [(row.num_ranks, row.state) for row in status.rows] == [(64, "all_reduce"), (1, "sleep")]
    [row] = see(look(rank(None, READS))).rows
    assert (row.ranks, row.place) == ((), "pid 100 data.py:9 in read")


def test_cores_the_time_in_a_place_and_the_age_of_the_job_are_told() -> None:
    looks = [
        look(rank(0, replace(WAITS, at_s=at_s), cpu_s=3.0 + 0.5 * at_s, start_ticks=100), at_s=at_s)
        for at_s in (7.0, 8.0, 9.0)
    ]
    status = see(*looks)
    assert (status.rows[0].cpu_cores, status.rows[0].for_s, status.age_s) == (0.5, 2.0, 8.0)
    assert see(*looks[:1]).rows[0].for_s == 0.0
    held = [look(rank(0, state=ProcessState.STOPPED), at_s=at_s) for at_s in (7.0, 8.0)]
    assert see(*held).rows[0].for_s == 1.0


@pytest.mark.parametrize(
    ("workers", "code"),
    [([rank(0, end=ENDED), rank(1, end=ENDED)], 0), ([rank(0, end=ENDED), rank(1, end=EndSeen(at_s=2))], 3), ([], 3)],
)
def test_success_is_said_only_if_each_exit_code_is_known(workers: list[ProcessLook], code: int) -> None:
    assert make_verdict("7", Opinion(), [worker.end for worker in workers]).exit_code == code


def test_a_state_is_left_as_a_warning_below_the_verdict() -> None:
    dead = Finding(cause="AR407 dead-rank", severity=Severity.FAIL, confidence=Confidence.CERTAIN, message="it died")
    states = (
        WatchState("rank 2 is elsewhere", ranks=(2,)),
        WatchState("in different calls", ranks=(0,), is_suspicion=True, cause="collective-mismatch"),
        WatchState("the job is suspended", cause="process-stopped"),
    )
    found = make_verdict("7", Opinion(verdicts=(dead,), states=states, exit_code=1), [])
    assert [(finding.cause_id, str(finding.severity)) for finding in found.findings] == [
        ("AR407", "fail"),
        ("AR408", "warn"),
        ("AR410", "warn"),
        ("AR010", "warn"),
    ]
    assert found.exit_code == 1


def test_the_last_looks_stay_and_a_second_watch_does_not_overwrite_the_first(tmp_path: Path) -> None:
    heard = HeardJob("h:29500", [])
    for at_s in range(100):
        heard.hear(look(rank(0), at_s=at_s), at_s)
        heard.hear(look(rank(1), at_s=at_s, node="n2"), at_s)
    paths = [heard.save(tmp_path / "runs") for _ in range(3)]
    assert [path.name for path in paths] == ["watch-h_29500", "watch-h_29500-2", "watch-h_29500-3"]
    looks = [json.loads(line) for line in (paths[1] / "looks.jsonl").read_text().splitlines()]
    assert [(last["node"], last["at_s"]) for last in looks] == [("n1", 99), ("n2", 99)]


@pytest.mark.parametrize(
    ("process", "code", "words"),
    [
        (rank(0), 0, "+ nothing is wrong: 1 rank runs; looked at for 0.0 s"),
        (rank(0, None, problem="cannot be read"), 3, "? not enough could be seen to tell whether something is wrong"),
        (rank(0, world_size=2), 3, "? not enough could be seen to tell whether something is wrong"),
        (rank(0, end=EndSeen(at_s=1)), 3, "? not enough could be seen to tell whether something is wrong"),
        (rank(0, end=ENDED), 0, "+ nothing is wrong: 1 rank ended"),
    ],
)
def test_nothing_wrong_is_not_said_of_what_cannot_be_seen(process: ProcessLook, code: int, words: str) -> None:
    heard = HeardJob("7", ["n1"])
    heard.hear(look(process), 10.0)
    assert heard.opinion.exit_code == code
    assert describe(heard.opinion, Style(is_unicode=False, has_colour=False, width=100))[0].startswith(words)


def test_a_node_that_never_answers_is_named() -> None:
    heard = HeardJob("7", ["n1", "n2"])
    began_s = heard._now_s
    for passed_s in (1.0, 11.0):
        heard.hear(look(rank(0), at_s=passed_s), began_s + passed_s)
    assert heard.unheard == ["n2"]
    assert heard.opinion.exit_code == 3
    assert describe(heard.opinion, Style(is_unicode=True, has_colour=False, width=100))[-1] == "  not seen: n2"
    assert heard.describe_progress(11.0) == "still waiting for n2 after 11 s; 1 of 2 nodes have answered"


def test_a_node_whose_clock_stood_still_is_heard() -> None:
    heard = HeardJob("7", ["n1"])
    began_s = heard._now_s
    for at_s in range(1, 60):  # its machine is paused for a minute after the first look
        passed_s = at_s + (60 if at_s > 1 else 0)
        heard.hear(look(rank(0), at_s=float(at_s)), began_s + passed_s)
        assert heard.opinion.exit_code == 0
        assert not any(node.silent_s for node in heard.status(passed_s).nodes)
    assert not any("n1" in line for line in heard.opinion.limits)


def test_a_job_is_looked_at_as_long_as_the_node_that_is_looked_at_least() -> None:
    heard = HeardJob("7", [])
    assert heard.looked_s == 0.0
    for at_s, node in ((10.0, "n1"), (50.0, "n2"), (16.0, "n1"), (52.5, "n2")):
        heard.hear(look(rank(0), at_s=at_s, node=node), now_s=at_s + (0.0 if node == "n2" else 40.0))
    assert heard.looked_s == 2.5


def test_a_slow_first_look_does_not_count_as_time_that_was_looked_at() -> None:
    heard = HeardJob("7", [])
    for at_s, took_s in ((10.0, 4.0), (14.25, 0.0), (14.5, 0.0)):
        heard.hear(look(rank(0), at_s=at_s), now_s=at_s + took_s)
    assert heard.looked_s == 0.5


def test_looks_that_come_seconds_apart_tell_how_long_a_rank_is_stopped() -> None:
    heard = HeardJob("7", [])
    for number in range(20):
        at_s = 8.0 * number
        heard.hear(look(rank(0), rank(1, state=ProcessState.STOPPED), at_s=at_s), now_s=at_s)
    assert [finding.cause for finding in heard.opinion.verdicts] == ["AR010 process-stopped"]
