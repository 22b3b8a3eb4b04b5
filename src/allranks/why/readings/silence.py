"""If no line shows a failure: did the job end well, or does it hang without a message? Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from allranks.causes.book import find_cause
from allranks.facts.fact import Who
from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion, Culprit, describe
from allranks.why.facts_of_lines import FactReader, place_of
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.people import People
from allranks.why.readings.arrivals import read_members
from allranks.why.step_lines import SLURM

LONG_S = 1200.0
"""Time without progress while other lines continue: a checkpoint or an evaluation takes minutes."""
REPEATED = 4
"""A log ends with repetitions if so many of its last lines are alike, but for numbers, or two in turn."""
_ASK = "allranks stack JOB while it hangs; NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL for the next run"
_GOES_ON = re.compile(
    r"(?i)\b(?:it(?:eration)?|steps?|epochs?|batch)\b\W{0,12}\d|\d(?:\.\d{1,12})?\s?(?:it/s|s/it|examples/s|tokens?/s|samples/s)"
    r"|\bloss\b\W{0,4}\d|Init COMPLETE|\b100%\||(?<!last )completed|finished|successfully|training (?:done|complete)"
    r"|out-of-place|# Avg bus bandwidth|NCCL INFO .{0,40}\bConnected (?:all|after) "
)
_IS_TEXT = r"(?! *(?:[-+.(\[{0-9]|none\b|nan\b|inf\b|tensor|false\b))"
"""What stands behind `error: ` or `failed: ` is none of the values of a metric or a count."""
_EXCEPTION = re.compile(
    r"^[\w.]*[a-z](?:Error|Exception): "
    rf"|(?i:\b(?:failed|error|exception)(?: [a-z ]{{1,30}})?: {_IS_TEXT})"
)
"""Its text may have `'--epochs', '180'` or `in batch 12` in it."""
_BAR = re.compile(r"\b[0-9]{1,3}%\|[^|]{0,200}\| (?!(\S{1,30})/\1 \[)(?P<at>\S{1,30}/\S{1,30}) \[")
"""A bar of tqdm that has not come to its end; it rounds 9996/10000 to 100 %."""
_COMPLAINS = re.compile(
    r"(?i)^(?!.*\bcontinuing\b(?! to wait))"
    r".*\b(?:fail(?:ed|ure)?|not ready|unable|retry(?:ing)?|timed? ?outs?|refused|unreachable)\b"
)
"""What a log waits for in vain if it ends with this line repeatedly."""
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")
_HARMLESS = (
    r"NCCL WARN |\b(?:INFO|DEBUG|WARNING|[a-zA-Z]*Warning)\b|NCCL TRACE|\[W\d{3,4} |\[W \w|^[IW]\d{4} "
    r"|Last error:$"
    r"|(?<!before )(?<!not )\b[Cc]ontinuing\b"
)
"""Lines that say themselves that they are no failure, or only announce one."""
_ASK_OTHERS = "allranks does not know this failure: the lines before these, and the logs of the other ranks"
_DIALS = r"Connection refused(?:, retrying|\)\.$)| - retrying \(try="
"""Normal while other ranks start, and overcome then: it counts among the last lines only."""
LAST_LINES = 5
_FAILS = (
    rf"^(?!.*(?:{_HARMLESS})).*?"
    r"(?:(?:\b|\bCCL_)(?:ERROR|FATAL|CRITICAL|FAILED)\b|terminate called after throwing"
    r"|\b[A-Z]\w*(?:Error|Exception)\b(?!s|\()|\[E \w|\b[EF]\d{3,4} \d\d:\d\d"
    r"|(?i:(?:^|[\s:\]])(?:(?:fatal|error)(?::| [0-9])|exception: *\S"
    r"|(?:fatal|error|exception) (?:in|during|while|occurred)\b)|core dumped|unhandled"
    rf"|\bfailed(?: (?:to|with)\b|: {_IS_TEXT})|(?:: |with )failed\b))"
)
"""Words of a failure of any program."""
_WAITS = r"due to a collective timeout|NCCL operations have failed or timed out"
"""NCCL's watchdog, of which the lines are missing that tell the collective."""
_WORDS = (
    (
        r"(?:^|\^C)KeyboardInterrupt\b|^\^C|\^C\s*$",  # somebody ended it because it hung
        "silent-hang",
        Confidence.LIKELY,
        "the job was ended from outside; no earlier line reports a failure or what it waited for",
        _ASK,
    ),
    (
        _DIALS,
        "peer-connection-lost",
        Confidence.UNDECIDED,
        "the log ends while a rank still connects to another one, which does not listen",
        "the log of that other rank: did it start, and on which address does it listen?",
    ),
    # NCCL complains about a pair of ranks, but not about optional parts; or an error passed through its source lines.
    (
        r"NCCL WARN (?!Failed to open lib|Could not find a path for pattern)"
        r"|NCCL INFO [\w./+-]+:\d+ (?:\(\S{1,80}\) )?-> [1-9]|NCCL error in: ",
        "nccl-pair-failed",
        Confidence.UNDECIDED,
        "",
        _ASK_OTHERS,
    ),
    (
        r"NCCL INFO .{0,200}- Init START$",
        "silent-hang",
        Confidence.UNDECIDED,
        "the log ends while NCCL creates a communicator: the ranks wait for each other, or it was saved too early",
        _ASK,
    ),
    (rf"^(?!.*ProcessGroupNCCL){_FAILS}", "user-code-error", Confidence.UNDECIDED, "", _ASK_OTHERS),
    (_WAITS, "collective-timeout", Confidence.UNDECIDED, "", _ASK_OTHERS),
    (rf"{_FAILS}|the job has been aborted", "user-code-error", Confidence.UNDECIDED, "", _ASK_OTHERS),
)
"""Words that no sign explains, and what they mean if their source shows no progress after them: healthy runs have them,
too. Without a message, the line itself is told. Order matters: the surest first."""


