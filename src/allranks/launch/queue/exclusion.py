"""Which nodes has this job found faulty, over all its attempts, and which of them does it exclude? `culprits.json`.

    culprits = remember(run_dir, ["node03"], cause="AR012", attempt=2)
    is_hopeless(culprits, ["node03"])        # after the third attempt: exit code 78

The file is in the job's directory, above its attempts, so an attempt that SLURM starts later finds it. Only the leader,
or the agent that acts for a lost leader, writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from allranks.host.slurm import JobState
from allranks.host.slurm_job import OwnJob
from allranks.model.hostlist import expand_hosts, fold_hosts
from allranks.report.rundir import write_whole

FILE = "culprits.json"
MOST_TIMES = 3
"""After this many attempts with the same culprit, another start does not help."""


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """A node that was at fault."""

    node: str
    cause: str
    """Of the latest attempt, `AR012 node-failure`."""
    attempts: tuple[int, ...]
    """Attempts in which the node was at fault, each once: an attempt that restarts five times counts once."""


def remember(run_dir: Path, nodes: Iterable[str], *, cause: str, attempt: int) -> tuple[Culprit, ...]:
    """Add the culprits of one attempt to the job's record, atomically, and return it; a full disk does not stop a job.

    Args:
        attempt: number of the attempt, SLURM_RESTART_COUNT.
    Returns:
        All culprits, in the order of their first fault.
    """
    known = {culprit.node: culprit for culprit in read_culprits(run_dir)}
    for node in nodes:
        before = known[node].attempts if node in known else ()
        known[node] = Culprit(node=node, cause=cause, attempts=tuple(sorted({*before, attempt})))
    culprits = tuple(known.values())
    write_whole(run_dir / FILE, msgspec.json.format(msgspec.json.encode(culprits)) + b"\n")
    return culprits


def is_hopeless(culprits: Sequence[Culprit], nodes: Collection[str]) -> bool:
    """Whether one of these nodes was the culprit so often that another start does not help.

    An excluded node cannot reach that number; only a node that the job needs can.
    """
    return any(culprit.node in nodes and len(culprit.attempts) >= MOST_TIMES for culprit in culprits)


def plan_requeue(
    state: JobState, *, job: OwnJob, culprits: Sequence[Culprit], partition: Sequence[str], min_nodes: int
) -> tuple[dict[str, str], str]:
    """Return what a job requests when it waits again, under scontrol's names, and the same as text for the user.

    If the user named nodes, only these are used. A job that excludes too many nodes would wait forever, so the worst
    culprits are excluded first, as long as enough nodes remain.

    Args:
        state: the job, as SLURM reports it.
        job: the same job, from its own environment.
    """
    asked = expand_hosts(state.asked_nodes) if state.asked_nodes else []
    own = expand_hosts(state.excluded_nodes) if state.excluded_nodes else []
    closed = set(own) - {each.node for each in culprits}  # nodes that the user excluded: SLURM assigns none of them
    pool = [name for name in dict.fromkeys(asked if len(asked) >= job.num_nodes else partition) if name not in closed]
    by_guilt = sorted(culprits, key=lambda each: (-len(each.attempts), -each.attempts[-1]))
    worst_first = [each.node for each in by_guilt if each.node in pool]
    spare = max(0, len(pool) - min_nodes)
    chosen, stay = worst_first[:spare], worst_first[spare:]
    out = [name for name in pool if name in chosen]
    values = {}
    if set(out) - set(own):
        values["ExcNodeList"] = fold_hosts(list(dict.fromkeys([*own, *out])))
    if set(out) & set(asked):
        values["ReqNodeList"] = fold_hosts([name for name in asked if name not in out])
    num_nodes = min(job.num_nodes, len(pool) - len(out))
    if num_nodes != state.num_nodes:
        values["NumNodes"] = str(num_nodes)
    parts = [f"without {fold_hosts(out)}"] if out else []
    if num_nodes != job.num_nodes:
        parts.append(f"on {num_nodes} nodes instead of {job.num_nodes}")
    if stay:
        parts.append(f"{fold_hosts(stay)} is not excluded, because the job needs {min_nodes} of {len(pool)} nodes")
    return values, ", ".join(parts)


def describe_return(culprits: Sequence[Culprit], *, attempt: int) -> str:
    """Return why this attempt of the job began; empty if no node ended the one before.

    >>> describe_return([Culprit(node="node01", cause="AR012 node-failure", attempts=(0,))], attempt=1)
    'run 2 of this job: the previous run lost node01 (AR012 node-failure); resuming from its checkpoints'
    """
    last = [culprit for culprit in culprits if attempt - 1 in culprit.attempts]
    lost = f"the previous run lost {fold_hosts([each.node for each in last])} ({last[0].cause})" if last else ""
    return f"run {attempt + 1} of this job: {lost}; resuming from its checkpoints" if lost else ""


def read_culprits(run_dir: Path) -> tuple[Culprit, ...]:
    """Return the job's record; empty if the file is missing or cannot be read."""
    try:
        return msgspec.json.decode((run_dir / FILE).read_bytes(), type=tuple[Culprit, ...])
    except (OSError, msgspec.DecodeError):
        return ()
