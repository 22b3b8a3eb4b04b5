"""Does anything pass between the nodes on the data network at all?"""

from __future__ import annotations

from allranks.causes.cause import PASSED, Cause, Outcome, Symptom, failed, skipped, unknown
from allranks.causes.net.cards import data_interface
from allranks.causes.net.lines import GLOO_PEER, IPV4, NCCL_PEER
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.card import Card
from allranks.model.errors import Exit
from allranks.model.finding import Confidence


class LinkDown(Cause, id="AR210"):
    """A node's data link is down or passes no packets.

    ## What it means
    The data interface is switched off, has no carrier, or is up and passes no packets. In the last case the VLAN may be
    wrong, the switch port shut, or the transceiver dead. The node itself works: its agent answers over another network.

    ## Why it breaks the job
    Every collective needs every node. The ranks of this node cannot connect, and all others wait for them. Neither NCCL
    nor Gloo says which node is at fault: each rank names the neighbor that it happened to wait for.

    ## Example
    Output of `ip -br link`. UP together with NO-CARRIER would mean a cable without a signal:

        ens1f1           DOWN           b8:ce:f6:11:22:33 <NO-CARRIER,BROADCAST,MULTICAST,UP>

    ## Fix
    Look at the interface, then at the switch port on its other end:

        ip -br link; ethtool IFACE | grep -E 'Link|Speed'; dmesg | grep -i 'link is'
        ip link set IFACE up                              # if it is only switched off

    If there is no carrier, reseat cable and transceiver, then try another switch port. If there is a carrier, compare
    the VLAN of its switch port with that of a neighbor, and look for FAILED entries in `ip neigh`. Until then, run
    without the node: `--exclude=NODE`.

    ## Source
    Linux, what drivers print when a link goes: ethernet/broadcom/tg3.c, ethernet/mellanox/mlx5/core, intel/e1000e,
    phy/phy.c below drivers/net (read 2026-11-21). Bonding's, bnx2's and NetworkManager's words are from public logs.
    The words of the other drivers were not checked against the source. ip-link(8), ethtool(8).
    """

    message = "{what}"
    fix = (
        "on {node}: ip -br link; DOWN: ip link set {interface} up; NO-CARRIER: check cable, transceiver, switch "
        "port; UP: check the switch port's VLAN and state"
    )
    exit_code = Exit.NODE_FAULT
    traits = frozenset({Trait.CUTS_ITS_NODE_OFF, Trait.ONCE_A_NODE})
    symptoms = (Symptom.SILENT,)
    also = ("AR203", "AR201", "AR206", "AR214", "AR302")
    told = "a network interface lost its link, or there is no route to the network"
    signs = (
        Sign(
            r"[ :](?P<interface>[A-Za-z][A-Za-z0-9_.-]{1,15}):?(?: e1000_watchdog:)? NIC (?:Copper )?Link is [Dd]own",
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"mlx[45]_(?:core|en):? (?:[0-9a-f:.]{7,14} )?(?P<interface>[A-Za-z][A-Za-z0-9_.-]{1,15}): Link [Dd]own",
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"(?:tg3|r8169|bnx2x?|be2net|igc|sfc|qede|cxgb4|atlantic|aquantia) [0-9a-f:.]{7,14} "
            r"(?P<interface>[A-Za-z][A-Za-z0-9_.-]{1,15}): Link is [Dd]own",
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"link status definitely down for interface (?P<interface>[A-Za-z][A-Za-z0-9_.-]{1,15})",
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"\(slave (?P<interface>[A-Za-z][A-Za-z0-9_.-]{1,15})\): link status definitely down",
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"(?P<interface>[A-Za-z][A-Za-z0-9_.-]{1,15}): now running without any active interface",
            confidence=Confidence.LIKELY,
        ),
        Sign(r"systemd-networkd\[[0-9]+\]: (?P<interface>[A-Za-z][A-Za-z0-9_.-]{1,15}): Lost carrier"),
        Sign(
            r"\((?P<interface>[A-Za-z][A-Za-z0-9_.-]{1,15})\): (?:device )?state change: activated -> unavailable "
            r"\(reason 'carrier-changed'"
        ),
        Sign(
            r"[Cc]onnect to " + NCCL_PEER + r" (?:failed : |returned (?:101\()?)Network is unreachable",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        # To an IPv6 address it is what a healthy machine without an IPv6 route says.
        Sign(
            rf"client socket has failed to connect to "
            rf"\[?(?:::ffff:)?(?P<peer>{IPV4}|[A-Za-z0-9_][A-Za-z0-9_.-]{{0,120}})"
            r"\]?:[0-9]+ \(errno: 101 - Network is unreachable\)",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
        Sign(
            r"connect \[(?P<peer>[0-9A-Fa-f.:]{3,45})\]:(?P<port>[0-9]+): Network is unreachable",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(r"SO_ERROR: Network is unreachable, remote=" + GLOO_PEER, Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"vs -1\. ?connect: Network is unreachable", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(
            r"NETDEV WATCHDOG: (?P<interface>[\w.@-]{1,16}) \([^)]{1,40}\): (?:CPU: [0-9]+: )?transmit queue [0-9]+ "
            r"timed out",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
    )
    hits = (
        "NETDEV WATCHDOG: eth0 (ixgbe): transmit queue 3 timed out",
        "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/socket.cc:142] rv != -1. -1 vs "
        "-1. connect: Network is unreachable",
        "[1234.5] ixgbe 0000:03:00.0 eth0: NIC Link is Down",
        "[1234.5] igb: eno1 NIC Link is Down",
        "e1000: eth0: e1000_watchdog: NIC Link is Down",
        "bnx2 0000:01:00.0: eth1: NIC Copper Link is Down",
        "NetworkManager[732]: <info> (eth0): device state change: activated -> unavailable (reason 'carrier-changed') "
        "[100 20 40]",
        "[88123.412345] mlx5_core 0000:3b:00.0 ens1f0np0: Link down",
        "[88123.412345] tg3 0000:02:00.0 eno1: Link is down",
        "kernel: bonding: bond0: link status definitely down for interface eth1, disabling it",
        "kernel: bond0: (slave ens1f1): link status definitely down, disabling slave",
        "kernel: bond0: now running without any active interface!",
        "n07 systemd-networkd[812]: ens1f1: Lost carrier",
        "NetworkManager[901]: <info>  [1719.42] device (ens1f1): state change: activated -> unavailable (reason "
        "'carrier-changed', sys-iface-state: 'managed')",
        "node5:240:240 [6] misc/socket.cc:452 NCCL WARN Net : Connect to 10.0.0.4<56849> failed : Network is "
        "unreachable",
        "[W socket.cpp:601] [c10d] The client socket has failed to connect to [node01]:29500 (errno: 101 - Network is "
        "unreachable).",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [10.0.0.2]:8463: Network is "
        "unreachable",
        "RuntimeError: timed out connecting: SO_ERROR: Network is unreachable, remote=[10.0.0.2]:34567",
    )
    misses = (
        "[88123.412345] mlx5_core 0000:3b:00.0 ens1f0np0: Link up",
        "[1234.5] ixgbe 0000:03:00.0 eth0: NIC Link is Up 10 Gbps, Flow Control: RX/TX",
        "[12.3] ata5: SATA link down (SStatus 0 SControl 300)",
        "[W socket.cpp:601] [c10d] The client socket has failed to connect to [2001:db8::7]:29500 (errno: 101 - "
        "Network "
        "is unreachable).",
        "OSError: [Errno 101] Network is unreachable",
    )

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Fails if the data interface is switched off or has no carrier."""
        if card.facts is None or "interfaces" in card.facts.unread:
            return unknown("the node's interfaces could not be read")
        nic = data_interface(card)
        if nic is None:
            return skipped("the interface that carries gradients is unknown")
        if nic.is_up:
            return PASSED
        why = {False: "no carrier", None: "switched off"}.get(nic.has_carrier, "not running")
        return failed(
            f"{nic}, carrier: {nic.has_carrier}, changes since boot: {nic.carrier_changes}",
            interface=nic.name,
            what=f"the data interface {nic.name} is down: {why}",
        )


class Partition(Cause, id="AR211"):
    """Two nodes, or two groups of nodes, cannot reach each other.

    ## What it means
    Neither node is broken: each communicates with others. No packets pass between these two nodes or groups. Common
    reasons are a missing trunk between switches, a VLAN that ends at one of them, a routing or firewall rule for one
    pair, or a duplicate address.

    ## Why it breaks the job
    A ring or tree that crosses the gap stops. On both sides some ranks report that they are ready, so every rank looks
    healthy to its neighbors, and no message names the gap.

    ## Example
    From NVIDIA/nccl#1634: nodes 1 to 5 run together, and nodes 6 and 11 run together, but any mix of both groups hangs
    in the first collective. The reason there was a missing plugin; a network partition looks the same.

    ## Fix
    Find out from one side of the gap which addresses fail, and where the path ends:

        ip neigh | grep -i failed; traceroute -n ADDRESS; arping -I IFACE ADDRESS

    Tell the network's admin the switches and ports of both groups: the fault is between them. Until then, run within
    one group: `--nodelist=...`, or `#SBATCH --switches=1`.

    ## Source
    https://github.com/NVIDIA/nccl/issues/1634 (read 2026-11-21). SLURM, sbatch(1), --switches:
    https://slurm.schedmd.com/sbatch.html.
    """

    message = "{what}"
    fix = (
        "check the path between them: trunk, VLAN, route, filter (traceroute -n ADDRESS); until then run on one side "
        "only: sbatch --nodelist=..."
    )
    exit_code = Exit.NODE_FAULT
    symptoms = (Symptom.SILENT,)


class PeerConnectionLost(Cause, id="AR215"):
    """A connection between two ranks broke during the job.

    ## What it means
    A rank lost its connection to another one. Most often the process at the other end died (AR407 names it), and this
    line is a consequence. If both processes still run, the path between them failed.

    ## Why it breaks the job
    A process group does not repair a lost connection: the collective fails on this rank, then on its neighbors, one
    after the other. Each rank names the neighbor that it lost, so most of these lines point at innocent ranks. The
    earliest line is closest to the cause.

    ## Example
    From PyTorch with Gloo, and from NVIDIA/nccl#1232:

        [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:31661
        misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer node2<42830>

    ## Fix
    First find out which process died: look for the rank without such a line, and for the process that ended first.

        allranks why JOB; sacct -j JOB --format=JobID,NodeList,State,ExitCode

    If all processes were alive, check the link (`dmesg | grep -i 'link is'`, carrier_changes under
    /sys/class/net/IFACE), and check for firewalls that drop idle connections.

    ## Source
    Gloo, gloo/transport/tcp/pair.cc (in PyTorch 2.13). NCCL, src/misc/socket.cc (several versions), src/os/linux.cc.
    Open MPI, opal/mca/btl/tcp/help-mpi-btl-tcp.txt (read 2026-11-21). https://github.com/NVIDIA/nccl/issues/795, /963,
    /1920; https://github.com/horovod/horovod/issues/147. https://github.com/NVIDIA/nccl/issues/1232 (read 2026-11-21).
    """

    message = "{what}"
    fix = "find the process that died first; if none died, on {node} and its neighbors: dmesg | grep -i 'link is'"
    exit_code = Exit.NODE_FAULT
    traits = frozenset({Trait.AFTER_THE_END, Trait.BREAKS_WITH_ITS_PEER})
    no_fault_yet = "the guard finds the cause behind it (AR210, AR211, AR204, AR407); logs alone do not always show it"
    also = ("AR407", "AR203", "AR206", "AR210", "AR211", "AR414")
    told = "a connection between two ranks broke; these logs do not say why"
    signs = (
        Sign(
            r"Connection closed by peer " + GLOO_PEER, Role.VICTIM, Blames.PEER, Confidence.LIKELY, where=("log", "end")
        ),
        Sign(
            r"tcp/pair\.cc:[0-9]+\] Connection closed by peer$",
            Role.VICTIM,
            Blames.NOBODY,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"Read error " + GLOO_PEER + r": (?P<error>[A-Z][a-z]{2,12} [a-z ]{3,30})",
            Role.VICTIM,
            Blames.PEER,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"writev " + GLOO_PEER + r": (?P<error>[A-Z][a-z]{2,12} [a-z ]{3,30})",
            Role.VICTIM,
            Blames.PEER,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"Socket (?:unexpectedly )?closed " + GLOO_PEER,
            Role.VICTIM,
            Blames.PEER,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"Connection closed by remote peer " + NCCL_PEER,
            Role.VICTIM,
            Blames.PEER,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"Net : Connection closed by remote peer",
            Role.VICTIM,
            Blames.NOBODY,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"Call to (?:recv from|send to) " + NCCL_PEER + r" failed : (?P<error>[A-Z][a-z]{2,12} [a-z ]{3,30})",
            Role.VICTIM,
            Blames.PEER,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"Call to (?:recv|send) failed : (?P<error>Connection reset by peer|Broken pipe|Connection timed out)",
            Role.VICTIM,
            Blames.NOBODY,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"[Cc]onnect to " + NCCL_PEER + r" (?:failed : |returned 1(?:04|11)\()(?P<error>Connection re[a-z ]{4,16})",
            Role.VICTIM,
            Blames.PEER,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"[Cc]onnect to " + NCCL_PEER + r" returned (?P<error>Connection refused), exceeded",
            Role.VICTIM,
            Blames.PEER,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"connect " + GLOO_PEER + r": (?P<error>Connection refused|Connection reset by peer)",
            Role.VICTIM,
            Blames.PEER,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"SO_ERROR: (?P<error>Connection refused|Connection reset by peer), remote=" + GLOO_PEER,
            Role.VICTIM,
            Blames.PEER,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        # TensorPipe, of torch.distributed.rpc: who is a worker's name, often its rank.
        Sign(
            r"RPC agent for [^ ]{1,80} encountered error when (?:reading incoming|sending) [^:]{1,60} (?:from|to) "
            r"(?P<peer>[^ :]{1,80}): (?P<error>[^(]{3,120})",
            Role.VICTIM,
            Blames.PEER,
            Confidence.LIKELY,
        ),
        # NCCL's proxy.cc, 2.12 and newer: the network thread that this rank asked, which is often its own node's.
        Sign(
            r"Proxy Call to rank (?P<peer>[0-9]+) failed \((?:Connect|Setup)",
            Role.VICTIM,
            Blames.PEER,
            Confidence.UNDECIDED,
        ),
        Sign(
            r"socket(?:Start|Poll)Connect: exceeded retries \(",
            Role.VICTIM,
            Blames.NOBODY,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"possibly due to a network error or a remote process exiting",
            Role.VICTIM,
            Blames.NOBODY,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"remote process exited or there was a network error",
            Role.VICTIM,
            Blames.NOBODY,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"MPI communication peer process has unexpectedly disconnected",
            Role.VICTIM,
            Blames.NOBODY,
            Confidence.LIKELY,
        ),
        Sign(r"Peer host: {1,4}(?P<node>[A-Za-z0-9_.-]+)", Role.VICTIM, Blames.NAMED, Confidence.LIKELY),  # Open MPI's
        Sign(r"mca_btl_tcp_frag_recv: readv failed: ", Role.VICTIM, Blames.NOBODY, Confidence.LIKELY),
        Sign(
            r"Could not receive type from localRank (?P<local_rank>[0-9]+), res=",
            Role.VICTIM,
            Blames.NOBODY,
            Confidence.LIKELY,
        ),
        # In any wording: a client of the script's own says the same, so the name of who says it has to stand before it.
        Sign(
            r"(?:gloo|pair\.cc|c10d|Dist[A-Z]\w+Error|NCCL|TCPStore|SocketImpl|socket[A-Z]\w+)\b.*"
            r"(?:Connection (?:closed by (?:remote )?peer|reset by peer|refused|timed out|was likely closed)"
            r"|Broken pipe|No route to host|[Ss]ocket [Tt]imeout)",
            Role.VICTIM,
            Blames.NOBODY,
            Confidence.LIKELY,
            where=("end",),
        ),
        Sign(r"connectFullMesh failed", Role.VICTIM, Blames.NOBODY, Confidence.LIKELY, where=("end",)),
        # Of allranks' own session (state.resumed.track).
        Sign(r"does not count, a collective failed", Role.VICTIM, Blames.NOBODY, Confidence.LIKELY, where=("end",)),
    )
    hits = (
        "host:22337:22400 [6] proxy.cc:862 NCCL WARN Proxy Call to rank 14 failed (Connect)",
        "node01:1:1 [0] proxy.cc:1458 NCCL WARN [Service thread] Could not receive type from localRank 3, res=3, "
        "closed=0",
        "[W tensorpipe_agent.cpp:916] RPC agent for 3 encountered error when sending outgoing request #0 to 0: async "
        "error on socket: Connection reset by peer (this error originated at tensorpipe/transport/shm/x.cc:187)",
        "[W tensorpipe_agent.cpp:653] RPC agent for worker1 encountered error when reading incoming request from "
        "worker0: EOF: end of file",
        "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        "[127.0.0.1]:31661. This is typically caused by a remote worker crashing.",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:535] Read error [10.1.3.122]:42916: "
        "Connection reset by peer",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:371] writev [10.1.3.122]:42916: "
        "Broken pipe",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:814] Socket closed [10.1.3.122]:42916",
        "ubuntu:39964:40044 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer "
        "node1<57557>",
        "node1:54573:54696 [1] misc/socket.cc:91 NCCL WARN Net : Connection closed by remote peer",
        "a100-22:183006:183220 [1] misc/socket.cc:518 NCCL WARN Net : Call to recv from 10.200.84.247<58355> failed : "
        "Broken pipe",
        "gpu-server320 [5] misc/socket.cc:46 NCCL WARN socketProgressOpt: Call to send to 10.44.137.149<52905> "
        "failed : "
        "Connection reset by peer",
        "node1:54573:54696 [1] include/socket.h:194 WARN Call to recv failed : Connection reset by peer",
        "node1:248281:248336 [3] misc/socket.cc:456 NCCL WARN Net : Connect to 10.0.0.2<40537> failed : "
        "Connection reset "
        "by peer",
        "node1:240:241 [0] misc/socket.cc:61 NCCL WARN ncclOsSocketPollConnect: connect to 10.0.0.4<40123> returned "
        "Connection refused, exceeded error retry count after 35 attempts",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [10.0.0.2]:8463: Connection "
        "refused",
        "RuntimeError: Gloo connectFullMesh failed with "
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] timed "
        "out connecting: SO_ERROR: Connection refused, remote=[10.0.0.2]:34567",
        "node5:240:240 [6] misc/socket.cc:507 NCCL WARN socketPollConnect: exceeded retries (20000)",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited or there was a network error, NCCL version "
        "2.18.1",
        "An MPI communication peer process has unexpectedly disconnected.  This",
        "  Peer host:  node07",
        "[n1][[5412,1],1][btl_tcp_frag.c:242:mca_btl_tcp_frag_recv] mca_btl_tcp_frag_recv: readv failed: Connection "
        "reset by peer (104)",
        "step 7 does not count, a collective failed; ",
    )
    misses = (
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "node2:65507:494 [5] NCCL INFO [Service thread] Connection closed by localRank 5",
        "node1:71:80 [0] NCCL INFO socketPollConnect: connect to 10.0.0.4<40123> returned Connection refused, retrying "
        "(1/34) after sleep for 100 msec",
    )
