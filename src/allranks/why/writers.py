"""Whose exceptions are in the output of a launcher, which names its writers by local rank, or not at all? Pure.

Of three ranks that miss a module, torchrun sees one exit, and ends the others. All three have written the traceback.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from signal import SIGTERM

from msgspec.structs import replace

from allranks.facts.fact import NEVER_SAID, Fact, FactKind, Same, Who

_OF_ERRORS = frozenset((1, 2))
"""Exit codes of Python: 1 after an exception that nobody caught, 2 of argparse."""


def give_writers(facts: Sequence[Fact], ends: Sequence[Fact]) -> Iterator[Fact]:
    """Return the facts; exceptions of writers without a rank have one, if it is known, else equal ones are one.

    Args:
        facts: all but the ends.
        ends: of processes, each one once.
    """
    ended: defaultdict[tuple[int, str], dict[int, Fact]] = defaultdict(dict)
    for end in sorted(ends, key=lambda end: not end.is_first_observed):
        if end.who.rank is not None:
            for place in end.places:
                ended[end.attempt, place.source][end.who.rank] = end
    alike: defaultdict[tuple[str, Fact], list[Fact]] = defaultdict(list)
    for fact in facts:
        if fact.kind is FactKind.RAISED and fact.places and fact.who.rank is None:
            alike[fact.place.source, replace(fact, places=(), when=NEVER_SAID)].append(fact)
        else:
            yield fact
    for (source, first), same in alike.items():
        whos = _find_writers(first.who, len(same), [*ended[first.attempt, source].values()])
        yield from (
            (replace(fact, who=who, speaker=who) for fact, who in zip(same, whos, strict=True)) if whos else same[:1]
        )


def _find_writers(who: Who, num: int, ended: Sequence[Fact]) -> Sequence[Who]:
    """Return which processes wrote the same exception so many times, each once; none if that is not known.

    The launcher may name its writers by local rank, or not at all. Then they are those that ended by an error, if
    these are as many, or with them those that it ended meanwhile. A single one may have been caught by anybody.
    """
    near = [end for end in ended if end.who.compare_machines(who) is not Same.NO]
    of_local_rank = [end.who for end in near if end.who.local_rank == who.local_rank is not None]
    failed = [end.who for end in near if end.code in _OF_ERRORS]
    both = [*failed, *(end.who for end in near if end.code is None and end.signal == SIGTERM)]
    groups = [of_local_rank] if who.is_process else [failed, both] if num > 1 else []
    return next((whos for whos in groups if len(whos) == num), ())
