"""`allranks top`: what it reads, what it prints without a terminal, and its screen, drawn by textual without one."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks.cli import top
from allranks.model.finding import Verdict
from allranks.model.job_status import FILE, JobStatus, NodeRow, RankRow, write_status
from allranks.report.rundir import RunDir
from allranks.report.runs import find_run
from allranks.report.text import Style
from conftest import HANG_S, Tell

JOB = "20261128-190000-41"
ROWS = (
    RankRow(ranks=(5,), num_ranks=1, nodes=("n2",), state="data", place="evaluate.py:88 in run", is_culprit=True),
    RankRow(ranks=(0, 1), num_ranks=2, nodes=("n1",), state="all_reduce", late_s=0.5),
)


def status_of(written_s: float) -> JobStatus:
    nodes = (NodeRow(name="n1", num_ranks=2), NodeRow(name="n2", num_ranks=1))
    return JobStatus(
        job=JOB,
        written_s=written_s,
        started_s=written_s - 60,
        phase="running",
        num_ranks=3,
        num_up=3,
        rows=ROWS,
        nodes=nodes,
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run on two nodes, whose leader has written no status yet."""
    run_dir = RunDir(tmp_path / "runs", JOB)
    run_dir.create()
    run_dir.create_attempt(None)
    run_dir.add_event("started", command=["python", "train.py"], members=["n1", "n2"])
    for node, rank, text in (("n1", 0, "of 0\n"), ("n2", 5, "step 1\nstep 2\r step 3 \x1b[1m\n")):
        run_dir.create_node(node)
        (run_dir.node_path(node) / f"rank_{rank}.out").write_text(text)
    return run_dir


