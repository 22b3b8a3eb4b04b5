"""Is a job ended in which no rank makes progress, and only such a one?"""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.files.folder import Folder
from allranks.guard.idle import find_idle, judge_idle, say_idle
from allranks.guard.node.activity import Activity, Output, ProcessActivity, is_active
from allranks.guard.speech import Speech
from allranks.guard.verdict import Guard
from allranks.guard.waits import find_waiting, judge_hang, say_slow
from allranks.host.process import Usage
from allranks.model.beat import GroupSeen, RankBeat
from allranks.wire.protocol import Beat

from .scenes import FAST, NOW_S, away, beat, call, end, scene, waiting
from .test_verdict import plan

TRACEBACK = """Traceback (most recent call last):
  File "/home/ada/train.py", line 9, in load
    rows["label"]
KeyError: 'label'
"""
HANG_S = FAST.hang_s
FORMED = (GroupSeen(name="0", ranks=(0, 1), enqueued=4, completed=4),)


def rank(number: int, idle_s: float, **more: object) -> RankBeat:
    at = more.pop("main_at", "train.py:30 in cleanup")
    return RankBeat(rank=number, pid=100 + number, silent_s=0.0, idle_s=idle_s, main_at=at, **more)


def still(*ranks: RankBeat, **more):
    made = scene([beat(i, each) for i, each in enumerate(ranks)], **more)
    made.moved_s = NOW_S - max(each.idle_s for each in ranks)
    return made


ENDED = {
    "both sleep": (
        [rank(0, 130, groups=FORMED), rank(1, 140, groups=FORMED)],
        (0, 1),
        "no rank has made progress for 130 s: no collective, step, output or processor time; train.py:30 in cleanup",
    ),
    "one printed a traceback": (
        [rank(0, 130, groups=FORMED), rank(1, 140, groups=FORMED, printed=TRACEBACK)],
        (1,),
        "it printed KeyError: 'label' (train.py:9 in load) and did not end; no rank has made progress for 130 s: "
        "no collective, step, output or processor time",
    ),
    "a traceback, and no group": (
        [rank(0, 130, printed=TRACEBACK), rank(1, 140, printed=TRACEBACK)],
        (0, 1),
        "they printed KeyError: 'label' (train.py:9 in load) and did not end; no rank has made progress for 130 s: "
        "no collective, step, output or processor time",
    ),
    "the group is gone": (
        [rank(0, 130, phase="training"), rank(1, 140, phase="training")],
        (0, 1),
        "no rank has made progress for 130 s: no collective, step, output or processor time; train.py:30 in cleanup",
    ),
}
GOES_ON = {
    "a rank computes": ([rank(0, 130, groups=FORMED), rank(1, 0, groups=FORMED)], None),
    "not long enough": ([rank(0, 130, groups=FORMED), rank(1, HANG_S - 2, groups=FORMED)], None),
    "a server": (
        [rank(0, 130), rank(1, 130)],
        "no rank has made progress for 130 s: train.py:30 in cleanup; the job goes on: it has formed no process group",
    ),
    "it has not reached its group": (
        [rank(0, 130, phase="init"), rank(1, 130)],
        "no rank has made progress for 130 s: train.py:30 in cleanup; the job goes on: it has formed no process group",
    ),
    "all ask for input": (
        [rank(0, 130, reads_terminal=True), rank(1, 130, reads_terminal=True)],
        "no rank has made progress for 130 s: train.py:30 in cleanup; the job goes on: ranks 0-1 wait for input from "
        "the terminal",
    ),
    "somebody may be typing": (
        [rank(0, 130, groups=FORMED), rank(1, 130, groups=FORMED, reads_terminal=True, printed=TRACEBACK)],
        "no rank has made progress for 130 s: train.py:30 in cleanup; the job goes on: rank 1 waits for input from the "
        "terminal",
    ),
}


@pytest.mark.parametrize("case", ENDED)
def test_where_no_rank_makes_progress_the_job_is_ended(case: str):
    ranks, named, message = ENDED[case]
    judged = judge_idle(still(*ranks), NOW_S)
    finding = judged.findings[0]
    assert (finding.cause, finding.ranks, finding.message, judged.exit_code) == (
        "AR408 stuck-rank",
        named,
        message,
        124,
    )
    assert finding.evidence[0].seen == (
        TRACEBACK
        if "printed" in message
        else "rank 0, pid 100: running, 0 s of processor time at train.py:30 in cleanup"
    )


@pytest.mark.parametrize("case", GOES_ON)
def test_a_job_that_may_be_healthy_is_at_most_named(case: str):
    ranks, line = GOES_ON[case]
    made = still(*ranks)
    assert judge_idle(made, NOW_S) is None
    idle = find_idle(made, NOW_S, for_s=HANG_S)
    assert (idle and say_idle(idle)) == line


def test_a_rank_that_is_not_heard_may_make_progress():
    made = still(rank(0, 130, groups=FORMED), rank(1, 140, groups=FORMED))
    made.ranks[1].told_s = NOW_S - 5
    assert judge_idle(made, NOW_S) is None
    assert judge_idle(still(rank(0, 130, groups=FORMED), num=2), NOW_S) is None  # it has told nothing at all


