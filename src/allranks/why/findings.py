"""From conclusions to findings, for people and programs, with fixes for the cluster from which the logs come. Pure.

    findings = [to_finding(conclusion, reader) for conclusion in conclude(logs)]

All text from logs is masked here, because lines may contain passwords (report/mask.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import msgspec

from allranks.causes.cause import Cause, Trait
from allranks.facts.fact import Place
from allranks.model.finding import Confidence, Evidence, Finding, Severity
from allranks.model.fix import ANYBODY, Reader, SchedulerKind, Vendor
from allranks.model.hostlist import fold_hosts
from allranks.report.mask import mask_secrets
from allranks.report.runs import is_job_of_slurm
from allranks.why.conclusion import Conclusion, Culprit
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.logs.sources import natural_key

_RECORDED = re.compile(r'\{"message": (?:\{"message": )?"(?P<said>(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-f]{4})+)')
"""How error.json of torch begins (torch 2.13, elastic/multiprocessing/errors); a line may be cut anywhere."""
MAX_TEXT = 300
"""Maximum number of characters of a line: the file has the rest."""


def to_finding(conclusion: Conclusion, reader: Reader = ANYBODY) -> Finding:
    """Return the finding for a conclusion, with its fix for this reader."""
    cause, culprit = conclusion.cause, conclusion.culprit
    is_certain = conclusion.confidence is Confidence.CERTAIN
    # A job that hangs without a message might have continued.
    is_doubtful = Trait.SAYS_NOTHING in cause.traits or not conclusion.is_failure or conclusion.is_consequence
    failed = Severity.WARN if is_doubtful else Severity.FAIL
    return Finding(
        cause=cause.label,
        severity=Severity.NOTE if Trait.SUCCESS in cause.traits else failed,
        confidence=conclusion.confidence,
        node=tell_nodes(culprit.nodes, is_undecided=conclusion.confidence is Confidence.UNDECIDED),
        interface=_shown(culprit.interface) if culprit.interface else None,
        ranks=culprit.ranks,
        subject=", ".join(map(_shown, culprit.things)) or None,
        message=_shown(conclusion.message),
        evidence=tell_evidence(conclusion.evidence),
        fix=tell_fix(cause, culprit, reader, signum=conclusion.signal),
        ask=None if is_certain else _shown(conclusion.ask) or None,
        notes=tuple(map(_shown, conclusion.notes)),
        victims=tuple(sorted(conclusion.victims)),
    )


def find_reader(logs: Logs, *, job: str | None, here: Reader) -> Reader:
    """Return what the logs show of scheduler and GPUs; what they do not, as it is here.

    Args:
        job: id of the job or run, if the logs are those of one.
        here: of the machine on which the logs are read.
    """
    scheduler = here.scheduler
    if next(logs.of("srun"), None) is not None:
        scheduler = SchedulerKind.SLURM
    elif next(logs.of("pod"), None) or any(line.is_of_pod for tail in logs.tails for line in tail.lines):
        scheduler = SchedulerKind.POD
    vendor = Vendor.AMD if next(logs.of("rocm"), None) is not None else here.vendor
    return reader_of_job(job, here=Reader(scheduler=scheduler, vendor=vendor))


def reader_of_job(job: str | None, *, here: Reader) -> Reader:
    """Return the reader of a job or run: its id tells whether SLURM gave it."""
    scheduler = here.scheduler
    if job is not None and is_job_of_slurm(job):
        scheduler = SchedulerKind.SLURM
    elif job is not None and scheduler is SchedulerKind.SLURM:
        scheduler = SchedulerKind.NONE
    return Reader(scheduler=scheduler, vendor=here.vendor, job=job)


def fill_job(finding: Finding, job: str | None) -> Finding:
    """Return a finding that asks with commands that name the job or run; without one, they name none."""
    ask = finding.ask
    if ask is None or "JOB" not in ask:
        return finding
    ask = re.sub(r"\bJOB\b", job, ask) if job else ask.replace(" JOB", "")
    return msgspec.structs.replace(finding, ask=ask)


def is_answer(findings: Sequence[Finding]) -> bool:
    """Whether these findings say what happened; without any sign of failure or progress, they do not."""
    first = findings[0] if findings else None
    return first is not None and not (first.severity is Severity.NOTE and first.confidence is Confidence.UNDECIDED)


def count_first(findings: Sequence[Finding]) -> int:
    """Return how many of them are the answer: the first, and if that is undecided, a failure that follows it."""
    is_open = len(findings) > 1 and findings[0].confidence is Confidence.UNDECIDED
    return 2 if is_open and findings[1].severity is Severity.FAIL else min(len(findings), 1)


def tell_nodes(nodes: Sequence[str], *, is_undecided: bool = False) -> str | None:
    """Return nodes as one text: folded, or `node01 or node02` if it is one of two."""
    names = sorted(map(_shown, dict.fromkeys(nodes)), key=natural_key)
    if is_undecided and len(names) == 2:
        return " or ".join(names)
    return fold_hosts(names) or None


def tell_evidence(lines: Sequence[Place]) -> tuple[Evidence, ...]:
    """Return lines as evidence; equal messages once, with all places."""
    places: dict[str, list[str]] = {}
    for line in lines:
        places.setdefault(_show(line.text), []).append(f"{line.source}:{line.line}")
    return tuple(Evidence(seen=seen, source=", ".join(dict.fromkeys(where))) for seen, where in places.items())


def tell_place(line: Line) -> str:
    """Return the place of a line: `logs/rank_3.err:4711`."""
    return f"{line.source.shown}:{line.number}"


def show_line(line: Line) -> str:
    """Return a line for output: secrets masked, then cut; of an error file of torchelastic, its message."""
    return _show(line.text)


def _show(text: str) -> str:
    if recorded := _RECORDED.match(text):
        text = json.loads(f'"{recorded["said"]}"', strict=False)
    return _shown(text.expandtabs(2).strip())


def tell_fix(cause: Cause, culprit: Culprit, reader: Reader = ANYBODY, *, signum: int | None = None) -> str | None:
    """Return the cause's fix with the known values of the culprit, which that signal ended."""
    values: dict[str, str] = {}
    if nodes := tell_nodes(culprit.nodes):
        values["node"] = values["culprit"] = values["where"] = nodes
    if culprit.interface:
        values["interface"] = culprit.interface
    if culprit.ranks:
        values["rank"] = str(min(culprit.ranks))
    ports = [thing.removeprefix("port ") for thing in culprit.things if thing.startswith("port ")]
    if len(ports) == 1:
        values["port"] = ports[0]
    return cause.fix_of(signum).tell(reader, values)


def _shown(text: str) -> str:
    masked = mask_secrets(text)
    return masked if len(masked) <= MAX_TEXT else masked[: MAX_TEXT - 4].rstrip() + " ..."
