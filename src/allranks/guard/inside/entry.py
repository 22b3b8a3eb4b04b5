"""How the guard gets into a worker: `join/hook.py` calls `arm` when torch.distributed has just been imported.

    arm(c10d)       the collectives tell before they do; nothing is told yet
    begin()         this process is the worker: its cell is claimed and its beat started
    last_words()    an exception ends it: what the recorder holds goes into the cell

`begin` comes with the first `init_process_group`: before that there is no group to tell of, and a thread in a process
that forks is a nuisance. Nothing here may raise, wait, or slow an exit. Runs in the worker's Python.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import sys
import time
from typing import Any

from .beat_thread import BeatThread
from .cell import Cell
from .flight import Flight
from .thread_marks import book
from .user_frames import drop_frame
from .wrapped_calls import Teller, wrap

_teller: Teller | None = None
_beat: BeatThread | None = None
LET_GO_S = 0.1
"""What Gloo's threads have to let go of their last tensors."""
_failed = (0, "")
"""Number of the last call that raised, and what."""


def arm(c10d: Any) -> None:
    """Wrap what torch.distributed has just defined in distributed_c10d, once.

    Raises:
        AttributeError: this torch does not have what we hold on to.
    """
    global _teller
    if _teller is not None:
        return
    _teller = Teller(c10d)
    wrap(c10d, _teller)
    init_process_group, destroy_process_group = c10d.init_process_group, c10d.destroy_process_group

    @functools.wraps(init_process_group)
    def init_and_beat(*args: Any, **kwargs: Any) -> Any:
        begin()
        try:
            formed = init_process_group(*args, **kwargs)
        except BaseException as exc:
            drop_frame(exc)
            enter("init")
            raise
        enter("training")
        return formed

    @functools.wraps(destroy_process_group)
    def destroy_and_note(*args: Any, **kwargs: Any) -> Any:
        _note_groups()  # also one that lived for less than a beat counts
        with contextlib.suppress(Exception):
            _wait_for_gloo(c10d, *args, **kwargs)
        try:
            destroyed = destroy_process_group(*args, **kwargs)
        except BaseException as exc:
            drop_frame(exc)
            raise
        _note_groups()
        return destroyed

    c10d.init_process_group = init_and_beat
    c10d.destroy_process_group = destroy_and_note


def _wait_for_gloo(c10d: Any, group: Any = None) -> None:
    """Give Gloo's threads the time to let go of their last tensors, before the default group goes.

    Whoever holds a group last, mostly DDP's reducer when `main` returns, waits for these threads with the GIL in hand;
    one that still has a tensor waits for the GIL: for good (torch 2.13, a busy machine; see also join.group).
    """
    world = c10d._world
    has_nccl = any("nccl" in str(backend) for backend, _ in world.pg_map.values())
    if (group is None or group is world.default_pg) and not has_nccl:
        time.sleep(LET_GO_S)


def begin() -> None:
    """Claim the cell and start the beat, where there is a cell and no other process has it.

    The calling thread is the one whose time is booked.
    """
    global _beat
    if _teller is None or (_teller.cell is not None and _teller.cell.is_mine):
        return
    with contextlib.suppress(Exception):
        cell = Cell.inherited()
        if cell is None or not cell.claim():
            return
        _teller.flight = Flight(_teller.c10d)
        _teller.is_compiling = sys.modules["torch"].compiler.is_compiling
        _teller.failed = note_failure
        _teller.cell = cell
        book.begin(cell)
        if book.missing:
            _teller.flight.note(f"this torch has no {', '.join(book.missing)}: that is not booked")
        _beat = BeatThread(cell, _teller.flight)
        _beat.start()
        atexit.register(_leave)


def enter(phase: str) -> None:
    """Say what the worker does from now on: `arriving` while init_process_group waits for all ranks of the job."""
    if _teller is not None and _teller.cell is not None:
        _teller.cell.phase(phase)


def unseen() -> list[str]:
    """Return what the guard cannot see in this process."""
    _note_groups()
    return _teller.flight.blind if _teller is not None and _teller.flight is not None else []


def _note_groups() -> None:
    with contextlib.suppress(Exception):
        if _teller is not None and _teller.flight is not None:
            _teller.flight.groups()


def note_failure(failed: str) -> None:
    """Write that a collective raised this."""
    global _failed
    with contextlib.suppress(Exception):
        if _teller is not None and _teller.cell is not None:
            _failed = _teller.cell.marks()[0], failed
    last_words()


def last_words() -> None:
    """Write what this rank last called in every group, for the survivors' sake, and how the last call failed, if so."""
    with contextlib.suppress(Exception):
        if _teller is None or _teller.cell is None or _teller.flight is None or not _teller.cell.is_mine:
            return
        number, failed = _failed
        is_last = number == _teller.cell.marks()[0]
        words = {"calls": _teller.flight.last_calls(), "failed": failed[:2000] if is_last else ""}
        _teller.cell.last_words(json.dumps(words, separators=(",", ":")).encode())


def _leave() -> None:
    enter("leaving")
    book.end()
    if _beat is not None:
        _beat.end()
