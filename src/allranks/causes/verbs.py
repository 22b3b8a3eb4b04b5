"""Family 3, RDMA: is every port that NCCL would use active and without errors, and what did its operations say?

Nothing here ran on RDMA hardware: the probes were fed with sysfs trees as the kernel's documentation describes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from allranks.causes.cause import PASSED, Cause, Outcome, failed, warned
from allranks.causes.fabric import NO_LAB, active_ports, chosen_ports, port_name, rdma_facts, why_no_rdma
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.card import Card, RdmaPort
from allranks.model.errors import Exit
from allranks.model.finding import Confidence

HARDWARE_ERRORS = frozenset(
    {
        "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors",
        "excessive_buffer_overrun_errors", "port_xmit_discards",
        "local_ack_timeout_err", "packet_seq_err", "rnr_nak_retry_err", "out_of_sequence",
    }
)  # fmt: skip
"""Counters that stand for a bad link or for packets lost on it; VL15_dropped and the like grow on healthy fabrics."""

_COMPLETION = (
    r"Got completion (?:from peer (?:(?P<peer>[0-9A-Za-z.:%_*-]{2,80}|<[^>]{1,40}>)<[0-9A-Za-z_*]{1,12}> )?)?"
    r"with (?:status=|error )"
    r"(?:IBV_WC_[A-Z_]{4,20}\()?"
)
"""How NCCL says that an operation failed, before the number of ibv_wc_status: `Got completion with error 12, opcode 1`
(2.4), `from peer ... with error 12` (2.8), `with status=12` (2.18), `with status=IBV_WC_RETRY_EXC_ERR(12)` (2.28).
Source: NCCL, src/transport/net_ib.cc, src/transport/net_ib/p2p.cc; numbers: rdma-core, ibv_wc_status."""

_SAID = r"(?:^|WARN |[\n\]:>] ?)"
"""What stands before a warning of NCCL, and before the same text below PyTorch's "Last error:". Attempts that NCCL
repeats have `NCCL INFO` there."""

_EVENT = (
    r"NET/IB ?: (?:(?P<hca>[A-Za-z0-9_]{2,30}:[0-9]+) )?(?:Got )?async (?:error |fatal )?event"
    r"(?: on (?:CQ|QP|SRQ) \([^)]{1,20}\))? ?: "
)
"""How NCCL shows an asynchronous event of a device, before libibverbs' text for it."""


