"""If no line shows a failure: did the job end well, or does it hang without a message? Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from allranks.causes.book import find_cause
from allranks.causes.cause import Role, Trait
from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.people import Culprit, People, speaker
from allranks.why.readings.arrivals import read_members

LAST_LINES = 5
LONG_S = 1200.0
"""Time without progress while other lines continue: a checkpoint or an evaluation takes minutes."""
LEAST_BEATS = 3
"""Number of equal lines."""
_ASK = "allranks stack JOB while it hangs; NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL for the next run"
_GOES_ON = re.compile(
    r"(?i)\b(?:it(?:eration)?|steps?|epochs?|batch)\b\W{0,12}\d|\d(?:\.\d{1,12})?\s?(?:it/s|s/it|examples/s|tokens?/s|samples/s)"
    r"|\bloss\b\W{0,4}\d|Init COMPLETE|\b100%\||completed|finished|successfully|training (?:done|complete)"
    r"|out-of-place|# Avg bus bandwidth|NCCL INFO .{0,40}\bConnected (?:all|after) "
)
_SLURM = re.compile(r"slurmstepd|slurmd\[|srun: |StepId=|error: \*\*\* (?:JOB|STEP) \d")
_EXCEPTION = re.compile(r"^[\w.]*[a-z](?:Error|Exception): ")
"""Its text may have a command with `'--epochs', '180'` in it."""
_INTERRUPTED = re.compile(r"(?:^|\^C)KeyboardInterrupt\b|^\^C|\^C\s*$")
_NCCL = re.compile(
    r"NCCL WARN (?!Failed to open lib|Could not find a path for pattern)"
    r"|NCCL INFO [\w./+-]+:\d+ (?:\(\S{1,80}\) )?-> [1-9]"
)
"""NCCL's complaints other than those about optional parts, or the source lines through which an error passed."""
_STEPS = re.compile(r"(?i)\d(?:it/s|s/it)|\bloss\b\W{0,4}\d|\b(?:iter(?:ation)?|step)s?\b\W{0,3}\d")
_ALARM = re.compile(
    r"\b(?:ERROR|FATAL|CRITICAL|FAILED)\b|\b[A-Z]\w*(?:Error|Exception)\b(?!s|\()|\[E \w|\b[EF]\d{3,4} \d\d:\d\d"
    r"|(?i:(?:^|[\s:\]])(?:fatal|error)(?::| [0-9]| in\b)|core dumped|unhandled|\bfailed (?:to|with)\b"
    r"|(?:: |with )failed\b)"
)
"""Words of a failure. Healthy runs have them, too: they count only if no progress follows."""
_HARMLESS = re.compile(
    r"NCCL WARN |\b(?:INFO|DEBUG|WARNING|[a-zA-Z]*Warning)\b|NCCL TRACE|\[W\d{3,4} |\[W \w|^[IW]\d{4} "
)
"""Lines that say themselves that they are no failure."""
_BEGUN = re.compile(r"NCCL INFO .{0,200}- Init START$")
_MADE = re.compile(r"Init COMPLETE|NCCL INFO Connected all|NCCL WARN ")
_DIALS = re.compile(r"returned Connection refused, retrying")
"""Normal while other ranks start, and overcome then."""
_COMPLAINS = re.compile(r"(?i)\b(?:fail(?:ed|ure)?|not ready|unable|retry(?:ing)?|timed? ?outs?|refused|unreachable)\b")
"""What a log waits for in vain if it ends with this line repeatedly."""
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")
_STUCK = re.compile(
    r"(?i)\b(?:hangs?|hung|stuck|freezes|frozen) (?:here|there|forever|at this|for (?:hours|minutes))\b"
)


