"""Family 3, RDMA and fabric: is every port that NCCL would use there, active, reachable and without errors?

Nothing here ran on RDMA hardware: the probes were fed with sysfs trees as the kernel's documentation describes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from allranks.causes.cause import PASSED, Cause, Outcome, failed, skipped, unknown, warned
from allranks.causes.sign import Sign
from allranks.model.card import Card, Facts, RdmaPort
from allranks.model.errors import Exit
from allranks.model.finding import Severity

HARDWARE_ERRORS = frozenset(
    {
        "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors",
        "excessive_buffer_overrun_errors", "port_xmit_discards",
        "local_ack_timeout_err", "packet_seq_err", "rnr_nak_retry_err", "out_of_sequence",
    }
)  # fmt: skip
"""Counters that stand for a bad link or for packets lost on it; VL15_dropped and the like grow on healthy fabrics."""

_NO_DEVICE = "no RDMA device"
_NO_LAB = "the lab has no RDMA device"


def why_no_rdma(card: Card) -> str:
    """Return why NCCL uses no RDMA on this node; empty where it would, or where that cannot be told."""
    if card.facts is None:
        return ""
    env = card.facts.environment
    if env.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return f"NCCL_IB_DISABLE={env['NCCL_IB_DISABLE']}"
    if env.get("NCCL_NET", "").lower() == "socket":
        return f"NCCL_NET={env['NCCL_NET']}"
    if card.wanted_backend == "gloo" or card.num_gpus == 0:
        return "no rank here uses NCCL"
    return ""


class IbConfig(Cause, id="AR301"):
    """An RDMA port that NCCL would use is not usable on this node.

    ## What it means
    A port is not active although it is on other nodes, or no subnet manager has taken it in, or this user may not open
    the device, or NCCL_IB_HCA names devices that are not here.

    ## Why it breaks the job
    NCCL leaves out what it cannot use and says so in its INFO log only. It then has fewer rails than its peers, or
    falls back to TCP sockets on this node alone: a hang in the first collective, or a tenth of the bandwidth for
    everybody.

    ## Example
    From NVIDIA/nccl#2428, where a container had been given one of two devices:

        NCCL WARN NET/IB : Unable to open device erdma_1

    ## Fix
    See what the port says; `INIT` is a link without subnet manager, `DOWN` a cable or a switch port:

        ibstat; ls -l /dev/infiniband; cat /sys/class/infiniband/*/ports/*/state
        systemctl status opensm                           # where the subnet manager runs on a host

    In containers hand in all of /dev/infiniband. Where NCCL shall not use RDMA at all: `[network] infiniband = false`,
    which sets NCCL_IB_DISABLE=1 on all nodes.

    ## Source
    Linux, Documentation/ABI/stable/sysfs-class-infiniband: state, sm_lid (6.18).
    NCCL 2.30, src/transport/net_ib/init.cc, ncclIbInitDevices (read 2026-11-21).
    https://github.com/NVIDIA/nccl/issues/2428 (read 2026-11-21).
    """

    message = "{what}"
    fix = "on {node}: ibstat; ls -l /dev/infiniband; DOWN: cable, switch port; INIT: subnet manager; or NCCL_IB_HCA"
    exit_code = Exit.NODE_FAULT
    no_fault_yet = _NO_LAB
    never_on_hardware = True
    also = ("AR303",)
    signs = (Sign(r"NCCL WARN NET/IB ?: Unable to open device"),)
    hits = ("NCCL WARN NET/IB : Unable to open device erdma_1",)
    misses = ("node05-ccncluster:44753:44753 [7] NCCL INFO NET/IB : No device found.",)

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Fails where a device cannot be opened, has no subnet manager, or NCCL_IB_HCA fits nothing."""
        facts = card.facts
        if facts is None or "rdma_ports" in facts.unread:
            return unknown("its RDMA devices could not be read")
        if reason := _why_skipped(card, facts):
            return skipped(reason)
        chosen = _chosen_ports(facts)
        problems = []
        if not chosen:
            there = ", ".join(_name(port) for port in facts.rdma_ports)
            problems.append(f"NCCL_IB_HCA={facts.environment.get('NCCL_IB_HCA')} fits none of its ports: {there}")
        for port in chosen:
            if port.link_layer == "InfiniBand" and port.phys_state == "LinkUp" and _is_zero(port.sm_lid):
                problems.append(f"{_name(port)} has a link and no subnet manager: state {port.state}, sm_lid 0")
            elif port.state == "ACTIVE" and port.has_uverbs is False:
                problems.append(
                    f"{_name(port)} is active, and this user may not open its /dev/infiniband/uverbs device"
                )
        return failed(*problems[1:], what=problems[0]) if problems else PASSED

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Fails where a port is not active that is on most of the other nodes."""
        states: dict[str, dict[str, RdmaPort]] = {}
        for card in cards:
            if card.facts is not None and not why_no_rdma(card):
                for port in _chosen_ports(card.facts):
                    states.setdefault(_name(port), {})[card.host] = port
        found = []
        for name, ports in states.items():
            num_active = sum(port.state == "ACTIVE" for port in ports.values())
            for host, port in ports.items():
                if port.state != "ACTIVE" and num_active * 2 > len(ports) - 1 and num_active > 0:
                    state = f"is {port.state} ({port.phys_state})"
                    what = f"{name} {state}; on {num_active} of the {len(ports) - 1} others it is active"
                    found.append(((host,), failed(what=what)))
        return found


class IbLinkError(Cause, id="AR302"):
    """An RDMA port counted errors.

    ## What it means
    The error counters of a port are not zero: bits arrived wrong, the link went down and came back, packets were
    discarded or had to be sent again. They count since the port was reset, so that old errors show, too.

    ## Why it breaks the job
    A few errors cost some time. A link that goes down for longer than NCCL retries (NCCL_IB_TIMEOUT, NCCL_IB_RETRY_CNT:
    about half a minute) ends the job, and the message names the peer's address, not the port that is at fault.

    ## Example
    From NVIDIA/nccl#1405; status 12 means that retries were used up:

        NCCL WARN NET/IB : Got completion from peer 10.216.210.236<54862> with status=12 opcode=0 len=0 vendor err 129 (Recv)

    ## Fix
    See whether they still grow; as root clear them and look again after some minutes of traffic:

        perfquery -x; ibqueryerrors; perfquery -R
        grep . /sys/class/infiniband/*/ports/*/counters/{symbol_error,link_downed} /sys/class/infiniband/*/ports/*/hw_counters/*

    Symbol errors and recoveries: reseat or replace the cable. Discards and retries: congestion, on RoCE look at PFC and
    ECN. Growing counters on one port only: its cable, its switch port.

    ## Source
    Linux, Documentation/ABI/stable/sysfs-class-infiniband, counters, hw_counters (6.18).
    NCCL user guide, NCCL_IB_TIMEOUT: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (2.30).
    https://github.com/NVIDIA/nccl/issues/1405 (read 2026-11-21).
    """  # noqa: E501  (a real line, a command)

    message = "{ports} counted errors since the last reset: {counters}"
    fix = "on {node}: see whether they grow (perfquery -x, ibqueryerrors); if so: cable, transceiver, switch port"
    exit_code = Exit.NODE_FAULT
    no_fault_yet = _NO_LAB
    never_on_hardware = True
    signs = (Sign(r"NET/IBP? ?: ?Got completion from peer .{3,120}(?:status=|with error )12\b"),)
    hits = (
        "kp-ddp-worker-0:3468:3905 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer "
        "10.216.210.236<54862> with status=12 opcode=0 len=0 vendor err 129 (Recv) localGid "
        "fd00:1148:9000:5000:4:200:3:ff22 remoteGidsfd00:1148:9000:5000:4:200:3:ff1f",
        "NET/IBP:Got completion from peer 7.6.13.83<36315> with status=12 opcode=32698 len=32696 vendor err 129 (Send)",
    )
    misses = (
        "transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer with error 4, opcode 0, len 0, vendor "
        "err 81 (Send) localGid ::ffff: remoteGid ::ffff:",
    )

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Warns where an active port that NCCL would use has counted errors of the link."""
        facts = card.facts
        if facts is None or "rdma_ports" in facts.unread:
            return unknown("its RDMA devices could not be read")
        if reason := _why_skipped(card, facts):
            return skipped(reason)
        errors = {}
        for port in _active_ports(facts):
            counted = {name: n for name, n in port.error_counters.items() if n and name in HARDWARE_ERRORS}
            if counted:
                errors[_name(port)] = ", ".join(f"{name} {n}" for name, n in sorted(counted.items()))
        if not errors:
            return PASSED
        evidence = [f"{name}: {counted}" for name, counted in errors.items()]
        return warned(*evidence, ports=", ".join(errors), counters=next(iter(errors.values())))


class HcaSetDiffers(Cause, id="AR303"):
    """The nodes have different sets of RDMA ports for NCCL.

    ## What it means
    After NCCL_IB_HCA has been applied this node has another number of active ports than the others, or other ones.

    ## Why it breaks the job
    NCCL builds channels over all ports that a rank has. Channels over a port that the peer does not have wait for ever:
    all GPUs at 100 %, no traffic, no message. Since NCCL 2.30 the check for it is off by default
    (NCCL_IGNORE_NET_MISMATCH=1).

    ## Example
    From NVIDIA/nccl#2428; the second node could open one of its two devices:

        Channel 00 -> NET/IB/0/GDRDMA     Channel 01 -> NET/IB/1

    ## Fix
    See what each node has:

        srun --ntasks-per-node=1 bash -c 'hostname; grep . /sys/class/infiniband/*/ports/*/state'

    Bring the missing port up (`allranks explain AR301`), or name the ports that all nodes have, exactly:
    `export NCCL_IB_HCA==mlx5_0:1,mlx5_1:1`.

    ## Source
    https://github.com/NVIDIA/nccl/issues/2428 (NCCL 2.30.7, read 2026-11-21). NCCL user guide, NCCL_IB_HCA:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (2.30).
    """

    message = "{what} differs: {usual}; {odd}"
    fix = "bring the missing port of {node} up, or name the ports that all nodes have: NCCL_IB_HCA==mlx5_0:1,..."
    exit_code = Exit.NODE_FAULT
    no_fault_yet = _NO_LAB
    never_on_hardware = True

    @classmethod
    def probe(cls, card: Card) -> Outcome | None:
        """Skipped where there is no RDMA device, or NCCL does not use it; the nodes are compared else."""
        reason = _why_skipped(card, card.facts) if card.facts is not None else ""
        return skipped(reason) if reason and "rdma_ports" not in (card.facts or Facts()).unread else None

    @classmethod
    def alike(cls, card: Card) -> Mapping[str, str | None] | None:
        """The active RDMA ports that NCCL would use are as many on all nodes; their names may differ."""
        if card.facts is None or why_no_rdma(card):
            return None
        if "rdma_ports" in card.facts.unread:
            return {"the number of active RDMA ports": None}
        return {"the number of active RDMA ports": str(len(_active_ports(card.facts)))}


class GdrDiffers(Cause, id="AR304"):
    """GPUDirect RDMA works on some nodes and not on others.

    ## What it means
    The kernel of some nodes can register GPU memory with the RDMA device (nvidia_peermem is loaded, or DMA-BUF is
    supported), that of this node cannot, or the other way round.

    ## Why it breaks the job
    It runs. On nodes without it NCCL copies everything through host memory: half of the bandwidth and less, and all
    other nodes wait for it.

    ## Example
    In NCCL's INFO log a node with it says `NET/IB/0/GDRDMA`, one without it:

        Channel 01 -> NET/IB/1

    ## Fix
    As root on the odd node, and so that it outlives a reboot:

        modprobe nvidia_peermem && echo nvidia_peermem > /etc/modules-load.d/nvidia_peermem.conf

    ## Source
    NCCL user guide, NCCL_NET_GDR_LEVEL: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (2.30);
    src/transport/net_ib/gdr.cc.
    """

    message = "{what} differs: {usual}; {odd}"
    fix = "on {node}, as root: modprobe nvidia_peermem"
    exit_code = Exit.NODE_FAULT
    no_fault_yet = _NO_LAB
    never_on_hardware = True

    @classmethod
    def probe(cls, card: Card) -> Outcome | None:
        """Skipped where there is no RDMA device, or NCCL does not use it; the nodes are compared else."""
        return HcaSetDiffers.probe(card)

    @classmethod
    def alike(cls, card: Card) -> Mapping[str, str | None] | None:
        """GPU memory can be registered for RDMA on all nodes that have it, or on none."""
        if card.facts is None or _why_skipped(card, card.facts) or not _active_ports(card.facts):
            return None
        words = {True: "it", False: "none", None: None}
        return {"GPUDirect RDMA": words[card.facts.has_peer_memory]}

    @classmethod
    def severity_of(cls, key: str) -> Severity:
        """It runs, more slowly."""
        return Severity.WARN


def _why_skipped(card: Card, facts: Facts) -> str:
    return _NO_DEVICE if not facts.rdma_ports else why_no_rdma(card)


def _active_ports(facts: Facts) -> list[RdmaPort]:
    return [port for port in _chosen_ports(facts) if port.state == "ACTIVE"]


def _chosen_ports(facts: Facts) -> list[RdmaPort]:
    """The ports that NCCL_IB_HCA leaves: `^` all but these, `=` exactly these, else prefixes; each with `:port` or not.

    Source: NCCL 2.30, src/transport/net_ib/init.cc, ncclIbInitDevices.
    """
    spelled = facts.environment.get("NCCL_IB_HCA", "")
    body = spelled.removeprefix("^")
    is_exact = body.startswith("=")
    entries = [entry for entry in body.removeprefix("=").split(",") if entry]
    if not entries:
        return list(facts.rdma_ports)

    def is_listed(port: RdmaPort) -> bool:
        for entry in entries:
            name, _, number = entry.partition(":")
            is_named = port.device == name if is_exact else port.device.startswith(name)
            if is_named and number in ("", str(port.port)):
                return True
        return False

    return [port for port in facts.rdma_ports if is_listed(port) is not spelled.startswith("^")]


def _name(port: RdmaPort) -> str:
    return f"{port.device}:{port.port}"


def _is_zero(number: str | None) -> bool:
    """Whether sysfs's hexadecimal `sm_lid` is 0."""
    try:
        return number is not None and int(number, 16) == 0
    except ValueError:
        return False
