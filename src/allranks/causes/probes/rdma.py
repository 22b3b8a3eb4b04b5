"""Are the RDMA ports that NCCL would use active, without errors, and alike on all nodes?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from ipaddress import IPv6Address, ip_address

from allranks.causes.outcome import PASSED, Alike, Checks, Outcome, Surveyed, failed, skipped, unknown, warned
from allranks.causes.probes.cards import data_interface
from allranks.model.card import Card, Facts, Gid, RdmaPort
from allranks.model.finding import Severity

# Which RDMA ports would NCCL use, and do all nodes have the same number of them?

_NO_DEVICE = "no RDMA device"


def why_no_rdma(card: Card) -> str | None:
    """Return why NCCL uses no RDMA on this node; None where it would, or where that cannot be told."""
    if card.facts is None:
        return None
    env = card.facts.environment
    if env.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return f"NCCL_IB_DISABLE={env['NCCL_IB_DISABLE']}"
    if env.get("NCCL_NET", "").lower() == "socket":
        return f"NCCL_NET={env['NCCL_NET']}"
    if card.wanted_backend == "gloo" or card.num_gpus == 0:
        return "no rank here uses NCCL"
    return None


def probe_rdma_in_use(card: Card) -> Outcome | None:
    """Skipped without an RDMA device, or if NCCL does not use RDMA; otherwise the nodes are compared."""
    if card.facts is None or "rdma_ports" in card.facts.unread:
        return None
    reason = why_skipped(card, card.facts)
    return skipped(reason) if reason else None


def collect_hca_set_differs(card: Card) -> Alike:
    """All nodes must have the same number of active RDMA ports that NCCL would use; names may differ."""
    if card.facts is None or why_no_rdma(card):
        return None
    if "rdma_ports" in card.facts.unread:
        return {"the number of active RDMA ports": None}
    return {"the number of active RDMA ports": str(len(active_ports(card.facts)))}


def collect_gdr_differs(card: Card) -> Alike:
    """GPU memory can be registered for RDMA on all nodes with RDMA, or on none."""
    if card.facts is None or why_skipped(card, card.facts) or not active_ports(card.facts):
        return None
    words = {True: "it", False: "none", None: None}
    return {"GPUDirect RDMA": words[card.facts.has_peer_memory]}


def weigh_gdr_differs(key: str) -> Severity:
    """It runs, more slowly."""
    return Severity.WARN


def why_skipped(card: Card, facts: Facts) -> str | None:
    """Return why there is no RDMA to judge on this node: no device, or NCCL does not use it; else None."""
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


# Is every port that NCCL would use active and without errors?

HARDWARE_ERRORS = frozenset(
    {
        "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors",
        "excessive_buffer_overrun_errors", "port_xmit_discards",
        "local_ack_timeout_err", "packet_seq_err", "rnr_nak_retry_err", "out_of_sequence",
    }
)  # fmt: skip
"""Counters that stand for a bad link or for packets lost on it; VL15_dropped and the like grow on healthy fabrics."""


def probe_ib_config(card: Card) -> Outcome:
    """Fails if a device cannot be opened, no subnet manager configured it, or NCCL_IB_HCA matches no port."""
    facts = rdma_facts(card)
    if isinstance(facts, Outcome):
        return facts
    chosen = chosen_ports(facts)
    problems = []
    if not chosen:
        there = ", ".join(port_name(port) for port in facts.rdma_ports)
        problems.append(f"NCCL_IB_HCA={facts.environment.get('NCCL_IB_HCA')} matches none of the node's ports: {there}")
    for port in chosen:
        if port.link_layer == "InfiniBand" and port.phys_state == "LinkUp" and _is_zero(port.sm_lid):
            problems.append(f"{port_name(port)} has a link but no subnet manager: state {port.state}, sm_lid 0")
        elif port.state == "ACTIVE" and port.has_uverbs is False:
            problems.append(
                f"{port_name(port)} is active, but this user may not open its /dev/infiniband/uverbs device"
            )
    return failed(*problems[1:], what=problems[0]) if problems else PASSED


def survey_ib_config(cards: Sequence[Card]) -> Surveyed:
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


def probe_ib_link_error(card: Card) -> Outcome:
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


# Do the ports of all nodes agree on packet size (MTU) and kind of address (GID)?

_INDEX = "NCCL_IB_GID_INDEX"


def probe_rdma_mtu_unequal(card: Card) -> Outcome | None:
    """Skipped if NCCL uses no RDMA, unknown if an MTU cannot be read; otherwise the nodes are compared."""
    facts = rdma_facts(card)
    if isinstance(facts, Outcome):
        return facts
    silent = [port_name(port) for port in _ports_off_data(card, facts) if port.active_mtu is None]
    if silent:
        reason = facts.unread.get("rdma_ports.active_mtu", "no source on the node shows it")
        return unknown(f"the MTU of {', '.join(silent)} could not be read: {reason}")
    return None


def collect_rdma_mtu_unequal(card: Card) -> Alike:
    """The active MTU of the RDMA ports that NCCL would use; AR205 covers RoCE on the data interface."""
    facts = card.facts
    if facts is None or why_skipped(card, facts) or not (ports := _ports_off_data(card, facts)):
        return None
    mtus = {port_name(port): port.active_mtu for port in ports}
    return {"the MTU of the RDMA ports": None if None in mtus.values() else _mtu_text(mtus)}


def probe_roce_gid_differs(card: Card) -> Outcome:
    """Fails if the entry at NCCL_IB_GID_INDEX is empty; warns if no RoCE v2 address has IPv4."""
    facts = rdma_facts(card)
    if isinstance(facts, Outcome):
        return facts
    ports = _roce_ports(facts)
    if not ports:
        return skipped("no active RoCE port")
    index = gid_index(facts)
    return _choosable(facts, ports) if index is None else _all_filled(ports, index)


def collect_roce_gid_differs(card: Card) -> Alike:
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


CHECKS = {
    "AR301": Checks(probe=probe_ib_config, survey=survey_ib_config),
    "AR302": Checks(probe=probe_ib_link_error),
    "AR303": Checks(probe=probe_rdma_in_use, alike=collect_hca_set_differs),
    "AR304": Checks(probe=probe_rdma_in_use, alike=collect_gdr_differs, severity_of=weigh_gdr_differs),
    "AR305": Checks(probe=probe_rdma_mtu_unequal, alike=collect_rdma_mtu_unequal),
    "AR306": Checks(probe=probe_roce_gid_differs, alike=collect_roce_gid_differs),
}
