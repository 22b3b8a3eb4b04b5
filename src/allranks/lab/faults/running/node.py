"""Strikes at whole nodes: the agent, all its processes, the machine itself, several at once, and their return."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import ClassVar

from allranks.lab import hosts as machines
from allranks.lab import slurm_daemons
from allranks.lab.faults.fault import Expected, FaultPlace, LabScene, TrueCulprit
from allranks.lab.faults.running.network import GONE_S, NEXT_STEP_S, ports_of
from allranks.lab.faults.running.strike import Launch, Strike
from allranks.lab.faults.running.target import DrilledJob

DAEMONS = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmscriptd", "slurmd", "slurmstepd")
BACK_S = 20.0
PATIENCE_S = 45
"""SlurmdTimeout for such a node: it counts from the last answer, which may be a third of it old (36 s were seen)."""
CAPACITY_S = 20


class NodeStrike(Strike):
    """A strike whose culprit is a node that can be excluded."""

    verdict_s: ClassVar[float | None] = GONE_S
    next_step_s: ClassVar[float | None] = NEXT_STEP_S
    has_ranks = False


class AgentKilled(NodeStrike, name="agent-killed", cause=("AR012", "AR407")):
    """SIGKILL to the agent of one node; its workers go with it."""

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Kill it."""
        pid = target.agent_pid(scene, scene.node.name)
        struck_s = time.time()
        os.kill(pid, signal.SIGKILL)
        return struck_s


class NodeEmptied(NodeStrike, name="node-emptied", cause=("AR012", "AR407")):
    """SIGKILL to all processes of the job on one node, agent and workers; the node and SLURM's daemons stay up.

    Without slurmstepd, srun would wait forever for that node's task (SLURM 22.05).
    """

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Kill all processes except process 1 and the daemons."""
        init = scene.inits[scene.node.name]
        running = machines.processes_in(init)
        pids = [pid for name, pids in running.items() if name not in DAEMONS for pid in pids if pid != init]
        struck_s = time.time()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return struck_s


class NodeKilled(NodeStrike, name="node-killed", cause="AR012"):
    """The machine loses power: its links go down, then all its processes end, also SLURM's."""

    has_baseline = True

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Kill process 1 of the node, and with it everything."""
        return _kill(scene, scene.node.name)


class TwoNodesKilled(NodeStrike, name="two-nodes-killed", cause="AR012"):
    """Two machines lose power at the same time."""

    min_nodes = 4

    @classmethod
    def culprit(cls, scene: LabScene) -> TrueCulprit:
        """Both nodes."""
        return TrueCulprit(nodes=_two(scene))

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Kill both."""
        return _kill(scene, *_two(scene))


class NodeBack(NodeStrike, name="node-back", cause="AR012"):
    """Both networks of the node are cut and come back after 20 s: the node must rejoin.

    Its agent loses the leader, but must not treat it as dead: it would requeue the job. The cut is shorter than
    SlurmdTimeout: 300 s by default, PATIENCE_S in the lab during this strike. A node that SLURM has given up is out of
    the job until its next attempt. A machine that reboots before SLURM gives it up ends the whole step, also
    with --no-kill (srun: `Aborting, io error and missing step on node 2`, SLURM 22.05, also with the output in files).
    """

    launch, is_needed_again = Launch.BATCH, True
    watch_s = 120.0

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Make SLURM wait for the node."""
        slurm_daemons.set_patience(PATIENCE_S, scene.lab_dir, controller=scene.inits.get(scene.controller.name))

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Set both ports down."""
        struck_s = time.time()
        cable(scene, scene.node.name, state="down")
        return struck_s

    @classmethod
    def follow_up(cls, scene: LabScene, target: DrilledJob) -> None:
        """Set them up again."""
        time.sleep(BACK_S)
        cable(scene, scene.node.name, state="up")

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Set them up in any case, and restore SLURM's timeout."""
        cable(scene, scene.node.name, state="up")
        slurm_daemons.set_patience(
            slurm_daemons.PATIENCE_S, scene.lab_dir, controller=scene.inits.get(scene.controller.name)
        )


class BelowMinimumAndBack(NodeBack, name="below-minimum-and-back", cause=("AR012", "AR608")):
    """The job has exactly its minimum of nodes; one is lost, the job pauses, the node comes back."""

    nodes = "6:6"
    next_step_s = None


class BelowMinimum(NodeStrike, name="below-minimum", cause=("AR608", "AR012")):
    """The job has exactly its minimum of nodes; one is lost and stays away until the capacity timeout."""

    severity = Expected.FAIL
    nodes, next_step_s, watch_s = "6:6", None, 75.0
    exit_codes: ClassVar = (75,)
    run_flags: ClassVar = ("--capacity-timeout", str(CAPACITY_S))

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Kill one."""
        return _kill(scene, scene.node.name)


class BatchNodeKilled(NodeKilled, name="batch-node-killed"):
    """The machine of the batch script and the leader is lost: the job is requeued, and resumes.

    The process that would print a verdict is gone, and so is srun's output. The culprit is in the job's record.
    """

    place, needs_login, is_requeued = FaultPlace.LEADER, True, True
    succession = None
    """Until SLURM gives the node up, another one may lead."""
    also: ClassVar[tuple[str, ...]] = ("AR012",)

    launch, verdict_s, next_step_s, watch_s = Launch.BATCH, None, None, 150.0
    has_baseline = False
    most_nodes: ClassVar[int | None] = 4

    @classmethod
    def check(cls, scene: LabScene, target: DrilledJob) -> list[str]:
        """Check that the remaining agents recorded the node for the next attempt."""
        paths = target.directory.glob("runs/[0-9]*/culprits.json")
        named = [(finding["node"], finding["cause_id"]) for path in paths for finding in json.loads(path.read_text())]
        truth = cls.culprit(scene).nodes[0]
        return [] if named == [(truth, "AR012")] else [f"culprits.json has {named}, the truth is AR012 {truth}"]


def cable(scene: LabScene, *names: str, state: str) -> None:
    """Set both switch ports of nodes up or down."""
    ports = [port for name in names for port in ports_of(scene.hosts[name])]
    scene.on_switch("ip", "-batch", "-", script="".join(f"link set {port} {state}\n" for port in ports))


def _kill(scene: LabScene, *names: str) -> float:
    """Cut the cables first: a machine without power closes no connections, but the kernel of a killed process does."""
    struck_s = time.time()
    cable(scene, *names, state="down")
    machines.kill_hosts(scene.lab_dir, names)
    return struck_s


def _two(scene: LabScene) -> tuple[str, ...]:
    """The node and another one; neither is the first."""
    others = [name for name in list(scene.hosts)[1:] if name != scene.node.name]
    other = scene.make_chance().choice(others)
    return tuple(name for name in scene.hosts if name in (scene.node.name, other))
