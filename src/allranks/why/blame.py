"""From what the logs say to what happened, the culprit first. Pure.

    lines -> facts (facts_of_lines.py, readings/) -> one fact for each end (unite.py) -> who explains whom
    (facts/solve.py) -> conclusions, one for each cause

What needs no line of an error (readings/silence.py) answers only if nothing failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import islice
from operator import or_

from allranks.causes.book import find_cause
from allranks.causes.cause import Cause, Trait
from allranks.facts.fact import Fact, FactKind, Place, Said, Same, Who
from allranks.facts.solve import solve
from allranks.facts.story import Root, RootPart, Story, StoryEnd
from allranks.model.finding import Confidence
from allranks.recorder.calls import Dump
from allranks.why.chain import tell_chain
from allranks.why.conclusion import Conclusion, Culprit, describe, is_suffered
from allranks.why.facts_of_lines import FactReader, place_of
from allranks.why.logs.log_events import Logs
from allranks.why.logs.sources import list_jobs
from allranks.why.naming import name_somebody
from allranks.why.other_jobs import leave_out_strangers
from allranks.why.readings.arrivals import read_arrivals
from allranks.why.readings.dials import read_dials
from allranks.why.readings.ends import read_ends
from allranks.why.readings.lists import read_opcounts, read_ras, read_stalls
from allranks.why.readings.progress import read_restarts, read_steps
from allranks.why.readings.silence import conclude_silence, find_words
from allranks.why.readings.tracebacks import list_raised
from allranks.why.readings.watchdogs import read_watchdogs
from allranks.why.step_lines import EPOCH, MIN_STEPS, is_of_training
from allranks.why.stops import read_stops
from allranks.why.unite import leave_out_refined, unite

READINGS: tuple[Callable[[FactReader], Iterable[Fact]], ...] = (
    read_arrivals,
    read_watchdogs,
    read_dials,
    list_raised,
    read_ends,
    read_stalls,
    read_opcounts,
    read_ras,
    read_restarts,
    read_steps,
)
"""The readings that combine several lines."""

MAX_EVIDENCE = 3
MAX_ALTERNATIVES = 2
_NUMBERS = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")


def conclude(logs: Logs, dumps: Sequence[Dump] = ()) -> list[Conclusion]:
    """Return what happened, the most probable cause first; each cause once."""
    return explain(logs, dumps)[0]


def explain(logs: Logs, dumps: Sequence[Dump] = ()) -> tuple[list[Conclusion], Story]:
    """Return what happened, and the story of it; dumps are those of the flight recorder beside the logs."""
    logs = leave_out_strangers(logs)
    reader = FactReader(logs)
    facts = leave_out_refined([*reader.read(), *(fact for reading in READINGS for fact in reading(reader))])
    facts = unite(facts)
    overcome = _find_overcome(facts, logs)
    facts = [fact for fact in facts if fact not in overcome]
    if dumps:
        hung = max((reader.attempt_of(event.line) for event in logs.of(Trait.ONLY_WAITS)), default=0)
        facts += read_stops(dumps, world=reader.people.world, attempt=hung)
    story = solve([fact for fact in facts if fact.cause or fact.kind not in _NEED_A_CAUSE], world=reader.people.world)
    found = list(_conclusions(story, facts, reader))
    found += [replace(_of_consequences([fact]), is_failure=False) for fact in overcome[:1]]
    if story.outcome is StoryEnd.FINISHED:  # what came before was survived
        found = [replace(conclusion, is_failure=False) for conclusion in found]
    jobs = list_jobs(tail.source for tail in logs.tails)
    notes = [told] if (told := tell_chain(story)) else []
    if len(jobs) > 1:
        notes.append(f"these are logs of {len(jobs)} jobs, read as if they were one: name the files of one")
    end = story.culprits[0].fact if story.culprits else None
    if found and end is not None and end.kind is FactKind.ENDED and end.code and (words := find_words(reader, end.who)):
        found[0] = replace(found[0], message=words.text.strip(), evidence=(place_of(words), *found[0].evidence))
    if found:
        found[0] = replace(found[0], notes=(*notes, *found[0].notes))
    ended = (fact for fact in facts if fact.cause and Trait.ENDS_FROM_OUTSIDE in find_cause(fact.cause).traits)
    warned = {fact for root in story.roots if root.part is RootPart.WARNING for fact in root.facts}
    survived = {fact for fact in warned if fact.kind is FactKind.SCHEDULER_END}  # the job was begun again
    is_ended = any(fact.attempt >= story.attempt and fact not in survived for fact in ended)
    silence = list(conclude_silence(logs, reader.people, found, is_ended=is_ended))
    for index, conclusion in enumerate(silence):
        above = reader.attempts.tell_above(conclusion.evidence)
        if above is not None and Trait.SUCCESS in conclusion.cause.traits:
            most = conclusion.confidence.at_most(Confidence.LIKELY)
            silence[index] = replace(conclusion, confidence=most, notes=(*conclusion.notes, above))
    names = {conclusion.cause.name for conclusion in silence}
    return [*silence, *(conclusion for conclusion in found if conclusion.cause.name not in names)], story


_NEED_A_CAUSE = frozenset((FactKind.RAISED, FactKind.SETTING))


def _find_overcome(facts: Sequence[Fact], logs: Logs) -> list[Fact]:
    """Return a shell's words, if the training made some steps below or in its other file: it did without that program.

    slurm-4711.err has `conda: command not found`, slurm-4711.out the steps.
    """
    said = [fact for fact in facts if _is_of_shell(fact)]
    above = {fact.place.source: fact.place.line for fact in said}
    names = {source.rpartition(".")[0] for source in above}
    own = [tail for tail in logs.tails if tail.source.shown.rpartition(".")[0] in names] if said else []
    below = (line for tail in own for line in tail.lines if line.number > above.get(line.source.shown, 0))
    steps = (line for line in below if is_of_training(line.text) or EPOCH.search(line.text))
    return said if len(list(islice(steps, MIN_STEPS))) == MIN_STEPS else []


def _is_of_shell(fact: Fact) -> bool:
    is_of_script = fact.kind is FactKind.RAISED and Trait.ERROR_OF_SCRIPT in find_cause(fact.cause).traits
    return is_of_script and not (fact.is_fatal or fact.is_generic or fact.confidence is Confidence.CERTAIN)


def _conclusions(story: Story, facts: Sequence[Fact], reader: FactReader) -> Iterator[Conclusion]:
    """Return the roots of a story, the culprit's first, then what they explain, then warnings; each cause once."""
    roots = [root for root in story.roots if root.fact.cause]
    shown: dict[str, list[Root]] = {}
    for root in roots:
        if root.part is not RootPart.WARNING:
            shown.setdefault(root.fact.cause, []).append(root)
    told = set(shown)
    also = [root for root in roots if root.part is RootPart.ALSO]
    for index, same in enumerate(shown.values()):
        yield _of_roots(same, story, facts, reader, others=also if index == 0 else ())
    if not shown and any(root.fact.kind is FactKind.LAUNCHER_KILL for root in story.culprits):
        outside = [root for root in roots if Trait.ENDS_FROM_OUTSIDE in find_cause(root.fact.cause).traits][:1]
        told |= {root.fact.cause for root in outside}
        yield _of_launcher(story, outside, facts, reader)
    of_roots = {fact for root in roots for fact in root.facts}
    consequences: dict[str, list[Fact]] = {}
    earlier: dict[str, list[Fact]] = {}  # the job was started again after it
    for fact in facts:
        if fact.said is Said.INFERRED or fact.kind in _WELL or not fact.cause or fact in of_roots:
            continue
        is_exit_code = fact.kind is FactKind.ENDED and Trait.ERROR_OF_SCRIPT in find_cause(fact.cause).traits
        if not is_exit_code:  # which says nothing beside a root
            (consequences if fact.attempt >= story.attempt else earlier).setdefault(fact.cause, []).append(fact)
    for name, same_facts in consequences.items():
        if name not in told and Trait.BREAKS_WITH_ITS_PEER not in find_cause(name).traits:  # the chain tells of those
            yield _of_consequences(same_facts)
    told |= set(consequences)
    for root in roots:
        if root.fact.cause not in told:
            told.add(root.fact.cause)
            yield replace(_of_roots([root], story, facts, reader), is_failure=False)
    for name, same_facts in earlier.items():
        if name not in told:
            yield replace(_of_consequences(same_facts), is_failure=False)


