"""What becomes of the job after a fault: every rule of launch.lead.recovery as a case."""

from __future__ import annotations

from typing import Any

import pytest

from allranks.guard.guard_verdict import GuardVerdict
from allranks.launch.lead.recovery import Decision, decide
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Finding, Severity
from allranks.model.past import Crash, History

FINDING = Finding(
    cause="AR407 dead-rank", severity=Severity.FAIL, confidence=Confidence.CERTAIN, node="n2", message="killed"
)


def judged(**more: Any) -> GuardVerdict:
    return GuardVerdict(**{"findings": (FINDING,), "exit_code": 137, "ranks": (2,), "nodes": (2,), **more})


def move(
    fault: GuardVerdict,
    *,
    history: History,
    culprits: tuple[int, ...] = (2,),
    at: int | None = 40,
    can_resign: bool = False,
    **more: Any,
) -> Decision:
    steps = {} if at is None else {2: at}
    return decide(
        fault, history=history, culprits=culprits, leader_name="n0", can_resign=can_resign,
        **{"steps": steps, "leader": 0} | more,
    )  # fmt: skip


def test_a_crash_is_known_by_its_finding_and_by_the_rank_that_came_least_far():
    history = History(restarts_left=2)
    move(judged(ranks=(2, 3)), history=history, steps={1: 30, 2: 41, 3: 40})
    move(judged(findings=()), history=history, steps={})
    assert history.crashes == [
        Crash(cause="AR407 dead-rank", ranks=(2, 3), step=40, what="killed"),
        Crash(cause="", ranks=(2,), step=None, what=""),
    ]


def test_a_dead_rank_is_started_again_on_the_same_nodes():
    history = History(restarts_left=2)
    decision = move(judged(), history=history)
    assert (decision.restarts, decision.without, history.restarts_left) == (True, frozenset(), 1)


def test_a_job_ends_to_be_requeued_where_the_machine_of_srun_is_lost():
    history = History(restarts_left=2)
    decision = move(judged(cures=True, exit_code=75, lost=(2,)), history=history, lost_srun="n2")
    assert (decision.restarts, decision.exit_code, history.restarts_left) == (False, Exit.NODE_FAULT, 2)
    assert decision.note.startswith("n2 is lost, and with it srun")


def test_where_all_other_ranks_have_finished_nothing_is_started_again():
    decision = move(judged(cures=True, is_over=True, exit_code=75), history=History(restarts_left=2))
    assert (decision.restarts, decision.exit_code, decision.note) == (False, 75, "")


def test_without_restarts_the_job_ends_with_the_faults_own_code():
    decision = move(judged(), history=History(restarts_left=0))
    assert (decision.restarts, decision.exit_code) == (False, 137)


def test_a_node_fault_goes_on_without_the_node():
    decision = move(judged(cures=True, exit_code=75), history=History(restarts_left=1))
    assert (decision.restarts, decision.without) == (True, frozenset({2}))


def test_the_leaders_node_cannot_be_left_out_where_the_others_are_no_majority():
    decision = move(judged(cures=True, exit_code=75, nodes=(0,)), history=History(restarts_left=3), culprits=(0,))
    assert (decision.restarts, decision.exit_code) == (False, Exit.NODE_FAULT)
    assert decision.note == (
        "n0 runs the leader, and the other nodes are no majority without it: the job must start again on other nodes"
    )


def test_where_they_are_the_job_goes_on_without_the_leaders_node():
    fault, history = judged(cures=True, exit_code=75, nodes=(0,)), History(restarts_left=3)
    decision = move(fault, history=history, culprits=(0,), can_resign=True)
    assert (decision.restarts, decision.without, decision.note) == (True, frozenset({0}), "")


def test_an_error_of_the_users_code_is_not_tried_again():
    history = History(restarts_left=3)
    decision = move(judged(is_retryable=False, exit_code=1), history=history)
    assert (decision.restarts, decision.exit_code, history.restarts_left) == (False, 1, 3)
    assert decision.note == (
        "not restarted: a restart does not cure an error of the script; --restart-on-error restarts anyway"
    )


@pytest.mark.parametrize("retries_errors", [False, True])
def test_what_is_no_error_of_the_script_is_named_and_no_flag_restarts_it(retries_errors):
    history = History(restarts_left=3, retries_errors=retries_errors)
    decision = move(judged(is_retryable=False, exit_code=78), history=history)
    assert (decision.restarts, decision.note) == (False, "not restarted: a restart does not cure AR407 dead-rank")


def test_where_no_restart_was_asked_for_nothing_is_said_of_one():
    assert move(judged(is_retryable=False, exit_code=1), history=History(restarts_left=0)).note == ""


def test_an_error_is_tried_again_as_often_as_there_are_restarts_where_that_is_asked_for():
    history = History(restarts_left=4, retries_errors=True)
    moves = [move(judged(is_retryable=False, exit_code=1), history=history) for _ in range(5)]
    assert [each.restarts for each in moves] == [True] * 4 + [False]
    assert (moves[-1].exit_code, moves[-1].again) == (1, None)
    assert moves[-1].note == "not restarted: all restarts are used (--max-restarts)"


