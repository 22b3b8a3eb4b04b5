"""A job's metrics as a file: whole, removed at the end, and no cost to the job where it cannot be written."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from allranks.launch.lead.metrics_file import MetricsFile
from allranks.model.job_status import JobStatus
from allranks.model.ledger import Ledger
from conftest import HANG_S

STATUS = JobStatus(
    job="47/11",
    written_s=1100.0,
    started_s=1000.0,
    phase="running",
    ledger=Ledger(begun_s=0.0, until_s=1.0, rank_s=1.0, seconds={"step": 1.0}, steps=7, is_steps_seen=True),
)
NAME = "allranks_47_11.prom"


def offer(file: MetricsFile, status: JobStatus, *, now_s: float) -> None:
    """Offer a status, and wait until it is written, where it is."""
    if (thread := file.offer(status, now_s=now_s)) is not None:
        thread.join(HANG_S)


def with_steps(steps: int) -> JobStatus:
    assert STATUS.ledger is not None
    return msgspec.structs.replace(STATUS, ledger=msgspec.structs.replace(STATUS.ledger, steps=steps))


def test_a_file_is_written_every_ten_seconds_and_removed_at_the_end(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    said: list[str] = []
    file = MetricsFile(tmp_path, job="47/11", say=said.append)
    seen = []
    for now_s, steps in ((5.0, 7), (14.0, 8), (15.0, 9), (25.0, 3)):
        offer(file, with_steps(steps), now_s=now_s)
        lines = (tmp_path / NAME).read_text().splitlines()
        seen.append(next(line for line in lines if line.startswith("allranks_steps_total{")).split()[-1])
    assert seen == ["7.0", "7.0", "9.0", "9.0"]  # not yet due; and a counter never falls
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o644
    file.close()
    assert (list(tmp_path.iterdir()), said) == ([], [])


def test_a_directory_that_is_missing_costs_one_line(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    said: list[str] = []
    file = MetricsFile(tmp_path / "none", job="1", say=said.append)
    for now_s in (0.0, 10.0, 20.0):
        offer(file, STATUS, now_s=now_s)
    file.close()
    assert said == [f"the job runs without metrics: {tmp_path}/none: No such file or directory"]


def test_without_the_library_the_line_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    said: list[str] = []
    file = MetricsFile(tmp_path, job="1", say=said.append)
    offer(file, STATUS, now_s=0.0)
    assert said == ["the job runs without metrics: prometheus-client is not installed: pip install 'allranks[metrics]'"]
    assert list(tmp_path.iterdir()) == []
