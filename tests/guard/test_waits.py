"""Who keeps the others waiting, and what is said of it?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from allranks.guard.waits import (
    find_circle,
    find_waiting,
    judge_blocked,
    judge_circle,
    judge_hang,
    judge_left,
    longest_wait_s,
    say_slow,
)
from allranks.model.beat import CallSeen, GroupSeen, ProcessState, RankBeat

from .scenes import NOW_S, away, beat, call, end, scene, waiting

NUM = 4


def picture(odd: RankBeat | None, *, for_s: float = 41.0, left=()):
    """Rank 2 is elsewhere, the others wait in collective 5."""
    ranks = [odd if i == 2 else waiting(i, call(), num=NUM, for_s=for_s) for i in range(NUM)]
    made = scene([beat(i, *([rank] if rank else [])) for i, rank in enumerate(ranks)], left=left)
    for view in made.ranks.values():
        view.moved_s = NOW_S - for_s
    return made


SLOW = {
    "user code": (
        away(2, num=NUM),
        "slow: rank 2 has been in user code for 41 s: evaluate.py:88 in run; 3 ranks wait",
        "AR408 stuck-rank",
    ),
    "a place that is not known": (
        away(2, num=NUM, at=""),
        "slow: rank 2 has been in user code for 41 s; 3 ranks wait",
        "AR408 stuck-rank",
    ),
    "the GIL": (
        away(2, num=NUM, silent_s=40.6, state=ProcessState.RUNNING),
        "slow: rank 2 has run no other thread for 41 s (one thread holds the GIL): evaluate.py:88 in run; 3 ranks wait",
        "AR408 stuck-rank",
    ),
    "the kernel": (
        away(2, num=NUM, state=ProcessState.BLOCKED, state_for_s=40.0),
        "slow: rank 2 waits in the kernel for 40 s (state D: a disk, a file server): evaluate.py:88 in run; "
        "3 ranks wait",
        "AR606 filesystem-hang",
    ),
    "a file": (
        away(2, num=NUM, at="torch/serialization.py:944 in save"),
        "slow: rank 2 has been in user code for 41 s: torch/serialization.py:944 in save; 3 ranks wait",
        "AR606 filesystem-hang",
    ),
}


@pytest.mark.parametrize("case", SLOW)
def test_the_rank_that_has_not_come_is_named_with_its_place(case):
    odd, line, cause = SLOW[case]
    made = picture(odd)
    found = find_waiting(made, NOW_S)
    assert (found.sinks, found.waiting, round(found.waited_s)) == ((2,), (0, 1, 3), 41)
    assert say_slow(made, found, NOW_S) == line
    judged = judge_hang(made, found, NOW_S)
    finding = judged.findings[0]
    assert (finding.cause, finding.ranks, finding.node, judged.exit_code) == (cause, (2,), "node03", 124)
    assert finding.victims == (0, 1, 3)
    assert "waited" in finding.message


def test_nobody_waits_in_a_job_that_computes():
    made = scene([beat(i, away(i, num=3)) for i in range(3)])
    assert find_waiting(made, NOW_S) is None
    assert longest_wait_s(made, NOW_S) == 0.0


def grouped(rank: int, **groups: tuple[tuple[int, ...], int, int, float]) -> RankBeat:
    seen = tuple(
        GroupSeen(name=name, ranks=ranks, enqueued=enqueued, completed=completed, waiting_s=waits_s)
        for name, (ranks, enqueued, completed, waits_s) in groups.items()
    )
    return RankBeat(rank=rank, silent_s=0.0, groups=seen)


def test_the_walk_goes_through_groups_to_the_one_that_waits_for_nobody():
    # Rank 0 waits for 1 in tp, which waits for 3 in dp, which waits for nobody.
    made = scene(
        [
            beat(0, grouped(0, tp0=((0, 1), 6, 5, 31.0), dp0=((0, 2), 2, 2, 0.0))),
            beat(1, grouped(1, tp0=((0, 1), 5, 5, 0.0), dp1=((1, 3), 3, 2, 32.0))),
            beat(2, grouped(2, tp1=((2, 3), 6, 5, 30.5), dp0=((0, 2), 2, 2, 0.0))),
            beat(3, grouped(3, tp1=((2, 3), 5, 5, 0.0), dp1=((1, 3), 2, 2, 0.0))),
        ]
    )
    found = find_waiting(made, NOW_S)
    assert (found.sinks, found.waiting) == ((3,), (0, 1, 2))


def test_a_circle_through_two_groups_is_undecided():
    made = scene(
        [
            beat(0, grouped(0, a=((0, 1), 6, 5, 200.0), b=((0, 1), 2, 2, 0.0))),
            beat(1, grouped(1, a=((0, 1), 5, 5, 0.0), b=((0, 1), 3, 2, 200.0))),
        ]
    )
    found = find_waiting(made, NOW_S)
    assert found.sinks == ()
    assert say_slow(made, found, NOW_S).startswith("slow: ranks 0-1 wait for each other for 200 s")
    judged = judge_hang(made, found, NOW_S)
    assert (judged.findings[0].cause, judged.findings[0].confidence) == ("AR490 collective-timeout", "undecided")


def in_a_circle(*, blocks: tuple[int, ...] = (0, 1, 2), moved_ago_s: float = 3.0, **odd: float):
    """Three ranks in two groups of all, rank 1 in the other one; `odd`: what its beat tells otherwise."""
    made = []
    for rank in range(3):
        own, other = ("b", "a") if rank == 1 else ("a", "b")
        told = grouped(rank, **{own: ((0, 1, 2), 6, 5, 3.0), other: ((0, 1, 2), 5, 5, 0.0)})
        seen = call(6, group=own, place=f"train.py:{7 + rank} in step", blocks=rank in blocks)
        made.append(beat(rank, replace(told, calls=(seen,), **(odd if rank == 1 else {}))))
    picture = scene(made)
    for view in picture.ranks.values():
        view.moved_s = NOW_S - moved_ago_s
    return picture


def test_ranks_that_wait_for_each_other_are_judged_at_once_and_who_differs_is_named():
    made = in_a_circle()
    judged = judge_circle(made, find_circle(made, NOW_S))
    finding = judged.findings[0]
    assert (finding.cause, finding.ranks, finding.node) == ("AR410 collective-mismatch", (1,), "node02")
    assert (finding.confidence, finding.victims, judged.is_retryable) == ("certain", (0, 2), False)
    assert finding.message == (
        "rank 1 called the groups in another order than ranks 0,2: ranks 0,2 waited in collective 6 of group a at "
        "train.py:7 in step for rank 1, rank 1 waited in collective 6 of group b at train.py:8 in step for ranks 0,2; "
        "none of these calls can end"
    )
    assert [seen.seen for seen in finding.evidence] == [
        "rank 1: all_reduce [8] Float, number 6 of group b at train.py:8 in step",
        "rank 0: all_reduce [8] Float, number 6 of group a at train.py:7 in step",
    ]


NOT_YET = {
    "a thread is in no call: it may still come": {"blocks": (0, 2)},
    "something has moved just now": {"moved_ago_s": 0.5},
    "the word of one is from before": {"silent_s": 2.5},
    "one has no beat thread: nobody knows how old its word is": {"silent_s": None},
}


@pytest.mark.parametrize("why", NOT_YET)
def test_a_circle_is_not_judged_where(why):
    assert find_circle(in_a_circle(**NOT_YET[why]), NOW_S) is None


def test_a_circle_is_not_judged_while_ranks_leave():
    made = in_a_circle()
    made.may_leave = True
    assert find_circle(made, NOW_S) is None


def test_all_there_names_nobody():
    made = scene([beat(i, waiting(i, call(), num=3, for_s=200.0)) for i in range(3)])
    found = find_waiting(made, NOW_S)
    assert found.sinks == ()
    judged = judge_hang(made, found, NOW_S)
    assert "all ranks entered collective 5 of group 0" in judged.findings[0].message
    assert (judged.ranks, judged.nodes) == ((), ())


def test_a_receive_waits_for_its_sender():
    receive = CallSeen(group="0", seq=1, op="recv", place="pipe.py:4 in f", peer=0)
    group = GroupSeen(name="0", ranks=(0, 1, 2), enqueued=4, completed=4, waiting_s=35.0)
    made = scene(
        [
            beat(0, away(0, num=3)),
            beat(1, RankBeat(rank=1, silent_s=0.0, groups=(group,), calls=(receive,))),
            beat(2, waiting(2, call(), num=3, for_s=33.0)),
        ]
    )
    found = find_waiting(made, NOW_S)
    assert found.sinks == (0,)
    assert set(found.waiting) == {1, 2}


def test_a_group_that_names_no_ranks_is_that_of_all():
    told = [waiting(i, call(), num=NUM, for_s=41.0) for i in range(NUM - 1)]
    told = [replace(rank, groups=tuple(replace(group, ranks=()) for group in rank.groups)) for rank in told]
    made = scene([beat(i, *told[i : i + 1]) for i in range(NUM)])
    found = find_waiting(made, NOW_S, names_unknown=True)
    assert (found.sinks, found.waiting) == ((3,), (0, 1, 2))


def test_old_words_of_a_rank_that_has_gone_on_name_nobody():
    # Rank 2 said "in user code, at 4" some time ago; the others have finished 6 since, so it was there.
    ranks = [waiting(i, call(7), num=NUM, for_s=31.0) for i in range(NUM)]
    ranks[2] = away(2, num=NUM, silent_s=50.0)
    made = scene([beat(i, rank) for i, rank in enumerate(ranks)])
    found = find_waiting(made, NOW_S)
    assert found is None or found.sinks != (2,)


def test_a_rank_that_fell_silent_when_the_others_began_to_wait_keeps_them_waiting():
    # It last told at 4, a beat before the end: 5 and 6 went by in that beat, and then it took the GIL.
    ranks = [waiting(i, call(7), num=NUM, for_s=31.0) for i in range(NUM)]
    ranks[2] = away(2, num=NUM, silent_s=31.3, state=ProcessState.RUNNING)
    made = scene([beat(i, rank) for i, rank in enumerate(ranks)])
    for view in made.ranks.values():
        view.moved_s = NOW_S - 31.0
    found = find_waiting(made, NOW_S)
    assert (found.sinks, found.waiting) == ((2,), (0, 1, 3))
    finding = judge_hang(made, found, NOW_S).findings[0]
    assert finding.cause == "AR408 stuck-rank"
    assert finding.fix.endswith("; only slow: a longer --hang-timeout")


@pytest.mark.parametrize(
    ("waited_s", "left_ago_s", "is_named"),
    [(5.0, 5.0, True), (1.0, 5.0, False), (5.0, 1.0, False)],
    ids=["for long", "not for long", "and has not told since that it waits"],
)
def test_a_rank_that_left_is_named_by_those_who_wait_for_it(waited_s: float, left_ago_s: float, is_named: bool):
    made = picture(away(2, num=NUM), for_s=waited_s, left=(2,))
    made.left[2] = NOW_S - left_ago_s
    judged = judge_left(made, find_waiting(made, NOW_S))
    expected = ("AR407 dead-rank", (2,), False)
    assert (judged and (judged.findings[0].cause, judged.ranks, judged.is_retryable)) == (
        expected if is_named else None
    )


def test_a_rank_whose_script_is_through_waits_for_nobody():
    # Its last word, that it is in collective 5, is from before the end of it; its interpreter takes long to go.
    last = waiting(1, call(), num=NUM, for_s=5.0, phase="leaving")
    made = scene([beat(i, last if i == 1 else away(i, num=NUM)) for i in range(NUM)], left=(0, 2, 3))
    assert longest_wait_s(made, NOW_S) == 0
    assert find_waiting(made, NOW_S) is None


def test_a_rank_whose_script_is_through_keeps_others_waiting():
    made = picture(away(2, num=NUM, phase="leaving"), for_s=41.0)
    assert find_waiting(made, NOW_S).sinks == (2,)


def test_what_the_kernel_holds_for_hang_s_is_a_file_system():
    held = away(2, num=NUM, state=ProcessState.BLOCKED, state_for_s=121.0)
    made = scene([beat(i, held if i == 2 else away(i, num=NUM)) for i in range(NUM)])
    judged = judge_blocked(made)
    assert (judged.findings[0].cause, judged.nodes, judged.cures) == ("AR606 filesystem-hang", (2,), True)
    assert judge_blocked(picture(away(2, num=NUM, state=ProcessState.BLOCKED, state_for_s=60.0))) is None


KINDS = st.sampled_from(["waits", "away", "leaving", "stopped", "ends", "leaves", "told to end"])


@given(st.lists(st.tuples(st.integers(0, 3), KINDS, st.floats(0.1, 90.0)), max_size=30))
def test_the_longest_wait_is_that_of_the_ranks_that_run_whatever_they_told_before(told):
    made = scene([beat(rank, away(rank, num=4)) for rank in range(4)])
    for at_s, (rank, kind, for_s) in enumerate(told, start=int(NOW_S)):
        match kind:
            case "waits":
                made.hear(beat(rank, waiting(rank, call(), num=4, for_s=for_s)), at_s)
            case "away":
                made.hear(beat(rank, away(rank, num=4)), at_s)
            case "leaving":
                made.hear(beat(rank, waiting(rank, call(), num=4, for_s=for_s, phase="leaving")), at_s)
            case "stopped":
                stopped = {"state": ProcessState.STOPPED, "state_for_s": for_s}
                made.hear(beat(rank, waiting(rank, call(), num=4, for_s=for_s, **stopped)), at_s)
            case _:
                made.end(end(rank, 0 if kind == "leaves" else 1, ended_by_us=kind == "told to end"), at_s)
    now_s = NOW_S + len(told)
    running = list(made.running())
    assert longest_wait_s(made, now_s) == pytest.approx(max((each.waits_s(now_s) for each in running), default=0.0))
    stopped = [each.beat for each in running if each.beat.state is ProcessState.STOPPED]
    assert made.held(ProcessState.STOPPED, for_s=0.0) == sorted(stopped, key=lambda each: each.rank)
