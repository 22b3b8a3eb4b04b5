"""Which faults can the guard find? Each by the name that the book of causes has for it. Data.

    scene.fault(DEAD_RANK, "it exited with code 0", rank)

Only a place that has found a fault names it; nothing asks for one by its name.
"""

from __future__ import annotations

HANG_LIMIT, TORCH_LIMIT = "--hang-timeout", "init_process_group(timeout=...)"
"""What a fix of a wait names as `limit`: who ended the wait, allranks or torch."""
SHM_TOO_SMALL = "AR002"
DISK_FULL = "AR005"
HOST_OOM_KILL = "AR008"
PROCESS_STOPPED = "AR010"
NODE_FAILURE = "AR012"
MTU_BLACKHOLE = "AR204"
FIREWALL_PORT = "AR206"
LINK_DOWN = "AR210"
PARTITION = "AR211"
PACKET_LOSS = "AR212"
MISSING_RANK = "AR401"
DEAD_RANK = "AR407"
STUCK_RANK = "AR408"
STRAGGLER_RANK = "AR409"
COLLECTIVE_MISMATCH = "AR410"
COLLECTIVE_TIMEOUT = "AR490"
USER_CODE_ERROR = "AR590"
FILESYSTEM_HANG = "AR606"
DATALOADER_SHM = "AR607"
