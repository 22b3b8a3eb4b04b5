"""Does a job in a real SLURM name what is wrong with its nodes and network? One drill for each way of going wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks.causes.book import all_causes
from allranks.lab.faults.catalogue import FAULTS
from allranks.lab.faults.fault import Expected, TrueCulprit
from allranks.lab.faults.running.strike_catalogue import STRIKES
from allranks.lab.start_drill import is_named, names_in
from allranks.model.finding import Confidence, Finding, Severity

from .conftest import TestLab

IN_CI = [
    "cable-pulled",  # a node's own facts
    "env-drift-nccl-algo",  # the majority
    "nic-forced-docker0",  # all cards side by side
    "ports-filtered-between",  # a pair
    "mtu-blackhole",  # large packets
    "packet-loss-2",  # the second look
    "port-filtered",  # the leader's port: over the side port
    "gpu-missing",  # recorded commands
]
BY_HAND = [
    "mp-spawn-in-srun",  # the workers: 42 imports of torch
    "port-silent",  # a node that nothing reaches
    "partition",  # groups
    "slow-link",
    "run-dir-not-shared",  # over munge
    "loopback-hostname",  # a warning
    "stale-rank",  # a stranger
    "interface-renamed+torch-version-differs",  # two at a time
]


@pytest.mark.lab
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("faults", [IN_CI, pytest.param(BY_HAND, marks=pytest.mark.by_hand)], ids=["in CI", "by hand"])
def test_every_way_of_going_wrong_is_named(faults: list[str], six_nodes: TestLab, tmp_path: Path) -> None:
    results = tmp_path / "drills.json"
    done = six_nodes.run(
        "drill", *faults, "--healthy", "2", "--seed", "7", "--work-dir", tmp_path, "--json", results,
        must_work=False, timeout_s=1100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    drilled = json.loads(results.read_text())
    assert [("+".join(each["faults"]), each["wrong"]) for each in drilled] == [(name, []) for name in ["", "", *faults]]


@pytest.mark.lab
def test_an_unknown_fault_is_one_line(six_nodes: TestLab) -> None:
    done = six_nodes.run("drill", "cable-puled", must_work=False)
    assert done.returncode == 2
    assert done.stderr == "error: unknown fault 'cable-puled': did you mean cable-pulled?\n"


def test_every_cause_is_provoked_in_the_lab_or_says_why_not() -> None:
    provoked = {cause for each in (*FAULTS.values(), *STRIKES.values()) for cause in (*each.cause, *each.also)}
    looked_for = [cause for cause in all_causes() if not cause.is_outcome]
    assert [cause.label for cause in looked_for if cause.id not in provoked and not cause.no_fault_yet] == []
    assert [cause.label for cause in looked_for if cause.id in provoked and cause.no_fault_yet] == []


def test_every_fault_names_causes_of_the_catalogue() -> None:
    ids = {cause.id for cause in all_causes()}
    assert {cause for fault in FAULTS.values() for cause in (*fault.cause, *fault.also)} <= ids
    assert [
        fault.name for fault in FAULTS.values() if not fault.cause and fault.severity is not Expected.SURVIVED
    ] == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node03", {"node03"}),
        ("node[01-02],master-node", {"node01", "node02", "master-node"}),
        ("node01 <-> node03", {"node01", "node03"}),
        ("node01 or node02", {"node01", "node02"}),
        ("", set()),
    ],
)
def test_names_in_a_culprit_are_read(text: str, names: set[str]) -> None:
    assert names_in(text) == names


@pytest.mark.parametrize(
    ("node", "truth", "is_right"),
    [
        ("node03", TrueCulprit(nodes=("node03",), interface="ens1f1"), True),
        ("node[03-04]", TrueCulprit(nodes=("node03",)), False),
        ("node01 | node[02-03]", TrueCulprit(groups=(("node02", "node03"), ("node01",))), True),
        ("node01 | node02", TrueCulprit(groups=(("node02", "node03"), ("node01",))), False),
        ("node01 (192.168.20.99)", TrueCulprit(address="192.168.20.99"), True),
    ],
)
def test_a_culprit_is_right_only_if_it_is_exactly_the_truth(node: str, truth: TrueCulprit, is_right: bool) -> None:
    finding = Finding(
        cause="AR210 link-down", severity=Severity.FAIL, confidence=Confidence.CERTAIN, node=node, message="m"
    )
    assert is_named(finding, truth) is is_right
