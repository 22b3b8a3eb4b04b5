"""A daemon thread that reports to the agent, five times a second, how far this worker is.

It runs also while the main thread is blocked in C++ (a collective lets go of the GIL), and says nothing when the
process is stopped or its GIL held, which the agent then sees from outside. What it tells, as JSON, all times `_ns` by
CLOCK_MONOTONIC but `created_ns`:

    at (main thread's place), lags [[group, seq, created_ns]], blind [text],
    groups [[name, ranks (none: all of the job), enqueued, completed, open_since_ns]]
    calls (model.beat.CallSeen, where one is open for long)

Its own cost is bounded: a dump of the recorder takes milliseconds with the GIL held, so the next one for lags waits
until they are DUMP_SHARE of the time. The last beat makes one in any case. Runs in the worker's Python.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

from .cell import Cell
from .flight import Flight
from .thread_marks import blocked_permille, book
from .user_frames import place_of_main

EVERY_S = 0.2
LONG_OPEN_NS = 300_000_000
"""A call that is open for longer is told with the last ones of all groups."""
DUMP_SHARE = 0.001
DUMP_EVERY_NS = 1_000_000_000
"""At most."""
LAST_BEAT_S = 0.5
"""How long the end of the process may wait for the beat that is just being told."""


class BeatThread:
    """The thread and what it has seen so far."""

    def __init__(self, cell: Cell, flight: Flight) -> None:
        self._cell = cell
        self._flight = flight
        self._everybody = tuple(range(int(os.environ.get("WORLD_SIZE") or 0)))
        self._every_s = float(os.environ.get("ALLRANKS_BEAT_S") or EVERY_S)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="allranks-beat", daemon=True)
        self._moved: object = None
        self._told: object = None
        self._blob = b""
        self._open: dict[str, tuple[int, int]] = {}
        """By group: the number of the first open call, and since when it is."""
        self._calls: list[dict[str, Any]] = []
        self._calls_of: object = None
        self._lags: list[tuple[str, int, int]] = []
        self._told_lags: dict[str, int] = {}
        self._next_dump_ns = 0

    def start(self) -> None:
        """Begin to beat."""
        self._cell.phase("init")
        self._thread.start()

    def end(self) -> None:
        """Stop, before the interpreter goes: a thread that it ends inside C++ would abort the process.

        However long the last dump takes, it is over then: it keeps the GIL, without which neither `join` returns nor
        the interpreter ends (torch 2.13: beside a dump of 1.1 s, `join(0.05)` took 1.1 s). What may be left after
        LAST_BEAT_S is Python, and a daemon thread that waits for the GIL there is ended without harm.
        """
        self._ended.set()
        self._thread.join(LAST_BEAT_S)

    def _run(self) -> None:
        is_last = False
        while self._cell.is_mine:
            try:
                self._tell(is_last=is_last)
            except Exception as exc:  # a torch whose inside we do not know: what is left is said
                self._flight.note(f"a beat failed: {exc!r}")
            if is_last:
                return
            is_last = self._ended.wait(self._every_s)  # and once more: what was called since the last beat

    def _tell(self, *, is_last: bool) -> None:
        states = self._flight.states()
        if self._flight.is_async:
            book.tell_async()
        now_ns = time.monotonic_ns()
        self._watch_progress(states, now_ns)
        self._look_at_calls(states, now_ns, is_last=is_last)
        at = place_of_main()
        # Identity is enough: what is told is replaced, never changed.
        facts = self._moved, at, id(self._calls), id(self._lags), len(self._flight.blind)
        if facts != self._told:
            self._told, self._blob = facts, self._write(states, at)
        if not self._cell.tell(self._blob):
            self._calls, self._lags = self._calls[-16:], []
            self._flight.note("a beat was too long to be told")

    def _write(self, states: dict[str, tuple[int, int]], at: str) -> bytes:
        told = {
            "at": at,
            "groups": [
                (
                    name,
                    () if group.ranks == self._everybody else group.ranks,
                    *states.get(name, (-1, -1)),
                    self._open.get(name, (0, 0))[1],
                )
                for name, group in self._flight.groups().items()
            ],
            "calls": self._calls,
            "lags": self._lags,
            "blind": self._flight.blind,
        }
        return json.dumps(told, separators=(",", ":")).encode()

    def _watch_progress(self, states: dict[str, tuple[int, int]], now_ns: int) -> None:
        moved = states, self._cell.marks()
        if moved == self._moved:
            return
        self._moved = moved
        before, self._open = self._open, {}
        for name, (enqueued, completed) in states.items():
            if enqueued > completed:
                first, since_ns = before.get(name, (-1, 0))
                self._open[name] = (first, since_ns) if first == completed + 1 else (completed + 1, now_ns)

    def _look_at_calls(self, states: dict[str, tuple[int, int]], now_ns: int, *, is_last: bool) -> None:
        is_long = any(now_ns - since_ns > LONG_OPEN_NS for _, since_ns in self._open.values())
        may_dump = is_last or now_ns >= self._next_dump_ns
        if is_long and self._calls_of != states and (may_dump or not self._calls):
            self._calls_of = dict(states)
            self._calls = self._timed(self._flight.last_calls, now_ns)
        elif not is_long:
            if self._calls:
                self._calls, self._calls_of = [], None
            if may_dump and self._flight.untold(self._told_lags):
                passes = book.passes  # first: all of their collectives are in the dump
                self._lags = self._timed(lambda: self._flight.lags(self._told_lags), now_ns)
                book.tell_blocked(blocked_permille(passes, self._flight.created_ns))

    def _timed(self, dump: Any, now_ns: int) -> Any:
        began_ns = time.thread_time_ns()
        found = dump()
        cost_ns = time.thread_time_ns() - began_ns
        self._next_dump_ns = now_ns + max(DUMP_EVERY_NS, int(cost_ns / DUMP_SHARE))
        return found
