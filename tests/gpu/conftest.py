"""The tests of a real GPU: skipped, with that word, where there is none; rehearsed on the CPU where run.py says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .job import Job, is_rehearsal
from .machine import why_no_gpu

HERE = Path(__file__).parent
why = functools.cache(why_no_gpu)
Note = Callable[[str, object], None]
StartJob = Callable[..., Job]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.path.is_relative_to(HERE):
        return
    if is_rehearsal():
        if item.get_closest_marker("rehearsable") is None:
            pytest.skip("a rehearsal on the CPU: this needs the GPU")
    elif why():
        pytest.skip(f"no NVIDIA GPU: {why()}")


@pytest.fixture
def note(record_property: Note) -> Note:
    """Write down something that was seen, also where the test then fails."""
    return record_property


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> StartJob:
    """Start a job in a folder of its own; it is ended with the test."""

    def start_job(script: str | Path, *arguments: str, name: str = "job", **options: Any) -> Job:
        job = Job(tmp_path / name, script, *arguments, **options)
        request.addfinalizer(job.close)
        return job

    return start_job
