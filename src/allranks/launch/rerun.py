"""Runs two trainings again, on this machine, twice: to find the step in which they part, and the operation.

    run_again(runs, range(96, 128), show=print)

Both runs are jobs of `allranks run` at the same time, in folders of their own below one scratch directory, and go with
it. First each of their steps has a row in their records: these are compared with each other, and with the records of
the runs, which they should repeat. Then they run again up to the step in which they part, and record its operations.
The files: state/truth/op_file.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
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
from allranks.host.programs import OWN_COMMAND
from allranks.host.signals import die_with_parent
from allranks.launch.inbox import SignalInbox
from allranks.launch.srun import end_srun
from allranks.model.errors import SetupError, UsageError
from allranks.report.mask import HIDDEN
from allranks.state.saved.manifest import parse_final
from allranks.state.saved.parts import list_checkpoints
from allranks.state.truth.first_difference import FirstDifference, find_first
from allranks.state.truth.op_file import Op, RerunPlan
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
machine = describe_machine()  # first: it names the GPU once CUDA is initialized
names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print(json.dumps({**machine, "torch": str(torch.__version__), "gpus": names}))
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

    parting: Parting
    """Where their records part, of which each step has a row."""
    unrepeated: Mapping[str, Parting]
    """Runs that do not repeat their own record, and where not."""
    difference: FirstDifference | None = None
    """None: no operation differs."""


# Before


def read_machine() -> dict[str, Any]:
    """Return torch, Python and hardware of a process here; torch is imported in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S, check=True
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
    if any(name in here["gpus"] or name != here["hardware"] for name in devices - own):
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
    """Return the newest checkpoints of one step in both places, at `since` or before; empty: there are none."""
    by_step = [{at[0]: path for path in reversed(list_checkpoints(place))
                if (at := parse_final(path.name)) and since is not None and at[0] <= since}
               for place in places]  # fmt: skip
    common = by_step[0].keys() & by_step[1].keys()
    return [own[max(common)] for own in by_step] if common else []


def restore_words(
    letter: str, arguments: str, env: Mapping[str, str], ask: Callable[[str], str] | None = None
) -> list[str]:
    """Return the arguments of a run with what is hidden in its record, which variables have, or a person, if any.

    >>> restore_words("A", "--lr 1 --hf-token '(hidden)'", {"ALLRANKS_HIDDEN_A1": "hf_1"})
    ['--lr', '1', '--hf-token', 'hf_1']

    Raises:
        UsageError: a value is missing.
    """
    words, numbers = shlex.split(arguments), count(1)

    def restore(place: int) -> str:
        name = f"{HIDDEN_VARIABLE}{letter}{next(numbers)}"
        what = " ".join(words[max(0, place - 1) : place + 1])
        if name in env:
            return env[name]
        if ask is None:
            raise UsageError(f"diff --replay: run {letter} had a hidden argument, {what}: set {name} to its value")
        return ask(f"{what} of run {letter}")

    return [re.sub(re.escape(HIDDEN), lambda _: restore(place), word) for place, word in enumerate(words)]  # noqa: B023


def command_of(about: Mapping[str, Any], words: Sequence[str], *, log_dir: Path) -> list[str]:
    """Return the command that starts a run again."""
    command = [*OWN_COMMAND, "run", "--standalone", f"--nproc-per-node={about['world_size']}"]
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


def run_again(runs: Sequence[StartedRun], steps: range, show: Callable[[str], None]) -> RerunOutcome:
    """Run both, and return what differs first in these steps; afterwards all have ended, and nothing of them is left.

    Raises:
        SetupError: a run fails.
        StoppedBySignal: somebody told this process to stop.
    """
    inbox, num_ranks = SignalInbox(), runs[0].about["world_size"]
    with tempfile.TemporaryDirectory(prefix="allranks-diff-", ignore_cleanup_errors=True) as folder:
        plans = _run_both(runs, f"{folder}/rows", steps, inbox, show)
        records = [read_record(plan.checkpoints) for plan in plans]
        parting = find_parting(*records)
        own = {run.letter: find_parting(run.record, record) for run, record in zip(runs, records, strict=True)}
        unrepeated = {letter: found for letter, found in own.items() if found.until is not None}
        if parting.until is None:
            return RerunOutcome(parting=parting, unrepeated=unrepeated)
        plans = _run_both(runs, f"{folder}/ops", parting.steps, inbox, show, are_ops_recorded=True)

        def ops_of(plan: RerunPlan, rank: int) -> list[Op]:
            return [op for step in parting.steps for op in plan.read(step, rank)]

        difference = find_first((rank, ops_of(plans[0], rank), ops_of(plans[1], rank)) for rank in range(num_ranks))
    return RerunOutcome(parting=parting, unrepeated=unrepeated, difference=difference)


def _run_both(
    runs: Sequence[StartedRun],
    folder: str,
    steps: range,
    inbox: SignalInbox,
    show: Callable[[str], None],
    *,
    are_ops_recorded: bool = False,
) -> list[RerunPlan]:
    told: Any = {"first": steps.start, "until": steps.stop, "are_ops_recorded": are_ops_recorded}
    plans = [RerunPlan(folder=f"{folder}/{run.letter}", **told) for run in runs]
    with contextlib.ExitStack() as left:
        processes = list[subprocess.Popen[bytes]]()

        def leave_nothing() -> None:
            for process in processes:
                process.kill()
            shutil.rmtree(Path(folder).parent, ignore_errors=True)

        inbox.kill_now = leave_nothing
        for run, plan in zip(runs, plans, strict=True):
            processes.append(_start(run, plan))
            left.callback(end_srun, processes[-1])
        codes: list[int | None] = [None]
        while None in codes:
            inbox.check()
            codes = [process.poll() for process in processes]
            at = [(find_regular(Path(plan.folder) / "at", at_most=64) or b"-").decode() for plan in plans]
            show(f"run A at step {at[0]}, run B at step {at[1]} of {steps.stop}")
            for run, plan, code, step in zip(runs, plans, codes, at, strict=True):
                if code or (code == 0 and step != str(plan.until)):
                    said = find_regular(Path(plan.folder) / "output", at_most=64 << 20) or b""
                    raise SetupError(
                        f"diff --replay: run {run.letter} ended with exit code {code} before step {plan.until}; the "
                        "last lines of its output are below",
                        more=said.decode(errors="replace").splitlines()[-WORDS:],
                    )
            time.sleep(TICK_S)
    return plans


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
