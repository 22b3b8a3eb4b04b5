"""Runs two trainings again, on this machine, and compares their operations while they record them.

    Rerun(runs, first=96, until=128, show=print).outcome()

Each run is a job of `allranks run` in a folder of its own below one scratch directory, and goes with it. They run at
once: a step is compared as soon as both have recorded it, and its files are deleted. After the first difference they go
on, and record no operations, up to a step of their records, which shows whether they repeat these. The files:
state/truth/op_file.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from allranks.files.regular import find_regular
from allranks.host.signals import die_with_parent
from allranks.launch.inbox import SignalInbox
from allranks.launch.srun import end_srun
from allranks.model.errors import SetupError, UsageError
from allranks.report.mask import HIDDEN
from allranks.report.text import print_error, printable
from allranks.state.saved.manifest import parse_final
from allranks.state.saved.parts import list_checkpoints
from allranks.state.truth.first_difference import FirstDifference, find_first
from allranks.state.truth.op_file import SETUP, RerunPlan, read_ops
from allranks.state.truth.parting import Parting, Record, find_parting, row_at
from allranks.state.truth.trace_file import PREFIXES, read_record

TICK_S, PROBE_S = 0.1, 120.0
WORDS = 12
"""Lines of a run's output that are shown if it fails."""
HIDDEN_VARIABLE = "ALLRANKS_HIDDEN_"
"""How the names of variables begin that hold the hidden arguments."""
_OF_PLACE = ("ALLRANKS_BACKEND", "CUDA_VISIBLE", "GLOO_SOCKET", "NCCL_IB", "NCCL_SOCKET", "NVIDIA_", "TORCHELASTIC")
"""Of recorded variables, those that `allranks run` or this machine sets."""
_PROBE = """
import json, torch
from allranks.state.truth.trace import describe_machine
names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print(json.dumps({**describe_machine(), "torch": str(torch.__version__), "gpus": names}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRun:
    """How one of the two runs was started, and is started again."""

    letter: str
    """A or B."""
    words: Sequence[str]
    """Arguments of its script, none of them hidden."""
    record: Record
    about: Mapping[str, Any]
    """What rank 0 recorded of its process."""
    checkpoint: Path | None
    """What it begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunOutcome:
    """What both runs have shown."""

    step: int | None = None
    """Step of `difference`."""
    difference: FirstDifference | None = None
    """None: no operation differs."""
    num_steps: int
    """How many steps were compared, what is before the first one not counted."""
    num_left_out: int = 0
    """Operations that were not recorded, since a step had too many."""
    unrepeated: Mapping[str, Parting]
    """Runs that do not repeat their own record, and where not."""
    at_end: Parting
    """Where the records of both runs part."""


# Before


