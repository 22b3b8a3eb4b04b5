"""Who is meant, if the facts of a cause name nobody? Pure.

From the most to the least certain: whose end it explains; what was named just before; the rendezvous address; words in
the lines themselves; the only writer in the log:

    RuntimeError: ... [177/train (pid 28936)] ... No space left on device      -> process 28936
    XID 79(GPU has fallen off the bus) detected on PCI:0000:ae:00              -> GPU 0000:ae:00
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from signal import SIGABRT, SIGTERM
from typing import Any

from allranks.causes.cause import Family, Trait
from allranks.facts.fact import Fact, FactKind, Said, Same, Who
from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion, Culprit, describe, is_suffered
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.people import FEW, People, missing_of, named
from allranks.why.readings.tracebacks import read_tracebacks

_SCRIPT = re.compile(r"\b(?P<script>[\w-][\w.-]{0,120}\.py)(?:: error: | FAILED\s*$)")
"""In the formats of argparse and of torchrun's summary."""
_OWN = frozenset((FactKind.RAISED, FactKind.ENDED, FactKind.DEVICE_FAULT))
_LINKS = frozenset((Family.NETWORK, Family.FABRIC))
_NUMBERS = re.compile(r"[0-9]+")
MAX_BESIDE = 8
MAX_THINGS = 6
"""Maximum number of named addresses, ports, processes."""


def name_somebody(
    conclusion: Conclusion,
    facts: Sequence[Fact],
    explained: Sequence[Fact],
    logs: Logs,
    people: People,
    *,
    hurt: Collection[int] = (),
) -> Conclusion:
    """Return the conclusion with a culprit, if its own facts name none or only a part: what they explain may.

    Ranks that other lines show as `hurt` are not named by hearsay.
    """
    culprit, confidence = conclusion.culprit, conclusion.confidence
    # Another process's failure ends a process by them; but a kernel's failure aborts the one that ran it.
    of_others = (SIGTERM,) if conclusion.cause.family is Family.GPU else (SIGTERM, SIGABRT)
    own = [fact for fact in explained if fact.who.rank is not None and fact.signal not in of_others]
    own = [fact for fact in own if _may_be_its(fact, facts)]
    is_of_all = not any(fact.who for fact in facts) and _count_alike(facts, logs) >= len(own) > 1
    if is_of_all:  # each in its own time
        culprit = replace(culprit, ranks=(), nodes=())
    if own and not culprit.ranks and not is_of_all and any(fact.kind in _OWN for fact in facts):
        first = min(own, key=lambda end: not end.is_first_observed)
        is_aborted = first.signal == SIGABRT  # of several that were, the launcher tells the lowest rank
        if (first.is_first_observed and not is_aborted) or len({fact.who.rank for fact in own}) == 1:
            culprit |= describe(first.who, with_process=True)
            confidence = confidence.at_most(Confidence.LIKELY if is_aborted else Confidence.CERTAIN)
    if not culprit and facts and all(map(is_suffered, facts)):  # it names its peer elsewhere
        for fact in explained:
            if is_suffered(fact) and fact.who == facts[0].who:
                culprit |= describe(fact.peer) | Culprit(things=fact.things)
    culprit |= _named_beside(conclusion, culprit, logs)
    if not culprit:
        culprit = _someone(conclusion, facts, logs, people)
        told_in = {place.source for place in conclusion.evidence}
        own_file = {tail.source.rank for tail in logs.tails if tail.source.shown in told_in}
        if not (set(hurt) - own_file).isdisjoint(culprit.ranks):  # who suffered from it did not break
            culprit = Culprit(nodes=people.nodes if len(people.nodes) == 1 else ())
        if (culprit.ranks or culprit.nodes) and any(fact.said is not Said.SELF for fact in facts):
            confidence = confidence.at_most(Confidence.LIKELY)  # it is a guess
    culprit = _add_place(conclusion, culprit, logs)
    ranks = culprit.ranks if len(culprit.ranks) <= MAX_THINGS and not culprit.nodes else ()
    there = (describe(Who(node=people.know(Who(rank=rank)).node)) for rank in ranks)
    culprit = reduce(or_, there, Culprit()) | culprit
    victims = conclusion.victims.difference(culprit.ranks)
    return replace(conclusion, culprit=culprit, confidence=confidence, victims=victims)


def _count_alike(facts: Sequence[Fact], logs: Logs) -> int:
    """Return how often the one exception was raised that these facts tell; if they tell none, the only one there is."""
    told = {_NUMBERS.sub("", place.text) for fact in facts for place in fact.places}
    raised = [_NUMBERS.sub("", event.line.text) for event in logs.of("exception")]
    alike = [text for text in raised if text in told] or raised
    return len(alike) if len(set(alike)) == 1 else 0


