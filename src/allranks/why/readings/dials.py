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
from allranks.why.logs.log_events import LogEvent
from allranks.why.readings.progress import find_last_steps

MAX_WORLD = 4096
"""Maximum number of ranks in a Gloo group: pairs are counted."""
_Pairs = set[frozenset[int]]
_Told = tuple[str, list[int], str, str, Confidence]
"""A cause, its culprits, the message, the address that is at fault, and how sure that is."""


def read_dials(reader: FactReader) -> Iterator[Fact]:
    """Return the culprits of failed connections."""
    reports: dict[int, LogEvent] = {}  # of each rank the first
    steps = find_last_steps(reader.logs) if any(reader.logs.of("dial")) else {}
    for event in reader.logs.of("dial"):
        rank = event.number("dialler")
        if rank is not None and event.line.number > steps.get(event.line.source.shown, 0):  # else it connected later
            reports.setdefault(rank, event)
    world = max((max(event.number("world") or 0, rank + 1) for rank, event in reports.items()), default=0)
    if not 2 <= world <= MAX_WORLD:
        return
    remotes = {rank: event.values["remote"] for rank, event in reports.items()}
    address = Counter(remotes.values()).most_common(1)[0][0]
    plan = _plan({rank: event.values["local"] for rank, event in reports.items()}, remotes, address, world)
    owners = {own: rank for rank, own in plan.items()}
    silent = [rank for rank in range(world) if rank not in reports]
    if address in owners:
        failed = {frozenset((rank, owners[remote])) for rank, remote in remotes.items() if remote in owners}
        # Who failed with another message may have come to any of its connections.
        unknown = {event.line.rank for event in reader.logs.of("exception")} | reports.keys()
        ends = {rank: owners.get(remotes.get(rank, ""), 0 if rank in unknown else world) for rank in plan}
        errors = (event.values["error"].strip() for event in reports.values() if "error" in event.values)
        told = _judge(failed, _passed(plan, ends), plan, (sorted(reports), silent), next(errors, "no answer"))
    elif len(silent) == 1:
        message = f"{fold_ranks(silent)} announced {address}, which {fold_ranks(reports)} cannot reach"
        told = "wrong-nic", silent, message, address, Confidence.LIKELY
    else:
        return
    cause, ranks, message, at_fault, confidence = told
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
    failed: _Pairs, passed: _Pairs, plan: Mapping[int, str], parts: tuple[list[int], list[int]], error: str
) -> _Told:
    """Blame the one rank in all failed and no passed connections; else the parts that cannot reach each other."""
    at_all = sorted(frozenset.intersection(*failed))
    culprits = [rank for rank in at_all if not any(rank in pair for pair in passed)]
    others = {rank for pair in failed for rank in pair}
    if len(culprits) == 1:
        cause = "link-down" if "No route to host" in error or "unreachable" in error else "firewall-port"
        message = f"{fold_ranks(others - {*culprits})} and {fold_ranks(culprits)} do not reach each other: {error}"
        return cause, culprits, message, plan[culprits[0]], Confidence.LIKELY
    if len(failed) == 1:
        beside = "no other pair shows which of them is at fault" if culprits else "both reach others"
        message = f"{fold_ranks(at_all)} do not reach each other: {error}; {beside}"
        return "partition", at_all, message, "", Confidence.UNDECIDED if culprits else Confidence.LIKELY
    dialers, silent = parts
    message = f"{fold_ranks(dialers)} do not reach {fold_ranks(others - {*dialers})}: {error}; "
    message += f"the network is partitioned between {fold_ranks(silent)} and {fold_ranks(dialers)}"
    return "partition", dialers, message, "", Confidence.LIKELY


def _passed(plan: Mapping[int, str], ends: Mapping[int, int]) -> _Pairs:
    """Return the pairs that were connected: a rank connects in the order of ranks up to its end, the first failure."""
    numbers = {rank: IPv4Address(own) for rank, own in plan.items()}
    return {
        frozenset((rank, peer)) for rank in plan for peer in plan if peer < ends[rank] and numbers[rank] > numbers[peer]
    }


def _plan(own: Mapping[int, str], remotes: Mapping[int, str], address: str, world: int) -> dict[int, str]:
    """Return the address of each rank: from the reports, and if these increase with the rank, of the others, too."""
    # On docker0, all nodes have the same address.
    known = {rank: local for rank, local in own.items() if local != address and _is_v4(local)}
    firsts = {int(IPv4Address(local)) - rank for rank, local in known.items()}
    first = min(firsts, default=-1)
    if len(firsts) != 1 or not 0 <= first <= (1 << 32) - world:
        return known
    guess = {member: str(IPv4Address(first + member)) for member in range(world)}
    return guess if len(known) > 1 or {*remotes.values()} <= {*guess.values()} else known


def _is_v4(address: str) -> bool:
    try:
        return ip_address(address).version == 4
    except ValueError:
        return False