def conclude_silence(logs: Logs, people: People, found: Sequence[Conclusion]) -> Iterator[Conclusion]:
    """Return healthy or silent-hang, if no reading has found a failure."""
    failures = [conclusion for conclusion in found if conclusion.role <= Role.VICTIM]
    if failures and all(
        Trait.ENDS_FROM_OUTSIDE in failure.cause.traits and failure.role is Role.VICTIM for failure in failures
    ):
        if not any(_goes_on(line) for tail in logs.tails for line in tail.lines):
            yield _ended_from_outside(*failures[0].evidence)
        return
    if failures:
        return
    last = [line for tail in logs.tails for line in tail.lines[-LAST_LINES:]]
    if not last:
        return
    finished = list(logs.of("healthy"))
    everything = [line for tail in logs.tails for line in tail.lines]
    goes = [line for line in everything if _goes_on(line)]
    silent_s = _silence_s(everything, goes)
    if not finished and (silent_s >= LONG_S or any(_STUCK.search(line.text) for line in everything)):
        others = f"; others continue for {silent_s / 60:.0f} minutes" if silent_s >= LONG_S else ""
        what = f"the job's own output stops without a reason{others}"
        yield _hangs(what, *goes[-1:], last[-1], confidence=Confidence.LIKELY)
        return
    if not finished and (beats := _beats(logs)):
        minutes = _span_s(beats) / 60
        what = f"for {minutes:.0f} minutes, only another program repeated the same lines; the job printed nothing"
        yield _hangs(what, beats[0], beats[-1], confidence=Confidence.LIKELY)
        return
    if not finished and (members := _all_announced(logs, last[-1])):
        yield _hangs(
            f"all {members} ranks reported their start, then the log ends: they wait for each other in "
            "init_process_group, or the log was saved too early",
            last[-1],
        )
        return
    if not finished and (half := _half_made(everything)) is not None:
        yield _hangs(
            "the log ends while NCCL creates a communicator: the ranks wait for each other, or the log was saved too "
            "early",
            half,
            last[-1],
        )
        return
    if not finished and (stopped := [line for line in everything if _INTERRUPTED.search(line.text)]):
        yield _ended_from_outside(stopped[-1], is_sure=not any(_STEPS.search(line.text) for line in everything))
        return
    if not finished and (dials := [line for line in last if _DIALS.search(line.text) and line not in goes]):
        yield Conclusion(
            cause=find_cause("peer-connection-lost"),
            role=Role.CONTEXT,
            confidence=Confidence.UNDECIDED,
            culprit=speaker(people.know(dials[-1])),
            message="the log ends while a rank still connects to another one, which does not listen",
            evidence=(dials[-1],),
            ask="the log of that other rank: did it start, and on which address does it listen?",
        )
        return
    if not finished and (again := _again(logs)) is not None:
        what = "the log ends with the same complaint, repeated: the job waits for something that does not happen"
        yield _hangs(what, again, culprit=speaker(people.know(again)))
        return
    if not finished and (alarms := _alarms(everything, goes)):
        yield _unknown(alarms, people)
        return
    yield Conclusion(
        cause=find_cause("healthy"),
        role=Role.CONTEXT,
        confidence=Confidence.CERTAIN if finished else Confidence.LIKELY if goes else Confidence.UNDECIDED,
        culprit=Culprit(),
        message="these logs show no failure",
        evidence=tuple(event.line for event in finished[:1]) or tuple(goes[-1:]) or tuple(last[-1:]),
    )


def _hangs(
    what: str, *evidence: Line, confidence: Confidence = Confidence.UNDECIDED, culprit: Culprit | None = None
) -> Conclusion:
    return Conclusion(
        cause=find_cause("silent-hang"),
        role=Role.CONTEXT,
        confidence=confidence,
        culprit=culprit or Culprit(),
        message=what,
        evidence=evidence,
        ask=_ASK,
    )


def _again(logs: Logs) -> Line | None:
    """Return the line that a log ends with at least three times, except for its numbers, if it is a complaint.

    A line that matches a sign is judged by its sign: torch's sockets complain about IPv6 in healthy jobs.
    """
    known = {(event.line.source.shown, event.line.number) for event in logs.events}
    for tail in logs.tails:
        alike: dict[str, list[Line]] = {}
        for line in tail.lines[-2 * LAST_LINES :]:
            alike.setdefault(_NUMBERS.sub("", line.text), []).append(line)
        last = tail.lines[-2:]
        for lines in alike.values():
            seen = lines[-1]
            if len(lines) < 3 or not any(line in lines for line in last) or (seen.source.shown, seen.number) in known:
                continue
            if _COMPLAINS.search(seen.text) and not _goes_on(seen):
                return seen
    return None


