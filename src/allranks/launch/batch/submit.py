"""How does a script become a job? It is checked by bash and SLURM, submitted, and recorded, with notes on the site.

    >>> list(limits(Site(kill_wait_s=5.0), PartitionRules(), SbatchOptions(time="60")))
    ['KillWait is 5 s: a checkpoint after SIGTERM has only this time; --signal=USR1@120 warns before the time limit']

The job's key (ALLRANKS_SECRET) is created here and passed in the environment of sbatch. It is in no file, no command
line and no output of ours; SLURM keeps it with the job, where only this user and the administrator can read it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from glob import glob
from pathlib import Path

from allranks.files.folder import Folder
from allranks.host.slurm import (
    NEVER_STARTS,
    JobState,
    Trial,
    fill_pattern,
    find_jobs,
    list_nodes,
    submit_script,
    try_script,
)
from allranks.host.slurm_site import PartitionRules, Site
from allranks.launch.batch.batch_script import SbatchOptions
from allranks.model.errors import AllranksError, SetupError, UsageError
from allranks.model.hostlist import fold_hosts
from allranks.report.rundir import RunDir, as_file_name, cannot_use, open_root, point_latest
from allranks.report.text import count_of
from allranks.wire.secret import SECRET_VARIABLE

STARTS_SOON_S = 2.0
SHORT_KILL_WAIT_S = 20.0
EARLY_S = 60
"""SLURM may send the warning this many seconds early. Source: sbatch(1), --signal."""
FEW_REQUEUES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job that SLURM has accepted."""

    job: str
    log_dir: str
    run_dir: str
    """Path of its future run directory; for an array, only the record: each task has its own directory beside it."""
    output: str
    error: str
    trial: Trial
    waits_for: str = ""
    """Why it cannot start now, if SLURM said so at once."""
    cannot_start: bool = False
    """It waits for something that time does not bring."""
    problem: str = ""
    """What failed after SLURM had accepted it."""
    set_aside: str = ""
    """New name of the run directory of an older job that had the same id."""


def refuse_too_large(options: SbatchOptions) -> None:
    """Refuse a job that wants more nodes than its partition has; SLURM would let it wait forever.

    Raises:
        UsageError: how many there are.
    """
    least = least_nodes(options)
    counts = _count_nodes(options.partition or "")
    if least and counts and least > max(counts.values()):
        have = ", ".join(f"partition {name} has {count_of(count, 'node')}" for name, count in counts.items())
        raise UsageError(f"--nodes {options.nodes}: {have}; nothing was submitted")


def least_nodes(options: SbatchOptions) -> int | None:
    """Return how many nodes the job needs at least; None if `--nodes` has a notation that only sbatch reads."""
    least = re.match(r"\d+(?![kKmM\d])", options.nodes or "1")
    return int(least[0]) if least else None


def _count_nodes(partitions: str) -> dict[str, int]:
    """Return the number of nodes in each of these partitions, or in the default one; empty if SLURM does not tell."""
    asked = partitions.split(",") if partitions else []
    names: list[str] = []
    with contextlib.suppress(AllranksError):
        for node in list_nodes(partition=partitions):
            own = (name.rstrip("*") for name in node.partitions if asked or name.endswith("*"))
            names += [name for name in own if name in asked or not asked]
    return dict(Counter(names))


def check_script(script: str) -> None:
    """Let bash parse the script without running it.

    Raises:
        UsageError: bash cannot parse it; only a user's template can cause that.
        SetupError: there is no bash.
    """
    try:
        answer = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError as exc:
        raise SetupError("bash: not found on this machine; SLURM runs batch scripts with it") from exc
    if answer.returncode != 0:
        raise UsageError(f"the script is not valid bash: {'; '.join(answer.stderr.strip().splitlines())[:300]}")


def submit(script: str, options: SbatchOptions, *, env: Mapping[str, str], log_dir: Path) -> Submission:
    """Let SLURM test a script, and submit it.

    Args:
        env: environment for sbatch and the job, without the job's key.
        log_dir: `--log-dir` of the run, relative to the job's working directory.
    Raises:
        UsageError: an option has a wrong value, or the run directory cannot be written.
        SetupError: SLURM is not there, does not answer, or refuses.
    """
    trial = try_script(script, env=env)
    if trial.not_now:
        refuse_too_large(options)
    root = Path(options.chdir or ".") / log_dir
    try:
        open_root(root)
    except OSError as exc:
        raise cannot_use(root, exc) from exc
    runs = {path.name for path in root.iterdir()}
    outputs = {path for output in _outputs(options) for path in glob(expand_pattern(output, "*", options))}  # noqa: PTH207
    job = submit_script(script, env={**env, SECRET_VARIABLE: secrets.token_hex(32)})
    run_dir = RunDir(root, job)
    path = run_dir.path
    problem, set_aside = "", ""
    try:
        set_aside = _set_aside(job, options, root, runs=runs, outputs=outputs)
        run_dir.hold().write_whole("submission.sh", script.encode(), mode=0o600)  # it must keep what secrets it has
        point_latest(root, path.name)
    except OSError as exc:  # the job is submitted: that counts
        problem = f"{path / 'submission.sh'}: {exc.strerror}; to get the script: scontrol write batch_script {job}"
    waits_for, reason = _why_not_now(job) if trial.not_now else ("", "")
    return Submission(
        job=job,
        log_dir=str(log_dir),
        run_dir=str(path),
        output=expand_pattern(options.output, job, options),
        error=expand_pattern(options.error, job, options) if options.error else "",
        trial=trial,
        waits_for=waits_for,
        cannot_start=reason in NEVER_STARTS,
        problem=problem,
        set_aside=set_aside,
    )


