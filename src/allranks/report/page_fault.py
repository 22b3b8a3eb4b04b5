"""What did the ranks of a failed run do at the end? Their stacks, equal ones folded, and the last lines of two of them.

    files = list_files(attempt)
    read_places(attempt, files, culprit)[0].ranks        # the culprit's
    read_last_lines(attempt, files, culprit)             # of the culprit and of one victim

The agents have kept the stacks at the verdict (guard/node/heartbeat.py). Secrets are hidden.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from allranks.files.regular import find_regular, open_regular
from allranks.model.finding import Finding
from allranks.report.mask import mask_secrets

MAX_NODES, MAX_RANKS, MAX_FILES = 4096, 16384, 1 << 17
"""Whose files are looked for, and files of one node."""
TAIL_BYTES, TAIL_LINES = 32 << 10, 40
"""Of the last output of a rank."""
STACK_BYTES, MAX_STACKS, MAX_PLACES = 64 << 10, 2048, 32
"""Of one stack; stacks that are read; different ones that are shown."""
NO_STACK = "no stack was read"
_STACK = re.compile(r"rank_([0-9]{1,8})\.stack\.txt")
_OUTPUT = re.compile(r"rank_([0-9]{1,8})\.(?:out|err)")


class ListedPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks whose stacks were equal when the job failed."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    stack: str
    is_culprit: bool = False


class LastLines(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has printed last."""

    role: str
    """`culprit`, `victim`, or `rank`."""
    rank: int
    node: str
    path: str
    lines: tuple[str, ...]


def list_files(attempt: Path) -> dict[str, tuple[str, ...]]:
    """Return the names of the files of each node of an attempt."""
    found: dict[str, tuple[str, ...]] = {}
    with contextlib.suppress(OSError), os.scandir(attempt) as there:
        for entry in there:
            if len(found) >= MAX_NODES:
                break
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    names = os.listdir(entry.path)  # noqa: PTH208  (names are enough)
                    found[entry.name] = tuple(names[:MAX_FILES])
    return found


def find_nodes(files: Mapping[str, Sequence[str]]) -> dict[int, str]:
    """Return the node of each rank that has written output."""
    return {rank: node for node, names in files.items() for rank in _ranks_among(names)}


def _ranks_among(names: Iterable[str]) -> list[int]:
    ranks = {int(match[1]) for name in names if (match := _OUTPUT.fullmatch(name))}
    return sorted(rank for rank in ranks if rank < MAX_RANKS)


def read_places(attempt: Path, files: Mapping[str, Sequence[str]], culprit: Finding | None) -> tuple[ListedPlace, ...]:
    """Return the stacks that the agents kept, equal ones folded: those of the culprit first, then the rarest."""
    kept = sorted(
        (int(match[1]), node, name)
        for node, names in files.items()
        for name in names
        if (match := _STACK.fullmatch(name))
    )
    groups: dict[str, list[tuple[int, str]]] = {}
    for rank, node, name in kept[:MAX_STACKS]:
        data = find_regular(attempt / node / name, at_most=STACK_BYTES)
        if data is not None:
            groups.setdefault(fold_stack(data.decode(errors="replace")), []).append((rank, node))
    blamed = set(culprit.ranks if culprit else ())
    places = [
        ListedPlace(
            ranks=tuple(rank for rank, _ in who),
            nodes=tuple(dict.fromkeys(node for _, node in who)),
            stack=stack,
            is_culprit=any(rank in blamed for rank, _ in who),
        )
        for stack, who in groups.items()
    ]
    return tuple(sorted(places, key=_order)[:MAX_PLACES])


def _order(place: ListedPlace) -> tuple[object, ...]:
    """Who is blamed first, then the rarest stacks; processes that were about to end, and have none, at the end."""
    return not place.is_culprit, "no stack" in place.stack, len(place.ranks), place.ranks


def fold_stack(stack: str) -> str:
    """Return a stack that the agent has kept without what differs from process to process, the main thread first.

    Ids and the use of the CPU are left out, and so are threads of allranks.

    >>> fold_stack('Process 7: state S, 0.06 cores\\n\\nThread 8 (idle): "allranks-beat"\\n    g (b.py:1)\\n\\n'
    ...            'Thread 7 (idle): "MainThread"\\n    f (a.py:3)\\n')
    'state S\\n\\nThread "MainThread"\\n    f (a.py:3)'
    >>> fold_stack('Process 7: state Z, 0.06 cores\\n\\nThread 7 (idle): ""\\n')
    'state Z\\n\\nno stack was read'
    """
    head, *threads = re.split(r"\n\n(?=Thread )", mask_secrets(stack).strip())
    head = re.sub(r"^Process \d+: (state \S+), [\d.]+ cores", r"\1", head)
    named = [re.sub(r"^Thread \S+ \(\w+\): ", "Thread ", thread) for thread in threads if "\n" in thread]
    named = [thread for thread in named if not thread.startswith('Thread "allranks-')]
    named.sort(key=lambda thread: not thread.startswith('Thread "MainThread"'))
    return "\n\n".join([head, *(named or ([] if "no stack" in head else [NO_STACK]))])


def read_last_lines(attempt: Path, files: Mapping[str, Sequence[str]], culprit: Finding | None) -> Iterator[LastLines]:
    """Return the last lines of the culprit's first rank and of one victim, else of the first ranks."""
    node_of = find_nodes(files)
    blamed = [rank for rank in (culprit.ranks if culprit else ()) if rank in node_of]
    others = [rank for rank in (culprit.victims if culprit else ()) if rank in node_of and rank not in blamed]
    others = others or [rank for rank in sorted(node_of) if rank not in blamed]
    chosen = [("culprit", rank) for rank in blamed[:1]]
    chosen += [("victim" if blamed else "rank", rank) for rank in others[: 2 - len(chosen)]]
    for role, rank in chosen:
        node = node_of[rank]
        for stream in ("err", "out"):
            name = f"rank_{rank}.{stream}"
            lines = _read_tail(attempt / node / name) if name in files[node] else ()
            if lines:
                path = f"{attempt.name}/{node}/{name}"
                yield LastLines(role=role, rank=rank, node=node, path=path, lines=lines)
                break


def _read_tail(path: Path) -> tuple[str, ...]:
    with contextlib.suppress(OSError), open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        file.seek(max(0, size_bytes - TAIL_BYTES))
        data = file.read(TAIL_BYTES)
        if size_bytes > TAIL_BYTES:
            data = data.partition(b"\n")[2] or data
        text = mask_secrets(data.decode(errors="replace"))
        lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]
        return tuple(line for line in lines if line.strip())[-TAIL_LINES:]
    return ()
