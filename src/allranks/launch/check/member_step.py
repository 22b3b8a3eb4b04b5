"""How do members measure, one on each node? A further srun step starts them, and their reports come back as they come.

Phases, each with its own deadline:

1 `srun` gets the nodes of the check again; on one machine, the member is a child of this process    queue_s
2 every node sends a message: it is here
3 it works, and sends a report of each result at once                                                next_s
4 whatever is left of the step is ended

The nodes use the port of the roll call, because firewalls let it through. A program of a member that hangs is killed at
the order's deadline. A node that sent nothing has no reports; the reports of the others count.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from allranks.host.limits import describe_shortage
from allranks.host.node import name_of
from allranks.host.programs import OWN_COMMAND
from allranks.host.signals import die_with_parent
from allranks.launch.check.check_step import ORDER_VARIABLE, Held, step_of_members
from allranks.launch.check.where import SrunNodes
from allranks.launch.inbox import SignalInbox
from allranks.launch.srun import encode, run_steps, words_of
from allranks.model.card import Card, Facts
from allranks.model.errors import AllranksError, name_signal
from allranks.model.hostlist import fold_hosts
from allranks.model.identity import GivenFlags, check_one_agent_per_node, world_from_env
from allranks.preflight.judge import ALONE, name_nodes
from allranks.report.text import say
from allranks.wire.rounds import reason

SLACK_S = 10.0


class MemberAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How the other nodes reach one node."""

    address: str
    interface: str
    num_gpus: int = 0
    """That torch can use there."""
    link_mbit_s: int | None = None
    """Speed that the interface reports; None if it reports none, as virtual interfaces do."""


def find_ends(held: Held, *, needs_torch: bool) -> tuple[dict[str, MemberAddress], dict[str, str]]:
    """Return how to reach each node that can take part, and why others cannot; one node alone has no end.

    Args:
        held: result of the ordinary check, which found nothing that would stop a job.
    """
    cards, ends, skipped = held.seen.cards, dict[str, MemberAddress](), dict[str, str]()
    for index, name in name_nodes(cards).items():
        card, end = cards[index], _end(cards[index], held.addresses.get(index))
        if card.facts is None or (needs_torch and "torch" not in card.facts.packages):
            skipped[name] = "torch is not installed"
        elif end is None:
            skipped[name] = "its data interface is unknown; name it in cluster.toml"
        else:
            ends[name] = end
    if len(ends) < 2:
        skipped |= dict.fromkeys(ends, ALONE if len(cards) < 2 else "no other node can take part")
        ends = {}
    return ends, skipped


def _end(card: Card, met_at: str | None) -> MemberAddress | None:
    """Return the end of a node; without a data network, it is where the nodes found each other, as in a job."""
    address, facts = card.data_address or met_at, card.facts or Facts()
    nic = next((nic for nic in facts.interfaces if address in nic.addresses), None)
    if nic is None or address is None:
        return None
    num_gpus = card.num_gpus if facts.torch_cuda else 0
    return MemberAddress(address=address, interface=nic.name, num_gpus=num_gpus, link_mbit_s=nic.speed_mbit_s)


def run_members(
    place: SrunNodes | None,
    order: msgspec.Struct,
    names: Sequence[str],
    take: Callable[[str, Any], object],
    *,
    kinds: Mapping[str, Any],
    what: str,
    queue_s: float,
    next_s: float,
    env: Mapping[str, str],
    tick: Callable[[], None] | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Start a member on each node, and hand on their reports; returns the nodes that did not finish.

    Args:
        place: where srun starts them; None: one member, on this machine.
        names: of the nodes; a member that has finished sends `done`.
        kinds: type of the reports of each kind.
        what: they do, for messages: `the collectives`.
        tick: called a few times a second, to show the progress; without it, a line says for whom this waits.
        is_over: whether what the others still say is not worth waiting for.
    Raises:
        AllranksError: SLURM started nothing.
    """
    done, words, heard = set[str](), list[str](), set[str]()

    def take_any(node: str, report: Any) -> None:
        heard.add(node)
        if report is None:
            done.add(node)
        else:
            take(node, report)

    def late() -> list[str]:
        return [name for name in names if name not in done]

    def check() -> None:
        inbox.check()
        if tick:
            tick()

    inbox = SignalInbox()
    if place is None:
        command = (
            [[*OWN_COMMAND, "check", "--member"]],
            {**env, ORDER_VARIABLE: encode(order)},
        )
    else:
        command = step_of_members(place, order, env)
    run_steps(
        *command,
        take_any,
        kinds={**kinds, "done": None},
        words=words,
        is_complete=lambda: not late() or is_over(),
        on_wait=lambda s: None if tick else say(f"still waiting for {what} on {fold_hosts(late())} after {s:.0f} s"),
        first_s=queue_s,
        next_s=next_s,
        check_signals=check,
    )
    if not heard:
        where = place.describe() if place else "this machine"
        raise AllranksError(f"no member started on {where}: {words_of(words) or f'no answer within {queue_s:.0f} s'}")
    return late()


def begin_member(env: Mapping[str, str]) -> str:
    """Return the name of this node, on a member's side.

    Raises:
        AllranksError: this task cannot take part.
    """
    check_one_agent_per_node(world_from_env(env, given=GivenFlags(is_alone=True)))
    return name_of(env)


def lines_of(
    program: Path, orders: Sequence[Mapping[str, Any]], *, deadline_s: float, env: Mapping[str, str]
) -> Iterator[tuple[int, bytes]]:
    """Run a program once for each order, all at the same time, and yield which one prints which line.

    One that cannot start, is killed or fails says so in a last line. Those that still run after the deadline are killed
    without a line.
    """
    dies_with_us, by_s = die_with_parent(signal.SIGKILL), time.monotonic() + deadline_s
    with contextlib.ExitStack() as left, selectors.DefaultSelector() as selector:
        for number, order in enumerate(orders):
            command = [sys.executable, str(program), json.dumps(order)]
            try:
                child = subprocess.Popen(
                    command, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=dies_with_us
                )
            except (OSError, subprocess.SubprocessError) as exc:
                yield number, _failed(f"its process cannot start: {describe_shortage(exc) or reason(exc)}")
                continue
            left.enter_context(child)
            left.callback(child.kill)  # and the kernel its own processes, which asked for it (PR_SET_PDEATHSIG)
            assert child.stdout is not None
            selector.register(child.stdout, selectors.EVENT_READ, (number, child))
        rest = [b""] * len(orders)
        while selector.get_map() and (left_s := by_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                number, child = key.data
                data = os.read(key.fd, 1 << 16)
                *lines, rest[number] = (rest[number] + data).split(b"\n")
                yield from ((number, line) for line in lines)
                if not data:
                    selector.unregister(key.fileobj)
                    if (status := child.wait()) < 0:
                        yield number, _failed(f"its process was killed by {name_signal(-status)}")
                    elif status:
                        yield number, _failed(f"its process crashed (exit {status})")


def _failed(what: str) -> bytes:
    return json.dumps({"status": "failed", "what": what}).encode()
