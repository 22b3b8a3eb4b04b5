"""Names that a log mentions in passing, for a cause whose own signs name nobody. Pure.

    RuntimeError: ... [177/train (pid 28936)] ... No space left on device      -> process 28936
    XID 79(GPU has fallen off the bus) detected on PCI:0000:ae:00              -> GPU 0000:ae:00

First from the lines that show the cause, then from the only writer in the whole log. Both are weaker than any sign, and
neither is used for victims.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from allranks.causes.cause import Family
from allranks.why.conclusion import Conclusion
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.people import FEW, Culprit

_PROCESS = re.compile(r"\b(?:[Pp]id|PID|[Pp]rocess)(?: ?[=:] ?| )([1-9][0-9]{1,6})\b(?! closing signal)")
"""But not the process that the launcher ends: that one still ran."""
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
    re.compile(r"\b([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9])?)\b"),
    re.compile(r"\b(GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b"),
    re.compile(r"\b(?:GPU|gpu|cuda:|device(?: ordinal)?(?=[ =:]))[ #=:_]{0,2}([0-9]{1,2})\b(?![.:][0-9])"),
)
_GOES_ON_LINES = 2
_FOR_ALL = ":log_dist]"
"""DeepSpeed's function also for what rank 0 reports for the others."""


def overhear(conclusion: Conclusion, logs: Logs) -> Culprit:
    """Return what the lines of a conclusion name in passing; else the only rank, process or GPU in the log."""
    # The user's exceptions name devices for other reasons.
    is_gpu = conclusion.cause.family is Family.GPU
    found = Culprit()
    for line in conclusion.evidence:
        found |= _words(line, is_gpu=is_gpu)
    if found:
        return found
    if len(logs.tails) > FEW:
        return Culprit()
    lines = [line for tail in logs.tails for line in tail.lines]
    return _after(conclusion, lines, is_gpu=is_gpu) or _only(lines, is_gpu=is_gpu)


def _after(conclusion: Conclusion, lines: Sequence[Line], *, is_gpu: bool) -> Culprit:
    """Return what is named if a sentence continues on the next line: a terminal or its writer cut it."""
    first = conclusion.first
    found = Culprit()
    for line in lines:
        if line.source == first.source and first.number < line.number <= first.number + _GOES_ON_LINES:
            found |= Culprit(things=_words(line, is_gpu=is_gpu).things)
    return found


def _words(line: Line, *, is_gpu: bool) -> Culprit:
    things = [f"process {pid}" for pid in _PROCESS.findall(line.text)]
    if line.pid:
        things.append(f"process {line.pid}")
    things += [f"address {word}" for pattern in _PLACES for word in pattern.findall(line.text)]
    if is_gpu:
        things += _gpus(line)
    return Culprit(
        nodes=tuple(_NODE.findall(line.text)),
        ranks=() if line.rank is None else (line.rank,),
        things=tuple(dict.fromkeys(things)),
    )


def _gpus(line: Line) -> Iterator[str]:
    for pattern in _GPUS:
        for word in pattern.findall(line.text):
            yield word if word.startswith("GPU-") else f"GPU {word}"


def _only(lines: Sequence[Line], *, is_gpu: bool) -> Culprit:
    """Return the only writer; empty if there are several, or if it writes for all ranks."""
    lines = [line for line in lines if _FOR_ALL not in line.text]
    found = Culprit()
    ranks = {line.rank for line in lines if line.rank is not None}
    if len(ranks) == 1:
        found |= Culprit(ranks=tuple(ranks))
    local_ranks = {line.local_rank for line in lines if line.local_rank is not None}
    if not ranks and not local_ranks:
        said = {int(word) for line in lines for word in _RANK.findall(line.text)}
        found |= Culprit(ranks=tuple(said) if len(said) == 1 else ())
        local_ranks = {int(word) for line in lines for word in _LOCAL_RANK.findall(line.text)}
    if not ranks and len(local_ranks) == 1:
        found |= Culprit(things=(f"local rank {local_ranks.pop()}",))
    gpus = {word for line in lines for word in _gpus(line)} if is_gpu else set()
    if len(gpus) == 1:
        found |= Culprit(things=tuple(gpus))
    pids = {pid for line in lines for pid in (*map(int, _PROCESS.findall(line.text)), line.pid) if pid}
    if not found and len(pids) == 1:
        found |= Culprit(things=(f"process {pids.pop()}",))
    pods = {word for line in lines for pattern in _PODS for word in pattern.findall(line.text)}
    return found | Culprit(nodes=tuple(pods) if len(pods) == 1 else ())
