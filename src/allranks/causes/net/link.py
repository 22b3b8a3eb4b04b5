"""Does anything pass between the nodes on the data network at all?"""

from __future__ import annotations

from allranks.causes.cause import PASSED, Cause, Outcome, Symptom, failed, skipped, unknown
from allranks.causes.net.cards import data_interface
from allranks.causes.sign import Sign
from allranks.model.card import Card
from allranks.model.errors import Exit


class LinkDown(Cause, id="AR210"):
    """A node's data link is down, or nothing comes through it.

    ## What it means
    The data interface is switched off, has no signal on its cable, or sends and receives nothing although it looks up:
    a wrong VLAN, a switch port that is shut, a dead transceiver. The node itself lives: its agent answers over another
    network.

    ## Why it breaks the job
    Every collective needs every node. The ranks of the node connect to nobody; all others wait for them. Neither NCCL
    nor Gloo says which node it is: each rank names the neighbour that it happened to wait for.

    ## Example
    As `ip -br link` shows it; UP with NO-CARRIER is a cable without a signal:

        ens1f1           DOWN           b8:ce:f6:11:22:33 <NO-CARRIER,BROADCAST,MULTICAST,UP>

    ## Fix
    Look at the interface, then at the switch port on its other end:

        ip -br link; ethtool IFACE | grep -E 'Link|Speed'; dmesg | grep -i 'link is'
        ip link set IFACE up                              # where it is only switched off

    No signal: reseat cable and transceiver, try another switch port. Signal, and still nothing: compare the VLAN of
    its switch port with a neighbour's, and `ip neigh` for FAILED entries. Until then run without the node:
    `--exclude=NODE`.

    ## Source
    Linux, Documentation/ABI/testing/sysfs-class-net: carrier, operstate (6.18). ip-link(8), ethtool(8).
    """

    message = "{what}"
    fix = (
        "ip -br link on {node}: DOWN: ip link set <name> up; NO-CARRIER: cable, transceiver, switch port; "
        "UP: VLAN and state of its switch port"
    )
    exit_code = Exit.NODE_FAULT
    symptoms = (Symptom.SILENT,)

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Fails where the data interface is switched off or has no signal."""
        if card.facts is None or "interfaces" in card.facts.unread:
            return unknown("its interfaces could not be read")
        nic = data_interface(card)
        if nic is None:
            return skipped("nobody says which interface carries gradients")
        if nic.is_up:
            return PASSED
        why = {False: "no signal on its cable", None: "it is switched off"}.get(nic.has_carrier, "it is not running")
        return failed(
            f"{nic}, carrier: {nic.has_carrier}, changes since boot: {nic.carrier_changes}",
            interface=nic.name,
            what=f"its data interface {nic.name} carries nothing: {why}",
        )


class Partition(Cause, id="AR211"):
    """Two nodes, or two groups of nodes, do not reach each other, and each reaches the rest.

    ## What it means
    Neither node is broken: each speaks with others. Nothing passes between these two, or between these two groups: a
    missing trunk between switches, a VLAN that ends at one of them, a routing or firewall rule for one pair, a
    duplicate address.

    ## Why it breaks the job
    A ring or tree that crosses the gap stands still. On both sides some ranks report that they are ready, so every rank
    looks healthy to its neighbours; nobody names the gap.

    ## Example
    From NVIDIA/nccl#1634: nodes 1 to 5 run together, 6 and 11 run together, any mix of both hangs in the first
    collective. There a missing plugin was the reason, a partition of the network looks the same.

    ## Fix
    See from one side of the gap who is lost, and where the path ends:

        ip neigh | grep -i failed; traceroute -n ADDRESS; arping -I IFACE ADDRESS

    Give the switches and ports of both groups to the network's admin: what lies between them is at fault. Until then
    run within one group: `--nodelist=...`, or `#SBATCH --switches=1`.

    ## Source
    https://github.com/NVIDIA/nccl/issues/1634. SLURM, sbatch(1), --switches: https://slurm.schedmd.com/sbatch.html.
    """

    message = "{what}"
    fix = "what lies between them is at fault: trunk, VLAN, route, filter; until then leave out one side"
    exit_code = Exit.NODE_FAULT
    symptoms = (Symptom.SILENT,)


class PeerConnectionLost(Cause, id="AR215"):
    """A connection between two ranks broke off in the middle of the job.

    ## What it means
    A rank lost its connection to another one. Most often the other end died (AR407 names it) and this line is a
    consequence; where both ends still live, the path between them broke.

    ## Why it breaks the job
    A group does not mend a lost connection: the collective fails on this rank, then on its neighbours, one after the
    other. Each names the neighbour that it lost, so that most of these lines point at innocent ranks. The earliest one
    comes closest.

    ## Example
    From PyTorch with Gloo, and from NVIDIA/nccl#1232:

        [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:31661
        misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer node2<42830>

    ## Fix
    First see who died: the rank without such a line, the earliest end of a process.

        allranks why JOB; sacct -j JOB --format=JobID,NodeList,State,ExitCode

    All processes alive: look at the link (`dmesg | grep -i 'link is'`, carrier_changes under /sys/class/net/IFACE)
    and at firewalls that forget idle connections.

    ## Source
    Gloo, gloo/transport/tcp/pair.cc (in PyTorch 2.13). NCCL, src/misc/socket.cc.
    https://github.com/NVIDIA/nccl/issues/1232 (read 2026-11-21).
    """

    message = "{what}"
    fix = "see who died first: allranks why JOB; all alive: dmesg | grep -i 'link is' on {node} and its neighbours"
    exit_code = Exit.NODE_FAULT
    no_fault_yet = "it is looked for in a running job, by the guard, which is not built yet"
    also = ("AR407",)
    signs = (
        Sign(r"Connection closed by peer \["),
        Sign(r"socketProgress: Connection closed by remote peer"),
    )
    hits = (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        "[127.0.0.1]:31661. This is typically caused by a remote worker crashing.",
        "ubuntu:39964:40044 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer "
        "node1<57557>",
    )
    misses = ("ConnectionResetError: [Errno 104] Connection reset by peer",)
