"""What is a fault? One class: what it does to a running lab, how that is undone, and what a verdict must say of it.

    class CablePulled(Fault, name="cable-pulled", cause="AR210"):
        \"\"\"The switch port of the node is down: the node has no carrier.\"\"\"

        @classmethod
        def inject(cls, scene: Scene) -> None:
            scene.on_switch("ip", "link", "set", port_of(scene.node), "down")

        @classmethod
        def heal(cls, scene: Scene) -> None: ...

Rules: what depends on chance follows from the seed alone, so that another process finds the same again. `heal`
restores exactly, and may be called after an `inject` that was killed anywhere. Two faults at once do not know of each
other: each has its own nft table, its own file of variables; where several share one thing (MTUs, /etc/hosts, the
recorded GPUs), it is made anew from all that are there (`scene.others`).
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
from allranks.lab.plan import Host
from allranks.model.hostlist import fold_hosts

PROGRAMS = Path(__file__).parent / "programs"
"""What faults start in place of the job's program, or beside it."""
EXTRA_LATE_S = 1.2
"""After the agent of the job, so that the extra one is refused, whose exit code SLURM does not see."""


class Expected(StrEnum):
    """What must become of a job that meets the fault."""

    FAIL = "fail"
    """It is stopped, with the cause as a finding of severity fail."""
    WARN = "warn"
    """It runs; the cause is a finding of severity warn."""
    RESUMED = "resumed"
    """A running job names the cause, starts again from its last checkpoint, and ends well."""
    SURVIVED = "survived"
    """It runs, and nobody is accused."""


