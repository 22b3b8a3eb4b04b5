"""Family 3, RDMA: do the ports of all nodes agree on packet size (MTU) and kind of address (GID)?

Nothing here ran on RDMA hardware: the probes were fed with sysfs trees as the kernel's documentation describes them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from ipaddress import IPv6Address, ip_address

from allranks.causes.cause import PASSED, Cause, Outcome, failed, skipped, unknown, warned
from allranks.causes.fabric import NO_LAB, active_ports, port_name, rdma_facts, why_skipped
from allranks.causes.net.cards import data_interface
from allranks.model.card import Card, Facts, Gid, RdmaPort
from allranks.model.errors import Exit

_INDEX = "NCCL_IB_GID_INDEX"


class RdmaMtuUnequal(Cause, id="AR305"):
    """The RDMA ports of the nodes have different MTUs.

    ## What it means
    RDMA has its own packet size: 256, 512, 1024, 2048 or 4096 bytes of payload. The subnet manager sets it for an
    InfiniBand port. A RoCE port uses the largest size that fits into the MTU of its Ethernet interface with 96 bytes of
    headers: 1024 for MTU 1500, 4096 for MTU 4200 and above. The ports of this node use another size than those of most
    nodes.

    ## Why it breaks the job
    Both ends of a connection must use the same size, but some versions of NCCL let each end use its own. Small messages
    and the set-up of the group still pass. The first large message then fails with a length error on the end with the
    smaller size, or the collective hangs.

    ## Example
    Output of `ibv_devinfo` on two nodes. NVIDIA/nccl#1524 and PR NVIDIA/nccl#2135 show the result: IBV_WC_LOC_LEN_ERR,
    or an all-reduce that hangs:

        active_mtu:             4096 (5)
        active_mtu:             1024 (3)

    ## Fix
    Show the size on each node:

        srun --ntasks-per-node=1 bash -c 'hostname; ibv_devinfo | grep -E "hca_id|active_mtu"'

    RoCE: set the interface and its switch port to the MTU of the other nodes, and make it survive a reboot:

        ip link set IFACE mtu 4200                       # or 9000: the value of the other nodes
        nmcli connection modify CONNECTION 802-3-ethernet.mtu 4200

    InfiniBand: check the subnet manager's partition (`mtu=5` in opensm's partitions.conf is 4096), and whether a switch
    on the path supports that size.

    ## Source
    https://github.com/NVIDIA/nccl/issues/1524, https://github.com/NVIDIA/nccl/pull/2135 (read 2026-11-21).
    Linux, include/rdma/ib_addr.h, iboe_get_mtu (6.18). rdma-core, ibv_query_port(3), active_mtu.
    """

    message = "{what} differs: {usual}; {odd}"
    fix = (
        "on {node}: ibv_devinfo; RoCE: ip link set {interface} mtu 4200 (the value of the other nodes); InfiniBand: "
        "check the subnet manager"
    )
    exit_code = Exit.NODE_FAULT
    no_fault_yet = NO_LAB
    never_on_hardware = True

    @classmethod
    def probe(cls, card: Card) -> Outcome | None:
        """Skipped if NCCL uses no RDMA, unknown if an MTU cannot be read; otherwise the nodes are compared."""
        facts = rdma_facts(card)
        if isinstance(facts, Outcome):
            return facts
        silent = [port_name(port) for port in _ports_off_data(card, facts) if port.active_mtu is None]
        if silent:
            reason = facts.unread.get("rdma_ports.active_mtu", "no source on the node shows it")
            return unknown(f"the MTU of {', '.join(silent)} could not be read: {reason}")
        return None

    @classmethod
    def alike(cls, card: Card) -> Mapping[str, str | None] | None:
        """The active MTU of the RDMA ports that NCCL would use; AR205 covers RoCE on the data interface."""
        facts = card.facts
        if facts is None or why_skipped(card, facts) or not (ports := _ports_off_data(card, facts)):
            return None
        mtus = {port_name(port): port.active_mtu for port in ports}
        return {"the MTU of the RDMA ports": None if None in mtus.values() else _mtu_text(mtus)}


class RoceGidDiffers(Cause, id="AR306"):
    """NCCL_IB_GID_INDEX selects another kind of RoCE address on this node.

    ## What it means
    A RoCE port has a table of addresses (GIDs): each IP address of its interface, once for RoCE v1 and once for RoCE
    v2. NCCL_IB_GID_INDEX selects an entry by its index. The index of an address depends on how many addresses the
    interface has and in which order they were added. On this node the index selects another version, another address
    family, or an empty entry.

    Without the variable, NCCL 2.21 and newer choose the entry, and older versions use index 0. This finding then means
    only that a port has no RoCE v2 entry with an IPv4 address.

    ## Why it breaks the job
    The set-up connection uses TCP and works. The first RoCE message goes to an address that the peer does not answer,
    or that no router forwards (link-local). The resulting timeout names a QP, not the node.

    ## Example
    From NVIDIA/nccl#769, where index 1 was the link-local address of RoCE v2 and index 3 its IPv4 address:

        ibvwrap.cc: NCCL WARN Call to ibv_modify_qp failed with error Connection timed out

    ## Fix
    Show the tables (`show_gids` comes with NVIDIA's drivers):

        show_gids; ibv_devinfo -v | grep GID
        grep . /sys/class/infiniband/*/ports/*/gid_attrs/types/* 2>/dev/null

    With NCCL 2.21 and newer, unset the variable. With older versions, make the tables equal: give all interfaces the
    same number of addresses (IPv6 on everywhere or off everywhere), then take the interface down and up again. If an
    interface has no IPv4 address, add one.

    ## Source
    NCCL user guide, NCCL_IB_GID_INDEX, NCCL_IB_ROCE_VERSION_NUM:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (2.30). Linux,
    Documentation/ABI/testing/sysfs-class-infiniband: gid_attrs. https://github.com/NVIDIA/nccl/issues/769 (read
    2026-11-21).
    """

    message = "{what}: {usual}; {odd}"
    fix = (
        "on {node}: show_gids; unset NCCL_IB_GID_INDEX (NCCL 2.21 or newer), or give the interface the same "
        "addresses as on other nodes"
    )
    exit_code = Exit.NODE_FAULT
    no_fault_yet = NO_LAB
    never_on_hardware = True

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Fails if the entry at NCCL_IB_GID_INDEX is empty; warns if no RoCE v2 address has IPv4."""
        facts = rdma_facts(card)
        if isinstance(facts, Outcome):
            return facts
        ports = _roce_ports(facts)
        if not ports:
            return skipped("no active RoCE port")
        index = gid_index(facts)
        return _choosable(facts, ports) if index is None else _all_filled(ports, index)

    @classmethod
    def alike(cls, card: Card) -> Mapping[str, str | None] | None:
        """The kind of address at NCCL_IB_GID_INDEX (index 0 before NCCL 2.21) of the ports that NCCL would use."""
        facts = card.facts
        index = None if facts is None else gid_index(facts)
        if facts is None or index is None or why_skipped(card, facts):
            return None
        kinds = {_kind(gid) for port in _roce_ports(facts) if (gid := _gid_at(port, index))}
        return {f"the kind of address at {_INDEX}": " and ".join(sorted(kinds))} if kinds else None


def gid_index(facts: Facts) -> int | None:
    """Return the place in the GID table that NCCL takes; None where it chooses, or that cannot be told.

    Source: NCCL, src/transport/net_ib.cc: NCCL_PARAM(IbGidIndex, "IB_GID_INDEX", 0) up to 2.20, -1 since 2.21.
    """
    spelled = facts.environment.get(_INDEX, "")
    if re.fullmatch(r"-?[0-9]{1,5}", spelled):
        return int(spelled) if int(spelled) >= 0 else None
    release = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", facts.nccl_version or "")
    return 0 if release and (int(release[1]), int(release[2])) < (2, 21) else None


def _choosable(facts: Facts, ports: Sequence[RdmaPort]) -> Outcome:
    if facts.environment.get("NCCL_IB_ADDR_FAMILY") == "AF_INET6":
        return PASSED
    without = [port_name(port) for port in ports if not any(_kind(gid) == "RoCE v2, IPv4" for gid in port.gids)]
    if not without:
        return PASSED
    odd = f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} none"
    return warned(what="no usable RoCE address", usual="NCCL needs RoCE v2 with IPv4", odd=odd)


def _all_filled(ports: Sequence[RdmaPort], index: int) -> Outcome:
    empty = [port for port in ports if _gid_at(port, index) is None]
    if not empty:
        return PASSED
    evidence = [f"{port_name(port)}: {_table(port)}" for port in empty]
    odd = ", ".join(port_name(port) for port in empty)
    return failed(*evidence, what=f"{_INDEX}={index}", usual="the table has no address at this index", odd=odd)


def _table(port: RdmaPort) -> str:
    return "; ".join(f"{gid.index} {_kind(gid)}" for gid in port.gids) or "the GID table is empty"


def _roce_ports(facts: Facts) -> list[RdmaPort]:
    return [port for port in active_ports(facts) if port.link_layer == "Ethernet"]


def _ports_off_data(card: Card, facts: Facts) -> list[RdmaPort]:
    """The ports that NCCL would use, without RoCE on the data interface: its MTU is AR205's."""
    nic = data_interface(card)
    own = nic.name if nic is not None else None
    return [
        port
        for port in active_ports(facts)
        if port.link_layer != "Ethernet" or port.netdev is None or port.netdev != own
    ]


def _mtu_text(mtus: Mapping[str, int | None]) -> str:
    """`4096`, and the ports that differ: `4096, 1024 on mlx5_3:1`."""
    (usual, _), *_ = Counter(mtus.values()).most_common(1)
    odd = [f"{mtu} on {name}" for name, mtu in mtus.items() if mtu != usual]
    return ", ".join([str(usual), *odd])


def _gid_at(port: RdmaPort, index: int) -> Gid | None:
    return next((gid for gid in port.gids if gid.index == index), None)


_FULL = re.compile(r"(?:[0-9a-f]{4}:){7}[0-9a-f]{4}")
_MAPPED = "0000:0000:0000:0000:0000:ffff:"


def _kind(gid: Gid) -> str:
    """`RoCE v2, IPv4`."""
    version = gid.kind.removeprefix("IB/")
    if _FULL.fullmatch(gid.gid):  # as sysfs spells them; to parse each of 40 a node takes seconds with many nodes
        if gid.gid.startswith(_MAPPED):
            return f"{version}, IPv4"
        return f"{version}, link-local" if gid.gid[:3] in ("fe8", "fe9", "fea", "feb") else f"{version}, IPv6"
    try:
        address = ip_address(gid.gid)
    except ValueError:
        return f"{version}, no address"
    if not isinstance(address, IPv6Address) or address.ipv4_mapped is not None:
        return f"{version}, IPv4"
    return f"{version}, link-local" if address.is_link_local else f"{version}, IPv6"
