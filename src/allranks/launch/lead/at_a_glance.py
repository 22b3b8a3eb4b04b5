"""What does a leader know of its job, at a glance? For the line that `allranks run` shows. Pure but for the clock."""

from __future__ import annotations

import time

from allranks.launch.lead.leader import Leader
from allranks.model.job_status import JobStatus
from allranks.wire.protocol import Plan


def glance(leader: Leader, plan: Plan, job: str, ran_s: float) -> JobStatus:
    """Return what a job does now.

    Args:
        plan: of the generation that runs.
        ran_s: how long the job runs.
    """
    now_s, step = time.time(), leader.furthest
    return JobStatus(
        job=job,
        written_s=now_s,
        started_s=max(0.0, now_s - ran_s),
        phase=leader.phase,
        attempt=plan.attempt,
        generation=plan.generation,
        num_ranks=plan.world_size,
        num_up=plan.world_size,
        num_nodes=len(plan.members),
        step=step,
        is_step_of_session=step is not None,
        checkpoint=leader.checkpoint,
        num_restarts=plan.generation,
        max_restarts=plan.max_restarts,
    )