def read_machine() -> dict[str, Any]:
    """Return torch, Python and hardware of a process here; torch is imported in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S, check=True
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as exc:
        raise SetupError(f"diff --replay: torch cannot be asked for its version and hardware: {exc}") from exc


def find_refusal(record: Record, step: int, here: Mapping[str, Any]) -> str | None:
    """Return why a run cannot be run again on this machine; None: it can.

    Args:
        step: at which rank 0 has a row: another process of the run may have written the others.
        here: what `read_machine` returned.
    """
    about = row_at(record[0], step).about
    if about.get("call"):
        return "its record is of a later track() in its script; only the first one can be run again"
    for name in ("torch", "python"):
        if about[name] != here[name]:
            return f"it had {name} {about[name]}, here is {here[name]}"
    ranks = [rank for rank in record if rank < about["world_size"]]
    devices, own = (Counter(row_at(record[rank], step).about["hardware"] for rank in ranks), Counter(here["gpus"]))
    if any(name != here["hardware"] for name in devices - own):
        told = [", ".join(f"{num} x {name}" for name, num in some.items()) for some in (devices, own)]
        return f"it ran on {told[0]}, here is {told[1] or here['hardware']}"
    script = Path(about["script"])
    if not script.is_file():
        return f"its script {script} is not there"
    if about["text"] != hashlib.blake2b(script.read_bytes(), digest_size=16).hexdigest():
        return f"its script {script} was edited since"
    if not Path(about["directory"]).is_dir():
        return f"its working directory {about['directory']} is not there"
    return None


def find_start(places: Sequence[Path], since: int | None) -> list[Path]:
    """Return the newest checkpoints of one step that both runs have, at `since` or before; empty: there are none.

    Args:
        places: their directories of checkpoints.
    """
    by_step = [{at[0]: path for path in reversed(list_checkpoints(place))
                if (at := parse_final(path.name)) and since is not None and at[0] <= since}
               for place in places]  # fmt: skip
    common = by_step[0].keys() & by_step[1].keys()
    return [own[max(common)] for own in by_step] if common else []


def restore_words(letter: str, arguments: str, env: Mapping[str, str]) -> list[str]:
    """Return the arguments of a run with what is hidden in its record, which variables have.

    >>> restore_words("A", "--lr 1 --hf-token '(hidden)'", {"ALLRANKS_HIDDEN_A1": "hf_1"})
    ['--lr', '1', '--hf-token', 'hf_1']

    Raises:
        UsageError: a value is missing.
    """
    words, numbers = shlex.split(arguments), count(1)

    def restore(place: int) -> str:
        name = f"{HIDDEN_VARIABLE}{letter}{next(numbers)}"
        if name not in env:
            what = " ".join(words[max(0, place - 1) : place + 1])
            raise UsageError(f"diff --replay: run {letter} had a hidden argument, {what}: set {name} to its value")
        return env[name]

    return [re.sub(re.escape(HIDDEN), lambda _: restore(place), word) for place, word in enumerate(words)]  # noqa: B023


def command_of(about: Mapping[str, Any], words: Sequence[str], *, log_dir: Path) -> list[str]:
    """Return the command that starts a run again."""
    command = [sys.executable, "-m", "allranks", "run", "--standalone", f"--nproc-per-node={about['world_size']}"]
    command += [f"--log-dir={log_dir}", "--status=off", "--shutdown-timeout=3"]
    if backend := about["environment"].get("ALLRANKS_BACKEND_CHOSEN"):
        command.append(f"--backend={backend}")
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


# Both runs


class Rerun:
    """Both runs, while they run.

    Args:
        first: from which step on operations are compared.
        until: the step before which that ends; both run up to it.
        show: takes what is being done now.
    """

    def __init__(self, runs: Sequence[StartedRun], *, first: int, until: int, show: Callable[[str], None]) -> None:
        self._runs, self._steps, self._show = runs, range(first, until), show
        self._num_ranks = runs[0].about["world_size"]
        self._inbox = SignalInbox()
        self._plans = list[RerunPlan]()
        self._processes = list[subprocess.Popen[bytes]]()

    def outcome(self) -> RerunOutcome:
        """Run both, and return what differs first; afterwards both have ended, and nothing of them is left.

        Raises:
            SetupError: a run fails, or waits for the other one for too long.
            StoppedBySignal: somebody told this process to stop.
        """
        with contextlib.ExitStack() as left:
            scratch = tempfile.TemporaryDirectory(prefix="allranks-diff-", ignore_cleanup_errors=True)
            folder = left.enter_context(scratch)
            for run in self._runs:
                plan = RerunPlan(folder=f"{folder}/{run.letter}", first=self._steps.start, until=self._steps.stop)
                self._plans.append(plan)
                self._processes.append(_start(run, plan))
                left.callback(end_srun, self._processes[-1])
            return self._compare()

    def _compare(self) -> RerunOutcome:
        found: dict[bool, tuple[int, FirstDifference]] = {}
        """The first difference by whether it is without effect, and its step."""
        num_steps = num_left_out = 0
        for step in self._steps:
            files = [[plan.file_of(step, rank) for rank in range(self._num_ranks)] for plan in self._plans]
            self._await(lambda which: all(path.exists() for path in files[which]), step)  # noqa: B023
            if False not in found:
                read = [[read_ops(path) for path in own] for own in files]
                num_left_out += sum(left_out for own in read for _, left_out in own)
                num_steps += step != SETUP
                difference = find_first(*({rank: ops for rank, (ops, _) in enumerate(own)} for own in read))
                if difference is not None:
                    found.setdefault(difference.is_without_effect, (step, difference))
                if False in found:
                    for plan in self._plans:
                        plan.found.touch()
            for path in (path for own in files for path in own):
                path.unlink()
        self._await(lambda which: self._processes[which].poll() == 0, self._steps.stop)
        records = [read_record(plan.checkpoints) for plan in self._plans]
        at_end = find_parting(*records)
        step_of, first = found.get(False) or (at_end.until is not None and found.get(True)) or (None, None)
        own = {run.letter: find_parting(run.record, record) for run, record in zip(self._runs, records, strict=True)}
        return RerunOutcome(
            step=step_of,
            difference=first,
            num_steps=num_steps,
            num_left_out=num_left_out,
            unrepeated={letter: parting for letter, parting in own.items() if parting.until is not None},
            at_end=at_end,
        )

    def _await(self, is_there: Callable[[int], bool], step: int) -> None:
        """Wait until something is there of both runs, given which of them."""
        while lacking := [which for which in range(2) if not is_there(which)]:
            self._inbox.check()
            at = [(find_regular(Path(plan.folder) / "at", at_most=64) or b"-").decode() for plan in self._plans]
            self._show(f"run A at step {at[0]}, run B at step {at[1]} of {self._steps.stop}")
            for which in lacking:
                code = self._processes[which].poll()
                if code is not None and not is_there(which):
                    self._fail(which, f"ended with exit code {code} before step {max(step, 0)} was done")
            time.sleep(TICK_S)

    def _fail(self, which: int, why: str) -> None:
        said = find_regular(Path(self._plans[which].folder) / "output", at_most=64 << 20) or b""
        for line in said.decode(errors="replace").splitlines()[-WORDS:]:
            print_error(printable(line))
        raise SetupError(f"diff --replay: run {self._runs[which].letter} {why}; the last lines of its output are above")


def _start(run: StartedRun, plan: RerunPlan) -> subprocess.Popen[bytes]:
    plan.checkpoints.mkdir(parents=True)
    if run.checkpoint is not None:
        (plan.checkpoints / run.checkpoint.name).symlink_to(run.checkpoint.resolve())
    with (Path(plan.folder) / "output").open("wb") as output:
        return subprocess.Popen(
            command_of(run.about, run.words, log_dir=Path(plan.folder) / "runs"),
            cwd=run.about["directory"],
            env=environment_of(run.about, os.environ) | plan.to_environ(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process, which ends both
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
