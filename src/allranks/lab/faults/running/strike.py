"""What is a strike, a fault in a running job? One class: what it does, when, and the expected outcome of the job.

    class WorkerKilled(Strike, name="worker-killed", cause="AR407"):
        \"\"\"SIGKILL to one worker.\"\"\"

        @classmethod
        def strike(cls, scene: Scene, target: Target) -> float:
            os.kill(target.worker_pid(scene, scene.node.name), signal.SIGKILL)

It is also a `Fault`: before the job starts, `inject` prepares what the strike needs; `heal` removes it, and undoes the
strike. The rules of `faults/fault.py` apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from allranks.lab.faults.fault import Expected, Fault, FaultPlace, LabScene, TrueCulprit
from allranks.lab.faults.running.target import DrilledJob


class Launch(StrEnum):
    """How the job is started."""

    STEP = "srun"
    BATCH = "sbatch"
    """With `allranks submit`: for SLURM's own actions on jobs."""


class NextLeader(StrEnum):
    """Who leads the job after a strike."""

    NONE = "none"
    """The same node."""
    LOST = "lost"
    """Another node, which gives the verdict; whatever the lost leader says is said on the lost side."""
    RESIGNED = "resigned"
    """Another node, to which the leader hands over after its verdict on its own node."""


class Strike(Fault):
    """One kind of strike."""

    severity: ClassVar[Expected] = Expected.RESUMED
    """FAIL: the job ends. RESUMED: it continues and ends with 0. SURVIVED: nothing is reported."""
    place: ClassVar[FaultPlace] = FaultPlace.NOT_FIRST
    """Without a login node, the first node has SLURM's controller and the job's srun, beside the leader."""
    verdict_s: ClassVar[float | None] = None
    """Upper bound of the time from the strike to the printed verdict."""
    next_step_s: ClassVar[float | None] = None
    """Upper bound of the time from the strike to the next optimizer step."""
    exit_codes: ClassVar[tuple[int, ...]] = ()
    """Expected exit codes of a job that ends; empty: any except 0."""
    nodes: ClassVar[str] = "4:6"
    """MIN:MAX."""
    run_flags: ClassVar[tuple[str, ...]] = ()
    """Options of `allranks run`, in addition to those of all drills."""
    arguments: ClassVar[tuple[str, ...]] = ()
    """Of the training program."""
    submit_flags: ClassVar[tuple[str, ...]] = ()
    """Options of `allranks submit`."""
    guard: ClassVar[Mapping[str, float]] = {}
    """Values of [guard] that differ from those of all drills."""
    launch: ClassVar[Launch] = Launch.STEP
    watch_s: ClassVar[float] = 60.0
    """How long to wait for the expected outcome."""
    needs_login: ClassVar[bool] = False
    """Whether the lab must have a login node: without one, the job loses SLURM with its first node."""
    most_nodes: ClassVar[int | None] = None
    """Number of nodes, if not all."""
    is_needed_again: ClassVar[bool] = False
    """Whether all nodes must be in the job again afterwards."""
    num_lost: ClassVar[int | None] = None
    """Number of nodes without which the job must go on; None: any."""
    succession: ClassVar[NextLeader | None] = NextLeader.NONE
    """Who must lead afterwards; None: anyone."""
    is_requeued: ClassVar[bool] = False
    """Whether SLURM must start the job again; otherwise it must not."""
    together_s: ClassVar[float] = 0.1
    """Findings that are recorded within this time from the first one are one verdict."""
    has_ranks: ClassVar[bool] = True
    """Whether a verdict must also name the culprit's ranks."""
    end_states: ClassVar[tuple[str, ...]] = ("COMPLETED",)
    """SLURM's states of a batch job that allranks ended with 0."""
    has_baseline: ClassVar[bool] = False
    """Whether plain torchrun runs with it, as the example of its class."""

    @classmethod
    def begin(cls, scene: LabScene, target: DrilledJob) -> None:
        """Do what must have happened to the job before the strike; all ranks train, also afterwards.

        Raises:
            SetupError: it could not be done.
        """

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Strike; all ranks train at this time.

        Returns:
            When it happened, seconds since the epoch.
        Raises:
            SetupError: it could not be done.
        """
        raise NotImplementedError

    @classmethod
    def find_checkpoints(cls, scene: LabScene, directory: Path) -> Path:
        """Return the path on this machine of a directory in which the job saves."""
        return directory

    @classmethod
    def follow_up(cls, scene: LabScene, target: DrilledJob) -> None:
        """Do what follows some time after the strike; returns when it is done."""

    @classmethod
    def culprit(cls, scene: LabScene) -> TrueCulprit:
        """Return the culprit that a verdict must name."""
        return TrueCulprit(nodes=(scene.node.name,))

    @classmethod
    def check(cls, scene: LabScene, target: DrilledJob) -> list[str]:
        """Return errors in what the job left behind, in addition to the measurements of all drills."""
        return []
