"""A job's status as metrics for Prometheus: steps, the ledger, restarts, the ranks that others wait for. (pure)

    text = render_metrics(hold_counters(make_samples(status), {}))

Names and units are those of https://prometheus.io/docs/practices/naming/. The labels are the job, the node and, of a
few, the rank. `launch.lead.metrics_writer` writes the text for node_exporter's textfile collector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from allranks.model.job_status import JobStatus
from allranks.model.ledger import MAX_RANKS, Category, Ledger
from allranks.model.safe_text import as_utf8

MAX_WAITED_FOR = 8
"""Ranks with a series of their own: those that others waited for longest."""

UNTOLD_S = 600.0
"""Ranks that import and load have booked nothing yet: until the first step, or for so long, that is not `unknown`."""
SECONDS = "allranks_rank_seconds"
STEPS = "allranks_steps"
GOODPUT = "allranks_goodput_ratio"
RESTARTS = "allranks_restarts"
WAITED_FOR = "allranks_waited_for_seconds"
LAST_BEAT = "allranks_last_beat_timestamp_seconds"


class MetricFamily(NamedTuple):
    """What all series of one name have in common."""

    help: str
    labels: tuple[str, ...]
    is_counter: bool = True


FAMILIES = {
    SECONDS: MetricFamily(
        "Rank-seconds by category of the ledger. A fault moves lost steps to redo; their category then stands still "
        "until it is larger than before.",
        ("job", "node", "category"),
    ),
    STEPS: MetricFamily("Optimizer steps that count: steps that were done again count once.", ("job",)),
    GOODPUT: MetricFamily(
        "Share of step and transfer in all rank-seconds since the submission; with NCCL an upper bound.",
        ("job",),
        is_counter=False,
    ),
    RESTARTS: MetricFamily("Restarts by the fault before them.", ("job", "cause")),
    WAITED_FOR: MetricFamily("Seconds that all other ranks waited for this rank; the eight largest.", ("job", "rank")),
    LAST_BEAT: MetricFamily(
        "When the leader last heard of a node, in seconds since the epoch.", ("job", "node"), is_counter=False
    ),
}


class Sample(NamedTuple):
    """One series and its value."""

    name: str
    """Key of FAMILIES."""
    labels: tuple[str, ...]
    """Values, in the order of the family's labels."""
    value: float


def make_samples(status: JobStatus) -> list[Sample]:
    """Return the metrics of a job, each series once; what is not known has no sample."""
    job, ledger = status.job, status.ledger
    found = [Sample(LAST_BEAT, (job, node.name), status.written_s - node.silent_s) for node in status.nodes]
    found = found or [Sample(LAST_BEAT, (job, ""), status.written_s)]
    if ledger is not None:
        found += _of_ledger(job, ledger)
    if status.step is None and status.age_s < UNTOLD_S:
        found = [sample._replace(value=0.0) if _is_unknown(sample) else sample for sample in found]
    series = {(sample.name, tuple(map(as_utf8, sample.labels))): sample.value for sample in found}
    return [Sample(*key, value) for key, value in series.items()]


def _is_unknown(sample: Sample) -> bool:
    return sample.name == SECONDS and sample.labels[-1] == Category.UNKNOWN


def _of_ledger(job: str, ledger: Ledger) -> list[Sample]:
    found = [*_seconds(job, ledger)]
    owed = sorted((row for row in ledger.waited_for if row.waited_for_s > 0), key=lambda row: -row.waited_for_s)
    found += [Sample(WAITED_FOR, (job, str(row.rank)), row.waited_for_s) for row in owed[:MAX_WAITED_FOR]]
    causes = Counter(restart.cause or "not known" for restart in ledger.restarts)
    found += [Sample(RESTARTS, (job, cause), count) for cause, count in sorted(causes.items())]
    if ledger.is_steps_seen:
        found.append(Sample(STEPS, (job,), ledger.steps))
    if (goodput := ledger.goodput) is not None:
        found.append(Sample(GOODPUT, (job,), goodput))
    return found


def _seconds(job: str, ledger: Ledger) -> Iterator[Sample]:
    """Return the rank-seconds by node, and under the empty node what no node has: the sum is that of the ledger.

    A ledger with MAX_RANKS rows may lack ranks, not always the same ones, so there all seconds have the empty node.
    """
    by_node: Counter[tuple[str, str]] = Counter()
    if len(ledger.ranks) < MAX_RANKS:
        for row in ledger.ranks:
            for category, seconds in row.seconds.items():
                by_node[row.node, category] += seconds  # type: ignore[assignment]  # a Counter also sums floats
    for node in sorted({node for node, _ in by_node if node}):
        for category in Category:
            yield Sample(SECONDS, (job, node, category), by_node[node, category])
    for category in Category:
        named = sum(seconds for (node, of), seconds in by_node.items() if node and of == category)
        yield Sample(SECONDS, (job, "", category), max(0.0, ledger.seconds.get(category, 0.0) - named))


def hold_counters(samples: Iterable[Sample], before: Mapping[tuple[str, tuple[str, ...]], float]) -> list[Sample]:
    """Return the samples, each counter at least as high as before: Prometheus takes a lower one for a restart at 0.

    Args:
        before: values that were written last, by name and labels.
    """
    return [
        sample._replace(value=max(sample.value, before.get((sample.name, sample.labels), 0.0)))
        if FAMILIES[sample.name].is_counter
        else sample
        for sample in samples
    ]


def render_metrics(samples: Sequence[Sample]) -> bytes:
    """Return the samples in Prometheus' text format.

    Raises:
        ImportError: prometheus-client is not installed.
    """
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

    class OfJob(Collector):
        def collect(self) -> Iterator[Metric]:
            for name, family in FAMILIES.items():
                kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
                metric = kind(name, family.help, labels=family.labels)
                for sample in samples:
                    if sample.name == name:
                        metric.add_metric(sample.labels, sample.value)
                if metric.samples:
                    yield metric

    registry = CollectorRegistry(auto_describe=False)
    registry.register(OfJob())
    return generate_latest(registry)
