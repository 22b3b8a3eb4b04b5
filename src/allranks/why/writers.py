"""Whose exceptions are in the output of a launcher, which names its writers by local rank, or not at all? Pure.

Of three ranks that miss a module, torchrun sees one exit, and ends the others. All three have written the traceback.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from signal import SIGTERM

from msgspec.structs import replace

from allranks.facts.fact import NEVER_SAID, Fact, FactKind, Said, Same, Who
from allranks.model.finding import Confidence
from allranks.why.logs.log_events import Logs

_OF_ERRORS = frozenset((1, 2, 126, 127))
"""Exit codes of Python: 1 after an exception that nobody caught, 2 of argparse; of a shell that starts no program."""
_LOSSES = frozenset((FactKind.PEER_LOST, FactKind.STORE_GONE, FactKind.WAITED))
_OUTERMOST = frozenset(("<module>", "_bootstrap", "_wrap"))
"""The function in which a traceback begins that nobody caught: of a script, multiprocessing, mp.spawn."""


def find_uncaught(logs: Logs) -> set[tuple[object, str]]:
    """Return the writers and texts of exceptions that may have ended a process.

    Python shows a caught one from the function on that caught it, without the script's own frame. Hydra ends the
    process, and leaves frames out. Of mixed lines, one of equal tracebacks has that frame; of a chain, the last one.
    Frames may be missing. What a DataLoader's worker raised is raised again above, with the script's own frame.
    """
    uncaught: set[tuple[object, str]] = set()
    bare: set[tuple[object, str]] = set()
    caught: set[tuple[object, str]] = set()
    functions: dict[object, set[str]] = {}
    chains: dict[object, list[str]] = {}
    linked: set[object] = set()
    above: dict[object, set[str]] = {}
    for event in logs.of("traceback", "shortened", "frame", "exception", "chained"):
        writer = event.line.writer
        if event.kind == "traceback":  # without it, the first frames are not known
            is_again = event.line.text.lstrip().startswith("Original ")
            functions.setdefault(writer, set(above.get(writer, ())) if is_again else set())
        elif event.kind == "shortened":
            functions[writer] = {"<module>"}
        elif event.kind == "frame":
            functions.get(writer, set()).add(event.values.get("function") or "<module>")
        elif event.kind == "chained":
            linked.add(writer)
        else:
            chains[writer] = [*(chains.get(writer, []) if writer in linked else []), event.line.text]
            linked.discard(writer)
            shown = functions.pop(writer, None)
            above[writer] = shown or set()
            found = bare if not shown else uncaught if shown & _OUTERMOST else caught
            found.update((writer, text) for text in chains[writer])
    return uncaught | (bare - caught)


def give_writers(facts: Sequence[Fact], ends: Sequence[Fact]) -> Iterator[Fact]:
    """Return the facts; exceptions of writers without a rank have one, if it is known, else equal ones are one.

    A process writes one at most that nobody caught, as its last word: who wrote an error below lived on. `facts` are
    all but the ends of processes; of these, each stands once in `ends`.
    """
    ended: defaultdict[tuple[int, str], dict[int, Fact]] = defaultdict(dict)
    for end in sorted(ends, key=lambda end: (not end.is_first_observed, end.code is None)):
        if end.who.rank is not None:
            for place in end.places:
                ended[end.attempt, place.source].setdefault(end.who.rank, end)
    alike: defaultdict[tuple[str, str, Fact], list[Fact]] = defaultdict(list)
    others: defaultdict[tuple[int, str], list[Fact]] = defaultdict(list)
    for fact in facts:
        if fact.kind is FactKind.RAISED and fact.places and fact.who.rank is None:
            words = fact.place.text if fact.said is Said.LAUNCHER else ""  # of one failure in several lines
            alike[fact.place.source, words, replace(fact, places=(), when=NEVER_SAID)].append(fact)
        else:
            others[fact.attempt, fact.place.source].append(fact)
            yield fact
    told: defaultdict[str, set[int]] = defaultdict(set)  # cleanups of launchers are no news
    for fact in chain(facts, *(own.values() for own in ended.values())):
        for place in fact.places if fact.signal != SIGTERM else ():
            told[place.source].add(place.line)
    lines_of = {source: sorted(lines) for source, lines in told.items()}
    for (source, _, first), same in alike.items():
        below = [fact for fact in others[first.attempt, source] if fact.place.line > same[-1].place.line]
        living = {fact.who.rank for fact in below if fact.kind is FactKind.RAISED or fact.kind in _LOSSES}
        near = [end for end in ended[first.attempt, source].values() if end.who.rank not in living]
        has_lost = any(fact.kind in _LOSSES and fact.who.rank is None for fact in below)
        may_be_all = first.is_fatal or not first.is_generic  # who caught it may have gone on, until it was ended
        whos = _find_writers(first.who, len(same), near, may_be_all) if len(same) + has_lost <= len(near) else ()
        if not whos and len(same) == 1 and not first.who.is_process and not first.is_caught:
            whos = _find_next_end(same[0], lines_of.get(source, []), near)
        steps = [fact.when for fact in below if fact.kind is FactKind.STEP]
        if any(when.earliest_s == when.latest_s is not None for when in steps):
            whos = ()  # loggers write at once: it went on
        # It may have gone on, or what it had buffered stands below.
        most = Confidence.LIKELY if steps or not may_be_all else Confidence.CERTAIN
        confidence = first.confidence.at_most(most)
        yield from (
            (replace(fact, who=who, speaker=who, confidence=confidence) for fact, who in zip(same, whos, strict=True))
            if whos
            else (same if first.said is Said.LAUNCHER else same[:1])
        )


def _find_writers(who: Who, num: int, ended: Sequence[Fact], may_be_all: bool) -> Sequence[Who]:
    """Return which processes wrote the same exception so many times, each once; none if that is not known.

    The launcher may name its writers by local rank, or not at all. Then they are those that ended by an error, if
    these are as many, or (`may_be_all`) with them those that it ended meanwhile. A single one may have been caught by
    anybody (`_find_next_end`).
    """
    of_local_rank = [end.who for end in ended if end.who.local_rank == who.local_rank is not None]
    failed = [end.who for end in ended if end.code in _OF_ERRORS]
    both = [*failed, *(end.who for end in ended if end.code is None and end.signal == SIGTERM)]
    groups = [of_local_rank] if who.is_process else [failed, both][: 1 + may_be_all] if num > 1 else []
    return next((whos for whos in groups if len(whos) == num), ())


def _find_next_end(raised: Fact, told: Sequence[int], ended: Sequence[Fact]) -> Sequence[Who]:
    """Return the one process of this machine that ended by an error, if the next that this file tells is its end.

    Who was killed before it may be why it ended. A launcher ends the others before it tells of the first one.

    Args:
        told: lines of the file that state something, but for what a launcher's cleanup ended, in their order.
    """
    failed = [end for end in ended if end.code in _OF_ERRORS and end.who.compare_machines(raised.who) is not Same.NO]
    if len(failed) != 1:
        return ()
    line = next(place.line for place in failed[0].places if place.source == raised.place.source)
    below = bisect_right(told, raised.place.line)
    return (failed[0].who,) if told[below : below + 1] == [line] else ()
