"""From what the logs say to what happened: all readings side by side, the culprit's first. Pure.

Order of conclusions:
    1. the fault itself, as who had it or who decided it says (an exception with its reason, Xid, the scheduler)
    2. what usually means one cause, and what only all ranks together show (who is behind, who never came)
    3. the user's own exceptions
    4. weak readings; then what victims say
and within each the earliest: by line within one source, by time where all sources have it. Victims alone are a
collective-timeout at most; nothing at all is healthy, or a hang that left no word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from allranks.causes.cause import Cause
from allranks.causes.sign import Blames, Role
from allranks.model.finding import Confidence
from allranks.why.arrivals import conclude_arrivals
from allranks.why.collectives import conclude_collectives
from allranks.why.conclusion import Conclusion
from allranks.why.ends import conclude_ends, read_ends
from allranks.why.events import Event, Logs
from allranks.why.line import Line
from allranks.why.people import Culprit, People, blame, meet, missing_of
from allranks.why.silence import conclude_silence
from allranks.why.stacks import conclude_stacks
from allranks.why.tracebacks import conclude_tracebacks

READINGS: tuple[Callable[[Logs, People], Iterable[Conclusion]], ...] = (
    conclude_stacks,
    conclude_arrivals,
    conclude_collectives,
    conclude_tracebacks,
    conclude_ends,
)
"""What looks at more than one line."""

MAX_EVIDENCE = 4


def conclude(logs: Logs) -> list[Conclusion]:
    """Return what happened, the most probable cause first; each cause once."""
    people = meet(logs)
    found = [*conclude_signs(logs, people), *(each for reading in READINGS for each in reading(logs, people))]
    found = [each if each.culprit else replace(each, culprit=someone(each, people)) for each in _merge(found)]
    before = _order(found)
    found.sort(key=lambda each: (_bucket(each), -each.weight, before(each), each.cause.id))
    found += conclude_silence(logs, people, found)
    return found


def someone(conclusion: Conclusion, people: People) -> Culprit:
    """Return who may be meant where no line of a cause names anybody: who reports it, or what else is near."""
    if conclusion.cause.name == "straggler-rank":
        return Culprit(ranks=missing_of(conclusion.victims, people.world))
    line = conclusion.first
    near = [who for source, number, who in people.scopes if source == line.source.shown and number <= line.number]
    if near:
        return near[-1]
    if conclusion.role is not Role.VICTIM and 1 <= len(people.nodes) <= 2 and not _is_nobodys(conclusion.cause):
        return Culprit(nodes=people.nodes)
    return Culprit()


def conclude_signs(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Return one conclusion for each cause that a line shows."""
    by_cause: defaultdict[type[Cause], list[Event]] = defaultdict(list)
    for event in logs.events:
        if event.cause is not None:
            by_cause[event.cause].append(event)
    ends = {end.pid: end.culprit() for end in read_ends(logs) if end.pid is not None}
    for cause, events in by_cause.items():
        proofs = [event for event in events if event.sign and event.sign.role is not Role.CONTEXT]
        if not proofs:
            continue
        context = [event for event in events if event.sign and event.sign.role is Role.CONTEXT]
        best = min(proofs, key=_strength)
        same = [event for event in proofs if _strength(event) == _strength(best)]
        culprit = _culprit(same, context, people, ends)
        if not culprit:  # a weaker line may know
            culprit = _culprit(sorted(proofs, key=_strength)[len(same) :], context, people, ends)
        assert best.sign is not None
        yield Conclusion(
            cause=cause,
            role=best.sign.role,
            confidence=best.sign.confidence,
            culprit=culprit,
            message=_tell(cause, best),
            evidence=tuple(event.line for event in [*same, *context])[:MAX_EVIDENCE],
            victims=frozenset(
                rank for event in proofs if (rank := event.line.rank) is not None and rank not in culprit.ranks
            ),
            weight=1 if context else 0,
        )


def _culprit(
    same: Sequence[Event], context: Sequence[Event], people: People, ends: dict[int, Culprit]
) -> Culprit:
    """Who is named by these lines."""
    culprit = Culprit()
    for event in same[:64]:
        culprit |= blame(event, people)
        pid = event.number("pid")
        if pid is not None and pid in ends:
            culprit |= ends[pid]
    for event in context[:8]:
        culprit |= blame(event, people)
    return culprit


def _is_nobodys(cause: type[Cause]) -> bool:
    """Whether none of its signs names anybody."""
    return all(sign.blames is Blames.NOBODY for sign in cause.signs)


def _strength(event: Event) -> tuple[int, int]:
    assert event.sign is not None
    return event.sign.role, list(Confidence).index(event.sign.confidence)


def _bucket(each: Conclusion) -> int:
    """Which of the classes above it is in."""
    is_weak = each.confidence is Confidence.UNDECIDED
    return {
        Role.PRIMARY: 1 if is_weak else 0,
        Role.LIKELY: 4 if is_weak else 2,
        Role.GENERIC: 3 if each.confidence is Confidence.CERTAIN else 4,
        Role.VICTIM: 6 if is_weak else 5,
        Role.CONTEXT: 7,
    }[each.role]


def _merge(found: Iterable[Conclusion]) -> list[Conclusion]:
    """Join the conclusions of one cause: the strongest says how, all of the same strength say who."""
    best: dict[str, Conclusion] = {}
    for each in found:
        other = best.get(each.cause.id)
        if other is None:
            best[each.cause.id] = each
            continue
        first, second = sorted((other, each), key=lambda one: (_bucket(one), -one.weight))
        culprit = first.culprit or second.culprit
        if _bucket(first) == _bucket(second) and first.weight == second.weight:
            culprit = first.culprit | second.culprit
        best[each.cause.id] = replace(
            first, culprit=culprit, victims=(first.victims | second.victims) - frozenset(culprit.ranks)
        )
    return list(best.values())


def _order(found: Sequence[Conclusion]) -> Callable[[Conclusion], tuple[float, int]]:
    """Return what is compared where it is asked what came first."""
    lines = [each.first for each in found]
    sources = {line.source.shown: index for index, line in enumerate(lines)}
    if len(sources) <= 1:
        return lambda each: (0.0, each.first.number)
    if all(line.time is not None for line in lines) and len({(line.has_year, line.has_date) for line in lines}) == 1:
        return lambda each: (each.first.time or 0.0, each.first.number)
    return lambda each: (float(sources[each.first.source.shown]), each.first.number)


class _Values(dict[str, object]):
    """What a line said; where it did not, a word that reads well."""

    def __missing__(self, key: str) -> str:
        return {"node": "that node", "interface": "that interface", "rank": "that rank"}.get(key, "it")


def _tell(cause: type[Cause], event: Event) -> str:
    text = cause.told or cause.title().rstrip(".")
    try:
        return text.format_map(_Values(event.values))
    except (KeyError, IndexError, ValueError):
        return text


def tell_fix(cause: type[Cause], culprit: Culprit) -> str | None:
    """Return the cause's fix with what is known of the culprit in it."""
    values = _Values()
    if culprit.nodes:
        values["node"] = ", ".join(culprit.nodes[:4])
    if culprit.interface:
        values["interface"] = culprit.interface
    return cause.fix.format_map(values) or None


def first_lines(conclusions: Iterable[Conclusion]) -> list[Line]:
    """Return the first line of each."""
    return [each.first for each in conclusions if each.evidence]
