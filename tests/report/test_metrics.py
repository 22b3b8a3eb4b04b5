"""What a job's status becomes for Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from allranks.model.job_status import JobStatus, NodeRow
from allranks.model.ledger import Ledger, RankLedger, RestartCost
from allranks.report.metrics import FAMILIES, Sample, hold_counters, make_samples, render_metrics

DASHBOARD = Path(__file__).parents[2] / "packaging/grafana/allranks.json"
LEDGER = Ledger(
    begun_s=1000.0,
    until_s=1100.0,
    rank_s=400.0,
    seconds={"step": 300.0, "wait": 60.0, "save": 10.0, "queue": 30.0},
    steps=900,
    is_steps_seen=True,
    ranks=(
        RankLedger(rank=0, node="n1", seconds={"step": 100.0, "wait": 40.0}),
        RankLedger(rank=1, node="n1", seconds={"step": 100.0, "wait": 20.0}),
        RankLedger(rank=2, node="n2", seconds={"step": 100.0, "save": 10.0}),
    ),
    waited_for=tuple(RankLedger(rank=rank, seconds={}, waited_for_s=100.0 - rank) for rank in range(20)),
    restarts=(
        RestartCost(generation=1, cause="AR407 dead-rank"),
        RestartCost(generation=2, cause="AR301 oom"),
        RestartCost(generation=3, cause="AR407 dead-rank"),
    ),
)
STATUS = JobStatus(
    job='4711 "a\\b"',
    written_s=1100.0,
    started_s=1000.0,
    phase="running",
    nodes=(NodeRow(name="n1", silent_s=0.25), NodeRow(name="n2", silent_s=40.0, is_lost=True)),
    ledger=LEDGER,
)


def values(status: JobStatus) -> dict[str, float]:
    """The samples that are not zero, as `name node category: value`, without the job."""
    found = make_samples(status)
    return {
        " ".join([sample.name.removeprefix("allranks_"), *map(repr, sample.labels[1:])]): sample.value
        for sample in found
        if sample.value
    }


def test_a_status_has_these_series() -> None:
    assert values(STATUS) == {
        "last_beat_timestamp_seconds 'n1'": 1099.75,
        "last_beat_timestamp_seconds 'n2'": 1060.0,
        "rank_seconds 'n1' 'step'": 200.0,
        "rank_seconds 'n1' 'wait'": 60.0,
        "rank_seconds 'n2' 'step'": 100.0,
        "rank_seconds 'n2' 'save'": 10.0,
        "rank_seconds '' 'queue'": 30.0,
        **{f"waited_for_seconds '{rank}'": 100.0 - rank for rank in range(8)},
        "restarts 'AR301 oom'": 1,
        "restarts 'AR407 dead-rank'": 2,
        "steps": 900,
        "goodput_ratio": 0.75,
    }


def test_what_is_not_known_has_no_series() -> None:
    assert values(JobStatus(job="1", written_s=5.0, started_s=1.0, phase="forming")) == {
        "last_beat_timestamp_seconds ''": 5.0
    }
    unseen = Ledger(begun_s=0.0, until_s=1.0, rank_s=1.0, seconds={"unknown": 1.0})
    names = {
        sample.name for sample in make_samples(JobStatus(job="1", written_s=5, started_s=1, phase="", ledger=unseen))
    }
    assert names == {"allranks_last_beat_timestamp_seconds", "allranks_rank_seconds"}


def test_ranks_that_have_begun_only_just_are_not_counted_as_unknown() -> None:
    ranks = (RankLedger(rank=0, node="n1", seconds={"unknown": 1.0, "start": 1.0}),)
    ledger = Ledger(begun_s=0.0, until_s=1.0, rank_s=2.0, seconds={"unknown": 1.0, "start": 1.0}, ranks=ranks)
    young = JobStatus(job="1", written_s=60.0, started_s=1.0, phase="running", ledger=ledger)
    begun, old = msgspec.structs.replace(young, step=1), msgspec.structs.replace(young, written_s=700.0)
    unknown = "rank_seconds 'n1' 'unknown'"
    assert [values(status).get(unknown, 0.0) for status in (young, begun, old)] == [0.0, 1.0, 1.0]


def test_seconds_of_a_ledger_that_may_lack_ranks_are_not_split_by_node() -> None:
    ranks = tuple(RankLedger(rank=rank, node=f"n{rank}", seconds={"step": 1.0}) for rank in range(64))
    ledger = Ledger(begun_s=0.0, until_s=1.0, rank_s=100.0, seconds={"step": 100.0}, ranks=ranks)
    status = JobStatus(job="1", written_s=5.0, started_s=1.0, phase="", ledger=ledger)
    assert {name: value for name, value in values(status).items() if "rank_seconds" in name} == {
        "rank_seconds '' 'step'": 100.0
    }


def test_a_counter_never_falls_and_a_gauge_does() -> None:
    before = {("allranks_steps", ("1",)): 90.0, ("allranks_goodput_ratio", ("1",)): 0.9}
    now = [
        Sample("allranks_steps", ("1",), 50.0),
        Sample("allranks_steps", ("2",), 50.0),
        Sample("allranks_goodput_ratio", ("1",), 0.5),
    ]
    assert [sample.value for sample in hold_counters(now, before)] == [90.0, 50.0, 0.5]


def test_the_text_is_what_prometheus_reads() -> None:
    pytest.importorskip("prometheus_client")
    lines = render_metrics(make_samples(STATUS)).decode().splitlines()
    assert "# TYPE allranks_rank_seconds_total counter" in lines
    assert 'allranks_rank_seconds_total{category="wait",job="4711 \\"a\\\\b\\"",node="n1"} 60.0' in lines
    assert 'allranks_goodput_ratio{job="4711 \\"a\\\\b\\""} 0.75' in lines
    assert {line.split()[2] for line in lines if line.startswith("# TYPE")} == {
        f"{name}_total" if family.is_counter else name for name, family in FAMILIES.items()
    }
    assert len({line.rpartition(" ")[0] for line in lines if line[0] != "#"}) == len(make_samples(STATUS))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian's package prometheus)")
def test_promtool_takes_the_text() -> None:
    pytest.importorskip("prometheus_client")
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=render_metrics(make_samples(STATUS)), capture_output=True, timeout=60
    )
    assert (checked.returncode, checked.stderr) == (0, b"")


def test_the_dashboard_asks_for_every_metric_and_no_other() -> None:
    text = DASHBOARD.read_text()
    exported = {f"{name}_total" if family.is_counter else name for name, family in FAMILIES.items()}
    asked = [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]
    assert {name for expression in asked for name in re.findall(r"allranks_[a-z_]*[a-z](?=\{)", expression)} == exported
    labels = {label for family in FAMILIES.values() for label in family.labels} - {"job"} | {"exported_job"}
    assert {name for names in re.findall(r"by \(([^)]*)\)", text) for name in names.split(", ")} <= labels
