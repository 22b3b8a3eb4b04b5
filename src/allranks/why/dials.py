"""Gloo's full mesh, where it says who could not dial whom: one node, a partition, or an address that nobody reaches? Pure.

Of each pair the side with the larger address dials (gloo/transport/tcp/pair.cc, as in PyTorch 2.13), and a rank reports
the first one that it does not reach. So the ranks that should have dialled and say nothing did get through.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, ip_address

from allranks.causes.catalogue import find_cause
from allranks.causes.sign import Role
from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion
from allranks.why.events import Logs
from allranks.why.line import Line
from allranks.why.people import Culprit, People, tell_ranks


@dataclass(slots=True)
class Dialled:
    """One address that ranks could not reach."""

    failed: dict[int, Line] = field(default_factory=dict)
    """The ranks that tried, and what they said."""
    error: str = ""


def conclude_dials(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Return whose connections fail, for the address that most ranks could not reach."""
    dialled: defaultdict[str, Dialled] = defaultdict(Dialled)
    locals_: dict[int, str] = {}
    world = 0
    for event in logs.of("dial"):
        rank = event.number("dialler")
        if rank is None:
            continue
        world = max(world, event.number("world") or 0)
        target = dialled[event.values["remote"]]
        target.failed.setdefault(rank, event.line)
        target.error = target.error or event.values.get("error", "")
        locals_[rank] = event.values["local"]
    if not dialled:
        return
    address, target = max(dialled.items(), key=lambda item: len(item[1].failed))
    addresses = _plan(locals_, address, world)
    owner = next((rank for rank, own in addresses.items() if own == address), None)
    silent = [rank for rank in range(world) if rank not in target.failed]
    if owner is None and len(silent) == 1:
        yield _conclude(
            "wrong-nic",
            Culprit(ranks=tuple(silent), things=(f"address {address}",)),
            f"{tell_ranks(silent)} announced {address}, which {tell_ranks(target.failed)} cannot reach",
            target,
        )
    if owner is None:
        return
    diallers = {rank for rank, own in addresses.items() if int(ip_address(own)) > int(ip_address(address))}
    through = diallers - target.failed.keys()
    if not through:
        is_down = "No route to host" in target.error or "unreachable" in target.error
        yield _conclude(
            "link-down" if is_down else "firewall-port",
            Culprit(ranks=(owner,), things=(f"address {address}",)),
            f"none of {tell_ranks(diallers)} reaches {tell_ranks([owner])} ({address}): {target.error}",
            target,
        )
    elif len(target.failed) > 1:
        here = sorted({owner, *through})
        yield _conclude(
            "partition",
            Culprit(ranks=tuple(sorted(target.failed))),
            f"{tell_ranks(target.failed)} do not reach {tell_ranks([owner])} ({address}), and "
            f"{tell_ranks(through)} do: the network is parted between {tell_ranks(here)} and {tell_ranks(target.failed)}",
            target,
        )
    else:
        yield _conclude(
            "firewall-port",
            Culprit(ranks=tuple(sorted({owner, *target.failed}))),
            f"{tell_ranks(target.failed)} does not reach {tell_ranks([owner])} ({address}), and others do",
            target,
            confidence=Confidence.UNDECIDED,
        )


def _conclude(
    cause: str, culprit: Culprit, message: str, target: Dialled, *, confidence: Confidence = Confidence.LIKELY
) -> Conclusion:
    return Conclusion(
        cause=find_cause(cause),
        role=Role.PRIMARY,
        confidence=confidence,
        culprit=culprit,
        message=message,
        evidence=tuple(target.failed.values())[:3],
        victims=frozenset(target.failed) - frozenset(culprit.ranks),
        ask="allranks check on the same nodes tries every pair and names the link",
        weight=1,
    )


def _plan(locals_: Mapping[int, str], address: str, world: int) -> dict[int, str]:
    """Return the address of each rank: as they say, and where these count up with the rank, of the others, too."""
    known = {rank: own for rank, own in locals_.items() if own != address}  # on docker0 all nodes have one and the same
    try:
        numbers = {rank: int(IPv4Address(own)) - rank for rank, own in known.items()}
    except ValueError:
        return known
    if len(numbers) >= 2 and len(set(numbers.values())) == 1:
        first = next(iter(numbers.values()))
        known |= {rank: str(IPv4Address(first + rank)) for rank in range(world)}
    return {rank: own for rank, own in known.items() if _is_alike(own, address)}


def _is_alike(one: str, other: str) -> bool:
    try:
        return ip_address(one).version == ip_address(other).version
    except ValueError:
        return False