def _set_aside(job: str, options: SbatchOptions, root: Path, *, runs: set[str], outputs: set[str]) -> str:
    """Rename the run directories of an older job with this id, and move its output; return the new name.

    Ids begin again in a cluster that was installed anew, and after MaxJobId. `runs` were in the log directory before
    the submission, and `outputs` could be the job's own output files, but were there before.
    """
    old = sorted(run for run in runs if re.fullmatch(rf"{re.escape(as_file_name(job))}(_\d+)?", run))
    if not old:
        return ""
    ended = datetime.fromtimestamp((root / old[0]).stat().st_mtime)
    for name in old:
        aside = root / f"{name}-until-{ended:%Y%m%d-%H%M%S}"
        (root / name).rename(aside)
    for path in sorted(outputs.intersection(expand_pattern(pattern, job, options) for pattern in _outputs(options))):
        _move_output(Path(path), aside)
    return str(aside)


def _move_output(path: Path, aside: Path) -> None:
    """Move what is in an output file; links of others, in a directory of theirs, are left alone."""
    try:
        fd = Folder.root(path.parent).open(path.name, os.O_RDWR)
    except OSError:
        return
    with os.fdopen(fd, "r+b") as old, Folder.at(aside).open_new(path.name) as new:
        shutil.copyfileobj(old, new)
        old.truncate(0)  # the new job may have opened it already, to append: it keeps its file


def _outputs(options: SbatchOptions) -> list[str]:
    """Return the patterns of output files that have the job's id in their names; others are meant to be shared."""
    named = [pattern for pattern in (options.output, options.error) if pattern]
    return [
        pattern for pattern in named if expand_pattern(pattern, "1", options) != expand_pattern(pattern, "2", options)
    ]


def expand_pattern(pattern: str, job: str, options: SbatchOptions) -> str:
    """Return the file that a pattern of sbatch names, with `*` for parts that are not known yet."""
    known = {"A": job, "j": "" if options.array else job, "x": options.job_name or ""}
    return str(Path(options.chdir or "", fill_pattern(pattern, known)))


def describe_unavailable(job: JobState) -> str:
    """Return which nodes of a waiting job are out of service, `n[03-04] down: bad NIC`; empty if none, or unknown."""
    groups: dict[str, list[str]] = {}
    with contextlib.suppress(AllranksError):
        for node in list_nodes(nodes=job.asked_nodes, partition=job.partition.partition(",")[0]):
            if not node.is_available:
                why = ": ".join(filter(None, [node.state.rstrip("*~#!%$@^-"), node.reason]))
                groups.setdefault(why, []).append(node.name)
    return "; ".join(f"{fold_hosts(names)} {why}" for why, names in groups.items())


def _why_not_now(job: str) -> tuple[str, str]:
    """Why a job waits, in words, and SLURM's reason; both are empty if it does not wait."""
    # The scheduler needs a moment before it gives the reason.
    found: tuple[JobState, ...] = ()
    for _ in range(5):
        time.sleep(STARTS_SOON_S / 5)
        with contextlib.suppress(AllranksError):
            found = find_jobs(job)
            if not found or found[0].reason not in ("", "Priority"):
                break
    if not found or not found[0].is_pending:
        return "", ""
    reason = found[0].reason
    if reason in NEVER_STARTS:
        return f"{NEVER_STARTS[reason]} ({reason}); to remove it: allranks cancel {job}", reason
    return "; ".join(filter(None, [reason, describe_unavailable(found[0])])), reason


# --- What may keep it from resuming -----------------------------------------------------------------------------------


def limits(site: Site, rules: PartitionRules | None, options: SbatchOptions) -> Iterator[str]:
    """Yield a line for each setting that affects a resuming job; with SLURM's defaults and proctrack/cgroup, none."""
    if not options.requeue:
        yield "--no-requeue: after the time limit, a preemption or a node fault, submit the job again; it resumes"
    limit_s = parse_time_limit_s(options.time or "")
    warned = re.fullmatch(r"(?:[BR]+:)?\w+(?:@(\d+))?", options.signal)
    before_s = int(warned[1] or EARLY_S) if warned else 0
    if limit_s and before_s and limit_s <= before_s + EARLY_S:
        yield (
            f"--time {options.time}: the warning {options.signal} may come at the start of the job: SLURM sends it "
            f"up to {EARLY_S} s early; expected a limit above {before_s + EARLY_S} s, or fewer seconds after @"
        )
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
    can_preempt = site.preempt_type not in ("", "none")
    mode = ((rules.preempt_mode if rules else "") or site.preempt_mode).upper() if can_preempt else ""
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


def parse_time_limit_s(text: str) -> int | None:
    """Read a time limit as sbatch does; None if there is none, or if sbatch would refuse it.

    >>> parse_time_limit_s("90"), parse_time_limit_s("1:30"), parse_time_limit_s("02:00:00"), parse_time_limit_s("1-12")
    (5400, 90, 7200, 129600)

    Source: sbatch(1), --time.
    """
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        return None
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)  # [D-]HH[:MM[:SS]], else MM[:SS]
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