def test_those_that_have_left_are_not_waited_for():
    made = still(rank(0, 130, groups=FORMED), rank(1, 10, groups=FORMED), left=[1])
    made.moved_s = NOW_S - 130
    assert judge_idle(made, NOW_S).ranks == (0,)
    gone = still(rank(0, 130, groups=FORMED), rank(1, 130, groups=FORMED), left=[1], ends={0: end(0)})
    assert judge_idle(gone, NOW_S) is None


def test_the_guard_ends_it_at_the_hang_timeout_and_names_it_before():
    guard = Guard(FAST)
    guard.begin(plan(2), 0.0)
    said, ended_s = [], None
    for tick in range(0, 2 * int(HANG_S)):
        for number in range(2):
            told = beat(number, rank(number, float(tick), groups=FORMED))
            guard.hear(Beat(node=told), float(tick))
        said += guard.lines(float(tick))
        if guard.judge(float(tick)) is not None:
            ended_s = tick
            break
    assert HANG_S <= ended_s <= HANG_S + 2
    assert said[0] == "slow: no rank has made progress for 30 s: train.py:30 in cleanup"
    assert len(said) == 3  # 30 s, 60 s, 120 s


def test_a_server_is_named_from_the_hang_timeout_on_and_ever_more_rarely():
    made = still(rank(0, 0))
    speech, said = Speech(made), []
    for tick in range(0, 6 * int(HANG_S)):
        made.hear(beat(0, rank(0, float(tick))), NOW_S + tick)
        said += [tick for _ in speech.say(NOW_S + tick, [])]
    assert said == [120, 240, 480]


# Somebody at a debugger, and the traceback of a rank that the others wait for


def test_a_rank_at_a_terminal_is_named_and_never_ended():
    ranks = [away(0, num=2, reads_terminal=True, idle_s=500.0), waiting(1, call(), num=2, for_s=500.0)]
    made = scene([beat(i, each) for i, each in enumerate(ranks)])
    for view in made.ranks.values():
        view.moved_s = NOW_S - 500
    line = "rank 0 has waited for input from the terminal for 500 s: evaluate.py:88 in run; 1 rank waits"
    assert say_slow(made, find_waiting(made, NOW_S), NOW_S) == line
    guard = Guard(FAST)
    guard.begin(plan(2), 0.0)
    for tick in range(0, 3 * int(HANG_S)):
        for number, each in enumerate(ranks):
            guard.hear(Beat(node=beat(number, each)), float(tick))
        assert guard.judge(float(tick)) is None


def test_the_traceback_of_a_stuck_rank_comes_first():
    ranks = [away(0, num=2, printed=TRACEBACK), waiting(1, call(), num=2, for_s=500.0)]
    made = scene([beat(i, each) for i, each in enumerate(ranks)])
    finding = judge_hang(made, find_waiting(made, NOW_S), NOW_S).findings[0]
    assert finding.evidence[0].seen == TRACEBACK


# What is progress


def look(size: int = 0, pid: int = 1, **used: float) -> ProcessActivity:
    return ProcessActivity(pid, Usage(**used), (size, 0))


@pytest.mark.parametrize(
    ("now", "is_progress"),
    [
        (look(), False),
        (look(cpu_s=0.02), False),  # its beat
        (look(cpu_s=0.2), True),
        (look(written_bytes=60_000), False),  # threads that wake each other
        (look(written_bytes=100_000), True),  # a download of 10 kB a second
        (look(read_bytes=1_000_000), False),  # of /proc, for metrics
        (look(read_bytes=3_000_000), True),  # a file server with 0.3 MB a second
        (look(size=1), True),  # a line of output
        (look(pid=2), True),
    ],
)
def test_processor_time_output_and_downloads_are_progress(now: ProcessActivity, is_progress: bool):
    assert is_active(look(), now, 10.0) is is_progress


def test_an_agent_that_was_suspended_counts_nothing_as_idle(tmp_path: Path):
    activity = Activity(hang_s=60, root=tmp_path)
    for now_s in (100.0, 101.0, 102.0, 1000.0, 1001.0):
        activity.look(1, (), now_s)
    assert activity.idle_s == 8.0  # of the pause, as much as a busy machine may cause
    activity.look(1, ("a step",), 1002.0)
    assert activity.idle_s == 0.0


def test_a_traceback_is_told_when_nothing_has_come_for_long(tmp_path: Path):
    err = tmp_path / "rank_0.err"
    err.write_text("of an earlier start: " + TRACEBACK)
    output = Output(Folder.at(tmp_path), err.name, err.stat().st_size)
    activity, told = Activity(hang_s=20, outputs=[output], root=tmp_path), []
    with err.open("a") as file:
        file.write(f"warning\n{TRACEBACK}")
    for tick in range(100, 120):
        activity.look(1, (), float(tick))
        told.append(activity.printed)
    assert told == [""] * 16 + [TRACEBACK.rstrip("\n")] * 4
