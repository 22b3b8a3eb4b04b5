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

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_

from allranks.causes.catalogue import find_cause
from allranks.causes.cause import Cause
from allranks.causes.sign import Blames, Role
from allranks.model.finding import Confidence
from allranks.why.clocks import clock_of, estimate_offsets
from allranks.why.conclusion import Conclusion
from allranks.why.logs.events import Event, Logs
from allranks.why.logs.line import Line
from allranks.why.overcome import tell_overcome
from allranks.why.overheard import overhear
from allranks.why.people import Culprit, People, blame, meet, missing_of, named
from allranks.why.readings.arrivals import conclude_arrivals
from allranks.why.readings.collectives import conclude_collectives
from allranks.why.readings.dials import conclude_dials
from allranks.why.readings.ends import conclude_ends, find_first, read_ends
from allranks.why.readings.opcounts import conclude_opcounts
from allranks.why.readings.progress import conclude_progress, find_laggard
from allranks.why.readings.restarts import conclude_restarts
from allranks.why.readings.silence import conclude_silence
from allranks.why.readings.stacks import conclude_stacks
from allranks.why.readings.stalls import conclude_stalls
from allranks.why.readings.tracebacks import conclude_tracebacks
from allranks.why.recorder.calls import Dump
from allranks.why.recorder.dumps import conclude_dumps

READINGS: tuple[Callable[[Logs, People], Iterable[Conclusion]], ...] = (
    conclude_stacks,
    conclude_arrivals,
    conclude_collectives,
    conclude_dials,
    conclude_tracebacks,
    conclude_ends,
    conclude_stalls,
    conclude_opcounts,
    conclude_restarts,
    conclude_progress,
)
"""What looks at more than one line."""

_OF_MEETING = frozenset(("master-unreachable", "master-dns", "rendezvous-timeout", "store-lost"))
"""Causes that are about the place where all ranks meet."""
MAX_ANSWERS = 3
"""Conclusions up to which those are added that the same lines allow."""
MAX_EVIDENCE = 3
MAX_LINES = 400
"""Of one cause that are asked whom they name."""
SCOPE_LINES = 4
"""Of one announcement: Ray writes a dead actor's process and address on lines of their own."""
MAX_THINGS = 6
"""Addresses, ports, processes that are named."""


def conclude(logs: Logs, dumps: Sequence[Dump] = ()) -> list[Conclusion]:
    """Return what happened, the most probable cause first; each cause once.

    Args:
        logs: what the lines say.
        dumps: of the ranks' flight recorders, where some lie beside the logs (recorder.py).
    """
    people = meet(logs)
    found = [*conclude_signs(logs, people), *(each for reading in READINGS for each in reading(logs, people))]
    found += conclude_dumps(dumps)
    nodes = _nodes_of_ranks(logs)
    found = [_add_nodes(_name_somebody(each, logs, people), nodes) for each in _merge(found)]
    before = _order(found, estimate_offsets(logs))
    found.sort(key=lambda each: (_bucket(each), -each.weight, before(each), not each.has_context, each.cause.id))
    found = [*conclude_silence(logs, people, found), *found]
    return [*found, *_alternatives(found)]


def _alternatives(found: Sequence[Conclusion]) -> Iterator[Conclusion]:
    """Return what the lines of the first conclusion may come from, too, where they do not prove it."""
    first = found[0] if found else None
    if first is None or first.role is Role.GENERIC:
        return
    if first.role is Role.PRIMARY and first.confidence is Confidence.CERTAIN:
        return
    known = {each.cause.id for each in found}
    others = [find_cause(other) for other in first.cause.also if other not in known]
    for cause in others[: MAX_ANSWERS - len(found)] if len(found) < MAX_ANSWERS else ():
        yield Conclusion(
            cause=cause,
            role=Role.CONTEXT,
            confidence=Confidence.UNDECIDED,
            culprit=first.culprit,
            message=f"the same lines may come of this: {cause.title()[:1].lower()}{cause.title()[1:].rstrip('.')}",
            evidence=first.evidence,
            victims=first.victims,
        )


def _nodes_of_ranks(logs: Logs) -> dict[int, str]:
    """Return where ranks ran, as lines that know both tell."""
    nodes = {
        event.line.rank: event.line.node for event in logs.events if event.line.rank is not None and event.line.node
    }
    nodes |= {end.rank: end.node for end in read_ends(logs) if end.rank is not None and end.node}
    return nodes


def _add_nodes(conclusion: Conclusion, nodes: Mapping[int, str]) -> Conclusion:
    culprit = conclusion.culprit
    if culprit.nodes or not culprit.ranks or len(culprit.ranks) > MAX_THINGS:
        return conclusion
    named = Culprit(nodes=tuple(dict.fromkeys(nodes[rank] for rank in culprit.ranks if rank in nodes)))
    return replace(conclusion, culprit=named | culprit)


def _name_somebody(conclusion: Conclusion, logs: Logs, people: People) -> Conclusion:
    if conclusion.cause.name == "user-code-error" and not conclusion.culprit.ranks:
        first = find_first(logs)
        if first is not None and first.code is not None and first.code > 0 and first.culprit():
            return replace(conclusion, culprit=first.culprit() | conclusion.culprit)
        if announced := _announced(conclusion, people):
            return replace(conclusion, culprit=announced | conclusion.culprit)
    if conclusion.cause.name in {"dead-rank", "host-oom-kill"} and not conclusion.culprit:
        first = find_first(logs)
        if first is not None and first.is_killed and first.culprit():
            return replace(conclusion, culprit=first.culprit())
    if not conclusion.culprit.things and (before := _named_before(conclusion, logs)):
        conclusion = replace(conclusion, culprit=conclusion.culprit | before)
    return conclusion if conclusion.culprit else replace(conclusion, culprit=someone(conclusion, logs, people))


