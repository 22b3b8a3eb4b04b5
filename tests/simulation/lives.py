"""One life of a job before it is lived: its size, its terms, and all that will go wrong, drawn from a seed.

A profile switches kinds of faults on; `swarm` lets the seed choose (Groce et al. 2012: runs without some kinds of
faults find others). All faults are drawn first, so that leaving one out does not change the rest.
"""

from __future__ import annotations

import hashlib
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

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
    WORKER_MEETS_A_FULL_DISK = "worker meets a full disk"
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
    PARTITION = "partition"
    """Two groups of nodes cannot talk."""
    ONE_WAY = "one way"
    """Nothing gets to a node, or nothing from it."""
    ONLY_A_QUORUM_HEALS = "only a quorum heals"
    """A random majority is well from now on; whatever is wrong with the others stays so."""


LEADER, HEIR = -1, -2
"""In place of a node: whoever leads then, and the first of its successors."""
WORDS = ("plan", "stop", "resign", "goodbye")
MOMENTS = ("running", "stopping", "forming", "paused", "leaderless", "took over", *WORDS)
"""What a fault may wait for: a leader's phase, a leader's message (of which half are lost with their connections), an
agent without its leader, a new leader."""


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
    others: tuple[int, ...] = ()
    """With `node`, one side of a partition."""
    on: str = ""
    """It waits for this moment, from `at_s` on; empty: it does not."""
    after_s: float = 0.0
    """After that moment; of a line that ends, between one side's notice and the other's."""


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
    is_batch: bool = False
    """Whether srun runs on the first leader's node."""
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
    seen_s: float = 0.0
    """How long the other nodes do not see what one writes into the run directory."""
    saves_s: float = 0.0
    """How long a handler of the script saves on SIGTERM; 0: the script has none."""
    is_blind_when_cut: bool = False
    """Whether a node that is cut off does not see the run directory either."""


LOSSES = (Kind.AGENT_DIES, Kind.AGENT_STOPS, Kind.NODE_DIES, Kind.NODE_IS_CUT_OFF)
"""How a leader is lost."""
_DRAWN = tuple(kind for kind in Kind if kind is not Kind.WORKER_MEETS_A_FULL_DISK)
PROFILES: dict[str, tuple[Kind, ...]] = {
    "swarm": _DRAWN,
    "workers": tuple(kind for kind in _DRAWN if kind.value.startswith("worker")),
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
    "lines": (Kind.LINE_ENDS,),
    "leaders": LOSSES,
    "heirs": LOSSES,
    "plans": LOSSES,
    "words": (*LOSSES, Kind.LINE_ENDS),
    "partitions": (Kind.PARTITION, Kind.NODE_IS_CUT_OFF, Kind.ONE_WAY, Kind.PARTITION),
    "resigns": (Kind.WORKER_HANGS, *LOSSES),
    "quorums": (Kind.PARTITION, Kind.ONE_WAY, *LOSSES),
    "cut short": (Kind.NODE_IS_CUT_OFF, Kind.PARTITION, Kind.SIGNAL, Kind.AGENT_DIES),
}
HARD = ("pauses", "restarts", "cancels", "suspends", "late ends")
"""Profiles with several restarts, and no node to spare."""
SUCCESSIONS = ("leaders", "heirs", "plans", "words", "partitions", "resigns", "quorums", "cut short")
"""Profiles in which the leader is lost: several restarts, mostly three nodes or more, and nodes to spare."""
BURSTS = ("cancels", "suspends", "late ends", "cut short")
"""Profiles whose faults all happen within BURST_S."""
BURST_S = 4.0
HEALS_S = 25.0
"""When only a quorum heals, at the earliest."""
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def draw(seed: int) -> Life:
    """Return the life of a seed; seed modulo the number of profiles is its profile."""
    rng = random.Random(f"life {seed}")
    name = list(PROFILES)[seed % len(PROFILES)]
    is_hard, is_succession = name in HARD, name in SUCCESSIONS
    kinds = [kind for kind in PROFILES[name] if name != "swarm" or rng.random() < 0.4]
    num_nodes = 64 if rng.random() < 0.01 else 2 + int(rng.random() * 3) if rng.random() < 0.85 else 1
    if is_succession and num_nodes < 5:
        num_nodes = 2 + int(rng.random() * 4)
    num_steps = 4 + int(rng.random() * 12)
    num_faults = int(rng.random() * 4.5) + is_hard
    faults = [_draw_fault(rng, kinds, num_nodes, num_steps) for _ in range(num_faults)] if kinds else []
    if is_succession:
        faults = _draw_losses(rng, name, faults, num_nodes, num_steps)
    if name in BURSTS:
        begun_s = rng.random() * num_steps
        faults = [replace(fault, at_s=begun_s + BURST_S * rng.random()) for fault in faults]
    max_restarts = int(rng.random() * 4) + (is_hard or is_succession)
    life = Life(
        seed=seed,
        num_nodes=num_nodes,
        workers=1 + int(rng.random() * 2),
        num_steps=num_steps,
        max_restarts=max_restarts,
        min_nodes=max(1, num_nodes - (0 if is_hard else int(rng.random() * (5 if is_succession else 3)))),
        is_slurm=rng.random() < 0.7,
        can_requeue=rng.random() < 0.8,
        is_tracked=rng.random() < 0.8,
        answer_s=_choose(rng, 0.0, 0.0, rng.random() * 2, 0.0 if is_succession else FOREVER_S),
        sweep_s=_choose(rng, 0.0, 0.0, rng.random() * 2.4, 0.0 if is_succession else FOREVER_S),
        start_s=_choose(rng, 0.0, 0.0, rng.random()),
        turn_s=0.25 + 0.2 * rng.random(),
        faults=tuple(sorted(_fill_disks(seed, faults), key=lambda fault: fault.at_s)),
        beats_s=0.0 if rng.random() < 0.01 else 1.0,
        seen_s=_choose(rng, 0.0, 0.0, 1.0 + rng.random() * 2),
        is_blind_when_cut=rng.random() < 0.3,
        saves_s=_draw_save_s(seed),
    )
    return replace(life, is_batch=True) if life.is_slurm and rng.random() < (0.4 if is_succession else 0.2) else life


