"""Verdicts of allranks itself, which are based on more than the logs: in a job's run directory, or printed in a log."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from signal import Signals

import msgspec

from allranks.causes.book import find_cause, traits_of
from allranks.causes.cause import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Evidence, Finding, Severity, Verdict
from allranks.model.fix import ANYBODY, Reader
from allranks.report.mask import mask_finding
from allranks.report.remains import LastWord
from allranks.report.rundir import is_own_file
from allranks.report.runs import Run, read_verdict
from allranks.report.text import one_line
from allranks.why.findings import is_answer, tell_place
from allranks.why.logs.log_events import Logs
from allranks.why.logs.log_path import read_path
from allranks.why.logs.printed import Printed
from allranks.why.logs.sources import VERDICT, Source

_LOOK = (
    "on {node}: dmesg -T | grep -i 'killed process' shows whether memory ran out, last -x whether the machine went "
    "down; start the run again: with allranks.session() it resumes from its last checkpoint"
)
MAX_GAP = 3
"""Lines between two findings that were printed together: an empty one, and some of other writers."""


def take_verdict(sources: Sequence[Source]) -> tuple[tuple[Source, ...], Verdict | None]:
    """Return the logs without the verdicts, and the verdict of the last attempt, or None."""
    found = [source for source in sources if source.name == VERDICT and source.path is not None]
    # Each node writes the verdict that it received; the leader's own is in the directory above.
    for source in sorted(found, key=lambda one: (-(one.attempt or 0), len(one.shown))):
        if (verdict := read_verdict(Path(source.path or ""))) is not None:
            return tuple(other for other in sources if other not in found), verdict
    # Cut, or another program's: that is read like any log.
    return tuple(other for other in sources if other not in found or not is_own_file(other.path or "")), None


def read_printed_verdict(logs: Logs) -> Verdict | None:
    """Return the verdict that allranks printed into these logs, or None.

    What was printed in a log before the last line that begins a run, or says that it succeeded, is a warning: the job
    went on. Of several reports, the last one comes first. Their exit code is not known.
    """
    begun = {
        event.line.source.shown: event.line.number
        for event in logs.of("begun", Trait.SUCCESS)
        if event.kind == "begun" or event.line.text.startswith("allranks: ")
    }
    ordered: list[tuple[tuple[bool, int], Printed]] = []
    report = 0  # findings that were printed together are one report, culprit first
    before: Printed | None = None
    for printed in logs.printed:
        if before and (before.line.source != printed.line.source or printed.line.number > before.last + MAX_GAP):
            report -= 1
        is_survived = printed.line.number < begun.get(printed.line.source.shown, 0)
        ordered.append(((is_survived, report), printed))
        before = printed
    findings: list[Finding] = []
    told_by: dict[str, tuple[bool, int]] = {}  # of each cause, the report that counts
    for key, printed in sorted(ordered, key=itemgetter(0)):
        if told_by.setdefault(printed.finding.cause, key) == key:
            findings.append(_quote(printed, is_survived=key[0]))
    if not findings:
        return None
    has_failed = any(finding.severity is Severity.FAIL for finding in findings)
    return Verdict(
        job="", attempt=0, exit_code=int(Exit.USER_CODE if has_failed else Exit.UNKNOWN), findings=tuple(findings)
    )


def _quote(printed: Printed, *, is_survived: bool) -> Finding:
    """Return a printed finding, with its first line as evidence."""
    said = printed.finding
    quoted = Evidence(seen=one_line(printed.line.text), source=tell_place(printed.line))
    severity = Severity.WARN if is_survived else said.severity
    return msgspec.structs.replace(said, severity=severity, evidence=(*said.evidence, quoted))


def join_verdict(
    verdict: Verdict | None,
    own: Sequence[Finding],
    *,
    is_printed: bool = False,
    restarts: str = "",
    reader: Reader = ANYBODY,
) -> list[Finding]:
    """Return the findings of a verdict, with secrets masked, and after them the findings from the logs.

    Args:
        is_printed: it was printed in a log, and its findings quote that log; else it is of the run directory.
        restarts: how often the ranks were started again, in words.
    """
    if verdict is None:
        return list(own)
    # For the same cause, the logs have the lines, unless they only guess.
    sure = [finding for finding in own if finding.confidence is not Confidence.UNDECIDED]
    lines = {} if is_printed else {finding.cause: finding.evidence for finding in sure}
    said = []
    for finding in verdict.findings:
        evidence = tuple(_choose_evidence(finding, lines.get(finding.cause, ())))
        said.append(mask_finding(msgspec.structs.replace(finding, evidence=evidence)))
    has_failed = any(finding.severity is Severity.FAIL for finding in said)
    if verdict.exit_code == 0 and not has_failed:
        healthy = Finding(
            cause=find_cause("healthy").label,
            severity=Severity.NOTE,
            confidence=Confidence.CERTAIN,
            message="all ranks succeeded, according to the job's own verdict" + (f"; {restarts}" if restarts else ""),
        )
        return [healthy, *said]
    known = {finding.cause for finding in said}
    more = [finding for finding in own if finding.cause not in known] if is_answer(own) else []
    if verdict.ended_by is not None:
        return [*_interrupted(verdict, more, reader), *said]
    if not has_failed:
        return [*more, *said]
    is_sure = said[0].confidence is not Confidence.UNDECIDED  # such a verdict needs no guesses
    failures = _sure_failures(more) if is_sure else [found for found in more if found.severity is Severity.FAIL]
    return [*said, *failures]


def _sure_failures(findings: Sequence[Finding]) -> list[Finding]:
    """Return the failures that are no guesses, nor connections that may have broken because a rank had ended."""
    failures = (finding for finding in findings if finding.severity is Severity.FAIL)
    return [failure for failure in failures if failure.confidence not in _doubts_of(failure)]


def _doubts_of(failure: Finding) -> tuple[Confidence, ...]:
    """Return how sure a failure may be that is no sure one yet."""
    has_peer = Trait.BREAKS_WITH_ITS_PEER in traits_of(failure.cause_id)
    return (Confidence.UNDECIDED, Confidence.LIKELY) if has_peer else (Confidence.UNDECIDED,)


def join_lost(lost: Finding | None, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with that about a run whose agent is gone: first, unless only SLURM has told of its end."""
    if lost is None:
        return list(findings)
    sure = [failure for failure in _sure_failures(findings) if failure.cause != lost.cause]
    return [*sure, lost] if sure and lost.confidence is Confidence.UNDECIDED else [lost, *sure]