ERROR = judged(ranks=(3,), exit_code=1, is_retryable=False)
MISSING = judged(ranks=(3,), exit_code=78, is_retryable=False)


@pytest.mark.parametrize(
    ("others", "retries_errors", "restarts"),
    [
        ((), False, True),
        ((judged(ranks=(3,)),), False, True),
        ((ERROR,), False, False),
        ((ERROR,), True, True),
        ((ERROR, MISSING), True, False),
    ],
    ids=["a crash", "two crashes", "and an error", "and an error, retried", "and what cannot start"],
)
def test_where_several_broke_a_restart_is_tried_only_if_each_may_be(others, retries_errors, restarts):
    history = History(restarts_left=2, retries_errors=retries_errors)
    decision = move(judged(others=others), history=history)
    assert (decision.restarts, decision.exit_code) == (restarts, 0 if restarts else 137)
    assert history.restarts_left == (1 if restarts else 2)
    assert history.faults == dict.fromkeys([2, *(rank for each in others for rank in each.ranks)], 1) | (
        {3: 2} if len(others) == 2 else {}
    )


def test_a_crash_that_comes_back_beside_another_one_ends_the_job():
    history, other = History(restarts_left=9), judged(ranks=(3,))
    assert move(judged(ranks=(3,)), history=history, steps={3: 40}).restarts
    decision = move(judged(others=(other,)), history=history, steps={2: 41, 3: 40})
    assert decision.again == Crash(cause="AR407 dead-rank", ranks=(3,), step=40, what="killed")


def test_a_program_that_cannot_be_started_is_not_tried_again_whatever_is_asked_for():
    history = History(restarts_left=4, retries_errors=True)
    assert move(judged(is_retryable=False, exit_code=78), history=history).restarts is False


@pytest.mark.parametrize(
    ("second", "expected"),
    [(40, (False, True)), (41, (True, False)), (None, (True, False))],
    ids=["same-step", "other-step", "no-step-known"],
)
def test_the_same_crash_at_the_same_step_ends_the_job(second: int | None, expected: tuple[bool, bool]):
    history = History(restarts_left=9)
    move(judged(), history=history)
    decision = move(judged(), history=history, at=second)
    assert (decision.restarts, decision.again is not None) == expected


def test_the_same_fault_of_another_node_is_no_crash_loop():
    history = History(restarts_left=9)
    for culprit in (2, 3):  # the ranks of a node that is left out are another one's then
        decision = move(judged(cures=True, nodes=(culprit,)), history=history, culprits=(culprit,))
        assert (decision.restarts, decision.again is not None, decision.without) == (True, False, {culprit})


def test_the_same_rank_the_third_time_without_progress_ends_the_job():
    history = History(restarts_left=9)
    moves = [move(judged(), history=history, at=step) for step in (10, 20, 30)]
    assert [each.restarts for each in moves] == [True, True, False]
    assert moves[-1].exit_code == Exit.SETUP
    assert moves[-1].note == "rank 2 failed 3 times without progress; a restart does not cure it"


def test_workers_that_ran_for_long_have_got_on():
    history = History(restarts_left=9)
    decisions = [move(judged(), history=history, at=None, ran_s=3600.0) for _ in range(4)]
    assert {each.restarts for each in decisions} == {True}


def test_a_checkpoint_between_two_faults_is_progress():
    history = History(restarts_left=9)
    steps = (10, 20, 30, 40)
    decisions = [move(judged(), history=history, at=step, checkpoint=step - 5) for step in steps]
    assert {each.restarts for each in decisions} == {True}


def differs(rank: int = 2, what: str = "model/w at step 40", **more: Any) -> GuardVerdict:
    return judged(cures=True, may_stay=True, comes_back_as=what, exit_code=75, ranks=(rank,), nodes=(rank,), **more)


def test_the_node_of_a_flipped_bit_is_left_out_where_enough_remain():
    assert move(differs(), history=History(restarts_left=3)) == Decision(restarts=True, without=frozenset({2}))


@pytest.mark.parametrize("why", [{"can_spare": False}, {"leader": 2}])
def test_else_the_job_goes_on_with_it_once(why: dict[str, Any]):
    history = History(restarts_left=3)
    assert move(differs(), history=history, **why) == Decision(restarts=True)
    second = move(differs(what="model/w at step 90"), history=history, **why)
    assert (second.restarts, second.exit_code) == (False, 75)
    assert second.note == "not restarted: rank 2 had this fault before, and its node cannot be left out"


def test_the_same_tensor_at_the_same_step_ends_the_job_whichever_rank_it_was():
    history = History(restarts_left=3)
    assert move(differs(2), history=history).restarts
    again = move(differs(1), history=history, culprits=(1,))
    assert (again.restarts, again.exit_code) == (False, 78)
    assert again.again == Crash(cause="AR407 dead-rank", ranks=(1,), step=40, what="model/w")
