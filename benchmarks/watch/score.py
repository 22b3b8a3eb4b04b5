"""Was the right one named, in time, and nobody else? Pure: from documents of `allranks watch --json` to a score.

>>> late = {"verdicts": [{"ranks": [2], "confidence": "certain", "message": "m"}]}
>>> judge([(9.0, {}), (11.5, late)], Truth(ranks=frozenset({2}), is_verdict=True, within_s=3.0), 10.0)
Score(named_s=1.5, said='m', certainty='certain', wrong=())
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .watcher import Heard


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Who is to be named, as what, until when."""

    ranks: frozenset[int]
    is_any: bool = False
    """One of these ranks, whichever; else exactly these."""
    is_victim: bool = False
    """Another rank is at fault: to be certain is wrong."""
    role: str = ""
    """`launcher`, `store`: a process that is no rank; named by its pid or by this word."""
    pid: int = 0
    is_verdict: bool
    """Else a state, and a verdict is wrong."""
    place: str = ""
    """A state must say it: `data.py:31`."""
    reason: str = ""
    """Pattern of words that tell this fault from others: the right rank for a wrong reason is wrong."""
    within_s: float

    def __str__(self) -> str:
        if self.is_any:
            return "one rank, the first that died"
        who = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, sorted(self.ranks)))}" if self.ranks else ""
        return f"{who or f'the {self.role}, pid {self.pid}'}{f', {self.place}' if self.place else ''}"


@dataclass(frozen=True)
class Said:
    """One thing that a document says of somebody."""

    is_verdict: bool
    ranks: frozenset[int]
    text: str
    certainty: str
    reasons: str = ""
    """All words that tell why: of a finding also its cause and its evidence."""


@dataclass(frozen=True)
class Score:
    """The judgement of one drill."""

    named_s: float | None
    """From the strike to the right name; None: it was never said."""
    said: str
    certainty: str
    wrong: tuple[str, ...]


def read_document(document: dict[str, Any]) -> Iterator[Said]:
    """Return what one document says: verdicts are findings, states have text, ranks and place."""
    for finding in document.get("verdicts", ()):
        text = " ".join(filter(None, [finding["message"], finding.get("subject")]))
        reasons = " ".join([finding.get("cause", ""), text, *(seen["seen"] for seen in finding.get("evidence", ()))])
        yield Said(True, frozenset(finding.get("ranks", ())), text, finding["confidence"], reasons)
    for state in document.get("states", ()):
        text = " ".join(filter(None, [state["text"], state.get("place")]))
        certainty = "suspected" if state.get("is_suspicion") else "state"
        yield Said(False, frozenset(state.get("ranks", ())), text, certainty, text)


def judge(heard: Sequence[Heard], truth: Truth, struck_s: float) -> Score:
    """Judge all documents around one fault.

    Args:
        heard: documents and when they came.
        truth: who is to be named.
        struck_s: when the fault began, by the same clock.
    """
    named_s, said, certainty = None, "", ""
    wrong: list[str] = []
    for at_s, document in heard:
        for one in read_document(document):
            if at_s < struck_s:
                continue
            if is_right(one, truth):
                if named_s is None:
                    named_s, said, certainty = round(at_s - struck_s, 2), one.text, one.certainty
            elif one.is_verdict and not _may_follow(one, truth, is_named=named_s is not None):
                wrong.append(f"verdict on somebody else: {one.text}")
    if named_s is None:
        wrong.append("nobody was named")
    elif truth.is_victim and certainty == "certain":
        wrong.append("certain, and it is a victim")
    elif named_s > truth.within_s:
        wrong.append(f"it took {named_s} s, at most {truth.within_s:.0f} s are allowed")
    return Score(named_s, said, certainty, tuple(dict.fromkeys(wrong)))


def is_right(said: Said, truth: Truth) -> bool:
    """Whether this names the culprit as it must be named."""
    if said.is_verdict != truth.is_verdict or not re.search(truth.reason, said.reasons, re.IGNORECASE):
        return False
    if truth.is_any:
        return len(said.ranks) == 1 and said.ranks <= truth.ranks
    if truth.role and not truth.ranks:
        return not said.ranks and (str(truth.pid) in said.text or truth.role in said.text)
    return said.ranks == truth.ranks and (not truth.place or truth.place in said.text)


def _may_follow(said: Said, truth: Truth, *, is_named: bool) -> bool:
    """A rank that serves the store is rightly named as stopped, before or after."""
    return bool(truth.role and said.ranks and said.ranks <= truth.ranks) or (truth.is_any and is_named)


def list_verdicts(heard: Iterable[Heard]) -> list[Said]:
    """Return the verdicts of a healthy job, which must have none."""
    return [said for _, document in heard for said in read_document(document) if said.is_verdict]


def list_states(heard: Iterable[Heard]) -> list[str]:
    """Return the different states that were told, numbers left out."""
    texts = (
        re.sub(r"\d+(\.\d+)?", "N", said.text)
        for _, document in heard
        for said in read_document(document)
        if not said.is_verdict
    )
    return list(dict.fromkeys(texts))
