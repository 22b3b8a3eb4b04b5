"""Is an answer right? The same rules for every tool; README.md states them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNDECIDED = "undecided"
CERTAIN = "certain"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a tool says of a job."""

    cause: str | None
    confidence: str
    """certain, likely, undecided."""
    ranks: frozenset[int] = frozenset()
    nodes: frozenset[str] = frozenset()
    addresses: frozenset[str] = frozenset()
    pids: frozenset[int] = frozenset()

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Answer:
        """Read an answer; fields that lack are empty."""
        cause = record.get("cause")
        return cls(
            cause=cause,
            confidence=record.get("confidence", UNDECIDED) if cause else UNDECIDED,
            ranks=frozenset(record.get("ranks", ())),
            nodes=frozenset(record.get("nodes", ())),
            addresses=frozenset(record.get("addresses", ())),
            pids=frozenset(record.get("pids", ())),
        )

    def words(self) -> str:
        """Return it in a line."""
        named = [f"ranks {sorted(self.ranks)}"] if self.ranks else []
        named += [f"nodes {', '.join(sorted(self.nodes))}"] if self.nodes else []
        named += [f"addresses {', '.join(sorted(self.addresses))}"] if self.addresses else []
        named += [f"pids {sorted(self.pids)}"] if self.pids else []
        return f"{self.cause or 'no answer'}, {self.confidence}: {'; '.join(named) or 'nobody named'}"


@dataclass(frozen=True, slots=True)
class Judged:
    """One answer, judged."""

    job: str
    fault: str
    is_cause_right: bool
    is_culprit_right: bool
    is_false_certain: bool
    is_undecidable: bool
    """Whether the files do not tell the cause."""
    is_said_undecided: bool

    @property
    def is_right(self) -> bool:
        return self.is_cause_right and self.is_culprit_right and not self.is_false_certain


def judge(truth: Mapping[str, Any], answer: Answer) -> Judged:
    """Judge an answer; of two independent faults either may be the first."""
    faults = truth["faults"]
    found = [_judge_one(truth, fault, answer) for fault in faults]
    return max(
        found, key=lambda one: (not one.is_false_certain, one.is_cause_right + one.is_culprit_right, one.is_cause_right)
    )


def _judge_one(truth: Mapping[str, Any], fault: Mapping[str, Any], answer: Answer) -> Judged:
    culprit = fault["culprit"]
    allowed = [other["culprit"] for other in truth["faults"]]
    is_undecided = answer.confidence == UNDECIDED
    is_named = bool(answer.ranks or answer.nodes or answer.addresses or answer.pids)
    hits = {key: getattr(answer, key) & set(culprit[key]) for key in ("ranks", "nodes", "addresses", "pids")}
    strays = {
        key: getattr(answer, key) - {name for one in allowed for name in one[key]}
        for key in ("ranks", "nodes", "addresses", "pids")
    }
    is_wrong = any(strays.values())
    match culprit["level"]:
        case "all":
            is_wrong, is_right = False, True
        case "nobody":
            is_wrong, is_right = is_named, not is_named
        case "rank":
            is_right = bool(hits["ranks"] or (hits["pids"] and not answer.ranks)) and not is_wrong
        case "node":
            is_right = any(hits.values()) and not is_wrong
        case _:
            is_right = is_undecided or not is_wrong
    is_cause = answer.cause in fault["causes"]
    is_decidable = fault["is_cause_decidable"]
    if not is_decidable and is_undecided:  # candidates may be named, and need not be
        is_right = culprit["level"] == "undecidable" or not is_wrong or any(hits.values())
    if is_decidable:
        is_cause_right = is_cause or (answer.cause is None and "healthy" in fault["causes"])
    else:  # a right guess counts where it does not claim to be certain
        is_cause_right = is_undecided or (answer.confidence != CERTAIN and is_cause and any(hits.values()))
    is_false = answer.confidence == CERTAIN and (
        not is_cause or is_wrong or not is_decidable or not fault["may_be_certain"]
    )
    return Judged(truth["job"], fault["fault"], is_cause_right, is_right, is_false, not is_decidable, is_undecided)


@dataclass(frozen=True, slots=True)
class Score:
    """Counts over jobs."""

    jobs: int
    causes: int
    culprits: int
    false_certain: int
    undecidable: int
    said_undecided: int
    """Of the undecidable ones."""

    @classmethod
    def of(cls, judged: Sequence[Judged]) -> Score:
        """Count."""
        open_ones = [one for one in judged if one.is_undecidable]
        return cls(
            len(judged),
            sum(one.is_cause_right for one in judged),
            sum(one.is_culprit_right for one in judged),
            sum(one.is_false_certain for one in judged),
            len(open_ones),
            sum(one.is_said_undecided for one in open_ones),
        )

    def cells(self) -> tuple[str, str, str, str]:
        """Cause, culprit, false certain, undecidable, as the table shows them."""
        open_ones = f"{self.said_undecided}/{self.undecidable}" if self.undecidable else ""
        return _share(self.causes, self.jobs), _share(self.culprits, self.jobs), str(self.false_certain), open_ones


def _share(count: int, jobs: int) -> str:
    return f"{100 * count / jobs:.1f} %" if jobs else "-"


def table(columns: Mapping[str, Sequence[Judged]]) -> str:
    """Return the table in Markdown: a row a fault, four columns a tool."""
    tools = list(columns)
    heads = ("cause", "culprit", "false certain", "undecidable answered so")
    head = ["fault", "jobs", *(f"{tool}: {name}" if len(tools) > 1 else name for tool in tools for name in heads)]
    rows = []
    faults = sorted({one.fault for judged in columns.values() for one in judged})
    for fault in (*faults, "all"):
        parts = [[one for one in columns[tool] if fault in {"all", one.fault}] for tool in tools]
        rows.append([fault, str(len(parts[0])), *(cell for part in parts for cell in Score.of(part).cells())])
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def wrong_ones(judged: Iterable[Judged]) -> list[Judged]:
    """Return those that are not right, false certainty first."""
    return sorted(
        (one for one in judged if not one.is_right), key=lambda one: (not one.is_false_certain, one.fault, one.job)
    )
