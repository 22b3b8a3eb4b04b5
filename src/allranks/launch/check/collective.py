"""How do real collectives run between pairs of nodes? A second srun step starts one child with torch on each node.

Phases, each with its own deadline:

1 `srun` gets the same nodes again                                                          queue_s
2 every node sends a message through SLURM and starts join/pair.py, which imports torch     START_S
3 the pairs run in rounds; each node reports each result at once                            at most PAIR_S each
4 whatever is left of the step is ended

The nodes use the port of the roll call, because firewalls let it through. A child that hangs is killed with its process
group. A node that sent nothing has no reports; the reports of its partners count.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import allranks.join
from allranks.launch.check.member import name_of
from allranks.launch.check.step import srun_command, step_env
from allranks.launch.check.variable import from_variable, to_variable
from allranks.launch.check.where import Place
from allranks.launch.step.parcels import Unpacker, pack
from allranks.launch.step.srun import Line, run_steps, words_of
from allranks.model.errors import AllranksError
from allranks.model.identity import check_one_agent_per_node, world_from_env

ORDER_VARIABLE = "ALLRANKS_CHECK_PAIRS"
"""In the step's environment: which nodes form which pairs."""
START_S = 40.0
"""From the step's first message to the first pair: all nodes load torch from one file system at the same time."""
PAIR_S = 20.0
"""For one pair, once both nodes are ready."""
COLLECTIVE_S = 10.0
"""Timeout of Gloo and NCCL themselves; shorter than PAIR_S, so that their error message is received."""
SLACK_S = 10.0


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How the other nodes reach one node."""

    address: str
    interface: str
    num_gpus: int = 0
    link_mbit_s: int | None = None
    """Speed that the interface reports; None if it reports none, as virtual interfaces do."""


class PairOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the children run."""

    ends: dict[str, End]
    """By node."""
    rounds: tuple[tuple[tuple[str, str], ...], ...]
    backends: tuple[str, ...]
    port: int

    @property
    def deadline_s(self) -> float:
        """Longest run time of a child."""
        return START_S + (len(self.rounds) * len(self.backends) + 1) * PAIR_S


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one end of a pair reports, or why a node cannot take part."""

    node: str = ""
    peer: str = ""
    backend: str = ""
    round: int = 0
    status: str = "ok"
    """ok, failed; unknown: something else than the pair failed."""
    what: str = ""
    seconds: float | None = None
    """Of one all-reduce of 4 MiB, the median of three."""
    payload_bytes: int = 0
    """Of the all-reduces that measure the bandwidth."""
    payload_s: float | None = None
    """Of the fastest of them, without set-up."""
    no_torch: str = ""
    """Why this node has no working torch."""
    matmul_s: tuple[float, ...] = ()
    """Seconds of a matmul, one entry per GPU."""


@dataclass(slots=True)
class Told:
    """What was received from the step."""

    here: set[str] = field(default_factory=set)
    reports: list[Report] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    words: list[str] = field(default_factory=list)
    """Messages of srun."""


def run_pairs(
    place: Place,
    order: PairOrder,
    *,
    queue_s: float,
    env: Mapping[str, str],
    say: Callable[[str], None],
    check_signals: Callable[[], None],
) -> Told:
    """Start the children on the nodes, and return their reports.

    Args:
        place: the nodes that were checked, by name.
        order: which nodes form which pairs.
        queue_s: how long SLURM may take to start them.
        env: the caller's.
        say: gets a line about nodes that did not finish.
        check_signals: raises StoppedBySignal when somebody told this process to stop.
    Raises:
        AllranksError: SLURM started nothing.
        StoppedBySignal: check_signals raised it.
    """
    told, unpacker = Told(), Unpacker()
    told_env = step_env(env) | {ORDER_VARIABLE: encode_order(order)}
    by_s, is_begun = time.monotonic() + queue_s, False
    with run_steps([srun_command(place, mode="--pairs")], told_env) as output:
        while not output.has_ended and time.monotonic() < by_s and told.done < set(order.ends):
            check_signals()
            if told.here and not is_begun:
                is_begun, by_s = True, time.monotonic() + order.deadline_s + SLACK_S
            for line in output.lines():
                _take(told, unpacker, line)
    if not told.here:
        said = words_of(told.words) or f"no answer within {queue_s:.0f} s"
        raise AllranksError(f"check --deep: SLURM started no second step on {place.describe()}: {said}")
    if silent := sorted(set(order.ends) - told.done):
        say(f"the collectives did not finish on {', '.join(silent)}")
    return told


def _take(told: Told, unpacker: Unpacker, line: Line) -> None:
    if line.is_aside:
        told.words.append(line.text)
    parcel = None if line.is_aside else unpacker.feed(line.text)
    if parcel is None:
        return
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # from another version of allranks
        report = msgspec.json.decode(parcel.content, type=Report)
        match parcel.kind:
            case "here":
                told.here.add(report.node)
            case "done":
                told.done.add(report.node)
            case "pair":
                told.reports.append(report)


def serve_pairs(order: PairOrder, env: Mapping[str, str], *, tell: Callable[[str], None]) -> None:
    """Run on one node: start the child with torch, and forward its reports.

    Args:
        order: who works with whom.
        env: this task's; the child gets it, too.
        tell: sends lines to the process that started the step.
    Raises:
        AllranksError: this task cannot take part.
    """
    world = world_from_env(env)
    check_one_agent_per_node(world)
    node = world.node_name or name_of(env)
    tell(pack(str(world.rank), "here", msgspec.json.encode(Report(node=node))))
    command = [sys.executable, str(Path(allranks.join.__path__[0]) / "pair.py")]
    child = subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    killer = threading.Timer(order.deadline_s, _kill, [child])
    killer.daemon = True
    killer.start()
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(work_of(order, node)).encode())
            child.stdin.close()
        for line in child.stdout:
            with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
                report = msgspec.structs.replace(msgspec.json.decode(line, type=Report), node=node)
                tell(pack(str(world.rank), "pair", msgspec.json.encode(report)))
        tell(pack(str(world.rank), "done", msgspec.json.encode(Report(node=node))))
    finally:
        killer.cancel()
        _kill(child)
        child.wait()


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and the process of its current pair."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def work_of(order: PairOrder, node: str) -> dict[str, Any]:
    """Return the input of join/pair.py on one node: its pairs, in the order of the rounds. Pure."""
    work = []
    steps = [(backend, number) for backend in order.backends for number in range(len(order.rounds))]
    for step, (backend, number) in enumerate(steps):
        for pair in order.rounds[number]:
            if node in pair:
                first = order.ends[pair[0]]
                work.append(
                    {
                        "step": step,
                        "round": number,
                        "backend": backend,
                        "peer": pair[1 - pair.index(node)],
                        "rank": pair.index(node),
                        "address": first.address,
                        "port": order.port,
                        "interface": order.ends[node].interface,
                    }
                )
    num_gpus = order.ends[node].num_gpus if node in order.ends and "nccl" in order.backends else 0
    return {"work": work, "num_gpus": num_gpus, "start_s": START_S, "pair_s": PAIR_S, "timeout_s": COLLECTIVE_S}


def encode_order(order: PairOrder) -> str:
    """Return an order as the value of an environment variable."""
    return to_variable(order)


def decode_order(text: str) -> PairOrder:
    """Read what `encode_order` wrote.

    Raises:
        UsageError: it is something else.
    """
    return from_variable(text, PairOrder, name=ORDER_VARIABLE)
