"""The place of one process among all processes of its job. Data only; `model/identity.py` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from allranks.model.setting import Setting


class LaunchLevel(StrEnum):
    """What a launcher starts on a node."""

    RANK = "rank"
    """Every rank; one agent a node where it is told to start one process a node."""
    NODE = "node"
    """One process, whose index counts nodes; it starts the ranks of its node."""


class Launcher(StrEnum):
    """What started this process, and so whose variables were believed."""

    SLURM = "slurm"
    FLUX = "flux"
    LSF = "lsf"
    PALS = "pals"
    MPI = "mpi"
    AIHC = "aihc"
    PAI = "pai"
    LWS = "leaderworkerset"
    VOLCANO = "volcano"
    PYTORCHJOB = "pytorchjob"
    TRAINER = "kubeflow-trainer"
    INDEXED_JOB = "indexed-job"
    SKYPILOT = "skypilot"
    DSTACK = "dstack"
    SAGEMAKER = "sagemaker"
    TORCHRUN = "torchrun"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Place of one process among all that were started with it: agents under `allranks run`, else workers."""

    launcher: Launcher
    level: LaunchLevel = LaunchLevel.RANK
    """NODE: rank and world_size count nodes."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this node; other nodes may have another number."""
    node_index: int
    """SLURM_NODEID, GROUP_RANK, JOB_COMPLETION_INDEX, or computed for MPI. Torchrun's order is not SLURM's."""
    num_nodes: int
    num_job_nodes: int
    """Nodes that the scheduler gave to the whole job; a step may use fewer, a batch script runs on one."""
    job_id: str | None
    """SLURM's, `<array job>_<task>` in an array, the leader's in a heterogeneous job; else the launcher's."""
    step_id: str | None
    attempt: int
    """How often the job was requeued, or torchrun's workers restarted; 0 the first time."""
    node_name: str | None  # SLURM's, need not be the hostname
    hosts: tuple[str, ...]
    """Nodes in the step's order; () where the launcher does not say."""
    tasks_per_node: tuple[int, ...]
    """Ranks of each node, by node_index; () where the launcher does not say."""
    processes: str | None = None
    """Processes on each node that the launcher asks for: a number, auto, gpu or cpu."""
    master: tuple[str, int | None] | None
    """Where the launcher, or MASTER_ADDR and MASTER_PORT, say that node 0 is: a hint, the leader announces itself."""
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    """Warnings, a line each."""

    @property
    def is_placed(self) -> bool:
        """Whether a launcher gave this process its place, so that no flag has to; torchrun's workers have an agent."""
        return self.launcher not in (Launcher.NONE, Launcher.TORCHRUN)

    @property
    def is_alone(self) -> bool:
        """Whether this process is the whole job, unless it starts others."""
        return self.launcher is Launcher.NONE or (self.level is LaunchLevel.NODE and self.num_nodes == 1)

    def name_job(self, given: str | None, *, point: tuple[str, int | None] | None, otherwise: str) -> str:
        """Return the job's name, the same on all its nodes: SLURM's, with the step if it is not the first, since steps
        of one job must not meet; else the given one, the launcher's, or the point where the nodes meet."""
        if self.launcher is Launcher.SLURM and self.job_id is not None:
            return self.job_id if self.step_id in (None, "0") else f"{self.job_id}.{self.step_id}"
        if given or (self.is_placed and self.job_id is not None):
            return given or str(self.job_id)
        return f"{point[0]}-{point[1] or 0}" if point else otherwise

    def source_of(self, name: str) -> str:
        """Return the variable that a value comes from."""
        return next((setting.source for setting in self.settings if setting.name == name), name)
