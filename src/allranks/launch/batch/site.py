"""Which settings of this site's SLURM prevent a job from resuming? Reported at submission. Pure.

    >>> limits(Site(kill_wait_s=5.0), PartitionRules(), SbatchOptions(time="60"))
    ['KillWait is 5 s: a checkpoint after SIGTERM has only this time; --signal=USR1@120 warns before the time limit']

One line each, with what to do. A site with SLURM's defaults and proctrack/cgroup gets no line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.host.slurm_site import PartitionRules, Site
from allranks.launch.batch.script import SbatchOptions

SHORT_KILL_WAIT_S = 20.0
EARLY_S = 60
"""SLURM may send the warning this many seconds early. Source: sbatch(1), --signal."""
FEW_REQUEUES = 3


def limits(
    site: Site, rules: PartitionRules | None, options: SbatchOptions, *, is_site_known: bool = False
) -> list[str]:
    """Return a line for each setting that affects a resuming job.

    Args:
        is_site_known: leave out what is the same for every job of this site.
    """
    lines = [*_about_options(options)]
    if not is_site_known:
        lines += [*_about_requeue(site, options), *_about_preemption(site, rules), *_about_signals(site, options)]
    return lines


def parse_time_limit_s(text: str) -> int | None:
    """Read a time limit as sbatch does; None if there is none, or if sbatch would refuse it.

    >>> parse_time_limit_s("90"), parse_time_limit_s("1:30"), parse_time_limit_s("02:00:00"), parse_time_limit_s("1-12")
    (5400, 90, 7200, 129600)

    Source: sbatch(1), --time.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *given = [None if part is None else int(part) for part in match.groups()]
    first, second, third = (part or 0 for part in given)
    if days is not None:  # D-HH[:MM[:SS]]
        return ((days * 24 + first) * 60 + second) * 60 + third
    if given[2] is not None:  # HH:MM:SS
        return (first * 60 + second) * 60 + third
    return first * 60 + second  # MM[:SS]


def _about_options(options: SbatchOptions) -> Iterator[str]:
    if not options.requeue:
        yield "--no-requeue: after the time limit, a preemption or a node fault, submit the job again; it resumes"
    limit_s = parse_time_limit_s(options.time) if options.time else None
    warned = re.fullmatch(r"(?:[BR]+:)?\w+(?:@(\d+))?", options.signal)
    before_s = int(warned[1] or EARLY_S) if warned else 0
    if limit_s and before_s and limit_s <= before_s + EARLY_S:
        yield (
            f"--time {options.time}: the warning {options.signal} may come at the start of the job: SLURM sends it "
            f"up to {EARLY_S} s early; expected a limit above {before_s + EARLY_S} s, or fewer seconds after @"
        )


def _about_requeue(site: Site, options: SbatchOptions) -> Iterator[str]:
    if options.requeue and site.requeues is False:
        yield (
            "JobRequeue=0 here: SLURM requeues only jobs with --requeue, which this one has; "
            "scontrol show job prints Requeue=1 if SLURM accepted it"
        )
    if options.requeue and site.max_batch_requeue is not None and site.max_batch_requeue < FEW_REQUEUES:
        yield (
            f"MaxBatchRequeue is {site.max_batch_requeue}: SLURM holds a job after that many requeues; "
            "scontrol release JOB lets it continue"
        )


def _about_preemption(site: Site, rules: PartitionRules | None) -> Iterator[str]:
    mode = ((rules.preempt_mode if rules else "") or site.preempt_mode).upper()
    if site.preempt_type in ("", "none"):
        return
    if "CANCEL" in mode:
        yield "SLURM cancels preempted jobs here (PreemptMode=CANCEL); submit the job again, and it resumes"
    elif "SUSPEND" in mode or "GANG" in mode:
        yield (
            f"SLURM suspends preempted jobs here and resumes them later (PreemptMode={mode}); all ranks pause "
            "together, and connections may time out meanwhile"
        )
    elif "REQUEUE" in mode and rules is not None and not rules.grace_s:
        wait = f"{site.kill_wait_s:.0f} s (KillWait)" if site.kill_wait_s is not None else "KillWait"
        yield f"preemption has no GraceTime here: a checkpoint has {wait}; --checkpoint-every limits the lost work"


def _about_signals(site: Site, options: SbatchOptions) -> Iterator[str]:
    if site.kill_wait_s is not None and site.kill_wait_s < SHORT_KILL_WAIT_S:
        yield (
            f"KillWait is {site.kill_wait_s:.0f} s: a checkpoint after SIGTERM has only this time; "
            f"--signal={options.signal} warns before the time limit"
        )
    if site.signals_children:
        yield (
            "SIGTERM from SLURM reaches the workers directly here (SignalChildrenProcesses, or proctrack/linuxproc), "
            "and ends them at once; to save first, use allranks.session() or handle the signal"
        )
