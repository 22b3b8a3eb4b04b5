"""Does a report that cannot be written cost the report only?"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from allranks.launch.last_report import leave_report
from allranks.model.finding import Verdict
from allranks.report.rundir import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path, "7")
    run_dir.create()
    run_dir.create_attempt(None)
    run_dir.write_verdict(Verdict(job="7", attempt=0, exit_code=0), node="n1")
    return run_dir


def test_a_run_leaves_its_report(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    leave_report(run_dir)
    assert "Succeeded" in (run_dir.path / "report.html").read_text()
    assert capsys.readouterr().err == ""


def test_a_report_that_cannot_be_written_is_one_line(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir.path / "report.html").mkdir()
    leave_report(run_dir)
    assert capsys.readouterr().err == (
        "allranks: no report was written (Is a directory); to write one: allranks report 7 -o FILE\n"
    )
    assert sorted(path.name for path in run_dir.path.iterdir()) == ["attempt_0", "report.html"]  # and no draft


def test_a_report_that_takes_too_long_is_left_behind(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read = threading.Event()
    monkeypatch.setattr("allranks.launch.last_report.REPORT_S", 0.0)
    monkeypatch.setattr("allranks.report.page.write_report", lambda _: is_read.wait(10))
    leave_report(run_dir)
    assert "no report was written (it took longer than 0 s)" in capsys.readouterr().err
    is_read.set()
