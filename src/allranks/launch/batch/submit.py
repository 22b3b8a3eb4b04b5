"""How does a script become a job? It is rendered, checked by bash and SLURM, submitted, and recorded.

The job's key (ALLRANKS_SECRET) is created here and passed in the environment of sbatch. It is in no file, no command
line and no output of ours; SLURM keeps it with the job, where only this user and the administrator can read it.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from glob import glob
from pathlib import Path

from allranks.host.slurm import JobState, NodeState, Trial, find_jobs, list_nodes, submit_script, try_script
from allranks.launch.batch.script import SbatchOptions
from allranks.model.errors import AllranksError, SetupError, UsageError
from allranks.model.hostlist import fold_hosts
from allranks.report.rundir import as_file_name, point_latest
from allranks.wire.secret import SECRET_VARIABLE

SBATCH_ARGUMENTS = ("--export=ALL",)
"""`ALL` means the short environment that `submission_env` makes. A list of names would make
slurmd run a login shell of the user on the node (`--get-user-env`), and would apply to every srun of the script."""

STARTS_SOON_S = 2.0
NEVER_STARTS = {
    "PartitionNodeLimit": "it requests more nodes than its partition allows or has in service",
    "PartitionTimeLimit": "its time limit is above that of its partition",
    "BadConstraints": "no node has what it requests",
    "DependencyNeverSatisfied": "a job that it depends on has failed",
    "JobHeldUser": "it is held; scontrol release lets it start",
    "JobHeldAdmin": "an administrator holds it",
}
"""Reasons that time alone does not end. Source: squeue(1), JOB REASON CODES."""


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


def check_script(script: str) -> None:
    """Let bash parse the script without running it.

    Raises:
        UsageError: bash cannot parse it; only a user's template can cause that.
        SetupError: there is no bash.
    """
    try:
        answer = subprocess.run(
            ["bash", "-n"],
            input=script,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except FileNotFoundError as exc:
        raise SetupError("bash: not found on this machine; SLURM runs batch scripts with it") from exc
    if answer.returncode != 0:
        raise UsageError(f"the script is not valid bash: {'; '.join(answer.stderr.strip().splitlines())[:300]}")


def submit(script: str, options: SbatchOptions, *, env: Mapping[str, str], log_dir: Path) -> Submission:
    """Check and submit a script.

    Args:
        env: environment for sbatch and the job, without the job's key.
        log_dir: `--log-dir` of the run, relative to the job's working directory.
    Raises:
        UsageError: an option has a wrong value, or the run directory cannot be written.
        SetupError: SLURM is not there, does not answer, or refuses.
    """
    check_script(script)
    trial = try_script(script, SBATCH_ARGUMENTS, env=env)
    root = Path(options.chdir or ".") / log_dir
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UsageError(f"{root}: {exc.strerror}; choose another directory with --log-dir") from exc
    runs = {path.name for path in root.iterdir()}
    outputs = {path for each in _outputs(options) for path in glob(expand_pattern(each, "*", options))}  # noqa: PTH207
    job = submit_script(script, SBATCH_ARGUMENTS, env={**env, SECRET_VARIABLE: secrets.token_hex(32)})
    path = root / as_file_name(job)
    problem, set_aside = "", ""
    try:
        set_aside = _set_aside(job, options, root, runs=runs, outputs=outputs)
        path.mkdir(exist_ok=True)
        (path / "submission.sh").write_text(script)
        point_latest(root, path.name)
    except OSError as exc:  # the job is submitted: that counts
        problem = f"{path / 'submission.sh'}: {exc.strerror}; to get the script: scontrol write batch_script {job}"
    waits_for, reason = _why_not_now(job) if trial.not_now else ("", "")
    return Submission(
        job=job,
        log_dir=str(log_dir),
        run_dir=str(path),
        output=expand_pattern(options.output_pattern, job, options),
        error=expand_pattern(options.error, job, options) if options.error else "",
        trial=trial,
        waits_for=waits_for,
        cannot_start=reason in NEVER_STARTS,
        problem=problem,
        set_aside=set_aside,
    )


def _set_aside(job: str, options: SbatchOptions, root: Path, *, runs: set[str], outputs: set[str]) -> str:
    """Rename the run directories of an older job with this id, and move its output; return the new name.

    Ids begin again in a cluster that was installed anew, and after MaxJobId.

    Args:
        runs: names in the log directory before the job was submitted.
        outputs: files that were there before, and could be the job's output.
    Raises:
        OSError: that failed.
    """
    old = sorted(each for each in runs if re.fullmatch(rf"{re.escape(as_file_name(job))}(_\d+)?", each))
    if not old:
        return ""
    ended = datetime.fromtimestamp((root / old[0]).stat().st_mtime)
    for each in old:
        aside = root / f"{each}-until-{ended:%Y%m%d-%H%M%S}"
        (root / each).rename(aside)
    for path in sorted(outputs.intersection(expand_pattern(pattern, job, options) for pattern in _outputs(options))):
        if Path(path).is_file():  # the new job may have opened it already, to append: it keeps its file
            shutil.copy2(path, aside / Path(path).name)
            os.truncate(path, 0)
    return str(aside)


def _outputs(options: SbatchOptions) -> list[str]:
    """Return the patterns of output files that have the job's id in their names; others are meant to be shared."""
    named = [pattern for pattern in (options.output_pattern, options.error) if pattern]
    return [each for each in named if expand_pattern(each, "1", options) != expand_pattern(each, "2", options)]


