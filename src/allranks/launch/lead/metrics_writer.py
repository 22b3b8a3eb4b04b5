"""Write the metrics of a job every 10 s: to a directory of node_exporter, and to a collector of OpenTelemetry.

    metrics = open_metrics(plan.metrics_dir, job="4711", env=os.environ, say=say)
    metrics.offer(status, now_s=time.monotonic())      # as often as there is a status
    metrics.close()

A directory that is missing, full or slow, or a collector that does not answer, costs the metrics, never the job: each
write is a thread of its own, and the first failure is reported on one line.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from allranks.files.folder import Folder
from allranks.host.threads import start_thread
from allranks.model.job_status import JobStatus
from allranks.report.metrics import Sample, hold_counters, make_samples, render_metrics
from allranks.report.rundir import as_file_name

EVERY_S = 10.0
CLOSE_S = 2.0
"""How long the end of the job waits for a slow directory or collector."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
"""OpenTelemetry's variables: with one of them, metrics go to that collector."""


class Sink(Protocol):
    """Where metrics go; both functions are called in threads, never two at a time."""

    needs: str
    """What must be installed, and how."""
    keeps_last: bool
    """What was written last stays after the end of the job, so the state at the end is written, too."""

    def write(self, samples: Sequence[Sample]) -> None:
        """Write all samples, or raise OSError or ImportError."""

    def end(self) -> None:
        """Remove what would outlive the job."""


class MetricsFile:
    """One file, `allranks_<job>.prom`, written whole each time; a leader that is killed leaves it behind."""

    needs = "prometheus-client: pip install 'allranks[metrics]'"
    keeps_last = False

    def __init__(self, directory: Path, job: str) -> None:
        self._directory, self._name = directory, f"allranks_{as_file_name(job)}.prom"

    def write(self, samples: Sequence[Sample]) -> None:
        """Write the file."""
        data = render_metrics(samples)
        Folder.root(self._directory).write_whole(self._name, data, mode=0o644)

    def end(self) -> None:
        """Remove the file."""
        Folder.root(self._directory).unlink(self._name)


class MetricsWriter:
    """Writes to one sink when it is time, without delaying the caller."""

    def __init__(self, sink: Sink, *, say: Callable[[str], None]) -> None:
        self._sink, self._say = sink, say
        self._is_turn, self._is_told, self._is_over = threading.Lock(), False, False
        self._written_s: float | None = None
        self._untold: JobStatus | None = None
        """The newest one, where it was not written."""
        self._before: dict[tuple[str, tuple[str, ...]], float] = {}

    def offer(self, status: JobStatus, *, now_s: float) -> threading.Thread | None:
        """Write the status as metrics, if the last write is EVERY_S ago and has ended; return the writing thread."""
        is_due = self._written_s is None or now_s - self._written_s >= EVERY_S
        self._untold = status
        if not is_due or not self._is_turn.acquire(blocking=False):
            return None
        self._written_s, self._untold = now_s, None
        thread = start_thread(lambda: self._write(status), name="allranks-metrics")
        if thread is None:
            self._keep(status)
            self._is_turn.release()
        return thread

    def close(self) -> None:
        """End the sink, after a write that is under way: it would put the file back."""
        self._is_over = True
        thread = start_thread(self._end, name="allranks-metrics-end")
        if thread is not None:
            thread.join(CLOSE_S)

    def _write(self, status: JobStatus) -> None:
        try:
            if self._is_over:
                self._keep(status)
            else:
                self._write_samples(status)
        finally:
            self._is_turn.release()

    def _keep(self, status: JobStatus) -> None:
        """Leave it for the end, unless a newer one came."""
        self._untold = self._untold or status

    def _write_samples(self, status: JobStatus) -> None:
        samples = hold_counters(make_samples(status), self._before)
        self._before |= {(sample.name, sample.labels): sample.value for sample in samples}
        self._attempt(lambda: self._sink.write(samples))

    def _end(self) -> None:
        with self._is_turn:
            if self._sink.keeps_last and self._untold is not None and not self._is_told:
                self._write_samples(self._untold)
            self._attempt(self._sink.end)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except ImportError:
            self._tell(f"they need {self._sink.needs}")
        except OSError as exc:
            self._tell(": ".join(str(part) for part in (exc.filename, exc.strerror or exc) if part))

    def _tell(self, why: str) -> None:
        is_told, self._is_told = self._is_told, True
        if not is_told:
            self._say(f"the job runs without metrics: {why}")


class Metrics:
    """All places to which a job's metrics go; often none."""

    def __init__(self, writers: Sequence[MetricsWriter]) -> None:
        self._writers = writers

    def offer(self, status: JobStatus, *, now_s: float) -> None:
        """Write the status everywhere where it is time."""
        for writer in self._writers:
            writer.offer(status, now_s=now_s)

    def close(self) -> None:
        """End all."""
        for writer in self._writers:
            writer.close()


def open_metrics(directory: Path | None, *, job: str, env: Mapping[str, str], say: Callable[[str], None]) -> Metrics:
    """Return where the metrics of a job go.

    Args:
        directory: of node_exporter's textfile collector; None: no file.
        env: with one of ENDPOINTS, and OpenTelemetry's SDK installed, they go to that collector, too.
        say: prints one line.
    """
    sinks: list[Sink] = [MetricsFile(directory, job)] if directory is not None else []
    if any(env.get(name) for name in ENDPOINTS) and is_installed("opentelemetry.sdk"):
        from allranks.launch.lead.metrics_otlp import OtlpExport

        sinks.append(OtlpExport(env))
    return Metrics([MetricsWriter(sink, say=say) for sink in sinks])


def is_installed(module: str) -> bool:
    """Whether a module can be imported; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # not even its parent
        return False