def _may_be_its(effect: Fact, facts: Sequence[Fact]) -> bool:
    """Whether what a cause explains may tell whose it is: what it raised, how it ended, that it did not come.

    Nobody is known, or a process of its machine, or one with its local rank.
    """
    if effect.kind not in {*_OWN, FactKind.MISSING}:
        return False
    for fact in facts:
        machine = fact.who.compare_machines(effect.who)
        is_seat = fact.who.local_rank is not None and fact.who.local_rank == effect.who.local_rank
        is_there = machine is Same.YES or (is_seat and machine is Same.UNKNOWN)
        if fact.who and (not is_there or fact.who.compare(effect.who) is Same.NO):
            return False
    return True


def _add_place(conclusion: Conclusion, culprit: Culprit, logs: Logs) -> Culprit:
    """Add the script's name, if the user's code failed and no frame names its file; the place of a wrong call.

    The message of a cut traceback is taken from a debugger's line above the frames, or from CUDA's.
    """
    traits = conclusion.cause.traits
    if Trait.OF_ONE_CALL in traits and not culprit:
        places = {event.line.at for event in logs.of(conclusion.cause.name)}
        for traceback in read_tracebacks(logs):
            if (frame := traceback.user_frame) and (traceback.line.at in places or not traceback.kind):
                return Culprit(things=(f"{frame.values['file'].rpartition('/')[2]}:{frame.values['line']}",))
    if Trait.ERROR_OF_SCRIPT in traits and not any(".py" in thing for thing in culprit.things):
        texts = [place.text for place in conclusion.evidence]
        texts += [event.line.text for event in logs.of("failed-script")]
        scripts = [found["script"] for text in texts if (found := _SCRIPT.search(text))]
        return culprit | Culprit(things=tuple(scripts[:1]))
    return culprit


def _named_beside(conclusion: Conclusion, culprit: Culprit, logs: Logs) -> Culprit:
    """Return what lines name that support this cause and prove nothing themselves: an interface, a file, a node.

    A file is that of the last such line before the first line of the cause.
    """
    beside = [event for event in logs.of(conclusion.cause.name) if event.states is None]
    first = conclusion.evidence[0]
    own = [event for event in beside if event.line.source.shown == first.source]
    above = [event for event in own if event.line.number <= first.line]
    found = Culprit()
    for event in beside[:MAX_BESIDE]:
        whos, things = named(event)
        is_one = set(event.values) <= {"thing"} or (bool(above) and len(whos) == 1 and whos[0].is_node)
        if is_one and event not in above[-1:]:  # the one that was read, or shown, last
            continue
        found |= Culprit(interface=event.values.get("interface"), things=() if culprit.things else things)
        for who in () if culprit.ranks or culprit.nodes else whos:
            found |= describe(who)
    return found


def _someone(conclusion: Conclusion, facts: Sequence[Fact], logs: Logs, people: People) -> Culprit:
    """Return the possible culprit if no line of a cause names one: its reporter, or a name near it."""
    traits = conclusion.cause.traits
    if Trait.ALL_OTHERS_REPORT_IT in traits:
        return Culprit(ranks=missing_of(conclusion.victims, people.world))
    if people.endpoint and Trait.AT_THE_MEETING in traits:
        return Culprit(things=(people.endpoint,))
    if conclusion.cause.family in _LINKS and Trait.BREAKS_WITH_ITS_PEER not in traits:
        for fact in facts:  # one end of the link is known
            if fact.kind is FactKind.PEER_LOST and fact.speaker.node:
                return describe(fact.speaker)
    lines = [line for tail in logs.tails for line in tail.lines] if len(logs.tails) <= FEW else []
    shown = {place.source for place in conclusion.evidence}
    pod = _pod(lines or [line for tail in logs.tails if tail.source.shown in shown for line in tail.lines])
    if all(fact.kind is FactKind.SCHEDULER_END or (pod and fact.said is Said.SCHEDULER) for fact in facts):
        return pod
    is_plain = all(fact.signal is None for fact in facts)
    if all(map(is_suffered, facts)) or (is_plain and len(list(logs.of("launcher-kills"))) > 1):
        return Culprit()  # of several, DeepSpeed's launcher names the last one
    beside = {people.speaker(event.line) for event in logs.of(conclusion.cause.name) if event.states is None}
    if len(beside) == 1 and (speaker := beside.pop()).rank is not None:
        return describe(speaker)
    ran_on = {event.values["ran_on"] for event in logs.of(conclusion.cause.name) if "ran_on" in event.values}
    told = {event.values["node"] for event in logs.events if "node" in event.values}
    nodes = people.nodes if len(people.nodes) <= 2 and told <= {*people.nodes} else ()
    parents = {event.line.pid for event in logs.of("launcher-kills", "agent-failed")}
    return Culprit(nodes=nodes or _only(ran_on)) | _overhear(conclusion, lines, parents)


# --- Names in passing -------------------------------------------------------------------------------------------------