def _draw_save_s(seed: int) -> float:
    """Return how long the ranks of a life save on SIGTERM; from numbers of its own: older lives stay the same."""
    rng = random.Random(f"handlers {seed}")
    return rng.random() * 40.0 if rng.random() < 0.3 else 0.0


def _fill_disks(seed: int, faults: list[Fault]) -> list[Fault]:
    """Have some exceptions be of a full disk; from numbers of their own: older lives stay the same."""
    rng = random.Random(f"disks {seed}")
    return [
        replace(fault, kind=Kind.WORKER_MEETS_A_FULL_DISK)
        if fault.kind is Kind.WORKER_RAISES and rng.random() < 0.5
        else fault
        for fault in faults
    ]


def _draw_fault(rng: random.Random, kinds: Sequence[Kind], num_nodes: int, num_steps: int) -> Fault:
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
        others=tuple(node for node in range(num_nodes) if rng.random() < 0.4) if kind is Kind.PARTITION else (),
        after_s=rng.random() * 2.5,
    )


def _draw_losses(rng: random.Random, name: str, faults: list[Fault], num_nodes: int, num_steps: int) -> list[Fault]:
    """Have the leader lost, and what belongs to it, before all other faults of a life."""
    loss = _draw_fault(rng, LOSSES, 1, num_steps)
    loss = replace(loss, node=LEADER, after_s=_choose(rng, 0.0, 0.02 * rng.random(), 5 * rng.random()))
    crash = replace(loss, kind=Kind.WORKER_CRASHES, node=int(rng.random() * 2), at_s=rng.random() * num_steps)
    moment = MOMENTS[int(rng.random() * len(MOMENTS))]
    match name:
        case "leaders":
            return [loss, *([] if rng.random() < 0.4 else faults[:2])]
        case "heirs":
            on = "leaderless" if rng.random() < 0.5 else "took over"
            next_loss = replace(_draw_fault(rng, LOSSES, 1, num_steps), on=on, at_s=0.0, after_s=6 * rng.random())
            next_loss = replace(next_loss, node=HEIR if on == "leaderless" else LEADER)
            return [loss, next_loss, *faults[:1]]
        case "plans":
            first = _choose(rng, crash, replace(crash, kind=Kind.NODE_DIES, node=num_nodes - 1))
            return [first, replace(loss, on="plan", at_s=0.0, after_s=0.0), *faults[:1]]
        case "words":
            kind = _choose(rng, loss.kind, loss.kind, Kind.LINE_ENDS)
            # Both sides notice within RETURN_S that a line has ended; what lasts longer is a loss.
            after_s = loss.after_s / 2 if kind is Kind.LINE_ENDS else loss.after_s
            return [crash, replace(loss, kind=kind, on=moment, at_s=rng.random(), after_s=after_s), *faults[:2]]
        case "resigns":
            kind = _choose(rng, Kind.WORKER_HANGS, Kind.WORKER_IS_HELD)
            hang = replace(crash, kind=kind, node=LEADER, at_s=rng.random() * num_steps / 2, for_s=FOREVER_S)
            on = _choose(rng, "resign", "stop", "took over", "leaderless")
            return [hang, replace(loss, on=on, at_s=0.0), *(faults[:1] if rng.random() < 0.3 else [])]
        case "quorums":
            heal = replace(loss, kind=Kind.ONLY_A_QUORUM_HEALS, at_s=HEALS_S * (0.5 + rng.random()))
            return [replace(loss, for_s=FOREVER_S), heal, *faults]
        case "cut short":
            return [loss, *faults]
    return faults


def _choose(rng: random.Random, *choices: Any) -> Any:
    return choices[int(rng.random() * len(choices))]
