"""Do packets come through whole, all of them, and fast: MTU, loss, speed?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from allranks.causes.cause import Cause, Outcome, Symptom, warned
from allranks.causes.fabric import why_no_rdma
from allranks.causes.net.cards import data_interface, with_facts
from allranks.causes.sign import Role, Sign
from allranks.model.card import Card, Interface
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Status
from allranks.model.hostlist import fold_hosts


class MtuBlackhole(Cause, id="AR204"):
    """Large packets are lost between two nodes.

    ## What it means
    Both interfaces are set to send packets of some size, but a device between them accepts only smaller ones: a switch
    port, a bridge or a tunnel has MTU 1500 and the interfaces have 9000. The sender does not notice. A router would
    tell it with an ICMP message, but a switch sends none, and a filter may drop it.

    ## Why it breaks the job
    The packets of a handshake are small and pass, so `init_process_group` succeeds on all ranks. The first all-reduce
    is large: TCP resends the same full-sized segments, none arrives, and the job hangs without a message until the
    timeout.

    ## Example
    From our lab: six nodes have MTU 9000, and one switch port has MTU 1500. The job itself prints nothing. `ping` shows
    the loss:

        $ ping -c 3 -M do -s 8972 192.168.20.13
        3 packets transmitted, 0 received, 100% packet loss

    ## Fix
    Find the largest packet that passes (`ping -s` does not count 28 bytes of headers):

        ping -c 3 -M do -s 1472 ADDRESS; ping -c 3 -M do -s 8972 ADDRESS; tracepath -n ADDRESS

    Then either set the switch ports, bridges and tunnels of the data network to at least 9000 (many switches want
    9216), or set all data interfaces to the size that passes: `ip link set IFACE mtu 1500`. `sysctl -w
    net.ipv4.tcp_mtu_probing=1` lets TCP find the size by itself after some seconds; it does not help RDMA and UDP.

    ## Source
    RFC 2923, "TCP Problems with Path MTU Discovery", 2.1 Black Hole Detection: https://www.rfc-editor.org/rfc/rfc2923.
    Linux, Documentation/networking/ip-sysctl.rst, tcp_mtu_probing (6.18).
    """

    aliases = ("MN4",)
    message = "packets above {path_mtu} bytes are lost between {culprit} and {peers}; the interfaces have MTU {mtu}"
    fix = (
        "set the switch port, bridge or tunnel of {culprit} to MTU {mtu}, or run on all nodes: ip link set "
        "{interface} mtu {path_mtu}"
    )
    exit_code = Exit.NODE_FAULT
    symptoms = (Symptom.LARGE_LOST,)
    also = ("AR205", "AR215")
    told = "packets as large as the interface's MTU are lost"
    signs = (
        Sign(
            r"From (?P<peer>[^ ]{1,120}) (?:\([0-9a-fA-F.:]{3,45}\) )?icmp_seq=[0-9]+ Frag needed and DF set "
            r"\(mtu = (?P<mtu>[0-9]+)\)"
        ),
        Sign(
            r"ping: local error: [Mm]essage too long, mtu=(?P<mtu>[0-9]+)", Role.LIKELY, confidence=Confidence.UNDECIDED
        ),
        Sign(r"Call to (?:send|recv)[^:]{0,160}failed : Message too long", Role.LIKELY, confidence=Confidence.LIKELY),
    )
    hits = (
        "From 192.168.20.1 icmp_seq=1 Frag needed and DF set (mtu = 1500)",
        "From gw (192.168.20.1) icmp_seq=1 Frag needed and DF set (mtu = 1450)",
        "ping: local error: message too long, mtu=1500",
        "n1:71:80 [0] misc/socket.cc:46 NCCL WARN socketProgressOpt: Call to send to 10.0.0.2<52905> failed : Message "
        "too long",
    )
    misses = (
        "ens1f1: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 9000 qdisc mq state UP",
        "OSError: [Errno 90] Message too long",
    )


class MtuUnequal(Cause, id="AR205"):
    """The data interfaces have different MTUs.

    ## What it means
    The data interface of one node accepts larger packets than that of another. Usually somebody set one by hand, and a
    reboot reset it.

    ## Why it breaks the job
    TCP agrees on the smaller size when it connects. A job over plain Ethernet runs, but slower than it could. RDMA
    takes its packet size from the interface, so over RoCE the two ends do not match. UDP datagrams that are larger than
    the smaller MTU are lost, and so is every packet that a bridge on the way would have to split.

    ## Example
    Output of `ip link` on two nodes. NCCL does not report the difference. Since 2.20 it fails over RoCE with "local
    access violation work queue error"; NVIDIA/nccl#1524 asks for a warning:

        ens1f1: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 9000 qdisc mq state UP
        ens1f1: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1500 qdisc mq state UP

    ## Fix
    Set the same value on all nodes and switch ports, and make it survive a reboot:

        ip link set IFACE mtu 9000
        nmcli connection modify CONNECTION 802-3-ethernet.mtu 9000

    ## Source
    https://github.com/NVIDIA/nccl/issues/1524. RFC 9293, 3.7.1, maximum segment size option:
    https://www.rfc-editor.org/rfc/rfc9293.
    """

    message = "{what}"
    fix = "set all data interfaces to MTU {wanted}: ip link set {interface} mtu {wanted}"
    exit_code = Exit.NODE_FAULT
    also = ("AR301", "AR302")
    told = "two ends of an RDMA connection disagree, for example because one has a larger MTU"
    signs = (
        # Since NCCL 2.20 the larger MTU is no longer lowered to the peer's; other faults of RDMA end so, too.
        Sign(
            r"NET/IB ?: (?P<hca>[A-Za-z0-9_]{2,30}:[0-9]+) Got async (?:event : |error event: )local access "
            r"violation work queue error",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
    )
    hits = (
        "node201:127799:127863 [0] transport/net_ib.cc:101 NCCL WARN NET/IB : mlx5_0:1 Got async event : local access "
        "violation work queue error",
    )
    misses = (
        "n1:71:80 [0] transport/net_ib.cc:101 NCCL WARN NET/IB : mlx5_0:1 Got async event : port error",
        "ens1f1: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 9000 qdisc mq state UP",
    )

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Warns if the MTUs of the data interfaces differ; fails if RoCE uses them."""
        nics = _data_interfaces(cards)
        mtus = {host: nic.mtu for host, nic in nics.items() if nic.mtu}
        counts = Counter(mtus.values()).most_common()
        if len(counts) < 2:
            return []
        status = Status.FAIL if any(_has_roce(card, nics) for card in cards) else Status.WARN
        evidence = tuple(f"{_fold(mtus, mtu)}: MTU {mtu}" for mtu, _ in counts[:4])
        usual, num_usual = counts[0]
        if counts[1][1] == num_usual:
            values: Mapping[str, object] = {
                "what": f"the MTUs of the data interfaces differ: {' and '.join(str(mtu) for mtu, _ in counts[:4])}",
                "wanted": " or ".join(str(mtu) for mtu, _ in counts[:4]),
            }
            outcome = Outcome(status, values=values, evidence=evidence, confidence=Confidence.UNDECIDED)
            return [(tuple(mtus), outcome)]
        found = []
        for mtu, _ in counts[1:]:
            hosts = tuple(host for host, own in mtus.items() if own == mtu)
            values = {
                "what": f"the data interface has MTU {mtu}; {num_usual} of {len(mtus)} nodes have {usual}",
                "wanted": usual,
            }
            outcome = Outcome(status, values=values, evidence=evidence, interface=_common_name(nics, hosts))
            found.append((hosts, outcome))
        return found


