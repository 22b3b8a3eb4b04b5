"""Which files are the logs of a SLURM job? Asks the controller, accounting, the batch script and run directories.

find_job_sources("4711")
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path

from allranks.files.regular import read_regular
from allranks.host.programs import run_command
from allranks.host.slurm import NEVER_STARTS, JobState, fill_pattern, find_jobs, find_old_jobs
from allranks.model.errors import SetupError, UsageError
from allranks.report.rundir import as_file_name
from allranks.why.logs.sources import JOB_ID, Source, find_paths, keep_first, look_at

RUNS = Path("runs")
"""Parent of allranks' run directories, below a job's working directory or this one."""
SACCT_DEADLINE_S = 20.0
_FIELD = "\x1f"
_OUTPUT = re.compile(r"""\s(?:--(?:output|error)(?:=|[ \t]+)|-[oe][ \t]*=?)("[^"\n]+"|'[^'\n]+'|[^\s"'\\]+)""")
_MAX_SCRIPT_BYTES = 1 << 20


def find_job_sources(job: str) -> tuple[Source, ...]:
    """Return the logs of a SLURM job: its output and error files, those of its steps, and its run directory.

    The names come from the controller while it knows the job, then from accounting, and from the job's script if it
    can still be read. Otherwise, files with the job's number in their names are taken. A step stands for its job.

    Args:
        job: `123`, `123_4`, `123.0`.
    Raises:
        UsageError: it is no job id, or no log of it can be found from here.
        SetupError: SLURM is missing or does not answer, and no log of the job is here.
    """
    match = JOB_ID.fullmatch(job)
    if not match:
        raise UsageError(f"{job}: expected a SLURM job id, for example 4711, or 4711_3 for a task of an array")
    problem: SetupError | None = None
    jobs: tuple[JobState, ...] = ()
    try:
        jobs = find_jobs(match[1]) or find_old_jobs(match[1])
    except SetupError as exc:  # logs may be here nevertheless
        problem = exc
    patterns: list[str] = []
    folders: list[Path] = []
    for state in jobs or (JobState(id=match[1], state=""),):
        patterns += _patterns(state)
        places = [Path(state.work_dir) if state.work_dir else Path(), Path()]
        places += [Path(state.script).parent] if state.script else []
        folders += [place / RUNS / as_file_name(state.id) for place in places]
    folders += [] if jobs else sorted(RUNS.glob(f"{match[1]}_[0-9]*"))
    paths = [path for pattern in patterns for path in find_paths(pattern)]
    if not paths:
        patterns += _usual_patterns(jobs, match[1])
        paths = [path for pattern in patterns for path in find_paths(pattern)]
    paths = [path for path in paths if not os.path.isdir(path)]  # noqa: PTH112
    paths += [str(folder) for folder in folders if os.path.isdir(folder)]  # noqa: PTH112  (never raises)
    here = f"{Path.cwd()}/"
    sources = keep_first(
        source for path in dict.fromkeys(paths) for source in look_at(path.removeprefix(here), show_target=True)
    )
    if not sources:
        if problem:
            raise problem
        if waiting := next((state for state in jobs if state.is_pending), None):
            if never := NEVER_STARTS.get(waiting.reason):
                raise UsageError(f"job {job} cannot start: {never} ({waiting.reason}); see allranks status {job}")
            why = f" ({waiting.reason})" if waiting.reason else ""
            raise UsageError(f"job {job} has not started{why}, so it has no log yet; see allranks status {job}")
        known = "SLURM does not know it" if not jobs else f"no file matches {', '.join(patterns[:3])}"
        raise UsageError(f"job {job}: it has no logs here: {known}; give its log files or directory instead")
    return sources


def _patterns(job: JobState) -> list[str]:
    """Patterns of the files that a job and its steps write."""
    known = [name for name in (job.out, job.err) if name]
    recorded = [] if known or not job.work_dir else _recorded_names(job.id)
    with contextlib.suppress(OSError):
        script = read_regular(Path(job.script), at_most=_MAX_SCRIPT_BYTES, follows_links=True)
        recorded += find_outputs(script.decode(errors="replace"))
    names = [expand_pattern(name, job) if "%" in name else glob.escape(name) for name in known]
    names += [expand_pattern(name, job) for name in recorded]
    if not names and job.work_dir:
        names = [expand_pattern("slurm-%A_%a.out" if "_" in job.id else "slurm-%j.out", job)]
    names = [name for name in names if name.rpartition("/")[2].strip("*") and not name.startswith("/dev/")]
    return list(dict.fromkeys(str(Path(glob.escape(job.work_dir)) / name) for name in names))


def _recorded_names(job_id: str) -> list[str]:
    """Return the output patterns from accounting, which has them since SLURM 24.05."""
    asked = ["sacct", "-n", "-P", f"--delimiter={_FIELD}", "-o", "StdOut,StdErr", "-j", job_id]
    ran = run_command(asked, deadline_s=SACCT_DEADLINE_S)
    rows = ran.stdout.splitlines() if ran.rc == 0 else []
    return [word for row in rows for word in map(str.strip, row.split(_FIELD)) if word]


def find_outputs(script: str) -> list[str]:
    """Return the patterns of output and error files in a batch script.

    >>> find_outputs("#SBATCH -o logs/%x.out\\nset -e\\nsrun --output='%j_%t_log.out' python train.py")
    ['logs/%x.out', '%j_%t_log.out']
    """
    lines = re.findall(r".*(?:#SBATCH|\bsrun|\bsbatch)\b.*", script.replace("\\\n", " "))
    return [word.strip("\"'") for line in lines for word in _OUTPUT.findall(line)]


def expand_pattern(pattern: str, job: JobState) -> str:
    """Return a name of `--output` as a glob: known parts of the job are inserted, the rest may be anything.

    >>> expand_pattern("logs/%x_%A_%a.%t.out", JobState(id="12_3", name="train", state=""))
    'logs/train_12_3.*.out'

    The raw id of an array's task is not known here.
    """
    base, _, task = job.id.partition("_")
    numbers = {"A": base, "a": task, "j": "" if task else base}
    known = {mark: number for mark, number in numbers.items() if number.isdecimal()}
    known |= {"x": glob.escape(job.name), "u": glob.escape(job.user)}
    return fill_pattern(re.sub(r"\$(\{\w+\}|\w+)", "*", glob.escape(pattern)), known)


def _usual_patterns(jobs: Iterable[JobState], job_id: str) -> list[str]:
    """Return files whose names contain the job's number, in its submission directory and here."""
    places = dict.fromkeys([*(job.work_dir for job in jobs if job.work_dir), ""])
    return [
        str(Path(glob.escape(place)) / folder / f"{before}{job_id}{after}")
        for place in places
        for folder in ("", "logs")
        for before in ("", "*[-_.]")
        for after in (".out", ".err", ".log", "[-_.]*.out", "[-_.]*.err", "[-_.]*.log")
    ]
