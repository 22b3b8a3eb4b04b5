"""Hand-made observations of a roll call: healthy ones, and what a fault makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from allranks.model.card import Card, Facts, Interface, TestPorts
from allranks.model.pair import PairResult
from allranks.preflight.judge import Judgement, Observations, judge
from allranks.preflight.pairs import choose_pairs
from allranks.preflight.roster import RollCallTerms
from cards import make_card

PORTS = tuple(range(40001, 40009))
NO_ANSWER = "no answer in 1.6 s"
Pair = tuple[int, int]
Results = dict[Pair, PairResult]


def nic(index: int, *, mtu: int = 9000, is_up: bool = True, carrier: bool | None = True, **more: object) -> Interface:
    return Interface(
        "ens1f1",
        (f"192.168.20.{index + 1}",),
        is_up=is_up,
        networks=("192.168.20.0/24",),
        mtu=mtu,
        has_carrier=carrier,
        **more,
    )


def facts(index: int, **more: object) -> Facts:
    interfaces = (Interface("lo", ("127.0.0.1",), is_up=True, mtu=65536, kind="loopback"), nic(index))
    fields = {
        "host_name": f"node{index + 1:02d}",
        "interfaces": interfaces,
        "resolved": {f"node{index + 1:02d}": (f"192.168.20.{index + 1}",)},
        "port_range": (32768, 60999),
        "python_version": "3.11.2",
        "allranks_version": "0.1",
        "boot_id": f"boot-{index}",
        "kernel": "6.18",
        "clock_s": 1.7e9,
    }
    return Facts(**(fields | more))


def card(index: int, *, with_facts: dict[str, object] | None = None, **more: object) -> Card:
    fields = {
        "pid": 800 + index,
        "data_interface": "ens1f1",
        "data_address": f"192.168.20.{index % 250 + 1}",
        "test_ports": TestPorts(tcp=PORTS, udp=40009),
        "facts": facts(index, **(with_facts or {})),
    }
    return make_card(index + 1, **(fields | more))


def good(source: int, target: int, **more: object) -> PairResult:
    fields = {
        "num_open": 8,
        "store": "" if target == 0 else None,
        "large_s": 0.002,
        "large_sent": 49152,
        "large_back": 49152,
        "delivery_mbit_s": 900.0,
        "datagrams_sent": 40,
        "datagrams": {1500: True, 9000: True},
        "rtt_s": 1e-4,
        "clock_offset_s": 1e-5,
    }
    return PairResult(source=source, target=target, **(fields | more))


def mesh(num_nodes: int) -> Results:
    """What all pairs report where all is well; above 64 nodes the sparse set."""
    return {(a, b): good(a, b) for a, b in choose_pairs(num_nodes, seed=0)}


def change(results: Results, pairs: Iterable[Pair], **fields: object) -> None:
    for pair in pairs:
        if pair in results:
            results[pair] = msgspec.structs.replace(results[pair], **fields)


def silence(results: Results, pairs: Iterable[Pair]) -> None:
    """Nothing comes through."""
    for pair in pairs:
        store = NO_ANSWER if pair[1] == 0 else None
        change(
            results,
            [pair],
            num_open=0,
            closed=dict.fromkeys(PORTS, NO_ANSWER),
            store=store,
            large_s=None,
            large_sent=0,
            large_back=0,
            delivery_mbit_s=None,
            datagrams_lost=40,
            datagrams={1500: False, 9000: False},
            rtt_s=None,
            clock_offset_s=None,
        )


def stall(results: Results, pairs: Iterable[Pair], *, lost: tuple[int, ...] = (9000,)) -> None:
    """Small packets come through, large ones do not."""
    for pair in pairs:
        if pair in results:
            sizes = {size: size not in lost for size in results[pair].datagrams}
            change(
                results, [pair], large_s=None, large_back=0, unacked_bytes=49152, retransmits=3, datagrams=sizes,
                delivery_mbit_s=None,
            )  # fmt: skip


def around(node: int, num_nodes: int) -> list[Pair]:
    """All pairs of a node, both ways."""
    others = [other for other in range(num_nodes) if other != node]
    return [(node, other) for other in others] + [(other, node) for other in others]


def terms(num_nodes: int, **more: object) -> RollCallTerms:
    fields = {"job": "4711", "attempt": 0, "num_nodes": num_nodes, "min_nodes": num_nodes, "store_port": 29500}
    names = tuple(f"node{index + 1:02d}" for index in range(num_nodes))
    return RollCallTerms(**(fields | {"node_names": names} | more))


def judged(
    num_nodes: int,
    *faults: Callable[[Results], None],
    cards: dict[int, Card] | None = None,
    quiet: Iterable[PairResult] = (),
    ignored: frozenset[str] = frozenset(),
    **seen: object,
) -> Judgement:
    """What a roll call of healthy nodes comes to with these faults put into its results."""
    results = mesh(num_nodes)
    for fault in faults:
        fault(results)
    everybody = {index: card(index) for index in range(num_nodes)} | (cards or {})
    observations = Observations(cards=everybody, results=tuple(results.values()), quiet=tuple(quiet), **seen)
    return judge(observations, terms(num_nodes, ignored=ignored))


def brief(judgement: Judgement) -> list[tuple[str, str | None, str, str]]:
    """Cause, culprit, severity, confidence of each finding, in order."""
    return [
        (finding.cause_id, finding.node, str(finding.severity), str(finding.confidence))
        for finding in judgement.findings
    ]