def _interrupted(verdict: Verdict, own: Sequence[Finding], reader: Reader) -> list[Finding]:
    """Return why a run without a failure got a signal, and what else its logs prove.

    What merely resembles something is left out: all ranks were ended, and say so in tracebacks.
    """
    from_outside = [finding for finding in own if Trait.ENDS_FROM_OUTSIDE in traits_of(finding.cause_id)]
    if not from_outside:
        evidence = Evidence(seen=f"exit code {verdict.exit_code} and no finding", source=VERDICT)
        from_outside = [_cancelled(verdict.ended_by or "", (evidence,), reader)]
    return [from_outside[0], *(finding for finding in _sure_failures(own) if finding is not from_outside[0])]


def _cancelled(signal: str, evidence: tuple[Evidence, ...], reader: Reader, *, more: str = "") -> Finding:
    cause = find_cause("cancelled")
    return Finding(
        cause=cause.label,
        severity=Severity.FAIL,
        confidence=Confidence.LIKELY if signal == "SIGTERM" else Confidence.CERTAIN,  # schedulers send it, too
        message=f"the job was ended from outside, by {signal}{more}",
        evidence=evidence,
        fix=cause.fix.tell(reader, {}),
    )


def judge_lost(
    run: Run, *, how: str, confidence: Confidence, words: Sequence[LastWord], reader: Reader = ANYBODY
) -> Finding:
    """Return the finding about a run whose agent is gone without a verdict.

    Args:
        how: how its agent ended and when, in a clause.
        confidence: that it is gone.
        words: what its ranks printed last.
    """
    evidence = tuple(Evidence(seen=f"rank {word.rank}: {word.text}", source=str(word.path)) for word in words)
    if run.interrupted_by is not None:
        return _cancelled(Signals(run.interrupted_by).name, evidence, reader, more=f"; {how}")
    node = run.leader or next(iter(run.nodes), "that node")
    return Finding(
        cause=find_cause("node-failure").label,
        severity=Severity.FAIL,
        confidence=confidence,
        node=node,
        message=how,
        evidence=evidence,
        fix=_LOOK.format(node=node),
    )


def _choose_evidence(finding: Finding, lines: Sequence[Evidence]) -> Sequence[Evidence]:
    """Return the lines of the logs; a whole traceback of the verdict instead of its two lines there.

    Lines in files of other ranks are left out: victims may use the words of the culprit's cause.
    """
    ranks = [read_path((line.source or "").partition(":")[0])[1] for line in lines]
    found = [
        line
        for line, rank in zip(lines, ranks, strict=True)
        if rank is None or rank in finding.ranks or not finding.ranks
    ]
    if not found or not any("\n" in evidence.seen for evidence in finding.evidence):
        return found or finding.evidence
    return [
        msgspec.structs.replace(evidence, source=found[0].source) if "\n" in evidence.seen else evidence
        for evidence in finding.evidence
    ]
