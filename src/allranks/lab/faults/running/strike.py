"""What is a fault that strikes a running job? One class: what it does in which moment, and what must become of the job.

    class WorkerKilled(Strike, name="worker-killed", cause="AR407"):
        \"\"\"SIGKILL to one worker.\"\"\"

        @classmethod
        def strike(cls, scene: Scene, target: Target) -> float:
            os.kill(target.worker_pid(scene, scene.node.name), signal.SIGKILL)

It is a `Fault` besides: `inject` makes before the job starts what the strike needs, `heal` takes it and what the strike
did out of the lab again. The rules of `faults/fault.py` hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from allranks.lab.faults.fault import Culprit, Expected, Fault, Place, Scene
from allranks.lab.faults.running.target import Target


class Launch(StrEnum):
    """How the job is started."""

    STEP = "srun"
    BATCH = "sbatch"
    """With `allranks submit`: for what SLURM itself does to jobs."""


class Strike(Fault):
    """One thing that happens to a running job."""

    severity: ClassVar[Expected] = Expected.RESUMED
    """FAIL: the job ends. RESUMED: it goes on and ends with 0. SURVIVED: nobody is accused."""
    place: ClassVar[Place] = Place.NOT_FIRST
    """The first node has SLURM's controller, and the agent that leads the job: it cannot be left out."""
    verdict_s: ClassVar[float | None] = None
    """Between the strike and the printed verdict, at most."""
    next_step_s: ClassVar[float | None] = None
    """Between the strike and the next optimizer step, at most."""
    exit_codes: ClassVar[tuple[int, ...]] = ()
    """Of a job that ends; none: any but 0."""
    nodes: ClassVar[str] = "4:6"
    """MIN:MAX."""
    run_flags: ClassVar[tuple[str, ...]] = ()
    """Of `allranks run`, besides those of all drills."""
    submit_flags: ClassVar[tuple[str, ...]] = ()
    """Of `allranks submit`."""
    guard: ClassVar[Mapping[str, float]] = {}
    """Figures of [guard] other than those of all drills."""
    launch: ClassVar[Launch] = Launch.STEP
    watch_s: ClassVar[float] = 60.0
    """How long to wait for what the job must become."""
    leaves_first_out: ClassVar[bool] = False
    """Whether the job runs on other nodes than the first, which has SLURM's controller."""
    most_nodes: ClassVar[int | None] = None
    """On how many, where not on all."""
    is_needed_again: ClassVar[bool] = False
    """Whether all nodes are in the job again afterwards."""
    has_ranks: ClassVar[bool] = True
    """Whether a verdict must name the culprit's ranks, too."""
    has_baseline: ClassVar[bool] = False
    """Whether plain torchrun meets it, for its class."""

    @classmethod
    def strike(cls, scene: Scene, target: Target) -> float:
        """Do it, now that all ranks train.

        Returns:
            When it happened, seconds since the epoch.
        Raises:
            SetupError: it could not be done.
        """
        raise NotImplementedError

    @classmethod
    def find_checkpoints(cls, scene: Scene, directory: Path) -> Path:
        """Return where this machine sees what the job saves in a directory."""
        return directory

    @classmethod
    def follow_up(cls, scene: Scene, target: Target) -> None:
        """What happens some time after the strike; returns when it has."""

    @classmethod
    def culprit(cls, scene: Scene) -> Culprit:
        """Return whom a verdict must name."""
        return Culprit(nodes=(scene.node.name,))

    @classmethod
    def check(cls, scene: Scene, target: Target) -> list[str]:
        """Return what is wrong with what the job left, besides what is measured of all."""
        return []
