"""Who is who in the logs: addresses and nodes, processes and ranks, and the number of ranks. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

import msgspec

from allranks.causes.cause import CULPRIT_GROUPS, Blames, Trait
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent, Logs

MAX_RANKS = 1 << 20
FEW = 4
"""Number of sources whose ends are searched for names."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """The culprit of a conclusion, as far as the logs say."""

    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    interface: str | None = None
    things: tuple[str, ...] = ()
    """Any other culprit, in words: `GPU 0000:10:1c`, `address 127.0.1.1`, `local rank 3`, `process 4711`."""

    def __or__(self, other: Culprit) -> Culprit:
        return Culprit(
            nodes=tuple(dict.fromkeys(self.nodes + other.nodes)),
            ranks=tuple(sorted({*self.ranks, *other.ranks})),
            interface=self.interface or other.interface,
            things=tuple(dict.fromkeys(self.things + other.things)),
        )

    def __bool__(self) -> bool:
        return bool(self.nodes or self.ranks or self.interface or self.things)

    def words(self) -> str:
        """Return all of it in one line, each rank separately: `node03 rank 1 rank 2 GPU 0`."""
        ranks = [f"rank {rank}" for rank in self.ranks]
        return " ".join([*self.nodes, *filter(None, [self.interface]), *ranks, *self.things])


@dataclass(frozen=True, slots=True)
class People:
    """The job's ranks and nodes, from the logs."""

    world: int | None
    """World size, if a line says it."""
    node_of_address: dict[str, str]
    rank_of_process: dict[tuple[str, int], int]
    """(node, pid) -> rank."""
    nodes: tuple[str, ...] = ()
    """All ranks that wrote something."""
    endpoint: str | None = None
    """The rendezvous address, as written: `node01:29500`."""
    scopes: tuple[tuple[str, int, Culprit], ...] = ()
    """(source, line, who): from that line on, another process's error follows, announced by mp.spawn or Ray."""

    def know(self, line: Line) -> Line:
        """Return the line with the rank of its process, if only other lines tell it."""
        if line.rank is not None or line.node is None or line.pid is None:
            return line
        rank = self.rank_of_process.get((line.node, line.pid))
        return line if rank is None else msgspec.structs.replace(line, rank=rank)


def meet(logs: Logs) -> People:
    """Collect ranks, nodes and addresses."""
    addresses: dict[str, str] = {}
    processes: dict[tuple[str, int], int] = {}
    worlds: defaultdict[int, int] = defaultdict(int)
    nodes: dict[str, None] = {}
    scopes: list[tuple[str, int, Culprit]] = []
    endpoint = None
    for event in logs.events:
        line = event.line
        if line.node:
            nodes[line.node] = None
        if event.kind == "endpoint" and endpoint is None:
            endpoint = event.values["endpoint"].rstrip(".,:")
        if event.kind == "scope":
            scopes.append((line.source.shown, line.number, _scope(event)))
        if event.kind == "bootstrap" and line.node:
            addresses[event.values["address"]] = line.node
        if event.kind == "comm" and line.node and line.pid is not None and (rank := event.number("rank")) is not None:
            processes.setdefault((line.node, line.pid), rank)
        if event.kind in {"comm", "world"} and (world := event.number("world")):
            worlds[world] += 1
    for event in logs.of(Trait.OTHERS_WAIT_FOR_IT):
        if wanted := event.number("wanted"):
            worlds[wanted] += 1
    if not nodes and len(logs.tails) <= FEW:  # a fragment: lines without events may tell where it ran
        nodes.update(dict.fromkeys(line.node for tail in logs.tails for line in tail.lines if line.node))
    largest = max(worlds, default=None)  # groups within the job are smaller
    return People(
        largest if largest and largest <= MAX_RANKS else None,
        addresses,
        processes,
        tuple(nodes),
        endpoint,
        tuple(scopes),
    )


