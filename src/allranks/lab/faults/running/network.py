"""Strikes at the network of a running job: connections stay established, and no data passes."""

from __future__ import annotations

import time

from allranks.lab.faults import link
from allranks.lab.faults.fault import LabScene, TrueCulprit, port_of
from allranks.lab.faults.link import JUMBO, STANDARD, LinkFault
from allranks.lab.faults.running.strike import Strike
from allranks.lab.faults.running.target import DrilledJob
from allranks.lab.hosts import SWITCH
from allranks.lab.node_plan import Host

LINK_S = 5.0
GONE_S = 5.0
NEXT_STEP_S = 20.0


class NetworkStrike(Strike):
    """A strike whose culprit is one node's data interface; the node itself stays up."""

    verdict_s, next_step_s = LINK_S, NEXT_STEP_S
    has_ranks = False

    @classmethod
    def culprit(cls, scene: LabScene) -> TrueCulprit:
        """The interface."""
        return LinkFault.culprit(scene)


class LinkCutStrike(NetworkStrike, name="link-cut-running", cause="AR210"):
    """The switch port of the node's data interface goes down."""

    has_baseline = True

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Set the port down."""
        struck_s = time.time()
        link.CablePulled.inject(scene)
        return struck_s

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Set it up again."""
        link.CablePulled.heal(scene)


class PortSilentStrike(NetworkStrike, name="port-silent-running", cause="AR210"):
    """The switch no longer forwards anything from or to the node's data port; the carrier stays."""

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Detach the port from the bridge."""
        struck_s = time.time()
        link.PortSilent.inject(scene)
        return struck_s

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Attach it again."""
        link.PortSilent.heal(scene)


class MtuLowered(NetworkStrike, name="mtu-lowered", cause="AR204"):
    """All of the data network has MTU 9000; then the node's switch port is set to 1500, and large packets vanish."""

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Set all ends to 9000."""
        _set_mtu(scene, JUMBO)

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Lower one port."""
        struck_s = time.time()
        scene.on_switch("ip", "link", "set", port_of(scene.node), "mtu", str(STANDARD))
        return struck_s

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Set all ends to 1500."""
        _set_mtu(scene, STANDARD)


class LostOneWay(NetworkStrike, name="lost-one-way", cause=("AR210", "AR211", "AR212")):
    """All packets that the node sends on the data network are lost at its switch port; packets to it arrive."""

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Drop it where the switch forwards."""
        struck_s = time.time()
        scene.filter(SWITCH, [f'iifname "{port_of(scene.node)}" drop'], family="bridge", hook="forward")
        return struck_s

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Drop no more."""
        scene.unfilter(SWITCH, family="bridge")


class NodeSilent(Strike, name="node-silent-running", cause=("AR012", "AR001")):
    """Both networks of the node are cut at once: it still runs, but no other node can tell."""

    verdict_s, next_step_s = GONE_S, NEXT_STEP_S
    has_ranks = False

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Set both ports down."""
        struck_s = time.time()
        for port in ports_of(scene.node):
            scene.on_switch("ip", "link", "set", port, "down")
        return struck_s

    @classmethod
    def check(cls, scene: LabScene, target: DrilledJob) -> list[str]:
        """Set both up again: its agent ends once it is reachable, at the latest with the job's other leftovers."""
        cls.heal(scene)
        return []

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Set both up again; `allranks lab up`, as after every drill, puts the node back into service in SLURM."""
        for port in ports_of(scene.node):
            scene.on_switch("ip", "link", "set", port, "up")


def ports_of(host: Host) -> tuple[str, str]:
    """Return both switch ports of a node: data network and management network."""
    return port_of(host), f"management{host.index}"


def _set_mtu(scene: LabScene, mtu: int) -> None:
    ports = [f"link set {port_of(host)} mtu {mtu}\n" for host in scene.hosts.values()]
    scene.on_switch("ip", "-batch", "-", script="".join(ports))
    for host in scene.hosts.values():
        scene.run(host.name, "ip", "link", "set", host.data_interface, "mtu", str(mtu))
