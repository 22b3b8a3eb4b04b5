"""Trainers to kill, writers to find, checkpoints to damage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore


class Zygote:
    """Starts trainers; see zygote.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._answers, self._orders = self._process.stdout, self._process.stdin
        assert self._answers.readline() == "ready\n"
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))

    def start(self, directory: Path, **told: Any) -> int:
        """Return the pid of a new trainer that saves into `directory`."""
        order: dict[str, Any] = {
            "directory": str(directory),
            "progress": str(progress_of(directory, told.get("rank", 0))),
            "port": self.store.port,
            "rank": 0,
            "world_size": 1,
            "first": 1,
            "steps": 1000,
            "size": 20_000,
            "pause_s": 0.0,
            "keep": 3,
            "stays": False,
        }
        self._orders.write(json.dumps(order | told) + "\n")
        self._orders.flush()
        return int(self._answers.readline())

    def close(self) -> None:
        self._process.kill()  # nothing is left for it to do; torch's threads may take long to end by themselves
        self._process.wait(60)
        self._orders.close()
        self._answers.close()


def progress_of(directory: Path, rank: int) -> Path:
    """Where a trainer writes the last step that it has handed over."""
    return directory.with_name(f"{directory.name}.progress.{rank}")


def handed_over(directory: Path, rank: int = 0) -> int:
    """The last step that a trainer has handed over; 0: none."""
    path = progress_of(directory, rank)
    return int(path.read_text()) if path.exists() else 0


def writers_of(directory: Path) -> list[int]:
    """Living writers that write into this directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_text()
            if "allranks.state.saved.writer" in command and f'"{directory}"' in command:
                found.append(int(path.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def kill(*pids: int) -> None:
    """SIGKILL, whether they live or not."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()
