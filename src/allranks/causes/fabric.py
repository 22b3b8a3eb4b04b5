"""Family 3, RDMA and fabric: do all nodes have the same ports for NCCL, and which are they?

Nothing here ran on RDMA hardware: the probes were fed with sysfs trees as the kernel's documentation describes them.
"""

from __future__ import annotations

from collections.abc import Mapping

from allranks.causes.cause import Cause, Outcome, skipped, unknown
from allranks.causes.sign import Blames, Role, Sign
from allranks.model.card import Card, Facts, RdmaPort
from allranks.model.errors import Exit
from allranks.model.finding import Severity

_NO_DEVICE = "no RDMA device"
NO_LAB = "the lab has no RDMA device"


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


class HcaSetDiffers(Cause, id="AR303"):
    """The nodes have different sets of RDMA ports for NCCL.

    ## What it means
    With NCCL_IB_HCA applied, this node has a different number of active ports than the others, or different ports.

    ## Why it breaks the job
    NCCL builds channels over all ports that a rank has. A channel over a port that the peer lacks waits forever: all
    GPUs show 100 % use, there is no traffic, and no message is printed. Since NCCL 2.30 its own check is off by default
    (NCCL_IGNORE_NET_MISMATCH=1).

    ## Example
    From NVIDIA/nccl#2428, where the second node could open only one of its two devices:

        Channel 00 -> NET/IB/0/GDRDMA     Channel 01 -> NET/IB/1

    ## Fix
    List the ports of each node:

        srun --ntasks-per-node=1 bash -c 'hostname; grep . /sys/class/infiniband/*/ports/*/state'

    Bring the missing port up (`allranks explain AR301`), or name exactly the ports that all nodes have: `export
    NCCL_IB_HCA==mlx5_0:1,mlx5_1:1`.

    ## Source
    https://github.com/NVIDIA/nccl/issues/2428 (NCCL 2.30.7, read 2026-11-21). NCCL user guide, NCCL_IB_HCA:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (2.30).
    """

    message = "{what} differs: {usual}; {odd}"
    told = "the ranks have different numbers of RDMA ports"
    signs = (
        Sign(r"Detected mixed local Net device counts across ranks .{0,60}Set NCCL_IGNORE_NET", blames=Blames.NOBODY),
        Sign(r"Detected mixed local Net device counts across ranks .{0,60}Ignoring", Role.LIKELY, Blames.NOBODY),
        Sign(
            r"Rank (?P<rank>[0-9]+) has (?P<present>[0-9]+) local Net devices \(max (?P<wanted>[0-9]+)\)",
            Role.LIKELY,
            Blames.NAMED,
        ),
    )
    hits = (
        "node01:4123:4190 [0] init.cc:1590 NCCL WARN Detected mixed local Net device counts across ranks (min 1, max "
        "2). Set NCCL_IGNORE_NET_MISMATCH=1 to continue.",
        "node01:4123:4190 [0] NCCL INFO Detected mixed local Net device counts across ranks (min 1, max 2). Ignoring "
        "due to NCCL_IGNORE_NET_MISMATCH.",
        "node01:4123:4190 [0] NCCL INFO Rank 8 has 1 local Net devices (max 2).",
    )
    misses = ("node01:4123:4190 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",)
    fix = (
        "bring the missing port of {node} up (ibstat), or name only the ports that all nodes have: "
        "NCCL_IB_HCA==mlx5_0:1,..."
    )
    exit_code = Exit.NODE_FAULT
    no_fault_yet = NO_LAB
    never_on_hardware = True

    @classmethod
    def probe(cls, card: Card) -> Outcome | None:
        """Skipped without an RDMA device, or if NCCL does not use RDMA; otherwise the nodes are compared."""
        reason = why_skipped(card, card.facts) if card.facts is not None else ""
        return skipped(reason) if reason and "rdma_ports" not in (card.facts or Facts()).unread else None

    @classmethod
    def alike(cls, card: Card) -> Mapping[str, str | None] | None:
        """All nodes must have the same number of active RDMA ports that NCCL would use; names may differ."""
        if card.facts is None or why_no_rdma(card):
            return None
        if "rdma_ports" in card.facts.unread:
            return {"the number of active RDMA ports": None}
        return {"the number of active RDMA ports": str(len(active_ports(card.facts)))}


class GdrDiffers(Cause, id="AR304"):
    """GPUDirect RDMA works on some nodes and not on others.

    ## What it means
    The kernel of some nodes can register GPU memory with the RDMA device: nvidia_peermem is loaded, or DMA-BUF is
    supported. The kernel of this node cannot, or it is the only one that can.

    ## Why it breaks the job
    The job runs, but slowly. On nodes without GPUDirect RDMA, NCCL copies everything through host memory, at half the
    bandwidth or less, and all other nodes wait.

    ## Example
    In NCCL's INFO log, a node with GPUDirect RDMA prints `NET/IB/0/GDRDMA`, and a node without it prints:

        Channel 01 -> NET/IB/1

    ## Fix
    Load the module as root on the odd node, and make it survive a reboot:

        modprobe nvidia_peermem && echo nvidia_peermem > /etc/modules-load.d/nvidia_peermem.conf

    ## Source
    NCCL user guide, NCCL_NET_GDR_LEVEL: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (2.30);
    src/transport/net_ib/gdr.cc.
    """

    message = "{what} differs: {usual}; {odd}"
    told = "GPUDirect RDMA is not available"
    signs = (Sign(r"GPU Direct RDMA Disabled for (?:HCA|GPU) [0-9]+", Role.CONTEXT),)
    hits = ("node01:4123:4190 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'",)
    misses = ("node01:4123:4190 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'",)
    fix = "on {node}, as root: modprobe nvidia_peermem"
    exit_code = Exit.NODE_FAULT
    no_fault_yet = NO_LAB
    never_on_hardware = True

    @classmethod
    def probe(cls, card: Card) -> Outcome | None:
        """Skipped without an RDMA device, or if NCCL does not use RDMA; otherwise the nodes are compared."""
        return HcaSetDiffers.probe(card)

    @classmethod
    def alike(cls, card: Card) -> Mapping[str, str | None] | None:
        """GPU memory can be registered for RDMA on all nodes with RDMA, or on none."""
        if card.facts is None or why_skipped(card, card.facts) or not active_ports(card.facts):
            return None
        words = {True: "it", False: "none", None: None}
        return {"GPUDirect RDMA": words[card.facts.has_peer_memory]}

    @classmethod
    def severity_of(cls, key: str) -> Severity:
        """It runs, more slowly."""
        return Severity.WARN


def why_skipped(card: Card, facts: Facts) -> str:
    """Return why RDMA is nothing to look at on this node: there is none, or NCCL does not use it; else empty."""
    return _NO_DEVICE if not facts.rdma_ports else why_no_rdma(card)


def rdma_facts(card: Card) -> Facts | Outcome:
    """Return the facts of a node whose RDMA ports can be judged; else why they cannot."""
    if card.facts is None or "rdma_ports" in card.facts.unread:
        return unknown("the node's RDMA devices could not be read")
    reason = why_skipped(card, card.facts)
    return skipped(reason) if reason else card.facts


def active_ports(facts: Facts) -> list[RdmaPort]:
    """Return the ports that NCCL would use."""
    return [port for port in chosen_ports(facts) if port.state == "ACTIVE"]


def chosen_ports(facts: Facts) -> list[RdmaPort]:
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


def port_name(port: RdmaPort) -> str:
    """`mlx5_0:1`, as NCCL_IB_HCA spells it."""
    return f"{port.device}:{port.port}"
