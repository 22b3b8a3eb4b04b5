"""The report that a run leaves in its directory (report.page): written last, within seconds, whatever goes wrong.

Whoever holds the job's verdict writes it, once nothing else is left to do. A full disk, a file server that hangs, a
missing jinja2 or a bug of ours costs the report, never the job; one line says so.
"""

from __future__ import annotations

from functools import partial

from allranks.host.threads import start_thread
from allranks.report.rundir import RunDir
from allranks.report.text import say

REPORT_S = 3.0
"""How long the job's exit waits for it: 0.1 s is usual, and 0.5 s for 1,024 ranks."""


def leave_report(run_dir: RunDir) -> None:
    """Write the report of a run whose verdict is written; raises nothing."""
    run_dir.status_files.close()
    problems: list[str] = []
    thread = start_thread(partial(_write, run_dir, problems), name="allranks-report")
    if thread is not None:
        thread.join(REPORT_S)
    if thread is None or thread.is_alive():
        problems = [f"it took longer than {REPORT_S:.0f} s" if thread else "no thread can be started"]
    for problem in problems:
        say(f"no report was written ({problem}); to write one: allranks report {run_dir.path.name} -o FILE")


def _write(run_dir: RunDir, problems: list[str]) -> None:
    try:
        from allranks.report.page import write_report  # with jinja2, which takes 0.1 s

        write_report(run_dir.hold(make=False))
    except Exception as exc:
        problems.append((isinstance(exc, OSError) and exc.strerror) or str(exc) or type(exc).__name__)
