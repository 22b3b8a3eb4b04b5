"""Which rank or node is meant: by the lines of a cause, by lines near them, or by elimination. Pure.

From the most to the least certain: what the lines name; torchrun's summary of failures; who passed an error on
(mp.spawn, Ray); what was named just before; who stopped first; the rendezvous address; the only writer in the log.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_

from allranks.causes.cause import Blames, Cause, Role, Trait
from allranks.why.conclusion import Conclusion
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.overheard import overhear
from allranks.why.people import FEW, Culprit, People, blame, missing_of, named
from allranks.why.readings.ends import find_first, read_ends
from allranks.why.readings.progress import find_laggard
from allranks.why.readings.tracebacks import read_tracebacks

MAX_LINES = 400
"""Number of lines of one cause that are searched for names."""

SCOPE_LINES = 4
"""Number of lines of one announcement: Ray writes a dead actor's process and address on separate lines."""

_SCRIPT = re.compile(r"\b(?P<script>[\w-][\w.-]{0,120}\.py)(?:: error: | FAILED\s*$)")
"""In the formats of argparse and of torchrun's summary."""

MAX_THINGS = 6
"""Maximum number of named addresses, ports, processes."""


def find_nodes(logs: Logs) -> dict[int, str]:
    """Return the nodes of ranks, from lines that know both."""
    nodes = {
        event.line.rank: event.line.node for event in logs.events if event.line.rank is not None and event.line.node
    }
    nodes |= {end.rank: end.node for end in read_ends(logs) if end.rank is not None and end.node}
    return nodes


def add_nodes(conclusion: Conclusion, nodes: Mapping[int, str]) -> Conclusion:
    """Return the conclusion with the nodes of the ranks that it blames, if it names none."""
    culprit = conclusion.culprit
    if culprit.nodes or not culprit.ranks or len(culprit.ranks) > MAX_THINGS:
        return conclusion
    named = Culprit(nodes=tuple(dict.fromkeys(nodes[rank] for rank in culprit.ranks if rank in nodes)))
    return replace(conclusion, culprit=named | culprit)


def name_somebody(conclusion: Conclusion, logs: Logs, people: People) -> Conclusion:
    """Return the conclusion with a culprit, if its own lines name none or only a part."""
    if Trait.ERROR_OF_SCRIPT in conclusion.cause.traits and not conclusion.culprit.ranks:
        first = find_first(logs)
        if first is not None and first.code is not None and first.code > 0 and first.culprit():
            return replace(conclusion, culprit=first.culprit() | conclusion.culprit)
        if announced := _announced(conclusion, people):
            return replace(conclusion, culprit=announced | conclusion.culprit)
    if Trait.EXPLAINS_A_KILL in conclusion.cause.traits and not conclusion.culprit:
        first = find_first(logs)
        if first is not None and first.is_killed and first.culprit():
            return replace(conclusion, culprit=first.culprit())
    if not conclusion.culprit.things and (before := _named_before(conclusion, logs)):
        conclusion = replace(conclusion, culprit=conclusion.culprit | before)
    return conclusion if conclusion.culprit else replace(conclusion, culprit=someone(conclusion, logs, people))


def add_script(conclusion: Conclusion, logs: Logs) -> Conclusion:
    """Return the conclusion with the script's name, if the user's code failed and no frame names its file.

    For a call with wrong arguments and no named culprit, add the call's place in the user's files. The message of a
    cut traceback is taken from a debugger's line above the frames, or from CUDA's.
    """
    traits = conclusion.cause.traits
    if Trait.OF_ONE_CALL in traits and not conclusion.culprit:
        own = [
            traceback
            for traceback in read_tracebacks(logs)
            if traceback.line in conclusion.evidence or not traceback.kind
        ]
        frames = [traceback.user_frame for traceback in own]
        places = [f"{frame.values['file'].rpartition('/')[2]}:{frame.values['line']}" for frame in frames if frame]
        return replace(conclusion, culprit=Culprit(things=tuple(places[:1])))
    if Trait.ERROR_OF_SCRIPT not in traits or any(".py" in thing for thing in conclusion.culprit.things):
        return conclusion
    lines = [*conclusion.evidence, *(line for tail in logs.tails[:FEW] for line in tail.lines)]
    script = next((found["script"] for line in lines if (found := _SCRIPT.search(line.text))), None)
    if script is None:
        return conclusion
    return replace(conclusion, culprit=conclusion.culprit | Culprit(things=(script,)))


