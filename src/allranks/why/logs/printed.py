"""Findings that allranks itself printed into a log: the report on a terminal, saved, or in slurm-7.out. Pure.

    x AR408 stuck-rank   node03 - rank 2                         likely
      it has been in user code for 16 s: train.py:3 in <module>; ranks 0-1 waited for it ...
      seen rank 2, pid 4711: sleeping
      more allranks explain AR408

Scripts print such words, too. So the first line must have its whole form: mark, id and name of one cause, confidence;
and the message must follow, unless the log ends there. `report/text.py` prints what is read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from allranks.causes.book import find_cause
from allranks.causes.cause import Cause
from allranks.model.finding import Confidence, Evidence, Finding, Severity
from allranks.why.logs.line import Line, strip_control

MAX_BYTES = 1 << 15
"""A report is read up to this size."""
MAX_LINES = 120
MAX_KEPT = 32
"""Number of findings kept per source, the last ones: each restart may print some."""
MAX_FOREIGN = 20
"""Lines of other writers within one finding."""
KIND = "printed"
"""The kind of event of a first line."""

_SEVERITY = {"✗": Severity.FAIL, "x": Severity.FAIL, "⚠": Severity.WARN, "!": Severity.WARN}
_TIME = re.compile(r"(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d[.,\d]*|\d{13}(?=\t)")
"""What differs in the prefixes of two lines of one writer."""
HEAD = (
    r"^(?P<mark>[✗⚠x!]) (?P<cause>AR\d{3} [a-z0-9-]+)(?:   (?P<who>\S.{0,400}?))??"
    r" {3,}(?P<confidence>certain|likely|undecided)(?: between .{1,200})?$"
)
"""The first line of a finding."""
_MORE = "       "
_EVIDENCE = re.compile(rf"^  seen (.*(?:\n{_MORE}.*)*)(?:\n  log  (.*))?", re.MULTILINE)
_WAITED = "waited for it: "
_VICTIMS = "others waited for it or were ended: "
_NOTE = re.compile(r"  (?P<note>(?:all )?\d+ ranks failed alike|(?:perhaps )?also by (?:itself|themselves): .*)")
_NAME = re.compile(r"[A-Za-z0-9][\w.@:\[\],-]*(?: (?:or|\|) [A-Za-z0-9][\w.\[\],-]*)?")
"""Of a node, several nodes, or an interface."""
_FILE = re.compile(r"\.\w{1,4}:\d+$")
_RANKS = re.compile(r"ranks? (?P<ranks>\d{1,6}(?:[,-]\d{1,6})*)")


@dataclass(frozen=True, slots=True)
class Printed:
    """One finding, and where it was printed."""

    finding: Finding
    line: Line
    """Its first line."""
    last: int
    """Number of its last line."""

    def covers(self, line: Line) -> bool:
        """Whether a line of the same source is a part of it."""
        return self.line.number <= line.number <= self.last


def scan_pattern(causes: Iterable[Cause]) -> str:
    """Return the pattern of lines that may begin a finding, for hyperscan: the label of any cause."""
    return "|".join(cause.label for cause in causes)


def read_printed(line: Line, data: bytes, place: int) -> Printed | None:
    """Return the finding that begins with a line at a place of `data`; None if it is none of allranks'.

    A report that goes on behind `data` is read as if the log ended there.
    """
    head = re.match(HEAD, line.text)
    if head is None:
        return None
    begin = data.rfind(b"\n", 0, place) + 1
    first, *following = data[begin : begin + MAX_BYTES].decode(errors="replace").split("\n")[: MAX_LINES + 1]
    body, last = _read_body(_prefix(first, line.text), following)
    if not body and any(row.strip() for row in following):
        return None
    return Printed(_read_finding(head, body), line, line.number + last)


def _prefix(first: str, text: str) -> re.Pattern[str]:
    """Return what launchers put before each line, as in the first one: `3: `, `[node03 r0] `, a time."""
    before = strip_control(first).rpartition(text)[0]
    fixed = map(re.escape, _TIME.split(before))
    return re.compile(f"(?:{_TIME.pattern})".join(fixed))


def _read_body(prefix: re.Pattern[str], following: Iterable[str]) -> tuple[list[str], int]:
    """Return the lines of a finding after its first one, without the prefix, and how many lines that is.

    An empty line of the same writer ends it, or the next finding.
    """
    body: list[str] = []
    last = foreign = 0
    for count, raw in enumerate(following, start=1):
        line = strip_control(raw).rstrip()
        match = prefix.match(line)
        rest = line[match.end() :] if match else ""
        if rest.startswith("  "):
            body.append(rest)
            last = count
            continue
        foreign += 1
        if foreign > MAX_FOREIGN or (match and (not rest or re.match(HEAD, rest))):
            break
    return body, last


def _read_finding(head: re.Match[str], body: list[str]) -> Finding:
    cause = find_cause(head["cause"])
    text = "\n".join(body[1:])

    def said(label: str) -> str:
        return " ".join(re.findall(f"(?m)^  {label}(.*)", text))

    node, interface, ranks, subject = read_culprit(head["who"] or "")
    return Finding(
        cause=cause.label,
        severity=_SEVERITY[head["mark"]],
        confidence=Confidence(head["confidence"]),
        node=node,
        interface=interface,
        ranks=ranks,
        subject=subject,
        message=body[0].strip() if body else cause.told or cause.title.rstrip("."),
        evidence=tuple(
            Evidence(seen=seen.replace("\n" + _MORE, "\n"), source=source or None)
            for seen, source in _EVIDENCE.findall(text)
        ),
        fix=said("fix  ") or None,
        ask=said("next ") or None,
        notes=tuple(match["note"] for line in body if (match := _NOTE.fullmatch(line))),
        victims=_unfold(said(_VICTIMS)),
        waiting=said(_WAITED) or None,
    )


def read_culprit(who: str) -> tuple[str | None, str | None, tuple[int, ...], str | None]:
    """Return node, interface, ranks and subject of a first line: names stand first.

    >>> read_culprit("node03 · ens1f1")
    ('node03', 'ens1f1', (), None)
    >>> read_culprit("vm - ranks 0-2 - train.py:6")
    ('vm', None, (0, 1, 2), 'train.py:6')
    """
    parts = [part for part in re.split(r" [·-] ", who.strip()) if part]
    names = list(takewhile(lambda part: _NAME.fullmatch(part) and not _FILE.search(part), parts))[:2]
    node, interface = [*names, None, None][:2]
    rest = parts[len(names) :]
    ranks = _unfold(next(filter(_RANKS.fullmatch, rest), ""))
    return node, interface, ranks, " · ".join(part for part in rest if not _RANKS.fullmatch(part)) or None


def _unfold(text: str) -> tuple[int, ...]:
    """Return the ranks of `ranks 0-2,5`, as `report/text.py` folds them."""
    match = _RANKS.fullmatch(text)
    runs = [part.partition("-") for part in match["ranks"].split(",")] if match else []
    return tuple(rank for first, _, last in runs for rank in range(int(first), int(last or first) + 1))
