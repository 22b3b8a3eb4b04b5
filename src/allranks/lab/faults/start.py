"""Faults in how the job is started: agents that come late, never or twice, and launchers that start launchers."""

from __future__ import annotations

from allranks.lab.faults.fault import PROGRAMS, Expected, ExtraAgent, Fault, FaultPlace, JobStart, LabScene, TrueCulprit

LATE_S = 15
HELD_S = 4
"""Delay of another node, so that the roll call is still open when an extra agent comes."""


class NeverStarts(Fault, name="never-starts", cause="AR001"):
    """The node's task hangs before it becomes the agent, until it is killed."""

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Delay it without end."""
        scene.write_delay(scene.node.name, "infinity")

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Remove the delay."""
        scene.remove_files()


class StartsLate(Fault, name="starts-late", cause=()):
    """The node's task starts 15 s after the others, as from a cold file system."""

    severity = Expected.SURVIVED

    @classmethod
    def culprit(cls, scene: LabScene) -> TrueCulprit:
        """No culprit: the job must run."""
        return TrueCulprit()

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Delay it."""
        scene.write_delay(scene.node.name, str(LATE_S))

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Remove the delay."""
        scene.remove_files()


class ExtraAgentFault(Fault):
    """A second agent on the node, while the roll call waits for another node."""

    severity = Expected.WARN
    place = FaultPlace.NOT_FIRST
    min_nodes = 3

    @classmethod
    def hold(cls, scene: LabScene) -> None:
        """Delay the last of the other nodes."""
        last = [name for name in scene.hosts if name != scene.node.name][-1]
        scene.write_delay(last, str(HELD_S))

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Keep the roll call open."""
        cls.hold(scene)

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Remove the delay."""
        scene.remove_files()


class RankTwice(ExtraAgentFault, name="rank-twice", cause="AR405"):
    """A second agent on the node claims the same rank of the same job."""

    @classmethod
    def start(cls, scene: LabScene) -> JobStart:
        """Two agents on that node."""
        return JobStart(extra_agents=(ExtraAgent(node=scene.node.name, environment={}),))


class StaleRank(ExtraAgentFault, name="stale-rank", cause="AR404"):
    """An agent of the job's previous attempt still runs on the node, next to the new one."""

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Make it the job's second attempt on all nodes."""
        cls.hold(scene)
        for node in scene.hosts:
            scene.write_environment(node, {"SLURM_RESTART_COUNT": "1"})

    @classmethod
    def start(cls, scene: LabScene) -> JobStart:
        """Start an extra agent that claims the first attempt."""
        return JobStart(extra_agents=(ExtraAgent(node=scene.node.name, environment={"SLURM_RESTART_COUNT": "0"}),))


class WholeJob(Fault):
    """No node is the culprit: the command is."""

    @classmethod
    def culprit(cls, scene: LabScene) -> TrueCulprit:
        """No node."""
        return TrueCulprit()


class TorchrunInTasks(WholeJob, name="torchrun-in-tasks", cause=("AR501", "AR502")):
    """srun starts eight tasks on each node, and each of them is a torchrun (here: an `allranks run`)."""

    @classmethod
    def start(cls, scene: LabScene) -> JobStart:
        """Eight tasks per node, on any number of cores."""
        # Not --ntasks-per-node: with it, SLURM 22.05 requires as many cores, in spite of --overcommit.
        nodes = len(scene.hosts)
        return JobStart(srun_flags=(f"--nodes={nodes}", f"--ntasks={8 * nodes}", "--overcommit"))


class MpSpawnInSrun(WholeJob, name="mp-spawn-in-srun", cause="AR502"):
    """Each task of the job starts the whole world once more: mp.spawn(nprocs=SLURM_NTASKS)."""

    @classmethod
    def start(cls, scene: LabScene) -> JobStart:
        """Start such a program."""
        return JobStart(program=PROGRAMS / "mp_spawn.py")