def conclude_silence(
    logs: Logs, people: People, found: Sequence[Conclusion], *, is_ended: bool
) -> Iterator[Conclusion]:
    """Return healthy or silent-hang, if no line reports a failure; `is_ended`: somebody ended the job's last start."""
    lines = [line for tail in logs.tails for line in tail.lines]
    finished = [event.line for event in logs.of("healthy")]
    if not lines or (is_ended and not finished) or any(conclusion.is_failure for conclusion in found):
        return
    goes = [line for line in lines if _goes_on(line)]
    if not finished and (hang := _says(people, lines, goes) or _stops(logs, lines, goes)):
        yield hang
        return
    last = {line.source.shown: line for line in lines}
    bars = (_BAR.search(line.text) for line in last.values() if not finished)
    bar = next(filter(None, bars), None)
    sureness = Confidence.LIKELY if goes and not bar else Confidence.UNDECIDED
    yield _tell(
        "healthy",
        Confidence.CERTAIN if finished else sureness,
        "these logs show no failure" + (f", and stop at {bar['at']}: if it hangs, allranks watch" if bar else ""),
        "",
        finished[:1] or goes[-1:] or lines[-1:],
    )


def find_words(reader: FactReader, who: Who) -> Line | None:
    """Return the last line of a rank, or of nobody known, that reports a failure of which nothing else is known.

    Another node's lines tell nothing of it. What stands above its file's last progress was overcome.
    """
    known = {event.line.at for event in reader.logs.events}
    below = (
        line for tail in reader.logs.tails for line in takewhile(lambda line: not _goes_on(line), reversed(tail.lines))
    )
    own = (line for line in below if line.rank in {None, who.rank} and line.at not in known)
    lines = (line for line in own if who.node is None or reader.people.node_of(line) in {None, who.node})
    return next((line for line in lines if re.search(_FAILS, line.text) and not SLURM.search(line.text)), None)


def _tell(cause: str, confidence: Confidence, message: str, ask: str, evidence: Sequence[Line]) -> Conclusion:
    return Conclusion(find_cause(cause), confidence, Culprit(), message, tuple(map(place_of, evidence)), ask=ask)


def _stops(logs: Logs, lines: Sequence[Line], goes: Sequence[Line]) -> Conclusion | None:
    """The logs end with lines of something else than the training: for long, or with a complaint, or with the start.

    Below the last step are those of its file, and later ones of others.
    """
    below = lines[lines.index(goes[-1]) + 1 :] if goes else ()
    latest_s = max((line.time or 0.0 for line in goes if line.has_year), default=0.0)
    silent_s = _span_s([line for line in below if line.source == goes[-1].source or (line.time or 0.0) >= latest_s])
    if silent_s >= LONG_S:
        message = f"the job's own output stops without a reason; others continue for {silent_s / 60:.0f} minutes"
        return _tell("silent-hang", Confidence.LIKELY, message, _ASK, [goes[-1], lines[-1]])
    known = {event.line.at for event in logs.events}
    for tail in logs.tails:
        last = tail.lines[-REPEATED:]
        is_repeated = len(last) == REPEATED and len({_NUMBERS.sub("", line.text) for line in last}) <= 2
        is_new = not any(line.at in known or _goes_on(line) for line in last)
        if is_repeated and is_new and any(_COMPLAINS.search(line.text) for line in last[-2:]):
            message = "the log ends with the same complaint, repeated: the job waits for something that does not happen"
            return _tell("silent-hang", Confidence.UNDECIDED, message, _ASK, last[-1:])
    members = read_members(logs)
    wanted = max((event.number("wanted") or 0 for event in members), default=0)
    if len({event.values["rank"] for event in members}) == wanted > 1 and members[-1].line.at == lines[-1].at:
        message = f"all {wanted} ranks reported their start, then the log ends: they wait for each other in "
        message += "init_process_group, or the log was saved too early"
        return _tell("silent-hang", Confidence.UNDECIDED, message, _ASK, lines[-1:])
    return None


def _says(people: People, lines: Sequence[Line], goes: Sequence[Line]) -> Conclusion | None:
    """Lines have words of a failure or of a hang, and no line of the same source shows progress after them."""
    last = {line.source.shown: line.number for line in goes}
    after = [line for line in lines if line.number > last.get(line.source.shown, 0) and not SLURM.search(line.text)]
    ends = {line.source.shown: line.number for line in lines}
    latest = [line for line in after if ends[line.source.shown] - line.number < LAST_LINES]
    for pattern, cause, confidence, message, ask in _WORDS:
        where = latest if pattern is _DIALS else after
        if found := [line for line in where if re.search(pattern, line.text)][:3]:
            words = message or found[0].text.strip()
            told = _tell(cause, Confidence.UNDECIDED if goes else confidence, words, ask, found)
            return told if ask is _ASK else replace(told, culprit=describe(people.speaker(found[0])))
    return None


def _goes_on(line: Line) -> bool:
    """Whether it shows progress; SLURM's steps are not training steps, and neither is a quotation in an exception."""
    return bool(_GOES_ON.search(line.text)) and not SLURM.search(line.text) and not _EXCEPTION.search(line.text)


def _span_s(lines: Sequence[Line]) -> float:
    """Return the time between the first and the last of these lines, in seconds."""
    dated = [line for line in lines if line.time is not None and line.has_date]
    # A time without a year cannot be compared with one that has a year.
    times = [line.time or 0.0 for line in dated if line.has_year == dated[0].has_year]
    return max(times) - min(times) if times else 0.0