class PacketLoss(Cause, id="AR212"):
    """Some packets are lost between two nodes.

    ## What it means
    The nodes connect and data arrives, but some packets are lost. Common reasons are a bad cable or transceiver, a
    duplex mismatch, a full switch buffer, or an overloaded link.

    ## Why it breaks the job
    TCP takes each lost packet for congestion and slows down: a loss of 1 % costs most of the bandwidth of a fast link.
    A collective is as fast as its slowest link, so the whole job slows down and may look as if it hangs. RoCE without
    lossless Ethernet fails.

    ## Example
    A counter in `ethtool -S` (mlx5 driver) with a bad cable or transceiver. It should be 0:

        rx_crc_errors_phy: 184467

    ## Fix
    Find where packets are lost. Run this on both ends, and read the counters of the switch port:

        ip -s link show IFACE; ethtool -S IFACE | grep -iE 'err|drop|discard|crc'; ping -c 200 -i 0.01 -q ADDRESS

    If CRC errors rise, clean or replace the transceiver and the cable. If packets are dropped without errors, the link
    is congested: check flow control (`ethtool -a IFACE`) and which other jobs use the link. Until then, run without the
    node: `--exclude=NODE`.

    ## Source
    Linux, Documentation/networking/statistics.rst (6.18). ethtool(8).
    M. Mathis et al., "The Macroscopic Behavior of the TCP Congestion Avoidance Algorithm", CCR 27(3), 1997.
    """

    message = "{percent} % of the packets between {culprit} and {peers} are lost"
    fix = (
        "on {culprit}: ip -s link show {interface}; ethtool -S {interface}; CRC errors: replace cable or "
        "transceiver; drops: check congestion and flow control"
    )
    exit_code = Exit.NODE_FAULT
    symptoms = (Symptom.LOSSY,)
    told = "some packets are lost"
    signs = (
        Sign(r"nf_conntrack: (?:nf_conntrack: )?table full, dropping packet"),
        Sign(r"neighbour: (?:arp_cache|ndisc_cache): neighbor table overflow"),
        Sign(
            r" packets transmitted, [0-9]+ received,(?: \+[0-9]+ errors,)? (?P<percent>[1-9][0-9]?(?:\.[0-9]+)?)% "
            r"packet loss",
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"rx_crc_errors(?:_phy)?: (?P<count>[1-9][0-9]*)",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
    )
    hits = (
        "kernel: nf_conntrack: nf_conntrack: table full, dropping packet",
        "kernel: neighbour: arp_cache: neighbor table overflow!",
        "200 packets transmitted, 188 received, 6% packet loss, time 1993ms",
        "     rx_crc_errors_phy: 184467",
    )
    misses = (
        "200 packets transmitted, 200 received, 0% packet loss, time 1993ms",
        "     rx_crc_errors_phy: 0",
        "kernel: TCP: request_sock_TCP: Possible SYN flooding on port 29500. Sending cookies.  Check SNMP counters.",
    )


class SlowLink(Cause, id="AR213"):
    """A node's link is slower than its neighbors'.

    ## What it means
    The interface came up at a lower speed than those of the other nodes (a bad cable turns 25 Gbit/s into 10), or it
    reports the same speed and carries less. Then another job uses the link, a traffic shaper limits it, or its slot has
    too few PCIe lanes.

    ## Why it breaks the job
    The job runs, but at the speed of this link: in a ring all-reduce every byte passes through every node. All GPUs of
    all other nodes wait for it in each step.

    ## Example
    Output of `ethtool` on the slow node and on another one:

        Speed: 1000Mb/s
        Speed: 10000Mb/s

    ## Fix
    Compare the node with a fast one:

        ethtool IFACE | grep -E 'Speed|Duplex|Auto'; tc qdisc show dev IFACE; lspci -vv | grep -E 'Ethernet|LnkSta:'
        iperf3 -s                                         # on one node, iperf3 -c ADDRESS on the other

    If `ethtool` shows a lower speed, check cable, transceiver and the settings of the switch port. If it shows the same
    speed, find out who else uses the link. Until then, run without the node: `--exclude=NODE`.

    ## Source
    Linux, Documentation/ABI/testing/sysfs-class-net: speed (6.18).
    nccl-tests, doc/PERFORMANCE.md: what each link carries in a ring: https://github.com/NVIDIA/nccl-tests.
    """

    message = "the link of {culprit} carries {mbit_s} Mbit/s, those of the other nodes {usual_mbit_s} Mbit/s"
    fix = (
        "on {culprit}: ethtool {interface}; low Speed: check cable, transceiver, switch port; full Speed: check tc "
        "qdisc and who else uses the link"
    )
    exit_code = Exit.NODE_FAULT
    symptoms = (Symptom.SLOW,)
    told = "a network interface came up below its full speed"
    signs = (
        Sign(r"Link Speed was downgraded by SmartSpeed"),
        Sign(
            r"Downshift occurred from negotiated speed (?P<usual>[0-9.]+[GM]bps) to actual speed "
            r"(?P<speed>[0-9.]+[GM]bps)"
        ),
        Sign(r"This is not sufficient for optimal performance of this card", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(
            r"(?:mlx[45]_core|ice|i40e|bnxt_en|ixgbe) [0-9a-f:.]{7,14}:? .{0,60}available PCIe bandwidth, limited "
            r"by (?P<speed>[0-9.]+ GT/s)",
            Role.CONTEXT,
        ),
    )
    hits = (
        "kernel: igb 0000:01:00.0 eno1: igb: eno1 Link Speed was downgraded by SmartSpeed",
        "kernel: RTL8211F Gigabit Ethernet eth0: Downshift occurred from negotiated speed 1Gbps to actual speed "
        "100Mbps, "
        "check cabling!",
        "kernel: ixgbe 0000:03:00.0: This is not sufficient for optimal performance of this card.",
        "kernel: mlx5_core 0000:3b:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x8 link at "
        "0000:3a:00.0 (capable of 126.016 Gb/s with 8.0 GT/s PCIe x16 link)",
    )
    misses = ("[1234.5] ixgbe 0000:03:00.0 eth0: NIC Link is Up 10 Gbps, Flow Control: RX/TX",)

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Warns if a minority of the data interfaces came up at a lower speed than the others."""
        nics = _data_interfaces(cards)
        speeds = {h: nic.speed_mbit_s for h, nic in nics.items() if nic.speed_mbit_s and nic.speed_mbit_s > 0}
        counts = Counter(speeds.values()).most_common()
        if len(counts) < 2 or counts[1][1] == counts[0][1]:
            return []
        usual = counts[0][0]
        found = []
        for speed, _ in counts[1:]:
            if speed >= usual:
                continue
            hosts = tuple(host for host, own in speeds.items() if own == speed)
            outcome = warned(
                *(f"{_fold(speeds, each)}: {each} Mbit/s by /sys/class/net/*/speed" for each in (speed, usual)),
                interface=_common_name(nics, hosts),
                culprit=fold_hosts(list(hosts)),
                mbit_s=speed,
                usual_mbit_s=usual,
            )
            found.append((hosts, outcome))
        return found


def _data_interfaces(cards: Sequence[Card]) -> dict[str, Interface]:
    """The data interface of each node that has one and is up; one machine's loopback is none."""
    nics = {card.host: data_interface(card) for card, _ in with_facts(cards)}
    return {host: nic for host, nic in nics.items() if nic is not None and nic.is_up and nic.kind != "loopback"}


def _fold(values: Mapping[str, int], value: int) -> str:
    return fold_hosts([host for host, own in values.items() if own == value])


def _common_name(nics: Mapping[str, Interface], hosts: Sequence[str]) -> str | None:
    names = {nics[host].name for host in hosts}
    return names.pop() if len(names) == 1 else None


def _has_roce(card: Card, nics: Mapping[str, Interface]) -> bool:
    """Whether NCCL would speak RDMA over this node's data interface."""
    if card.facts is None or card.host not in nics or why_no_rdma(card):
        return False
    return any(
        port.state == "ACTIVE" and port.link_layer == "Ethernet" and port.netdev in (None, nics[card.host].name)
        for port in card.facts.rdma_ports
    )