_FAULTS = frozenset((FactKind.RAISED, FactKind.LINK_FAULT, FactKind.DEVICE_FAULT))
_WELL = frozenset((FactKind.FINISHED, FactKind.RECOVERED, FactKind.STEP))


def _of_launcher(story: Story, outside: Sequence[Root], facts: Sequence[Fact], reader: FactReader) -> Conclusion:
    """Return that a launcher ended its workers, and nobody says why; or that it was told to end itself."""
    if outside:
        return replace(_of_roots(outside, story, facts, reader), culprit=Culprit(), is_failure=False)
    return Conclusion(
        cause=find_cause("dead-rank"),
        confidence=Confidence.UNDECIDED,
        culprit=Culprit(),
        message="a launcher ended its workers; these logs do not say which process had failed, or why",
        evidence=_unlike([fact for root in story.culprits for fact in root.facts]),
    )


def _of_consequences(same: Sequence[Fact]) -> Conclusion:
    best = min(same, key=lambda fact: fact.confidence.doubt)
    return Conclusion(
        cause=find_cause(best.cause),
        confidence=best.confidence,
        culprit=Culprit(),
        message=best.told,
        evidence=_unlike(same),
        victims=_victims(same),
        is_consequence=True,
    )


def _of_roots(
    same: Sequence[Root], story: Story, facts: Sequence[Fact], reader: FactReader, *, others: Sequence[Root] = ()
) -> Conclusion:
    """Return the conclusion about the roots of one cause, the first one first; `others` broke by themselves, too."""
    first = same[0]
    cause = find_cause(first.fact.cause)
    like = [root for root in same if root.part is first.part or _is_more_of(first.fact.who, root.fact.who)]
    own = [fact for root in like for fact in root.facts]
    culprit = reduce(or_, map(_culprit_of, like))
    if first.fact.said is Said.INFERRED:  # one inference about several processes
        same_told = [fact for fact in facts if (fact.places, fact.told) == (first.fact.places, first.fact.told)]
        own = list(dict.fromkeys([*own, *same_told]))
        culprit = reduce(or_, (describe(fact.who) | Culprit(things=fact.things) for fact in own), culprit)
    effects = [edge.effect for edge in story.edges if edge.cause in own]
    is_known, is_child = bool(culprit), first.fact.kind is FactKind.ENDED and first.fact.said is Said.KERNEL
    for fact in (effect for effect in effects if effect.cause == cause.name):
        if is_child and fact.kind is FactKind.RAISED:  # its parent names it
            culprit |= Culprit(things=fact.things)
        elif not is_known and {fact.kind, first.fact.kind} <= _FAULTS:  # what it did elsewhere may tell whose it is
            culprit |= describe(fact.who) | Culprit(things=fact.things)
    is_node = first.fact.kind is FactKind.MISSING and reader.people.may_be_node(culprit.ranks)
    victims = _victims(facts) | frozenset(story.victims)
    conclusion = Conclusion(
        cause=cause,
        confidence=Confidence.UNDECIDED if is_node else first.confidence,  # perhaps the node is gone
        culprit=culprit,
        message=first.fact.told or cause.told or cause.title,
        evidence=_unlike([*own, *_list_same_told(first.fact, effects)]),
        victims=victims,
        signal=first.fact.signal,
        ask=first.fact.ask,
        notes=tuple(_notes(first, cause, [root for root in others if root not in like])),
    )
    said = {place.at for fact in own for place in fact.places}
    hurt = _victims(fact for fact in facts if said.isdisjoint(place.at for place in fact.places))
    return name_somebody(conclusion, own, effects, reader.logs, reader.people, hurt=hurt)


