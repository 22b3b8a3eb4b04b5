"""Which settings of this site's SLURM decide whether a job can be requeued? From `scontrol show config`.

    >>> parse_site("KillWait                = 30 sec\\nJobRequeue              = 1\\n").kill_wait_s
    30.0

Versions differ in what they print: MaxBatchRequeue came with 23.02, settings of cgroup.conf stand
in a part of their own below the others, spelled yes or no, and empty values are `(null)`. What is not printed is None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from allranks.host.slurm_command import refusal_of, run_slurm, words_of

ASK_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the controller said of itself."""

    version: str = ""
    cluster_name: str = ""
    kill_wait_s: float | None = None
    """Between SIGTERM and SIGKILL."""
    requeues: bool | None = None
    """JobRequeue: whether jobs that say nothing may be put back."""
    max_batch_requeue: int | None = None
    """How often SLURM by itself puts a job back before it holds it: after failed starts and prologs."""
    preempt_type: str = ""
    preempt_mode: str = ""
    signals_children: bool | None = None
    """Whether SLURM's signals reach workers directly: SignalChildrenProcesses, or a proctrack that knows no better."""
    slurmd_timeout_s: float | None = None
    """After how long without a word SLURM takes a node away from its jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRules:
    """What `scontrol show partition` says of preemption."""

    grace_s: float = 0.0
    """Between the SIGTERM of a preemption and the end."""
    preempt_mode: str = ""


def read_site(*, env: Mapping[str, str] | None = None) -> Site:
    """Ask the controller.

    Args:
        env: of the command, the own one if None.
    Raises:
        SetupError: SLURM is not there, or does not answer.
    """
    answer = run_slurm("scontrol", "show", "config", env=env, deadline_s=ASK_S)
    if answer.returncode != 0:
        raise refusal_of("scontrol", words_of(answer))
    return parse_site(answer.stdout)


def read_partition(name: str, *, env: Mapping[str, str] | None = None) -> PartitionRules:
    """Ask the controller for a partition's rules.

    Args:
        name: of the partition.
        env: of the command, the own one if None.
    Raises:
        SetupError: SLURM is not there, or does not know it.
    """
    answer = run_slurm("scontrol", "--all", "show", "partition", name, env=env, deadline_s=ASK_S)
    if answer.returncode != 0:
        raise refusal_of("scontrol", words_of(answer))
    return parse_partition(answer.stdout)


def parse_site(text: str) -> Site:
    """Read `scontrol show config`."""
    values = {
        key.lower(): "" if value.strip() in ("(null)", "N/A") else value.strip()
        for key, value in re.findall(r"^[ \t]*([A-Za-z_]+)[ \t]*=(.*)$", text, re.MULTILINE)
    }
    children = _truth(values.get("signalchildrenprocesses"))
    proctrack = values.get("proctracktype", "")
    if children is None and proctrack:
        children = proctrack.endswith("linuxproc")  # cgroup knows who was started by SLURM itself, pgid knows groups
    return Site(
        version=values.get("slurm_version", ""),
        cluster_name=values.get("clustername", ""),
        kill_wait_s=_number(values.get("killwait")),
        requeues=_truth(values.get("jobrequeue")),
        max_batch_requeue=None if (most := _number(values.get("maxbatchrequeue"))) is None else int(most),
        preempt_type=values.get("preempttype", "").removeprefix("preempt/"),
        preempt_mode=values.get("preemptmode", ""),
        signals_children=children,
        slurmd_timeout_s=_number(values.get("slurmdtimeout")),
    )


def parse_partition(text: str) -> PartitionRules:
    """Read `scontrol show partition`.

    >>> parse_partition("PartitionName=main GraceTime=10 Hidden=NO\\n OverTimeLimit=NONE PreemptMode=REQUEUE\\n")
    PartitionRules(grace_s=10.0, preempt_mode='REQUEUE')
    """
    values = dict(re.findall(r"(?<!\S)([^\s=]+)=(\S*)", text))
    return PartitionRules(grace_s=_number(values.get("GraceTime")) or 0.0, preempt_mode=values.get("PreemptMode", ""))


def _number(text: str | None) -> float | None:
    match = re.match(r"[0-9]{1,18}(?![0-9])", text or "")
    return float(match[0]) if match else None


def _truth(text: str | None) -> bool | None:
    return {"1": True, "yes": True, "0": False, "no": False}.get((text or "").lower())
