"""Strikes at the node that leads the job, whichever that is by then, and splits of the network around it.

The job must go on under one leader. After a split, the side goes on that has more than half of the weights of the last
generation: two for each node, and one more for the leader's. The other side ends its workers, requeues nothing, and its
agents exit with 0 as soon as srun can be told.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from typing import ClassVar

from allranks.lab import hosts as machines
from allranks.lab.faults.fault import FaultPlace, LabScene, TrueCulprit
from allranks.lab.faults.running.network import GONE_S, NEXT_STEP_S, LinkCutStrike, ports_of
from allranks.lab.faults.running.node import BACK_S, AgentKilled, BatchNodeKilled, NodeBack, NodeKilled, cable
from allranks.lab.faults.running.process import WorkerKilled
from allranks.lab.faults.running.strike import Launch, NextLeader, Strike
from allranks.lab.faults.running.target import DrilledJob
from allranks.lab.hosts import SWITCH
from allranks.launch.lead.course import RETURN_S
from allranks.launch.succession import OPENS_S, SEEK_S

BEGIN_S = 90.0
"""Until the job has gone on under another leader, and the lost agent is in it again."""
ENDS_S = SEEK_S + 15.0
"""Until the cut-off side has ended its workers: it looks for a leader before that."""
LEFT_S = 60.0
"""For SLURM to end what a lost node still runs, once it answers again: it asks its nodes from time to time."""
TAKEN_OVER_S = GONE_S + RETURN_S + OPENS_S
"""For the verdict: the leader is silent, then may return, then its successor accepts the others."""
_FAILED = re.compile(r"srun: error: (\S+): tasks? \S+: (Exited with exit code [1-9]\d*)")


class LeaderStrike(Strike):
    """A strike at the node that leads: the job goes on without it, under another leader."""

    place = FaultPlace.LEADER
    num_lost = 1
    succession = NextLeader.LOST


class LeaderAgentKilled(LeaderStrike, AgentKilled, name="leader-agent-killed", cause="AR012"):
    """SIGKILL to the leader's agent. Its node, which is whole, must be in the job again afterwards."""

    is_needed_again, watch_s = True, 120.0


class SecondLeaderKilled(LeaderAgentKilled, name="second-leader-killed", cause="AR012"):
    """The leader's agent was killed before, and is in the job again. SIGKILL to the agent that leads since then."""

    @classmethod
    def begin(cls, scene: LabScene, target: DrilledJob) -> None:
        """Kill the first leader's agent, and wait until all nodes train under the next one."""
        first, newest = target.leader(), target.newest()
        start = next(iter(newest.values())).start
        scene.aim(first)
        cls.strike(scene, target)

        def is_whole() -> bool:
            return target.leader() != first and target.is_stepping(len(newest), after=start)

        target.wait(is_whole, BEGIN_S, f"{len(newest)} ranks to train after the loss of the first leader")


class BatchLeaderKilled(LeaderAgentKilled, name="batch-leader-killed", cause="AR012"):
    """SIGKILL to the leader's agent in a batch job, whose srun runs on that node: the job goes on, and ends with 0."""

    launch, has_baseline = Launch.BATCH, False


class SmallBatchLeaderKilled(BatchLeaderKilled, name="batch-leader-killed-of-3", cause="AR012"):
    """The same with three nodes."""

    nodes, most_nodes = "2:3", 3


class LeaderWorkerKilled(LeaderStrike, WorkerKilled, name="leader-worker-killed", cause="AR407"):
    """SIGKILL to the worker on the leader's node: it leads on."""

    num_lost, succession, has_baseline = 0, NextLeader.NONE, False


class LeaderLinkCut(LeaderStrike, LinkCutStrike, name="leader-link-cut", cause="AR210"):
    """The switch port of the leader's data interface goes down: it hands over, and the job goes on without its node."""

    succession, has_baseline = NextLeader.RESIGNED, False


class LeaderNodeKilled(LeaderStrike, NodeKilled, name="leader-node-killed", cause="AR012"):
    """The leader's machine loses power; srun runs on the login node."""

    needs_login, has_baseline = True, False
    verdict_s = TAKEN_OVER_S


class CutOff(LeaderStrike):
    """A strike that cuts nodes off, with the leader or from it: they run, and must notice that the others go on."""

    needs_login, has_ranks = True, False
    verdict_s: ClassVar[float | None] = TAKEN_OVER_S
    next_step_s: ClassVar[float | None] = NEXT_STEP_S

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Note the workers of the cut-off side, and cut it off."""
        scene.remember("workers", [machines.identify(target.worker_pid(scene, node)) for node in cls.lost(scene)])
        struck_s = time.time()
        cls.cut(scene)
        return struck_s

    @classmethod
    def lost(cls, scene: LabScene) -> tuple[str, ...]:
        """Return the nodes of the cut-off side."""
        return cls.culprit(scene).nodes

    @classmethod
    def cut(cls, scene: LabScene) -> None:
        """Cut both networks of the leader's node."""
        cable(scene, scene.node.name, state="down")

    @classmethod
    def note_workers(cls, scene: LabScene) -> None:
        """Note which workers of the cut-off side still run; they must have ended before it is connected again."""
        give_up_s = time.monotonic() + ENDS_S
        while (
            left := [worker for worker in scene.memory["workers"] if _is_alive(worker)]
        ) and time.monotonic() < give_up_s:
            time.sleep(0.2)
        scene.remember("left", left)

    @classmethod
    def check(cls, scene: LabScene, target: DrilledJob) -> list[str]:
        """Connect the nodes again, and check how the cut-off side has ended.

        SLURM knows the exit codes of nodes that it has not given up before.
        """
        if "left" not in scene.memory:
            cls.note_workers(scene)
            cls.heal(scene)
        left, output = scene.memory["left"], (target.directory / "output.txt").read_text(errors="replace")
        wrong = [f"{len(left)} workers of the cut-off side have not ended"] if left else []
        return wrong + [f"cut off: {node}: {said}" for node, said in _FAILED.findall(output)]


