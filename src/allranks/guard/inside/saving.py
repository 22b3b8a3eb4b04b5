"""How does a script say that it is saving, so that the agent does not end it meanwhile?

    with allranks.saving():
        torch.save(state, path)

After a fault, or a signal, the agent ends this rank when the block is over, at the latest after --shutdown-timeout
(30 s, and never more than SLURM leaves). A SIGTERM that somebody else sends meanwhile, as SLURM does on some sites,
takes effect when the block is over, where the script has no handler of its own. Without an agent only that remains.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from .cell import Cell
from .handlers import OURS

_cells: dict[int, Cell | None] = {}
"""By process id, since a fork inherits it."""


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Have this rank finish what the block writes before it is ended."""
    cell = _cell()
    with held_back(), booked():
        if cell is not None:
            cell.save(is_begun=True)
        try:
            yield
        finally:
            if cell is not None:
                cell.save(is_begun=False)


def booked() -> contextlib.AbstractContextManager[None]:
    """Have the agent know that the calling thread saves in this block, where the hook has marks in this process."""
    marks = sys.modules.get("_allranks_inside.thread_marks")
    return marks.saving() if marks else contextlib.nullcontext()


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Have SIGTERM take effect when the block is over, unless the script handles it."""
    before = signal.getsignal(signal.SIGTERM)
    is_ours = getattr(before, OURS, False)
    if threading.current_thread() is not threading.main_thread() or (before != signal.SIG_DFL and not is_ours):
        yield
        return
    came = []

    def note(signum: int, frame: Any) -> None:
        came.append(signum)

    setattr(note, OURS, True)
    signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is note:
            signal.signal(signal.SIGTERM, before)
        if came:
            os.kill(os.getpid(), signal.SIGTERM)


def _cell() -> Cell | None:
    """This worker's cell; None in all other processes."""
    if os.getpid() not in _cells:
        cell = Cell.inherited()
        _cells[os.getpid()] = cell if cell is not None and cell.claim() else None
    return _cells[os.getpid()]
