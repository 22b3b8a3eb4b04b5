"""Faults in how the job is started: who comes late, never or twice, and who starts what within what."""

from __future__ import annotations

from allranks.lab.faults.fault import PROGRAMS, Culprit, Expected, ExtraAgent, Fault, Place, Scene, Start

LATE_S = 15
HELD_S = 4
"""Another node comes so late, where the roll call must still be open when an extra agent comes."""


class NeverStarts(Fault, name="never-starts", cause="AR001"):
    """The node's task hangs before it becomes the agent, until it is killed."""

    @classmethod
    def inject(cls, scene: Scene) -> None:
        """Hold it back for good."""
        scene.write_delay(scene.node.name, "infinity")

    @classmethod
    def heal(cls, scene: Scene) -> None:
        """Let it start."""
        scene.remove_files()


class StartsLate(Fault, name="starts-late", cause=()):
    """The node's task starts 15 s after the others, as from a cold file system."""

    severity = Expected.SURVIVED

    @classmethod
    def culprit(cls, scene: Scene) -> Culprit:
        """Nobody: the job must run."""
        return Culprit()

    @classmethod
    def inject(cls, scene: Scene) -> None:
        """Hold it back."""
        scene.write_delay(scene.node.name, str(LATE_S))

    @classmethod
    def heal(cls, scene: Scene) -> None:
        """Let it start at once."""
        scene.remove_files()


class ExtraAgentFault(Fault):
    """A second agent on the node, while the roll call waits for another node."""

    severity = Expected.WARN
    place = Place.NOT_FIRST
    min_nodes = 3

    @classmethod
    def hold(cls, scene: Scene) -> None:
        """Let the last of the other nodes come late."""
        last = [name for name in scene.hosts if name != scene.node.name][-1]
        scene.write_delay(last, str(HELD_S))

    @classmethod
    def inject(cls, scene: Scene) -> None:
        """Hold the roll call open."""
        cls.hold(scene)

    @classmethod
    def heal(cls, scene: Scene) -> None:
        """Let it close again."""
        scene.remove_files()


class RankTwice(ExtraAgentFault, name="rank-twice", cause="AR405"):
    """A second agent on the node claims the same rank of the same job."""

    @classmethod
    def start(cls, scene: Scene) -> Start:
        """Two agents there."""
        return Start(extra_agents=(ExtraAgent(node=scene.node.name, environment={}),))


class StaleRank(ExtraAgentFault, name="stale-rank", cause="AR404"):
    """An agent of the job's previous attempt still runs on the node, next to the new one."""

    @classmethod
    def inject(cls, scene: Scene) -> None:
        """Make it the job's second attempt on all nodes."""
        cls.hold(scene)
        for node in scene.hosts:
            scene.write_environment(node, {"SLURM_RESTART_COUNT": "1"})

    @classmethod
    def start(cls, scene: Scene) -> Start:
        """With an agent that says it is of the first attempt."""
        return Start(extra_agents=(ExtraAgent(node=scene.node.name, environment={"SLURM_RESTART_COUNT": "0"}),))


class WholeJob(Fault):
    """No node is it: the command is."""

    @classmethod
    def culprit(cls, scene: Scene) -> Culprit:
        """No node."""
        return Culprit()


class TorchrunInTasks(WholeJob, name="torchrun-in-tasks", cause=("AR501", "AR502")):
    """srun starts eight tasks on each node, and each of them is a torchrun (here: an `allranks run`)."""

    @classmethod
    def start(cls, scene: Scene) -> Start:
        """Eight a node, on as few cores as there are."""
        # Not --ntasks-per-node: with it SLURM 22.05 wants as many cores, in spite of --overcommit.
        nodes = len(scene.hosts)
        return Start(srun_flags=(f"--nodes={nodes}", f"--ntasks={8 * nodes}", "--overcommit"))


class MpSpawnInSrun(WholeJob, name="mp-spawn-in-srun", cause="AR502"):
    """Each task of the job starts the whole world once more: mp.spawn(nprocs=SLURM_NTASKS)."""

    @classmethod
    def start(cls, scene: Scene) -> Start:
        """With such a program."""
        return Start(program=PROGRAMS / "mp_spawn.py")
