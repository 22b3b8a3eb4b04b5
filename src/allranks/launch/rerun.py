"""Runs two trainings again, on this machine, and compares their operations while they record them.

    outcome = Rerun(runs, num_ranks=3, first=96, until=128, timeout_s=600.0).watch(show=print)

Each run is a job of `allranks run` in a folder of its own below one scratch directory, and goes with it. They run at
once: a step is compared as soon as both have recorded it, and its files are deleted. So both end soon after the first
difference: at a step of their records, which shows whether they repeat these. The files: state/truth/op_file.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.files.regular import find_regular
from allranks.host.signals import die_with_parent
from allranks.launch.inbox import SignalInbox
from allranks.launch.srun import end_srun
from allranks.launch.workers import kill_descendants
from allranks.model.errors import SetupError
from allranks.report.mask import HIDDEN
from allranks.report.text import print_error, printable
from allranks.state.truth.first_difference import FirstDifference, find_first
from allranks.state.truth.op_file import SETUP, RerunPlan, read_ops
from allranks.state.truth.parting import Parting, Record, find_parting
from allranks.state.truth.trace_file import PREFIXES, read_record

TICK_S = 0.1
WORDS = 12
"""Lines of a run's output that are shown if it fails."""
_OF_PLACE = ("ALLRANKS_BACKEND", "CUDA_VISIBLE", "GLOO_SOCKET", "NCCL_IB", "NCCL_SOCKET", "NVIDIA_", "TORCHELASTIC")
"""Of recorded variables, those that `allranks run` or this machine sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRun:
    """How one of the two runs was started, and is started again."""

    letter: str
    """A or B."""
    words: tuple[str, ...]
    """Arguments of its script, none of them hidden."""
    about: Mapping[str, Any]
    """What rank 0 recorded of its process."""
    record: Record
    checkpoint: Path | None
    """What it begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunOutcome:
    """What both runs have shown."""

    step: int | None
    """Step of `difference`."""
    difference: FirstDifference | None
    """None: no operation differs."""
    num_steps: int
    """How many steps were compared, what is before the first one not counted."""
    num_left_out: int
    """Operations that were not recorded, since a step had too many."""
    unrepeated: Mapping[str, Parting]
    """Runs that do not repeat their own record, and where not."""
    eager: tuple[str, ...]
    """Runs that had compiled code, which ran eager here."""
    at_end: Parting
    """Where the records of both runs part."""


