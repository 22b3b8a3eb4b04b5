"""The place of one process among all processes of its job. Data only; `model/identity.py` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from allranks.model.setting import Setting


class Launcher(StrEnum):
    """What started this process, and so whose variables were believed."""

    SLURM = "slurm"
    TORCHRUN = "torchrun"
    MPI = "mpi"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Place of one process among all that were started with it: agents under `allranks run`, else workers."""

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this node; other nodes may have another number."""
    node_index: int
    """SLURM_NODEID, GROUP_RANK, or computed for MPI. Torchrun's order of nodes is not SLURM's."""
    num_nodes: int
    num_job_nodes: int
    """Nodes that the scheduler gave to the whole job; a step may use fewer, a batch script runs on one."""
    job_id: str | None
    """SLURM's, `<array job>_<task>` in an array, the leader's in a heterogeneous job; else torchrun's run id."""
    step_id: str | None
    attempt: int
    """How often the job was requeued, or torchrun's workers restarted; 0 the first time."""
    node_name: str | None  # SLURM's, need not be the hostname
    hosts: tuple[str, ...]
    """Nodes in the step's order; () where the launcher does not say."""
    tasks_per_node: tuple[int, ...]
    """Ranks of each node, by node_index; () where the launcher does not say."""
    master: tuple[str, int | None] | None
    """What MASTER_ADDR and MASTER_PORT say: a hint, since the leader announces itself."""
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    """Warnings, a line each."""
