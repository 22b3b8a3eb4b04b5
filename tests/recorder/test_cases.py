"""The table of progress, as cases that a person reads: cases.txt."""

from __future__ import annotations

import doctest
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from allranks.recorder import calls, wait_graph
from allranks.recorder.calls import Call, Dump, canonical
from allranks.recorder.wait_graph import Standstill, find_stops
from allranks.report.text import fold_ranks

_TEXT = (Path(__file__).parent / "cases.txt").read_text()
CASES = {part.partition("\n")[0]: part.partition("\n")[2] for part in re.split(r"(?m)^== ", _TEXT)[1:]}
_CALL = re.compile(r"(?:([A-Za-z_]+)(?:\[([\d,]*)(?: (\w+))?\])? )?(\w+)#(\d+) (open|blocked|on gpu|on gpu done|done)")
_NUMBER = re.compile(r"(\w+) (enqueued|completed) (\d+)")


def parse(text: str) -> tuple[list[Dump], int | None, str]:
    """Return what is known of each rank, the world size, and the answer as it is written."""
    world, answer = None, ""
    members: dict[str, tuple[int, ...]] = {}
    descs: dict[str, str] = {}
    dumps = []
    for line in text.splitlines():
        if match := re.fullmatch(r"world (\d+)", line):
            world = int(match[1])
        elif match := re.fullmatch(r"group (\w+)(?: \((\w+)\))?: ([\d,-]+)", line):
            members[match[1]], descs[match[1]] = _ranks(match[3]), match[2] or ""
        elif match := re.fullmatch(r"rank (\d+):(.*)", line):
            dumps.append(_dump(int(match[1]), match[2].strip(), members, descs))
        elif line.startswith("-> "):
            answer = line[3:]
        else:
            assert not line or line.startswith("#"), line
    return dumps, world, answer


def _dump(rank: int, text: str, members: dict[str, tuple[int, ...]], descs: dict[str, str]) -> Dump:
    own: list[Call] = []
    numbers: defaultdict[str, dict[str, int]] = defaultdict(dict)
    is_timed = "on gpu" in text
    for item in filter(None, text.split(", ")):
        if match := _NUMBER.fullmatch(item):
            numbers[match[2]][match[1]] = int(match[3])
            continue
        match = _CALL.fullmatch(item)
        assert match, item
        op, size, dtype, group, seq, state = match.groups()
        about: dict[str, Any] = {} if size is None else {"sizes": (tuple(map(int, re.findall(r"\d+", size))),)}
        about |= {"dtypes": (dtype,)} if dtype else {}
        is_done = state.endswith("done")
        own.append(Call(group=group, seq=int(seq), op=op or "", is_done=is_done, blocks=state == "blocked", **about))
        if is_timed:
            started = numbers["started"].get(group, 0)
            numbers["started"][group] = max(started, int(seq) if state != "open" else 0)
    mine = {name: ranks for name, ranks in members.items() if rank in ranks}
    return Dump(rank, tuple(own), members=mine, descs=descs, **numbers)


def _ranks(text: str) -> tuple[int, ...]:
    spans = (part.partition("-") for part in text.split(","))
    return tuple(rank for first, _, last in spans for rank in range(int(first), int(last or first) + 1))


def show(stops: list[Standstill]) -> str:
    if not stops:
        return "nothing"
    first = stops[0]
    who, victims = (fold_ranks(ranks) if ranks else "nobody" for ranks in (first.ranks, first.victims))
    return f"{first.kind}: {who}, {first.confidence}{', proven' if first.is_proven else ''}; {victims}"


@pytest.mark.parametrize("title", CASES)
def test_the_answer_is(title: str) -> None:
    dumps, world, answer = parse(CASES[title])
    stops = find_stops(dumps, world)
    assert show(stops) == answer, [stop.message for stop in stops]
    assert show(find_stops(dumps[::-1], world)) == answer, "the order of the ranks changes it"


@pytest.mark.parametrize(
    ("op", "plain"),
    [
        ("gloo:all_reduce", "all_reduce"),
        ("nccl:_all_gather_base", "all_gather"),
        ("nccl:all_reduce_barrier", "barrier"),
        ("ALLREDUCE", "all_reduce"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_all_single", "all_to_all"),
        ("ReduceScatter", "reduce_scatter"),
        ("unheard_of", "unheard_of"),
    ],
)
def test_an_operation_has_one_name(op: str, plain: str) -> None:
    assert canonical(op) == plain


def test_the_examples_of_how_lines_become_dumps_hold() -> None:
    for module in (wait_graph, calls):
        found = doctest.testmod(module)
        assert (found.failed, found.attempted > 2) == (0, True)
