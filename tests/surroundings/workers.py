"""Odd workers and floods: the cases of workers.toml, each a real job whose ranks run that Python.

A case says what its ranks do, how the terminal is read meanwhile, and what must come of it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pty
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from . import rank
from .judge import Expect, Fall, judge
from .rank import note
from .stage import DEADLINE_S, Situation, Stage

CASES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
MB = 1 << 20
LINE = b"y" * 99 + b"\n"
FRAME = b'  File "train.py", line 3, in f\n    g(x)\n'
TRACEBACK = b"Traceback (most recent call last):\n" + FRAME * 20 + b"ValueError: x\n"
VICTIM = "of somebody else"
MODULES = (
    *("atexit", "contextlib", "ctypes", "fcntl", "os", "resource", "shutil", "signal", "socket"),
    *("subprocess", "sys", "tempfile", "threading", "time"),
)
"""That the cases may use."""


def write(descriptor: int, block: bytes, size_mb: int) -> None:
    """Write a block again and again."""
    for _ in range(size_mb):
        rest = memoryview(block * max(1, MB // len(block)))
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def give_up() -> None:
    """End with an exit code and a line on stderr."""
    print("last words", file=sys.stderr, flush=True)
    os._exit(1)


def end_well() -> None:
    """End at once, and without writing what may be in a buffer."""
    note("done")
    os._exit(0)


def act() -> None:
    """Be one rank of the case; where one rank is odd, the other writes nothing and ends well."""
    group, name = os.environ["SURROUNDINGS_CASE"].split("/")
    if group == "odd" and rank.RANK != 1:
        time.sleep(1)
        return
    error_json = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    names = {**globals(), **{name: importlib.import_module(name) for name in MODULES}}
    names |= {"error_json": error_json, "folder": error_json.parent, "scratch": rank.SCRATCH}
    names["cell"] = int(os.environ.get("ALLRANKS_CELL_FD", "-1"))
    exec(compile(CASES[group][name]["does"], f"{name}.py", "exec"), names)


def play_case(stage: Stage, *, case: str, does: Mapping[str, Any]) -> tuple[list[Fall], float]:
    """Start the job, and read its terminal as the case says."""
    victim = stage.scratch / "victim"
    victim.write_text(VICTIM)
    (stage.scratch / "notes").chmod(0o777)
    stage.env["SURROUNDINGS_CASE"] = case
    read, ranks = does.get("read"), does.get("ranks", 2)
    if read is None:
        job = stage.start("workers:act", ranks=ranks)
    else:
        ours, theirs = pty.openpty() if read == "terminal" else os.pipe()
        job = stage.start("workers:act", ranks=ranks, stdout=theirs, stderr=theirs)
        os.close(theirs)
        threading.Thread(target=_read, args=(ours, read, stage.terminals[-1]), daemon=True).start()
    facts = stage.end(job, deadline_s=DEADLINE_S)
    if victim.read_text() != VICTIM:
        stage.signals.append("a file behind a link was written")
    is_odd = case.startswith("odd/")
    expect = Expect(
        rank=(1 if is_odd else 0) if "fails" in does else None,
        words=does.get("fails", ""),
        needs_file=not does.get("has_no_file", False),
        is_terminal_gone=read == "head",
    )
    return judge(facts, expect), job.peak_mb


def _read(descriptor: int, how: str, terminal: Path) -> None:
    with terminal.open("ab") as file:
        file.write(os.read(descriptor, 1000))
        if how == "head":
            os.close(descriptor)
            return
        time.sleep(4 if how == "stopped" else 0)
        with contextlib.suppress(OSError):  # how a terminal ends
            while data := os.read(descriptor, MB):
                file.write(data)
                file.flush()


def situations() -> Iterator[Situation]:
    """One for each case."""
    for group, cases in CASES.items():
        for name, does in cases.items():
            case = f"{group}/{name}"
            must = f"fails: {does['fails']}" if "fails" in does else "succeeds"
            yield Situation(name=case, expected=must, play=partial(play_case, case=case, does=does))