class Place(StrEnum):
    """Which nodes it can be put on."""

    ANY = "any"
    FIRST = "first"
    """The first node, which hosts the leader."""
    NOT_FIRST = "not first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where a fault is, or what that follows from."""

    node: str
    peer: str | None
    """Another node, drawn by the seed; None in a lab of one node."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The truth that a verdict is held against."""

    nodes: tuple[str, ...] = ()
    """In the order of the cluster; several where they are it together (a pair, two of the same name)."""
    interface: str | None = None
    """Of the one node, where it is to blame."""
    groups: tuple[tuple[str, ...], ...] = ()
    """What a partition parts; `nodes` is empty then."""
    address: str | None = None
    """What is no node at all: an address that nobody has."""

    def __str__(self) -> str:
        """`node03 ens1f1`, `node[01-02]`, `node[01-02] | node03`."""
        if self.groups:
            return " | ".join(fold_hosts(group) for group in self.groups)
        return " ".join(filter(None, [fold_hosts(self.nodes), self.interface, self.address]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraAgent:
    """A second agent beside that of the job."""

    node: str
    environment: Mapping[str, str]
    """What it has otherwise than the agent of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What is different in how the job is started: `srun SRUN_FLAGS PREFIX allranks run RUN_FLAGS PROGRAM`."""

    srun_flags: tuple[str, ...] = ()
    run_flags: tuple[str, ...] = ()
    program: Path | None = None
    """In place of the job's own."""
    extra_agents: tuple[ExtraAgent, ...] = ()
    wrapper: tuple[str, ...] = ()
    """A command that prepares each node and becomes the command behind it."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command before `allranks run`: what prepares the node, what starts the extra agents."""
        starts = ""
        for extra in self.extra_agents:
            env = " ".join(f"{name}={shlex.quote(value)}" for name, value in extra.environment.items())
            # In parentheses: a child of nobody's, as a left-over is, and not of the agent that follows.
            starts += f'[ "$SLURMD_NODENAME" != {shlex.quote(extra.node)} ] || '
            starts += f'({{ sleep {EXTRA_LATE_S}; env {env} "$@" || :; }} &); '
        return (*self.wrapper, *(("sh", "-c", f'{starts}exec "$@"', "sh") if starts else ()))


@dataclass(kw_only=True)
class Scene:
    """The lab as one fault sees it."""

    lab_dir: Path
    key: str
    """`cable-pulled@node03`: what this fault calls its files."""
    where: Where
    hosts: Mapping[str, Host]
    """By name, in the order of the cluster."""
    inits: Mapping[str, int]
    """Process 1 of each node that lives, and of the switch."""
    lives: Mapping[str, str]
    """What told process 1 of each node from others when the fault came (`hosts.identify`)."""
    run_dir: Path
    """Where the run directories of jobs go (`--log-dir`), on all nodes."""
    others: Sequence[tuple[str, Where]] = ()
    """The faults that are there besides this one."""
    memory: dict[str, Any] = field(default_factory=dict)
    save: Callable[[], None] = lambda: None

    @property
    def first(self) -> Host:
        """The first node of the cluster: its agent is the leader."""
        return next(iter(self.hosts.values()))

    @property
    def node(self) -> Host:
        """The node that it is on."""
        return self.hosts[self.where.node]

    @property
    def peer(self) -> Host:
        """The other node; a fault that asks for it has `min_nodes = 2`."""
        assert self.where.peer is not None
        return self.hosts[self.where.peer]

    @property
    def pair(self) -> tuple[str, ...]:
        """Names of both, in the order of the cluster."""
        return tuple(name for name in self.hosts if name in (self.where.node, self.where.peer))

    def make_chance(self) -> random.Random:
        """Return a generator at its beginning: who asks twice gets the same."""
        return random.Random(self.where.seed)

    @property
    def table(self) -> str:
        """Name of this fault's own nft table."""
        return "fault_" + "".join(each if each.isalnum() else "_" for each in self.key)

    def is_same_life(self, node: str) -> bool:
        """Whether the node is the one that the fault was put on; what it did in the namespaces of another is gone."""
        return node in self.inits and machines.identify(self.inits[node]) == self.lives.get(node)

    def run(self, node: str, *command: str, script: str | None = None, must_work: bool = True) -> str:
        """Run a command in the namespaces of a node and return what it prints; nothing on one that was made anew.

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
        """Keep what `heal` needs; on disk before what it undoes is done."""
        self.memory[name] = value
        self.save()

    def own_dir(self, node: str, *parts: str) -> Path:
        """LAB_DIR/nodes/NODE: seen by the node and from outside alike, gone with the lab."""
        return self.lab_dir.joinpath("nodes", node, *parts)

    def write_environment(self, node: str, variables: Mapping[str, str]) -> None:
        """Let variables into every task on a node (see slurm.TASK_PROLOG); `NAME+` puts in front of a list."""
        lines = [f"{name}={value}\n" for name, value in variables.items()]
        self._write(node, "environment", "".join(lines))

    def write_delay(self, node: str, seconds: str) -> None:
        """Hold every task on a node back, before it becomes its program."""
        self._write(node, "delay", seconds)

    def remove_files(self) -> None:
        """Take back `write_environment` and `write_delay` on all nodes."""
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
        # Adding first makes removing what is not there no error.
        self.run(node, "nft", "-f", "-", script=f"add table {table}\ndelete table {table}\n")


class Fault:
    """One thing to break. Its docstring says what is done; the class is never instantiated."""

    name: ClassVar[str] = ""
    cause: ClassVar[tuple[str, ...]] = ()
    """Ids of the catalogue; several where each would be a right answer."""
    also: ClassVar[tuple[str, ...]] = ()
    """Ids that a verdict may have besides: true as well, through the means by which the fault is made."""
    severity: ClassVar[Expected] = Expected.FAIL
    place: ClassVar[Place] = Place.ANY
    min_nodes: ClassVar[int] = 1

    def __init_subclass__(cls, *, name: str = "", cause: str | tuple[str, ...] = (), **attributes: object) -> None:
        super().__init_subclass__(**attributes)
        cls.name = name
        cls.cause = (cause,) if isinstance(cause, str) else cause

    @classmethod
    def title(cls) -> str:
        """What it does: first line of the docstring."""
        return (cls.__doc__ or "").partition("\n")[0]

    @classmethod
    def culprit(cls, scene: Scene) -> Culprit:
        """Return whom a verdict must name."""
        return Culprit(nodes=(scene.node.name,))

    @classmethod
    def inject(cls, scene: Scene) -> None:
        """Break it.

        Raises:
            SetupError: this machine cannot do that.
        """

    @classmethod
    def heal(cls, scene: Scene) -> None:
        """Undo what `inject` did, exactly."""

    @classmethod
    def start(cls, scene: Scene) -> Start:
        """Return what is different in how the job is started; most faults are in the lab instead."""
        return Start()


class EnvironmentFault(Fault):
    """Variables on one node."""

    variables: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def inject(cls, scene: Scene) -> None:
        """Write them."""
        scene.write_environment(scene.node.name, cls.variables)

    @classmethod
    def heal(cls, scene: Scene) -> None:
        """Remove them."""
        scene.remove_files()


def port_of(host: Host) -> str:
    """Name of the switch port at the other end of a node's data cable."""
    return f"data{host.index}"