_PROCESS = re.compile(
    r"\b(?:[Pp]id|PID|[Pp]rocess)(?: ?[=:] ?| )([1-9][0-9]{1,6})\b"
    r"(?! closing signal| got signal| via signal| terminated with)"
)
"""But not a process that somebody ends: that one still ran."""
_RANK = re.compile(r"\b(?:global_|global )?[Rr](?:ank|ANK)(?: ?[=:] ?| )([0-9]{1,6})\b(?![.:/][0-9])")
_LOCAL_RANK = re.compile(r"\blocal_rank(?: ?[=:] ?| )([0-9]{1,4})\b")
_PLACES = (
    re.compile(r"\b(?:ip|IP)(?: address)?(?: ?[=:] ?| )([0-9]{1,3}(?:\.[0-9]{1,3}){3})\b"),
    re.compile(r"\b(?:[Nn]ode (?:id|ID)|client ID)(?: ?[=:] ?| )([0-9a-f]{16,64})\b"),
)
_NODE = re.compile(r"\b(?:on (?:node|host)|hostname|host ?name ?[=:]|host ?[=:]) ?['\"]?([A-Za-z][\w-]*[0-9][\w.-]*)")
_PODS = (
    re.compile(r"\bpod/([a-z0-9][a-z0-9.-]*[a-z0-9])\b"),  # kubectl get events
    re.compile(r"^([a-z0-9][a-z0-9.-]*) +[0-9]+/[0-9]+ +(?:OOMKilled|Evicted|Error|CrashLoopBackOff|NodeLost)\b"),
    re.compile(r"^Name: {2,}([a-z0-9][a-z0-9.-]*)$"),  # kubectl describe
)
_GPUS = (
    re.compile(r"\b([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9])?)\b(?!-)"),  # oneCCL's dates have a dash
    re.compile(r"\b(GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b"),
    re.compile(r"\b(?:GPU|gpu|cuda:|device(?: ordinal)?(?=[ =:]))[ #=:_]{0,2}([0-9]{1,2})\b(?![.:][0-9])"),
)
_GOES_ON_LINES = 2
"""A terminal, or its writer, cut a sentence."""
_FOR_ALL = re.compile(r":log_dist\]|torch/multiprocessing/spawn\.py:[0-9]+\]|\bNamespace\(.*\blocal_rank=0\b")
"""DeepSpeed's function also for what rank 0 reports for the others; the parent of mp.spawn; the arguments of all."""


def _overhear(conclusion: Conclusion, lines: Sequence[Line], parents: Collection[int | None]) -> Culprit:
    """Return what the lines of a conclusion, or those below, name in passing; else the only writer but the launcher."""
    # The user's exceptions name devices for other reasons.
    is_gpu = conclusion.cause.family is Family.GPU
    first = conclusion.evidence[0]
    near = [line for line in lines if line.source.shown == first.source and line.number > first.line]
    below = [line.text for line in near if line.number <= first.line + _GOES_ON_LINES]
    said = _words([place.text for place in conclusion.evidence], is_gpu=is_gpu)
    writer = _find_writer(lines, parents, is_gpu=is_gpu)
    if Trait.ENDS_FROM_OUTSIDE in conclusion.cause.traits:  # no rank did that
        writer = replace(writer, ranks=())
    return said or _words(below, is_gpu=is_gpu) or writer


def _words(texts: Sequence[str], *, is_gpu: bool) -> Culprit:
    things = [f"process {pid}" for pid in _find(texts, _PROCESS)]
    things += [f"address {word}" for word in _find(texts, *_PLACES)]
    things += _gpus(texts) if is_gpu else ()
    return Culprit(nodes=tuple(_find(texts, _NODE)), things=tuple(dict.fromkeys(things)))


def _find(texts: Iterable[str], *patterns: re.Pattern[str]) -> list[str]:
    return [word for text in texts for pattern in patterns for word in pattern.findall(text)]


def _gpus(texts: Iterable[str]) -> list[str]:
    return [word if word.startswith("GPU-") else f"GPU {word}" for word in _find(texts, *_GPUS)]


def _only(things: Collection[Any]) -> tuple[Any, ...]:
    return tuple(things) if len(things) == 1 else ()


def _find_writer(lines: Sequence[Line], parents: Collection[int | None], *, is_gpu: bool) -> Culprit:
    """Return the only writer; empty if there are several, or if it writes for all ranks."""
    lines = [line for line in lines if not _FOR_ALL.search(line.text)]
    texts = [line.text for line in lines]
    ranks = {line.rank for line in lines if line.rank is not None}
    local_ranks = {line.local_rank for line in lines if line.local_rank is not None}
    if not ranks and not local_ranks:
        ranks = set(map(int, _find(texts, _RANK)))
        local_ranks = set(map(int, _find(texts, _LOCAL_RANK)))
    things = [] if ranks else [f"local rank {number}" for number in _only(local_ranks)]
    things += _only(set(_gpus(texts))) if is_gpu else ()
    if not things and len(ranks) != 1:
        pids = {*map(int, _find(texts, _PROCESS)), *(line.pid for line in lines if line.pid)} - {*parents}
        things = [f"process {pid}" for pid in _only(pids)]
    return Culprit(ranks=_only(ranks), things=tuple(things)) | _pod(lines)


def _pod(lines: Sequence[Line]) -> Culprit:
    """Return the only pod of which a listing says that it failed."""
    return Culprit(nodes=_only(set(_find([line.text for line in lines], *_PODS))))
