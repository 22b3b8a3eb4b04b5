"""What is a fault? One class: what it does to a running lab, how this is undone, and what a verdict must report.

    class CablePulled(Fault, name="cable-pulled", cause="AR210"):
        \"\"\"The switch port of the node is down: the node has no carrier.\"\"\"

        @classmethod
        def inject(cls, scene: Scene) -> None:
            scene.on_switch("ip", "link", "set", port_of(scene.node), "down")

        @classmethod
        def heal(cls, scene: Scene) -> None: ...

Rules: random choices depend on the seed alone, so another process makes the same ones. `heal` restores the exact state
before, also after an `inject` that was killed at any point. Faults are independent of each other: each has its own nft
table and its own file of variables. What several faults share (MTUs, /etc/hosts, the recorded GPUs) is rebuilt from all
injected faults (`scene.others`).
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from allranks.lab import hosts as machines
from allranks.lab.hosts import SWITCH
from allranks.lab.node_plan import Host
from allranks.model.hostlist import fold_hosts

PROGRAMS = Path(__file__).parent / "programs"
"""Programs that faults start instead of the job's program, or beside it."""
EXTRA_LATE_S = 1.2
"""Delay after the job's agent, so that the extra agent is rejected; SLURM does not see its exit code."""


class Expected(StrEnum):
    """Expected outcome of a job with the fault."""

    FAIL = "fail"
    """The job is stopped, with the cause as a finding of severity fail."""
    WARN = "warn"
    """The job runs; the cause is a finding of severity warn."""
    RESUMED = "resumed"
    """A running job reports the cause, restarts from its last checkpoint, and ends with code 0."""
    SURVIVED = "survived"
    """The job runs, and nothing is reported."""


