"""Do the last lines of a job say what it did, where its time went, and to whom that is owed?"""

from __future__ import annotations

import msgspec

from allranks.model.job_status import JobStatus
from allranks.model.ledger import Category, Ledger, LostTime, RestartCost
from allranks.report.account import describe_account, describe_end, describe_goodput, describe_losses

LEDGER = Ledger(
    begun_s=1000.0,
    until_s=1000.0 + 8040,
    rank_s=100_000.0,
    seconds={"step": 80_000.0, "transfer": 11_000.0, "wait": 4_000.0, "save": 2_000.0, "start": 2_600.0, "data": 400.0},
    steps=10_000,
    is_steps_seen=True,
    losses=(
        LostTime(category=Category.WAIT, rank_s=4_000.0, ranks=(5, 2), nodes=("node03",)),
        LostTime(category=Category.START, rank_s=2_600.0),
        LostTime(category=Category.SAVE, rank_s=2_000.0, ranks=(0,), nodes=("node01",), is_estimated=True),
        LostTime(category=Category.DATA, rank_s=600.0, ranks=(7,)),
    ),
    num_checkpoints=12,
    save_s=35.2,
)
RESTART = RestartCost(
    generation=1, cause="AR407 dead-rank", node="node03", restart_s=35.0, redo_s=37.0, redo_steps=50, at_s=5000.0
)
STATUS = JobStatus(
    job="7",
    written_s=9040.0,
    started_s=1000.0,
    phase="over",
    step=10_000,
    steps_per_s=1.0,
    rates=(0.0, 5.3, 5.4, 5.5),
    checkpoint=10_000,
    ledger=LEDGER,
)


def account(**changes: object) -> list[str]:
    return describe_account(msgspec.structs.replace(STATUS, ledger=msgspec.structs.replace(LEDGER, **changes)))


def test_goodput_has_the_three_largest_losses_and_to_whom_they_are_owed():
    assert account() == [
        "goodput 91 % in 2 h 14 min; lost: 4.0 % waiting, most for rank 5 on node03; 2.6 % starting; about 2.0 % "
        "saving, most by rank 0 on node01",
        "12 checkpoints, the last one at step 10,000; saving held training up for 35 s",
    ]


def test_steps_that_no_checkpoint_has_are_told_at_the_end():
    late = msgspec.structs.replace(STATUS, checkpoint=9_970, is_step_of_session=True)
    assert describe_account(late)[1].startswith("12 checkpoints, the last one at step 9,970, 30 steps before the end;")
    none = msgspec.structs.replace(LEDGER, num_checkpoints=0)
    assert describe_account(msgspec.structs.replace(late, step=40, checkpoint=None, ledger=none))[1:] == [
        "the last 40 steps are in no checkpoint"
    ]


def test_a_start_that_waits_for_one_rank_names_it_and_how_much_that_is():
    late = LostTime(category=Category.START, rank_s=26_000.0, ranks=(2,), nodes=("node02",), waited_s=19_000.0)
    assert describe_losses(msgspec.structs.replace(LEDGER, losses=(late,))) == [
        "26 % starting, of which 19 % waiting for rank 2 on node02"
    ]


def test_a_restart_is_told_with_its_cost():
    assert account(restarts=(RESTART,), num_checkpoints=0)[1:] == [
        "1 restart cost 1 min 12 s (AR407 dead-rank on node03): 35 s until the first new step, 50 steps again in 37 s"
    ]
    untold = msgspec.structs.replace(RESTART, redo_s=None, redo_steps=None)
    assert account(restarts=(untold,))[1] == (
        "1 restart cost at least 35 s (AR407 dead-rank on node03): 35 s until the first new step; how many steps it "
        "lost is not known"
    )
    guessed = msgspec.structs.replace(RESTART, is_redo_guessed=True, restart_s=100.0)
    assert account(restarts=(RESTART, guessed))[1] == (
        "2 restarts cost about 3 min 29 s, most 2 min 17 s (AR407 dead-rank on node03)"
    )
    shown = msgspec.structs.replace(STATUS, ledger=msgspec.structs.replace(LEDGER, restarts=(RESTART,)), num_restarts=9)
    assert (
        describe_account(shown)[1] == "9 restarts cost at least 1 min 12 s, most 1 min 12 s (AR407 dead-rank on node03)"
    )
    none = msgspec.structs.replace(RESTART, redo_s=0.04, redo_steps=0)
    assert account(restarts=(none,))[1].endswith("(AR407 dead-rank on node03): 35 s until the first new step")
    more = RestartCost(generation=1, restart_s=20.0, redo_s=0.0)
    assert account(restarts=(more,))[1] == "1 restart cost 20 s (more nodes): 20 s until the first new step"


def test_a_host_that_runs_ahead_of_its_device_has_at_most_this_goodput():
    assert account(is_async=True)[0].startswith("goodput at most 91 % in ")


def test_small_losses_are_left_out():
    losses = (LostTime(category=Category.QUEUE, rank_s=499.0), LostTime(category=Category.UNKNOWN, rank_s=30_000.0))
    assert describe_losses(msgspec.structs.replace(LEDGER, losses=losses[:1])) == []
    assert describe_losses(msgspec.structs.replace(LEDGER, losses=losses[1:])) == ["30 % not known"]


def test_a_job_whose_steps_nobody_saw_has_no_account():
    assert account(is_steps_seen=False) == []
    assert describe_account(None) == []
    assert describe_account(msgspec.structs.replace(STATUS, ledger=None)) == []
    unseen = msgspec.structs.replace(LEDGER, is_steps_seen=False)
    assert describe_goodput(unseen) == "no optimizer step was seen, so goodput is not known"


def test_no_account_has_more_than_three_lines():
    assert len(account(restarts=(RESTART, RESTART, RESTART))) == 3


def test_the_last_line_says_what_how_long_how_far_and_where():
    told = {"num_ranks": 2, "took_s": 200.0, "num_restarts": 0, "output": "output in runs/9/attempt_0"}
    said = describe_end("train.py", None, exit_code=0, **told)
    assert said == "train.py succeeded: 2 ranks, 3 min 20 s; output in runs/9/attempt_0"
    said = describe_end("t", STATUS, exit_code=137, **told | {"num_restarts": 2, "num_ranks": 1})
    assert said == (
        "t failed (exit 137): 1 rank, 3 min 20 s, 2 restarts, step 10,000, 5.4 it/s; output in runs/9/attempt_0"
    )
    slow = msgspec.structs.replace(STATUS, rates=(), total_steps=20_000)
    said = describe_end("t", slow, exit_code=0, **told)
    assert said == "t succeeded: 2 ranks, 3 min 20 s, step 10,000/20,000, 1.0 it/s; output in runs/9/attempt_0"
