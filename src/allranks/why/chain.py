"""What followed from what: in words for people, as a graph for programs. Pure.

rank 72 was killed (SIGKILL) 11:03:14 -> rank 35 lost a peer 11:03:17 -> ranks 0-71 aborted (SIGABRT)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice
from signal import Signals

import msgspec

from allranks.facts.fact import CALENDAR, NOBODY, Fact, FactKind, Said, Who
from allranks.facts.story import Story
from allranks.report.mask import mask_secrets
from allranks.report.text import fold_ranks
from allranks.why.conclusion import describe

MAX_FACTS = 256
"""Number of facts in a graph: of thousands of ranks, the first ones."""
MAX_TEXT = 300
_FEW = 4
_RAISED = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Z]\w*[a-z]\w*)(?=: |$)")
"""The class of an exception, where its line begins with it."""
_KINDS = {
    FactKind.RAISED: "failed",
    FactKind.WAITED: "waited in vain",
    FactKind.ENQUEUED: "came less far",
    FactKind.PEER_LOST: "lost a peer",
    FactKind.STORE_GONE: "lost the store",
    FactKind.DEVICE_FAULT: "had a device fault",
    FactKind.LINK_FAULT: "had a network fault",
    FactKind.NODE_LOST: "was lost",
    FactKind.SCHEDULER_END: "was told to end",
    FactKind.LAUNCHER_KILL: "was ended by the launcher",
    FactKind.MISSING: "did not come",
    FactKind.SETTING: "had an unsuitable setting",
}
_SIGNALS = {9: "was killed", 15: "was ended", 6: "aborted"}


def tell_chain(story: Story) -> str:
    """Return what followed from the first cause, link by link; empty if nothing did."""
    links = story.chain
    words = [*map(_tell_link, links)]
    absent = [who.rank for root in story.roots[:1] for who in root.blamed if who.rank is not None]
    if absent and links[0][0].kind is FactKind.WAITED:
        words.insert(0, f"{fold_ranks(absent)} did not come")
    return " -> ".join(words) if len(words) > 1 else ""


def _tell_link(facts: Sequence[Fact]) -> str:
    first = min(facts, key=lambda fact: (fact.when.earliest_s is None, fact.when.earliest_s or 0.0))
    subject = _subject(facts)
    words = f"{subject} {_verb(first)}"
    if subject.startswith("ranks ") or "," in subject or subject[:1].isdigit():
        words = words.replace(" was ", " were ", 1)
    if first.when.clock == CALENDAR and first.when.earliest_s is not None:
        words += datetime.fromtimestamp(first.when.earliest_s, UTC).strftime(" %H:%M:%S")
    return words


def _subject(facts: Sequence[Fact]) -> str:
    ranks = {fact.who.rank for fact in facts if fact.who.rank is not None}
    if ranks:
        folded = fold_ranks(ranks)
        return folded if folded.count(",") < _FEW else f"{len(ranks)} ranks"
    if facts[0].kind is FactKind.SCHEDULER_END:
        return "the job"
    names = dict.fromkeys(describe(fact.who).words() for fact in facts if fact.who)
    shown = [name for name in names if name]
    if not shown:
        is_launchers = all(fact.said is Said.LAUNCHER for fact in facts)  # several lines tell of one failure
        num = max(Counter(fact.place.text for fact in facts).values()) if is_launchers else len(facts)
        return "a process" if num == 1 else f"{num} processes"
    return ", ".join(shown) if len(shown) <= _FEW else f"{len(shown)} processes"


def _verb(fact: Fact) -> str:
    if fact.kind is FactKind.RAISED and (raised := _RAISED.match(fact.place.text)):
        return f"raised {raised[1]}"
    if fact.kind is not FactKind.ENDED:
        return _KINDS.get(fact.kind, fact.kind.value)
    if (signal := fact.signal) is not None:
        name = Signals(signal).name if signal in Signals._value2member_map_ else f"signal {signal}"
        return f"{_SIGNALS.get(signal, 'crashed')} ({name})"
    return "ended" if fact.code is None else f"ended with exit code {fact.code}"


class ChainFact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that is known: who did or suffered what, when, and who says so."""

    kind: str
    """What it states: `ended`, `raised`, `peer_lost`, ... (the book of causes names it for each line)."""
    said: str
    """Who decided it: `self`, `kernel`, `scheduler`, `launcher`, `observer`, `inferred`."""
    who: Who
    peer: Who = NOBODY
    cause: str = ""
    """Name of the cause that its line shows."""
    earliest_s: float | None = None
    latest_s: float | None = None
    clock: str = ""
    """Only times of one clock can be compared; `time` is seconds since the epoch."""
    group: str | None = None
    seq: int | None = None
    signal: int | None = None
    code: int | None = None
    source: str = ""
    """`path:line` of the first line that states it."""
    seen: str = ""


class ChainEdge(msgspec.Struct, frozen=True, kw_only=True):
    """One fact explains another; both are indexes of `facts`."""

    cause: int
    effect: int
    is_named: bool
    """The effect names its cause: the peer, the group, the process. Otherwise it is only possible."""


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """What followed from what."""

    words: str
    """For people, from the first cause to its last effect."""
    outcome: str
    """`failed`, `hangs`, `finished` or `nothing known`."""
    attempt: int
    roots: tuple[int, ...]
    """Indexes of the facts that nothing explains, the culprit's first."""
    facts: tuple[ChainFact, ...]
    edges: tuple[ChainEdge, ...]
    left_out: int = 0
    """Number of facts that were left out."""


def make_chain(story: Story) -> Chain:
    """Return a story as data."""
    roots = [fact for root in story.roots for fact in root.facts]
    effects = (fact for edge in story.edges for fact in (edge.cause, edge.effect))
    everything = {id(fact): fact for fact in (*roots, *effects)}  # each is one object: to compare them takes long
    index = {key: number for number, key in enumerate(islice(everything, MAX_FACTS))}
    return Chain(
        words=mask_secrets(tell_chain(story)),
        outcome=str(story.outcome),
        attempt=story.attempt,
        roots=tuple(index[id(fact)] for fact in roots if id(fact) in index),
        facts=tuple(_as_data(everything[key]) for key in index),
        edges=tuple(
            ChainEdge(cause=index[id(edge.cause)], effect=index[id(edge.effect)], is_named=edge.is_named)
            for edge in story.edges
            if id(edge.cause) in index and id(edge.effect) in index
        ),
        left_out=len(everything) - len(index),
    )


def _as_data(fact: Fact) -> ChainFact:
    when, place = fact.when, fact.place
    alike = {name: getattr(fact, name) for name in ("who", "peer", "cause", "group", "seq", "signal", "code")}
    return ChainFact(
        kind=fact.kind.value,
        said=Said(fact.said).name.lower(),
        earliest_s=when.earliest_s,
        latest_s=when.latest_s,
        clock=when.clock,
        source=f"{place.source}:{place.line}" if place.source else "",
        seen=mask_secrets(place.text)[:MAX_TEXT],
        **alike,
    )
