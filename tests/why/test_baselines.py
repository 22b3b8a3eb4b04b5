"""Do the logs of plain torchrun, which names nobody, lead to the lab's fault, or is it said that they cannot tell?

baselines/<fault>.txt.gz is what `allranks lab drill <fault> --baseline` kept of torchrun 2.13 under `srun --label`, six
nodes with one rank each, without the C++ frames.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from allranks.cli.main import cli

BASELINES = Path(__file__).parent / "baselines"
TRUTH = {
    "cable-pulled": ("link-down", "node04"),
    "interface-down": ("link-down", "node02"),
    "link-cut": ("partition", "node04"),
    "master-address-wrong": ("master-unreachable", "192.168.20.99"),
    "master-name-unresolvable": ("master-dns", "5"),
    "nic-forced-docker0": ("wrong-nic", "1"),
    "nic-forced-lo": ("wrong-nic", "1"),
    "partition": ("partition", "node[03-05]"),
    "port-in-use": ("port-in-use", "master-node"),
    "port-silent": ("link-down", "node02"),
}
"""Fault -> the cause, and a word that the culprit must have: its node, its rank, or the address itself."""
CANNOT_TELL = {
    "disk-full", "interface-renamed", "loopback-hostname", "nic-forced-management", "nofile-low", "packet-loss-20",
    "slow-link", "torch-version-differs",  # torchrun ran to its end, and said nothing of it
    "mp-spawn-in-srun", "mtu-blackhole", "ports-filtered-between",  # it hung without a word
    "duplicate-hostname", "never-starts", "port-filtered",  # nothing answered: not why
    "torchrun-in-tasks",  # torchrun's own bug is what it says
}  # fmt: skip


def ask(fault: str) -> tuple[int, dict[str, object]]:
    command = ["why", "--json", f"{BASELINES / fault}.txt.gz"]
    result = CliRunner().invoke(cli, command, standalone_mode=False, catch_exceptions=False)
    return int(result.return_value), json.loads(result.stdout)


def test_every_log_has_its_truth() -> None:
    assert {path.name.removesuffix(".txt.gz") for path in BASELINES.iterdir()} == TRUTH.keys() | CANNOT_TELL


@pytest.mark.parametrize("fault", TRUTH)
def test_the_fault_and_its_culprit_are_named(fault: str) -> None:
    cause, culprit = TRUTH[fault]
    exit_code, answer = ask(fault)
    first = answer["findings"][0]  # type: ignore[index]
    assert exit_code == 1
    assert first["cause"].endswith(f" {cause}")
    assert culprit in f"{first['node']} {first['ranks']} {first['subject']}"


@pytest.mark.parametrize("fault", sorted(CANNOT_TELL))
def test_logs_that_cannot_tell_blame_nobody(fault: str) -> None:
    exit_code, answer = ask(fault)
    findings = answer["findings"]
    is_said = exit_code in (0, 3) or "cannot tell" in findings[0]["message"]  # type: ignore[index]
    assert is_said or findings[0]["confidence"] == "undecided"  # type: ignore[index]