def test_once_prints_the_state_with_the_last_lines(
    run_dir: RunDir, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (run_dir.path / FILE).write_bytes(write_status(status_of(time.time())))
    for words in (("--once",), ()):  # without a terminal, --once is what it does
        told = tell("top", *words)
        lines = told.out.splitlines()
        assert (told.code, told.err, lines[1]) == (0, "", "2 in all_reduce, 1 late: 5")
        assert [line.split("  ")[-1].strip() for line in lines if "evaluate.py" in line] == ["step 3 \\x1b[1m"]
    found = json.loads(tell("top", "--json", JOB).out)
    assert found["rows"][1] == {
        "of": json.loads(msgspec.json.encode(ROWS[1])),
        "last_line": "of 0",
    }
    assert (found["status"]["job"], "notice" in found) == (JOB, False)


def test_a_run_that_has_ended_shows_its_last_state(run_dir: RunDir, tell: Tell) -> None:
    (run_dir.path / FILE).write_bytes(write_status(status_of(time.time() - 100)))
    assert "\nno news for 1:40, since " in tell("top", "--once").out
    run_dir.write_verdict(Verdict(job=JOB, attempt=0, exit_code=75), node="n1")
    assert "\nended with exit code 75; this is the last state, of " in tell("top", "--once").out


@pytest.mark.parametrize("data", [None, b"", b"{", b"[]", b'{"job": 1}', b"\xff"], ids=repr)
def test_a_run_without_a_status_says_so(data: bytes | None, run_dir: RunDir, tell: Tell) -> None:
    if data is not None:
        (run_dir.path / FILE).write_bytes(data)
    told = tell("top", "--json")
    assert (told.code, told.out) == (3, "")
    assert told.err == f"error: run {JOB} has no status.json yet; its leader writes it once the ranks are started\n"


def test_an_unknown_job_and_a_run_that_ended_before_say_so(run_dir: RunDir, tell: Tell) -> None:
    assert tell("top", "--once", "12").err.startswith("error: JOB '12': no such run in runs; expected the id of a job")
    run_dir.write_verdict(Verdict(job=JOB, attempt=0, exit_code=1), node="n1")
    assert tell("top", "--once").err == (
        f"error: run {JOB} has ended and left no readable status.json; to see what happened: allranks why {JOB}\n"
    )


def test_without_textual_one_line_says_how_to_install_it(
    run_dir: RunDir, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("textual", "textual.app"):  # the second one may be there from another test
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "allranks.cli.top_app", raising=False)
    monkeypatch.setattr(top, "has_terminal", lambda: True)
    told = tell("top")
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith("error: top: the screen needs textual (")
    assert told.err.endswith("): pip install 'allranks[top]'; without it: allranks top --once\n")


# The screen


def drive(run_dir: RunDir, *, size: tuple[int, int], script: Callable[[Any, Any], Awaitable[None]]) -> list[list[str]]:
    """Run the screen of a run, and return the verbs that it called."""
    pytest.importorskip("textual")
    from allranks.cli.top_app import TopApp, TopScreen

    called: list[list[str]] = []

    def run_verb(words: Sequence[str]) -> str:
        called.append(list(words))
        return "\x1b[31mstacks\n of [b]all[/b] ranks\n"

    run = find_run(JOB, run_dir.root)
    assert run is not None
    style = Style(is_unicode=True, has_colour=True, width=size[0])
    screen = TopScreen(JOB, lambda: top.look(run), run_verb, missing="no status yet", style=style)
    app = TopApp(screen)

    async def watch() -> None:
        async with app.run_test(size=size) as pilot:
            await app.workers.wait_for_complete()
            await pilot.pause()
            await script(app, pilot)

    asyncio.run(watch())
    return called


def screen_lines(app: Any) -> list[str]:
    """What stands on the screen, line by line."""
    return ["".join(segment.text for segment in strip).rstrip() for strip in app.screen._compositor.render_strips()]


async def shown(app: Any, pilot: Any, line: str) -> list[str]:
    """The screen as soon as `line` stands on it: textual lays it out some messages after its text has changed."""
    deadline_s = time.monotonic() + HANG_S
    while line not in (lines := screen_lines(app)) and time.monotonic() < deadline_s:
        await pilot.pause(0.01)
    assert line in lines, lines
    return lines


@pytest.mark.parametrize(("width", "is_wide"), [(80, False), (200, True)])
def test_the_screen_has_rows_and_pages(width: int, is_wide: bool, run_dir: RunDir) -> None:
    (run_dir.path / FILE).write_bytes(write_status(status_of(time.time())))

    async def script(app: Any, pilot: Any) -> None:
        lines = await shown(app, pilot, "2 in all_reduce, 1 late: 5")
        rows = [line for line in lines if "evaluate.py:88" in line or "all_reduce  " in line]
        assert [line[:9].rstrip() for line in rows] == ["✗ 5", "  2: 0-1"]
        assert ("step 3 \\x1b[1m" in rows[0]) == is_wide
        if is_wide:
            return
        await pilot.press("o", "o")  # by rank, by lateness: the selected row is still the one of rank 5
        assert app.screen._selected.of.ranks == (5,)
        await shown(app, pilot, "2 of 2 rows, sorted by late")
        await pilot.press("slash", *"eval", "enter")
        lines = await shown(app, pilot, "1 of 2 rows, sorted by late, with 'eval'")
        assert [line for line in lines if "all_reduce  " in line] == []
        await pilot.press("escape")
        lines = await shown(app, pilot, "2 of 2 rows, sorted by late")
        assert [line for line in lines if "all_reduce  " in line]
        for key, text in (
            ("s", " of [b]all[/b] ranks"),
            ("l", "\\x1b[31mstacks"),
            ("question_mark", "  q, Ctrl-C  quit; the job goes on"),
        ):
            for close in ("escape", "q", "question_mark"):
                await pilot.press(key)
                await shown(app, pilot, text)
                await pilot.press(close)
                await shown(app, pilot, "2 of 2 rows, sorted by late")
        await pilot.press("question_mark", "q")  # typed ahead: no page is left open, and nothing has ended
        await shown(app, pilot, "2 of 2 rows, sorted by late")
        assert not app._exit
        await pilot.press("q")
        assert app._exit

    called = drive(run_dir, size=(width, 30), script=script)
    assert called == ([] if is_wide else [["stack"]] * 3 + [["logs", "--rank", "5", "--tail", "200"]] * 3)


def test_the_screen_waits_for_the_first_status(run_dir: RunDir) -> None:
    async def script(app: Any, pilot: Any) -> None:
        await shown(app, pilot, "no status yet")
        await pilot.press("l", "o", "j")
        (run_dir.path / FILE).write_bytes(write_status(status_of(time.time())))
        app.screen._read()
        await shown(app, pilot, "2 in all_reduce, 1 late: 5")

    assert drive(run_dir, size=(80, 24), script=script) == []
