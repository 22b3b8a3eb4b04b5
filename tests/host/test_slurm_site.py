"""Is a site's configuration read right, whatever the version prints?"""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.host.slurm_site import PartitionRules, Site, parse_partition, parse_site, read_site
from fake_slurm import FakeSlurm, fake_slurm  # noqa: F401  (a fixture)

RECORDED = Path(__file__).parent / "recorded" / "slurm"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("22.05", Site(version="22.05.8", kill_wait_s=5, requeues=True, preempt_type="none", preempt_mode="OFF",
                       signals_children=True, slurmd_timeout_s=15)),
        ("23.02", Site(version="23.02.7", kill_wait_s=30, requeues=True, max_batch_requeue=5, preempt_type="none",
                       preempt_mode="OFF", signals_children=True, slurmd_timeout_s=60)),
        ("25.05", Site(version="25.05.5", kill_wait_s=30, requeues=False, max_batch_requeue=5, preempt_mode="OFF")),
        ("25.11", Site(version="25.11.4", kill_wait_s=30, requeues=True, max_batch_requeue=5, preempt_mode="OFF",
                       signals_children=True, slurmd_timeout_s=300)),
    ],
)  # fmt: skip
def test_recorded_answers_of_several_versions_are_read(version: str, expected: Site) -> None:
    assert parse_site((RECORDED / f"config-{version}.txt").read_text()) == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("ProctrackType = proctrack/cgroup\n", False),
        ("ProctrackType = proctrack/pgid\n", False),
        ("ProctrackType = proctrack/cgroup\n\nCgroup Support Configuration:\nSignalChildrenProcesses = yes\n", True),
        ("ProctrackType = proctrack/cgroup\n\nCgroup Support Configuration:\nSignalChildrenProcesses = no\n", False),
        ("KillWait = 30 sec\n", None),
    ],
)
def test_who_gets_slurm_s_signals_follows_from_cgroup_conf_or_proctrack(lines: str, expected: bool | None) -> None:
    assert parse_site(lines).signals_children is expected


def test_what_nobody_printed_is_unknown() -> None:
    assert parse_site("site banner = hello\n\n===\n") == Site()


def test_partition_of_22_05() -> None:
    text = (
        "PartitionName=main\n   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL\n"
        "   DefaultTime=02:00:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=10 Hidden=NO\n"
        "   OverTimeLimit=NONE PreemptMode=REQUEUE\n   State=UP TotalCPUs=12\n"
    )
    assert parse_partition(text) == PartitionRules(grace_s=10, preempt_mode="REQUEUE")
    assert parse_partition("") == PartitionRules()


def test_the_controller_is_asked_without_what_filters_its_answer(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    slurm.answer("scontrol", "show config", out=(RECORDED / "config-23.02.txt").read_text())
    assert read_site().kill_wait_s == 30
    (call,) = slurm.calls("scontrol")
    assert "SLURM_TIME_FORMAT" not in call["env"]  # type: ignore[operator]
