"""The pictures of a run that is watched: its terminal, the screen of `allranks top`, and the head of its report.

    PYTHONPATH=tests python -m docs.run_pictures        runs the job for about a minute and writes docs/pictures

One rank is 15 ms late in each step; there is an evaluation, and checkpoints. It needs tmux, unshare, Chromium and
textual. The job runs on a machine that is called node01 (in namespaces of its own). If other programs use the cores,
the pictures show a longer start and more transfer: look at them before you commit them.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from allranks.cli.top import look
from allranks.cli.top_app import TopApp, TopScreen
from allranks.model.job_status import FILE
from allranks.report.rundir import REPORT
from allranks.report.runs import Run, find_run
from allranks.report.text import Style
from docs.picture import render

FOLDER = Path(__file__).parents[2] / "docs/pictures"
SCRIPT = """\
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import allranks

inputs = torch.randn(40_000, 16)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
held_out = TensorDataset(inputs[:800], inputs[:800].sum(1, keepdim=True))
loss_of = torch.nn.functional.mse_loss


def evaluate(model):
    with torch.no_grad():
        for inputs, targets in DataLoader(held_out, batch_size=20):
            loss_of(model(inputs), targets)
            time.sleep(0.05)


torch.set_num_threads(1)
with allranks.session() as s:
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(s.device)
    model = s.ddp(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = s.sampler(dataset, global_batch_size=64)
    loader = DataLoader(dataset, batch_sampler=sampler)
    state = s.track(model=model, optimizer=optimizer, sampler=sampler)
    for step in state.steps(loader, total=450):
        with step as (inputs, targets):
            time.sleep(0.095 if s.rank == 3 else 0.08)  # rank 3 is slower
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss.item())
        if state.step == 150:
            evaluate(net)
    if s.rank == 0:
        print(f"loss {loss.item():.3f}")
"""
COMMAND = "allranks run --nproc-per-node 4 --checkpoint-every 100 train.py"
COLUMNS, TOP_SIZE, PAGE_SIZE = 128, (124, 19), (1040, 900)
AT_STEP = 360
"""When the screens are taken."""
DEADLINE_S = 300.0
MAX_BYTES = 150 << 10
CODE = re.compile(r"\x1b\[[\d;]*m")
DIM = "\x1b[2m{}\x1b[0m"


class Tmux:
    """A terminal of its own, on a server of its own."""

    def __init__(self, folder: Path) -> None:
        """Start a shell in the folder."""
        self._socket = str(folder / "tmux")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        shell = f"hostname node01; ip link set lo up; export PATH={path} PS1='$ '; exec bash --norc --noprofile"
        size = ["-x", str(COLUMNS), "-y", "16"]
        self._ask("new-session", "-d", *size, "-c", str(folder), "unshare", "--uts", "--net", "-r", "sh", "-c", shell)

    def type(self, line: str) -> None:
        """Type a line."""
        self._ask("send-keys", line, "Enter")

    def read(self) -> str:
        """Return all that the terminal shows, with its colors."""
        return self._ask("capture-pane", "-p", "-e", "-S", "-100")

    def close(self) -> None:
        """End it, and what runs in it."""
        self._ask("kill-server")

    def _ask(self, *words: str) -> str:
        command = ["tmux", "-S", self._socket, "-f", "/dev/null", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def main() -> None:
    """Run the job and write the pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        terminal = Tmux(folder)
        try:
            terminal.type(f"clear; {COMMAND}")
            run = wait_for_step(folder / "runs")
            early = lines_of(terminal.read())
            (FOLDER / "top.svg").write_text(asyncio.run(draw_top(run)))
            wait_for(lambda: (run.path / REPORT).exists() and lines_of(terminal.read())[-1].strip() == "$")
            late = lines_of(terminal.read())
        finally:
            terminal.close()
        draw_report(run.path / REPORT, FOLDER / "report.png")
        (FOLDER / "run.svg").write_text(draw_run(early, late))


def wait_for_step(runs: Path) -> Run:
    """Return the run when it has come to AT_STEP."""
    found: list[Run] = []

    def has_come() -> bool:
        run = find_run("latest", runs) if runs.exists() else None
        view = look(run) if run else None
        if run and view and (view.status.step or 0) >= AT_STEP:
            found.append(run)
        return bool(found)

    wait_for(has_come)
    return found[0]


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait until that is so."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


def lines_of(screen: str) -> list[str]:
    """Return the lines of a screen that show something."""
    return [line.rstrip() for line in screen.splitlines() if CODE.sub("", line).strip()]


async def draw_top(run: Run) -> str:
    """Return the screen of `allranks top` as SVG."""
    style = Style(is_unicode=True, has_colour=True, width=TOP_SIZE[0])
    app = TopApp(TopScreen(run.id, lambda: look(run), lambda words: "", missing=FILE, style=style))
    async with app.run_test(size=TOP_SIZE) as pilot:
        await pilot.pause(2.0)
        svg = app.export_screenshot(title=f"allranks top {run.id}")
    return without_fonts(svg)


def without_fonts(svg: str) -> str:
    """Return an SVG that loads nothing: the reader's own font is used."""
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def draw_run(early: list[str], late: list[str]) -> str:
    """Return the terminal as it was with the live row, and below it the lines that came later."""
    early = [line for line in early if not CODE.sub("", line).startswith("$ ")]
    end = next(number for number, line in enumerate(late) if CODE.sub("", line).startswith("allranks: goodput"))
    return render("\n".join([*early, DIM.format("... and at the end:"), *late[end:-1]]), COMMAND, COLUMNS)


def draw_report(page: Path, picture: Path) -> None:
    """Write the head of a report as it looks in Chromium, with a light theme."""
    width, height = PAGE_SIZE
    with tempfile.TemporaryDirectory() as profile:
        command = [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}", "--virtual-time-budget=3000", f"--screenshot={picture}", page.as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert picture.stat().st_size <= MAX_BYTES, "a smaller PAGE_SIZE"


if __name__ == "__main__":
    main()
