"""Gloo's full mesh, if ranks report failed connections: one node, two groups, or an address that nobody reaches? Pure.

In each pair, the side with the larger address connects (gloo/transport/tcp/pair.cc, as in PyTorch 2.13), and a rank
reports the first peer that it cannot reach. So ranks that had to connect and report nothing have succeeded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address, ip_address

from allranks.facts.fact import Fact, FactKind
from allranks.model.finding import Confidence
from allranks.report.text import fold_ranks
from allranks.why.facts_of_lines import FactReader
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.readings.progress import find_last_steps

MAX_WORLD = 4096
"""Maximum number of ranks in a Gloo group: pairs are counted."""
_Pairs = set[frozenset[int]]
_Told = tuple[str, list[int], str, str, Confidence]
"""A cause, its culprits, the message, the address that is at fault, and how sure that is."""


def read_dials(reader: FactReader) -> Iterator[Fact]:
    """Return the culprits of failed connections."""
    reports: dict[int, LogEvent] = {}  # of each rank the first
    told_by = [event for event in reader.logs.of("dial") if event.number("dialler") is not None]
    steps = find_last_steps(reader.logs) if told_by else {}
    for event in told_by:
        if event.line.number > steps.get(event.line.source.shown, 0):  # else it connected in the end
            reports.setdefault(event.number("dialler") or 0, event)
    world = max((max(event.number("world") or 0, rank + 1) for rank, event in reports.items()), default=0)
    if not 2 <= world <= MAX_WORLD:
        return
    remotes = {rank: event.values["remote"] for rank, event in reports.items()}
    address = Counter(remotes.values()).most_common(1)[0][0]
    plan = _plan({rank: event.values["local"] for rank, event in reports.items()}, remotes, address, world)
    owners = {own: rank for rank, own in plan.items()}
    silent = [rank for rank in range(world) if rank not in reports]
    told: list[_Told] = []
    if address in owners:
        failed = {frozenset((rank, owners[remote])) for rank, remote in remotes.items() if remote in owners}
        unknown = _hurt(reader.logs) | reports.keys()
        ends = {rank: owners.get(remotes.get(rank, ""), 0 if rank in unknown else world) for rank in plan}
        errors = [error.strip() for event in reports.values() if (error := event.values.get("error"))]
        told = [_judge(failed, _passed(plan, ends), plan, [*reports], silent, errors[0] if errors else "no answer")]
    elif len(silent) == 1:
        message = f"{fold_ranks(silent)} announced {address}, which {fold_ranks(reports)} cannot reach"
        told = [("wrong-nic", silent, message, address, Confidence.LIKELY)]
    for cause, ranks, message, at_fault, confidence in told:
        yield from reader.infer(
            FactKind.LINK_FAULT,
            cause,
            [event.line for event in reports.values()],
            message,
            ranks=ranks,
            confidence=confidence,
            things=(f"address {at_fault}",) if at_fault else (),
            ask="run allranks check on the same nodes: it tests every pair and names the link",
        )


def _judge(
    failed: _Pairs, passed: _Pairs, plan: Mapping[int, str], dialers: list[int], silent: list[int], error: str
) -> _Told:
    """Blame the one rank in all failed and no passed connections; else the groups that cannot reach each other."""
    at_all = sorted(frozenset.intersection(*failed))
    culprits = [rank for rank in at_all if not any(rank in pair for pair in passed)]
    others = {rank for pair in failed for rank in pair}
    if len(culprits) == 1:
        is_down = "No route to host" in error or "unreachable" in error
        message = f"{fold_ranks(others - {*culprits})} and {fold_ranks(culprits)} do not reach each other: {error}"
        return "link-down" if is_down else "firewall-port", culprits, message, plan[culprits[0]], Confidence.LIKELY
    if len(failed) == 1 and culprits:
        message = (
            f"{fold_ranks(at_all)} do not reach each other: {error}; no other pair shows which of them is at fault"
        )
        return "firewall-port", at_all, message, plan[at_all[0]], Confidence.UNDECIDED
    if len(failed) == 1:
        message = f"{fold_ranks(at_all)} do not reach each other, but both reach others: {error} on the link between "
        return "partition", at_all, message + "them", "", Confidence.LIKELY
    message = f"{fold_ranks(dialers)} do not reach {fold_ranks(others - {*dialers})}: {error}; "
    message += f"the network is partitioned between {fold_ranks(silent)} and {fold_ranks(dialers)}"
    return "partition", sorted(dialers), message, "", Confidence.LIKELY


def _hurt(logs: Logs) -> frozenset[int]:
    """Ranks that failed with another message: nothing is known about their connections."""
    return frozenset(
        event.line.rank
        for event in logs.events
        if event.line.rank is not None
        and (event.kind == "exception" or (event.states is not None and not event.is_loss))
    )


def _passed(plan: Mapping[int, str], ends: Mapping[int, int]) -> _Pairs:
    """Return the pairs that were connected: a rank connects in the order of ranks up to its end, the first failure."""
    numbers = {rank: int(ip_address(own)) for rank, own in plan.items()}
    return {
        frozenset((rank, peer)) for rank in plan for peer in plan if peer < ends[rank] and numbers[rank] > numbers[peer]
    }


def _plan(own: Mapping[int, str], remotes: Mapping[int, str], address: str, world: int) -> dict[int, str]:
    """Return the address of each rank: from the reports, and if these increase with the rank, of the others, too."""
    # On docker0, all nodes have the same address.
    known = {rank: local for rank, local in own.items() if local != address and _is_v4(local)}
    firsts = {int(IPv4Address(local)) - rank for rank, local in known.items()}
    if len(firsts) != 1 or (len(known) == 1 and (len(set(remotes.values())) > 1 or not _is_v4(address))):
        return known
    first = firsts.pop()
    if len(known) == 1 and not first <= int(IPv4Address(address)) < first + world:  # the guess does not fit
        return known
    return {member: str(IPv4Address(first + member)) for member in range(world)}


def _is_v4(address: str) -> bool:
    try:
        return ip_address(address).version == 4
    except ValueError:
        return False
