"""The faults: how each is planted, who is to be named, how it is undone, and what proves that it was there.

fault = FAULTS["killed"]; struck_s = fault.strike(job, rank=2); fault.prove(job, rank=2)   # -> what does not hold
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from . import seen
from .jobs import NUM_RANKS, DrillError, Job
from .programs.board import NOBODY, Code

BEGIN_S = 10.0
"""Until an ordered rank is at the ordered step."""
PROVEN_S, LIKELY_S = 3.0, 6.0
"""From the strike to the name (issue 43)."""
NOT_ACKNOWLEDGED = "unacknowledged|lost|dropped|link"
TABLE = "table inet watch_drill"


class Named(StrEnum):
    """Who is to be named."""

    RANK = "the rank"
    PAIR = "the pair"
    STORE = "the store's owner"
    FIRST_DEAD = "the first of the dead"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault."""

    name: str
    what: str
    named: Named = Named.RANK
    is_proven: bool = True
    """A verdict; else a state."""
    code: Code = Code.NOTHING
    """What the script itself does; NOTHING: the harness strikes from outside."""
    begin: Callable[[Job, int], None] | None = None
    """What the harness does, before the order."""
    undo: Callable[[Job, int], None] | None = None
    """None: nothing can undo it, and the job is over."""
    prove: Callable[[Job, int], list[str]]
    lasts: bool = True
    """The job hangs on: `--once` can be asked afterwards."""
    reason: str = ""
    """Pattern of words by which a verdict shows that it means this fault."""
    place: str = ""
    """The mark at the line of the script at which the rank stands."""

    @property
    def within_s(self) -> float:
        return PROVEN_S if self.is_proven else LIKELY_S

    def strike(self, job: Job, rank: int) -> float:
        """Plant it, and return when it began (monotonic)."""
        struck_s = time.monotonic()
        if self.begin is not None:
            self.begin(job, rank)
        if self.code is Code.NOTHING:
            return struck_s
        who = rank if self.named is not Named.STORE else NOBODY if job.store_rank is None else job.store_rank
        job.board.order(self.code, who, num_ranks=NUM_RANKS)
        while not job.board.struck_s:
            if time.monotonic() > struck_s + BEGIN_S:
                raise DrillError(f"{self.name}: no rank came to the ordered step")
            time.sleep(0.005)
        return job.board.struck_s

    def line(self) -> str:
        """Return where the rank stands, `data.py:31`; empty: nowhere that counts."""
        for path in sorted((Path(__file__).parent / "programs").glob("*.py")):
            for number, text in enumerate(path.read_text().splitlines(), 1):
                if self.place and text.endswith(f"# place: {self.place}"):
                    return f"{path.name}:{number}"
        return ""


# Planting and undoing, from outside.


def _kill(job: Job, rank: int) -> None:
    os.kill(job.pid_of(rank), signal.SIGKILL)


def _stop(job: Job, rank: int) -> None:
    os.kill(job.pid_of(rank), signal.SIGSTOP)


def _continue(job: Job, rank: int) -> None:
    os.kill(job.pid_of(rank), signal.SIGCONT)


def _stop_store(job: Job, _: int) -> None:
    if job.store_rank is None:  # else the rank stops itself at the ordered step: stopped earlier, nobody would reach it
        os.kill(job.store_pid, signal.SIGSTOP)


def _continue_store(job: Job, _: int) -> None:
    os.kill(job.store_pid, signal.SIGCONT)


def _drop(hook: str) -> Callable[[Job, int], None]:
    """Drop what a rank and the next one send each other, at the senders (output) or at the receivers (input)."""

    def begin(job: Job, rank: int) -> None:
        other = next_of(rank)
        pairs = seen.connections_between(job.pid_of(rank), job.pid_of(other))
        if not pairs:
            raise DrillError(f"ranks {rank} and {other} have no connection")
        rules = "\n".join(
            f"tcp sport {source[1]} tcp dport {target[1]} drop"
            for end, _ in pairs
            for source, target in ((end.own, end.peer), (end.peer, end.own))
        )
        for end in (rank, other):
            job.filter(
                end,
                f"add {TABLE}\ndelete {TABLE}\n{TABLE} {{\nchain between {{\n"
                f"type filter hook {hook} priority 0;\n{rules}\n}}\n}}\n",
            )

    return begin


def _pass_again(job: Job, rank: int) -> None:
    for end in (rank, next_of(rank)):
        job.filter(end, f"add {TABLE}\ndelete {TABLE}\n")


def _open_shard(job: Job, _: int) -> None:
    """Hold the writing end of the FIFO: the rank's open() returns, its read() does not."""
    job.shard = os.open(job.directory / "shard", os.O_RDWR)


def _close_shard(job: Job, _: int) -> None:
    os.close(job.shard)


def _release(job: Job, _: int) -> None:
    job.board.release()


def _outwait(job: Job, _: int) -> None:
    """The call ends by itself."""
    job.wait_until_stepping()


