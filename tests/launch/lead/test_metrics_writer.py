"""A job's metrics as a file and at a collector: whole, ended with the job, and no cost to it where they cannot go."""

from __future__ import annotations

import gzip
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from allranks.launch.lead import metrics_writer
from allranks.launch.lead.metrics_writer import MetricsFile, MetricsWriter, open_metrics
from allranks.model.job_status import JobStatus
from allranks.model.ledger import Ledger
from allranks.report.metrics import Sample
from conftest import HANG_S

STATUS = JobStatus(
    job="47/11",
    written_s=1100.0,
    started_s=1000.0,
    phase="running",
    ledger=Ledger(begun_s=0.0, until_s=1.0, rank_s=1.0, seconds={"step": 1.0}, steps=7, is_steps_seen=True),
)
NAME = "allranks_47_11.prom"


def offer(writer: MetricsWriter, status: JobStatus, *, now_s: float) -> None:
    """Offer a status, and wait until it is written, where it is."""
    if (thread := writer.offer(status, now_s=now_s)) is not None:
        thread.join(HANG_S)


def with_steps(steps: int) -> JobStatus:
    assert STATUS.ledger is not None
    return msgspec.structs.replace(STATUS, ledger=msgspec.structs.replace(STATUS.ledger, steps=steps))


