"""One end that several lines tell is one fact: the launcher's line, its summary, the kernel's, srun's. Pure.

unite([ended(pid=3981, code=1), ended(rank=5, pid=3981, code=1, is_first_observed=True)])      one fact, two places
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from signal import SIGKILL

from msgspec.structs import replace

from allranks.causes.book import find_cause
from allranks.facts.fact import START, Fact, FactKind, Said, Same, When, Who
from allranks.facts.rules import DAY_S
from allranks.model.finding import Confidence
from allranks.why.writers import give_writers

EXACT_S = 2.0
"""A time of a line is at most as wide: a second, and what clocks differ by."""
_KILLED = re.compile(r"(?:[Kk]ill(?:ed)? process \d+,? \(|task=)([^),]+)")
_NAMES = ("python", "pt_", "ray", "torchrun", "train")
"""How the kernel calls processes of a training: torch sets pt_data_worker, pt_main_thread."""
_ENDS = frozenset((FactKind.ENDED, FactKind.LAUNCHER_KILL))
_NAMELESS = frozenset((FactKind.ENDED, FactKind.MISSING))
"""Of these, who is meant may stand in another line."""
_ERRORS = frozenset((FactKind.RAISED, FactKind.LINK_FAULT))


def unite(facts: Iterable[Fact]) -> list[Fact]:
    """Return the facts, those about one end of one process as one."""
    others: list[Fact] = []
    by_line: defaultdict[tuple[object, ...], list[Fact]] = defaultdict(list)
    for fact in facts:
        if fact.kind in _ENDS and fact.said is not Said.INFERRED and fact.places:
            by_line[fact.attempt, fact.places[0].source, fact.places[0].line].append(fact)
        else:
            others.append(fact)
    ends = [fact for same in by_line.values() for fact in _of_one_line(same)]
    by_process: defaultdict[tuple[object, ...], list[Fact]] = defaultdict(list)
    for fact in ends:
        by_process[_key(fact)].append(fact)
    runs = (run for same in by_process.values() for run in _split_runs(same))
    united = [_unite_told(same) for same in runs]
    exited = {(end.attempt, end.who.rank) for end in united if end.code is not None and end.who.rank is not None}
    united = [_tell_stranger(end) if (end.attempt, end.who.rank) in exited else end for end in united]
    return _give_names([*give_writers(others, united), *united])


def _tell_stranger(end: Fact) -> Fact:
    """Return a kernel's kill of a rank that ended with an exit code as another process's, of the same number."""
    if end.said is not Said.KERNEL or end.signal is None:
        return end
    return replace(
        end, who=Who(node=end.who.node, pid=end.who.pid), confidence=end.confidence.at_most(Confidence.LIKELY)
    )


def _split_runs(ends: Sequence[Fact]) -> list[list[Fact]]:
    """Return the ends of one process together; those of a rank days apart are of several runs."""
    runs: list[list[Fact]] = []
    for end in ends:
        for run in runs:
            if all(max(end.when.after_s(other.when), other.when.after_s(end.when)) <= DAY_S for other in run):
                run.append(end)
                break
        else:
            runs.append([end])
    return runs


def _unite_told(same: Sequence[Fact]) -> Fact:
    """Return an end; if only a kernel tells it, of a process that nobody knows, it may be anybody's.

    It is likely the job's, unless the name of what was killed is no Python's.
    """
    fact = _join(same)
    if any(one.said is not Said.KERNEL for one in same) or (fact.who.rank, fact.who.local_rank) != (None, None):
        return fact
    name = _KILLED.search(fact.places[0].text)
    is_other = name is not None and not name[1].startswith(_NAMES)
    return replace(fact, confidence=Confidence.UNDECIDED if is_other else Confidence.LIKELY)


def leave_out_refined(facts: Sequence[Fact]) -> list[Fact]:
    """Return the facts without those that a reading of several lines tells more exactly.

    That is an error on one of its lines, or a count of missing ranks in the file that names them. Who waits for the
    others to join is not missing, whoever waits for it then. What fails on the way to another process is told, where
    the readings show whose way is at fault. A line that says why something failed tells of no end without a reason:
    `Command 'ssh node-0 ...' returned non-zero exit status 255`.
    """
    reasons = {place.at for fact in facts if fact.kind is FactKind.RAISED for place in fact.places}
    inferred = [fact for fact in facts if fact.said is Said.INFERRED]
    errors = {place.at for fact in inferred if fact.kind in _ERRORS for place in fact.places}
    named = {place.source for fact in inferred if fact.kind is FactKind.MISSING and fact.who for place in fact.places}
    ways = [fact for fact in inferred if fact.kind is FactKind.LINK_FAULT]
    things = {thing for fact in ways for thing in fact.things}

    joins = (fact for fact in facts if fact.kind is FactKind.WAITED and fact.group is None and fact.seq is None)
    came = {(fact.attempt, fact.who.rank) for fact in joins if fact.who.rank is not None}

    def is_told(fact: Fact) -> bool:
        if fact.said is Said.INFERRED:
            return False
        if fact.kind is FactKind.ENDED:
            return fact.is_generic and not fact.who and any(place.at in reasons for place in fact.places)
        if fact.kind is FactKind.MISSING:
            has_come = fact.seq == START and (fact.attempt, fact.who.rank) in came
            return has_come or (not fact.who and any(place.source in named for place in fact.places))
        is_there = any(place.at in errors for place in fact.places)
        if fact.kind is FactKind.RAISED and is_there:
            return True
        is_on_way = bool(ways) and (is_there or bool(fact.peer) or not things.isdisjoint(fact.things))
        return fact.kind in _ERRORS and fact.confidence is not Confidence.CERTAIN and is_on_way

    return [fact for fact in facts if not is_told(fact)]


def _give_names(ends: Sequence[Fact]) -> list[Fact]:
    """Unite an end of which a line does not say whose it is with those that name a process and may mean the same.

    slurmstepd only counts the processes that the kernel killed; srun, a launcher or Ray says which those were.
    """
    of_processes = [fact for fact in ends if fact.kind in _ENDS and fact.cause and fact.who.is_process]
    nameless = [fact for fact in ends if fact.kind in _NAMELESS and fact.cause and not fact.who.is_process]
    nameless = [fact for fact in nameless if fact.said is not Said.SELF]  # of the unknown writer of a file
    told: dict[int, Fact] = {}
    united: set[int] = set()
    for fact in nameless:
        same = [end for end in of_processes if end.attempt == fact.attempt and _may_mean(end, fact)]
        exact = [end for end in same if end.cause == fact.cause]
        if exact or len(same) == 1:
            united.add(id(fact))
            told |= {id(end): fact for end in exact or same}
    return [
        _join([told[id(fact)], fact], fact.who) if id(fact) in told else fact for fact in ends if id(fact) not in united
    ]


def _may_mean(end: Fact, other: Fact) -> bool:
    """Whether the end of a process may be the one that another line tells of without a name."""
    causes = [end.cause]
    if other.signal in {None, SIGKILL}:
        causes += [find_cause(label).name for label in end.alternatives]
    return other.cause in causes and end.who.compare_machines(other.who) is not Same.NO


def _of_one_line(same: Sequence[Fact]) -> list[Fact]:
    """Return the ends of one line: one for each process, with all that the line means."""
    whos = list(dict.fromkeys(fact.who for fact in sorted(same, key=lambda fact: fact.who.rank is None)))
    whos = [who for at, who in enumerate(whos) if who.pid is None or who.pid not in {one.pid for one in whos[:at]}]
    known = [who for who in whos if who.rank is not None or who.pid is not None] or whos[:1]
    return [
        _join([one for one in same if one.who == who or (one.who not in known and one.who.pid in {None, who.pid})], who)
        for who in known
    ]


def _key(fact: Fact) -> tuple[object, ...]:
    """Return what two facts about one end have in common; what names no process stays alone."""
    who = fact.who
    if who.rank is not None:
        return fact.attempt, "rank", who.rank, fact.signal
    if fact.who.is_process:
        return fact.attempt, who.node, who.pid, who.local_rank, fact.signal
    return fact.places[0].source, fact.places[0].line


def _join(same: Sequence[Fact], who: Who | None = None) -> Fact:
    """Return one fact of several about one end: the strongest says what it means."""
    if len(same) == 1 and who is None:
        return same[0]
    kind = FactKind.LAUNCHER_KILL if any(fact.kind is FactKind.LAUNCHER_KILL for fact in same) else FactKind.ENDED
    best = min(same, key=lambda fact: (not fact.cause, fact.confidence.doubt))
    whole = reduce(or_, (fact.who for fact in same), who or best.who)
    labels = dict.fromkeys(fact.cause for fact in same if fact.cause and fact.cause != best.cause)
    places = dict.fromkeys(place for fact in [best, *same] for place in fact.places)
    if kind is FactKind.LAUNCHER_KILL and best.kind is FactKind.ENDED:  # whose end it was says nothing of its own
        best = next(fact for fact in same if fact.kind is kind)
        labels = {}
    whens = [fact.when for fact in same if fact.when.clock]
    things = dict.fromkeys(thing for fact in same for thing in fact.things)
    return replace(
        best,
        kind=kind,
        who=whole,
        when=min(whens, key=_began, default=best.when),  # a report comes after the end
        said=min(fact.said for fact in same),
        places=tuple(places),
        code=next((fact.code for fact in same if fact.code is not None), None),
        signal=next((fact.signal for fact in same if fact.signal is not None), None),
        is_first_observed=any(fact.is_first_observed for fact in same),
        is_of_job=any(fact.is_of_job for fact in same),
        alternatives=tuple(dict.fromkeys([*labels, *best.alternatives])),
        things=tuple(thing for thing in things if whole.rank is None or not thing.startswith("task")),
    )


def _began(when: When) -> tuple[bool, float]:
    """Prefer a time over an interval between the times of other lines; of two times the earlier."""
    is_vague = when.earliest_s is None or when.latest_s is None or when.latest_s - when.earliest_s > EXACT_S
    return is_vague, when.earliest_s or 0.0
