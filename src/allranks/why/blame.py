"""From what the logs say to what happened: combines all readings, the culprit's conclusion first. Pure.

Order of conclusions:

1. the fault itself, reported by the process that had it or made the decision (an exception with its reason, Xid, the
   scheduler)
2. lines that usually mean one cause, and what only all ranks together show (which rank is behind or never joined)
3. the user's own exceptions
4. weak readings; then reports of victims

Within each, the earliest comes first: by line in one source, by time if all sources have times. Victims alone give at
most a collective-timeout. Without any report, the job was healthy, or hung without a message.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from allranks.causes.book import find_cause
from allranks.causes.cause import Cause, Role, Trait
from allranks.model.finding import Confidence
from allranks.recorder.calls import Dump
from allranks.why.clocks import clock_of, estimate_offsets
from allranks.why.conclusion import Conclusion
from allranks.why.dumps import conclude_dumps
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.naming import add_awaited, add_nodes, add_script, find_culprit, find_nodes, name_somebody
from allranks.why.overcome import leave_out_overcome, tell_overcome
from allranks.why.people import Culprit, People, meet
from allranks.why.readings.arrivals import conclude_arrivals
from allranks.why.readings.dials import conclude_dials
from allranks.why.readings.ends import conclude_ends, find_ended, read_ends
from allranks.why.readings.extra_batch import conclude_rounds
from allranks.why.readings.innermost import conclude_innermost
from allranks.why.readings.opcounts import conclude_opcounts
from allranks.why.readings.paces import conclude_paces
from allranks.why.readings.progress import conclude_progress
from allranks.why.readings.ras import conclude_ras
from allranks.why.readings.restarts import conclude_restarts
from allranks.why.readings.saved_stacks import conclude_stacks
from allranks.why.readings.silence import conclude_silence, goes_on_after
from allranks.why.readings.stalls import conclude_stalls
from allranks.why.readings.tracebacks import conclude_tracebacks
from allranks.why.readings.watchdogs import conclude_collectives
from allranks.why.resemblance import resembling

READINGS: tuple[Callable[[Logs, People], Iterable[Conclusion]], ...] = (
    conclude_stacks,
    conclude_arrivals,
    conclude_collectives,
    conclude_dials,
    conclude_tracebacks,
    conclude_ends,
    conclude_stalls,
    conclude_opcounts,
    conclude_ras,
    conclude_paces,
    conclude_restarts,
    conclude_progress,
    conclude_innermost,
    conclude_rounds,
)
"""The readings that combine several lines."""

MAX_ANSWERS = 3
"""Below this number of conclusions, those are added that the same lines may also mean."""
MAX_ALARMS = 40
"""Number of lines whose words are compared with the known samples."""
_ALARM = re.compile(r"(?i)error|fail|fatal|abort|warn|timed? ?out|refused|exception|unable|cannot|invalid|not found")
MAX_EVIDENCE = 3
MAX_LOOKED_AT = 500
"""Number of lines of one cause that are searched for different messages: thousands of ranks say the same."""
_NUMBERS = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")
_SRUN = "srun: error: "
_FAILED = re.compile(r"srun: error: [^ ]{1,200}: tasks? [^ ]{1,200}: (?:Exited with exit code|.{3,30}\(core dumped\))")
_KILLED = re.compile(r"srun: error: [^ ]{1,200}: tasks? [^ ]{1,200}: (?:Killed|Terminated)\s*$")
"""How srun ends the other tasks after one has failed (--kill-on-bad-exit)."""
_DOUBT = {confidence: doubt for doubt, confidence in enumerate(Confidence)}


def conclude(logs: Logs, dumps: Sequence[Dump] = ()) -> list[Conclusion]:
    """Return what happened, the most probable cause first; each cause once.

    Args:
        logs: what the lines say.
        dumps: flight recorder dumps of the ranks, if there are any beside the logs (dumps.py).
    """
    logs = leave_out_overcome(logs)
    people = meet(logs)
    found = [
        *conclude_signs(logs, people),
        *(conclusion for reading in READINGS for conclusion in reading(logs, people)),
    ]
    found += conclude_dumps(dumps)
    nodes = find_nodes(logs)
    found = add_awaited([add_script(name_somebody(conclusion, logs, people), logs) for conclusion in _merge(found)])
    found = [add_nodes(conclusion, nodes) for conclusion in found]
    before = _order(found, estimate_offsets(logs))
    found = list(_after_an_exception(found, before))
    found = list(_after_an_end(found))
    yields = _yield(found)
    found.sort(
        key=lambda conclusion: (
            _bucket(conclusion), -conclusion.weight, conclusion.cause.id in yields, before(conclusion),
            not conclusion.has_context, conclusion.cause.id,
        )
    )  # fmt: skip
    found = [*conclude_silence(logs, people, found), *found]
    return [*found, *_alternatives(found, logs)]


def _after_an_exception(
    found: Sequence[Conclusion], before: Callable[[Conclusion], tuple[float, int]]
) -> Iterator[Conclusion]:
    """Count a lost store, and a watchdog that does not run, as a victim's report if an exception came before."""
    own = _errors_of_script(found)
    for conclusion in found:
        is_after = any(before(one) < before(conclusion) and one.confidence is Confidence.CERTAIN for one in own)
        is_loss = Trait.FOLLOWS_A_DEATH in conclusion.cause.traits and conclusion.role is Role.LIKELY
        yield replace(conclusion, role=Role.VICTIM) if is_after and is_loss else conclusion


