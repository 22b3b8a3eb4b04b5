"""Faults of cables, ports and interfaces of the data network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from allranks.lab import hosts as machines
from allranks.lab.faults.fault import Expected, Fault, LabScene, TrueCulprit, Where, port_of
from allranks.lab.hosts import LINK_GBIT_S, SWITCH
from allranks.lab.node_plan import Host
from allranks.model.errors import SetupError

JUMBO, STANDARD = 9000, 1500
SLOW_GBIT_S = LINK_GBIT_S / 10


class LinkFault(Fault):
    """A fault of which one node's data interface is the culprit."""

    @classmethod
    def culprit(cls, scene: LabScene) -> TrueCulprit:
        """The interface."""
        return TrueCulprit(nodes=(scene.node.name,), interface=scene.node.data_interface)


class InterfaceDown(LinkFault, name="interface-down", cause="AR210"):
    """The node's data interface is set down: it keeps its address and sends nothing."""

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Set it down."""
        scene.run(scene.node.name, "ip", "link", "set", _name_now(scene, scene.node), "down")

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Set it up again, and restore the IPv6 addresses, which went with it."""
        _bring_up(scene)


class CablePulled(LinkFault, name="cable-pulled", cause="AR210"):
    """The switch port of the node's data interface is down: the interface is up, but has no carrier."""

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Set the port down."""
        scene.on_switch("ip", "link", "set", port_of(scene.node), "down")

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Set it up again."""
        scene.on_switch("ip", "link", "set", port_of(scene.node), "up")


class PortSilent(LinkFault, name="port-silent", cause="AR210"):
    """The switch forwards nothing from or to the node's data port; the carrier stays up."""

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Detach the port from the bridge."""
        scene.on_switch("ip", "link", "set", port_of(scene.node), "nomaster")

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Attach it again."""
        scene.on_switch("ip", "link", "set", port_of(scene.node), "master", "data")


class InterfaceRenamed(LinkFault, name="interface-renamed", cause="AR208"):
    """The node's data interface has a different name than in cluster.toml, as after a change of kernel or slot."""

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Rename it: down, renamed, up."""
        now, new = scene.node.data_interface, _other_name(scene.node)
        _rename(scene, now, new)

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Name it as before."""
        name, new = scene.node.data_interface, _other_name(scene.node)
        if new in scene.run(scene.node.name, "ls", "/sys/class/net").split():
            _rename(scene, new, name)


class MtuFault(LinkFault):
    """Faults of the MTU: jumbo frames everywhere except at one end. All ends are set from the injected faults."""

    narrow_end: ClassVar[str]
    """Which end has the fault: `node` or `port`."""

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Set all ends to 9000, and one to 1500."""
        _set_mtus(scene, [*scene.others, (cls.name, scene.where)])

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Set all ends as the other faults need them, to 1500 if there are none."""
        _set_mtus(scene, scene.others)


class MtuUnequal(MtuFault, name="mtu-unequal", cause="AR205"):
    """All data interfaces have MTU 9000, except the node's, which has 1500."""

    severity = Expected.WARN
    narrow_end = "node"


class MtuBlackhole(MtuFault, name="mtu-blackhole", cause="AR204"):
    """All data interfaces have MTU 9000, the switch port of the node has 1500: larger packets vanish there."""

    narrow_end = "port"


class PacketLoss(LinkFault):
    """A share of the packets is dropped at the node's switch port, in both directions."""

    percent: ClassVar[int]

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Drop packets at random where the switch forwards."""
        drop = f"numgen random mod 100 < {cls.percent} drop"
        rules = [f'{direction} "{port_of(scene.node)}" {drop}' for direction in ("iifname", "oifname")]
        scene.filter(SWITCH, rules, family="bridge", hook="forward")

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Stop dropping."""
        scene.unfilter(SWITCH, family="bridge")


class PacketLoss2(PacketLoss, name="packet-loss-2", cause="AR212"):
    """2 % of the packets from and to the node's data interface are lost at its switch port."""

    percent = 2


class PacketLoss20(PacketLoss, name="packet-loss-20", cause="AR212"):
    """20 % of the packets from and to the node's data interface are lost at its switch port."""

    percent = 20


class SlowLink(LinkFault, name="slow-link", cause="AR213"):
    """The node's data link has a tenth of the others' bandwidth, in both directions."""

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Shape both ends."""
        for node, interface in _ends(scene):
            if not machines.shape(scene.inits[node], interface, SLOW_GBIT_S):
                raise SetupError("lab: slow-link: this kernel has no tbf (CONFIG_NET_SCH_TBF)")

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Limit both ends like those of the other nodes."""
        for node, interface in _ends(scene):
            if scene.is_same_life(node):
                machines.shape(scene.inits[node], interface, LINK_GBIT_S)


def _ends(scene: LabScene) -> list[tuple[str, str]]:
    return [(scene.node.name, _name_now(scene, scene.node)), (SWITCH, port_of(scene.node))]


def _other_name(host: Host) -> str:
    return "ens1f9" if host.data_interface != "ens1f9" else "ens1f8"


def _name_now(scene: LabScene, host: Host) -> str:
    """Return the name of a node's data interface, which another fault may have changed."""
    is_renamed = (InterfaceRenamed.name, host.name) in [(name, where.node) for name, where in scene.others]
    seen = scene.run(host.name, "ls", "/sys/class/net").split() if is_renamed else []
    return _other_name(host) if _other_name(host) in seen else host.data_interface


def _rename(scene: LabScene, now: str, new: str) -> None:
    """Rename a node's data interface, which must be down for it; an IPv6 address is added again."""
    host = scene.node
    flags = "nodad" if ":" in host.data_address else ""
    lines = [
        f"link set {now} down",
        f"link set {now} name {new}",
        f"link set {new} up",
        f"address replace {host.data_address} dev {new} {flags}",
    ]
    scene.run(host.name, "ip", "-batch", "-", script="\n".join(lines) + "\n")


def _bring_up(scene: LabScene) -> None:
    """Set the data interface up; an IPv6 address, which was lost with it, is added again."""
    host, name = scene.node, _name_now(scene, scene.node)
    flags = "nodad" if ":" in host.data_address else ""
    lines = [f"link set {name} up\n", f"address replace {host.data_address} dev {name} {flags}\n"]
    scene.run(host.name, "ip", "-batch", "-", script="".join(lines))


def _set_mtus(scene: LabScene, faults: Sequence[tuple[str, Where]]) -> None:
    narrow = {(fault.narrow_end, where.node) for name, where in faults if (fault := _MTU_FAULTS.get(name))}
    usual = JUMBO if narrow else STANDARD

    def mtu(end: str, host: Host) -> int:
        return STANDARD if (end, host.name) in narrow else usual

    ports = [f"link set {port_of(host)} mtu {mtu('port', host)}\n" for host in scene.hosts.values()]
    scene.on_switch("ip", "-batch", "-", script="".join(ports))
    for host in scene.hosts.values():
        scene.run(host.name, "ip", "link", "set", _name_now(scene, host), "mtu", str(mtu("node", host)))


_MTU_FAULTS = {fault.name: fault for fault in (MtuUnequal, MtuBlackhole)}
