"""What does one pair test show? Pure.

Only what the two kernels did is believed: they answer a SYN, acknowledge and retransmit whatever the processes are busy
with. A datagram that does not come back, or a payload that is not echoed, may be the fault of an agent that waits for a
core; so loss needs retransmissions beside it, and a stalled transfer bytes that the other kernel did not acknowledge.
Where UDP is closed altogether, as on many clouds, datagrams say nothing at all.

A port that stays silent, or that something refuses, is closed by the other side or on the way. Any other errno comes
from the tester's own kernel, which sent nothing: it says nothing of the other side (preflight.untried names it).
"""

from __future__ import annotations

import errno
import os
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from allranks.causes.cause import Symptom
from allranks.model.pair import SPARSE, PairResult

HEAVY_LOSS = 0.2
"""Share of lost datagrams from which closed ports and stalled transfers may follow by themselves; less is looked at
again, undisturbed."""
MIN_LOST_HEAVILY = 8
SLOW_FACTOR = 4.0
"""How much less than usual is slow: shared links and busy switches stay above."""
FAST_ENOUGH_MBIT_S = 1000.0
"""What so small a payload can measure: a faster link is never called slow (the card says its speed)."""
INITIAL_WINDOW = 10
"""Segments that a new connection sends before the first acknowledgement: RFC 6928."""
MIN_PAIRS = 2
_OF_THE_OTHER_SIDE = ("no answer", "refused", "connected, ")
"""How the reasons of preflight.mesh.dial begin that the other side, or something on the way, has caused."""
_UNREACHABLE = frozenset({"EHOSTUNREACH", "ENETUNREACH", "EHOSTDOWN", "ENETDOWN"})
"""The kernel has no way there: as good as silence where nothing else comes through either."""
_NAMES = {os.strerror(number): name for number, name in errno.errorcode.items()}


def symptom_of(result: PairResult, common_mtu: int | None) -> Symptom | None:
    """Return the most basic thing that is wrong with a pair.

    Args:
        result: of its test.
        common_mtu: the smaller MTU of the two ends; larger datagrams cannot come through.
    """
    if is_silent(result):
        return Symptom.SILENT
    if filtered_ports(result) and not result.num_open:
        return Symptom.FILTERED  # no loss closes every port
    if is_heavy_loss(result):
        return Symptom.LOSSY
    if filtered_ports(result):
        return Symptom.FILTERED
    if is_stalled(result, common_mtu):
        return Symptom.LARGE_LOST
    return None


def is_silent(result: PairResult) -> bool:
    """Whether nothing comes back at all, not even a refusal."""
    came = result.num_open or result.datagrams_lost < result.datagrams_sent or any(result.datagrams.values())
    return not came and bool(result.closed) and all(map(_is_silence, result.closed.values()))


def _is_silence(reason: str) -> bool:
    return reason.startswith("no answer") or own_errno(reason) in _UNREACHABLE


def own_errno(reason: str) -> str | None:
    """Return the errno with which the tester's own kernel gave up, by name; None for what the other side has caused.

    >>> own_errno("No route to host (EHOSTUNREACH)"), own_errno("refused"), own_errno("no answer in 1.6 s")
    ('EHOSTUNREACH', None, None)
    """
    if not reason or reason.startswith(_OF_THE_OTHER_SIDE):
        return None
    named = re.search(r"\((E[A-Z0-9]+)\)$", reason)
    return named[1] if named else _NAMES.get(reason, reason)


def is_untried(result: PairResult) -> bool:
    """Whether the tester's own kernel made no connection at all: nothing is known of the other side's ports."""
    reasons = result.closed.values()
    return not result.num_open and bool(reasons) and not is_silent(result) and all(map(own_errno, reasons))


def is_kept_closed(reason: str | None) -> bool:
    """Whether something on the way, or the other machine, keeps a port closed: it is silent, or it is refused."""
    return reason is not None and reason.startswith(("no answer", "refused"))


def filtered_ports(result: PairResult) -> dict[int, str]:
    """Test ports that something keeps closed: what connects was let through, answered or not."""
    return {port: why for port, why in result.closed.items() if is_kept_closed(why)}


def is_heavy_loss(result: PairResult) -> bool:
    """Whether so much is lost that closed ports and stalled transfers follow by themselves."""
    sent, lost = result.datagrams_sent, result.datagrams_lost
    is_much = bool(sent) and lost >= MIN_LOST_HEAVILY and HEAVY_LOSS <= lost / sent < 1
    return is_much and bool(result.retransmits or filtered_ports(result))