def _named_before(conclusion: Conclusion, logs: Logs) -> Culprit:
    """Return what the last line of context before it names, where such lines blame nobody: the file that is read."""
    line = conclusion.first
    near = [
        event
        for event in logs.of(conclusion.cause.id)
        if event.sign is not None
        and (event.sign.role, event.sign.blames) == (Role.CONTEXT, Blames.NOBODY)
        and event.line.source == line.source
        and event.line.number <= line.number
    ]
    return named(near[-1]) if near else Culprit()


def someone(conclusion: Conclusion, logs: Logs, people: People) -> Culprit:
    """Return who may be meant where no line of a cause names anybody: who reports it, or what else is near."""
    if conclusion.cause.name == "straggler-rank":
        return Culprit(ranks=missing_of(conclusion.victims, people.world))
    if conclusion.cause.name in {"user-code-error", "dead-rank"} and (laggard := find_laggard(logs, people)):
        return laggard.culprit
    if announced := _announced(conclusion, people):
        return announced
    if people.endpoint and conclusion.cause.name in _OF_MEETING:
        return Culprit(things=(people.endpoint,))
    if conclusion.role is Role.VICTIM or _is_nobodys(conclusion.cause):
        return Culprit()
    nodes = people.nodes if len(people.nodes) <= 2 else ()
    return Culprit(nodes=nodes) | overhear(conclusion, logs)


def _announced(conclusion: Conclusion, people: People) -> Culprit:
    """Return whose words these are, as who passed them on says: mp.spawn, Ray, torchrun's summary."""
    line = conclusion.first
    near = [
        (number, who) for source, number, who in people.scopes if source == line.source.shown and number <= line.number
    ]
    return reduce(or_, (who for number, who in near if near[-1][0] - number <= SCOPE_LINES), Culprit())


def conclude_signs(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Return one conclusion for each cause that a line shows."""
    by_cause: defaultdict[type[Cause], list[Event]] = defaultdict(list)
    for event in logs.events:
        if event.cause is not None:
            by_cause[event.cause].append(event)
    is_overcome = tell_overcome(logs)
    cancels: dict[str, int] = {}
    for event in logs.of("AR506", "AR507", "AR508"):
        cancels.setdefault(event.line.source.shown, event.line.number)
    ends = {end.pid: end.culprit() for end in read_ends(logs) if end.pid is not None}
    for cause, events in by_cause.items():
        proofs = [event for event in events if event.sign and event.sign.role is not Role.CONTEXT]
        proofs = [event for event in proofs if not _is_aftermath(event, cancels) and not is_overcome(event)]
        if not proofs:
            continue
        context = [event for event in events if event.sign and event.sign.role is Role.CONTEXT]
        best = min(proofs, key=_strength)
        same = [event for event in proofs if _strength(event) == _strength(best)]
        culprit = _culprit(same, context, people, ends)
        if not culprit:  # a weaker line may know
            culprit = _culprit(sorted(proofs, key=_strength)[len(same) :], context, people, ends)
        assert best.sign is not None
        if cause.is_outcome and best.sign.role is Role.VICTIM:
            culprit = Culprit()  # who waited, and says so
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
        )


def _unlike(events: Sequence[Event]) -> tuple[Line, ...]:
    """Return the first line, and of the others those that say something else."""
    lines: dict[str, Line] = {}
    for event in events:
        lines.setdefault(re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "", event.line.text), event.line)
    return tuple(lines.values())[:MAX_EVIDENCE]


def _is_aftermath(event: Event, cancels: dict[str, int]) -> bool:
    """Whether srun only tells of tasks that it, or the scheduler, was ending."""
    since = cancels.get(event.line.source.shown)
    return since is not None and event.line.number > since and "srun: error: " in event.line.text


def _culprit(same: Sequence[Event], context: Sequence[Event], people: People, ends: dict[int, Culprit]) -> Culprit:
    """Who is named by these lines: of many different ones, those that are named most often."""
    culprits = [blame(event, people) | _ended(event, ends) for event in same[:MAX_LINES]]
    culprits += [blame(event, people) for event in context[:8]]
    counts = Counter(thing for culprit in culprits for thing in culprit.things)
    most = max(counts.values(), default=0)
    usual = [thing for thing, count in counts.most_common(MAX_THINGS) if 3 * count >= most]
    culprit = reduce(or_, culprits, Culprit())
    return replace(culprit, things=tuple(thing for thing in culprit.things if thing in usual))


def _ended(event: Event, ends: dict[int, Culprit]) -> Culprit:
    pid = event.number("pid")
    return Culprit() if pid is None else ends.get(pid, Culprit())


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


def _order(found: Sequence[Conclusion], offsets: Mapping[str, float]) -> Callable[[Conclusion], tuple[float, int]]:
    """Return what is compared where it is asked what came first.

    Args:
        offsets: what to take off the times of each clock (clocks.py).
    """
    lines = [each.first for each in found]
    sources = {line.source.shown: index for index, line in enumerate(lines)}
    if len(sources) <= 1:
        return lambda each: (0.0, each.first.number)
    if all(line.time is not None for line in lines) and len({(line.has_year, line.has_date) for line in lines}) == 1:
        return lambda each: (
            (each.first.time or 0.0) - offsets.get(clock_of(each.first), 0.0),
            each.first.number,
        )
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
