"""What becomes of the job after a fault: end, start again, or wait for nodes? Pure.

A fault that comes back is not cured by another start: an error of the user's code is not tried again (unless
`--restart-on-error` asks for it), a crash at the same place ends the job the second time, and the same rank the third
time, where the workers did not get on between (nodes at fault are left out; over all runs of the job:
launch.queue.exclusion). What leaving a node out cures goes on without it, where enough nodes are left; the leader's
own node cannot be left out, since the store and the verdict are there: then the job ends with the exit code that asks
for a requeue.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from allranks.guard.judged import Judged
from allranks.model.errors import Exit

MOST_FAULTS_OF_ONE = 3
"""The third fault of the same rank without progress ends the job: two may be bad luck."""


PROGRESS_S = 600.0
"""A generation that ran this long counts as progress, even without a known checkpoint."""


_NOT_RETRIED = "not restarted: a restart does not cure an error of the script; --restart-on-error restarts anyway"


class Move(StrEnum):
    """What the leader does next."""

    END = "end"
    RESTART = "restart"
    PAUSE = "pause"
    """Wait for nodes, then start again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """What tells one crash from another."""

    cause: str
    ranks: tuple[int, ...]
    step: int | None
    what: str
    """Message or traceback."""

    @classmethod
    def of(cls, judged: Judged, steps: Mapping[int, int]) -> Crash:
        """Return what the guard came to as a crash; `steps` is how far each rank had come."""
        first = judged.findings[0] if judged.findings else None
        return cls(
            cause=first.cause if first else "",
            ranks=judged.ranks,
            step=min((steps[rank] for rank in judged.ranks if rank in steps), default=None),
            what=first.message if first else "",
        )


@dataclass(slots=True, kw_only=True)
class History:
    """What has happened to the job so far."""

    restarts_left: int
    retries_errors: bool = False
    """An error of the user's code is retried like any fault, as often as there are restarts (`--restart-on-error`)."""
    crashes: list[Crash] = field(default_factory=list)
    faults: dict[int, int] = field(default_factory=dict)
    """How often each rank was the culprit since the last checkpoint."""
    checkpoint: int | None = None
    """Step of the newest one at the last fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The move, and why where it is not the obvious one."""

    move: Move
    exit_code: int = Exit.OK
    without: frozenset[int] = frozenset()
    """Seats that are left out from now on."""
    is_crash_loop: bool = False
    note: str = ""
    """One line for people."""


def decide(
    judged: Judged,
    crash: Crash,
    *,
    history: History,
    seats: Mapping[int, str],
    culprits: Collection[int],
    leader_seat: int,
    min_nodes: int,
    checkpoint: int | None = None,
    ran_s: float = 0.0,
) -> Decision:
    """Return the next move, and write the fault into the history.

    Args:
        judged: what the guard came to.
        crash: the same as something to compare.
        history: of the job.
        seats: the nodes that are here, by their index in the job, and their names.
        culprits: seats of the nodes at fault, where nodes are.
        leader_seat: the leader's own.
        min_nodes: fewer cannot train.
        checkpoint: step of the newest one.
        ran_s: how long this generation of workers has run.
    """
    is_again = crash in history.crashes
    history.crashes.append(crash)
    if checkpoint != history.checkpoint or ran_s >= PROGRESS_S:
        history.faults.clear()
        history.checkpoint = checkpoint
    for rank in judged.ranks:
        history.faults[rank] = history.faults.get(rank, 0) + 1
    is_error = not judged.is_retryable
    if is_error and not (history.retries_errors and judged.exit_code == Exit.USER_CODE):
        return Decision(move=Move.END, exit_code=judged.exit_code, note=_NOT_RETRIED if history.restarts_left else "")
    if is_again and not is_error and crash.step is not None:
        return Decision(move=Move.END, exit_code=judged.exit_code, is_crash_loop=True)
    if history.restarts_left <= 0:
        return Decision(move=Move.END, exit_code=judged.exit_code)
    worn = next((rank for rank in judged.ranks if history.faults[rank] >= MOST_FAULTS_OF_ONE), None)
    if worn is not None and not judged.cures and not is_error:
        note = f"rank {worn} failed {history.faults[worn]} times without progress; a restart does not cure it"
        return Decision(move=Move.END, exit_code=Exit.SETUP, note=note)
    without = frozenset(culprits) if judged.cures else frozenset()
    if leader_seat in without:
        note = f"{seats[leader_seat]} runs the leader, which the job needs: the job must start again on other nodes"
        return Decision(move=Move.END, exit_code=Exit.NODE_FAULT, note=note)
    history.restarts_left -= 1
    is_enough = len(seats.keys() - without) >= min_nodes
    return Decision(move=Move.RESTART if is_enough else Move.PAUSE, without=without)
