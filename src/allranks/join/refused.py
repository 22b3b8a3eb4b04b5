"""Which calls of `init_process_group` cannot work? They are refused at once, with what is wrong.

1. Impostors. A process that multiprocessing started in a worker (mp.spawn) comes as another rank, or to another world,
   than the worker is: on the other nodes their children come as the same ranks.
2. NCCL on a node that has fewer GPUs than workers.

Runs in the worker's Python: standard library only.
"""

from __future__ import annotations

import os
import re
from typing import Any

_started_as: tuple[int | None, int | None] = (None, None)
"""RANK and WORLD_SIZE as this process got them, or the one that forked it: what mp.spawn calls may change them."""


def note_place() -> None:
    """Remember which rank this process is, before anything can change its environment."""
    global _started_as
    _started_as = (_env_int("RANK"), _env_int("WORLD_SIZE"))


def refuse(backend: str, init_method: str | None, *args: Any, **kwargs: Any) -> None:
    """Raise RuntimeError for a call that cannot work.

    Args:
        backend, init_method, args, kwargs: as init_process_group has them; args begins behind its `timeout`.
    """
    _refuse_impostor(init_method, *args, **kwargs)
    _refuse_what_cannot_work(backend)


def _refuse_impostor(
    init_method: str | None, world_size: int = -1, rank: int = -1, store: Any = None, *_: Any, **__: Any
) -> None:
    """Refuse a child of a worker that claims another place in the job than the worker has, and a larger world.

    A child that brings a store or an address of its own (an inference engine, a parameter server) makes a group of its
    own; one that goes by the environment, or to the job's own port, means the job. In a world of one nobody else could.
    """
    own_rank, own_size = _started_as
    if own_rank is None or own_size is None or own_size < 2 or store is not None:
        return
    import multiprocessing

    port = re.search(r":(\d+)", (init_method or "").partition("://")[2])
    is_own_address = bool(init_method) and not str(init_method).startswith("env://")
    if is_own_address and not (port and os.environ.get("ALLRANKS_STORE_PORT") == port[1]):
        return
    if multiprocessing.parent_process() is None:
        if world_size > own_size:
            raise RuntimeError(f"allranks: init_process_group asks for {world_size} ranks, but this job has {own_size}")
        return
    claimed = (_env_int("RANK") if rank < 0 else rank, _env_int("WORLD_SIZE") if world_size < 0 else world_size)
    if claimed != _started_as:
        raise RuntimeError(
            f"allranks: AR502 spawn-inside-srun: multiprocessing (mp.spawn) started this process in a worker; it "
            f"calls init_process_group as rank {claimed[0]} of {claimed[1]}, but the worker is RANK={own_rank} of "
            f"WORLD_SIZE={own_size}, set by allranks: every node would have the same ranks; remove mp.spawn and "
            "call the training function once, with RANK and LOCAL_RANK from the environment"
        )


def _refuse_what_cannot_work(backend: str) -> None:
    gpus = _env_int("ALLRANKS_NODE_GPUS")
    workers = _env_int("LOCAL_WORLD_SIZE")
    if "nccl" not in backend or gpus is None or workers is None or gpus >= workers:
        return
    node = os.environ.get("ALLRANKS_NODE", "this node")
    what = "no GPU" if gpus == 0 else f"{gpus} GPUs for {workers} ranks"
    raise RuntimeError(f"allranks: init_process_group asks for nccl, but {node} has {what}; use gloo")


def _env_int(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None
