"""Send the metrics of a job to a collector of OpenTelemetry, with its own SDK and its own variables (OTEL_*).

Names and attributes are the names and labels of report.metrics. A write collects all samples once and exports them, so
that a failure is known here: the SDK's own periodic export would log it on the terminal, each time. The state at the
end of the job is written, too, since a collector keeps what it got last.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from allranks.report.metrics import FAMILIES, Sample
from allranks.report.text import one_line

PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
MAX_REASON = 300
EXPORTER = "opentelemetry.exporter.otlp.proto.{}.metric_exporter"


class FirstWords(logging.Handler):
    """Keeps what the SDK logs first: why a collector does not take something. What it logs last only sums up."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, if it is the first."""
        with contextlib.suppress(Exception):  # words and values that do not fit
            self.text = self.text or one_line(record.getMessage())[:MAX_REASON]


class OtlpExport:
    """The collector that the environment names; the SDK is imported with the first write.

    Args:
        env: with OpenTelemetry's variables.
    """

    keeps_last = True

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._kind = "grpc" if env.get(PROTOCOL, "").startswith("grpc") else "http"
        package = f"opentelemetry-exporter-otlp-proto-{self._kind}"
        self.needs = f"{package}: pip install {package}"
        self._samples: Sequence[Sample] = ()
        self._first_words = FirstWords()
        self._parts: tuple[Any, Any] | None = None
        """Reader and exporter."""

    def write(self, samples: Sequence[Sample]) -> None:
        """Export all samples.

        Raises:
            OSError: the collector does not answer, or does not take them.
            ImportError: the exporter of the protocol is not installed.
        """
        from opentelemetry.sdk.metrics.export import MetricExportResult

        self._samples, self._first_words.text = samples, ""
        self._parts = self._parts or self._begin()
        reader, exporter = self._parts
        data = reader.get_metrics_data()
        if data is not None and exporter.export(data) is not MetricExportResult.SUCCESS:
            raise OSError(errno.EIO, f"OpenTelemetry's collector did not take them ({self._first_words.text})")

    def end(self) -> None:
        """Close the connection."""
        if self._parts is not None:
            self._parts[1].shutdown()

    def _begin(self) -> tuple[Any, Any]:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import Resource

        logging.getLogger("opentelemetry").addHandler(self._first_words)
        logging.getLogger("opentelemetry").propagate = False
        exporter = importlib.import_module(EXPORTER.format(self._kind)).OTLPMetricExporter()
        reader = InMemoryMetricReader()
        own = {} if self._env.get("OTEL_SERVICE_NAME") else {"service.name": "allranks"}
        provider = MeterProvider([reader], resource=Resource.create(own), shutdown_on_exit=False)
        meter = provider.get_meter("allranks")
        for name, family in FAMILIES.items():
            make = meter.create_observable_counter if family.is_counter else meter.create_observable_gauge
            make(name, callbacks=[self._observe(name)], unit="s" if "seconds" in name else "1", description=family.help)
        return reader, exporter

    def _observe(self, name: str) -> Callable[[Any], Iterator[Any]]:
        from opentelemetry.metrics import Observation

        def observe(_options: Any) -> Iterator[Any]:
            for sample in self._samples:
                if sample.name == name:
                    yield Observation(sample.value, dict(zip(FAMILIES[name].labels, sample.labels, strict=True)))

        return observe
