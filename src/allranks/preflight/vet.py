"""Which reports of other nodes are possible, and which are rejected? Pure.

A card and a report come from machines that may be broken, and from whoever knows the job's secret. What makes no sense
is not passed on: such a card becomes one that says so itself, so that the verdict names its node; such a report is
refused as a whole. What is passed on is bounded, and names in it can be printed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from ipaddress import ip_address

import msgspec

from allranks.model.card import Card, JobDirectory, TestPorts
from allranks.model.errors import Exit
from allranks.model.pair import PairResult
from allranks.model.safe_text import as_one_line
from allranks.wire.protocol import Tested

MAX_CARD_BYTES = 504 << 10
"""An honest card has some KiB, 64 at the most (model.card), and its interfaces, which may be hundreds. Names, version
and proof, sent beside it, fit into the rest of wire.connection.MAX_JOIN_BYTES."""
MAX_ENTRIES = 1024
"""Of one table of a card: variables, packages."""
MAX_WORKERS = 1 << 16
MAX_GPUS = 1 << 12
MAX_TEST_PORTS = 64
MAX_NAME = 253
"""Characters of a host name that are kept: RFC 1035."""
MAX_COUNT = 1 << 40
"""Of bytes, packets and ports that a report speaks of."""
MAX_SECONDS = 1e11
"""Clocks that were never set are 50 years off, 1.6e9 s."""
MAX_MBIT_S = 1e9
MAX_REASON = 1000


def vet_card(card: Card) -> Card:
    """Return the card with names that can be printed; one that makes no sense says so as its node's problem."""
    absurd = _absurdity(card)
    host = plain_name(card.host)
    if absurd is not None:
        return Card(
            host=host,
            pid=card.pid,
            node_index=card.node_index,
            num_workers=1,
            num_gpus=0,
            attempt=card.attempt,
            problem=f"the node report is invalid: {absurd}",
            problem_exit=Exit.SETUP,
        )
    exit_code = card.problem_exit if not card.problem or 0 < card.problem_exit < 256 else int(Exit.SETUP)
    interface = None if card.data_interface is None else plain_name(card.data_interface)
    if (host, exit_code, interface) == (card.host, card.problem_exit, card.data_interface):
        return card
    return msgspec.structs.replace(card, host=host, problem_exit=exit_code, data_interface=interface)


def plain_name(name: str) -> str:
    """Return a name of a host or an interface without what could be taken for something else: blanks, controls."""
    plain = "".join(c if c.isprintable() and c not in " ,[]|" else "?" for c in name[:MAX_NAME])
    return plain or "?"


def find_nonsense(report: Tested) -> str | None:
    """Return what cannot be in a report of pair tests, None where all of it can."""
    if report.run_dir is not None and not _is_plausible_place(report.run_dir):
        return "the run directory is not a path"
    for result in report.results:
        if not is_plausible(result):
            return f"its test result for node {result.target} is impossible"
    return None


def own_results(
    results: Iterable[PairResult], *, source: int, asked: Collection[tuple[int, int]]
) -> dict[tuple[int, int], PairResult]:
    """Return what a node says of the pairs that it was asked to try, the last word on each: nobody speaks for others.

    Args:
        source: the node that reports.
        asked: all pairs of this round.
    """
    return {
        (source, result.target): result
        for result in results
        if result.source == source and (source, result.target) in asked
    }


def is_plausible(result: PairResult) -> bool:
    """Whether this can have come out of a pair test."""
    counts = (
        result.num_open,
        result.large_sent,
        result.large_back,
        result.retransmits,
        result.unacked_bytes,
        result.datagrams_sent,
        result.datagrams_lost,
    )
    texts = [*result.closed.values(), result.store or "", result.problem or ""]
    return (
        all(0 <= count <= MAX_COUNT for count in counts)
        and result.datagrams_lost <= result.datagrams_sent
        and len(result.closed) <= MAX_TEST_PORTS
        and all(map(_is_port, result.closed))
        and len(result.datagrams) <= MAX_TEST_PORTS
        and all(map(_is_port, result.datagrams))
        and all(len(text) <= MAX_REASON for text in texts)
        and all(_is_time(time_s) and time_s >= 0 for time_s in (result.large_s, result.rtt_s) if time_s is not None)
        and (result.delivery_mbit_s is None or 0 <= result.delivery_mbit_s <= MAX_MBIT_S)
        and (result.clock_offset_s is None or _is_time(result.clock_offset_s))
    )


def _absurdity(card: Card) -> str | None:
    size_bytes = len(msgspec.msgpack.encode(card))
    if size_bytes > MAX_CARD_BYTES:
        return f"it has {size_bytes} bytes, more than {MAX_CARD_BYTES}"
    for what, number, most in (
        ("workers", card.num_workers, MAX_WORKERS),
        ("GPUs", card.num_gpus, MAX_GPUS),
        ("GPUs from the scheduler", card.num_promised_gpus or 0, MAX_GPUS),
    ):
        if not 0 <= number <= most:
            return f"{number} {what}"
    if card.data_address is not None and not _is_address(card.data_address):
        return f"{as_one_line(card.data_address, at_most=60)!r} is not an IP address"
    if card.test_ports is not None and not _are_ports(card.test_ports):
        return "its test ports are not port numbers"
    facts = card.facts
    if facts is not None:
        beside = facts.code.beside if facts.code and facts.code.beside else {}
        tables = (facts.environment, facts.packages, facts.resolved, facts.limits, facts.unread, beside)
        longest = max(len(table) for table in tables)
        if longest > MAX_ENTRIES:
            return f"a table of {longest} entries"
    return None


def _are_ports(ports: TestPorts) -> bool:
    return 0 < len(ports.tcp) <= MAX_TEST_PORTS and all(map(_is_port, (*ports.tcp, ports.udp)))


def _is_port(port: int) -> bool:
    """Also whether a number can be the size of an IP packet: both have 16 bits."""
    return 0 < port < 1 << 16


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _is_time(time_s: float) -> bool:
    return math.isfinite(time_s) and abs(time_s) <= MAX_SECONDS


def _is_plausible_place(place: JobDirectory) -> bool:
    texts = (place.path, place.problem or "", place.nonce or "")
    return place.purpose == "run directory" and all(len(text) <= 1 << 13 for text in texts)
