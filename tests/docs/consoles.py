"""The examples of a page: files that it tells readers to save, commands that they type, lines that they see.

Three dots stand for lines that are left out. The order of lines is not compared: ranks write at the same time.
What differs from run to run (seconds, names of runs, the machine's name, the width of columns) is compared by its form.
A command that ends with `&` goes on while the next ones are typed, which is when the page's lines of it have come.

Pages of the lab have two prompts: `#` is the root shell that started the lab, `$` a shell on the lab's first node.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from conftest import HANG_S, clean_env, wait_until

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVED_AS = re.compile(r"[Ss]ave this as `([^`]+)`")
_PROMPT = re.compile(r"^[$#] ")
_COMMENT = re.compile(r"\s+# .*")
_VOLATILE = [
    (re.compile(r"\b\d{8}-\d{6}-\d+\b"), "RUN"),
    (re.compile(r"\bruns/(RUN|\d+)"), "runs/JOB"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"), "DATE"),
    (re.compile(r"\b(job|pid) \d+"), r"\1 N"),
    (re.compile(r"\d+(\.\d+)? s\b"), "N s"),
    (re.compile(r"\bafter \d+:\d\d:\d\d"), "after TIME"),
    (re.compile(r"\d+(-\d+)? % CPU"), "N % CPU"),
    (re.compile(r"\bseed \d+"), "seed N"),
    (re.compile(r"\bens1f\d(np0)?"), "ens1fN"),
    (re.compile(r"; has not exited$"), ""),  # where the machine is slow
    (re.compile(r"\s+"), " "),
]


class Typed(NamedTuple):
    """One command and the lines that the page shows below it."""

    command: str
    shown: list[str]
    is_on_host: bool = False
    """Its prompt is `#`."""

    @property
    def is_kept(self) -> bool:
        """Whether it goes on while the next commands are typed."""
        return self.command.endswith("&")


def read_examples(page: str) -> list[Typed | tuple[str, str]]:
    """Return the page's examples in order: commands, and files as (name, text)."""
    examples: list[Typed | tuple[str, str]] = []
    before = 0
    for fence in _FENCE.finditer(page):
        said, before = page[before : fence.start()], fence.end()
        if fence[1] == "console":
            for line in fence[2].splitlines():
                if _PROMPT.match(line):
                    examples.append(Typed(_COMMENT.sub("", line[2:]), [], is_on_host=line[0] == "#"))
                else:
                    last = examples[-1]
                    assert isinstance(last, Typed)
                    last.shown.append(line)
        elif names := _SAVED_AS.findall(said):
            examples.append((names[-1], fence[2]))
    return examples


def find_missing(shown: list[str], output: str) -> list[str]:
    """Return the lines of the page that the output does not have."""
    seen = {_steady(line) for line in output.splitlines()}
    wanted = [line for line in shown if line.strip() not in ("", "...")]
    # A machine that calls itself localhost is nobody's node in torchrun's reports.
    nodes = ("vm · ", "") if _names()[0].startswith("localhost") else ("vm · ",)
    return [line for line in wanted if not any(_has(seen, _steady(line.replace("vm · ", node))) for node in nodes)]


class Terminal:
    """Where commands are typed: a folder, with the allranks under test on PATH.

    Args:
        folder: working directory.
        lab: name of the lab, on whose first node commands are typed; pages leave the name out. None: this machine.
    """

    def __init__(self, folder: Path, *, lab: str | None = None) -> None:
        self._folder = folder
        self._lab = lab
        self._env = clean_env(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    def type(self, typed: Typed) -> str:
        """Run the command; returns all of its output."""
        with tempfile.TemporaryFile("w+") as output:
            process = self._begin(typed, output)
            try:
                process.wait(2 * HANG_S)
            finally:
                process.kill()
            return self._read(output)

    @contextlib.contextmanager
    def keep(self, typed: Typed) -> Iterator[None]:
        """Run the command beside the block, which begins when the page's lines of it have come."""
        with tempfile.TemporaryFile("w+") as output:
            process = self._begin(typed, output)
            try:
                wait_until(lambda: process.poll() is not None or not self._missing(typed, output), typed.command)
                assert not self._missing(typed, output), self._read(output)
                yield
            finally:
                process.terminate()
                process.wait(HANG_S)

    def _begin(self, typed: Typed, output: IO[str]) -> subprocess.Popen[str]:
        command = typed.command.removesuffix("&").rstrip()
        if self._lab is not None:
            if not typed.is_on_host:
                command = f"allranks lab exec master-node -- bash -c {shlex.quote(command)}"
            command = re.sub(r"allranks lab (\w+)", rf"allranks lab \1 --name {self._lab}", command)
        return subprocess.Popen(
            ["bash", "-c", f"exec {command}" if typed.is_kept else command],
            cwd=self._folder,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _missing(self, typed: Typed, output: IO[str]) -> list[str]:
        return find_missing(typed.shown, self._read(output))

    def _read(self, output: IO[str]) -> str:
        said = Path(f"/proc/self/fd/{output.fileno()}").read_text(errors="replace")
        said = said.replace(f"{self._folder}/", "")
        if self._lab is None:
            return said
        return re.sub(rf" --name {self._lab}|(?<=\blab) {self._lab}", "", said).replace(self._lab, "lab")


def _has(seen: set[str], line: str) -> bool:
    return line in seen or (line.endswith("...") and any(each.startswith(line[:-3].rstrip()) for each in seen))


@functools.cache
def _names() -> tuple[str, str]:
    """What this machine is called; torchrun's reports have the first one. Asked once: a name server may be slow."""
    return socket.getfqdn(), socket.gethostname()


def _steady(line: str) -> str:
    for name in _names():
        line = line.replace(name, "vm")
    line = line.strip()
    for pattern, word in _VOLATILE:
        line = pattern.sub(word, line)
    return line
