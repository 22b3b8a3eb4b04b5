"""Links behind token buckets: a burst passes at the speed of the machine, the rest at the rate of the link.

Pods and small cloud machines have such links. Whoever is tried more than others has its bucket empty more often.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from seen import good, mesh

from allranks.model.pair import PairResult
from allranks.preflight.look import RoundOfTests
from allranks.preflight.second_look import NUM_RATE_LOOKS, plan_quiet_look, plan_rate_look
from allranks.preflight.symptoms import slow_nodes

FREE_MBIT_S = 6460.0
"""What the machine carries while a bucket has tokens."""
STEP_S = 1e-4
PAUSE_S, LATE_S = 0.003, 0.008
"""Between two looks; and from the first node that begins to the last one."""
SEEDS = range(4)

CASES = """
nodes  suspect  links of Mbit/s, KiB   but    of Mbit/s, KiB   slow
    4        3            100    128     -                 -   -
    4        3            100     32     -                 -   -
    4        0            100    128     -                 -   -
    6        3            100    128     -                 -   -
    6        3            100   1024     -                 -   -
    8        1             50    256     -                 -   -
    4        2            300    256     -                 -   -
   12        5            100    512     -                 -   -
    6      3,4            100    128     -                 -   -
    6    1,3,5            100    128     -                 -   -
   12        7             50    128     -                 -   -
    6        3           1000    128     -                 -   -
    6        3           1000    128     3            100 16   3
    4        3           1000    128     3            100 16   3
    6        3           6460    128     3            100 64   3
    6      2,4           6460    128     4            100 64   4
   12        3           1000    128     5            100 16   -
"""
"""In the last one, the first look took a node for slow that is as fast as the others; nobody tries the slow one."""


@dataclass
class Bucket:
    """One direction of a node's link."""

    mbit_s: float
    burst: float
    tokens: float = 0.0
    """In bytes. The first look, in which all nodes try all others, has emptied the bucket."""

    def fill(self, time_s: float) -> None:
        self.tokens = min(self.burst, self.tokens + self.mbit_s * 1e6 / 8 * time_s)


@dataclass
class Flow:
    """A payload on its way, or its echo."""

    source: int
    target: int
    left: float
    began_s: float


class Links:
    """What a network does with the tests of a look: each node tries one node at a time, and all begin within LATE_S.

    With an even seed all begin at once.
    """

    def __init__(self, links: Sequence[tuple[float, float]], *, seed: int) -> None:
        self.random, self.late_s = random.Random(seed), LATE_S * (seed % 2)
        self.out = [Bucket(mbit, kib * 1024) for mbit, kib in links]
        self.into = [Bucket(mbit, kib * 1024) for mbit, kib in links]
        self.now_s = 0.0

    def carry(self, look: RoundOfTests) -> list[PairResult]:
        todo = {source: self._targets(look, source) for source, _ in look.pairs}
        found, flows, size = list[PairResult](), dict[int, tuple[Flow, bool]](), look.effort.large_bytes
        self._pass_time(PAUSE_S)
        begin_s = {source: self.now_s + self.random.uniform(0, self.late_s) for source in todo}
        while todo or flows:
            for source in [source for source in todo if source not in flows and begin_s[source] <= self.now_s]:
                target = next(todo[source], None)
                if target is None:
                    del todo[source]
                else:
                    flows[source] = Flow(source, target, size, self.now_s), False
            self._pass_time(STEP_S)
            self._move([flow for flow, _ in flows.values()])
            for source, (flow, is_echo) in list(flows.items()):
                if flow.left > 0:
                    continue
                if is_echo:
                    del flows[source]
                    continue
                rate = size * 8e-6 / (self.now_s - flow.began_s)
                found.append(good(source, flow.target, delivery_mbit_s=rate, large_sent=size))
                flows[source] = Flow(flow.target, source, size, self.now_s), True
        return found

    def _targets(self, look: RoundOfTests, source: int) -> Iterator[int]:
        """As preflight.mesh takes them: in a circle that begins behind the node."""
        targets = [target for own, target in look.pairs if own == source]
        return iter([t for t in targets if t > source] + [t for t in targets if t < source])

    def _pass_time(self, time_s: float) -> None:
        self.now_s += time_s
        for bucket in (*self.out, *self.into):
            bucket.fill(time_s)

    def _move(self, flows: Sequence[Flow]) -> None:
        """A step of all flows: those that share a link share its tokens."""
        shares = []
        for flow in flows:
            out, into = self.out[flow.source], self.into[flow.target]
            at_out = out.tokens / sum(other.source == flow.source for other in flows)
            at_into = into.tokens / sum(other.target == flow.target for other in flows)
            shares.append(min(flow.left, FREE_MBIT_S * 1e6 / 8 * STEP_S, at_out, at_into))
        for flow, share in zip(flows, shares, strict=True):
            flow.left -= share
            self.out[flow.source].tokens -= share
            self.into[flow.target].tokens -= share


def look_again(num_nodes: int, suspects: set[int], links: Sequence[tuple[float, float]], *, seed: int) -> set[int]:
    """Return who is called slow in the end, where the first look took some nodes for slow."""
    first = mesh(num_nodes)
    for pair in first:
        if suspects & {*pair}:
            first[pair] = good(*pair, delivery_mbit_s=56.0)
    network, quiet = Links(links, seed=seed), list[PairResult]()
    look = plan_quiet_look(list(first.values()))
    for _ in range(1 + NUM_RATE_LOOKS):
        quiet += network.carry(look) if look else []
        look = plan_rate_look(quiet)
    return {*slow_nodes(quiet)}


def numbers(word: str) -> set[int]:
    return {int(number) for number in word.split(",") if number != "-"}


@pytest.mark.parametrize("line", CASES.strip().splitlines()[1:])
def test_a_link_is_slow_if_it_is_slower_than_that_of_a_node_that_was_tried_as_often(line: str) -> None:
    num_nodes, suspects, mbit, kib, others, *other, slow = line.split()
    usual, unlike = (float(mbit), float(kib)), tuple(map(float, other)) if len(other) == 2 else ()
    links = [unlike if number in numbers(others) else usual for number in range(int(num_nodes))]
    found = [look_again(int(num_nodes), numbers(suspects), links, seed=seed) for seed in SEEDS]  # type: ignore[arg-type]
    assert found == [numbers(slow)] * len(SEEDS)
