"""How does a rank leave its group when its block has ended, well or not?"""

from __future__ import annotations

import atexit
import ctypes
import time
from types import ModuleType


def leave(dist: ModuleType, last_work_s: float, kind: type[BaseException] | None, *_: object) -> None:
    """Destroy the group; what that says is of no interest where the block has failed already.

    NCCL is aborted then: to destroy it means to wait for collectives that other ranks may never come to.

    Args:
        last_work_s: how long the end of the process waits for Gloo's threads (join.group), where no hook sees to it.
    """
    if not dist.is_initialized():
        return
    end, c10d = dist.destroy_process_group, dist.distributed_c10d
    if let_all_form := getattr(c10d, "_allranks_watches", None):
        let_all_form()
    else:
        atexit.register(time.sleep, last_work_s)
    has_nccl = any("nccl" in str(backend) for backend, _ in c10d._world.pg_map.values())
    if kind is not None or not has_nccl:
        _keep_groups(dist)
    if kind is not None and has_nccl:
        end = getattr(c10d, "_abort_process_group", end)
    try:
        end()
    except RuntimeError:
        if kind is None:
            raise


def _keep_groups(dist: ModuleType) -> None:
    """Have no group's memory given back before the process ends.

    DDP's reducer is mostly the last that holds a group. Where it goes it waits for Gloo's threads with the GIL in hand,
    and a thread with a failed collective waits for the GIL: seen with torch 2.13, for good. If one of Gloo's threads is
    the last, it waits for itself, and the process aborts (`Resource deadlock avoided`): seen once after 200 steps with
    communication hooks, of which none had failed.
    """
    for group in list(getattr(dist.distributed_c10d._world, "pg_map", ())):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
