"""On which nodes does a check run? In an allocation, on its nodes; else on nodes that SLURM allocates; else here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from allranks.host.run import run_command
from allranks.host.slurm import NodeState
from allranks.host.slurm_command import refuse_without_cluster, require_slurm
from allranks.model.errors import AllranksError, UsageError
from allranks.model.hostlist import expand_hosts, fold_hosts

SINFO_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The flags; None if a flag was not given."""

    nodes: int | None = None
    partition: str | None = None
    nodelist: str | None = None
    gpus_per_node: int | None = None

    @property
    def is_any(self) -> bool:
        """Whether the flags ask for nodes of a cluster."""
        return self.nodes is not None or bool(self.partition or self.nodelist)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one srun starts the members."""

    num_nodes: int
    job_id: str | None = None
    """Inside this allocation; None: srun asks for a new one."""
    names: tuple[str, ...] = ()
    """Empty if SLURM chooses the nodes."""
    pinned: tuple[str, ...] = ()
    """Nodes that srun must use; fewer than num_nodes if SLURM adds some."""
    partition: str | None = None
    gpus_per_node: int | None = None

    def describe(self) -> str:
        """`node[01-03]`, or `3 nodes of partition main`."""
        if self.names:
            return fold_hosts(self.names)
        of = f" of partition {self.partition}" if self.partition else ""
        return f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''}{of}"


def choose_in_job(asked: Asked, job_id: str, nodes: Sequence[str], *, verb: str) -> Place:
    """Choose among the nodes of the allocation that this process is in.

    Raises:
        UsageError: flags ask for what the allocation does not have.
    """
    where = f"{verb}: this is inside job {job_id}, which has {fold_hosts(nodes)}"
    if asked.partition:
        raise UsageError(f"{where}: remove --partition, or run it outside the job")
    chosen = _expand(asked, verb=verb) or tuple(nodes)
    if strangers := [name for name in chosen if name not in nodes]:
        raise UsageError(f"{where}, not {fold_hosts(strangers)} (--nodelist)")
    if asked.nodes is not None and asked.nodes > len(nodes):
        raise UsageError(f"{where}: expected at most {len(nodes)} for --nodes, got {asked.nodes}")
    if asked.nodelist is None:
        chosen = chosen[: asked.nodes]
    elif asked.nodes is not None and asked.nodes != len(chosen):
        raise UsageError(
            f"{verb}: --nodes {asked.nodes} and --nodelist {asked.nodelist} ({len(chosen)} nodes) disagree"
        )
    return Place(
        num_nodes=len(chosen), job_id=job_id, names=chosen, pinned=chosen, gpus_per_node=asked.gpus_per_node or None
    )


def choose_in_cluster(asked: Asked, *, verb: str, list_idle: Callable[[str], Sequence[NodeState]]) -> Place:
    """Choose the nodes to request from SLURM: the named ones, else that number, else all idle nodes.

    Args:
        asked: the flags.
        verb: who asks, for messages.
        list_idle: the nodes of a partition; called where the flags name neither nodes nor their number.
    Raises:
        UsageError: flags contradict each other.
        AllranksError: no node is idle.
    """
    pinned = _expand(asked, verb=verb)
    gpus = asked.gpus_per_node or None
    if pinned and asked.nodes is not None and asked.nodes < len(pinned):
        raise UsageError(
            f"{verb}: --nodes {asked.nodes} is less than --nodelist {asked.nodelist} ({len(pinned)} nodes)"
        )
    if pinned or asked.nodes is not None:
        num_nodes = asked.nodes or len(pinned)
        names = pinned if num_nodes == len(pinned) else ()
        return Place(num_nodes=num_nodes, names=names, pinned=pinned, partition=asked.partition, gpus_per_node=gpus)
    assert asked.partition
    nodes = list_idle(asked.partition)
    idle = tuple(node.name for node in nodes if node.state == "idle")
    if not nodes:
        raise UsageError(f"{verb}: --partition {asked.partition}: SLURM has no such partition; sinfo lists them")
    if not idle:
        states = ", ".join(sorted({node.state for node in nodes}))
        raise AllranksError(
            f"{verb}: no node of partition {asked.partition} is idle (they are {states}); choose some with --nodelist, "
            "or wait for them with --nodes N --queue-timeout DURATION"
        )
    return Place(num_nodes=len(idle), names=idle, pinned=idle, partition=asked.partition, gpus_per_node=gpus)


def find_default_partition(env: Mapping[str, str]) -> str | None:
    """Return SLURM's default partition; None if there is none.

    Raises:
        UsageError: SLURM does not answer here.
        SetupError: this machine belongs to no cluster.
    """
    require_slurm("sinfo", env)
    said = run_command(["sinfo", "--noheader", "--format=%P"], deadline_s=SINFO_S, env=env)
    if said.rc != 0:
        refuse_without_cluster("sinfo", said.stderr)
        words = re.sub(r"^sinfo: (error: |fatal: )?", "", said.words)
        raise UsageError(f"sinfo: {words}; to examine only this machine: --standalone")
    return parse_default_partition(said.stdout)


def parse_default_partition(text: str) -> str | None:
    """Read `sinfo -o %P`: the default one ends with `*`.

    >>> parse_default_partition("gpu\\nmain*\\n")
    'main'
    """
    return next((line.strip()[:-1] for line in text.splitlines() if line.strip().endswith("*")), None)


def read_promised_gpus(env: Mapping[str, str]) -> dict[str, int]:
    """Return how many GPUs SLURM configures per node; empty if it does not say."""
    said = run_command(["sinfo", "--noheader", "--Node", "--format=%N %G"], deadline_s=SINFO_S, env=env)
    return parse_promised_gpus(said.stdout) if said.rc == 0 else {}


def parse_promised_gpus(text: str) -> dict[str, int]:
    """Read `sinfo -N -o '%N %G'`, with types, sockets and other resources in it.

    >>> parse_promised_gpus("n1 gpu:a100:4(S:0-1),gpu:t4:2,nic:1\\nn2 (null)\\n")
    {'n1': 6, 'n2': 0}
    """
    found = {}
    for line in text.splitlines():
        name, _, resources = line.strip().partition(" ")
        if name:
            found[name] = sum(int(n) for n in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", resources.strip()))
    return found


def read_cluster_name(env: Mapping[str, str]) -> str | None:
    """Return SLURM's name of the cluster."""
    said = run_command(["scontrol", "show", "config"], deadline_s=SINFO_S, env=env)
    found = re.search(r"^ClusterName\s*=\s*(\S+)", said.stdout, re.MULTILINE)
    return found[1] if said.rc == 0 and found else None


def _expand(asked: Asked, *, verb: str) -> tuple[str, ...]:
    if not asked.nodelist:
        return ()
    names = expand_hosts(asked.nodelist)
    if len(set(names)) < len(names):
        raise UsageError(f"{verb}: --nodelist {asked.nodelist}: expected each node once")
    return tuple(names)
