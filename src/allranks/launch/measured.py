"""How long does a script compute in a step? `allranks run` starts it with join/measure.py, which ends it.

    measured = measure_script(["train.py", "--epochs", "3"], place=None, ...)

In an allocation, srun starts one agent per node, as a batch script of `allranks submit` does; else it is this machine.
The run has a directory of its own below the runs, which goes again once the measurement has been read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from allranks.comm.advise import StepProfile
from allranks.files.regular import find_regular
from allranks.host.programs import OWN_COMMAND
from allranks.host.signals import die_with_parent
from allranks.join import measure
from allranks.launch.check.where import SrunNodes
from allranks.launch.inbox import SignalInbox
from allranks.launch.srun import end_srun, step_env
from allranks.model.errors import AllranksError, Exit, StoppedBySignal, UsageError
from allranks.model.foreign import Unreadable, decode_json
from allranks.report.text import count_of, print_error, printable, say

MAX_BYTES = 8 << 20
"""Of a measurement: 100,000 parameters need less than 2 MB."""
TICK_S = 0.2
WORDS = 12
"""Lines of the run's report that are shown if it fails."""


class ScriptError(AllranksError):
    """The script could not be measured."""

    exit_code = Exit.USER_CODE


class Module(msgspec.Struct, frozen=True, kw_only=True):
    """One DistributedDataParallel, as join/measure.py tells of it; times are medians in seconds."""

    tensor_bytes: tuple[int, ...]
    element_bytes: int
    low_rank_bytes: int
    has_vectors: bool = True
    bucket_bytes: tuple[int, ...]
    step_s: float
    forward_s: float
    backward_s: float
    comm_s: float
    overlap_s: float
    steps: int
    ranks: int
    hook: str = ""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What a script did."""

    modules: tuple[Module, ...]
    num_modules: int
    optimizer_steps: int

    @property
    def step_s(self) -> float:
        """Of one whole step, with what it waited for the network."""
        return max(module.step_s for module in self.modules)

    def to_step(self) -> StepProfile:
        """Return one step without the network. Several modules count as one: their passes follow each other."""
        forward_s = sum(module.forward_s for module in self.modules)
        backward_s = sum(module.backward_s for module in self.modules)
        waited_s = sum(max(0.0, module.comm_s - module.overlap_s) for module in self.modules)
        return StepProfile(
            tensor_bytes=tuple(size for module in self.modules for size in module.tensor_bytes),
            forward_s=forward_s,
            backward_s=backward_s,
            other_s=max(0.0, self.step_s - forward_s - backward_s - waited_s),
            element_bytes=self.modules[0].element_bytes,
            low_rank_bytes=sum(module.low_rank_bytes for module in self.modules),
            has_vectors=any(module.has_vectors for module in self.modules),
            bucket_bytes=tuple(size for module in self.modules for size in module.bucket_bytes),
        )


def measure_script(
    words: Sequence[str],
    *,
    place: SrunNodes | None,
    flags: Sequence[str],
    log_dir: Path,
    env: Mapping[str, str],
    limit_s: float,
) -> Measurement:
    """Run a script until its steps are measured.

    Args:
        words: the script and its arguments.
        place: nodes of the allocation that this is in; None: this machine.
        flags: of `allranks run`.
        limit_s: how long it may take.
    Raises:
        AllranksError: there is nothing to measure, in one line; if the run failed, its report has been printed.
    """
    script = words[0]
    if not os.path.isfile(script):  # noqa: PTH113  (never raises)
        raise UsageError(f"advise: --measure {script}: no such script; expected a Python file and its arguments")
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        here = Path(tempfile.mkdtemp(prefix="advise-", dir=log_dir)).absolute()
    except OSError as exc:
        raise UsageError(f"advise: {log_dir}: {exc.strerror}; --log-dir names another directory") from exc
    out = here / "measured.json"
    command = [*OWN_COMMAND, "run", "--log-dir", str(here), "--redirects=3"]
    command += ["--shutdown-timeout=3", *flags]
    command += [str(Path(measure.__file__)), str(out), *words]
    if place is not None:
        command, env = [*_srun(place), *command], step_env(env)
    say(f"measuring {script}: its first {measure.SKIPPED + measure.STEPS + 2} steps, then it is ended")
    try:
        status = _run(command, env, here / "report", limit_s=limit_s)
    except StoppedBySignal:
        shutil.rmtree(here, ignore_errors=True)
        raise
    found = read_measurement(out)
    if found is None and status is None:
        raise ScriptError(f"advise: {script}: not measured within {limit_s:g} s (--timeout); its output is in {here}")
    if found is None:
        for line in (here / "report").read_text(errors="replace").splitlines()[-WORDS:]:
            print_error(printable(line))
        why = f"it ended with exit code {status} before its steps were measured"
        raise ScriptError(f"advise: {script}: {why}; its output is in {here}")
    shutil.rmtree(here, ignore_errors=True)
    if found.modules:
        return found
    if found.num_modules:
        why = f"its DistributedDataParallel made too few steps; {measure.SKIPPED + 3} are needed at least"
    else:
        why = f"it made no DistributedDataParallel in {count_of(found.optimizer_steps, 'optimizer step')}"
    raise UsageError(f"advise: {script}: {why}; without a measurement, give --params and --step-ms")


def read_measurement(path: Path) -> Measurement | None:
    """Return what join/measure.py wrote; None where it wrote nothing."""
    data = find_regular(path, at_most=MAX_BYTES)
    if data is None:
        return None
    try:
        return decode_json(data, Measurement)
    except Unreadable as exc:
        raise AllranksError(f"advise: {path}: not a measurement ({exc})") from exc


def _srun(place: SrunNodes) -> list[str]:
    return [
        *("srun", f"--jobid={place.job_id}", "--overlap", "--mem=0", f"--nodes={place.num_nodes}"),
        *([f"--nodelist={','.join(place.pinned)}"] if place.pinned else []),
        *(f"--ntasks={place.num_nodes}", "--ntasks-per-node=1", "--mpi=none", "--input=none", "--export=ALL"),
        *("--kill-on-bad-exit=0", "--wait=0"),
    ]


def _run(command: Sequence[str], env: Mapping[str, str], report: Path, *, limit_s: float) -> int | None:
    """Run it to its end, and return the exit code; None if it took too long."""
    inbox = SignalInbox()
    with report.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process, which ends the run in order
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
        end_s = time.monotonic() + limit_s
        try:
            while time.monotonic() < end_s:
                inbox.check()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(TICK_S)
            return None
        finally:
            end_srun(process)
