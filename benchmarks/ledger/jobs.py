"""How are the jobs of these measurements run, and what do they leave? On this machine, and in a lab of six nodes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.lab import hosts
from allranks.lab.lab import Lab
from allranks.model.ledger import Ledger
from allranks.report.readback import parse_ledger

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
CLUSTER = ROOT / "examples" / "six-node" / "cluster.toml"
JOB_S = 150.0
"""No job of these measurements takes longer, the import of torch by six ranks on two busy cores included."""


class MeasurementError(Exception):
    """A job did not run: nothing was measured."""


@dataclass(frozen=True)
class Check:
    """One figure of allranks beside the truth."""

    what: str
    truth: float
    told: float
    limit: float
    """By how much they may differ; both in `unit`."""
    unit: str = "s"
    owed_to: str = ""
    """Whom the truth blames."""
    named: str = ""
    """Whom allranks blames."""
    note: str = ""
    at_most: bool = False
    """`told` must only not exceed `limit`; there is no truth."""

    @property
    def is_right(self) -> bool:
        """Whether it is close enough, and blames the right one."""
        is_close = self.told <= self.limit if self.at_most else abs(self.told - self.truth) <= self.limit
        return is_close and self.owed_to == self.named


@dataclass
class Part:
    """What one measurement found, for the terminal and for the page."""

    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, check: Check) -> None:
        """Take in a check, and print it."""
        self.checks.append(check)
        print(show(check), flush=True)


def show(check: Check) -> str:
    """Return a check as a line."""
    mark = "ok   " if check.is_right else "WRONG"
    if check.at_most:
        told = f"{check.told:.3f} of at most {check.limit:.3f} {check.unit}"
    else:
        told = f"truth {check.truth:.3f}, ledger {check.told:.3f} {check.unit}, may differ by {check.limit:.3f}"
    whom = f"; {check.named or 'nobody'} named" + (f" of {check.owed_to}" if check.owed_to != check.named else "")
    return f"{mark} {check.what:30} {told}{whom if check.owed_to or check.named else ''}" + (
        f"   ({check.note})" if check.note else ""
    )


def close_to(truth: float, part: float = 0.05, least: float = 0.05) -> float:
    """Return the difference that is allowed: 5 % or 50 ms, whichever is more."""
    return max(least, part * truth)


def clean_env(**more: str) -> dict[str, str]:
    """Return the environment without anything that an outer job has left."""
    foreign = ("SLURM_", "ALLRANKS_", "TORCHELASTIC_", "PET_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | more


def read_ledger(runs: Path) -> Ledger:
    """Return the account that the only job in this directory has left."""
    paths = [path for path in runs.glob("*/goodput.json") if not path.parent.is_symlink()]
    if not paths or (ledger := parse_ledger(paths[-1].read_bytes())) is None:
        raise MeasurementError(f"no account in {runs}")
    return ledger


def run_here(directory: Path, program: str, *arguments: str, ranks: int, flags: Sequence[str] = ()) -> Ledger:
    """Run a program of these measurements on this machine, and return its account."""
    directory.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "allranks", "run", "--nproc-per-node", str(ranks), "--master-port", "0"),
        *("--ignore", "AR011", "--log-dir", str(directory / "runs"), *flags),
        *(str(PROGRAMS / program), "--dir", str(directory), *arguments),
    ]
    done = subprocess.run(
        command, cwd=directory, env=clean_env(), capture_output=True, text=True, timeout=JOB_S, check=False
    )
    if done.returncode:
        raise MeasurementError(f"{program}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return read_ledger(directory / "runs")


# The lab


@dataclass(frozen=True)
class SixNodes:
    """A lab that is up."""

    name: str

    @property
    def lab(self) -> Lab:
        return Lab(self.name)

    @property
    def controller(self) -> str:
        return self.lab.controller().name

    def on(self, node: str, *command: str, must_work: bool = True) -> str:
        """Run a command in the namespaces of a node, and return what it printed."""
        init = hosts.find_inits(self.lab.dir)[node]
        return hosts.run_in(init, command, must_work=must_work).stdout

    def start(self, log: Path, *command: str) -> subprocess.Popen[bytes]:
        """Start a command on the first node, in a session of its own."""
        with log.open("wb") as file:
            return subprocess.Popen(
                [*_LAB, "exec", "--name", self.name, self.controller, "--", *command],
                cwd=log.parent, env=clean_env(), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def run(self, log: Path, *command: str) -> None:
        """Run one to its end.

        Raises:
            MeasurementError: it failed.
        """
        process = self.start(log, *command)
        try:
            code = process.wait(JOB_S)
        finally:
            self.clear(process)
        if code:
            raise MeasurementError(f"{' '.join(command)}: exit code {code}\n{log.read_text()[-4000:]}")

    def clear(self, process: subprocess.Popen[bytes] | None = None) -> None:
        """End all jobs."""
        if process is not None and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for _ in range(100):
            if not (jobs := self.on(self.controller, "squeue", "--noheader", "--format=%i", must_work=False).split()):
                return
            self.on(self.controller, "scancel", *jobs, must_work=False)
            time.sleep(0.2)


_LAB = (sys.executable, "-m", "allranks", "lab")


@contextlib.contextmanager
def six_nodes(name: str) -> Iterator[SixNodes]:
    """Bring a lab of six nodes up, and down again."""
    try:
        up = subprocess.run([*_LAB, "up", "--name", name, "--cluster", str(CLUSTER)], check=False,
                            timeout=120, capture_output=True, text=True)  # fmt: skip
        if up.returncode:
            raise MeasurementError(f"allranks lab up: {up.stderr}")
        yield SixNodes(name)
    finally:
        subprocess.run([*_LAB, "down", "--name", name], check=False, timeout=120, capture_output=True)


@contextlib.contextmanager
def scratch(keep: Path | None) -> Iterator[Path]:
    """Yield a directory that all nodes of a lab see."""
    with contextlib.ExitStack() as left:
        directory = keep or Path(left.enter_context(tempfile.TemporaryDirectory(prefix="ledger-", dir="/var/tmp")))
        directory.mkdir(parents=True, exist_ok=True)
        yield directory.absolute()


def wait_for(is_there: Callable[[], bool], within_s: float, what: str, every_s: float = 0.1) -> None:
    """Wait until something is so.

    Raises:
        MeasurementError: it was not in time.
    """
    until_s = time.monotonic() + within_s
    while not is_there():
        if time.monotonic() > until_s:
            raise MeasurementError(f"not within {within_s:.0f} s: {what}")
        time.sleep(every_s)


def read_json_lines(path: Path) -> list[Mapping[str, Any]]:
    """Return the whole lines of a file that may still grow; none if it is not there."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
