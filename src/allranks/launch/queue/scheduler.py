"""What does SLURM know about this job, and what is requested from it? A thread asks, so nothing waits for slurmctld.

    scheduler = Scheduler.of(env, run_dir=run_dir.path, attempt=2, min_nodes=4, say=say)
    scheduler.decide(signal.SIGUSR1, save_s=None)      # what a signal means here (launch.queue.ending)
    scheduler.requeue(["node03"], cause="AR012 ...")   # requeue the job, once (launch.queue.requeue)

Without SLURM, there is no scheduler.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from allranks.host.slurm_job import OwnJob, TimeLimit, find_job, own_job
from allranks.launch.queue.ending import Decision, decide, why_no_requeue
from allranks.launch.queue.requeue import outlast_preemption, read_grace_s, requeue_once, stay_complete
from allranks.model.errors import AllranksError

ANSWER_S = 2.0
"""How long a decision waits for SLURM's answer; after that, it is made without the answer."""


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """SLURM, as the agents of one job see it."""

    job: OwnJob
    run_dir: Path
    """The job's directory, above its attempts."""
    attempt: int
    min_nodes: int
    say: Callable[[str], None]
    _limit: TimeLimit
    _grace_s: float | None = None
    _no_requeue: str = ""
    _left_s: float | None = None
    _thread: threading.Thread | None = field(default=None)

    @classmethod
    def of(
        cls, env: Mapping[str, str], *, run_dir: Path, attempt: int, min_nodes: int, say: Callable[[str], None]
    ) -> Scheduler | None:
        """Return the scheduler that runs this process; None outside of SLURM."""
        job = own_job(env)
        if job is None:
            return None
        limit = TimeLimit(job, env)
        return cls(job=job, run_dir=run_dir, attempt=attempt, min_nodes=min_nodes, say=say, _limit=limit)

    def decide(self, signum: int, *, save_s: float | None) -> Decision:
        """Return what a signal means for this job.

        Args:
            signum: what came.
            save_s: how long a checkpoint takes; None: not known, 0: there is nothing to save.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._ask, name="allranks-slurm", daemon=True)
            self._thread.start()
        self._thread.join(ANSWER_S)
        return decide(
            signum,
            job=self.job,
            left_s=self._left_s,
            no_requeue=self._no_requeue,
            grace_s=self._grace_s,
            save_s=save_s,
        )

    def requeue(self, nodes: Sequence[str] = (), *, cause: str = "") -> int:
        """Requeue the job, unless another agent has; returns the exit code (launch.queue.requeue)."""
        return requeue_once(
            self.job,
            run_dir=self.run_dir,
            attempt=self.attempt,
            say=self.say,
            nodes=nodes,
            cause=cause,
            min_nodes=self.min_nodes,
        )

    def outlast_preemption(self) -> bool:
        """Wait if a preempted job must keep running to be requeued; returns whether it is being preempted."""
        return outlast_preemption(self.job, run_dir=self.run_dir, say=self.say)

    def stay_complete(self) -> None:
        """Keep SLURM from running this job again, which has succeeded (launch.queue.requeue)."""
        stay_complete(self.job, run_dir=self.run_dir, say=self.say)

    def _ask(self) -> None:
        try:
            state = find_job(self.job.id)
            if state is not None:
                self._no_requeue = why_no_requeue(self.job, is_batch=state.is_batch, may_requeue=state.may_requeue)
            self._grace_s = read_grace_s(state)
            self._left_s = self._limit.left_s(time.time())
        except AllranksError:
            return  # the defaults are used
