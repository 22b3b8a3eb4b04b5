"""Healthy jobs, watched from before their ranks run until they have ended: there must be no verdict.

python -m benchmarks.watch healthy --minutes 60          all kinds, one after the other, 60 minutes together
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .jobs import NUM_RANKS, PROGRAMS, DrillError
from .score import list_states, list_verdicts
from .stage import answer, run_apart
from .watcher import Watcher

EXAMPLES = Path(__file__).parents[2] / "examples/training"
KINDS = ("evaluation", "save", "pipeline", "groups", "importtime", "suspended")
"""Of programs/healthy.py; `suspended`: its watcher is stopped and continued, as by Ctrl-Z and fg."""
SUSPENDED_S, BETWEEN_S = 20.0, 10.0
GRACE_S = 180.0
"""After the time that a kind was given: a round of it may have just begun."""


@dataclass(kw_only=True)
class Calm:
    """What was said of one kind of healthy job."""

    kind: str
    seconds: float
    num_jobs: int = 0
    num_documents: int = 0
    verdicts: list[str] = field(default_factory=list)
    """Must be empty."""
    states: list[str] = field(default_factory=list)
    """Different ones, without their numbers of seconds."""
    load: float = 0.0


def list_kinds() -> list[str]:
    """Return all kinds: those of the program, and the examples of trainings."""
    return [*KINDS, *(f"examples/training/{path.name}" for path in sorted(EXAMPLES.glob("*.py")))]


def command_of(kind: str, seconds: float) -> Sequence[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={NUM_RANKS}"]
    if kind.startswith("examples/"):
        return [*torchrun[:-1], "--nproc-per-node=2", str(EXAMPLES / Path(kind).name)]
    script = [str(PROGRAMS / "healthy.py"), kind, str(seconds)]
    if kind == "importtime":
        return [*torchrun, "--no-python", sys.executable, "-X", "importtime", *script]
    return [*torchrun, *script]


def play(kind: str, seconds: float, directory: Path) -> Calm:
    """Run jobs of one kind after each other, for at least so long.

    Raises:
        DrillError: a job did not end well: it was not healthy.
    """
    calm = Calm(kind=kind, seconds=0.0, load=os.getloadavg()[0])
    began_s = time.monotonic()
    while time.monotonic() < began_s + seconds:
        left_s = seconds - (time.monotonic() - began_s)
        _watch_one(kind, left_s, directory, calm)
    calm.seconds = round(time.monotonic() - began_s, 1)
    return calm


def _watch_one(kind: str, seconds: float, directory: Path, calm: Calm) -> None:
    calm.num_jobs += 1
    output = directory / f"job_{calm.num_jobs}.txt"
    deadline_s = time.monotonic() + seconds + GRACE_S
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with output.open("wb") as file:
        job = subprocess.Popen(
            command_of(kind, seconds), cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    watcher = None
    turn_s = time.monotonic() + BETWEEN_S
    is_suspended = False
    try:
        while job.poll() is None:
            if time.monotonic() > deadline_s:
                raise DrillError(f"{kind}: the job does not end: {output.read_text(errors='replace')[-800:]}")
            if watcher is None or (watcher.has_found_nothing and not is_suspended):
                # Before the first rank is there, it finds nothing and says so; a user types it again.
                watch = [sys.executable, "-m", "allranks", "watch", "--here", "--json"]
                watcher = Watcher(watch, directory / f"watch_{calm.num_jobs}.jsonl")
            if kind == "suspended" and time.monotonic() > turn_s:
                is_suspended = not is_suspended
                os.kill(watcher.process.pid, signal.SIGSTOP if is_suspended else signal.SIGCONT)
                turn_s = time.monotonic() + (SUSPENDED_S if is_suspended else BETWEEN_S)
            time.sleep(0.1)
        if is_suspended and watcher is not None:
            os.kill(watcher.process.pid, signal.SIGCONT)
        if job.returncode:
            raise DrillError(f"{kind}: exit code {job.returncode}: {output.read_text(errors='replace')[-800:]}")
        time.sleep(2)  # it has seen the end, too
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        if watcher is not None:
            watcher.end()
    heard = watcher.heard() if watcher is not None else []
    if not heard:
        raise DrillError(f"{kind}: allranks watch said nothing: {watcher.errors() if watcher else ''}")
    calm.num_documents += len(heard)
    calm.verdicts += [said.text for said in list_verdicts(heard) if said.text not in calm.verdicts]
    calm.states += [text for text in list_states(heard) if text not in calm.states]


def play_apart(kind: str, seconds: float, directory: Path) -> Calm:
    """Play one kind in namespaces of its own."""
    words = ["benchmarks.watch.healthy", kind, str(seconds), str(directory)]
    answer = run_apart(words, directory, timeout_s=seconds + 2 * GRACE_S)
    return Calm(**answer)


if __name__ == "__main__":
    where = Path(sys.argv[3])
    sys.exit(answer(where, lambda: asdict(play(sys.argv[1], float(sys.argv[2]), where))))
