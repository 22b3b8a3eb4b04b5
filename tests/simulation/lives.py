"""One life of a job before it is lived: its size, its terms, and all that will go wrong, drawn from a seed.

A profile switches kinds of faults on; `swarm` lets the seed choose (Groce et al. 2012: runs without some kinds of
faults find others). All faults are drawn first, so that leaving one out does not change the rest.
"""

from __future__ import annotations

import hashlib
import random
import signal
from dataclasses import dataclass, replace
from enum import StrEnum

FOREVER_S = 1e9


class Stream:
    """Random numbers for one purpose (Knuth's MMIX generator): a life has hundreds, and random.Random is 2.5 KB."""

    def __init__(self, purpose: str) -> None:
        self._state = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "big")

    def random(self) -> float:
        """Return a number from 0 to 1."""
        self._state = state = (self._state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        return (state >> 11) * 2**-53


class Kind(StrEnum):
    """What can go wrong."""

    WORKER_CRASHES = "worker crashes"
    WORKER_RAISES = "worker raises"
    WORKER_HANGS = "worker hangs"
    WORKER_STOPS = "worker is stopped"
    WORKER_IS_HELD = "worker is held by the kernel"
    WORKER_IS_DEAF = "worker ignores SIGTERM"
    LINE_ENDS = "line ends"
    NODE_IS_CUT_OFF = "node is cut off"
    LINE_IS_SLOW = "line is slow"
    AGENT_STOPS = "agent is stopped"
    AGENT_DIES = "agent dies"
    NODE_DIES = "node dies"
    SIGNAL = "signal"
    PREEMPTED = "preempted"
    SUSPENDED = "suspended"
    """The whole job, workers and agents, as `scontrol suspend` does: nobody's fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    at_s: float
    kind: Kind
    node: int
    for_s: float = FOREVER_S
    """How long; of a node that dies, until it is up again."""
    worker: int = 0
    """Local rank."""
    signum: int = 0
    everywhere: bool = False
    doubled: bool = False


@dataclass(frozen=True, slots=True)
class Life:
    """One life; what is usual here, a life that was shrunk has, too."""

    seed: int
    num_nodes: int
    num_steps: int
    faults: tuple[Fault, ...] = ()
    workers: int = 1
    max_restarts: int = 0
    min_nodes: int = 1
    is_slurm: bool = False
    can_requeue: bool = True
    is_tracked: bool = True
    """Whether the script reports its steps, and saves when it is told to."""
    answer_s: float = 0.0
    """How long the scheduler and the file server take to answer."""
    sweep_s: float = 0.0
    start_s: float = 0.0
    """How long workers take to start."""
    turn_s: float = 0.3
    beats_s: float = 1.0
    """How often the leader sends a Ping, and an agent a Beat of workers that do the same as before; 0: very often."""


PROFILES: dict[str, tuple[Kind, ...]] = {
    "swarm": tuple(Kind),
    "workers": tuple(kind for kind in Kind if kind.value.startswith("worker")),
    "signals": (Kind.SIGNAL, Kind.WORKER_CRASHES, Kind.WORKER_IS_DEAF, Kind.PREEMPTED),
    "network": (Kind.LINE_ENDS, Kind.NODE_IS_CUT_OFF, Kind.LINE_IS_SLOW, Kind.SIGNAL),
    "agents": (Kind.AGENT_STOPS, Kind.AGENT_DIES, Kind.NODE_DIES, Kind.SIGNAL, Kind.WORKER_CRASHES),
    "kernel": (Kind.WORKER_IS_HELD, Kind.WORKER_CRASHES, Kind.SIGNAL, Kind.NODE_DIES),
    "returns": (Kind.NODE_DIES, Kind.AGENT_DIES),
    "pauses": (Kind.NODE_DIES, Kind.SIGNAL, Kind.AGENT_DIES),
    "restarts": (Kind.WORKER_CRASHES, Kind.SIGNAL, Kind.WORKER_IS_HELD, Kind.SUSPENDED, Kind.AGENT_STOPS),
    "cancels": (Kind.SIGNAL,),
    "suspends": (Kind.WORKER_CRASHES, Kind.SUSPENDED, Kind.WORKER_IS_DEAF, Kind.SUSPENDED),
    "late ends": (Kind.WORKER_IS_HELD, Kind.WORKER_CRASHES),
}
HARD = ("pauses", "restarts", "cancels", "suspends", "late ends")
"""Profiles with several restarts, and no node to spare."""
BURSTS = ("cancels", "suspends", "late ends")
"""Profiles whose faults all happen within BURST_S."""
BURST_S = 4.0
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def draw(seed: int) -> Life:
    """Return the life of a seed; seed modulo the number of profiles is its profile."""
    rng = random.Random(f"life {seed}")
    name = list(PROFILES)[seed % len(PROFILES)]
    kinds = [kind for kind in PROFILES[name] if name != "swarm" or rng.random() < 0.4]
    num_nodes = 64 if rng.random() < 0.01 else 2 + int(rng.random() * 3) if rng.random() < 0.85 else 1
    num_steps = 4 + int(rng.random() * 12)
    num_faults = int(rng.random() * 4.5) + (name in HARD)
    faults = [_draw_fault(rng, kinds, num_nodes, num_steps) for _ in range(num_faults)] if kinds else []
    if name in BURSTS:
        begun_s = rng.random() * num_steps
        faults = [replace(fault, at_s=begun_s + BURST_S * rng.random()) for fault in faults]
    max_restarts = int(rng.random() * 4) + (name in HARD)
    return Life(
        seed=seed,
        num_nodes=num_nodes,
        workers=1 + int(rng.random() * 2),
        num_steps=num_steps,
        max_restarts=max_restarts,
        min_nodes=max(1, num_nodes - (0 if name in HARD else int(rng.random() * 3))),
        is_slurm=rng.random() < 0.7,
        can_requeue=rng.random() < 0.8,
        is_tracked=rng.random() < 0.8,
        answer_s=_choose(rng, 0.0, 0.0, rng.random() * 2, FOREVER_S),
        sweep_s=_choose(rng, 0.0, 0.0, rng.random() * 2.4, FOREVER_S),
        start_s=_choose(rng, 0.0, 0.0, rng.random()),
        turn_s=0.25 + 0.2 * rng.random(),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        beats_s=0.0 if rng.random() < 0.01 else 1.0,
    )


def _draw_fault(rng: random.Random, kinds: list[Kind], num_nodes: int, num_steps: int) -> Fault:
    kind = kinds[int(rng.random() * len(kinds))]
    at_s = rng.random() * (num_steps + 6.0)
    for_s = _choose(rng, 0.3 + rng.random() * 2, 2 + rng.random() * 6, 8 + rng.random() * 12, FOREVER_S)
    return Fault(
        at_s=at_s,
        kind=kind,
        node=int(rng.random() * num_nodes),
        for_s=for_s,
        worker=int(rng.random() * 2),
        signum=SIGNALS[int(rng.random() * len(SIGNALS))],
        everywhere=rng.random() < 0.6,
        doubled=rng.random() < 0.3,
    )


def _choose(rng: random.Random, *choices: float) -> float:
    return choices[int(rng.random() * len(choices))]