def test_a_file_is_written_every_ten_seconds_and_removed_at_the_end(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    said: list[str] = []
    writer = MetricsWriter(MetricsFile(tmp_path, "47/11"), say=said.append)
    seen = []
    for now_s, steps in ((5.0, 7), (14.0, 8), (15.0, 9), (25.0, 3)):
        offer(writer, with_steps(steps), now_s=now_s)
        lines = (tmp_path / NAME).read_text().splitlines()
        seen.append(next(line for line in lines if line.startswith("allranks_steps_total{")).split()[-1])
    assert seen == ["7.0", "7.0", "9.0", "9.0"]  # not yet due; and a counter never falls
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o644
    writer.close()
    assert (list(tmp_path.iterdir()), said) == ([], [])


def test_a_directory_that_is_missing_costs_one_line(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    said: list[str] = []
    writer = MetricsWriter(MetricsFile(tmp_path / "none", "1"), say=said.append)
    for now_s in (0.0, 10.0, 20.0):
        offer(writer, STATUS, now_s=now_s)
    writer.close()
    assert said == [f"the job runs without metrics: {tmp_path}/none: No such file or directory"]


def test_without_the_library_the_line_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    said: list[str] = []
    offer(MetricsWriter(MetricsFile(tmp_path, "1"), say=said.append), STATUS, now_s=0.0)
    assert said == ["the job runs without metrics: they need prometheus-client: pip install 'allranks[metrics]'"]
    assert list(tmp_path.iterdir()) == []


def test_a_slow_sink_delays_neither_the_leader_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_writer, "CLOSE_S", 0.01)
    is_free, written = threading.Event(), list[str]()

    class Slow:
        needs = ""
        keeps_last = False

        def write(self, samples: object) -> None:
            is_free.wait(HANG_S)
            written.append("write")

        def end(self) -> None:
            written.append("end")

    writer = MetricsWriter(Slow(), say=written.append)
    thread = writer.offer(STATUS, now_s=0.0)
    assert thread is not None
    assert writer.offer(STATUS, now_s=10.0) is None  # the first one has not ended
    writer.close()
    assert written == []
    is_free.set()
    thread.join(HANG_S)
    writer.close()
    assert written[:2] == ["write", "end"]  # what is written late is removed all the same


class Collected:
    """A sink that keeps what it got last."""

    needs, keeps_last = "", True

    def __init__(self) -> None:
        self.written: list[float] = []

    def write(self, samples: Sequence[Sample]) -> None:
        self.written += [sample.value for sample in samples if sample.name == "allranks_steps"]

    def end(self) -> None:
        """Nothing is left to do."""


@pytest.mark.parametrize("begins", ["never", "after the end"])
def test_the_last_state_is_written_at_the_end_though_its_own_thread_was_not_in_time(
    begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = list[Callable[[], None]]()

    def start(target: Callable[[], None], *, name: str) -> threading.Thread | None:
        late.append(target)
        return None if begins == "never" else threading.Thread()

    sink = Collected()
    writer = MetricsWriter(sink, say=print)
    monkeypatch.setattr(metrics_writer, "start_thread", start)
    writer.offer(with_steps(7), now_s=0.0)
    writer._is_over = True
    if begins != "never":
        late[0]()
    writer._end()
    assert sink.written == [7]


# OpenTelemetry


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    bodies: list[bytes]
    code = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.bodies.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        self.send_response(self.code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Collector]]:
    """A collector that the environment names, and whose requests are kept."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    kind = type("Collector", (Collector,), {"bodies": []})
    server = HTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield kind
    server.shutdown()
    thread.join(HANG_S)
    server.server_close()


def export(times_s: tuple[float, ...]) -> list[str]:
    """Write the status to the collector of the environment, and return what was said."""
    from allranks.launch.lead.metrics_otlp import OtlpExport

    said: list[str] = []
    writer = MetricsWriter(OtlpExport(os.environ), say=said.append)
    for now_s in times_s:
        offer(writer, STATUS, now_s=now_s)
    writer.close()
    return said


def test_a_collector_gets_the_same_series(collector: type[Collector]) -> None:
    assert export((0.0, 10.0)) == []
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    assert len(collector.bodies) == 2
    resource = ExportMetricsServiceRequest.FromString(collector.bodies[1]).resource_metrics[0]
    assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "allranks"
    found = {
        (metric.name, point.attributes[-1].value.string_value): point.as_double or point.as_int
        for metric in resource.scope_metrics[0].metrics
        for point in (metric.sum if metric.HasField("sum") else metric.gauge).data_points
    }
    assert {key: value for key, value in found.items() if value} == {
        ("allranks_rank_seconds", "step"): 1.0,
        ("allranks_steps", "47/11"): 7,
        ("allranks_goodput_ratio", "47/11"): 1.0,
        ("allranks_last_beat_timestamp_seconds", ""): 1100.0,
    }


def test_a_collector_also_gets_the_state_at_the_end(collector: type[Collector]) -> None:
    assert export((0.0, 1.0, 2.0)) == []
    assert len(collector.bodies) == 2
    assert export((0.0,)) == []
    assert len(collector.bodies) == 3  # nothing came after the first one


def test_a_collector_that_refuses_costs_one_line(collector: type[Collector], capfd: pytest.CaptureFixture[str]) -> None:
    collector.code = 400
    [said] = export((0.0, 10.0, 11.0))
    assert said.startswith(
        "the job runs without metrics: OpenTelemetry's collector did not take them (Failed to export "
    )
    assert "400" in said
    assert len(collector.bodies) == 2
    assert capfd.readouterr() == ("", "")


def test_words_of_the_sdk_that_cannot_be_read_are_left_out() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from allranks.launch.lead.metrics_otlp import FirstWords

    words = FirstWords()
    for text in ("%d of them", "refused: %s"):
        words.handle(logging.LogRecord("x", logging.ERROR, "x.py", 1, text, ("all",), None))
    assert words.text == "refused: all"


@pytest.mark.parametrize(
    ("directory", "env", "has_sdk", "sinks"),
    [
        (None, {}, True, []),
        (Path("/m"), {}, True, ["MetricsFile"]),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, True, []),
        (Path("/m"), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, True, ["MetricsFile", "OtlpExport"]),
        (None, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c"}, True, ["OtlpExport"]),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, False, []),
    ],
)
def test_metrics_go_where_they_are_wanted(
    directory: Path | None, env: dict[str, str], has_sdk: bool, sinks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_writer, "is_installed", lambda module: has_sdk)
    metrics = open_metrics(directory, job="1", env=env, say=print)
    assert [type(writer._sink).__name__ for writer in metrics._writers] == sinks