class LeaderSilent(CutOff, name="leader-silent", cause="AR012"):
    """Both networks of the leader's node are cut: it still runs, but no other node can tell."""

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Connect it again."""
        cable(scene, scene.node.name, state="up")


class LeaderBack(CutOff, NodeBack, name="leader-back", cause="AR012"):
    """Both networks of the leader's node are cut and come back after 20 s: it must rejoin, and not lead."""

    launch = Launch.STEP

    @classmethod
    def follow_up(cls, scene: LabScene, target: DrilledJob) -> None:
        """Connect it again, before SLURM gives it up."""
        time.sleep(BACK_S)
        cls.note_workers(scene)
        cable(scene, scene.node.name, state="up")


class BatchNodeCutOff(BatchNodeKilled, name="batch-node-cut-off"):
    """Both networks of the node with batch script, srun and leader are cut: the job is requeued, and resumes.

    The leader runs on, and finds its own link at fault; what it writes in the lab, where all nodes share a disk, must
    not keep the others from requeuing the job.
    """

    also: ClassVar[tuple[str, ...]] = ("AR012", "AR210")
    most_nodes: ClassVar[int | None] = None

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Cut them."""
        struck_s = time.time()
        cable(scene, scene.node.name, state="down")
        return struck_s

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Connect it again."""
        cable(scene, scene.node.name, state="up")

    @classmethod
    def check(cls, scene: LabScene, target: DrilledJob) -> list[str]:
        """Connect it, wait until SLURM has ended what the lost run left there, and check the record."""
        cls.heal(scene)
        init, give_up_s = scene.inits[scene.node.name], time.monotonic() + LEFT_S
        while "srun" in machines.processes_in(init) and time.monotonic() < give_up_s:
            time.sleep(0.5)
        return super().check(scene, target)


class SmallBatchNodeCutOff(BatchNodeCutOff, name="batch-node-cut-off-of-3"):
    """The same with three nodes."""

    nodes = "2:3"
    most_nodes: ClassVar[int | None] = 3


class Split(CutOff):
    """The switch forwards nothing between two groups of nodes, in both networks; each group still reaches itself.

    The seed chooses the groups, and whether the lost one still reaches the login node.
    """

    min_nodes = 6
    nodes = "1:6"
    """Only the majority decides who goes on."""
    together_s = 5.0
    num_with_leader: ClassVar[int]

    @classmethod
    def groups(cls, scene: LabScene) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the group that must go on, and the one that is lost."""
        others = [name for name in scene.hosts if name != scene.node.name]
        chance = random.Random(f"{cls.name} {scene.where.seed}")  # neighboring seeds alone give similar numbers
        own = {scene.node.name, *chance.sample(others, cls.num_with_leader - 1)}
        groups = tuple(name for name in scene.hosts if name in own), tuple(name for name in others if name not in own)
        return groups if cls.succession is NextLeader.NONE else groups[::-1]

    @classmethod
    def culprit(cls, scene: LabScene) -> TrueCulprit:
        """Return the lost group."""
        return TrueCulprit(nodes=cls.groups(scene)[1])

    @classmethod
    def cut(cls, scene: LabScene) -> None:
        """Drop what the switch would forward between the groups."""
        going_on, lost = (
            [port for name in group for port in ports_of(scene.hosts[name])] for group in cls.groups(scene)
        )
        if random.Random(f"login {scene.where.seed}").random() < 0.5:
            going_on.append(f"management{scene.controller.index}")
        rules = []
        for here, there in ((going_on, lost), (lost, going_on)):
            rules.append(f"iifname {{ {', '.join(here)} }} oifname {{ {', '.join(there)} }} drop")
        scene.filter(SWITCH, rules, family="bridge", hook="forward")

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Drop no more."""
        scene.unfilter(SWITCH, family="bridge")


class Split33(Split, name="split-3-3", cause="AR211"):
    """The network splits into two halves: the leader's goes on, but nobody can tell which one is at fault."""

    num_with_leader, num_lost, succession = 3, 3, NextLeader.NONE

    @classmethod
    def lost(cls, scene: LabScene) -> tuple[str, ...]:
        """Return the half without the leader."""
        return cls.groups(scene)[1]

    @classmethod
    def culprit(cls, scene: LabScene) -> TrueCulprit:
        """Return both halves."""
        return TrueCulprit(nodes=tuple(scene.hosts))


class Split24(Split, name="split-2-4", cause="AR012"):
    """The network splits: the leader and one node on one side, four on the other, which go on."""

    num_with_leader, num_lost = 2, 2


class Split15(Split, name="split-1-5", cause="AR012"):
    """The network splits: the leader on one side, five nodes on the other, which go on."""

    num_with_leader = 1


class Split42(Split, name="split-4-2", cause="AR012"):
    """The network splits: the leader and three nodes on one side, which go on, and two on the other."""

    num_with_leader, num_lost, succession = 4, 2, NextLeader.NONE


def _is_alive(identity: str) -> bool:
    """Whether the process that `hosts.identify` described still runs."""
    with contextlib.suppress(OSError):
        return machines.identify(int(identity.split()[0])) == identity
    return False
