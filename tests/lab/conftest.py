"""A real lab for the tests that need one: brought up once, whole before and after each test, always taken down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from allranks.lab.hosts import run_in
from allranks.lab.lab import Lab, check_machine
from allranks.model.errors import AllranksError, SetupError
from conftest import clean_env

SIX_NODE = Path(__file__).parents[2] / "examples" / "six-node" / "cluster.toml"
COMMAND_S = 150
RELEASE_FLAGS = ("--slurm", os.environ["TEST_SLURM"]) if os.environ.get("TEST_SLURM") else ()
"""TEST_SLURM=24.11: the tests run in labs with that release of SLURM; `make slurm-versions` sets it."""
IDLE_S = 120.0
"""Until the queue is empty: SLURM gives a dead node up after 15 s, and so clears jobs away that were on it."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("lab"):
        try:
            check_machine()
        except SetupError as exc:
            pytest.skip(str(exc))


def lab_command(*arguments: str | Path) -> Sequence[str]:
    """The command line of `allranks lab`."""
    return [sys.executable, "-m", "allranks", "lab", *map(str, arguments)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test that failed in the six-node lab left in it stands in its report."""
    report = yield
    lab = getattr(item, "funcargs", {}).get("six_nodes")
    if report.failed and isinstance(lab, TestLab):
        report.sections.append(("the lab", lab.describe()))
    return report


@dataclass(frozen=True)
class TestLab:
    """A lab under test, used as a user does: through the command."""

    __test__ = False
    name: str

    @property
    def lab(self) -> Lab:
        return Lab(self.name)

    def start(self, verb: str, *arguments: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            lab_command(verb, "--name", self.name, *arguments),
            env=clean_env(os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, verb: str, *arguments: str | Path, must_work: bool = True, stdin: str = "", timeout_s: float = COMMAND_S
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            lab_command(verb, "--name", self.name, *arguments),
            env=clean_env(os.environ),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not must_work or done.returncode == 0, done.stderr
        return done

    def drill_running(self, names: Sequence[str], work_dir: Path) -> tuple[dict[str, list[str]], str]:
        """Drill running jobs; returns what was wrong, by fault, and what was printed.

        How long it took is `make drills`' to judge: here other tests and other machines' noise are in it.
        """
        results = work_dir / "drills.json"
        done = self.run(
            "drill", "--running", *names, "--seed", "7", "--work-dir", work_dir, "--json", results,
            must_work=False, timeout_s=850,
        )  # fmt: skip
        assert results.exists(), done.stdout + done.stderr
        drilled = json.loads(results.read_text())
        return {
            each["fault"]: [line for line in each["wrong"] if " took " not in line] for each in drilled
        }, done.stdout

    def on(self, node: str, *command: str) -> str:
        return self.run("exec", node, "--", *command).stdout

    def do(self, node: str, *command: str) -> subprocess.CompletedProcess[str]:
        """A command on a node, whatever becomes of it; for polls, since it starts no `allranks lab exec`."""
        return run_in(self.lab.find_init(node), command, must_work=False)

    def ask(self, *command: str) -> str:
        """What a command of SLURM says on the first node."""
        return self.do("master-node", *command).stdout

    def is_idle(self) -> bool:
        states = self.ask("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split()
        return states == ["idle"] * 6

    def describe(self) -> str:
        """What SLURM says, and the ends of its logs; of a lab that is down, the logs."""
        try:
            parts = [self.ask(*command) for command in (("sinfo", "-N", "-l"), ("sinfo", "-R"), ("squeue", "--all"))]
        except AllranksError as exc:
            parts = [str(exc)]
        logs = [self.lab.dir / "slurmctld.log", *sorted(self.lab.dir.glob("nodes/*/slurmd.log"))]
        for log in logs:
            parts.append(f"{log}:\n" + "".join(log.read_text(errors="replace").splitlines(keepends=True)[-30:]))
        return "\n".join(parts)


Make = Callable[[str], TestLab]


def unique(name: str) -> str:
    return f"test-{name}-{os.getpid()}"


@pytest.fixture(scope="session")
def standing() -> Iterator[TestLab]:
    """The six-node cluster, up as long as there are tests."""
    lab = TestLab(unique("six"))
    try:
        lab.run("up", "--cluster", SIX_NODE, *RELEASE_FLAGS)
        yield lab
    finally:
        lab.run("down")


@pytest.fixture
def six_nodes(standing: TestLab) -> Iterator[TestLab]:
    """The six-node cluster, whole and with an empty queue: a test that leaves jobs fails itself, not the next one."""
    if not standing.is_idle():  # a node was killed, or did not answer in time on a busy machine
        standing.run("up", "--cluster", SIX_NODE, *RELEASE_FLAGS)
    yield standing
    end_s = time.monotonic() + IDLE_S
    while standing.ask("squeue", "--noheader", "--all"):
        if time.monotonic() > end_s:
            pytest.fail(f"jobs are left {IDLE_S:.0f} s after the test:\n{standing.describe()}")
        time.sleep(0.2)


@pytest.fixture
def make_lab() -> Iterator[Make]:
    """Name a lab that is not up yet; it is down after the test."""
    made: list[TestLab] = []

    def make(name: str) -> TestLab:
        made.append(TestLab(unique(name)))
        return made[-1]

    yield make
    for lab in made:
        lab.run("down")
