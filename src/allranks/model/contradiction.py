"""Contradictory starts as findings: AR501 if variables disagree, AR502 if a launcher runs in each of several tasks.
Pure; call it with the environment before anything waits.

    IdentityError("RANK=0 but SLURM_PROCID=3; unset RANK")  ->  finding AR501 slurm-env, fix "unset RANK"
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

from allranks.model.errors import IdentityError
from allranks.model.finding import Confidence, Finding, Severity
from allranks.model.world import Launcher, LaunchLevel, World

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# The labels of causes, which this floor cannot import; a test compares them.
SLURM_ENV = "AR501 slurm-env"
SPAWN_INSIDE_SRUN = "AR502 spawn-inside-srun"

_STARTERS = {"slurm": "srun", "mpi": "mpirun", "torchrun": "the launcher"}


class NestedStartError(IdentityError):
    """A launcher runs in each of several tasks, or processes that a task started take its place."""


@contextlib.contextmanager
def finding_of_refusals(node: str | None) -> Iterator[None]:
    """Give every IdentityError raised inside its finding.

    Args:
        node: where this process is, if that is known: the culprit.
    """
    try:
        yield
    except IdentityError as exc:
        # `what was seen; what to do`, as all of them are written.
        what, *cure = re.split(r"; |, (?=allranks needs one a node)", str(exc), maxsplit=1)
        exc.finding = Finding(
            cause=SPAWN_INSIDE_SRUN if isinstance(exc, NestedStartError) else SLURM_ENV,
            severity=Severity.FAIL,
            confidence=Confidence.CERTAIN,
            node=node or None,
            message=what,
            fix=cure[0] if cure else None,
        )
        raise


def check_not_spawned(world: World) -> None:
    """Refuse a process of multiprocessing that would take its parent's rank among several; only for such a process.

    Raises:
        NestedStartError: there are several ranks.
    """
    if world.world_size > 1:
        starter = _STARTERS.get(world.launcher, world.launcher)
        said = {setting.name: f"{setting.source}={setting.value}" for setting in world.settings}
        with finding_of_refusals(world.node_name):
            raise NestedStartError(
                f"multiprocessing (mp.spawn) started this process inside the task that {starter} "
                f"started as {said['rank']} of {said['world_size']}: every process that it starts there would be that "
                "rank; start one task per rank and call the training function directly, without mp.spawn"
            )


def check_someone_starts_ranks(world: World) -> None:
    """Refuse a rank that would be alone, although the launcher asks for several on its node, or there are more nodes.

    Raises:
        IdentityError: nobody starts the other ranks.
    """
    with finding_of_refusals(world.node_name):
        if world.level is LaunchLevel.NODE and world.num_nodes > 1 and world.processes not in (None, "1"):
            raise IdentityError(
                f"{world.launcher} starts one process a node and asks for {world.source_of('processes')}="
                f"{world.processes}; start them with: allranks run SCRIPT"
            )
        if world.launcher is Launcher.NONE and world.num_job_nodes > 1:
            raise IdentityError(f"{world.notes[0]}; on this one alone: allranks run --standalone")


def check_no_launcher_inside(env: Mapping[str, str]) -> None:
    """Refuse what another launcher started inside a worker of `allranks run`.

    Raises:
        NestedStartError: WORLD_SIZE is not the world that the agents made.
    """
    counts = re.findall(r"\+([0-9]+)(?:,|$)", env.get("ALLRANKS_MEMBERS", ""))
    size, said = sum(map(int, counts)), env.get("WORLD_SIZE")
    if counts and said is not None and said != str(size):
        with finding_of_refusals(env.get("ALLRANKS_NODE")):
            raise NestedStartError(
                f"WORLD_SIZE={said} but ALLRANKS_MEMBERS has {size} ranks: another launcher runs inside a worker of "
                "allranks run; start the script directly with allranks run, without torchrun in between"
            )
