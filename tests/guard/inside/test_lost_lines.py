"""Lines that a worker could not write are counted in its cell: Python processes whose stdout is /dev/full."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from allranks.guard.inside.cell import Cell
from conftest import clean_env

BEGIN = (
    "import os, sys\nfrom allranks.guard.inside import lost_output\n"
    "lost_output.begin(int(os.environ['ALLRANKS_CELL_FD']))\n"
)
CATCH = """
    for number in range(20):
        try:
            print("line", number, flush={flush})
        except OSError:
            pass
    """
TABLE = {
    # name: (script, is unbuffered, stdout) -> (lines that are lost, exit code)
    "a write that fails and is caught": (CATCH.format(flush=True), True, "/dev/full", (20, 0)),
    "lines that stay in the buffer until the end": (CATCH.format(flush=False), False, "/dev/full", (20, 120)),
    "lines that stay in it although each was flushed": (CATCH.format(flush=True), False, "/dev/full", (20, 120)),
    "more lines than the buffer takes": (
        "for _ in range(400):\n    try:\n        print('x' * 99, flush=True)\n    except OSError:\n        pass\n",
        False, "/dev/full", (400, 120)),
    "a write of several lines": (
        "try:\n    sys.stdout.write('a\\nb\\nc\\n')\nexcept OSError:\n    pass\n", True, "/dev/full", (3, 0)),
    "an exception that ends the process": ("print('x')\n", True, "/dev/full", (1, 1)),
    "a child of the worker": (
        "if (pid := os.fork()):\n    os.waitpid(pid, 0)\nelse:\n    try:\n        print('x')\n    except OSError:\n"
        "        os._exit(0)\n", True, "/dev/full", (1, 0)),
    "a handler of logging": (
        "import logging\nlogging.basicConfig(stream=sys.stdout)\nlogging.warning('a')\n", True, "/dev/full", (1, 0)),
    "where there is room": (CATCH.format(flush=True), True, "/dev/null", (0, 0)),
    "a closed pipe is no full disk": (
        "r, w = os.pipe()\nos.close(r)\nos.dup2(w, 1)\ntry:\n    print('x')\nexcept BrokenPipeError:\n    pass\n",
        True, "/dev/null", (0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_lines_that_could_not_be_written_are_counted_once(case: str) -> None:
    script, is_unbuffered, stdout, (num_lines, exit_code) = TABLE[case]
    cell = Cell.create()
    env = {"ALLRANKS_CELL_FD": str(cell.fd), "PYTHONUNBUFFERED": "1" if is_unbuffered else ""}
    command = [sys.executable, "-c", BEGIN + textwrap.dedent(script)]
    with Path(stdout).open("w") as out:
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.PIPE, env=clean_env(os.environ, **env), pass_fds=[cell.fd],
            timeout=60, check=False, text=True,
        )  # fmt: skip
    why = errno.ENOSPC if num_lines else 0
    assert (cell.lost_lines(), done.returncode) == ((num_lines, why), exit_code), done.stderr
    assert "lost_output.py" not in done.stderr  # users' tracebacks show their own frames
    cell.close()
