"""Shared by several verbs: read the cluster file, the environment and this machine, and make the plan."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.config.file import LoadedCluster, find_cluster_file, read_cluster
from allranks.host.node_files import read_node_files
from allranks.model.errors import AllranksError
from allranks.model.identity import NODE_FILES, GivenFlags, check_one_agent_per_node, world_from_env

if TYPE_CHECKING:
    from allranks.launch.plan import JobPlan, Request


def load_cluster(explicit: Path | None) -> LoadedCluster:
    """Read the cluster file, or return the defaults if there is none.

    Raises:
        ConfigError: it cannot be read or is wrong.
    """
    path = find_cluster_file(explicit, os.environ, Path())
    return LoadedCluster() if path is None else read_cluster(path)


def plan_here(request: Request, *, cluster_file: Path | None, job: str) -> JobPlan:
    """Return what this process would do as an agent.

    Raises:
        AllranksError: flags, environment, cluster.toml and machine do not fit together.
    """
    from allranks.host.node import read_facts
    from allranks.launch.plan import plan_job

    given = GivenFlags(
        node_index=request.node_rank, num_nodes=request.max_nodes, has_leader=request.endpoint is not None
    )
    files = read_node_files(os.environ, NODE_FILES.values())
    world = world_from_env({} if request.standalone else os.environ, given=given, files=files)
    check_one_agent_per_node(world)
    loaded = load_cluster(cluster_file)
    return plan_job(request, world, loaded.cluster, read_facts(os.environ), job=job, origin=loaded.origins)


def command_in_lab(arguments: Sequence[str]) -> str | None:
    """Return the command that runs allranks with these arguments in a lab that is up on this machine; None without."""
    from allranks.lab.hosts import find_inits
    from allranks.lab.lab import DEFAULT_NAME, Lab

    with contextlib.suppress(AllranksError, OSError, ValueError):
        names = [path.name for path in Lab().dir.parent.glob("*/")]
        for name in sorted(names, key=lambda one: (one != DEFAULT_NAME, one)):
            lab = Lab(name)
            if lab.planned_hosts() and (node := lab.controller().name) in find_inits(lab.dir):
                flag = [] if name == DEFAULT_NAME else ["--name", name]
                return shlex.join(["allranks", "lab", "exec", *flag, node, "--", "allranks", *arguments])
    return None
