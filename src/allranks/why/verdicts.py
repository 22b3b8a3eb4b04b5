"""Verdicts of allranks itself in a job's run directory; they are based on more than the logs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from allranks.causes.catalogue import find_cause
from allranks.model.finding import Confidence, Evidence, Finding, Severity, Verdict
from allranks.report.mask import mask_secrets
from allranks.why.logs.place import read_path
from allranks.why.logs.sources import Source

NAME = "verdict.json"


def take_verdict(sources: Sequence[Source]) -> tuple[tuple[Source, ...], Verdict | None]:
    """Return the logs without the verdicts, and the verdict of the last attempt, or None."""
    found = [source for source in sources if source.path is not None and source.path.name == NAME]
    # Each node writes the verdict that it received; the leader's own is in the directory above.
    for source in sorted(found, key=lambda each: (-(each.attempt or 0), len(each.shown))):
        assert source.path is not None
        try:
            verdict = Verdict.from_json(source.path.read_bytes())
        except (OSError, msgspec.DecodeError):  # cut, or another program's: it is read like any log
            continue
        return tuple(each for each in sources if each not in found), verdict
    return tuple(sources), None


def join_verdict(verdict: Verdict | None, own: Sequence[Finding]) -> list[Finding]:
    """Return the findings of a verdict, with secrets masked, and after them the findings from the logs."""
    if verdict is None:
        return list(own)
    # For the same cause, the logs have the lines.
    lines = {each.cause: each.evidence for each in own}
    said = [
        _mask(finding, _lines_of_culprit(finding, lines.get(finding.cause, ())) or finding.evidence)
        for finding in verdict.findings
    ]
    has_failed = any(finding.severity is Severity.FAIL for finding in said)
    if verdict.exit_code == 0 and not has_failed:
        healthy = Finding(
            cause=find_cause("healthy").label(),
            severity=Severity.NOTE,
            confidence=Confidence.CERTAIN,
            message="all ranks succeeded, according to the job's own verdict",
        )
        return [healthy, *said]
    known = {finding.cause for finding in said}
    more = [each for each in own if each.severity is Severity.FAIL and each.cause not in known]
    return [*said, *more] if has_failed else [*more, *said]


def _lines_of_culprit(finding: Finding, lines: Sequence[Evidence]) -> list[Evidence]:
    """Return the lines that are not in files of other ranks: victims may use the words of the culprit's cause."""
    ranks = {*finding.ranks, None}
    return [each for each in lines if not finding.ranks or _rank_of(each) in ranks]


def _rank_of(evidence: Evidence) -> int | None:
    """Return the rank whose file a line is in; None if the path does not tell."""
    return read_path((evidence.source or "").partition(":")[0])[1]


def _mask(finding: Finding, evidence: Sequence[Evidence]) -> Finding:
    return msgspec.structs.replace(
        finding,
        message=mask_secrets(finding.message),
        evidence=tuple(Evidence(seen=mask_secrets(each.seen), source=each.source) for each in evidence),
    )
