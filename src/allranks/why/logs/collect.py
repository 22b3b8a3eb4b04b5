"""From sources to events; large sources are read in parts, in parallel.

    logs = collect(sources, list_patterns(all_causes()), max_workers=8)

The parts depend on the sources alone, so the result is the same for any number of processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from ctypes import c_uint64
from functools import partial
from typing import Any

from allranks.host.signals import die_with_parent
from allranks.why.logs.log_events import Logs, Pattern
from allranks.why.logs.match import Matcher
from allranks.why.logs.part import LogPart, read_part
from allranks.why.logs.read import ReadProblem
from allranks.why.logs.sources import Source

PART_BYTES = 64 << 20
"""Minimum size of a part, if there is more than one."""
MAX_PARTS = 16
MAX_WORKERS = 8
"""Each process uses about 25 MiB."""
KEEP_EVENTS = 200_000
"""Maximum number of events of all sources, about 200 MB; beyond it, only the first of each kind per source is kept."""
TAIL_BYTES = 8192
"""Lines kept from the end of a source, if there are few sources."""
ALL_TAILS_BYTES = 2 << 20
"""With thousands of sources fewer are kept, but at least one or two: reading a line costs 10 us."""
LEAST_TAIL_BYTES = 512
_PROGRESS_S = 0.2

_Said = tuple[Logs, list[ReadProblem]]
_Read = Callable[[LogPart, Callable[[int], None]], _Said]


def collect(
    sources: Sequence[Source],
    patterns: Sequence[Pattern],
    *,
    matcher: Matcher | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
    problems: list[ReadProblem] | None = None,
    max_workers: int = 1,
) -> Logs:
    """Read all sources.

    Args:
        sources: in the order in which they are shown.
        patterns: the patterns to search for.
        matcher: a matcher of these patterns, if there already is one.
        on_progress: called with the number of bytes just read.
        problems: gets the sources that could not be read completely, or not at all.
        max_workers: maximum number of processes. They are forked, so more than one needs a process with a single
            thread.
    """
    read = partial(read_part, patterns, matcher or Matcher([pattern.scan for pattern in patterns]))
    parts = cut(sources)
    workers = min(max_workers, len(parts), MAX_WORKERS)
    if workers > 1:
        said = _read_side_by_side(parts, read, workers, on_progress)
    else:
        said = [read(part, on_progress) for part in parts]
    if problems is not None:
        problems += [problem for _, found in said for problem in found]
    return Logs(
        events=tuple(event for logs, _ in said for event in logs.events),
        tails=tuple(tail for logs, _ in said for tail in logs.tails),
        dropped=sum(logs.dropped for logs, _ in said),
        printed=tuple(printed for logs, _ in said for printed in logs.printed),
    )


def cut(sources: Sequence[Source]) -> list[LogPart]:
    """Return the sources in parts of about equal size, in their order."""
    size = max(PART_BYTES, sum(source.size for source in sources) // MAX_PARTS + 1)
    groups: list[list[Source]] = []
    filled = size
    for source in sources:
        if filled >= size:
            groups.append([])
            filled = 0
        groups[-1].append(source)
        filled += source.size
    tail_bytes = max(LEAST_TAIL_BYTES, min(TAIL_BYTES, ALL_TAILS_BYTES // max(1, len(sources))))
    return [LogPart(tuple(group), KEEP_EVENTS // len(groups), tail_bytes) for group in groups]


# --- In parallel ---------------------------------------------------------------------------------------------------


def _read_side_by_side(
    parts: Sequence[LogPart], read: _Read, workers: int, on_progress: Callable[[int], None]
) -> list[_Said]:
    """Return the results of all parts, read by child processes; the parts of a killed process are read here."""
    context = multiprocessing.get_context("fork")
    counts = context.RawArray(c_uint64, len(parts))
    futures: list[Future[_Said]] = []
    given = (die_with_parent(signal.SIGKILL), parts, read, counts)
    with contextlib.suppress(BrokenProcessPool), ProcessPoolExecutor(workers, context, _begin, given) as pool:
        for index in range(len(parts)):
            futures.append(pool.submit(_read_there, index))
        waiting = set(futures)
        told = 0
        while waiting:
            _, waiting = wait(waiting, timeout=_PROGRESS_S)
            done = sum(counts)
            on_progress(done - told)
            told = done
    said = []
    for index, part in enumerate(parts):
        try:
            said.append(futures[index].result())
        except (IndexError, BrokenProcessPool):
            on_progress(-counts[index])
            said.append(read(part, on_progress))
    return said


_there: tuple[Sequence[LogPart], _Read, Any]
"""In a reader process: its inputs, inherited by fork."""


def _begin(end_with_parent: Callable[[], None], parts: Sequence[LogPart], read: _Read, counts: Any) -> None:
    """Executed first in a reader process."""
    global _there
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _there = (parts, read, counts)


def _read_there(index: int) -> _Said:
    parts, read, counts = _there

    def note(count: int) -> None:
        counts[index] += count

    return read(parts[index], note)
