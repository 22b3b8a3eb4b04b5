"""One job with some faults after each other, in namespaces of its own: `python -m benchmarks.watch.stage ...`.

    play_apart("torchrun", ["store-stopped", "stopped", "killed"], directory)      # -> one result for each

A job of this machine gets its own process, mount and network namespaces, so that `allranks watch --here` sees no other
job, dropped packets are nobody else's, and nothing is left. The watcher runs in the same namespaces: it is a user who
looks at the job from the same machine. A job of the lab has nodes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .faults import FAULTS, Fault, Named, next_of
from .jobs import NUM_RANKS, DrillError, Job, LabJob, LocalJob
from .score import Truth, judge
from .seen import FirstEnd
from .watcher import Watcher

ROOT = Path(__file__).parents[2]
LOOKS_S = 3.5
"""How long the watcher has seen the healthy job before a fault: every `since` needs a time before it."""
PATIENT_S = 20.0
"""How long a name is waited for: later than allowed is not the same as never."""
AFTER_S = 1.0
"""How long it is heard after it has named somebody: it must not change its mind."""
CALM_S = 8.0
"""Until nothing is said any more of a fault that was undone."""
ONCE_S = 30.0
UNWATCHED_S = 2.0
"""Between strike and proof: a process that writes a core dump needs a moment to end."""
RANK = 2
"""That is struck: neither the one with the store nor the first that anybody would look at."""


@dataclass(kw_only=True)
class Result:
    """One drill."""

    fault: str
    launcher: str
    planted: list[str]
    """What did not hold of the fault itself; empty: it was there."""
    truth: str
    named_s: float | None = None
    said: str = ""
    certainty: str = ""
    wrong: list[str] = field(default_factory=list)
    """What was wrong with what was said; empty: right."""
    once_code: int | None = None
    """Exit code of `--once`, of a job that hangs on; None: not asked."""
    load: float = 0.0


def play(job: Job, faults: Sequence[Fault], *, is_watched: bool, is_once: bool = False) -> list[Result]:
    """Play faults after each other in one job; all but the last must be ones that can be undone."""
    results = []
    watcher = None
    try:
        job.start()
        job.wait_until_stepping()
        if is_watched:
            watcher = Watcher(job.watch_command("--json"), job.directory / "watch.jsonl")
        for fault in faults:
            results.append(_drill(job, fault, watcher))
            if is_once and fault.lasts:
                _ask_once(job, fault, results[-1])
            if fault is not faults[-1]:
                assert fault.undo is not None, f"{fault.name} cannot be undone"
                fault.undo(job, RANK)
                job.wait_until_stepping()
                if watcher is not None and (said := watcher.wait_until_calm(CALM_S)):
                    results[-1].wrong.append(f"{CALM_S:.0f} s after it was undone: {said}")
    finally:
        if watcher is not None:
            watcher.end()
        job.end()
    return results


def _drill(job: Job, fault: Fault, watcher: Watcher | None) -> Result:
    if watcher is not None:
        watcher.wait_for_looks(LOOKS_S)
    truth = tell_truth(job, fault)
    load = os.getloadavg()[0]
    ends = FirstEnd({job.pid_of(rank): rank for rank in range(NUM_RANKS)})
    struck_s = fault.strike(job, RANK)
    if watcher is None:
        time.sleep(UNWATCHED_S)
        return Result(
            fault=fault.name, launcher=job.launcher, planted=fault.prove(job, RANK), truth=str(truth), load=load
        )
    watcher.wait_until(lambda heard: judge(heard, truth, struck_s).named_s is not None, struck_s + PATIENT_S)
    time.sleep(AFTER_S)
    planted = fault.prove(job, RANK)
    if truth.is_any and ends.rank is not None:
        truth = replace(truth, ranks=frozenset({ends.rank}), is_any=False)
    score = judge(watcher.heard(), truth, struck_s)
    return Result(
        fault=fault.name, launcher=job.launcher, planted=planted, truth=str(truth), named_s=score.named_s,
        said=score.said, certainty=score.certainty, wrong=list(score.wrong), load=load,
    )  # fmt: skip


def _ask_once(job: Job, fault: Fault, result: Result) -> None:
    """Ask for one answer of the job that hangs: 1 is a verdict, 3 only states."""
    done = subprocess.run(
        job.watch_command("--once"), capture_output=True, text=True, timeout=ONCE_S, check=False, cwd=job.directory
    )
    result.once_code = done.returncode
    if done.returncode != (expected := 1 if fault.is_proven else 3):
        said = (done.stdout + done.stderr)[-300:]
        result.wrong.append(f"--once: exit code {done.returncode}, expected {expected}: {said}")


def tell_truth(job: Job, fault: Fault) -> Truth:
    """Return who is to be named, before the strike: afterwards nobody may be there to be asked."""
    ranks: frozenset[int] = frozenset({RANK})
    role, pid = "", 0
    if fault.named is Named.PAIR:
        ranks = frozenset({RANK, next_of(RANK)})
    elif fault.named is Named.FIRST_DEAD:
        ranks = frozenset(range(NUM_RANKS))
    elif fault.named is Named.STORE:
        ranks = frozenset() if job.store_rank is None else frozenset({job.store_rank})
        pid, role = job.store_pid, "store" if job.launcher == "srun" else "launcher"
    return Truth(
        ranks=ranks, is_any=fault.named is Named.FIRST_DEAD, role=role, pid=pid, is_verdict=fault.is_proven,
        place=fault.line(), is_victim=fault.named is Named.FIRST_DEAD,
        reason=fault.reason, within_s=fault.within_s,
    )  # fmt: skip


def play_apart(
    launcher: str,
    faults: Sequence[str],
    directory: Path,
    *,
    lab: str = "",
    is_watched: bool = True,
    is_once: bool = False,
    timeout_s: float = 300,
) -> list[Result]:
    """Play faults in one job, in a process and namespaces of its own.

    Args:
        launcher: one of LAUNCHERS.
        faults: names; all but the last can be undone.
        directory: for the job's files; it must not exist.
        lab: of srun, the name of a lab that is up.
        is_watched: whether a watcher is started and judged; else the faults alone are tried.
        is_once: whether `--once` is asked, too.
        timeout_s: for all of it.
    Raises:
        DrillError: the drill itself failed.
    """
    words = ["benchmarks.watch.stage", launcher, ",".join(faults), str(directory)]
    words += [
        *(["--lab", lab] if lab else []),
        *([] if is_watched else ["--unwatched"]),
        *(["--once"] if is_once else []),
    ]
    answer = run_apart(words, directory, timeout_s=timeout_s, is_local=launcher != "srun")
    return [Result(**record) for record in answer]


def run_apart(words: Sequence[str], directory: Path, *, timeout_s: float, is_local: bool = True) -> Any:
    """Run a module as process 1 of new namespaces, and return what it left in results.json.

    Raises:
        DrillError: it failed.
    """
    outer = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"] if is_local else []
    directory.mkdir(parents=True)
    command = [*outer, sys.executable, "-m", *words]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as exc:
        raise DrillError(f"{' '.join(words[1:3])}: not finished after {timeout_s:.0f} s") from exc
    answer = directory / "results.json"
    if done.returncode or not answer.exists():
        raise DrillError(f"{' '.join(words[1:3])}: {(done.stderr or done.stdout)[-3000:]}")
    return json.loads(answer.read_text())


def answer(directory: Path, work: Callable[[], Any], *, is_local: bool = True) -> int:
    """Work in this process, which is process 1 of the namespaces, and leave the result for `run_apart`."""
    if is_local:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    try:
        found = work()
    except DrillError as exc:
        print(exc, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    (directory / "results.json").write_text(json.dumps(found, indent=1))
    return 0


def main() -> int:
    """Play in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("launcher")
    parser.add_argument("faults")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--lab", default="")
    parser.add_argument("--unwatched", action="store_true")
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args()
    is_local = options.launcher != "srun"
    if is_local:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def work() -> list[dict[str, Any]]:
        place = options.directory / "job"
        job: Job = LocalJob(options.launcher, place) if is_local else LabJob(place, options.lab)
        faults = [FAULTS[name] for name in options.faults.split(",")]
        return [asdict(drill) for drill in play(job, faults, is_watched=not options.unwatched, is_once=options.once)]

    return answer(options.directory, work, is_local=is_local)


if __name__ == "__main__":
    sys.exit(main())
