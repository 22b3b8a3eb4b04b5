"""Does `allranks run` report the right culprit? Inject a fault, start a real job, compare the verdict with the truth.

    drill(Lab("demo"), ["cable-pulled"], seed=7, work_dir=Path("drills"))     # -> DrillResult

Phase 1  the faults are injected      (faults.injected; the seed chooses the place)
Phase 2  a job starts through SLURM on all nodes; its program forms a group and ends
Phase 3  its output is compared with the truth: cause, culprit, severity, the same verdict on all nodes, exit code,
         seconds from the start of the last agent, leftover processes
Phase 4  the faults are healed, whatever happened

With a baseline, plain torchrun runs the same program with the same faults: how long until it prints something, and
what?
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from datetime import date
from pathlib import Path

import msgspec

from allranks.lab.faults.fault import Expected, TrueCulprit
from allranks.lab.faults.injected import Injected, choose_where, find_fault, heal, inject
from allranks.lab.faulty_job import BASELINE_S, Baseline, Job, run_baseline, run_job, wait_until_gone
from allranks.lab.lab import Lab
from allranks.model.errors import HostlistError
from allranks.model.finding import Finding
from allranks.model.hostlist import expand_hosts

BASELINES = (
    "master-address-wrong",
    "port-in-use",
    "port-filtered",
    "ports-filtered-between",
    "partition",
    "interface-down",
    "nic-forced-docker0",
    "mtu-blackhole",
    "packet-loss-20",
    "slow-link",
    "never-starts",
    "mp-spawn-in-srun",
)
"""One fault of each class: only for these, plain torchrun runs as well, which takes two minutes each."""


class DrillResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one drill."""

    faults: tuple[str, ...]
    seed: int
    where: str
    """The truth: who is the culprit."""
    expected: tuple[str, ...]
    """Ids of causes and their severity."""
    findings: tuple[Finding, ...]
    seconds: float | None
    """From the start of the last agent to the verdict."""
    exit_code: int | None
    wrong: tuple[str, ...]
    """Differences from the expected result; empty if it is correct."""
    baseline: Baseline | None = None

    @property
    def verdict(self) -> str:
        """The findings in one line."""
        return (
            "; ".join(f"{finding.cause} {finding.node or ''} ({finding.severity})" for finding in self.findings)
            or "none"
        )