def _after_an_end(found: Sequence[Conclusion]) -> Iterator[Conclusion]:
    """Count lost RDMA packets as a victim's report if a line reports the end of a process on another node."""
    ends = [
        conclusion
        for conclusion in found
        if Trait.EXPLAINS_A_KILL in conclusion.cause.traits and conclusion.role <= Role.LIKELY
    ]
    reasons = [end for end in ends if end.confidence is not Confidence.UNDECIDED]
    reasons += [conclusion for conclusion in _errors_of_script(found) if conclusion.confidence is Confidence.CERTAIN]
    for conclusion in found:
        is_loss = (
            Trait.FOLLOWS_AN_END_ELSEWHERE in conclusion.cause.traits and conclusion.confidence is Confidence.LIKELY
        )
        is_after = is_loss and any(_is_of_another(reason, conclusion) for reason in reasons)
        yield replace(conclusion, role=Role.VICTIM) if is_after else conclusion


def _errors_of_script(found: Sequence[Conclusion]) -> list[Conclusion]:
    return [
        conclusion
        for conclusion in found
        if Trait.ERROR_OF_SCRIPT in conclusion.cause.traits and conclusion.role <= Role.GENERIC
    ]


def _is_of_another(end: Conclusion, loss: Conclusion) -> bool:
    """Whether ranks or nodes ended that did not report the loss themselves; RDMA goes to other nodes."""
    ranks, nodes = set(end.culprit.ranks), set(end.culprit.nodes)
    if ranks and loss.victims:
        return not ranks <= loss.victims
    reporters = {line.node for line in loss.evidence if line.node}
    return not (nodes and reporters and nodes <= reporters)


def _alternatives(found: Sequence[Conclusion], logs: Logs) -> Iterator[Conclusion]:
    """Return further candidates: causes with similar words, and causes that the same lines may mean."""
    first = found[0] if found else None
    if first is None or _is_settled(first):
        return
    known = {conclusion.cause.id for conclusion in found}
    same = "this could cause the same lines"
    others = [(find_cause(other), same, first.evidence) for other in first.cause.also]
    if not _is_proven(first) and not _says_nothing(first):
        said = [*first.evidence, *(_alarms(logs) or _last_words(logs))]
        likes = resembling([line.text for line in said])
        alike = [(cause, "no proof, but this line uses the same words", (said[at],)) for cause, at in likes]
        # Reports of victims resemble reports of other victims.
        is_usual = first.role is Role.VICTIM or Trait.SUCCESS in first.cause.traits
        others = [*others, *alike] if is_usual else [*alike, *others]
        if goes_on_after(first.evidence[-1], logs):
            others = [(find_cause("healthy"), "the job continued after these lines", first.evidence), *others]
    for cause, why, evidence in others:
        if cause.id in known or len(known) >= MAX_ANSWERS:
            continue
        known.add(cause.id)
        yield Conclusion(
            cause=cause,
            role=Role.CONTEXT,
            confidence=Confidence.UNDECIDED,
            culprit=first.culprit,
            message=f"{why}: {_within_a_sentence(cause.title)}",
            evidence=evidence,
            victims=first.victims,
        )


