"""Which runs below a log directory can be deleted? And how, so that a run is there whole or not at all.

    runs = [look_at(path, slurm, now_s=now_s) for path in list_runs(Path("runs"))]
    for candidate in choose(runs, older_s=30 * 86400, keep=10, now_s=now_s):
        delete(candidate)

A run that is alive, may be, or may come back is kept: one whose agent runs, a job that SLURM has or cannot be asked
about, one on another machine without a verdict for less than GONE_S. So is the run in which a live one has its
checkpoints. Only what is inside a run's directory is deleted; links are removed, and not followed.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from allranks.files.regular import find_regular
from allranks.host.slurm import list_jobs
from allranks.launch.batch.local_run import look_at_run
from allranks.model.errors import AllranksError
from allranks.report.readback import MAX_BYTES, parse_environment
from allranks.report.remains import last_alive
from allranks.report.rundir import LATEST, point_latest
from allranks.report.runs import BEING_DELETED, Run, list_runs, read_run
from allranks.state.saved.manifest import parse_final
from allranks.state.saved.owner import SILENT_S, Owner, describe, identify, read, sees

GONE_S = 7 * 86400.0
"""A run on another machine that has no verdict is given up so long after its last sign of life."""
JUST_NOW_S = 60.0
"""The agent of a run that was alive so lately may be in a container, where this process cannot see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One run, and whether it can be deleted."""

    id: str
    path: Path
    name: str
    state: str
    ended_s: float
    """Unix time of its end, or of its last sign of life."""
    kept: str = ""
    """Why it cannot be deleted; empty: it can."""


@dataclass(frozen=True, slots=True)
class Content:
    """What is in the directory of a run."""

    size_bytes: int
    checkpoint: int | None
    """Step of the newest checkpoint in it."""


class Slurm:
    """The jobs that SLURM has, asked once for each owner."""

    def __init__(self) -> None:
        self._active: dict[str, frozenset[str] | None] = {}

    def why_kept(self, run: Run) -> str:
        """Return why a run of SLURM cannot be deleted; empty if its job is over."""
        owner = _owner_of(run.path)
        if owner not in self._active:
            self._active[owner] = None
            with contextlib.suppress(AllranksError):
                self._active[owner] = frozenset(_base(job.id) for job in list_jobs(owner))
        active = self._active[owner]
        if active is None:
            return "SLURM cannot be asked whether the job is over"
        return "the job is still in SLURM" if _base(run.id) in active else ""


def look_at(path: Path, slurm: Slurm, *, now_s: float) -> Candidate:
    """Return whether a run can be deleted, as far as its own state decides."""
    run = read_run(path)
    alive_s = last_alive(run.attempt_path) if run.attempt is not None else None
    ended_s = run.ended_s or alive_s or path.stat().st_mtime
    state = look_at_run(run).state if run.attempt is not None else "NOT STARTED"
    kept = ""
    if run.is_of_slurm:
        kept = slurm.why_kept(run)
    elif state == "RUNNING":
        kept = "it is running"
    elif state == "UNKNOWN" and now_s - ended_s < GONE_S:
        kept = "it may be running on another machine"
    elif state == "LOST" and now_s - ended_s < JUST_NOW_S:
        kept = "it was alive a moment ago"
    if not kept and (owner := _find_writer(path / "checkpoints", now_s)):
        kept = f"{describe(owner)} writes checkpoints in it"
    return Candidate(id=run.id, path=path, name=run.name, state=state, ended_s=ended_s, kept=kept)


def choose(runs: Sequence[Candidate], *, older_s: float | None, keep: int | None, now_s: float) -> list[Candidate]:
    """Return the runs that were asked for, those that are kept all the same too.

    Args:
        runs: the newest first.
        older_s: only runs that ended longer ago.
        keep: not the newest ones.
    """
    wanted = runs[keep or 0 :]
    return [run for run in wanted if older_s is None or now_s - run.ended_s > older_s]


def keep_shared(runs: Iterable[Candidate], live: Iterable[Candidate]) -> list[Candidate]:
    """Return the runs, those kept in which a live run has its checkpoints."""
    used = {place: run.id for run in live for place in checkpoint_places(run.path)}
    found = []
    for run in runs:
        top = run.path.resolve()
        user = next((user for place, user in used.items() if place.is_relative_to(top) and user != run.id), None)
        why = f"run {user} has its checkpoints in it" if user and not run.kept else run.kept
        found.append(Candidate(id=run.id, path=run.path, name=run.name, state=run.state, ended_s=run.ended_s, kept=why))
    return found


def read_content(run: Candidate) -> Content:
    """Return how much a run holds."""
    size, steps = 0, list[int]()
    for folder, folders, files in os.walk(run.path):
        steps += [found[0] for name in folders if (found := parse_final(name))]
        for name in files:
            with contextlib.suppress(OSError):
                size += Path(folder, name).lstat().st_size
    return Content(size, max(steps, default=None))


def delete(run: Candidate) -> None:
    """Delete the directory of a run; it is renamed first, so that no half of it is a run.

    Raises:
        OSError: it cannot be deleted.
    """
    aside = run.path.with_name(f"{BEING_DELETED}{run.id}")
    run.path.rename(aside)
    shutil.rmtree(aside)


def tidy(log_dir: Path) -> None:
    """Finish what an interrupted deletion has left, and let `latest` lead to a run that is there."""
    for path in log_dir.glob(f"{BEING_DELETED}*"):
        shutil.rmtree(path, ignore_errors=True)
    latest = log_dir / LATEST
    if latest.is_symlink() and not latest.exists():
        newest = next(iter(list_runs(log_dir)), None)
        if newest is not None:
            point_latest(log_dir, newest.name)
        else:
            latest.unlink()


def _find_writer(checkpoints: Path, now_s: float) -> Owner | None:
    """Return who writes checkpoints there: an older attempt that lives, or a run whose script names the directory."""
    with contextlib.suppress(OSError):
        found = read(checkpoints)
        if found is not None and found.owner is not None:
            lives = sees(found.owner, identify({}))
            is_renewed = now_s - found.mtime_ns / 1e9 < SILENT_S
            return found.owner if lives or (lives is None and is_renewed) else None
    return None


def checkpoint_places(run: Path) -> list[Path]:
    """Return where the workers of a run have their checkpoints, as their environment says."""
    places = []
    for path in run.glob("attempt_*/*/env.json"):
        told = parse_environment(find_regular(path, at_most=MAX_BYTES) or b"")
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # a loop of links, a null byte
            places += [Path(told["ALLRANKS_CHECKPOINT_DIR"]).resolve()] if "ALLRANKS_CHECKPOINT_DIR" in told else []
    return places


def _base(job: str) -> str:
    """Return the id of a job without its task or part."""
    return job.partition("_")[0].partition("+")[0]


def _owner_of(path: Path) -> str:
    uid = path.stat().st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
