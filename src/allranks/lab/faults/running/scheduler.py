"""Actions of SLURM on running jobs: none is a fault; the job must continue, or end cleanly."""

from __future__ import annotations

import time
from typing import ClassVar

from allranks.lab.faults.fault import Expected, LabScene, TrueCulprit
from allranks.lab.faults.running.strike import Launch, Strike
from allranks.lab.faults.running.target import DrilledJob
from allranks.lab.slurm_daemons import URGENT_PARTITION


class SlurmStrike(Strike):
    """A strike that is a command of SLURM."""

    launch = Launch.BATCH
    watch_s = 90.0
    has_ranks = False
    nodes = "6:6"
    command: ClassVar[tuple[str, ...]]
    """`JOB` stands for the job's id."""

    @classmethod
    def culprit(cls, scene: LabScene) -> TrueCulprit:
        """No culprit: a user wanted it."""
        return TrueCulprit()

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Run the command where users work."""
        scene.remember("step", max(done.step for done in target.newest().values()))
        struck_s = time.time()
        scene.run(scene.controller.name, *(word.replace("JOB", target.job_id) for word in cls.command))
        return struck_s

    @classmethod
    def check(cls, scene: LabScene, target: DrilledJob) -> list[str]:
        """Check that there was time for a checkpoint, and that a later attempt resumed from it."""
        done, began = scene.memory["step"], [step.step - 1 for step in target.steps() if step.start > (0, 0)]
        saved = min(began) if began else target.whole_checkpoint()
        return (
            []
            if saved is not None and saved >= done
            else [f"step {done} was completed, but the checkpoint is at step {saved}"]
        )


class TimeLimitStrike(SlurmStrike, name="time-limit"):
    """The job's time limit is set to one minute, without a warning signal."""

    severity = Expected.FAIL
    command = ("scontrol", "update", "JobId=JOB", "TimeLimit=1")
    launch, watch_s = Launch.STEP, 150.0


class Requeued(SlurmStrike, name="requeued"):
    """`scontrol requeue`: a user requeues the job."""

    is_requeued = True
    command = ("scontrol", "requeue", "JOB")


class Cancelled(SlurmStrike, name="cancelled"):
    """`scancel`: a user ends the job, which must not come back."""

    severity = Expected.FAIL
    command = ("scancel", "JOB")


class Warned(SlurmStrike, name="warned"):
    """`scancel --signal=USR1`: the warning before a time limit. Checkpoint, requeue, resume."""

    is_requeued = True
    command = ("scancel", "--signal=USR1", "JOB")


class WarnedBatch(SlurmStrike, name="warned-batch"):
    """`scancel --batch --signal=USR1`: the same warning, to the batch script alone."""

    is_requeued = True
    command = ("scancel", "--batch", "--signal=USR1", "JOB")


class Preempted(SlurmStrike, name="preempted"):
    """A job of a partition with higher priority needs two of the nodes: SLURM requeues the training.

    SLURM 24.11 calls the job PREEMPTED when it has succeeded (launch.queue.scheduler).
    """

    command = (
        *("sbatch", "--partition", URGENT_PARTITION, "--nodes=2", "--exclusive", "--output=/dev/null"),
        *("--wrap", "sleep 3"),
    )
    is_requeued = True
    submit_flags: ClassVar = ("--exclusive",)
    end_states: ClassVar = ("COMPLETED", "PREEMPTED")
    watch_s = 150.0
