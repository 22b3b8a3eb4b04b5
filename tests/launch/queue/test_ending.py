"""What does a signal mean for a job? A table."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from allranks.host.slurm import JobState
from allranks.host.slurm_job import OwnJob
from allranks.launch.queue.ending import Ending, Told, decide, why_no_requeue

JOB = OwnJob("12", 0, 6, is_heterogeneous=False)
SAVE_AND_REQUEUE, SAVE_AND_LEAVE, STOP = Ending.SAVE_AND_REQUEUE, Ending.SAVE_AND_LEAVE, Ending.STOP


@pytest.mark.parametrize(
    ("signum", "given", "ending", "save_s", "line"),
    [
        (signal.SIGUSR1, {"left_s": 118.0}, SAVE_AND_REQUEUE, 114.0,
         "SIGUSR1, 118 s to the time limit: saving a checkpoint, then job 12 goes back into the queue and resumes "
         "from it"),
        (signal.SIGUSR1, {}, SAVE_AND_REQUEUE, None,
         "SIGUSR1: saving a checkpoint, then job 12 goes back into the queue and resumes from it"),
        (signal.SIGUSR1, {"no_requeue": "it has no batch script"}, SAVE_AND_LEAVE, None,
         "SIGUSR1: saving a checkpoint, then job 12 ends: it has no batch script"),
        (signal.SIGUSR1, {"left_s": 118.0, "can_save": False}, SAVE_AND_LEAVE, None,
         "SIGUSR1, 118 s to the time limit: passed to the ranks that handle it; allranks itself has nothing to save"),
        (signal.SIGUSR1, {"job": None}, SAVE_AND_LEAVE, None, "SIGUSR1: saving a checkpoint, then the job ends"),
        (signal.SIGTERM, {}, SAVE_AND_LEAVE, 26.0,
         "SIGTERM from SLURM: saving a checkpoint; SIGKILL follows in 30 s"),
        (signal.SIGTERM, {"kill_wait_s": 5.0}, SAVE_AND_LEAVE, 1.0,
         "SIGTERM from SLURM: saving a checkpoint; SIGKILL follows in 5 s"),
        (signal.SIGTERM, {"kill_wait_s": 40.0, "preempt_s": 40.0, "is_running": True}, SAVE_AND_LEAVE, 76.0,
         "SIGTERM from SLURM: saving a checkpoint; SIGKILL follows in 80 s"),
        (signal.SIGTERM, {"left_s": 118.0, "is_running": True}, SAVE_AND_LEAVE, 114.0,
         "SIGTERM: saving a checkpoint; 118 s to the time limit"),
        (signal.SIGTERM, {"is_running": True}, SAVE_AND_LEAVE, 30.0,
         "SIGTERM: saving a checkpoint; SIGKILL follows in 30 s"),
        (signal.SIGTERM, {"kill_wait_s": 0.0}, STOP, 1.0, "SIGTERM from SLURM: ending the ranks; no time to save"),
        (signal.SIGTERM, {"can_save": False}, STOP, 26.0, "SIGTERM from SLURM: ending the ranks; nothing to save"),
        (signal.SIGTERM, {"job": None}, SAVE_AND_LEAVE, 30.0, "SIGTERM: saving a checkpoint; SIGKILL follows in 30 s"),
        (signal.SIGTERM, {"job": None, "shutdown_s": 90.0}, SAVE_AND_LEAVE, 90.0,
         "SIGTERM: saving a checkpoint; SIGKILL follows in 90 s"),
        (signal.SIGTERM, {"job": None, "can_save": False}, STOP, 30.0, "SIGTERM: ending the ranks"),
        (signal.SIGINT, {}, STOP, 26.0, "SIGINT: ending the ranks"),
        (signal.SIGHUP, {"job": None, "can_save": False}, STOP, None, "SIGHUP: ending the ranks"),
    ],
)  # fmt: skip
def test_a_signal_means(signum: int, given: dict[str, Any], ending: Ending, save_s: float | None, line: str) -> None:
    asked = {name: value for name, value in given.items() if name in ("job", "can_save", "shutdown_s")}
    told = Told(**{name: value for name, value in given.items() if name not in asked})
    decision = decide(signum, **({"job": JOB, "told": told} | asked))
    assert (decision.ending, decision.save_s, decision.line) == (ending, save_s, line)


@pytest.mark.parametrize(
    ("told", "shutdown_s", "handler_s"),
    [
        pytest.param(Told(kill_wait_s=40.0), 30.0, 30.0, id="as long as they are given"),
        pytest.param(Told(kill_wait_s=40.0), 60.0, 36.0, id="not longer than KillWait, less what is kept back"),
        pytest.param(Told(), 30.0, 26.0, id="KillWait is unknown"),
        pytest.param(Told(kill_wait_s=5.0), 30.0, 1.0, id="a short KillWait"),
        pytest.param(Told(kill_wait_s=5.0, preempt_s=20.0, is_running=True), 30.0, 21.0, id="preemption"),
        pytest.param(Told(kill_wait_s=5.0, left_s=120.0, is_running=True), 90.0, 90.0, id="--signal=TERM@120"),
        pytest.param(Told(kill_wait_s=5.0, left_s=120.0, is_running=True), 300.0, 116.0, id="to the time limit"),
    ],
)
def test_ranks_that_handle_the_signal_have_what_slurm_leaves(told: Told, shutdown_s: float, handler_s: float) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT):
        assert decide(signum, job=JOB, told=told, can_save=False, shutdown_s=shutdown_s).handler_s == handler_s
        assert decide(signum, job=None, told=told, shutdown_s=shutdown_s).handler_s == shutdown_s


def test_slurm_s_sigterm_never_puts_a_job_back() -> None:
    for can_save in (True, False):
        for kill_wait_s in (None, 0.0, 30.0, 600.0):
            told = Told(left_s=10.0, kill_wait_s=kill_wait_s)
            assert decide(signal.SIGTERM, job=JOB, told=told, can_save=can_save).ending is not SAVE_AND_REQUEUE


@pytest.mark.parametrize(
    ("job", "is_batch", "may_requeue", "words"),
    [
        (JOB, True, True, ""),
        (JOB, False, True, "only jobs with a batch script"),
        (JOB, True, False, "--no-requeue; submit it again"),
        (OwnJob("12", 0, 6, is_heterogeneous=True), True, True, "heterogeneous jobs"),
    ],
)
def test_why_a_job_cannot_go_back(job: OwnJob, is_batch: bool, may_requeue: bool, words: str) -> None:
    said = why_no_requeue(job, JobState(id="12", state="RUNNING", is_batch=is_batch, may_requeue=may_requeue))
    assert (said == "") == (words == "")
    assert words in said