def _list_same_told(start: Fact, effects: Sequence[Fact]) -> list[Fact]:
    """Return what a launcher tells in further lines of a failed start: one of them says why."""
    if start.said is not Said.LAUNCHER or start.kind is not FactKind.RAISED:
        return []
    same = [fact for fact in effects if (fact.kind, fact.cause, fact.said) == (start.kind, start.cause, start.said)]
    return sorted(same, key=lambda fact: fact.place.at)


def _is_more_of(machine: Who, who: Who) -> bool:
    """Whether a fault of a process tells more of what its machine was found to have."""
    return machine.is_node and not who.is_node and machine.compare_machines(who) is Same.YES


def _culprit_of(root: Root) -> Culprit:
    """Return whom a root names, with the things that its facts name."""
    culprit = Culprit()
    for who in root.blamed:
        culprit |= describe(who, with_process=root.fact.kind is FactKind.ENDED)
    for fact in root.facts:
        if not root.blamed and is_suffered(fact) and fact.peer:
            culprit |= describe(fact.peer)
        culprit |= Culprit(interface=fact.interface, things=fact.things)
    return culprit


def _notes(first: Root, cause: Cause, others: Sequence[Root]) -> Iterator[str]:
    for root in others:
        words = _culprit_of(root).words()
        if root is not first and (words or root.fact.told != first.fact.told):  # else it tells nothing more
            yield f"also by itself: {words or 'a process'}, {root.fact.told}"
    labels = dict.fromkeys(find_cause(name).label for name in first.fact.alternatives)
    names = [label for label in labels if label != cause.label][:MAX_ALTERNATIVES]
    if names and first.confidence is not Confidence.CERTAIN:
        yield f"these lines may also mean {' or '.join(names)}"


def _victims(facts: Iterable[Fact]) -> frozenset[int]:
    return frozenset(fact.who.rank for fact in facts if is_suffered(fact) and fact.who.rank is not None)


def _unlike(facts: Sequence[Fact]) -> tuple[Place, ...]:
    """Return the first line, and those of the others that say something different."""
    places: dict[str, Place] = {}
    for fact in facts:
        for place in fact.places:
            places.setdefault(_NUMBERS.sub("", place.text), place)
        if len(places) >= MAX_EVIDENCE:
            break
    return tuple(places.values())[:MAX_EVIDENCE]
