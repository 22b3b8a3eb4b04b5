"""Gloo's full mesh, if ranks report failed connections: one node, two groups, or an address that nobody reaches? Pure.

In each pair, the side with the larger address connects (gloo/transport/tcp/pair.cc, as in PyTorch 2.13), and a rank
reports the first peer that it cannot reach. So ranks that had to connect and report nothing have succeeded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, ip_address

from allranks.causes.book import find_cause
from allranks.causes.cause import Role
from allranks.model.finding import Confidence
from allranks.report.text import fold_ranks
from allranks.why.conclusion import Conclusion
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.people import Culprit, People

MAX_WORLD = 4096
"""Maximum number of ranks in a Gloo group: pairs are counted."""


@dataclass(slots=True)
class Dials:
    """Reports of ranks about connections that failed."""

    world: int = 0
    lines: dict[int, Line] = field(default_factory=dict)
    """By rank, its first report."""
    locals: dict[int, str] = field(default_factory=dict)
    """The address from which it connected."""
    remotes: dict[int, str] = field(default_factory=dict)
    """The address that did not answer."""
    errors: dict[int, str] = field(default_factory=dict)


def conclude_dials(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Return the culprits of failed connections."""
    dials = _read(logs)
    if not dials.remotes or not 2 <= dials.world <= MAX_WORLD:
        return
    address = Counter(dials.remotes.values()).most_common(1)[0][0]
    plan = _plan(dials, address)
    owners = {own: rank for rank, own in plan.items()}
    silent = [rank for rank in range(dials.world) if rank not in dials.remotes]
    if address not in owners:
        if len(silent) == 1:
            yield _conclude(
                dials,
                "wrong-nic",
                silent,
                f"{fold_ranks(silent)} announced {address}, which {fold_ranks(dials.remotes)} cannot reach",
                address,
            )
        return
    failed = {frozenset((rank, owners[remote])) for rank, remote in dials.remotes.items() if remote in owners}
    passed = _passed(dials, plan, owners, hurt=_hurt(logs))
    yield from _judge(dials, failed, passed, plan)


def _judge(
    dials: Dials, failed: set[frozenset[int]], passed: set[frozenset[int]], plan: Mapping[int, str]
) -> Iterator[Conclusion]:
    """Blame the one rank in all failed and no passed connections; else the groups that cannot reach each other."""
    at_all = frozenset.intersection(*failed)
    culprits = sorted(rank for rank in at_all if not any(rank in pair for pair in passed))
    error = next(iter(dials.errors.values()), "no answer")
    if len(culprits) == 1:
        is_down = "No route to host" in error or "unreachable" in error
        others = sorted({rank for pair in failed for rank in pair} - set(culprits))
        yield _conclude(
            dials,
            "link-down" if is_down else "firewall-port",
            culprits,
            f"{fold_ranks(others)} and {fold_ranks(culprits)} do not reach each other: {error}",
            plan[culprits[0]],
        )
    elif len(failed) == 1 and culprits:
        pair = sorted(next(iter(failed)))
        message = f"{fold_ranks(pair)} do not reach each other: {error}; no other pair shows which of them is at fault"
        yield _conclude(dials, "firewall-port", pair, message, plan[pair[0]], confidence=Confidence.UNDECIDED)
    elif len(failed) == 1:
        pair = sorted(at_all)
        message = f"{fold_ranks(pair)} do not reach each other, but both reach others: {error} on the link between them"
        yield _conclude(dials, "partition", pair, message, "")
    elif failed:
        diallers = sorted(dials.remotes)
        others = [rank for rank in range(dials.world) if rank not in dials.remotes]
        targets = {rank for pair in failed for rank in pair} - set(diallers)
        message = (
            f"{fold_ranks(diallers)} do not reach {fold_ranks(targets)}: {error}; "
            f"the network is partitioned between {fold_ranks(others)} and {fold_ranks(diallers)}"
        )
        yield _conclude(dials, "partition", diallers, message, "")


def _read(logs: Logs) -> Dials:
    dials = Dials()
    for event in logs.of("dial"):
        rank = event.number("dialler")
        if rank is None or rank in dials.remotes:
            continue
        dials.world = max(dials.world, event.number("world") or 0, rank + 1)
        dials.lines[rank] = event.line
        dials.locals[rank] = event.values["local"]
        dials.remotes[rank] = event.values["remote"]
        if error := event.values.get("error"):
            dials.errors[rank] = error.strip()
    return dials


def _hurt(logs: Logs) -> frozenset[int]:
    """Ranks that failed with another message: nothing is known about their connections."""
    return frozenset(
        event.line.rank
        for event in logs.events
        if event.line.rank is not None and (event.kind == "exception" or (event.sign and event.sign.role < Role.VICTIM))
    )


def _passed(
    dials: Dials, plan: Mapping[int, str], owners: Mapping[str, int], *, hurt: frozenset[int]
) -> set[frozenset[int]]:
    """Return the pairs that were connected: a rank connects in the order of ranks, and stops at the first failure."""
    passed = set()
    for rank, own in plan.items():
        end = owners.get(dials.remotes.get(rank, ""), None if rank in hurt or rank in dials.remotes else dials.world)
        if end is None:
            continue
        for peer, address in plan.items():
            if peer < end and peer != rank and int(ip_address(own)) > int(ip_address(address)):
                passed.add(frozenset((rank, peer)))
    return passed


def _conclude(
    dials: Dials,
    cause: str,
    ranks: Sequence[int],
    message: str,
    address: str,
    *,
    confidence: Confidence = Confidence.LIKELY,
) -> Conclusion:
    return Conclusion(
        cause=find_cause(cause),
        role=Role.PRIMARY,
        confidence=confidence,
        culprit=Culprit(ranks=tuple(ranks), things=(f"address {address}",) if address else ()),
        message=message,
        evidence=tuple(dials.lines.values())[:3],
        victims=frozenset(dials.remotes) - frozenset(ranks),
        ask="run allranks check on the same nodes: it tests every pair and names the link",
        weight=1,
    )


def _plan(dials: Dials, address: str) -> dict[int, str]:
    """Return the address of each rank: from the reports, and if these increase with the rank, of the others, too."""
    # On docker0, all nodes have the same address.
    known = {rank: own for rank, own in dials.locals.items() if own != address and _is_v4(own)}
    if len(known) == 1 and len(set(dials.remotes.values())) == 1 and _is_v4(address):
        (rank, own), *_ = known.items()
        first = int(IPv4Address(own)) - rank
        if first <= int(IPv4Address(address)) < first + dials.world:  # else the guess does not fit
            return {member: str(IPv4Address(first + member)) for member in range(dials.world)}
    firsts = {int(IPv4Address(own)) - rank for rank, own in known.items()}
    if len(known) >= 2 and len(firsts) == 1:
        return {rank: str(IPv4Address(firsts.copy().pop() + rank)) for rank in range(dials.world)}
    return known


def _is_v4(address: str) -> bool:
    try:
        return ip_address(address).version == 4
    except ValueError:
        return False
