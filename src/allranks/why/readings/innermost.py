"""Where is each process, in a list made while a job hangs: nodes, and below each the innermost frames? Pure.

    node03
        all_reduce
        wait

Such a list contains nothing else: in any other log, the same words are no frames.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.causes.book import find_cause
from allranks.causes.cause import Role
from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.people import Culprit, People

_COLLECTIVE = re.compile(
    r"^_?(?:all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier|all_?to_?all|reduce|gather|scatter|i?send|i?recv)"
    r"(?:_\w+)?$"
)
_FRAME = re.compile(r"^[a-z_]\w*$")
_NODE = re.compile(r"^[A-Za-z0-9][\w.-]*[\d-][\w.-]*:?$")
_LEAST = 4
"""Minimum ratio of processes in a collective to processes elsewhere: if many are elsewhere, none is the culprit."""
MAX_NODES = 4


def conclude_innermost(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Return the few processes that are elsewhere while all others are in a collective."""
    for tail in logs.tails:
        lines = tail.lines
        node: Line | None = None
        inside: list[Line] = []
        outside: list[tuple[Line | None, Line]] = []
        for line in lines:
            text = line.text.strip()
            if _COLLECTIVE.match(text):
                inside.append(line)
            elif _NODE.match(text) and not _FRAME.match(text):
                node = line
            elif _FRAME.match(text):
                outside.append((node, line))
            else:
                break
        else:
            nodes = tuple(dict.fromkeys(where.text.strip().rstrip(":") for where, _ in outside if where is not None))
            if outside and 0 < len(nodes) <= MAX_NODES and len(inside) >= _LEAST * len(outside):
                yield Conclusion(
                    cause=find_cause("straggler-rank"),
                    role=Role.LIKELY,
                    confidence=Confidence.LIKELY,
                    culprit=Culprit(nodes=nodes),
                    message=f"{len(outside)} of {len(inside) + len(outside)} processes: in "
                    f"{outside[0][1].text.strip()}; all others are in a collective",
                    evidence=tuple(line for line in (*outside[0], inside[0]) if line is not None),
                    ask=f"the whole stack of that process on {nodes[0]}: allranks stack JOB",
                    weight=1,
                )
                return
