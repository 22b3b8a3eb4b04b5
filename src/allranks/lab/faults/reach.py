"""Faults of addresses, names, ports and filters: which nodes can reach which."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from ipaddress import ip_interface
from typing import ClassVar

from allranks.lab.faults.fault import (
    PROGRAMS,
    EnvironmentFault,
    Expected,
    Fault,
    FaultPlace,
    JobStart,
    LabScene,
    TrueCulprit,
    Where,
    port_of,
)
from allranks.lab.hosts import SWITCH
from allranks.lab.node_plan import DOCKER_INTERFACE, MANAGEMENT_INTERFACE, bare, render_hosts_file

PORT = 29500
"""The leader's preferred port, also torch's default."""
LISTENER = PROGRAMS / "listener.py"
SYN = "tcp flags & (syn | ack) == syn"
"""Matches only packets that open a connection: replies pass without conntrack."""


# The leader's address


class MasterAddressWrong(Fault, name="master-address-wrong", cause="AR201"):
    """--master-addr is an address of the data network that no node has."""

    @classmethod
    def culprit(cls, scene: LabScene) -> TrueCulprit:
        """The culprit is the address, not a node."""
        return TrueCulprit(address=_unused_address(scene))

    @classmethod
    def start(cls, scene: LabScene) -> JobStart:
        """Start the job with the address."""
        return JobStart(run_flags=("--master-addr", _unused_address(scene)))


class HostsFault(Fault):
    """Faults of name resolution on one node. /etc/hosts is rebuilt from the injected faults."""

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Write it with this fault."""
        _write_hosts_file(scene, [*scene.others, (cls.name, scene.where)])

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Write it without."""
        _write_hosts_file(scene, scene.others)


class MasterNameUnresolvable(HostsFault, name="master-name-unresolvable", cause="AR202"):
    """--master-addr is the first node's name, which does not resolve on the node."""

    place = FaultPlace.NOT_FIRST
    min_nodes = 2

    @classmethod
    def start(cls, scene: LabScene) -> JobStart:
        """Start the job with the name."""
        return JobStart(run_flags=("--master-addr", scene.first.name))


class LoopbackHostname(HostsFault, name="loopback-hostname", cause="AR209"):
    """The node's own name resolves to 127.0.1.1 there, as Debian's installer writes it."""

    severity = Expected.WARN


# Ports


class PortInUse(Fault, name="port-in-use", cause="AR207"):
    """A foreign process listens on port 29500 of the first node."""

    place = FaultPlace.FIRST
    severity = Expected.WARN

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Start it; returns once it listens."""
        python = [sys.executable, "-I", "-S", str(LISTENER), str(PORT)]
        scene.remember("pid", int(scene.run(scene.node.name, *python)))

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """End it."""
        if "pid" in scene.memory:
            end = (
                'cmdline() { tr "\\0" " " <"/proc/$1/cmdline" 2>/dev/null | grep -q -- "$2"; }; '
                'cmdline "$1" "$2" && kill -9 "$1"; while cmdline "$1" "$2"; do sleep 0.01; done'
            )
            scene.run(scene.node.name, "sh", "-c", end, "sh", str(scene.memory["pid"]), LISTENER.name)


class PortFiltered(Fault, name="port-filtered", cause="AR206"):
    """The first node's firewall drops TCP to port 29500, on every interface."""

    place = FaultPlace.FIRST

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Drop the packets; connections within the node pass."""
        scene.filter(scene.node.name, [f'iifname != "lo" tcp dport {PORT} drop'])

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Stop dropping."""
        scene.unfilter(scene.node.name)


class PairFault(Fault):
    """Two nodes are the culprit together: each reaches all others."""

    min_nodes = 2

    @classmethod
    def culprit(cls, scene: LabScene) -> TrueCulprit:
        """Both nodes; in a lab of two nodes, these are all nodes."""
        return TrueCulprit(nodes=scene.pair)