def _beats(logs: Logs) -> list[Line]:
    """Return the lines that a log repeats at its end for long, except for their numbers: metrics, a heartbeat."""
    for tail in logs.tails:
        usual = {_NUMBERS.sub("", line.text) for line in tail.lines[-2:]}
        beats: list[Line] = []
        for line in reversed(tail.lines):
            if _NUMBERS.sub("", line.text) not in usual or _goes_on(line):
                break
            beats.insert(0, line)
        if len(beats) >= LEAST_BEATS and len(beats) < len(tail.lines) and _span_s(beats) >= LONG_S:
            return beats
    return []


def _half_made(everything: Sequence[Line]) -> Line | None:
    """Return where NCCL last began a communicator, if no line says that one was completed."""
    begun = [line for line in everything if _BEGUN.search(line.text)]
    return begun[-1] if begun and not any(_MADE.search(line.text) for line in everything) else None


def _all_announced(logs: Logs, last: Line) -> int:
    """Return how many ranks reported their start, if all did and the log ends with that; else 0."""
    members = read_members(logs)
    wanted = max((event.number("wanted") or 0 for event in members), default=0)
    ends = any((event.line.source, event.line.number) == (last.source, last.number) for event in members)
    return wanted if ends and len({event.values["rank"] for event in members}) == wanted > 1 else 0


def _goes_on(line: Line) -> bool:
    """Whether it shows progress; SLURM's steps are not training steps, and neither is a quotation in an exception."""
    return bool(_GOES_ON.search(line.text)) and not _SLURM.search(line.text) and not _EXCEPTION.search(line.text)


def _alarms(everything: Sequence[Line], goes: Sequence[Line]) -> list[Line]:
    """Return the lines with words of a failure, after which no line of the same source shows progress."""
    last = {line.source.shown: line.number for line in goes}
    return [
        line
        for line in everything
        if line.number > last.get(line.source.shown, 0)
        and (_NCCL.search(line.text) or (_ALARM.search(line.text) and not _HARMLESS.search(line.text)))
        and (_EXCEPTION.search(line.text) or not _GOES_ON.search(line.text))
    ]


def _unknown(alarms: Sequence[Line], people: People) -> Conclusion:
    """Something failed, and no sign explains it: NCCL complains about a pair of ranks, others about themselves."""
    nccl = [line for line in alarms if _NCCL.search(line.text)]
    return Conclusion(
        cause=find_cause("nccl-pair-failed" if nccl else "user-code-error"),
        role=Role.CONTEXT,
        confidence=Confidence.UNDECIDED,
        culprit=speaker(people.know((nccl or alarms)[0])),
        message="these lines report a failure that allranks does not know",
        evidence=tuple((nccl or alarms)[:3]),
        ask="the lines before these, and the logs of the other ranks",
    )


def goes_on_after(line: Line, logs: Logs) -> bool:
    """Whether steps are reported after this line, in the same log."""
    lines = [later for tail in logs.tails if tail.source == line.source for later in tail.lines]
    return any(later.number > line.number and _STEPS.search(later.text) for later in lines)


def _ended_from_outside(*evidence: Line, is_sure: bool = True) -> Conclusion:
    """A job that was ended from outside and had reported no failure: somebody ended it because it hung."""
    return Conclusion(
        cause=find_cause("silent-hang"),
        role=Role.CONTEXT,
        confidence=Confidence.LIKELY if is_sure else Confidence.UNDECIDED,
        culprit=Culprit(),
        message="the job was ended from outside; no earlier line reports a failure or what it waited for",
        evidence=evidence,
        ask=_ASK,
    )


def _silence_s(everything: Sequence[Line], goes: Sequence[Line]) -> float:
    """Return how long the logs continued after the last sign of progress, in seconds."""
    if not goes:
        return 0.0
    return _span_s(everything[everything.index(goes[-1]) + 1 :])


def _span_s(lines: Sequence[Line]) -> float:
    """Return the time between the first and the last of these lines, in seconds."""
    dated = [line for line in lines if line.time is not None and line.has_date]
    # A time without a year cannot be compared with one that has a year.
    times = [line.time or 0.0 for line in dated if line.has_year == dated[0].has_year]
    return max(times) - min(times) if times else 0.0