def is_stalled(result: PairResult, common_mtu: int | None = None) -> bool:
    """Whether a large payload does not come through that both ends could send."""
    if not result.large_sent or result.large_s is not None:
        return False
    return bool(result.unacked_bytes or result.retransmits or lost_sizes(result, common_mtu))


def lost_sizes(result: PairResult, common_mtu: int | None) -> list[int]:
    """Sizes of unfragmentable packets that are lost, although both ends can send them and small ones come back."""
    if result.datagrams_lost >= result.datagrams_sent:
        return []
    return [size for size, came in result.datagrams.items() if not came and size <= (common_mtu or size)]


def has_tried_large(result: PairResult) -> bool:
    """Whether a payload was sent that takes packets of the MTU's size."""
    return result.large_sent > SPARSE.large_bytes


def has_large_passed(result: PairResult) -> bool:
    """Whether an unfragmentable packet of every size that was tried came back."""
    return bool(result.datagrams) and all(result.datagrams.values())


def has_failed(result: PairResult) -> bool:
    """Whether something of TCP did not come through: a port, the leader's port, a large payload."""
    return bool(result.closed or result.store or (result.large_sent and result.large_s is None))


def is_proven(result: PairResult) -> bool:
    """Whether no busy machine explains what failed: a second try would only cost time."""
    if is_heavy_loss(result):
        return True
    reasons = (*result.closed.values(), result.store or "")
    if any(why.startswith("connected, ") or own_errno(why) for why in reasons):
        return False
    return bool(result.closed or result.store or is_stalled(result))


@dataclass(frozen=True, slots=True)
class Slow:
    """A node that carries much less than the others."""

    mbit_s: float
    """The best that came from it, or to it, whichever is less."""
    usual_mbit_s: float
    """What the middle one of the others' pairs carries."""


def slow_nodes(results: Iterable[PairResult]) -> dict[int, Slow]:
    """Return the nodes from which, or to which, nothing goes faster than a fraction of what is usual.

    The best of all pairs of a node counts, in each direction and of however many tries, so that one transfer that met a
    busy moment says nothing. Of a pair, the tries with the largest payload count. With fewer than MIN_PAIRS pairs in a
    direction nothing is concluded.
    """
    tries: dict[tuple[int, int], list[PairResult]] = defaultdict(list)
    for result in results:
        if result.delivery_mbit_s and not result.retransmits:  # TCP slows down by itself where segments are lost
            tries[result.source, result.target].append(result)
    for pair, tried in tries.items():
        largest = max(result.large_sent for result in tried)
        tries[pair] = [result for result in tried if result.large_sent == largest]
    rates = {pair: max(result.delivery_mbit_s or 0.0 for result in tried) for pair, tried in tries.items()}
    best: dict[tuple[int, bool], list[float]] = defaultdict(list)
    own: dict[int, list[float]] = defaultdict(list)
    for pair, rate in rates.items():
        own[pair[0]].append(rate)
        own[pair[1]].append(rate)
        at_least = max(rate, FAST_ENOUGH_MBIT_S) if _is_window_bound(rate, tries[pair]) else rate
        best[pair[0], True].append(at_least)
        best[pair[1], False].append(at_least)
    slow: dict[int, Slow] = {}
    ordered = sorted(rates.values())
    for node in own:
        known = [max(best[node, way]) for way in (True, False) if len(best[node, way]) >= MIN_PAIRS]
        if not known or len(own[node]) == len(ordered):
            continue
        usual = _median_without(ordered, own[node])
        if min(known) < min(usual / SLOW_FACTOR, FAST_ENOUGH_MBIT_S):
            slow[node] = Slow(min(known), usual)
    return slow


def _median_without(ordered: Sequence[float], left_out: Sequence[float]) -> float:
    """Median of sorted numbers without some of them: found among thousands of others, without a copy of them."""
    places: list[int] = []
    for number in sorted(left_out):
        places.append(bisect_left(ordered, number, lo=places[-1] + 1 if places else 0))

    def rest(index: int) -> float:
        for place in places:
            index += place <= index
        return ordered[index]

    size = len(ordered) - len(left_out)
    return (rest((size - 1) // 2) + rest(size // 2)) / 2


def _is_window_bound(mbit_s: float, tried: Sequence[PairResult]) -> bool:
    """Whether a connection so young goes no faster only because it waits for acknowledgements from far away.

    It sends at least ten segments for each round trip. Where half of them and more came through in the time of the
    shortest one, nothing held them up on the way.
    """
    rtt_s = min((result.rtt_s for result in tried if result.rtt_s), default=0.0)
    segment_bytes = max(result.segment_bytes for result in tried)
    return bool(segment_bytes) and mbit_s * 1e6 / 8 * rtt_s >= INITIAL_WINDOW / 2 * segment_bytes
