"""Which nodes does `submit --exclude-suspects` leave out? Pure.

    >>> choose_exclusion([], partition=["n1", "n2"], available=["n1", "n2"], least=1)
    Exclusion(nodes=(), lines=())

Not more than MAX_SHARE of the partition, though one node of a small one, and only as many as leave room for the job: a
history that is wrong, or forged by the logs of another user, must not take a cluster away.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from allranks.why.fleet.suspects import Suspect, describe_suspect

MAX_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Exclusion:
    """What is left out."""

    nodes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    """Who is excluded, or not, and why."""


def choose_exclusion(
    suspects: Sequence[Suspect],
    *,
    partition: Collection[str],
    available: Collection[str],
    least: int,
    excluded: Collection[str] = (),
    wanted: Collection[str] = (),
) -> Exclusion:
    """Return which suspects a job leaves out, the worst first.

    Args:
        suspects: the one with the most faults first.
        partition: all nodes on which the job may run.
        available: those of them on which SLURM starts jobs.
        least: number of nodes that the job needs.
        excluded: nodes that the user leaves out already.
        wanted: nodes that the user asks for by name.
    """
    room = max(1, int(len(partition) * MAX_SHARE))
    left = set(available) - set(excluded)
    chosen, lines = list[str](), list[str]()
    for suspect in suspects:
        node = suspect.node
        if node not in left:  # of another partition, out of service, or left out by the user
            continue
        why_not = None
        if node in wanted:
            why_not = "--nodelist asks for it"
        elif len(chosen) >= room:
            why_not = f"at most {room} of the {len(partition)} nodes of the partition are excluded"
        elif len(left) - 1 < least:
            why_not = f"{len(left)} nodes are in service, and the job needs {least}"
        if why_not is None:
            chosen.append(node)
            left.remove(node)
        told = f"excluded {node}" if why_not is None else f"{node} is suspect and not excluded ({why_not})"
        lines.append(f"{told}: {describe_suspect(suspect)}")
    return Exclusion(tuple(chosen), tuple(lines))
