"""The report that a run leaves in its directory (report.page): written last, within seconds, whatever goes wrong.

Whoever holds the job's verdict writes it, once nothing else is left to do. A full disk, a file server that hangs, a
missing jinja2 or a bug of ours costs the report, never the job: an event says why there is none.
"""

from __future__ import annotations

from functools import partial

from allranks.host.threads import start_thread
from allranks.report.rundir import RunDir

REPORT_S = 3.0
"""How long the job's exit waits for it: 0.1 s is usual, and 0.5 s for 1,024 ranks."""


def leave_report(run_dir: RunDir) -> None:
    """Write the report of a run whose verdict is written; raises nothing."""
    run_dir.status_files.close()
    thread = start_thread(partial(_write, run_dir), name="allranks-report")
    if thread is not None:
        thread.join(REPORT_S)


def _write(run_dir: RunDir) -> None:
    try:
        from allranks.report.page import write_report  # with jinja2, which takes 0.1 s

        write_report(run_dir.hold(make=False))
    except Exception as exc:
        run_dir.add_event("report_failed", reason=f"{type(exc).__name__}: {exc}"[:500])
