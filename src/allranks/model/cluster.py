"""The cluster as its owners describe it in cluster.toml: frozen data, units in names.

    >>> cluster = Cluster(node=(Node(name="node01", address="192.168.20.11"),))
    >>> cluster.find_node("192.168.20.11").name, cluster.network.port
    ('node01', 29500)

Nothing is checked here: `config` builds these from a file and refuses errors. None means that the file does not set the
value, so it is measured, or keeps its usual default.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from ipaddress import ip_address

import msgspec


class Backend(StrEnum):
    """Backend of the collectives."""

    AUTO = "auto"
    """NCCL where every rank has a GPU, else Gloo."""
    NCCL = "nccl"
    GLOO = "gloo"


class ClusterTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [cluster]: the cluster as a whole."""

    name: str | None = None
    """Name of the cluster in reports. Nothing depends on it, so there is no default."""


class NetworkTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [network]: the network that carries gradients."""

    data: str | None = None
    """Subnet that carries gradients, such as 192.168.20.0/24; each node's data interface is found from it.

    Not said by default: it is measured. A wrong one finds no interface, or puts gradients on a slow network.
    """
    second: str | None = None
    """Further subnet that carries gradients; Gloo uses both in turn where all nodes reach each other over it.

    Not said by default: a network that looks like the first one may be somebody's storage. One that is slower than the
    first makes every other bucket late.
    """
    port: int = 29500
    """Preferred TCP port of the leader, 1 to 65535. The default is torchrun's, the one that firewalls most likely let
    through. Where it is in use the leader takes another one; where a firewall closes it no node reaches the leader."""
    infiniband: bool | None = None
    """Whether NCCL may use InfiniBand or RoCE; false sets NCCL_IB_DISABLE=1.

    Not said by default: NCCL decides. False on a cluster that has it costs most of the bandwidth; true promises
    what broken verbs do not keep.
    """


class TrainTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [train]: the process group."""

    backend: Backend = Backend.AUTO
    """What carries the collectives. The default fits both kinds of nodes; nccl fails on a rank without a GPU, and
    gloo moves GPU tensors through host memory."""
    timeout_s: float = 600.0
    """Seconds until torch gives a collective up. The default is torch's for NCCL, here for Gloo also (its own is 1800).
    Too short kills slow checkpoints, too long leaves a hanging job running where the guard cannot tell."""


BEATS_PER_S = 2048
"""Heartbeats that the leader of a large job hears in a second: a fifth of a core."""


class GuardTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [guard]: how long the agents wait before they give a verdict."""

    join_s: float = 60.0
    """Seconds that the roll call waits for all nodes. The default suits hundreds of nodes that start Python from a
    cold NFS; too short names healthy nodes as missing."""
    gone_s: float = 10.0
    """Seconds of silence on two paths before a node counts as lost. The default outlasts a short network outage; too
    short ends jobs over a hiccup, too long holds up recovery."""
    beat_s: float = 0.5
    """Heartbeat interval of an agent, in seconds; longer with more than 1,024 nodes (`for_nodes`). A long one makes
    every verdict about a hang that much later."""
    stopped_s: float = 5.0
    """Seconds that a worker may be stopped (SIGSTOP, a frozen cgroup) before that is a fault. The default lets a
    suspended laptop job and a short look with a debugger pass; too long holds up recovery."""
    stalled_s: float = 5.0
    """Seconds without an acknowledgement from another machine, while bytes for it wait, before the link is tried and
    blamed. The default outlasts a switch that fails over; too short blames hiccups, too long holds up recovery."""
    slow_s: float = 30.0
    """Seconds that ranks wait for one that is merely late before it is named on the terminal. Nothing is ended."""
    hang_s: float = 600.0
    """Seconds without progress before a merely slow rank is ended. The default leaves room for a long evaluation or
    checkpoint; too short ends honest work, too long burns the GPU hours of all the others."""

    def for_nodes(self, num_nodes: int) -> GuardTable:
        """Return the table for a job of so many nodes: the leader hears BEATS_PER_S, or each node four times in gone_s.

        >>> [GuardTable().for_nodes(num_nodes).beat_s for num_nodes in (4, 1024, 4096, 16384)]
        [0.5, 0.5, 2.0, 2.5]
        """
        longest_s = max(self.beat_s, self.gone_s / 4)
        return msgspec.structs.replace(self, beat_s=min(max(self.beat_s, num_nodes / BEATS_PER_S), longest_s))


class SlurmTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [slurm]: what goes into the sbatch script."""

    partition: str | None = None
    """Partition, or several with commas, as behind `sbatch --partition`. Not said by default: SLURM takes its own."""
    time: str | None = None
    """Time limit as behind `sbatch --time`: 90 (minutes), 02:00:00 or 1-00. Not said by default: the partition's.
    Too short ends the job early, too long makes it wait longer in the queue."""
    history: str | None = None
    """File or directory that `allranks why --epilog --to` fills on all nodes. Not said by default: only the own runs
    tell which node breaks jobs. A wrong one is refused when it is read."""


class ReportTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [report]: what is written about a job, beside its run directory."""

    metrics_dir: str | None = None
    """Directory of node_exporter's textfile collector, on every node. Not said by default: no metrics. Where it is
    missing or cannot be written, a job has no metrics and says so once."""


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One [[node]]: a host that jobs may run on."""

    name: str
    """Name as SLURM and `hostname` have it. Under another one the node is not found, and its facts are not checked."""
    address: str
    """IPv4 or IPv6 address on the data network. A wrong one makes the leader there unreachable."""
    interface: str | None = None
    """Data interface, such as ens1f1. Not said by default: found from network.data or the address, else checked
    against it. A wrong one is refused on the node."""
    gpus: int | None = None
    """GPUs that jobs may use. Not said by default: counted on the node. Too many is reported as missing GPUs."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of cluster.toml; every table is optional, and so is the file."""

    cluster: ClusterTable = ClusterTable()
    network: NetworkTable = NetworkTable()
    train: TrainTable = TrainTable()
    guard: GuardTable = GuardTable()
    slurm: SlurmTable = SlurmTable()
    report: ReportTable = ReportTable()
    node: tuple[Node, ...] = ()
    """In the order of the file, no name or address twice. Empty by default: SLURM says which nodes a job has."""

    def find_node(self, name_or_address: str) -> Node | None:
        """Returns the node with this name or address, None where the file lists none; addresses match in any spelling.

        >>> Cluster(node=(Node(name="a", address="fd00::1"),)).find_node("FD00:0::1").name
        'a'
        """
        try:
            wanted = str(ip_address(name_or_address))
        except ValueError:
            wanted = name_or_address
        return next((node for node in self.node if wanted in (node.name, node.address)), None)

    def worker_env(self, env: Mapping[str, str]) -> Mapping[str, str]:
        """Returns the environment with what the file says of NCCL, as the workers get it; a variable that is set stays.

        >>> Cluster(network=NetworkTable(infiniband=False)).worker_env({})
        {'NCCL_IB_DISABLE': '1'}
        """
        return {"NCCL_IB_DISABLE": "1", **env} if self.network.infiniband is False else env
