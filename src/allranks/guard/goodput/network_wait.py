"""How much of the time is spent waiting for the network, and which interface is the reason? Pure; on the leader.

`wait` and `transfer` of the ledger tell how long a rank waits in collectives. A rank that is late makes the others wait
just as a slow network does, but itself it waits only for the transfer. So the network costs the share of the rank that
waits least, and it is said only where an interface is busy: it carries nearly what it can in at least half of that
time. Neither is true where ranks are slow by themselves, and one of them alone is not enough: small messages over a
long way wait, and keep no interface busy.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping

from allranks.guard.goodput.lately import Lately
from allranks.guard.scene import NodeView
from allranks.model.beat import InterfaceSeen
from allranks.model.traffic import MAX_NODES, NodeTraffic, Traffic
from allranks.report.traffic import use_text

MIN_SHARE = 0.3
"""Of the time, that is spent waiting for the network; less is not worth a line."""
BUSY_PART = 0.5
"""Of that time an interface is busy, at least."""
CHANGE = 0.2
"""Of the time: the line comes again after so large a change."""
SETTLED_S = 6.0
"""For so long it must hold: three looks of an agent."""
AGAIN_S = 60.0
"""The end of a job repeats no line that is younger."""
LOOK_EVERY_S, LOOK_FOR_NODE_S = 2.0, 1e-3
"""Between two looks, with thousands of nodes more."""
FIX = "allranks advise"


def see_traffic(nodes: Collection[NodeView], lately: Lately) -> Traffic | None:
    """Return what the nodes tell of their network, and how long ranks wait; None: nothing is known."""
    told = [(node, node.beat) for node in nodes if node.beat is not None]
    shares = lately.wait_shares
    found = {node.index: _see_node(node, shares) for node, _ in told}
    busiest = sorted(
        (index for index, node in found.items() if node.interfaces or node.segments),
        key=lambda index: (-_busy_share(found[index]), -found[index].retransmits, index),
    )[:MAX_NODES]
    if lately.steps is None and not busiest:
        return None
    return Traffic(
        iteration=lately.steps,
        step_s=None if lately.step_s is None else round(lately.step_s, 6),
        wait_share=round(statistics.median(shares.values()), 3) if shares else None,
        least_wait_share=round(min(shares.values()), 3) if shares else None,
        num_nodes=len(nodes),
        nodes=tuple(found[index] for index in sorted(busiest)),
    )


def _see_node(node: NodeView, shares: Mapping[int, float]) -> NodeTraffic:
    assert node.beat is not None
    ranks = node.beat.ranks
    known = [shares[rank.rank] for rank in ranks if rank.rank in shares]
    return NodeTraffic(
        node=node.name,
        interfaces=node.beat.interfaces,
        wait_share=round(min(known), 3) if known else None,
        segments=sum(rank.segments for rank in ranks),
        retransmits=sum(rank.retransmits for rank in ranks),
    )


def _busy_share(node: NodeTraffic) -> float:
    return max((interface.busy_share for interface in node.interfaces), default=0.0)


def find_reason(traffic: Traffic | None) -> tuple[float, NodeTraffic, InterfaceSeen] | None:
    """Return the share of the time that goes into waiting, and the busiest interface; None: no line is due."""
    share = traffic.least_wait_share if traffic is not None else None
    if traffic is None or share is None or share < MIN_SHARE:
        return None
    busy = [
        (carrier.busy_share, node, carrier)
        for node in traffic.nodes
        for carrier in node.interfaces
        if carrier.limit_mbit_s and carrier.busy_share >= BUSY_PART * share
    ]
    if not busy:
        return None
    _, node, interface = max(busy, key=lambda entry: entry[0])
    return share, node, interface


class NetworkSpeech:
    """What was said of the network, over all generations of a job."""

    def __init__(self) -> None:
        self._next_look_s = self._looked_s = self._said_s = 0.0
        self._since_s: float | None = None
        self._said: float | None = None
        self._newest: tuple[float, str] | None = None
        """The share and the interface as the last look found them; None: the network is not the reason."""

    def say(self, now_s: float, nodes: Collection[NodeView], lately: Callable[[], Lately]) -> list[str]:
        """Return the line to say now: once, and again after a large change.

        Args:
            now_s: of any clock.
            lately: how long ranks wait; asked for when it is needed.
        """
        if now_s < self._next_look_s:
            return []
        self._looked_s = now_s
        self._next_look_s = now_s + max(LOOK_EVERY_S, LOOK_FOR_NODE_S * len(nodes))
        reason = find_reason(see_traffic(nodes, lately()))
        if reason is None:
            self._since_s = self._newest = None
            return []
        share, node, interface = reason
        self._newest = share, f"{node.node} {interface.name} at {use_text(interface)}"
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s < self._since_s + SETTLED_S or (self._said is not None and abs(share - self._said) < CHANGE):
            return []
        self._said, self._said_s = share, now_s
        return [f"{100 * share:.0f} % of the time is spent waiting for the network ({self._newest[1]}): {FIX}"]

    def last_words(self) -> Iterable[str]:
        """Return the line for the end of a job, if it was said and held to the end."""
        if self._said is not None and self._newest is not None and self._looked_s >= self._said_s + AGAIN_S:
            share, where = self._newest
            yield f"{100 * share:.0f} % of the time was spent waiting for the network ({where}): {FIX}"
