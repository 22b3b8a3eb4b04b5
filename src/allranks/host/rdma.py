"""This machine's RDMA ports: from /sys/class/infiniband, where nothing can hang, and their MTUs from `ibv_devinfo`.

sysfs does not have a port's active MTU. `ibv_devinfo` asks the driver, as any user who may open the device; where it
is not installed, that of a RoCE port follows from its interface's MTU, and that of an InfiniBand port stays unknown.

Never ran on hardware: the trees in the tests are written after the kernel's documentation
(Documentation/ABI/stable/sysfs-class-infiniband).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from allranks.host.programs import run_command
from allranks.model.card import MAX_TEXT, Gid, RdmaPort

MAX_PORTS = 64
MAX_GIDS = 16
_ROCE_HEADERS = 96
"""Bytes that the kernel takes off an interface's MTU for a RoCE packet's headers: GRH 40, UDP 8, BTH 12, XRC 4, atomics
28, ICRC 4."""
_MTUS = (4096, 2048, 1024, 512, 256)
# Those that say that packets were lost or repeated; the hw ones are Mellanox/NVIDIA's.
_COUNTERS = (
    "link_downed", "link_error_recovery", "local_link_integrity_errors", "port_rcv_errors", "port_xmit_discards",
    "symbol_error", "excessive_buffer_overrun_errors", "VL15_dropped",
)  # fmt: skip
_HW_COUNTERS = ("local_ack_timeout_err", "out_of_sequence", "packet_seq_err", "rnr_nak_retry_err", "roce_slow_restart")


def read_rdma_ports(*, root: Path = Path("/")) -> tuple[RdmaPort, ...]:
    """Return all ports of all RDMA devices; none without /sys/class/infiniband."""
    found = []
    for device in sorted((root / "sys/class/infiniband").glob("*"), key=lambda path: _natural(path.name)):
        for port in sorted((device / "ports").glob("*"), key=lambda path: _natural(path.name)):
            if port.name.isdecimal():
                found.append(_read_port(device, port, root))
    return tuple(found[:MAX_PORTS])


def has_rdma(*, root: Path = Path("/")) -> bool:
    """Whether there is any RDMA device."""
    return any((root / "sys/class/infiniband").glob("*"))


def read_active_mtus(*, deadline_s: float, env: Mapping[str, str] | None = None) -> tuple[dict[str, int], str]:
    """Ask ibv_devinfo; returns the bytes by `device:port`, and why one of them may be missing.

    Args:
        deadline_s: for the answer.
        env: PATH in it says where ibv_devinfo is.
    """
    ran = run_command(("ibv_devinfo",), deadline_s=deadline_s, env=env)
    mtus = parse_devinfo(ran.stdout)
    if ran.rc == 0 and mtus:
        return mtus, ""
    return mtus, ran.problem or f"ibv_devinfo: {ran.words or 'names no port'}"[:MAX_TEXT]


def parse_devinfo(text: str) -> dict[str, int]:
    """Return the active MTU of each port, by `device:port`, from the output of ibv_devinfo.

    >>> parse_devinfo("hca_id: mlx5_0\\n port: 1\\n  active_mtu: 4096 (5)")
    {'mlx5_0:1': 4096}
    """
    mtus, device, port = {}, "", ""
    for line in text.splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name == "hca_id":
            device, port = value, ""
        elif name == "port":
            port = value
        elif name == "active_mtu" and device and port and (match := re.match(r"[0-9]{3,5}\b", value)):
            mtus[f"{device}:{port}"] = int(match[0])
    return mtus


def with_active_mtus(ports: Sequence[RdmaPort], mtus: Mapping[str, int]) -> tuple[RdmaPort, ...]:
    """Return the ports with what ibv_devinfo said; what sysfs led to stays where it said nothing."""
    return tuple(
        msgspec.structs.replace(port, active_mtu=mtus.get(f"{port.device}:{port.port}", port.active_mtu))
        for port in ports
    )


def roce_mtu(interface_mtu: int) -> int | None:
    """Return the active MTU of a RoCE port over an interface; None where that is too small for any.

    >>> roce_mtu(1500), roce_mtu(9000)
    (1024, 4096)

    Source: Linux, include/rdma/ib_addr.h, iboe_get_mtu.
    """
    return next((mtu for mtu in _MTUS if mtu <= interface_mtu - _ROCE_HEADERS), None)


def has_peer_memory(*, root: Path = Path("/")) -> bool | None:
    """Whether the kernel can register GPU memory for RDMA; None without an NVIDIA driver.

    True for the module nvidia_peermem (or nv_peer_mem), and for DMA-BUF as far as it can be told without CUDA: open
    kernel modules on Linux 5.12 or newer.

    Source: NCCL src/transport/net_ib/gdr.cc; NVIDIA GPU Operator, "GPUDirect RDMA", DMA-BUF prerequisites.
    """
    modules = ("sys/module/nvidia_peermem", "sys/module/nv_peer_mem")
    peers = ("sys/kernel/mm/memory_peers/nv_mem/version", "sys/kernel/mm/memory_peers/nv_mem_nc/version")
    if any((root / path).exists() for path in (*modules, *peers)):
        return True
    driver = _text(root / "proc/driver/nvidia/version")
    if driver is None:
        return None
    release = re.match(r"(\d+)\.(\d+)", _text(root / "proc/sys/kernel/osrelease") or "")
    is_new = release is not None and (int(release[1]), int(release[2])) >= (5, 12)
    return is_new and "Open Kernel Module" in driver


def _read_port(device: Path, port: Path, root: Path) -> RdmaPort:
    verbs = [path.name for path in sorted((device / "device/infiniband_verbs").glob("uverbs*"))]
    link_layer = _text(port / "link_layer") or ""
    gids = _used_gids(port) if link_layer == "Ethernet" else []
    netdevs = [gid.netdev for gid in gids if gid.netdev]
    netdevs += [path.name for path in sorted((device / "device/net").glob("*"))]
    interface_mtu = _count(_text(root / "sys/class/net" / netdevs[0] / "mtu")) if netdevs else 0
    return RdmaPort(
        device=device.name,
        port=int(port.name),
        state=_after_number(_text(port / "state")),
        phys_state=_after_number(_text(port / "phys_state")),
        rate=_text(port / "rate") or "",
        link_layer=link_layer,
        lid=_text(port / "lid"),
        sm_lid=_text(port / "sm_lid"),
        has_uverbs=_may_open(root / "dev/infiniband" / verbs[0]) if verbs else None,
        netdev=netdevs[0] if netdevs else None,
        gids=tuple(gids[:MAX_GIDS]),
        active_mtu=roce_mtu(interface_mtu) if link_layer == "Ethernet" else None,
        error_counters={
            name: count
            for directory, names in (("counters", _COUNTERS), ("hw_counters", _HW_COUNTERS))
            for name in names
            if (count := _count(_text(port / directory / name)))
        },
    )


def _used_gids(port: Path) -> list[Gid]:
    """The GIDs by index; the kernel answers EINVAL for the type of an unused one."""
    found = []
    for path in sorted((port / "gid_attrs/types").glob("*"), key=lambda path: _natural(path.name)):
        kind, gid = _text(path), _text(port / f"gids/{path.name}")
        if path.name.isdecimal() and kind and gid and gid.strip("0:"):
            netdev = _text(port / f"gid_attrs/ndevs/{path.name}") or None
            found.append(Gid(index=int(path.name), kind=kind, gid=gid, netdev=netdev))
    return found


def _may_open(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def _after_number(text: str | None) -> str:
    """`4: ACTIVE` -> `ACTIVE`."""
    return (text or "").rpartition(":")[2].strip()


def _count(text: str | None) -> int:
    return int(text) if text and re.fullmatch(r"[0-9]+", text) else 0


def _natural(name: str) -> list[str | int]:
    """mlx5_2 before mlx5_10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", name))]


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes()[:256].decode(errors="backslashreplace").strip()
    except OSError:
        return None
