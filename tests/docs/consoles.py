"""The examples of a page: files that it tells readers to save, commands that they type, lines that they see.

Three dots stand for lines that are left out. The order of lines is not compared: ranks write at the same time.
What differs from run to run (seconds, names of runs, the machine's name, the width of columns) is compared by its form.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from conftest import clean_env

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVED_AS = re.compile(r"[Ss]ave this as `([^`]+)`")
_PROMPT = re.compile(r"^[$#] ")
_COMMENT = re.compile(r"\s+# .*")
_VOLATILE = [
    (re.compile(r"\bruns/\d+(-\d+-\d+)?"), "runs/JOB"),
    (re.compile(r"\bjob \d+"), "job N"),
    (re.compile(r"\d+(\.\d+)? s\b"), "N s"),
    (re.compile(r"\bseed \d+"), "seed N"),
    (re.compile(r"\bens1f\d(np0)?"), "ens1fN"),
    (re.compile(r"\s+"), " "),
]


class Typed(NamedTuple):
    """One command and the lines that the page shows below it."""

    command: str
    shown: list[str]


def read_examples(page: str) -> list[Typed | tuple[str, str]]:
    """Return the page's examples in order: commands, and files as (name, text)."""
    examples: list[Typed | tuple[str, str]] = []
    before = 0
    for fence in _FENCE.finditer(page):
        said, before = page[before : fence.start()], fence.end()
        if fence[1] == "console":
            for line in fence[2].splitlines():
                if _PROMPT.match(line):
                    examples.append(Typed(_COMMENT.sub("", line[2:]), []))
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
    return [line for line in shown if line.strip() not in ("", "...") and not _has(seen, _steady(line))]


def run(command: str, folder: Path) -> str:
    """Type the command in this folder, with the allranks under test; returns all of its output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=clean_env(os.environ, PATH=path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    return done.stdout.replace(f"{folder}/", "")


def _has(seen: set[str], line: str) -> bool:
    return line in seen or (line.endswith("...") and any(each.startswith(line[:-3].rstrip()) for each in seen))


def _steady(line: str) -> str:
    line = line.replace(socket.gethostname(), "vm").strip()
    for pattern, word in _VOLATILE:
        line = pattern.sub(word, line)
    return line
