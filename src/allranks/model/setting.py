"""A derived value with its reason: what `allranks env --explain` and `allranks run --dry-run` print."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Setting:
    """One derived value, why it is what it is, and where it came from.

    >>> Setting("OMP_NUM_THREADS", "4", reason="8 cores for 2 workers", source="allranks").value
    '4'
    """

    name: str
    """A variable's or field's name, for example NCCL_SOCKET_IFNAME or rank."""
    value: str
    reason: str
    """Half a sentence that a tired operator understands."""
    source: str
    """The variable (SLURM_PROCID), the place (cluster.toml:12), the flag (--backend), `default` or `measured`."""