def add_awaited(found: Sequence[Conclusion]) -> list[Conclusion]:
    """Return the conclusions with the rank that others waited for, if one lacks its name and another has it."""
    awaited = [one.culprit for one in found if Trait.OTHERS_WAIT_FOR_IT in one.cause.traits and one.culprit]
    nameless = [one for one in found if Trait.ONLY_WAITS in one.cause.traits and not one.culprit]
    return [replace(one, culprit=awaited[0]) if awaited and one in nameless else one for one in found]


def _named_before(conclusion: Conclusion, logs: Logs) -> Culprit:
    """Return what the last context line before it names, such as a file, if its own lines blame nobody."""
    line = conclusion.first
    near = [
        event
        for event in logs.of(conclusion.cause.name)
        if event.sign is not None
        and (event.sign.role, event.sign.blames) == (Role.CONTEXT, Blames.NOBODY)
        and event.line.source == line.source
        and event.line.number <= line.number
    ]
    return named(near[-1]) if near else Culprit()


def someone(conclusion: Conclusion, logs: Logs, people: People) -> Culprit:
    """Return the possible culprit if no line of a cause names one: its reporter, or a name near it."""
    traits = conclusion.cause.traits
    if Trait.ALL_OTHERS_REPORT_IT in traits:
        return Culprit(ranks=missing_of(conclusion.victims, people.world))
    if Trait.ENDS_BY_ITSELF in traits and (laggard := find_laggard(logs, people)):
        return laggard.culprit
    if announced := _announced(conclusion, people):
        return announced
    first = find_first(logs)
    is_own = conclusion.role is Role.PRIMARY and Trait.AT_THE_MEETING not in traits
    if is_own and first is not None and first.code is not None and first.code > 0 and not first.is_killed:
        return first.culprit()
    if people.endpoint and Trait.AT_THE_MEETING in traits:
        return Culprit(things=(people.endpoint,))
    if conclusion.role is Role.VICTIM or _is_nobodys(conclusion.cause):
        return Culprit()
    ran_on = {event.values["ran_on"] for event in logs.of(conclusion.cause.name) if "ran_on" in event.values}
    nodes = people.nodes if len(people.nodes) <= 2 else ()
    if len(ran_on) == 1 and not nodes:
        nodes = tuple(ran_on)
    return Culprit(nodes=nodes) | overhear(conclusion, logs)


def _announced(conclusion: Conclusion, people: People) -> Culprit:
    """Return who wrote these lines, according to mp.spawn, Ray or torchrun's summary."""
    line = conclusion.first
    near = [
        (number, who) for source, number, who in people.scopes if source == line.source.shown and number <= line.number
    ]
    return reduce(or_, (who for number, who in near if near[-1][0] - number <= SCOPE_LINES), Culprit())


def find_culprit(
    same: Sequence[LogEvent], context: Sequence[LogEvent], people: People, ends: dict[int, Culprit]
) -> Culprit:
    """Return what these lines name; of many different names, the most frequent ones."""
    culprits = [blame(event, people) | _ended(event, ends) for event in same[:MAX_LINES]]
    culprits += [blame(event, people) for event in context[:8]]
    counts = Counter(thing for culprit in culprits for thing in culprit.things)
    most = max(counts.values(), default=0)
    usual = [thing for thing, count in counts.most_common(MAX_THINGS) if 3 * count >= most]
    culprit = reduce(or_, culprits, Culprit())
    return replace(culprit, things=tuple(thing for thing in culprit.things if thing in usual))


def _ended(event: LogEvent, ends: dict[int, Culprit]) -> Culprit:
    pid = event.number("pid")
    return Culprit() if pid is None else ends.get(pid, Culprit())


def _is_nobodys(cause: Cause) -> bool:
    """Whether none of its signs names anybody."""
    return all(sign.blames is Blames.NOBODY for sign in cause.signs)
