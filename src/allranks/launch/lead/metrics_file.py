"""Write the metrics of a job for node_exporter's textfile collector: one file, whole each time, removed at the end.

    metrics = MetricsFile(Path("/var/lib/prometheus/node-exporter"), job="4711", say=say)
    metrics.offer(status, now_s=time.monotonic())      # as often as there is a status
    metrics.close()

A directory that is missing, full, or slow costs the metrics, never the job: each write is a thread of its own, and the
first failure is reported on one line. A leader that is killed leaves its file behind, with the time of the last beat.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from allranks.files.folder import Folder
from allranks.host.threads import start_thread
from allranks.model.job_status import JobStatus
from allranks.report.metrics import hold_counters, make_samples, render_metrics
from allranks.report.rundir import as_file_name

EVERY_S = 10.0
CLOSE_S = 2.0
"""How long the end of the job waits for a slow directory."""


class MetricsFile:
    """One job's file, `allranks_<job>.prom`.

    Args:
        directory: of the textfile collector, on this node.
        say: prints one line.
    """

    def __init__(self, directory: Path, *, job: str, say: Callable[[str], None]) -> None:
        self._directory, self._name, self._say = directory, f"allranks_{as_file_name(job)}.prom", say
        self._is_turn, self._is_told, self._is_over = threading.Lock(), False, False
        self._written_s: float | None = None
        self._before: dict[tuple[str, tuple[str, ...]], float] = {}

    def offer(self, status: JobStatus, *, now_s: float) -> threading.Thread | None:
        """Write the status as metrics, if the last write is EVERY_S ago and has ended; return the writing thread."""
        is_due = self._written_s is None or now_s - self._written_s >= EVERY_S
        if not is_due or not self._is_turn.acquire(blocking=False):
            return None
        self._written_s = now_s
        thread = start_thread(lambda: self._write(status), name="allranks-metrics")
        if thread is None:
            self._is_turn.release()
        return thread

    def close(self) -> None:
        """Remove the file."""
        self._is_over = True
        thread = start_thread(self._remove, name="allranks-metrics-end")
        if thread is not None:
            thread.join(CLOSE_S)

    def _write(self, status: JobStatus) -> None:
        try:
            samples = hold_counters(make_samples(status), self._before)
            self._before |= {(sample.name, sample.labels): sample.value for sample in samples}
            data = render_metrics(samples)
            if not self._is_over:
                Folder.root(self._directory).write_whole(self._name, data, mode=0o644)
        except ImportError:
            self._tell("prometheus-client is not installed: pip install 'allranks[metrics]'")
        except OSError as exc:
            self._tell(f"{self._directory}: {exc.strerror}")
        finally:
            self._is_turn.release()

    def _remove(self) -> None:
        with self._is_turn:  # a write that is under way would put the file back
            try:
                Folder.root(self._directory).unlink(self._name)
            except OSError as exc:
                self._tell(f"{self._directory}: {exc.strerror}")

    def _tell(self, why: str) -> None:
        is_told, self._is_told = self._is_told, True
        if not is_told:
            self._say(f"the job runs without metrics: {why}")
