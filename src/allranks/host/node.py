"""What this machine is, as far as starting a job needs to know."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from allranks.host.gpu import count_gpus
from allranks.host.net import read_interfaces
from allranks.model.card import Interface


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One look at this machine."""

    host: str
    interfaces: tuple[Interface, ...]
    num_gpus: int
    """That the driver shows and this process may use."""
    num_promised_gpus: int | None = None
    """That SLURM says it gave to the job here."""
    num_cpus: int
    """Cores this process may run on."""


def read_facts(env: Mapping[str, str]) -> NodeFacts:
    """Look at this machine.

    Args:
        env: SLURM's name of the node in it goes before the machine's own; CUDA_VISIBLE_DEVICES narrows the GPUs.
    """
    return NodeFacts(
        host=env.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0] or "localhost",
        interfaces=tuple(read_interfaces()),
        num_gpus=count_gpus(env),
        num_promised_gpus=int(promised) if (promised := env.get("SLURM_GPUS_ON_NODE", "")).isdecimal() else None,
        num_cpus=len(os.sched_getaffinity(0)),
    )