class PortsFilteredBetween(PairFault, name="ports-filtered-between", cause="AR206"):
    """Two nodes drop each other's connections to ports 1024 to 65535 on the data network, except 29500."""

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """On both nodes, drop packets that open such a connection."""
        for here, there in ((scene.node, scene.peer), (scene.peer, scene.node)):
            address = bare(there.data_address)
            family = "ip6" if ":" in address else "ip"
            rule = f"{family} saddr {address} tcp dport 1024-65535 tcp dport != {PORT} {SYN} drop"
            scene.filter(here.name, [rule])

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Stop dropping."""
        for name in scene.pair:
            scene.unfilter(name)


# Paths


class LinkCut(PairFault, name="link-cut", cause=("AR211", "AR210")):
    """No packet passes between two nodes on the data network."""

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Drop packets where the switch would forward them."""
        _part(scene, [scene.node.name], [scene.peer.name])

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Forward again."""
        scene.unfilter(SWITCH, family="bridge")


class Partition(Fault, name="partition", cause="AR211"):
    """No packet passes between two halves of the nodes on the data network; the seed chooses them."""

    min_nodes = 4

    @classmethod
    def culprit(cls, scene: LabScene) -> TrueCulprit:
        """The two groups."""
        return TrueCulprit(groups=_halves(scene))

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Drop packets where the switch would forward them."""
        _part(scene, *_halves(scene))

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Forward again."""
        scene.unfilter(SWITCH, family="bridge")


# Wrong interface


class NicForced(EnvironmentFault):
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name an interface that does not lead to the others."""

    also = ("AR503",)
    interface: ClassVar[str]

    def __init_subclass__(cls, *, interface: str, **attributes: str) -> None:
        super().__init_subclass__(**attributes)
        cls.interface = interface
        cls.variables = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}

    @classmethod
    def culprit(cls, scene: LabScene) -> TrueCulprit:
        """The node, with the interface that its environment forces."""
        return TrueCulprit(nodes=(scene.node.name,), interface=cls.interface)


class NicForcedDocker0(NicForced, name="nic-forced-docker0", cause="AR203", interface=DOCKER_INTERFACE):
    """The node's environment forces docker0, which has the same address on every node."""


class NicForcedLo(NicForced, name="nic-forced-lo", cause="AR203", interface="lo"):
    """The node's environment forces the loopback interface."""


class NicForcedManagement(NicForced, name="nic-forced-management", cause="AR203", interface=MANAGEMENT_INTERFACE):
    """The node's environment forces the management network; all others use the data network."""


def _unused_address(scene: LabScene) -> str:
    """x.x.x.99 of the data network, or the next lower address that no node has."""
    network = ip_interface(scene.first.data_address).network
    taken = {bare(host.data_address) for host in scene.hosts.values()}
    last = min(99, network.num_addresses - 2)
    return next(str(address) for n in range(last, 0, -1) if str(address := network[n]) not in taken)


def _write_hosts_file(scene: LabScene, faults: Iterable[tuple[str, Where]]) -> None:
    here = {name for name, where in faults if where.node == scene.node.name}
    usual = render_hosts_file(list(scene.hosts.values()))
    lines = []
    for line in usual.splitlines(keepends=True):
        _, name = line.split()[:2]
        if name == scene.first.name and MasterNameUnresolvable.name in here:
            continue
        lines.append(f"127.0.1.1 {name}\n" if name == scene.node.name and LoopbackHostname.name in here else line)
    # In place: the file is bind-mounted in the node.
    scene.own_dir(scene.node.name, "hosts").write_text("".join(lines))


def _halves(scene: LabScene) -> tuple[tuple[str, ...], ...]:
    names = list(scene.hosts)
    others = [name for name in names if name != scene.node.name]
    first = {scene.node.name, *scene.make_chance().sample(others, len(names) // 2 - 1)}
    halves = (tuple(n for n in names if n in first), tuple(n for n in names if n not in first))
    return tuple(sorted(halves, key=lambda half: names.index(half[0])))


def _part(scene: LabScene, one: Iterable[str], other: Iterable[str]) -> None:
    sides = [", ".join(f'"{port_of(scene.hosts[name])}"' for name in side) for side in (one, other)]
    rules = [f"iifname {{ {a} }} oifname {{ {b} }} drop" for a, b in (sides, sides[::-1])]
    scene.filter(SWITCH, rules, family="bridge", hook="forward")
