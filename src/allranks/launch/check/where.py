"""On which nodes does a check run? In an allocation, on its nodes; else on nodes that SLURM allocates; else here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allranks.host.slurm import NodeState
from allranks.model.errors import AllranksError, UsageError
from allranks.model.hostlist import expand_hosts, fold_hosts
from allranks.report.text import count_of


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
class SrunNodes:
    """Where one srun starts the members."""

    num_nodes: int
    job_id: str | None = None
    """Inside this allocation; None: srun asks for a new one."""
    pinned: tuple[str, ...] = ()
    """Nodes that srun must use; fewer than num_nodes if SLURM adds some."""
    partition: str | None = None
    gpus_per_node: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All nodes; empty if SLURM chooses some."""
        return self.pinned if len(self.pinned) == self.num_nodes else ()

    def describe(self) -> str:
        """`node[01-03]`, or `3 nodes of partition main`."""
        if self.names:
            return fold_hosts(self.names)
        of = f" of partition {self.partition}" if self.partition else ""
        return f"{count_of(self.num_nodes, 'node')}{of}"


def choose_in_job(asked: Asked, job_id: str, nodes: Sequence[str], *, verb: str) -> SrunNodes:
    """Choose among the nodes of the allocation that this process is in.

    Raises:
        UsageError: flags ask for what the allocation does not have.
    """
    where = f"{verb}: this is inside job {job_id}, which has {fold_hosts(nodes)}"
    if asked.partition:
        raise UsageError(f"{where}: remove --partition, or run it outside the job")
    named = _expand(asked, verb=verb)
    if strangers := [name for name in named if name not in nodes]:
        raise UsageError(f"{where}, not {fold_hosts(strangers)} (--nodelist)")
    if asked.nodes is not None and asked.nodes > len(nodes):
        raise UsageError(f"{where}: expected at most {len(nodes)} for --nodes, got {asked.nodes}")
    if named and asked.nodes not in (None, len(named)):
        raise UsageError(f"{verb}: --nodes {asked.nodes} and --nodelist {asked.nodelist} ({len(named)} nodes) disagree")
    chosen = named or tuple(nodes[: asked.nodes])
    return SrunNodes(num_nodes=len(chosen), job_id=job_id, pinned=chosen, gpus_per_node=asked.gpus_per_node or None)


def choose_in_cluster(asked: Asked, *, verb: str, list_idle: Callable[[str], Sequence[NodeState]]) -> SrunNodes:
    """Choose the nodes to request from SLURM: the named ones, else that number, else all idle nodes.

    Args:
        list_idle: the nodes of a partition; called where the flags name neither nodes nor their number.
    Raises:
        UsageError: flags contradict each other.
        AllranksError: no node is idle.
    """
    pinned = _expand(asked, verb=verb)
    if pinned and asked.nodes is not None and asked.nodes < len(pinned):
        raise UsageError(
            f"{verb}: --nodes {asked.nodes} is less than --nodelist {asked.nodelist} ({len(pinned)} nodes)"
        )
    if not pinned and asked.nodes is None:
        assert asked.partition
        nodes = list_idle(asked.partition)
        pinned = tuple(node.name for node in nodes if node.state == "idle")
        if not nodes:
            raise UsageError(f"{verb}: --partition {asked.partition}: SLURM has no such partition; sinfo lists them")
        if not pinned:
            states = ", ".join(sorted({node.state for node in nodes}))
            raise AllranksError(
                f"{verb}: no node of partition {asked.partition} is idle (they are {states}); choose some with "
                "--nodelist, or wait for them with --nodes N --queue-timeout DURATION"
            )
    return SrunNodes(
        num_nodes=asked.nodes or len(pinned),
        pinned=pinned,
        partition=asked.partition,
        gpus_per_node=asked.gpus_per_node or None,
    )


def _expand(asked: Asked, *, verb: str) -> tuple[str, ...]:
    if not asked.nodelist:
        return ()
    names = expand_hosts(asked.nodelist)
    if len(set(names)) < len(names):
        raise UsageError(f"{verb}: --nodelist {asked.nodelist}: expected each node once")
    return tuple(names)
