"""A real lab for the tests that need one: brought up once, always taken down."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from allranks.lab.lab import Lab, check_machine
from allranks.model.errors import SetupError
from conftest import clean_env

SIX_NODE = Path(__file__).parents[2] / "examples" / "six-node" / "cluster.toml"
COMMAND_S = 60


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("lab"):
        try:
            check_machine()
        except SetupError as exc:
            if os.environ.get("ALLRANKS_REQUIRE_LAB") == "1":
                pytest.fail(str(exc))
            pytest.skip(str(exc))


def lab_command(*arguments: str | Path) -> Sequence[str]:
    """The command line of `allranks lab`."""
    return [sys.executable, "-m", "allranks", "lab", *map(str, arguments)]


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

    def on(self, node: str, *command: str) -> str:
        return self.run("exec", node, "--", *command).stdout


Make = Callable[[str], TestLab]


def unique(name: str) -> str:
    return f"test-{name}-{os.getpid()}"


@pytest.fixture(scope="session")
def six_nodes() -> Iterator[TestLab]:
    """The six-node cluster, up."""
    lab = TestLab(unique("six"))
    try:
        lab.run("up", "--cluster", SIX_NODE)
        yield lab
    finally:
        lab.run("down")


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
