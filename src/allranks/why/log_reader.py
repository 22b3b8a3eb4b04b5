"""For whom is the answer of `allranks why`? For people of the cluster from which the logs come. Pure.

find_reader(logs, job="4711", here=ANYBODY)      SLURM, as the job's id shows
"""

from __future__ import annotations

from allranks.model.fix import Reader, SchedulerKind, Vendor
from allranks.report.runs import is_job_of_slurm
from allranks.why.logs.log_events import Logs


def find_reader(logs: Logs, *, job: str | None, here: Reader) -> Reader:
    """Return what the logs show of scheduler and GPUs; what they do not, as it is here.

    Args:
        job: id of the job or run, if the logs are those of one.
        here: of the machine on which the logs are read.
    """
    scheduler = here.scheduler
    if next(logs.of("srun"), None) is not None:
        scheduler = SchedulerKind.SLURM
    elif next(logs.of("pod"), None) or any(line.is_of_pod for tail in logs.tails for line in tail.lines):
        scheduler = SchedulerKind.POD
    vendor = Vendor.AMD if next(logs.of("rocm"), None) is not None else here.vendor
    return reader_of_job(job, here=Reader(scheduler=scheduler, vendor=vendor))


def reader_of_job(job: str | None, *, here: Reader) -> Reader:
    """Return the reader of a job or run: its id tells whether SLURM gave it."""
    scheduler = here.scheduler
    if job is not None and is_job_of_slurm(job):
        scheduler = SchedulerKind.SLURM
    elif job is not None and scheduler is SchedulerKind.SLURM:
        scheduler = SchedulerKind.NONE
    return Reader(scheduler=scheduler, vendor=here.vendor, job=job)