def _within_a_sentence(title: str) -> str:
    return (title if title[1:2].isupper() else title[:1].lower() + title[1:]).rstrip(".")


def _is_proven(first: Conclusion) -> bool:
    """Whether the fault itself is reported, with certainty."""
    return first.role is Role.PRIMARY and first.confidence is Confidence.CERTAIN


def _says_nothing(first: Conclusion) -> bool:
    """Whether nothing reports a failure: the job was healthy, or it hangs."""
    return Trait.SAYS_NOTHING in first.cause.traits and first.confidence is not Confidence.UNDECIDED


def _is_settled(first: Conclusion) -> bool:
    """Whether other causes need not be considered."""
    return _says_nothing(first) and first.confidence is Confidence.CERTAIN


def _alarms(logs: Logs) -> list[Line]:
    """Return the messages of exceptions, and from the ends of logs the lines that sound like a failure."""
    said = [event.line for event in logs.of("exception")][:MAX_ALARMS]
    return said + [line for line in _last_words(logs) if _ALARM.search(line.text)][:MAX_ALARMS]


def _last_words(logs: Logs) -> list[Line]:
    return [line for tail in logs.tails[:MAX_ALARMS] for line in tail.lines]


def conclude_signs(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Return one conclusion for each cause that a line shows."""
    by_cause: defaultdict[Cause, list[LogEvent]] = defaultdict(list)
    for event in logs.events:
        if event.cause is not None:
            by_cause[event.cause].append(event)
    is_overcome = tell_overcome(logs)
    cancels = _first_lines(logs.of(Trait.ENDS_FROM_OUTSIDE))
    failures = _first_lines(
        other for other in logs.events if _SRUN in other.line.text and _FAILED.search(other.line.text)
    )
    ends = {end.pid: end.culprit() for end in read_ends(logs) if end.pid is not None}
    ended = find_ended(logs)
    for cause, events in by_cause.items():
        proofs = [event for event in events if event.sign and event.sign.role is not Role.CONTEXT]
        proofs = [event for event in proofs if not _is_aftermath(event, cancels, failures) and not is_overcome(event)]
        if Trait.EXPLAINS_A_KILL in cause.traits:
            proofs = [event for event in proofs if event.number("pid") not in ended]
        if not proofs:
            continue
        context = [event for event in events if event.sign and event.sign.role is Role.CONTEXT]
        best = min(proofs, key=_strength)
        same = [event for event in proofs if _strength(event) == _strength(best)]
        culprit = find_culprit(same, context, people, ends)
        if not culprit:  # a weaker line may know more
            culprit = find_culprit(sorted(proofs, key=_strength)[len(same) :], context, people, ends)
        assert best.sign is not None
        if cause.is_outcome and best.sign.role is Role.VICTIM:
            culprit = Culprit()  # who waited, according to its own lines
        yield Conclusion(
            cause=cause,
            role=best.sign.role,
            confidence=best.sign.confidence,
            culprit=culprit,
            message=_tell(cause, best),
            evidence=_unlike([*same, *context]),
            victims=frozenset(
                rank for event in proofs if (rank := event.line.rank) is not None and rank not in culprit.ranks
            ),
            has_context=bool(context),
            weight=-1 if Trait.JOB_MAY_GO_ON in cause.traits else 0,
        )


def _first_lines(events: Iterable[LogEvent]) -> dict[str, int]:
    first: dict[str, int] = {}
    for event in events:
        first.setdefault(event.line.source.shown, event.line.number)
    return first


def _unlike(events: Sequence[LogEvent]) -> tuple[Line, ...]:
    """Return the first line, and those of the others that say something different."""
    lines: dict[str, Line] = {}
    for event in events[:MAX_LOOKED_AT]:
        lines.setdefault(_NUMBERS.sub("", event.line.text), event.line)
    return tuple(lines.values())[:MAX_EVIDENCE]


def _is_aftermath(event: LogEvent, cancels: Mapping[str, int], failures: Mapping[str, int]) -> bool:
    """Whether srun only reports tasks that srun itself, or the scheduler, was ending.

    Args:
        cancels: the first line of each source about an end from outside.
        failures: the first line of each source in which srun reports a task that ended by itself.
    """
    source, number = event.line.source.shown, event.line.number
    if _SRUN not in event.line.text:
        return False
    has_failed = _KILLED.search(event.line.text) is not None and number > failures.get(source, number)
    return has_failed or number > cancels.get(source, number)


def _strength(event: LogEvent) -> tuple[int, int]:
    assert event.sign is not None
    return event.sign.role, _DOUBT[event.sign.confidence]


def _bucket(conclusion: Conclusion) -> int:
    """Return the class of the list above to which it belongs."""
    is_weak = conclusion.confidence is Confidence.UNDECIDED
    return {
        Role.PRIMARY: 1 if is_weak else 0,
        Role.LIKELY: 4 if is_weak else 2,
        Role.GENERIC: 3 if conclusion.confidence is Confidence.CERTAIN else 4,
        Role.VICTIM: 6 if is_weak else 5,
        Role.CONTEXT: 7,
    }[conclusion.role]


def _yield(found: Sequence[Conclusion]) -> frozenset[str]:
    """Return causes without proof whose lines may come from another cause that has lines of its own."""
    weak = {conclusion.cause.id for conclusion in found if conclusion.confidence is Confidence.UNDECIDED}
    also = {
        conclusion.cause.id: weak.intersection(conclusion.cause.also)
        for conclusion in found
        if conclusion.cause.id in weak
    }
    return frozenset(one for one, others in also.items() if any(one not in also[other] for other in others))


def _merge(found: Iterable[Conclusion]) -> list[Conclusion]:
    """Merge the conclusions of one cause: the strongest says how; all of the same strength say who."""
    best: dict[str, Conclusion] = {}
    for conclusion in found:
        other = best.get(conclusion.cause.id)
        if other is None:
            best[conclusion.cause.id] = conclusion
            continue
        first, second = sorted((other, conclusion), key=lambda one: (_bucket(one), -one.weight))
        culprit = first.culprit or second.culprit
        if _bucket(first) == _bucket(second) and first.weight == second.weight:
            culprit = first.culprit | second.culprit
        best[conclusion.cause.id] = replace(
            first, culprit=culprit, victims=(first.victims | second.victims) - frozenset(culprit.ranks)
        )
    return list(best.values())


def _order(found: Sequence[Conclusion], offsets: Mapping[str, float]) -> Callable[[Conclusion], tuple[float, int]]:
    """Return the key by which the first event is found.

    Args:
        offsets: seconds to subtract from the times of each clock (clocks.py).
    """
    lines = [conclusion.first for conclusion in found]
    sources = {line.source.shown: index for index, line in enumerate(lines)}
    if len(sources) <= 1:
        return lambda conclusion: (0.0, conclusion.first.number)
    if all(line.time is not None for line in lines) and len({(line.has_year, line.has_date) for line in lines}) == 1:
        return lambda conclusion: (
            (conclusion.first.time or 0.0) - offsets.get(clock_of(conclusion.first), 0.0),
            conclusion.first.number,
        )
    return lambda conclusion: (float(sources[conclusion.first.source.shown]), conclusion.first.number)


class _Values(dict[str, object]):
    """The value from a line; if it is missing, a word that fits the sentence."""

    def __missing__(self, key: str) -> str:
        return {"node": "that node", "interface": "that interface", "rank": "that rank"}.get(key, "it")


def _tell(cause: Cause, event: LogEvent) -> str:
    text = cause.told or cause.title.rstrip(".")
    try:
        return text.format_map(_Values(event.values))
    except (KeyError, IndexError, ValueError):
        return text