class Rerun:
    """Both runs, while they run.

    Args:
        first: from which step on operations are compared.
        until: the step before which that ends.
        timeout_s: how long a run may take for its next step.
    """

    def __init__(self, runs: Sequence[StartedRun], *, num_ranks: int, first: int, until: int, timeout_s: float) -> None:
        self._runs, self._num_ranks, self._timeout_s = runs, num_ranks, timeout_s
        self._inbox = SignalInbox()
        self._scratch = Path(tempfile.mkdtemp(prefix="allranks-diff-"))
        self._plans = [
            RerunPlan(folder=str(self._scratch / run.letter.lower()), first=first, until=until) for run in runs
        ]
        self._processes = list[subprocess.Popen[bytes]]()
        self._inbox.kill_now = self._kill_now

    def watch(self, show: Callable[[str], None]) -> RerunOutcome:
        """Start both, and return what differs first; afterwards both have ended, and nothing of them is left.

        Args:
            show: takes what is being done now.
        Raises:
            SetupError: a run fails, or stands still.
            StoppedBySignal: somebody told this process to stop.
        """
        try:
            for run, plan in zip(self._runs, self._plans, strict=True):
                self._processes.append(self._start(run, plan))
            return self._compare(show)
        finally:
            for process in self._processes:
                if process.poll() is None:
                    process.terminate()
            for process in self._processes:
                end_srun(process)
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _kill_now(self) -> None:
        """End both runs at the second Ctrl-C; killed processes write nothing more, but need a moment to end."""
        kill_descendants()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _compare(self, show: Callable[[str], None]) -> RerunOutcome:
        plan = self._plans[0]
        other: tuple[int, FirstDifference] | None = None
        found: tuple[int, FirstDifference] | None = None
        num_steps = num_left_out = 0
        last = plan.until
        for step in range(plan.first, plan.until):
            files = [[own.file_of(step, rank) for rank in range(self._num_ranks)] for own in self._plans]
            self._await(lambda which: all(path.exists() for path in files[which]), step, show)  # noqa: B023
            if step >= last:
                break  # the rows of this step are written
            if found is None:
                read = [[read_ops(path) for path in own] for own in files]
                num_left_out += sum(left_out for own in read for _, left_out in own)
                num_steps += step != SETUP
                difference = find_first(*({rank: ops for rank, (ops, _) in enumerate(own)} for own in read))
                if difference is not None and difference.is_without_effect:
                    other = other or (step, difference)
                elif difference is not None:
                    found, last = (step, difference), self._find_next_row(step)
                    for own in self._plans:
                        own.found.touch()
            for path in (path for own in files for path in own):
                path.unlink()
        else:
            self._await(lambda which: self._processes[which].poll() == 0, plan.until, show)
        records = [read_record(own.checkpoints) for own in self._plans]
        at_end = find_parting(*records)
        partings = [(run.letter, find_parting(run.record, own)) for run, own in zip(self._runs, records, strict=True)]
        first = found or (other if at_end.until is not None else None)
        return RerunOutcome(
            step=first and first[0],
            difference=first and first[1],
            num_steps=num_steps,
            num_left_out=num_left_out,
            unrepeated={letter: own for letter, own in partings if own.until is not None},
            eager=tuple(run.letter for run in self._runs if run.about.get("is_compiled")),
            at_end=at_end,
        )

    def _find_next_row(self, step: int) -> int:
        """Return the step until which both runs go on after a difference: each then has repeated a row, or has not."""
        until = self._plans[0].until
        after = [[row.step for row in run.record[0] if step < row.step <= until] for run in self._runs]
        return max(min(own, default=until) for own in after)

    def _await(self, is_there: Callable[[int], bool], step: int, show: Callable[[str], None]) -> None:
        """Wait until something is there of both runs, given which of them."""
        seen, deadline_s = list[str](), time.monotonic() + self._timeout_s
        while not all(map(is_there, range(2))):
            self._inbox.check()
            at = [(find_regular(Path(own.folder) / "at", at_most=64) or b"-").decode() for own in self._plans]
            if at != seen:
                seen, deadline_s = at, time.monotonic() + self._timeout_s
            show(f"run A at step {at[0]}, run B at step {at[1]} of {self._plans[0].until}")
            for which, process in enumerate(self._processes):
                if (code := process.poll()) is not None and not is_there(which):
                    self._fail(which, f"ended with exit code {code} before step {max(step, 0)} was done")
            if time.monotonic() > deadline_s:
                which = 0 if not is_there(0) else 1
                self._fail(which, f"made no step for {self._timeout_s:g} s (--timeout), at step {at[which]}")
            time.sleep(TICK_S)

    def _fail(self, which: int, why: str) -> None:
        show = find_regular(Path(self._plans[which].folder) / "output", at_most=64 << 20) or b""
        for line in show.decode(errors="replace").splitlines()[-WORDS:]:
            print_error(printable(line))
        raise SetupError(f"diff --replay: run {self._runs[which].letter} {why}; the last lines of its output are above")

    def _start(self, run: StartedRun, plan: RerunPlan) -> subprocess.Popen[bytes]:
        plan.checkpoints.mkdir(parents=True)
        if run.checkpoint is not None:
            (plan.checkpoints / run.checkpoint.name).symlink_to(run.checkpoint.resolve())
        with (Path(plan.folder) / "output").open("wb") as output:
            return subprocess.Popen(
                command_of(run.about, run.words, num_ranks=self._num_ranks, log_dir=Path(plan.folder) / "runs"),
                cwd=run.about["directory"],
                env=environment_of(run.about, os.environ) | plan.to_environ(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process, which ends both
                preexec_fn=die_with_parent(signal.SIGTERM),
            )


def command_of(about: Mapping[str, Any], words: Sequence[str], *, num_ranks: int, log_dir: Path) -> list[str]:
    """Return the command that starts a run again."""
    command = [sys.executable, "-m", "allranks", "run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += [f"--log-dir={log_dir}", "--status=off", "--shutdown-timeout=3"]
    if "ALLRANKS_BACKEND_CHOSEN" in about["environment"]:
        command.append(f"--backend={about['environment']['ALLRANKS_BACKEND_CHOSEN']}")
    return [*command, *(["-m", about["module"]] if about["module"] else [about["script"]]), *words]


def environment_of(about: Mapping[str, Any], here: Mapping[str, str]) -> dict[str, str]:
    """Return this environment, with what the run had of all that changes what is computed.

    What its record hides has the value of this environment.

    >>> recorded = {"NCCL_ALGO": "Ring", "TORCH_KEY": "(hidden)", "GLOO_SOCKET_IFNAME": "eth1"}
    >>> about = {"threads": 2, "environment": recorded}
    >>> environment_of(about, {"TORCH_KEY": "k", "NCCL_PROTO": "LL", "ALLRANKS_CHECKPOINT_DIR": "/c"})
    {'TORCH_KEY': 'k', 'NCCL_ALGO': 'Ring', 'OMP_NUM_THREADS': '2'}
    """
    hidden = {name for name, value in about["environment"].items() if HIDDEN in str(value)}
    ours = {name: value for name, value in here.items() if not name.startswith(("ALLRANKS_CHECKPOINT", HIDDEN_VARIABLE))
            and (name in hidden or not name.startswith(PREFIXES) or name.startswith(_OF_PLACE))}  # fmt: skip
    own = {name: value for name, value in about["environment"].items()
           if not name.startswith(_OF_PLACE) and name not in hidden}  # fmt: skip
    return ours | own | {"OMP_NUM_THREADS": str(about["threads"])}


HIDDEN_VARIABLE = "ALLRANKS_HIDDEN_"
"""How the names of variables begin that hold the hidden arguments."""