class FaultPlace(StrEnum):
    """Nodes on which it can be injected."""

    ANY = "any"
    FIRST = "first"
    """The first node, which leads the job at first."""
    NOT_FIRST = "not first"
    LEADER = "leader"
    """The node that leads the job when it is struck: the first one, unless the job has lost it before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Place of a fault, and its other random choices."""

    node: str
    peer: str | None
    """Another node, chosen by the seed; None in a lab of one node."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueCulprit:
    """The truth, with which a verdict is compared."""

    nodes: tuple[str, ...] = ()
    """In the order of the cluster; several if they are at fault together (a pair, two nodes with the same name)."""
    interface: str | None = None
    """Interface of the single node, if it is at fault."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Groups of a partition; `nodes` is empty then."""
    address: str | None = None
    """A culprit that is not a node: an address that no node has."""

    def __str__(self) -> str:
        """`node03 ens1f1`, `node[01-02]`, `node[01-02] | node03`."""
        if self.groups:
            return " | ".join(fold_hosts(group) for group in self.groups)
        return " ".join(filter(None, [fold_hosts(self.nodes), self.interface, self.address]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraAgent:
    """A second agent beside the job's agent."""

    node: str
    environment: Mapping[str, str]
    """Environment in which it differs from the job's agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStart:
    """Differences in how the job is started: `srun SRUN_FLAGS PREFIX allranks run RUN_FLAGS PROGRAM`."""

    srun_flags: tuple[str, ...] = ()
    run_flags: tuple[str, ...] = ()
    program: Path | None = None
    """Used instead of the job's own program."""
    extra_agents: tuple[ExtraAgent, ...] = ()
    wrapper: tuple[str, ...] = ()
    """A command that prepares each node and then executes the command after it."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command before `allranks run`: prepares the node and starts the extra agents."""
        starts = ""
        for extra in self.extra_agents:
            env = " ".join(f"{name}={shlex.quote(value)}" for name, value in extra.environment.items())
            # In a subshell: an orphan, like a leftover agent, and not a child of the agent that follows.
            starts += f'[ "$SLURMD_NODENAME" != {shlex.quote(extra.node)} ] || '
            starts += f'({{ sleep {EXTRA_LATE_S}; env {env} "$@" || :; }} &); '
        return (*self.wrapper, *(("sh", "-c", f'{starts}exec "$@"', "sh") if starts else ()))


@dataclass(kw_only=True)
class LabScene:
    """The lab, from the view of one fault."""

    lab_dir: Path
    key: str
    """`cable-pulled@node03`: the name in this fault's files."""
    where: Where
    hosts: Mapping[str, Host]
    """The compute nodes by name, in the order of the cluster."""
    controller: Host
    """The node that runs slurmctld, on which users work: the login node, or the first node."""
    inits: Mapping[str, int]
    """Pid of process 1 of each live node, and of the switch."""
    lives: Mapping[str, str]
    """Identity of each process 1 when the fault was injected (`hosts.identify`)."""
    run_dir: Path
    """Parent of the jobs' run directories (`--log-dir`), the same on all nodes."""
    others: Sequence[tuple[str, Where]] = ()
    """The other faults in the lab."""
    memory: dict[str, Any] = field(default_factory=dict)
    save: Callable[[], None] = lambda: None

    @property
    def first(self) -> Host:
        """The first node of the cluster: its agent hosts the leader."""
        return next(iter(self.hosts.values()))

    @property
    def node(self) -> Host:
        """The node with the fault: the seed's, unless a strike has been aimed at another one."""
        return self.hosts[self.memory.get("node", self.where.node)]

    def aim(self, node: str) -> None:
        """Choose another node than the seed's, for `heal` too."""
        self.remember("node", node)

    @property
    def peer(self) -> Host:
        """The other node; a fault that uses it has `min_nodes = 2`."""
        assert self.where.peer is not None
        return self.hosts[self.where.peer]

    @property
    def pair(self) -> tuple[str, ...]:
        """Names of both, in the order of the cluster."""
        return tuple(name for name in self.hosts if name in (self.where.node, self.where.peer))

    def make_chance(self) -> random.Random:
        """Return a new generator from the seed: each call gives the same numbers."""
        return random.Random(self.where.seed)

    @property
    def table(self) -> str:
        """Name of this fault's own nft table."""
        return "fault_" + "".join(letter if letter.isalnum() else "_" for letter in self.key)

    def is_same_life(self, node: str) -> bool:
        """Whether the node is still the one with the fault; a new process 1 has new namespaces without it."""
        return node in self.inits and machines.identify(self.inits[node]) == self.lives.get(node)

    def run(self, node: str, *command: str, script: str | None = None, must_work: bool = True) -> str:
        """Run a command in the namespaces of a node and return its output; do nothing if the node was replaced since.

        Raises:
            SetupError: it fails.
        """
        if not self.is_same_life(node):
            return ""
        return machines.run_in(self.inits[node], command, script=script, must_work=must_work).stdout

    def on_switch(self, *command: str, script: str | None = None) -> str:
        """Run a command in the switch."""
        return self.run(SWITCH, *command, script=script)

    def remember(self, name: str, value: Any) -> None:
        """Write down what `heal` needs, before anything is changed."""
        self.memory[name] = value
        self.save()

    def own_dir(self, node: str, *parts: str) -> Path:
        """LAB_DIR/nodes/NODE: visible inside and outside the node, removed with the lab."""
        return self.lab_dir.joinpath("nodes", node, *parts)

    def write_environment(self, node: str, variables: Mapping[str, str]) -> None:
        """Set variables in every task on a node (see slurm.TASK_PROLOG); `NAME+` prepends to a list."""
        lines = [f"{name}={value}\n" for name, value in variables.items()]
        self._write(node, "environment", "".join(lines))

    def write_delay(self, node: str, seconds: str) -> None:
        """Delay the start of every task on a node."""
        self._write(node, "delay", seconds)

    def remove_files(self) -> None:
        """Undo `write_environment` and `write_delay` on all nodes."""
        for node in self.hosts:
            for kind in ("environment", "delay"):
                self.own_dir(node, kind, self.key).unlink(missing_ok=True)

    def _write(self, node: str, kind: str, text: str) -> None:
        path = self.own_dir(node, kind, self.key)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def filter(self, node: str, rules: Sequence[str], *, family: str = "inet", hook: str = "input") -> None:
        """Add this fault's own nft table to a node, or to the switch."""
        body = "\n".join([f"type filter hook {hook} priority 0; policy accept;", *rules])
        self.run(node, "nft", "-f", "-", script=f"table {family} {self.table} {{\nchain c {{\n{body}\n}}\n}}\n")

    def unfilter(self, node: str, *, family: str = "inet") -> None:
        """Remove it."""
        table = f"{family} {self.table}"
        # Adding it first means that removing a missing table is no error.
        self.run(node, "nft", "-f", "-", script=f"add table {table}\ndelete table {table}\n")


class Fault:
    """One kind of fault. Its docstring says what it does; the class is never instantiated."""

    name: ClassVar[str] = ""
    cause: ClassVar[tuple[str, ...]] = ()
    """Ids of causes; several if each would be a correct answer."""
    also: ClassVar[tuple[str, ...]] = ()
    """Ids that a verdict may report in addition: also true, because of how the fault is made."""
    severity: ClassVar[Expected] = Expected.FAIL
    place: ClassVar[FaultPlace] = FaultPlace.ANY
    min_nodes: ClassVar[int] = 1

    def __init_subclass__(cls, *, name: str = "", cause: str | tuple[str, ...] = (), **attributes: object) -> None:
        super().__init_subclass__(**attributes)
        cls.name = name
        cls.cause = (cause,) if isinstance(cause, str) else cause

    @classmethod
    def title(cls) -> str:
        """What it does: the first line of the docstring."""
        return (cls.__doc__ or "").partition("\n")[0]

    @classmethod
    def culprit(cls, scene: LabScene) -> TrueCulprit:
        """Return the culprit that a verdict must name."""
        return TrueCulprit(nodes=(scene.node.name,))

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Break it.

        Raises:
            SetupError: this machine cannot do that.
        """

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Undo what `inject` did, exactly."""

    @classmethod
    def start(cls, scene: LabScene) -> JobStart:
        """Return the differences in how the job is started; most faults have none."""
        return JobStart()


class EnvironmentFault(Fault):
    """A fault that consists of variables on one node."""

    variables: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Write them."""
        scene.write_environment(scene.node.name, cls.variables)

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Remove them."""
        scene.remove_files()


def port_of(host: Host) -> str:
    """Return the name of the switch port of a node's data cable."""
    return f"data{host.index}"
