"""Does `lab down` end the processes of its own lab, and no others? Without root: stand-ins for process 1 of a node."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allranks.lab.hosts import kill_hosts


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Path, str], subprocess.Popen[bytes]]]:
    """Start what looks like process 1 of a node: the same command line, and it sleeps."""
    script = tmp_path / "lab" / "init.py"
    script.parent.mkdir()
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    started: list[subprocess.Popen[bytes]] = []

    def start(lab: Path, node: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", str(script), str(lab), node]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def kill_and_reap(lab: Path, process: subprocess.Popen[bytes], names: list[str] | None = None) -> None:
    kill_hosts(lab, names)
    assert process.wait(100) == -9


def test_only_the_nodes_of_this_lab_are_killed(
    start: Callable[[Path, str], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    own, others = start(tmp_path / "one", "node01"), start(tmp_path / "two", "node01")
    kill_and_reap(tmp_path / "one", own)
    assert others.poll() is None


def test_only_the_named_nodes_are_killed(start: Callable[[Path, str], subprocess.Popen[bytes]], tmp_path: Path) -> None:
    dead, alive = start(tmp_path / "one", "node01"), start(tmp_path / "one", "node02")
    kill_and_reap(tmp_path / "one", dead, ["node01"])
    assert alive.poll() is None
