"""What does a signal mean for a job? A table."""

from __future__ import annotations

import signal

import pytest

from allranks.host.slurm import JobState
from allranks.host.slurm_job import OwnJob
from allranks.launch.queue.ending import Ending, decide, why_no_requeue

JOB = OwnJob("12", 0, 6, is_heterogeneous=False)
SAVE_AND_REQUEUE, SAVE_AND_LEAVE, STOP = Ending.SAVE_AND_REQUEUE, Ending.SAVE_AND_LEAVE, Ending.STOP


@pytest.mark.parametrize(
    ("signum", "given", "ending", "grace_s", "line"),
    [
        (signal.SIGUSR1, {"left_s": 118.0}, SAVE_AND_REQUEUE, 118.0,
         "SIGUSR1, 118 s to the time limit: saving a checkpoint, then job 12 goes back into the queue and resumes "
         "from it"),
        (signal.SIGUSR1, {}, SAVE_AND_REQUEUE, None,
         "SIGUSR1: saving a checkpoint, then job 12 goes back into the queue and resumes from it"),
        (signal.SIGUSR1, {"no_requeue": "it has no batch script"}, SAVE_AND_LEAVE, None,
         "SIGUSR1: saving a checkpoint, then job 12 ends: it has no batch script"),
        (signal.SIGUSR1, {"left_s": 118.0, "can_save": False}, SAVE_AND_LEAVE, None,
         "SIGUSR1, 118 s to the time limit: passed to the script; allranks itself has nothing to save"),
        (signal.SIGUSR1, {"job": None}, SAVE_AND_LEAVE, None, "SIGUSR1: saving a checkpoint, then the job ends"),
        (signal.SIGTERM, {}, SAVE_AND_LEAVE, 30.0,
         "SIGTERM from SLURM: saving a checkpoint; SIGKILL follows in 30 s"),
        (signal.SIGTERM, {"grace_s": 5.0}, SAVE_AND_LEAVE, 5.0,
         "SIGTERM from SLURM: saving a checkpoint; SIGKILL follows in 5 s"),
        (signal.SIGTERM, {"grace_s": 0.0}, STOP, 0.0, "SIGTERM from SLURM: ending the ranks; no time to save"),
        (signal.SIGTERM, {"can_save": False}, STOP, 30.0, "SIGTERM from SLURM: ending the ranks; nothing to save"),
        (signal.SIGTERM, {"job": None}, STOP, None, "SIGTERM: ending the ranks"),
        (signal.SIGINT, {}, STOP, None, "SIGINT: ending the ranks"),
        (signal.SIGHUP, {"job": None}, STOP, None, "SIGHUP: ending the ranks"),
    ],
)  # fmt: skip
def test_a_signal_means(
    signum: int, given: dict[str, object], ending: Ending, grace_s: float | None, line: str
) -> None:
    decision = decide(signum, **({"job": JOB} | given))  # type: ignore[arg-type]
    assert (decision.ending, decision.grace_s, decision.line) == (ending, grace_s, line)


def test_slurm_s_sigterm_never_puts_a_job_back() -> None:
    for can_save in (True, False):
        for grace_s in (None, 0.0, 30.0, 600.0):
            decision = decide(signal.SIGTERM, job=JOB, left_s=10.0, grace_s=grace_s, can_save=can_save)
            assert decision.ending is not SAVE_AND_REQUEUE


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
