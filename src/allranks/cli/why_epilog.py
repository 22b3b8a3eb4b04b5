"""`allranks why --epilog`: from SLURM's epilog to a watcher beside it, and the reader that the watcher starts.

python -I -m allranks.cli.why_epilog 4711       the reader: prints what `allranks why 4711` finds, in short, as JSON
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

import msgspec

from allranks.model.errors import AllranksError, Exit
from allranks.model.finding import Finding
from allranks.report.text import say
from allranks.why.fleet.told import Explained, sum_up

READER = ("-I", "-m", "allranks.cli.why_epilog")
"""-I: neither the job's directory nor its user's variables decide which code runs."""


class _Document(msgspec.Struct):
    """What is needed of the document that `allranks why --json` prints."""

    exit_code: int
    findings: tuple[Finding, ...]


def start_epilog(to: Path | None) -> int:
    """Start the explanation of the job that has ended; returns 0, whatever happens."""
    from allranks.why.fleet.epilog import start

    try:
        problem = start(os.environ, to=to.absolute() if to else None, command=[sys.executable, *READER])
    except OSError as exc:
        problem = str(exc.strerror or exc).lower()
    if problem:
        say(f"why --epilog: {problem}")
    return Exit.OK


def read_job(job: str) -> Explained:
    """Return what `allranks why JOB` finds."""
    from allranks.cli.why import why

    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            why.main(args=["--json", job], standalone_mode=False)
    except AllranksError as exc:
        return Explained(problem=str(exc))
    document = msgspec.json.decode(told.getvalue(), type=_Document)
    return sum_up(document.findings, job=job, is_failed=document.exit_code == Exit.USER_CODE)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(read_job(sys.argv[1])))
