"""status.json and goodput.json: the newest of each is written, and a directory that hangs or is full delays nobody."""

from __future__ import annotations

import errno
import json
import threading
import time
from pathlib import Path

from allranks.files.folder import Folder
from allranks.model.job_status import EventSeen, JobStatus
from allranks.model.ledger import Ledger
from allranks.report.rundir import RunDir, is_own_file
from allranks.report.status_files import StatusFiles


def status(phase: str = "running", **more: object) -> JobStatus:
    return JobStatus(job="7", written_s=1.0, started_s=0.5, phase=phase, **more)  # type: ignore[arg-type]


LEDGER = Ledger(begun_s=1.0, until_s=5.0, rank_s=8.0, seconds={"step": 6.0, "start": 2.0}, is_steps_seen=True)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make_run(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path, "7")
    run_dir.create()
    run_dir.create_attempt(0)
    return run_dir


def test_the_newest_status_and_ledger_are_in_the_run_directory_when_the_job_ends(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    for number in range(50):
        run_dir.status_files.show(status(step=number))
        run_dir.status_files.keep(LEDGER)
    run_dir.status_files.show(status("over", exit_code=3))
    run_dir.status_files.close()
    assert names_in(tmp_path / "7") == ["attempt_0", "goodput.json", "status.json"]
    assert all(is_own_file(tmp_path / "7" / name) for name in ("goodput.json", "status.json"))
    told = json.loads((tmp_path / "7/status.json").read_text())
    assert (told["phase"], told["exit_code"]) == ("over", 3)
    again = RunDir(tmp_path, "7").status_files
    assert again.read_ledger() == LEDGER
    assert again.read_status() == run_dir.status_files.newest


def test_secrets_in_events_are_hidden(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    event = EventSeen(time_s=1.0, event="verdict", text="ValueError: https://ada:hunter22@hub.example/x")
    run_dir.status_files.show(status(events=(event,)))
    run_dir.status_files.close()
    assert "hunter22" not in (tmp_path / "7/status.json").read_text()


def test_a_file_server_that_does_not_answer_delays_nobody(tmp_path: Path) -> None:
    held, answers = Folder.at(tmp_path), threading.Event()

    def hold(*_: str, make: bool = True) -> Folder:
        answers.wait(120)
        return held

    files, began_s = StatusFiles(hold), time.monotonic()
    for number in range(5):
        files.show(status(step=number))
    files.close(within_s=0.1)
    assert time.monotonic() - began_s < 60  # it hangs for twice as long
    assert files.newest is not None
    assert files.newest.step == 4
    answers.set()
    files.close(within_s=30)
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 4


def test_a_full_directory_costs_the_files_and_nothing_else(tmp_path: Path) -> None:
    full = [True]

    def hold(*_: str, make: bool = True) -> Folder:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return Folder.at(tmp_path)

    files = StatusFiles(hold)
    files.show(status(step=1))
    files.keep(LEDGER)
    deadline_s = time.monotonic() + 20
    while files._waiting and time.monotonic() < deadline_s:
        time.sleep(0.01)
    full.clear()
    files.show(status(step=2))
    files.close()
    assert names_in(tmp_path) == ["status.json"]
    assert files.read_ledger() is None


def test_files_that_make_no_sense_are_none(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    no_text, deep = '{"job": "\udcff", "begun_s": 1, "seconds": {"\udcff": 1}}', '{"x": ' + "[" * 100_000
    no_date = '{"job": "7", "written_s": 1e12, "started_s": 1, "phase": "", "begun_s": 1, "until_s": 1e12, "rank_s": 1}'
    for text in ("", "[" * 100_000, '{"job": 7}', '{"begun_s": "x"}', "\udcff", no_text, deep, no_date):
        for name in ("status.json", "goodput.json"):
            (tmp_path / "7" / name).write_text(text, errors="surrogateescape")
        assert run_dir.status_files.read_status() is None
        assert run_dir.status_files.read_ledger() is None