def drill(
    lab: Lab,
    names: Sequence[str],
    *,
    seed: int,
    work_dir: Path,
    on: str | None = None,
    has_baseline: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> DrillResult:
    """Inject faults into a running lab, all at the same time, run a job, and heal them.

    Args:
        lab: a lab that is up.
        names: names of the faults; empty: a healthy start.
        seed: of all random choices.
        work_dir: for run directories and logs; visible to the nodes.
        on: node of the first fault; by default chosen by the seed.
        has_baseline: whether plain torchrun runs with the same faults afterwards.
        say: gets a line about steps that take long.
    Raises:
        UsageError: the lab is not up, there is no such fault or node.
        SetupError: a fault cannot be injected or healed.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    label = "+".join(names) or "healthy"
    run_dir = (work_dir / f"{label}-{seed}").absolute()
    run_dir.mkdir(exist_ok=True)
    injected: list[Injected] = []
    try:
        for position, name in enumerate(names):
            used = {one.scene.where.node for one in injected}
            drawn = choose_seed(lab, name, seed=seed + position, used=used)
            injected.append(inject(lab, name, seed=drawn, on=on if position == 0 else None, run_dir=run_dir))
        job = run_job(lab, injected, run_dir)
        left = wait_until_gone(lab)
        baseline = run_baseline(lab, injected, run_dir, say=say) if has_baseline else None
    finally:
        if injected:
            heal(lab)
    return _judge(injected, job, left, seed=seed, baseline=baseline)


def choose_seed(lab: Lab, name: str, *, seed: int, used: Collection[str]) -> int:
    """Return the first seed, from this one on, with which each fault gets its own node if possible.

    On the same node, one fault may hide another."""
    planned = lab.planned_hosts()
    for drawn in range(seed, seed + 64):
        if choose_where(find_fault(name), planned, on=None, seed=drawn).node not in used:
            return drawn
    return seed


def render_table(done: Sequence[DrillResult], *, seed: int) -> str:
    """Return the results as a markdown page, as `make drills` keeps it."""
    lines = [
        "# Drills: faults at start",
        "",
        "Every fault of the lab is injected into a running six-node SLURM cluster in network namespaces; then a real",
        "job starts, and its verdict is compared with the truth. `make drills` writes this page.",
        "",
        f"{date.today()}, seed {seed}.",
        "Seconds: from the start of the last agent to the verdict. torchrun: the same program and fault",
        f"under plain torchrun; seconds until its first line about it, cut off at {BASELINE_S:.0f} s, and that line.",
        "",
        "| fault | the truth | verdict | seconds | exit | correct | torchrun silent for | first line of torchrun |",
        "|---|---|---|---|---|---|---|---|",
    ]
    healthy = [result for result in done if not result.faults]
    for result in done:
        if not result.faults:
            continue
        found = "; ".join(f"{finding.cause} {finding.node or ''}".strip() for finding in result.findings) or "survived"
        base = result.baseline
        silent = "" if base is None else f"{base.silent_s:.0f} s{' (cut off)' if base.exit_code is None else ''}"
        cells = [
            "+".join(result.faults),
            result.where or "nobody",
            found,
            "" if result.seconds is None else f"{result.seconds:.1f}",
            "cut off" if result.exit_code is None else str(result.exit_code),
            "no: " + "; ".join(result.wrong) if result.wrong else "yes",
            silent,
            "" if base is None else f"`{base.said.replace('`', ' ')}`",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if healthy:
        calm = [result for result in healthy if not result.wrong]
        seconds = sorted(result.seconds for result in healthy if result.seconds is not None)
        middle = f", median {seconds[len(seconds) // 2]:.1f} s" if seconds else ""
        lines += ["", f"Healthy starts: {len(calm)} of {len(healthy)} without any finding{middle}."]
    return "\n".join(lines) + "\n"


def _judge(
    injected: Sequence[Injected], job: Job, left: Sequence[str], *, seed: int, baseline: Baseline | None
) -> DrillResult:
    """Compare the job's result with the truth."""
    wrong: list[str] = []
    findings = job.verdict.findings if job.verdict else _findings_in(job.output)
    fails = [finding for finding in findings if finding.severity == "fail"]
    expects_fail = False
    for one in injected:
        truth = one.fault.culprit(one.scene)
        if one.fault.severity is Expected.SURVIVED:
            continue
        expects_fail |= one.fault.severity is Expected.FAIL
        named = [finding for finding in findings if finding.cause_id in one.fault.cause]
        if not named:
            wrong.append(f"{one.fault.name}: no {' or '.join(one.fault.cause)}")
        elif not any(is_named(finding, truth) for finding in named):
            wrong.append(f"{one.fault.name}: {named[0].cause} names {named[0].node}, the truth is {truth}")
        elif not any(finding.severity == one.fault.severity.value for finding in named):
            wrong.append(f"{one.fault.name}: severity {named[0].severity}, expected {one.fault.severity}")
    allowed = {cause for one in injected for cause in (*one.fault.cause, *one.fault.also)}
    wrong += [f"false alarm: {finding.cause} {finding.node}" for finding in findings if finding.cause_id not in allowed]
    if expects_fail and job.exit_code in (0, None):
        wrong.append(f"exit code {job.exit_code}")
    if not expects_fail and (fails or job.exit_code != 0):
        wrong.append(f"exit code {job.exit_code}, expected 0")
    if fails and not job.has_started and len(set(job.node_verdicts.values())) > 1:
        wrong.append(f"{len(set(job.node_verdicts.values()))} different verdicts on {len(job.node_verdicts)} nodes")
    wrong += [f"left running: {process}" for process in left]
    return DrillResult(
        faults=tuple(one.fault.name for one in injected),
        seed=seed,
        where="; ".join(str(one.fault.culprit(one.scene)) for one in injected),
        expected=tuple(f"{'/'.join(one.fault.cause)} {one.fault.severity}".strip() for one in injected),
        findings=tuple(findings),
        seconds=round(job.seconds, 2) if job.seconds is not None else None,
        exit_code=job.exit_code,
        wrong=tuple(wrong),
        baseline=baseline,
    )


def is_named(finding: Finding, truth: TrueCulprit) -> bool:
    """Whether a finding names exactly the culprit."""
    if truth.groups:
        sides = {frozenset(names_in(side)) for side in (finding.node or "").split(" | ")}
        return sides == {frozenset(group) for group in truth.groups}
    if truth.address is not None:
        text = " ".join([finding.node or "", finding.message, *(evidence.seen for evidence in finding.evidence)])
        return truth.address in text
    if truth.interface is not None and finding.interface not in (truth.interface, None):
        return False
    return not truth.nodes or names_in(finding.node or "") == set(truth.nodes)


def names_in(text: str) -> set[str]:
    """Return the nodes that a finding's culprit names: `node01 <-> node03`, `node[01-02]`, `a or b`."""
    names: set[str] = set()
    for part in re.split(r" <-> | -> | or | \\| |, ", text):
        try:
            names |= set(expand_hosts(part))
        except HostlistError:
            names.add(part)
    return names - {""}


def _findings_in(output: str) -> list[Finding]:
    """Return the causes printed on the terminal, if no job began."""
    found = re.findall(r"\b(AR\d{3} [a-z0-9-]+)\b", output)
    return [
        Finding(cause=cause, severity="fail", confidence="certain", message="(from the terminal)")  # type: ignore[arg-type]
        for cause in dict.fromkeys(found)
    ]
