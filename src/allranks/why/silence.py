"""When nothing in the logs says what is wrong: did the job go well, or does it hang without a word? Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from allranks.causes.catalogue import find_cause
from allranks.causes.sign import Role
from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion
from allranks.why.events import Logs
from allranks.why.line import Line
from allranks.why.people import Culprit, People

LAST_LINES = 5
LONG_S = 1200.0
"""Without progress while other lines go on: a checkpoint or an evaluation takes minutes."""
_ASK = "allranks stack JOB while it hangs; NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL for the next run"
_GOES_ON = re.compile(
    r"(?i)\b(?:it(?:eration)?|steps?|epochs?|batch)\b\W{0,12}\d+|\d+(?:\.\d+)?\s?(?:it/s|s/it|examples/s|tokens?/s|samples/s)"
    r"|\bloss\b\W{0,4}\d|Init COMPLETE|\b100%\||completed|finished|successfully|training (?:done|complete)"
    r"|out-of-place|# Avg bus bandwidth"
)
_SLURM = re.compile(r"slurmstepd|slurmd\[|srun: |StepId=")
_STUCK = re.compile(
    r"(?i)\b(?:hangs?|hung|stuck|freezes|frozen) (?:here|there|forever|at this|for (?:hours|minutes))\b"
)


def conclude_silence(logs: Logs, people: People, found: Sequence[Conclusion]) -> Iterator[Conclusion]:
    """Return healthy or silent-hang where no reading has found a failure."""
    failures = [each for each in found if each.role <= Role.VICTIM]
    if failures and all(each.cause.name == "cancelled" and each.role is Role.VICTIM for each in failures):
        if not any(_goes_on(line) for tail in logs.tails for line in tail.lines()):
            yield _ended_from_outside(failures[0])
        return
    if failures:
        return
    last = [line for tail in logs.tails for line in tail.lines()[-LAST_LINES:]]
    if not last:
        return
    finished = list(logs.of("AR599"))
    everything = [line for tail in logs.tails for line in tail.lines()]
    goes = [line for line in everything if _goes_on(line)]
    silent_s = _silence_s(everything, goes)
    if not finished and (silent_s >= LONG_S or any(_STUCK.search(line.text) for line in everything)):
        yield Conclusion(
            cause=find_cause("silent-hang"),
            role=Role.CONTEXT,
            confidence=Confidence.LIKELY,
            culprit=Culprit(),
            message="the job's own lines stop, and nothing in them says why"
            + (f"; others go on for {silent_s / 60:.0f} minutes" if silent_s >= LONG_S else ""),
            evidence=tuple(goes[-1:]) + tuple(last[-1:]),
            ask=_ASK,
        )
        return
    yield Conclusion(
        cause=find_cause("healthy"),
        role=Role.CONTEXT,
        confidence=Confidence.CERTAIN if finished else Confidence.LIKELY if goes else Confidence.UNDECIDED,
        culprit=Culprit(),
        message="nothing in these logs speaks of a failure",
        evidence=tuple(event.line for event in finished[:1]) or tuple(goes[-1:]) or tuple(last[-1:]),
    )


def _goes_on(line: Line) -> bool:
    """Whether it speaks of progress; SLURM's steps are no steps of the training."""
    return bool(_GOES_ON.search(line.text)) and not _SLURM.search(line.text)


def _ended_from_outside(cancelled: Conclusion) -> Conclusion:
    """A step that was ended, and had said nothing of a failure: somebody lost patience with a job that hung."""
    return Conclusion(
        cause=find_cause("silent-hang"),
        role=Role.CONTEXT,
        confidence=Confidence.LIKELY,
        culprit=Culprit(),
        message="until it was ended from outside nothing spoke of a failure; these logs cannot tell what it waited for",
        evidence=cancelled.evidence,
        ask=_ASK,
    )


def _silence_s(everything: Sequence[Line], goes: Sequence[Line]) -> float:
    """Return how long the logs went on after the last sign of progress, in seconds."""
    if not goes:
        return 0.0
    last = everything.index(goes[-1])
    dated = [line for line in everything[last + 1 :] if line.time is not None and line.has_date]
    # A time without a year is in another year than one with.
    times = [line.time or 0.0 for line in dated if line.has_year == dated[0].has_year]
    return max(times) - min(times) if times else 0.0
