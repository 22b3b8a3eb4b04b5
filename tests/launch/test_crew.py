"""Do workers that are told to end get their whole grace, also from an agent that did not run meanwhile?"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.launch.crew import Crew
from allranks.launch.workers import Worker
from conftest import wait_until


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    """One worker that never ends by itself."""
    any_job: Any = None
    said: list[str] = []
    crew = Crew(
        job=any_job, command=[], run_dir=any_job, output=any_job, env={}, interface=None, store_fd=None, say=said.append
    )
    worker = Worker(0, 0, "n", tmp_path / "out", tmp_path / "err", tmp_path / "error")
    worker.start(["sleep", "300"], {"PATH": "/usr/bin:/bin"})
    crew.workers.append(worker)
    yield crew
    crew.close()
    if worker.end is None:
        worker.reap()


def lines_of(crew: Crew) -> list[str]:
    return crew.say.__self__  # type: ignore[attr-defined, no-any-return]


def is_killed(crew: Crew) -> bool:
    process = crew.workers[0].process
    assert process is not None
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_worker_that_outlives_the_signal_is_named_and_killed_after_its_grace(crew: Crew):
    begin_s = time.monotonic()
    crew.end(signal.SIGCONT, grace_s=3.0)  # which ends nobody
    for turn in range(1, 50):
        assert not crew.advance(begin_s + 0.06 * turn)
    assert lines_of(crew) == ["rank 0 has not ended after SIGCONT yet; SIGKILL in 2 s"]
    assert not is_killed(crew)
    for turn in range(50, 60):
        crew.advance(begin_s + 0.06 * turn)
    wait_until(lambda: is_killed(crew), "SIGKILL")


def test_time_in_which_the_agent_itself_did_not_run_is_not_the_workers(crew: Crew):
    begin_s = time.monotonic()
    crew.end(signal.SIGCONT, grace_s=3.0)
    assert not crew.advance(begin_s + 0.05)
    assert not crew.advance(begin_s + 3600.0)
    assert lines_of(crew) == []
    assert not is_killed(crew)
