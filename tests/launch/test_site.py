"""Is what a site makes impossible said, and nothing where all is as SLURM's defaults have it?"""

from __future__ import annotations

import pytest

from allranks.host.slurm_site import PartitionRules, Site
from allranks.launch.batch.batch_script import SbatchOptions
from allranks.launch.batch.submit import limits, parse_time_limit_s
from conftest import Allranks
from fake_slurm import FakeSlurm, fake_slurm  # noqa: F401  (a fixture)

DEFAULTS = Site(kill_wait_s=30, requeues=True, preempt_type="none", preempt_mode="OFF", signals_children=False)


def site(**changes: object) -> Site:
    given = {name: getattr(DEFAULTS, name) for name in Site.__dataclass_fields__}
    return Site(**(given | changes))


def test_slurm_s_defaults_need_no_word() -> None:
    assert list(limits(DEFAULTS, PartitionRules(preempt_mode="OFF"), SbatchOptions(time="60"))) == []
    assert list(limits(Site(), None, SbatchOptions())) == []


@pytest.mark.parametrize(
    ("site", "rules", "options", "line"),
    [
        (site(kill_wait_s=5), None, SbatchOptions(), "KillWait is 5 s: a checkpoint after SIGTERM has only"),
        (site(requeues=False), None, SbatchOptions(), "JobRequeue=0 here: SLURM requeues only jobs with --requeue"),
        (DEFAULTS, None, SbatchOptions(requeue=False), "--no-requeue: after the time limit, a preemption or a node"),
        (site(max_batch_requeue=1), None, SbatchOptions(), "MaxBatchRequeue is 1: SLURM holds a job"),
        (site(signals_children=True), None, SbatchOptions(), "SIGTERM from SLURM reaches the workers directly here"),
        (site(preempt_type="qos", preempt_mode="CANCEL"), None, SbatchOptions(), "SLURM cancels preempted jobs here"),
        (site(preempt_type="qos", preempt_mode="SUSPEND"), None, SbatchOptions(), "SLURM suspends preempted jobs here"),
        (site(preempt_type="partition_prio", preempt_mode="REQUEUE"), PartitionRules(), SbatchOptions(),
         "preemption has no GraceTime here: a checkpoint has 30 s (KillWait);"),
        (DEFAULTS, None, SbatchOptions(time="2"), "--time 2: the warning USR1@120 may come at the start of"),
        (DEFAULTS, None, SbatchOptions(time="0:90", signal="USR1"), "--time 0:90: the warning USR1 may come"),
    ],
)  # fmt: skip
def test_what_the_site_makes_impossible_is_one_line(
    site: Site, rules: PartitionRules | None, options: SbatchOptions, line: str
) -> None:
    (said,) = limits(site, rules, options)
    assert said.startswith(line)
    assert "\n" not in said


def test_the_partition_s_own_mode_counts() -> None:
    preempts = site(preempt_type="partition_prio", preempt_mode="CANCEL")
    assert list(limits(preempts, PartitionRules(grace_s=60, preempt_mode="REQUEUE"), SbatchOptions())) == []
    assert list(limits(preempts, PartitionRules(preempt_mode="OFF"), SbatchOptions())) == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("02:00:00", 7200), ("1-12", 129600), ("1-0:30", 88200), ("1-0:0:5", 86405),
     ("UNLIMITED", None), ("soon", None)],
)  # fmt: skip
def test_time_limits_as_sbatch_reads_them(text: str, seconds: int | None) -> None:
    assert parse_time_limit_s(text) == seconds


def test_submit_says_it(slurm: FakeSlurm, allranks: Allranks) -> None:
    slurm.answer("scontrol", "show config", out="KillWait                = 5 sec\nProctrackType = proctrack/cgroup\n")
    result = allranks("submit", "--nodes", "2", "--no-python", "true")
    assert result.stderr == (
        "allranks: note: KillWait is 5 s: a checkpoint after SIGTERM has only this time; "
        "--signal=USR1@120 warns before the time limit\n"
    )
    again = allranks("submit", "--nodes", "2", "--no-requeue", "--no-python", "true")
    assert "\nallranks: note: --no-requeue: " in again.stderr
    assert "KillWait" not in again.stderr, "what holds for every job here is said once"