def expand_pattern(pattern: str, job: str, options: SbatchOptions) -> str:
    """Return the file that a pattern of sbatch names, with `*` for parts that are not known yet.

    >>> expand_pattern("gloo_%j.out", "12", SbatchOptions())
    'gloo_12.out'
    """
    known = {"%": "%", "A": job, "x": options.job_name or "*", "j": "*" if options.array else job}
    parts, rest = [], pattern
    while rest:
        head, found, rest = rest.partition("%")
        parts.append(head)
        if found:
            rest = rest.lstrip("0123456789")  # `%4j` pads
            parts.append(known.get(rest[:1], "*"))
            rest = rest[1:]
    return str(Path(options.chdir or "", "".join(parts)))


def lines_to_follow(submission: Submission) -> list[str]:
    """Return the commands to follow a job."""
    job = submission.job
    log_dir = "" if submission.log_dir == "runs" else f" --log-dir {_quote(submission.log_dir)}"
    files = [file for file in (submission.output, submission.error) if file]
    return [
        f"allranks status{log_dir} {job}",
        f"allranks logs{log_dir} -f {job}",
        f"squeue -j {job}",
        "tail -F " + " ".join(map(_quote, files)),
        f"allranks cancel {job}",
    ]


def describe_unavailable(job: JobState) -> str:
    """Return which nodes of a waiting job are out of service, with SLURM's reason; empty if there are none."""
    try:
        nodes = list_nodes(nodes=job.asked_nodes, partition=job.partition.partition(",")[0])
    except AllranksError:
        return ""
    return fold_unavailable(nodes)


def fold_unavailable(nodes: Sequence[NodeState]) -> str:
    """Return `node[03-04] down: bad NIC`; nodes with the same state and reason are folded.

    >>> fold_unavailable([NodeState("n1", "down*", "Not responding"), NodeState("n2", "idle", "")])
    'n1 down: Not responding'
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        if not node.is_available:
            groups.setdefault((node.state.rstrip("*~#!%$@^-"), node.reason), []).append(node.name)
    return "; ".join(
        f"{fold_hosts(names)} {state}" + (f": {reason}" if reason else "") for (state, reason), names in groups.items()
    )


def _why_not_now(job: str) -> tuple[str, str]:
    """Why a job waits, in words, and SLURM's reason; both are empty if it does not wait."""
    # The scheduler needs a moment before it gives the reason.
    found: tuple[JobState, ...] = ()
    for _ in range(5):
        time.sleep(STARTS_SOON_S / 5)
        try:
            found = find_jobs(job)
        except AllranksError:
            continue
        if not found or found[0].reason not in ("", "Priority"):
            break
    if not found or not found[0].is_pending:
        return "", ""
    reason = found[0].reason
    if reason in NEVER_STARTS:
        return f"{NEVER_STARTS[reason]} ({reason}); to remove it: allranks cancel {job}", reason
    return "; ".join(filter(None, [reason, describe_unavailable(found[0])])), reason


def _quote(text: str) -> str:
    return text if "*" in text else shlex.quote(text)
