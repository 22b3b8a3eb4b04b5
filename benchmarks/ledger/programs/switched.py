"""`allranks`, in which live line, status file and books are switched on and off by turns; notes what each half costs.

    python switched.py NOTES HALF_S run --nproc-per-node 8 train.py ...

Off: the leader takes in no paces, makes no status and no ledger; the agent decodes no pace and keeps no book; the live
line is empty. NOTES gets a line of JSON for each half: whether it was on, how long it took, and the processor time of
the agent's process, which leads the job, all of its threads included; and of that, what they used inside of these
functions and of those that write files and draw the row. While it is on, book and ledger are written once in each half,
which is more often than the 60 s of a real job.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allranks.cli.main import main
from allranks.files.folder import Folder
from allranks.guard.goodput.ledger import Books
from allranks.guard.node import worker
from allranks.guard.node.booking import NodeBook
from allranks.launch import agent
from allranks.launch.console import Console
from allranks.launch.lead import status
from allranks.launch.live import Live
from allranks.report.status_files import StatusFiles

WARM_UP_S = 5.0
"""From the first step on: the beats' first dumps."""
is_on = True


class Meter:
    """Sums the processor time inside of some functions, those that call each other once."""

    def __init__(self) -> None:
        self.used_s = 0.0
        self._here = threading.local()

    def measure(self, owner: Any, name: str, off: Callable[..., Any] | None = None) -> None:
        """Measure a function, which does something else while all is off."""
        original = getattr(owner, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            do = original if is_on or off is None else off
            if getattr(self._here, "is_inside", False):
                return do(*args, **kwargs)
            self._here.is_inside, began_s = True, time.thread_time()
            try:
                return do(*args, **kwargs)
            finally:
                self.used_s += time.thread_time() - began_s
                self._here.is_inside = False

        setattr(owner, name, measured)


meter = Meter()


def switch_all() -> None:
    meter.measure(Books, "hear", lambda *_, **__: None)
    meter.measure(NodeBook, "note", lambda *_, **__: None)
    meter.measure(Live, "_headline", lambda *_, **__: "")
    meter.measure(Live, "turn", lambda *_, **__: None)
    meter.measure(worker, "to_pace", lambda *_, **__: None)
    meter.measure(status.StatusKeeper, "is_due", lambda keeper, now_s, phase: phase is not keeper._phase)
    for owner, name in (
        (status.StatusKeeper, "look"), (StatusFiles, "show"), (StatusFiles, "keep"), (NodeBook, "pack"),
        (Folder, "write_whole"), (Console, "draw"),
    ):  # fmt: skip
        meter.measure(owner, name)


def take_turns(notes: Path, half_s: float) -> None:
    global is_on
    while not notes.with_name("steps_0.txt").exists():
        time.sleep(0.2)
    time.sleep(WARM_UP_S)
    while True:
        for is_on in random.sample((True, False), 2):
            time.sleep(1.0)  # what was begun before
            began_s, used_s, inside_s = time.monotonic(), time.process_time(), meter.used_s
            time.sleep(half_s)
            noted = {"is_on": is_on, "s": time.monotonic() - began_s, "cpu_s": time.process_time() - used_s}
            noted["inside_s"] = meter.used_s - inside_s
            with notes.open("a") as file:
                file.write(json.dumps(noted) + "\n")


if __name__ == "__main__":
    notes, half_s = Path(sys.argv[1]), float(sys.argv[2])
    agent.BOOK_S = status.LEDGER_S = half_s
    switch_all()
    threading.Thread(target=take_turns, args=(notes, half_s), daemon=True).start()
    sys.argv = ["allranks", *sys.argv[3:]]
    main()