class IbConfig(Cause, id="AR301"):
    """NCCL cannot use an RDMA port of this node.

    ## What it means
    One of these is true: a port is inactive here but active on other nodes; no subnet manager configured it; this user
    may not open the device; NCCL_IB_HCA names devices that this node does not have.

    ## Why it breaks the job
    NCCL skips ports that it cannot use, and says so only in its INFO log. It then has fewer rails than its peers, or
    uses TCP sockets on this node alone. The first collective hangs, or all nodes run at a tenth of the bandwidth.

    ## Example
    From NVIDIA/nccl#2428, where a container had access to only one of two devices:

        NCCL WARN NET/IB : Unable to open device erdma_1

    From NCCL's troubleshooting guide, with a wrong GID index, and from a run with PCIe ACS switched on:

        NCCL WARN Call to ibv_modify_qp failed with error Invalid argument
        NCCL WARN NET/IB : Got completion with error 4, opcode 1, len 21938, vendor err 81

    ## Fix
    Show the state of the port. `INIT` means a link without a subnet manager; `DOWN` means a cable or switch port fault:

        ibstat; ls -l /dev/infiniband; cat /sys/class/infiniband/*/ports/*/state
        systemctl status opensm                           # where the subnet manager runs on a host

    RoCE: `show_gids` lists the addresses of each port. `NCCL_IB_GID_INDEX` must select the RoCE v2 address (NCCL 2.21
    and newer find it), and all nodes must be able to reach it. For status 4 ("local protection") with GPUDirect, switch
    ACS off, or test whether `NCCL_NET_GDR_LEVEL=LOC` helps.

    In containers, pass in all of /dev/infiniband. To run without RDMA, set `[network] infiniband = false`, which sets
    NCCL_IB_DISABLE=1 on all nodes.

    ## Source
    Linux, Documentation/ABI/stable/sysfs-class-infiniband: state, sm_lid (6.18).
    NCCL 2.30, src/transport/net_ib/init.cc, ncclIbInitDevices; src/misc/ibvwrap.cc, several versions (read 2026-11-21).
    NCCL user guide, "Troubleshooting", GPU Direct and ACS:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html.
    https://github.com/NVIDIA/nccl/issues/2428 (read 2026-11-21).
    """

    message = "{what}"
    told = "the RDMA set-up is wrong: device, GID index, GPUDirect (ACS) or permissions"
    fix = (
        "on {node}: ibstat; ls -l /dev/infiniband; DOWN: check cable, switch port; INIT: start the subnet manager; "
        "else correct NCCL_IB_HCA"
    )
    exit_code = Exit.NODE_FAULT
    no_fault_yet = NO_LAB
    never_on_hardware = True
    also = ("AR302", "AR303", "AR205", "AR305", "AR306")
    signs = (
        Sign(r"NET/IB ?: Unable to open device (?P<hca>[A-Za-z0-9_]{2,30})"),
        Sign(
            _SAID + r"Call to ibv_modify_qp failed with (?:error )?(?:[0-9]+ )?(?P<said>[A-Z][a-z ]{3,40})"
            r"(?:.{0,20}on dev (?P<hca>[A-Za-z0-9_]{2,30}:-?[0-9]+))?"
        ),
        Sign(_SAID + r"Call to ibv_modify_qp failed(?:$|[^ ])"),
        Sign(r"ibv_modify_qp failed \(errno [0-9]+\)"),  # MSCCL++
        Sign(
            r"Call to ibv_(?:open_device|query_device|query_port|query_gid|alloc_pd) failed",
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"Call to ibv_(?:reg_mr|reg_mr_iova2|reg_dmabuf_mr|create_cq|create_qp) failed with error "
            r"(?:Bad address|Invalid argument|Operation not |No such device)",
            confidence=Confidence.LIKELY,
        ),
        Sign(_COMPLETION + r"(?P<status>[1246789]|1[01])\b", confidence=Confidence.LIKELY),
        Sign(_EVENT + r"(?:local access violation|invalid request local) work queue error", Role.LIKELY),
        Sign(_EVENT + r"GID table change", Role.CONTEXT),
        Sign(_SAID + r"Error: network (?P<thing>[A-Za-z0-9_ -]{0,40}) not found", confidence=Confidence.LIKELY),
        Sign(r"ACS is enabled, which breaks the GPU Direct RDMA protocol", Role.CONTEXT, Blames.NOBODY),
        # NVSHMEM's transports.
        Sign(
            r"transport/(?:ibgda|ibrc|ibdevx|libfabric)/[a-z_]{3,20}\.cpp:[0-9]+: (?:NULL value|non-zero status)",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        # EFA: aws-ofi-nccl, and what libfabric says below it.
        Sign(r"NET/OFI (?:OFI )?fi_getinfo\(\) call failed", confidence=Confidence.LIKELY),
        Sign(r"NET/OFI Couldn't (?:open|set|create|enable|bind) ", confidence=Confidence.LIKELY),
        Sign(r"NET/OFI Creating new endpoint for domain [^ ]{1,20} failed", confidence=Confidence.LIKELY),
        Sign(r"fi_getinfo: provider efa output empty list", Role.CONTEXT),
        # NCCL hands a system error up from its RDMA transport, and the line that says which is not there.
        Sign(
            r"NCCL INFO (?:transport/net_ib(?:/[a-z_]{2,20})?\.c[cu]|ib_plugin\.c|p2p_plugin\.c):[0-9]+ -> 2\b",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
        Sign(r"UCX  ERROR .{0,120}ibv_create_ah\(.{0,200} failed: ", confidence=Confidence.LIKELY),
        Sign(
            r"ib_mlx5_log\.c:[0-9]+ +(?:Local protection|Local QP operation|Remote access|Remote operation) on "
            r"(?P<hca>[a-z0-9_]{2,30}:[0-9]+)",
            confidence=Confidence.LIKELY,
        ),
        Sign(r"NET/OFI Only EFA provider is supported", Role.LIKELY, confidence=Confidence.LIKELY),
        # Intel MPI and oneCCL
        Sign(r"OFI fi_getinfo\(\) failed \(", Role.LIKELY, confidence=Confidence.UNDECIDED),
        Sign(r"NET/IB ?: read failed in ncclIbRoceGetVersionNum", Role.LIKELY, confidence=Confidence.LIKELY),
    )
    hits = (
        "node01:1:1 [0] NCCL WARN NET/OFI Only EFA provider is supported",
        "find_provider(2819)..........: OFI fi_getinfo() failed (ofi_init.c:2819:find_provider:No data available)",
        "transport/net_ib.cc:312 NCCL WARN NET/IB: read failed in ncclIbRoceGetVersionNum: Invalid argument",
        "/opt/nvshmem/nvshmem/src/modules/transport/ibgda/ibgda.cpp:1889: NULL value cannot allocate mlx5dv_devx_uar",
        "ip-10-0-3-90:1929:1937 [0] nccl_net_ofi_rdma_init:7978 NCCL WARN NET/OFI OFI fi_getinfo() call failed: No "
        "data available",
        "configure_sendrecv_inorder:213 NCCL WARN NET/OFI Couldn't set FI_OPT_EFA_SENDRECV_IN_ORDER_ALIGNED_128_BYTES",
        "nccl_net_ofi_domain_get_ep:969 NCCL WARN NET/OFI Creating new endpoint for domain 0x7f9befa99380 failed: "
        "Invalid argument",
        "libfabric:85:1747438790::core:core:fi_getinfo_():1392<warn> fi_getinfo: provider efa output empty list",
        "busybox2-ntvlv:11537:11571 [3] NCCL INFO transport/net_ib.cc:282 -> 2",
        "a100-node-3:3778851:3779883 [4] NCCL INFO ib_plugin.c:196 -> 2",
        "NCCL WARN NET/IB : Unable to open device erdma_1",
        "misc/ibvwrap.cc:284 NCCL WARN Call to ibv_modify_qp failed with error Invalid argument",
        "ibvwrap.c:174 NCCL WARN Call to ibv_modify_qp failed with error No such device errno 19",
        "misc/ibvwrap.cc:301 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1, "
        "curr state INIT, next state RTR, local GID index 3, local GID ::ffff:10.0.0.1, remote GID ::ffff:10.0.0.2",
        "misc/ibvwrap.cc:201 NCCL WARN Call to ibv_modify_qp failed",
        "mscclpp::IbError: ibv_modify_qp failed (errno 19) (Ib failure: No such device)",
        "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1, curr state INIT, next state RTR",
        "[rank3]: Call to ibv_modify_qp failed with error Invalid argument errno 22",
        "misc/ibvwrap.cc:112 NCCL WARN Call to ibv_query_gid failed with error Invalid argument errno 22",
        "misc/ibvwrap.cc:160 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Bad address",
        "transport/net_ib.cu:788 NCCL WARN NET/IB : Got completion with error 4, opcode 1, len 21938, vendor err 81",
        "transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer with error 4, opcode 0, len 0, vendor "
        "err 81 (Send) localGid ::ffff: remoteGid ::ffff:",
        "node023:10214:10303 [0] transport/net_ib.cc:1909 NCCL WARN NET/IB : Got completion from peer "
        "10.88.20.201<33057> "
        "with status=9 opcode=0 len=0 vendor err 138 (Send) localGid ::ffff:10.1.14.23 remoteGids::ffff:10.1.14.11",
        "NCCL WARN NET/IB: Got completion from peer 10.0.0.2<33057> with status=IBV_WC_LOC_PROT_ERR(4) "
        "opcode=IBV_WC_SEND(0) vendor_err=81 hca mlx5_0",
        "node201:127799:127863 [0] transport/net_ib.cc:101 NCCL WARN NET/IB : mlx5_0:1 Got async event : local access "
        "violation work queue error",
        "NCCL WARN NET/IB : mlx5_0:1 async fatal event on QP (0x7f10c0de): invalid request local work queue error",
        "NCCL WARN NET/IB : mlx5_2:1 Got async event : GID table change",
        "NCCL WARN Error: network IB not found.",
        "NCCL INFO HINT: In many cases this error indicates that ACS is enabled, which breaks the GPU Direct RDMA "
        "protocol.",
        "UCX  ERROR mlx5_0: ibv_create_ah(dlid=49152 sl=0 port=1 src_path_bits=0 dgid=::ffff:10.0.0.2) for RC DEVX QP "
        "connect on mlx5_0 failed: Connection timed out",
        "ib_mlx5_log.c:177  Local protection on mlx5_0:1/RoCE (synd 0x4 vend 0x51 hw_synd 0/0)",
    )
    misses = (
        "node05-ccncluster:44753:44753 [7] NCCL INFO NET/IB : No device found.",
        "NCCL INFO Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1, curr state INIT, next "
        "state RTR, local GID index 3, local GID N/A, remote GID N/A, retrying 1/35 after 100 msec of sleep",
        "misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        "NCCL WARN NET/IB : Got completion from peer 10.0.0.2<33057> with status=12 opcode=0 len=0 vendor err 129 "
        "(Recv)",
        "misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]",
    )

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Fails if a device cannot be opened, no subnet manager configured it, or NCCL_IB_HCA matches no port."""
        facts = rdma_facts(card)
        if isinstance(facts, Outcome):
            return facts
        chosen = chosen_ports(facts)
        problems = []
        if not chosen:
            there = ", ".join(port_name(port) for port in facts.rdma_ports)
            problems.append(
                f"NCCL_IB_HCA={facts.environment.get('NCCL_IB_HCA')} matches none of the node's ports: {there}"
            )
        for port in chosen:
            if port.link_layer == "InfiniBand" and port.phys_state == "LinkUp" and _is_zero(port.sm_lid):
                problems.append(f"{port_name(port)} has a link but no subnet manager: state {port.state}, sm_lid 0")
            elif port.state == "ACTIVE" and port.has_uverbs is False:
                problems.append(
                    f"{port_name(port)} is active, but this user may not open its /dev/infiniband/uverbs device"
                )
        return failed(*problems[1:], what=problems[0]) if problems else PASSED

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Fails if a port is inactive that is active on most of the other nodes."""
        states: dict[str, dict[str, RdmaPort]] = {}
        for card in cards:
            if card.facts is not None and not why_no_rdma(card):
                for port in chosen_ports(card.facts):
                    states.setdefault(port_name(port), {})[card.host] = port
        found = []
        for name, ports in states.items():
            num_active = sum(port.state == "ACTIVE" for port in ports.values())
            for host, port in ports.items():
                if port.state != "ACTIVE" and num_active * 2 > len(ports) - 1 and num_active > 0:
                    state = f"is {port.state} ({port.phys_state})"
                    what = f"{name} {state}; it is active on {num_active} of the other {len(ports) - 1} nodes"
                    found.append(((host,), failed(what=what)))
        return found


class IbLinkError(Cause, id="AR302"):
    """An RDMA port has counted errors.

    ## What it means
    The error counters of a port are not zero: bits arrived wrong, the link went down and came back, or packets were
    discarded or resent. The counters run since the port was last reset, so they include old errors.

    ## Why it breaks the job
    A few errors cost some time. A link that stays down longer than NCCL retries (NCCL_IB_TIMEOUT, NCCL_IB_RETRY_CNT:
    about half a minute) ends the job. The message names the peer's address, not the faulty port.

    ## Example
    From NVIDIA/nccl#1405. Status 12 means that the retry limit was exceeded; status 5 on other operations is a
    consequence:

        NCCL WARN NET/IB : Got completion from peer 10.216.210.236<54862> with status=12 opcode=0 len=0 vendor err 129 (Recv)

    ## Fix
    Find out whether the counters still rise: as root, clear them, and read them again after some minutes of traffic:

        perfquery -x; ibqueryerrors; perfquery -R
        grep . /sys/class/infiniband/*/ports/*/counters/{symbol_error,link_downed} /sys/class/infiniband/*/ports/*/hw_counters/*

    Symbol errors and recoveries: reseat or replace the cable. Discards and retries: the network is congested; on RoCE
    check PFC and ECN. If the counters of only one port rise, check its cable and switch port.

    ## Source
    Linux, Documentation/ABI/stable/sysfs-class-infiniband, counters, hw_counters (6.18).
    NCCL user guide, NCCL_IB_TIMEOUT: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (2.30).
    NCCL, src/transport/net_ib.cc, later src/transport/net_ib; Open MPI, opal/mca/btl/openib, its component
    and help-mpi-btl-openib.txt; Linux, mlx5's events and health (read 2026-11-21). UCX's words are from its
    ib_mlx5_log.c, NET/OFI's were not checked against the source. rdma-core, ibv_wc_status, ibv_event_type_str(3).
    https://github.com/NVIDIA/nccl/issues/1405 (read 2026-11-21).
    """  # noqa: E501  (a real line, a command)

    message = "{ports} has counted errors since its last reset: {counters}"
    told = "RDMA retry limit exceeded, or a port lost its link: link fault, or the peer process died"
    fix = (
        "on {node}: read the port's error counters twice, 60 s apart (perfquery -x, ibqueryerrors); if they rise: "
        "check cable, transceiver, switch port"
    )
    exit_code = Exit.NODE_FAULT
    traits = frozenset({Trait.FOLLOWS_AN_END_ELSEWHERE})
    no_fault_yet = NO_LAB
    never_on_hardware = True
    also = ("AR301", "AR210", "AR205")
    signs = (
        Sign(_COMPLETION + r"(?P<status>12)\b", blames=Blames.PEER, confidence=Confidence.LIKELY),
        Sign(_COMPLETION + r"(?P<status>13)\b", Role.LIKELY, Blames.PEER, Confidence.LIKELY),
        Sign(_COMPLETION + r"(?P<status>5)\b", Role.VICTIM, Blames.PEER, Confidence.UNDECIDED),
        Sign(_EVENT + r"port error"),
        # With several ports as one NCCL goes on without the port that failed, as long as one is left.
        Sign(r"ncclIbResiliency[A-Za-z]{3,40}: Device [0-9]+ (?:was already )?marked as failed", Role.LIKELY),
        Sign(r"The error is fatal \(No functional devices left\)", Role.LIKELY),
        Sign(_EVENT + r"(?:local catastrophic error|local work queue catastrophic error|CQ error)"),
        Sign(_EVENT + r"(?:port active|LID change|SM change|client reregistration)", Role.CONTEXT),
        Sign(r"Transport retry count exceeded on (?P<hca>[a-z0-9_]{2,30}:[0-9]+)", confidence=Confidence.LIKELY),
        Sign(r"RETRY EXCEEDED ERROR status number 12\b", confidence=Confidence.LIKELY),
        Sign(r"InfiniBand retry count between two MPI processes", confidence=Confidence.LIKELY),
        Sign(r"ibv_post_(?:send|recv)\(\) failed with error ", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"NET/OFI Request .{0,60}completed with error", Role.LIKELY, confidence=Confidence.LIKELY),
        # The kernel
        Sign(r"mlx[45]_core [0-9a-f:.]{7,14}:? .{0,40}Port module event\[error\]"),
        Sign(r"mlx[45]_core [0-9a-f:.]{7,14}:? .{0,60}(?:Cable unplugged|Link down)", Role.LIKELY),
        Sign(r"mlx[45]_core [0-9a-f:.]{7,14}:? .{0,60}device's health compromised"),
        Sign(
            r"NET/OFI Request .{0,60}completed with error.{1,400}Peer EFA addr: fi_addr_efa://\[(?P<peer>[0-9a-f:.]{4,60})\]",
            Role.LIKELY,
            Blames.PEER,
            Confidence.LIKELY,
        ),
    )
    hits = (
        "NET/OFI Request 0x7f completed with error. RC: 103. Error: 4126 (Unresponsive receiver) Peer EFA addr: "
        "fi_addr_efa://[fe80::454]:0:82",
        "kp-ddp-worker-0:3468:3905 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer "
        "10.216.210.236<54862> with status=12 opcode=0 len=0 vendor err 129 (Recv) localGid "
        "fd00:1148:9000:5000:4:200:3:ff22 remoteGidsfd00:1148:9000:5000:4:200:3:ff1f",
        "NET/IBP:Got completion from peer 7.6.13.83<36315> with status=12 opcode=32698 len=32696 vendor err 129 (Send)",
        "transport/net_ib.cu:788 NCCL WARN NET/IB : Got completion with error 12, opcode 1, len 11155, vendor err 129",
        "NCCL WARN NET/IB: Got completion from peer 10.0.0.2<33057> with status=IBV_WC_RETRY_EXC_ERR(12) "
        "opcode=IBV_WC_SEND(0) vendor_err=129 hca mlx5_0",
        "NCCL WARN NET/IB : Got completion from peer 10.0.0.2<33057> with status=13 opcode=0 len=0 vendor err 135 "
        "(Send)",
        "ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 172.16.0.59<44206> with status=5 opcode=32656 "
        "len=32659 vendor err 249 (Recv)",
        "NCCL WARN NET/IB : mlx5_0:1 Got async event : port error",
        "[1] transport/net_ib/p2p_resiliency.cc:325 NCCL WARN NET/IB: ncclIbResiliencyHandleDeviceFailure: Device 0 "
        "marked as failed. Initiating recovery? Yes (send comm=0x7f03e8086000, outstandingRecovery=0)",
        "NCCL WARN NET/IB: The error is fatal (No functional devices left)",
        "transport/net_ib.cc:96 NCCL WARN NET/IB : Got async event : port error",
        "NCCL WARN NET/IB : mlx5_0:1 Got async error event: port error",
        "NCCL WARN NET/IB : mlx5_0:1 async fatal event: local catastrophic error",
        "NCCL WARN NET/IB : mlx5_0:1 Got async event : port active",
        "[cn0001:3639441:0:3639441] ib_mlx5_log.c:171  Transport retry count exceeded on mlx5_0:1/IB (synd 0x15 vend "
        "0x81 hw_synd 0/0)",
        "[[17920,1],3][btl_openib_component.c:3492:handle_wc] from node01 to: node02 error polling LP CQ with status "
        "RETRY EXCEEDED ERROR status number 12 for wr_id 1e8c780 opcode 1  vendor error 129 qp_idx 0",
        "The InfiniBand retry count between two MPI processes has been",
        "include/ibvwrap.h:71 NCCL WARN ibv_post_send() failed with error Cannot allocate memory, Bad WR 0x7f1, First "
        "WR 0x7f1",
        "ofi_process_cq:196 NCCL WARN NET/OFI Request 0x400aa7dd3b98 completed with error. RC: 107.",
        "kernel: mlx5_core 0000:5e:00.0: Port module event[error]: module 0, Cable error, Bus stuck (I2C)",
        "kernel: mlx5_core 0000:5e:00.0: Port module event: module 0, Cable unplugged",
        "kernel: mlx5_core 0000:5e:00.0 ens1f0np0: Link down",
        "kernel: mlx5_core 0000:5e:00.0: poll_health:825:(pid 0): device's health compromised - reached miss count",
    )
    misses = (
        "transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer with error 4, opcode 0, len 0, vendor "
        "err 81 (Send) localGid ::ffff: remoteGid ::ffff:",
    )

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Warns if an active port that NCCL would use has counted link errors."""
        facts = rdma_facts(card)
        if isinstance(facts, Outcome):
            return facts
        errors = {}
        for port in active_ports(facts):
            counted = {name: n for name, n in port.error_counters.items() if n and name in HARDWARE_ERRORS}
            if counted:
                errors[port_name(port)] = ", ".join(f"{name} {n}" for name, n in sorted(counted.items()))
        if not errors:
            return PASSED
        evidence = [f"{name}: {counted}" for name, counted in errors.items()]
        return warned(*evidence, ports=", ".join(errors), counters=next(iter(errors.values())))


def _is_zero(number: str | None) -> bool:
    """Whether sysfs's hexadecimal `sm_lid` is 0."""
    try:
        return number is not None and int(number, 16) == 0
    except ValueError:
        return False
