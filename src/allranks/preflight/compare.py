"""Which node has another value than the others, where all must be alike?

The most common value is right where more than half of the nodes that could be read have it; the nodes with another one
are the culprits. Without such a majority (one against one, all different) nobody can say who is right: all are named,
undecided.

What a cause's `alike` leaves out on one node and returns on another is "not set" there: one card does not know what
the others have. None is "could not be read", which differs from nothing and is noted in the evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile

from allranks.causes.outcome import Checks, Outcome
from allranks.model.card import Card
from allranks.model.finding import Confidence, Severity, Status
from allranks.model.hostlist import fold_hosts
from allranks.model.majority import NOT_SET, group_by_value, majority

MAX_VALUE = 60
"""Characters of a value that are shown."""
MAX_VALUES = 4
"""Odd values that are shown; nodes whose value differs from node to node would fill pages."""

Values = Mapping[str, Mapping[str, str | None]]
"""By host: what must be alike -> what it is there."""


def compare(checks: Checks, cards: Sequence[Card]) -> list[tuple[tuple[str, ...], Outcome]]:
    """Return the culprits (hosts of the cards) and the outcome for each thing in which the nodes differ.

    The outcome is FAIL or WARN as the cause's `severity_of` says; its values are `what` differs, what the `usual` nodes
    have ("5 of 6 nodes have 2.27.5") and what the `odd` ones have ("node04 has 2.21.5").
    """
    return compare_values(values_of(checks, cards), checks.severity_of)


def values_of(checks: Checks, cards: Sequence[Card]) -> Values:
    """Return by host what must be alike, of the nodes where the cause has something to compare."""
    collect = checks.alike
    alike = {card.host: collect(card) for card in cards if card.facts is not None} if collect else {}
    return {host: values for host, values in alike.items() if values is not None}


def compare_values(by_host: Values, severity_of: Callable[[str], Severity]) -> list[tuple[tuple[str, ...], Outcome]]:
    """Return what `compare` does, of values that were read from the cards before."""
    # Most nodes have all values in common: what differs is looked for in one node of each kind.
    kinds = {tuple(values.items()): values for values in by_host.values()}.values()
    found = []
    for key in dict.fromkeys(key for kind in kinds for key in kind):
        if len({kind.get(key, NOT_SET) for kind in kinds}) < 2:
            continue
        values = {host: values.get(key, NOT_SET) for host, values in by_host.items()}
        difference = _compare_one(key, values, severity_of(key))
        if difference is not None:
            found.append(difference)
    return found


def _compare_one(
    key: str, values: Mapping[str, str | None], severity: Severity
) -> tuple[tuple[str, ...], Outcome] | None:
    readable = {host: value for host, value in values.items() if value is not None}
    groups = group_by_value(readable)
    if len(groups) < 2:
        return None
    shown = _show([value for value, _ in groups])
    (_, first), *odd = groups
    has_majority = majority(readable) is not None
    usual = f"{len(first)} of {len(readable)} nodes {_have(shown[0], len(first))}"
    odd_texts = [f"{fold_hosts(nodes)} {_have(s, len(nodes))}" for (_, nodes), s in zip(odd, shown[1:], strict=True)]
    evidence = _cut([f"{fold_hosts(nodes)}: {s}" for (_, nodes), s in zip(groups, shown, strict=True)], MAX_VALUES + 1)
    unread = [host for host, value in values.items() if value is None]
    if unread:
        evidence.append(f"{fold_hosts(unread)}: could not be read")
    texts = {
        "what": key,
        "usual": usual if has_majority else f"{fold_hosts(first)} {_have(shown[0], len(first))}",
        "odd": ", ".join(_cut(odd_texts, MAX_VALUES)),
    }
    culprits = {host for _, nodes in (odd if has_majority else groups) for host in nodes}
    outcome = Outcome(
        Status.WARN if severity is Severity.WARN else Status.FAIL,
        note=f"{key}: {texts['odd'] if has_majority else texts['usual'] + ', ' + texts['odd']}",
        values=texts,
        evidence=tuple(evidence),
        confidence=Confidence.CERTAIN if has_majority else Confidence.UNDECIDED,
    )
    return tuple(host for host in values if host in culprits), outcome


def _have(value: str, num_nodes: int) -> str:
    if value == NOT_SET:
        return "does not set it" if num_nodes == 1 else "do not set it"
    return f"has {value}" if num_nodes == 1 else f"have {value}"


def _show(values: Sequence[str]) -> list[str]:
    """The values as one line each, cut so that it still shows where long ones differ."""
    plain = [value if value.isprintable() else value.encode("unicode_escape").decode("ascii") for value in values]
    start = 0
    if any(len(value) > MAX_VALUE for value in plain):
        real = [value for value in plain if value != NOT_SET]
        same = len([*takewhile(lambda characters: len({*characters}) == 1, zip(*real, strict=False))])
        start = same - 12 if same > MAX_VALUE // 2 and len(real) > 1 else 0
    return [_shorten(value, 0 if value == NOT_SET else start) for value in plain]


def _shorten(value: str, start: int) -> str:
    if not value:
        return "nothing in it"
    text = "..." + value[start:] if start else value
    return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 3] + "..."


def _cut(texts: Iterable[str], most: int) -> list[str]:
    texts = list(texts)
    return texts if len(texts) <= most else [*texts[:most], f"and {len(texts) - most} more values"]
