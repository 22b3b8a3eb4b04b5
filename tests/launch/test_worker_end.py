"""Whether a worker ended by itself or because its agent told it to: a status and what was left in, an end out."""

from __future__ import annotations

import pytest

from allranks.launch.worker_end import ExitCall, Left, explain_end, will_end_with

LOST = "RuntimeError: [pair.cc:547] Connection closed by peer"
TOLD_S = 100.0
OURS = {15: TOLD_S}
RAISED = {"message": "ValueError: x", "before": ()}
TABLE = {
    # name: (status, what was left, signals of ours, handles them) -> (exit code, whether it is ours)
    "nobody told it": (-15, Left(), {}, False, (-15, False)),
    "a signal that we sent": (-15, Left(), OURS, False, (-15, True)),
    "the second signal that we sent": (-9, Left(), OURS | {9: 103.0}, False, (-9, True)),
    "a signal that we did not send": (-9, Left(), OURS, False, (-9, False)),
    "a crash of one that our signal would have killed": (-11, Left(), OURS, False, (-11, False)),
    "a crash of one that handles our signal": (-11, Left(), OURS, True, (-11, True)),
    "an abort while it is torn down": (-6, Left(), OURS, False, (-6, True)),
    "an exit after our signal": (1, Left(), OURS, False, (1, True)),
    "an exception after our signal": (1, Left(error=RAISED | {"time_s": 100.1}), OURS, False, (1, True)),
    "an exception before our signal": (1, Left(error=RAISED | {"time_s": 99.9}), OURS, False, (1, False)),
    "and our signal came while it left": (-15, Left(error=RAISED | {"time_s": 99.9}), OURS, False, (1, False)),
    "and torch aborted it while it left": (-6, Left(error=RAISED | {"time_s": 99.9}), OURS, False, (-6, False)),
    "sys.exit before our signal": (3, Left(exit=ExitCall(exit_code=3, time_s=99.9)), OURS, False, (3, False)),
    "sys.exit after our signal": (3, Left(exit=ExitCall(exit_code=3, time_s=100.1)), OURS, False, (3, True)),
    "our signal came during sys.exit": (-15, Left(exit=ExitCall(exit_code=3, time_s=99.9)), OURS, False, (3, False)),
    "a sys.exit caught long before": (-15, Left(exit=ExitCall(exit_code=3, time_s=9.0)), OURS, False, (-15, True)),
    "an abort while sys.exit left": (-6, Left(exit=ExitCall(exit_code=3, time_s=101.0)), {}, False, (3, False)),
    "its last lines could not be written": (120, Left(lost_lines=3), {}, False, (0, False)),
    "its last lines could not be written, and it left with 3": (
        120, Left(lost_lines=3, exit=ExitCall(exit_code=3, time_s=101.0)), {}, False, (3, False)),
    "its last lines could not be written, after an exception": (
        120, Left(lost_lines=3, error=RAISED | {"time_s": 100.1}), {}, False, (120, False)),
    "an exit code of 120 of its own": (120, Left(), {}, False, (120, False)),
    "killed while sys.exit left": (-9, Left(exit=ExitCall(exit_code=3, time_s=101.0)), {}, False, (-9, False)),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_an_end_is_ours_only_if_it_came_of_our_signal_and_of_nothing_before(case):
    status, left, told_s, handles_end, expected = TABLE[case]
    found = explain_end(status, left, told_s=told_s, handles_end=handles_end, now_s=101.5)
    assert (found["exit_code"], found["ended_by_us"]) == expected


def test_what_was_raised_before_is_told_the_oldest_first():
    left = Left(exit=ExitCall(exit_code=1, time_s=99.0, before=("KeyError: 3",)), failed_call=LOST)
    assert explain_end(1, left, told_s={}, handles_end=False, now_s=99.2)["before"] == (LOST, "KeyError: 3")
    assert explain_end(2, left, told_s={}, handles_end=False, now_s=99.2)["before"] == (LOST,)


@pytest.mark.parametrize(
    ("left", "exit_code"),
    [
        (Left(), None),
        (Left(failed_call=LOST), None),
        (Left(error=RAISED | {"time_s": 50.0}), 1),
        (Left(exit=ExitCall(exit_code=3, time_s=99.0)), 3),
        (Left(exit=ExitCall(exit_code=3, time_s=90.0)), None),
    ],
)
def test_a_worker_that_still_exists_may_have_failed(left: Left, exit_code: int | None):
    assert will_end_with(left, now_s=100.0) == exit_code
