"""Which nodes has this job found faulty, over all its runs, and which of them does it leave out? `culprits.json`.

    culprits = remember(read_culprits(run_dir), ["node03"], cause="AR012", attempt=2)
    write_culprits(run_dir, culprits)
    is_hopeless(culprits, ["node03"])        # the third time: 78

The file lies in the job's directory, above its attempts, so a run that SLURM starts again finds it. Only the leader, or
whoever speaks for a lost one, writes it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from allranks.model.hostlist import fold_hosts

FILE = "culprits.json"
MOST_TIMES = 3
"""The same culprit so often, and starting once more is no cure."""


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """A node that was at fault."""

    node: str
    cause: str
    """The latest, `AR012 node-failure`."""
    attempts: tuple[int, ...]
    """In which runs of the job, each once: a run that restarts five times around one node blames it once."""

    @property
    def count(self) -> int:
        """In how many runs."""
        return len(self.attempts)


def remember(culprits: Sequence[Culprit], nodes: Iterable[str], *, cause: str, attempt: int) -> tuple[Culprit, ...]:
    """Return the memory with what one run found out; the order is that of the first time.

    Args:
        culprits: what was known.
        nodes: who was at fault.
        cause: the finding's.
        attempt: which run of the job, SLURM_RESTART_COUNT.
    """
    known = {culprit.node: culprit for culprit in culprits}
    for node in nodes:
        before = known[node].attempts if node in known else ()
        known[node] = Culprit(node=node, cause=cause, attempts=tuple(sorted({*before, attempt})))
    return tuple(known.values())


def is_hopeless(culprits: Sequence[Culprit], nodes: Iterable[str]) -> bool:
    """Whether one of these nodes has been the culprit so often that starting again is no cure.

    A node that is left out cannot come to that: it is one that the job could not do without.
    """
    now = set(nodes)
    return any(culprit.node in now and culprit.count >= MOST_TIMES for culprit in culprits)


def choose_excluded(
    culprits: Sequence[Culprit], *, nodes: Sequence[str], needed: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which culprits are left out, and which the job cannot do without.

    SLURM lets a job that leaves out too much wait for ever, so the worst are left out first, as far as enough remain.

    Args:
        culprits: who was at fault.
        nodes: all that the job could run on.
        needed: how many nodes it needs.
    """
    worst_first = sorted(
        (each for each in culprits if each.node in nodes), key=lambda each: (-each.count, -each.attempts[-1])
    )
    spare = max(0, len(set(nodes)) - needed)
    return tuple(each.node for each in worst_first[:spare]), tuple(each.node for each in worst_first[spare:])


def describe_return(culprits: Sequence[Culprit], *, attempt: int) -> str:
    """Return why this run of the job began; empty where no node ended the one before.

    >>> describe_return([Culprit(node="node01", cause="AR012 node-failure", attempts=(0,))], attempt=1)
    'run 2 of this job: the previous run lost node01 (AR012 node-failure); resuming from its checkpoints'
    """
    last = [culprit for culprit in culprits if attempt - 1 in culprit.attempts]
    if not last:
        return ""
    names = fold_hosts([culprit.node for culprit in last])
    return (
        f"run {attempt + 1} of this job: the previous run lost {names} ({last[0].cause}); resuming from its checkpoints"
    )


def read_culprits(run_dir: Path) -> tuple[Culprit, ...]:
    """Return what the job remembers; nothing where the file is missing or cannot be read.

    Args:
        run_dir: the job's directory, above its attempts.
    """
    try:
        return msgspec.json.decode((run_dir / FILE).read_bytes(), type=tuple[Culprit, ...])
    except (OSError, msgspec.DecodeError):
        return ()


def write_culprits(run_dir: Path, culprits: Sequence[Culprit]) -> None:
    """Write the memory whole; a full disk does not stop a job.

    Args:
        run_dir: the job's directory, above its attempts.
        culprits: all of them.
    """
    draft = run_dir / f".{FILE}.{os.getpid()}"
    with contextlib.suppress(OSError):
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(culprits)) + b"\n")
        draft.replace(run_dir / FILE)
