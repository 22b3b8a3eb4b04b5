"""This machine's RDMA ports, from /sys/class/infiniband: no ibverbs, nothing that can hang.

Never ran on hardware: the trees in the tests are written after the kernel's documentation
(Documentation/ABI/stable/sysfs-class-infiniband).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from allranks.model.card import RdmaPort

MAX_PORTS = 64
MAX_GIDS = 16
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
    gids = _usable_gids(port)
    netdevs = [name for index in gids if (name := _text(port / f"gid_attrs/ndevs/{index}"))]
    netdevs += [path.name for path in sorted((device / "device/net").glob("*"))]
    return RdmaPort(
        device=device.name,
        port=int(port.name),
        state=_after_number(_text(port / "state")),
        phys_state=_after_number(_text(port / "phys_state")),
        rate=_text(port / "rate") or "",
        link_layer=_text(port / "link_layer") or "",
        lid=_text(port / "lid"),
        sm_lid=_text(port / "sm_lid"),
        has_uverbs=_may_open(root / "dev/infiniband" / verbs[0]) if verbs else None,
        netdev=netdevs[0] if netdevs else None,
        roce_v2_gids=tuple(gids.values())[:MAX_GIDS],
        error_counters={
            name: count
            for directory, names in (("counters", _COUNTERS), ("hw_counters", _HW_COUNTERS))
            for name in names
            if (count := _count(_text(port / directory / name)))
        },
    )


def _usable_gids(port: Path) -> dict[int, str]:
    """RoCE v2 GIDs by index; the kernel answers EINVAL for the unused ones."""
    found = {}
    for path in sorted((port / "gid_attrs/types").glob("*"), key=lambda path: _natural(path.name)):
        if not path.name.isdecimal() or _text(path) != "RoCE v2":
            continue
        gid = _text(port / f"gids/{path.name}")
        if gid and gid.strip("0:"):
            found[int(path.name)] = gid
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