def _scope(event: LogEvent) -> Culprit:
    things = []
    if local_rank := event.values.get("local_rank"):
        things.append(f"local rank {local_rank}")
    if pid := event.values.get("pid"):
        things.append(f"process {pid}")
    if address := event.values.get("address"):
        things.append(f"address {address}")
    return Culprit(things=tuple(things))


def blame(event: LogEvent, people: People) -> Culprit:
    """Return the culprit that the event's line means, according to its sign."""
    assert event.sign is not None
    who = event.sign.blames
    found = Culprit()
    if who is Blames.SPEAKER:
        found = speaker(people.know(event.line))
    if who is Blames.PEER and (peer := event.values.get("peer")):
        found = name_peer(peer, people)
    if who is Blames.NOBODY:
        return Culprit()
    return named(event) | found


def speaker(line: Line) -> Culprit:
    """Return the writer of a line; the local rank only if the rank is unknown, the process only if both are unknown."""
    things = []
    if line.rank is None and line.local_rank is not None:
        things.append(f"local rank {line.local_rank}")
    if line.rank is None and line.local_rank is None and line.pid:
        things.append(f"process {line.pid}")
    return Culprit(
        nodes=(line.node,) if line.node else (),
        ranks=() if line.rank is None else (line.rank,),
        things=tuple(things),
    )


def name_peer(peer: str, people: People) -> Culprit:
    """Return the node and rank of an address or a rank; the address itself is named, too."""
    host = peer.strip("[]<>")
    if host.isdecimal():
        return Culprit(ranks=(int(host),))
    node = people.node_of_address.get(host)
    return Culprit(nodes=(node,) if node else (), things=(f"address {host}",))


_WORDS = {"gpu": "GPU", "hca": "HCA", "pid": "process", "port": "port", "address": "address"}


def named(event: LogEvent) -> Culprit:
    """Return the culprit that a line names."""
    found = Culprit()
    groups = CULPRIT_GROUPS & event.values.keys()
    if _is_garbage(event.values.get("address")):
        groups -= {"address", "port"}
    for group in sorted(groups):
        text = event.values[group].strip()
        if group in {"rank", "ranks"}:
            found |= Culprit(ranks=parse_ranks(text))
        elif group == "node":
            found |= Culprit(nodes=(text.rstrip(".,"),))
        elif group == "interface":
            found |= Culprit(interface=text)
        else:
            found |= Culprit(things=(f"{_WORDS[group]} {text}" if group in _WORDS else text,))
    if "local_rank" in event.values and not found.ranks and event.line.rank is None:
        found |= Culprit(things=(f"local rank {event.values['local_rank']}",))
    return found


def _is_garbage(address: str | None) -> bool:
    """Whether torch 2.13 printed this for a socket that it had closed: uninitialized memory, read as an address."""
    try:
        found = ip_address((address or "").partition("%")[0])
    except ValueError:
        return False
    return found.is_reserved or (found.version == 4 and str(found).endswith(".0.0"))


def parse_ranks(text: str, *, limit: int = 4096) -> tuple[int, ...]:
    """Parse `4, 5, 6` and `[0-3]`; skip what is not a number.

    >>> parse_ranks("[0-2],5")
    (0, 1, 2, 5)
    """
    found: list[int] = []
    for part in text.replace("[", " ").replace("]", " ").replace(",", " ").replace("and", " ").split():
        first, dash, last = part.partition("-")
        if first.isdecimal() and (not dash or last.isdecimal()) and len(first) < 8 and len(last) < 8:
            end = int(last) if dash else int(first)
            found += range(int(first), min(end, int(first) + limit) + 1)
    return tuple(dict.fromkeys(found))


def missing_of(present: Sequence[int] | frozenset[int] | set[int], world: int | None) -> tuple[int, ...]:
    """Return the missing ranks; without a world size, those below the largest known rank."""
    if not present:
        return ()
    end = world if world is not None else max(present) + 1
    return tuple(rank for rank in range(min(end, MAX_RANKS)) if rank not in present)
