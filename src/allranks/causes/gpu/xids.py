"""What the driver's error numbers (Xids) say about a GPU, and what each asks for.

Source: NVIDIA's Xid catalogue, immediate actions, https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
(read 2026-11-21); the numbers that it calls unused on today's GPUs: the same document for Volta and older.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class Ask(StrEnum):
    """What an Xid asks for."""

    PROGRAM = "debug the program: compute-sanitizer, CUDA_LAUNCH_BLOCKING=1"
    RESET = "reset the GPU while it is idle: nvidia-smi --gpu-reset; if it happens again, replace the GPU"
    RESET_LATER = "the job may continue; reset the GPU when it is idle"
    REBOOT = "reboot or power-cycle the node; if it happens again, check the card, its slot and riser"
    LINK = "nvidia-smi nvlink --status and -e; reset the GPUs, then check link, bridge and switch"
    HANDS = "check the power cable of the card"
    WATCH = "nothing now; if it happens often, tell the admin"


class Xid(NamedTuple):
    """One number."""

    what: str
    asks: Ask


XIDS = {
    13: Xid("a kernel made an illegal access", Ask.PROGRAM),
    31: Xid("memory page fault: a kernel read or wrote where it may not", Ask.PROGRAM),
    32: Xid("corrupted commands arrived over PCIe", Ask.WATCH),
    43: Xid("the GPU stopped a program after a fault of that program", Ask.PROGRAM),
    45: Xid("the driver cleaned up after a program that ended", Ask.WATCH),
    46: Xid("the GPU stopped processing", Ask.RESET),
    48: Xid("uncorrectable memory error", Ask.RESET),
    54: Xid("auxiliary power is not connected", Ask.HANDS),
    56: Xid("display engine error", Ask.WATCH),
    57: Xid("memory interface could not be initialized", Ask.REBOOT),
    58: Xid("unstable memory interface", Ask.REBOOT),
    61: Xid("the GPU's micro-controller stopped at a breakpoint", Ask.RESET_LATER),
    62: Xid("the GPU's micro-controller halted", Ask.RESET),
    63: Xid("a bad memory row will be remapped at the next reset", Ask.RESET_LATER),
    64: Xid("a bad memory row could not be remapped", Ask.RESET),
    68: Xid("video decoder exception", Ask.PROGRAM),
    69: Xid("a kernel used the GPU wrongly (engine class error)", Ask.PROGRAM),
    74: Xid("NVLink error", Ask.RESET),
    79: Xid("the GPU fell off the bus", Ask.REBOOT),
    80: Xid("corrupted data arrived over PCIe", Ask.WATCH),
    92: Xid("many corrected memory errors", Ask.WATCH),
    94: Xid("contained memory error: it affected one program", Ask.RESET_LATER),
    95: Xid("uncontained memory error", Ask.RESET),
    109: Xid("context switch timed out", Ask.RESET),
    110: Xid("security fault", Ask.RESET),
    119: Xid("the GPU's system processor (GSP) does not answer", Ask.RESET),
    120: Xid("the GPU's system processor (GSP) failed", Ask.RESET),
    121: Xid("corrected errors on the link to the CPU (C2C)", Ask.WATCH),
    122: Xid("the GPU's flash memory could not be read", Ask.WATCH),
    123: Xid("the GPU's flash memory could not be written", Ask.WATCH),
    124: Xid("the GPU's flash memory could not be erased", Ask.WATCH),
    125: Xid("the file system of the GPU's flash memory is damaged", Ask.WATCH),
    136: Xid("a link could not be trained", Ask.RESET),
    137: Xid("a kernel made an illegal access over NVLink", Ask.PROGRAM),
    140: Xid("unrecovered memory error", Ask.RESET),
    143: Xid("the GPU could not be initialized", Ask.RESET),
    144: Xid("NVLink error (SAW)", Ask.LINK),
    145: Xid("NVLink error (RLW)", Ask.LINK),
    146: Xid("NVLink error (TLW)", Ask.LINK),
    147: Xid("NVLink error (TREX)", Ask.LINK),
    148: Xid("NVLink error (NVLPW_CTRL)", Ask.LINK),
    149: Xid("NVLink error (NETIR)", Ask.LINK),
    150: Xid("NVLink error (MSE)", Ask.LINK),
    151: Xid("key rotation failed", Ask.REBOOT),
    154: Xid("the driver requests another recovery action", Ask.RESET_LATER),
    155: Xid("an NVLink went down", Ask.LINK),
    156: Xid("memory was retired", Ask.RESET),
    157: Xid("memory could not be retired", Ask.WATCH),
    158: Xid("fatal timeout", Ask.RESET),
    167: Xid("fatal PCIe timeout", Ask.RESET),
    168: Xid("errors in write-protected memory", Ask.RESET),
    169: Xid("the GPU's security processor halted", Ask.RESET),
    171: Xid("uncorrectable memory error (DRAM)", Ask.RESET),
    172: Xid("uncorrectable memory error (SRAM)", Ask.RESET),
}
"""What each number says, and what it asks for. 138, 139, 141, 142, 152, 153 belong to engines that no training uses."""

FATAL_XIDS = {code: xid.what for code, xid in XIDS.items() if xid.asks in (Ask.RESET, Ask.REBOOT, Ask.HANDS)}
"""Xids after which the GPU needs a reset, a reboot or a person before a job may start on it."""

LINK_XIDS = frozenset(code for code, xid in XIDS.items() if xid.asks is Ask.LINK)
PROGRAM_XIDS = frozenset(code for code, xid in XIDS.items() if xid.asks is Ask.PROGRAM)


def xid_pattern(codes: Iterable[int]) -> str:
    """The kernel's line of one of these Xids: `NVRM: Xid (PCI:0000:44:00): 79, ...`, before 2014 without `PCI:`."""
    numbers = "|".join(map(str, sorted(codes)))
    return rf"NVRM: Xid \((?:PCI:)?(?P<gpu>[0-9a-fA-F:.]{{3,20}})\): (?P<code>{numbers})\b"


def told_xid_patterns(codes: Iterable[int]) -> tuple[str, ...]:
    """What watchers of the driver say of one of these Xids: DCGM, and Kubernetes' device plugin."""
    numbers = "|".join(map(str, sorted(codes)))
    return (
        rf"Detected XID (?P<code>{numbers}) for GPU (?P<gpu>[0-9]+)\b",
        rf"XidCriticalError: Xid=(?P<code>{numbers}) on Device=(?P<gpu>[A-Za-z0-9-]+)",
    )
