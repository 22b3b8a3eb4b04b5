"""What one node brings to a roll call: who it is, where it should look, what it read of itself. Data alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from allranks.host.node import NodeFacts
from allranks.model.card import Facts
from allranks.model.cluster import GuardTable
from allranks.model.errors import AllranksError
from allranks.model.world import Launcher
from allranks.preflight.datapath import DataPath
from allranks.report.rundir import RunDir
from allranks.wire.leader_port import Hint

SPARE_FILES = 768
"""Open files of a leader beside those of its nodes and ranks: peers that are not known yet, and its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """What one node decides alone, before it connects to any other."""

    job: str
    launcher: Launcher
    attempt: int | None
    """None where nobody counts; the leader then does."""
    facts: NodeFacts
    """This machine."""
    node_index: int | None
    """None where nobody said it; 0 leads, unless the job has begun without this agent."""
    num_nodes: int
    min_nodes: int
    node_names: tuple[str, ...] = ()
    """As the scheduler says; empty where nobody does."""
    num_workers: int = 1
    port: int = 29500
    """Preferred; the leader takes the next free one where it is in use."""
    endpoint: Hint | None = None
    """Where the user said that the nodes meet."""
    guesses: tuple[Hint, ...] = ()
    """Where the leader may be, from the scheduler."""
    rdzv_id: str | None = None
    data_path: DataPath | None = None
    """None: the path to the leader decides."""
    second_network: str | None = None
    """Further subnet for gradients, of cluster.toml."""
    wanted_backend: str = "auto"
    """auto, nccl or gloo, of flag or cluster.toml."""
    guard: GuardTable = field(default_factory=GuardTable)
    """Its timeouts, of flags and cluster.toml."""
    ignored: frozenset[str] = frozenset()
    """Ids of causes that stop nobody."""
    is_of_a_rank: bool = False
    """No agent takes part but each rank for itself, and several of them share a machine."""
    problem: AllranksError | None = None
    """Why this node cannot take part in a job of several nodes: it still joins, and the leader tells everybody."""

    @property
    def is_alone(self) -> bool:
        """Whether it speaks with nobody."""
        return self.num_nodes == 1

    @property
    def is_slurm(self) -> bool:
        """The nodes share one terminal, and can prove themselves by munge."""
        return self.launcher is Launcher.SLURM

    @property
    def num_files(self) -> int:
        """Files that the leader's processes may have open: its agent has a socket a node, rank 0's store one a rank."""
        return 0 if self.is_alone else SPARE_FILES + self.num_nodes * (1 + self.num_workers)

    @property
    def reachable_addresses(self) -> tuple[str, ...]:
        """This node's addresses that others may try: the data network's last, so that a path beside it is found where
        it is broken; without loopback."""
        own = [
            address
            for interface in self.facts.interfaces
            for address in interface.addresses
            if interface.is_up and not address.startswith(("127.", "fe80:")) and address != "::1"
        ]
        last = [self.data_path.address] if self.data_path else []
        return tuple(dict.fromkeys([*(address for address in own if address not in last), *last]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Applicant:
    """This node, as it takes part in a roll call."""

    plan: NodePlan
    is_back: bool = False
    """It takes the place of a lost agent of a job that runs."""
    shares_run_dir: bool
    """Every node must see the run directory, with the announcement and the key in it."""
    has_successors: bool = False
    """The leader may be succeeded by another node: all of them listen for that."""
    run_dir: RunDir
    env: Mapping[str, str]
    card_facts: Callable[[], Facts]
    """What this node is; waits until it has been read."""
    check_signals: Callable[[], None]
    """Raises StoppedBySignal when somebody told this process to stop."""

    @property
    def leads(self) -> bool:
        """Whether it holds the roll call, as far as the launcher says."""
        return self.plan.node_index == 0 and (self.plan.is_alone or not self.is_back)