def next_of(rank: int) -> int:
    return (rank + 1) % NUM_RANKS


# Proofs: what the kernel shows where the fault is real. Empty: it is.


def _has_ended(job: Job, rank: int) -> list[str]:
    with contextlib.suppress(ProcessLookupError):
        if (state := seen.process_state(job.pid_of(rank))) not in ("", "Z"):
            return [f"rank {rank} is in state {state}"]
    return []


def _somebody_has_ended(job: Job, _: int) -> list[str]:
    return [] if any(not _has_ended(job, rank) for rank in range(NUM_RANKS)) else ["all ranks still run"]


def _stands_still(job: Job, *, wait_s: float = 0.3) -> list[str]:
    before = job.steps()
    time.sleep(wait_s)
    return [] if job.steps() == before else [f"steps go on: {before}, {job.steps()}"]


def _is_stopped(job: Job, rank: int) -> list[str]:
    state = seen.process_state(job.pid_of(rank))
    return [*([] if state == "T" else [f"rank {rank} is in state {state}"]), *_stands_still(job)]


def _store_is_not_served(job: Job, _: int) -> list[str]:
    pid = job.store_pid
    state, ends = seen.process_state(pid), seen.list_connections(pid)
    unread = sum(end.unread_bytes for end in ends if not end.is_listening)
    wrong = [] if state == "T" else [f"the store's owner is in state {state}"]
    return [*wrong, *([] if unread else ["the store's owner has nothing unread"]), *_stands_still(job)]


def _is_cut(job: Job, rank: int) -> list[str]:
    pairs = seen.connections_between(job.pid_of(rank), job.pid_of(next_of(rank)))
    unacked = max((end.unacked_bytes for pair in pairs for end in pair), default=0)
    return [*([] if unacked else ["nothing is unacknowledged between the two"]), *_stands_still(job)]


def _sleeps(job: Job, rank: int) -> list[str]:
    return _uses(job, rank, 0.0, 0.04)


def _computes(job: Job, rank: int) -> list[str]:
    return _uses(job, rank, 0.05, 1.5)  # of a core: other work of the machine may leave it little


def _uses(job: Job, rank: int, least: float, most: float) -> list[str]:
    pid, wait_s = job.pid_of(rank), 0.5
    before_s = seen.cpu_s(pid)
    still = _stands_still(job, wait_s=wait_s)
    used = (seen.cpu_s(pid) - before_s) / wait_s
    return [*([] if least <= used <= most else [f"rank {rank} uses {used:.2f} cores"]), *still]


_ALL = (
    Fault(name="killed", what="SIGKILL to a rank", begin=_kill, reason="SIGKILL|signal 9|killed",
          prove=_has_ended, lasts=False),
    Fault(name="exits", what="a rank calls os._exit(0)", code=Code.EXIT, reason="code 0|status 0|exited",
          prove=_has_ended, lasts=False),
    Fault(name="aborted", what="a rank leaves an all_reduce out: Gloo ends one of the others", code=Code.SKIP,
          named=Named.FIRST_DEAD, reason="SIGABRT|signal 6|abort", prove=_somebody_has_ended, lasts=False),
    Fault(name="stopped", what="SIGSTOP to a rank", begin=_stop, undo=_continue, reason="stopped", prove=_is_stopped),
    Fault(name="store-stopped", what="SIGSTOP to the store's owner, and the ranks call new_group",
          named=Named.STORE, code=Code.NEW_GROUP, begin=_stop_store, undo=_continue_store, reason="store|stopped",
          prove=_store_is_not_served),
    Fault(name="packets-dropped", what="packets between two ranks are dropped where they arrive",
          named=Named.PAIR, begin=_drop("input"), undo=_pass_again, reason=NOT_ACKNOWLEDGED,
          prove=_is_cut),
    Fault(name="packets-unsent", what="packets between two ranks are dropped where they are sent",
          named=Named.PAIR, begin=_drop("output"), undo=_pass_again, reason=NOT_ACKNOWLEDGED,
          prove=_is_cut),
    Fault(name="reads", what="a rank reads a file that does not come", code=Code.READ, is_proven=False,
          begin=_open_shard, undo=_close_shard, prove=_sleeps, place="read"),
    Fault(name="loops", what="a rank is in a Python loop", code=Code.LOOP, is_proven=False, undo=_release,
          prove=_computes, place="loop"),
    Fault(name="holds-gil", what="a rank sleeps in C and holds the GIL", code=Code.GIL, is_proven=False,
          undo=_outwait, prove=_sleeps, lasts=False, place="gil"),
    Fault(name="regex", what="a rank matches a regular expression without end", code=Code.REGEX, is_proven=False,
          prove=_computes, place="regex"),
    Fault(name="broadcast", what="a rank calls broadcast, the others all_reduce", code=Code.BROADCAST,
          is_proven=False, reason="mismatch", prove=_sleeps, place="broadcast"),
)  # fmt: skip
FAULTS = {fault.name: fault for fault in _ALL}
