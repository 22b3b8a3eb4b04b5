"""In which files do the lines end up, behind which prefixes, and what of it is lost?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

from .lines import Line, Speaker
from .plan import Plan

LINE_S = 1e-4
"""Seconds between two lines of one traceback."""


@dataclass(frozen=True, slots=True)
class Written:
    """A line that reached a file."""

    path: str
    text: str
    line: Line
    has_rank: bool
    """Whether the file's name or the prefix names the rank of who wrote it."""
    has_node: bool
    """The same for the node."""


def write_lines(
    plan: Plan, lines: Iterable[Line], culprit: int | None, struck_s: float, lost_s: float
) -> list[Written]:
    """Return what reached the files, in the order of time.

    Args:
        culprit: rank whose output is lost, if the plan says so.
        struck_s: when the fault happened.
        lost_s: seconds before the fault from which on a cut output is lost.
    """
    written = []
    ordered = sorted(_interleave(plan, lines), key=lambda entry: entry.at_s)
    if plan.layout == "prefixed" and plan.is_by_pod:
        ordered.sort(key=lambda entry: _node_of(plan, entry.speaker))
    for line in ordered:
        path, prefix, has_rank, has_node = _place(plan, line.speaker, line.stream, line.attempt)
        if culprit is not None and _is_lost(plan, line, culprit, struck_s - lost_s):
            continue
        text = line.text
        if prefix or plan.wrap != "plain":
            parts = line.text.lstrip("\r").split("\n")
            text = "\n".join(prefix + _wrap(plan, line, part) for part in parts)
        written.append(Written(path, text, line, has_rank, has_node))
    return written


def _interleave(plan: Plan, lines: Iterable[Line]) -> Iterator[Line]:
    """Yield lines; where many processes write into one file, those of a traceback apart, so that others get between."""
    free_s: dict[Speaker, float] = {}
    for line in sorted(lines, key=lambda entry: entry.at_s):
        if plan.layout not in {"one", "labelled", "tagged"} or line.speaker[0] == "kernel":
            yield line
            continue
        at_s = max(line.at_s, free_s.get(line.speaker, 0.0))
        parts = line.text.split("\n")
        for index, part in enumerate(parts):
            yield dataclasses.replace(line, text=part, at_s=at_s + index * LINE_S)
        free_s[line.speaker] = at_s + len(parts) * LINE_S


def _node_of(plan: Plan, speaker: Speaker) -> int:
    kind, number = speaker
    return plan.node_of(number) if kind == "rank" else number


def _wrap(plan: Plan, line: Line, text: str) -> str:
    """Return a line as the container's runtime or kubectl writes it; what others write stays as it is."""
    if plan.wrap == "plain" or line.speaker[0] not in {"rank", "agent"}:
        return text
    when = plan.start + timedelta(seconds=line.at_s + plan.skews_s[_node_of(plan, line.speaker)])
    stamp = f"{when:%Y-%m-%dT%H:%M:%S}.{when.microsecond:06d}{when.microsecond * 7 % 1000:03d}Z"
    stream = "stdout" if line.stream == "out" else "stderr"
    if plan.wrap == "timestamps":
        return f"{stamp} {text}"
    if plan.wrap == "cri":
        return f"{stamp} {stream} F {text}"
    log = json.dumps(f"{text}\n").replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")  # as Go does
    return f'{{"log":{log},"stream":"{stream}","time":"{stamp}"}}'


def _is_lost(plan: Plan, line: Line, culprit: int, from_s: float) -> bool:
    if plan.loss == "nothing":
        return False
    kind, number = line.speaker
    if kind not in {"rank", "agent"}:
        return False
    node = _node_of(plan, line.speaker)
    is_own_file = plan.layout in {"rank-files", "node-files"}
    if plan.layout == "node-files":
        if node != plan.node_of(culprit):
            return False
    elif kind != "rank" or number != culprit:
        return False
    is_missing = plan.loss == "missing" and is_own_file and plan.num_nodes > 1  # something has to be left to read
    return is_missing or line.at_s >= from_s


def _place(plan: Plan, speaker: Speaker, stream: str, attempt: int) -> tuple[str, str, bool, bool]:
    """Return path, prefix, and whether these name rank and node."""
    kind, number = speaker
    if kind == "kernel":
        return f"{plan.nodes[number]}.dmesg.txt", "", False, True
    if kind == "events":
        return "events.txt", "", False, False
    whole = f"slurm-{plan.job_id}.out" if plan.is_slurm else "train.log"
    if kind in {"srun", "stepd"}:
        return whole, "", False, False
    node = _node_of(plan, speaker)
    name = plan.nodes[node]
    is_rank = kind == "rank"
    match plan.layout:
        case "labelled":
            width = len(str((plan.world if plan.launcher == "srun" else plan.num_nodes) - 1))
            label = number if plan.launcher == "srun" else node
            shown = f"{label:0{width}d}" if plan.versions["slurm"] == "20.11" else f"{label:{width}d}"
            return whole, f"{shown}: ", is_rank and plan.launcher == "srun", False
        case "tagged":
            prefix = f"[default{plan.local_of(number)}]:" if is_rank else ""
            is_whole = plan.launcher == "srun-torchrun"
            return whole if is_whole else f"{name}.log", prefix, False, not is_whole
        case "node-files":
            return f"{name}.log", "", False, True
        case "rank-files" if plan.launcher == "srun":
            name = f"rank_{number}" if plan.job_id % 3 else f"train-{plan.job_id}-task{number}"
            return f"logs/{name}.{stream}", "", True, False
        case "rank-files" if is_rank:
            std = "stdout" if stream == "out" else "stderr"
            folder = f"logs/{name}/{plan.job_id}_x3k1/attempt_{attempt}/{plan.local_of(number)}"
            return f"{folder}/{std}.log", "", False, True
        case "rank-files":
            return f"{name}.log", "", False, True
        case "prefixed":
            return "pods.log", f"[pod/{name}/pytorch] ", False, True
    return whole, "", False, False
