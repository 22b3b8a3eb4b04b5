"""How long will a training step take with each way to reduce gradients, and which way gains most? Pure.

    advice = advise(table, StepProfile(tensor_bytes=(4 << 20,) * 3, forward_s=0.05, backward_s=0.1))

In the model, collectives go over the network one after the other, in the order in which their data is ready. Gradients
become ready evenly over the backward pass, the last parameter's first. The forward pass hides nothing. A collective
takes what the table has for its size: eight in flight if another one is ready before it ends, else one alone.
Compression adds the collectives of comm/hooks.py, and the code between them, which only its own bucket waits for; but
the code before the first one is part of the backward pass:

    bf16       pack; one all-reduce of half the bytes; unpack
    int8       pack; all-to-all of a quarter; take the mean, pack; all-gather of a quarter; unpack
    powersgd   all code, and two small all-reduces (P, Q) or three (what has no matrix form), in one thread, bucket by
               bucket: as the table has it whole, with the all-reduces of another number of ranks in their place

Methods are ranked by time to equal loss: the gain in time per sample, divided by the samples that a method needs more
(comm/methods.py). What changes the result is offered only under the conditions there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from allranks.comm import methods
from allranks.comm.bench_table import BenchTable, bus_factor
from allranks.comm.curves import NetworkCurves
from allranks.comm.methods import Method
from allranks.comm.sizing import SENT, TORCH_MB, BucketSize, choose_bucket_size, split

MIB = 1 << 20
AMONG = 8
"""All-reduces in flight while buckets wait for each other."""
NO_GAIN = 1.02
"""A gain that no measurement would confirm."""
LOW_RANK = 1 / 44
"""What PowerSGD sends of a byte of gradients, where nobody told the shapes: of a model of 13 MB, with rank 4."""
CODE_S: Mapping[str, float] = {"bf16": 0.1e-9, "int8": 0.4e-9, "powersgd": 1e-9}
"""Seconds of one core for each byte of gradients that a format packs and unpacks, with Gloo (torch 2.13, x86-64); on a
GPU, nothing. For tables that do not have it."""
MAX_NUMBERS = 8
"""Columns of numbers of nodes that fit into a terminal."""
NOISE_FACTORS = (2, 4, 8, 16)
"""Micro-batches a step that are tried where the noise scale is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One step of one rank, without the network."""

    tensor_bytes: tuple[int, ...]
    """Of each gradient, in the order in which the backward pass makes them."""
    forward_s: float
    backward_s: float
    other_s: float = 0.0
    """Optimizer, reading data, and what else waits for the gradients."""
    element_bytes: int = 4
    low_rank_bytes: int | None = None
    """What PowerSGD sends; None: estimated."""
    has_vectors: bool = True
    """Some gradients have no matrix form; PowerSGD sends them as they are, in an all-reduce of their own."""
    bucket_bytes: tuple[int, ...] = ()
    """Of DDP's buckets as they are now; empty: torch's own sizes."""

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients."""
        return sum(self.tensor_bytes)

    @property
    def compute_s(self) -> float:
        """Of a step that sends nothing."""
        return self.forward_s + self.backward_s + self.other_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one method would do."""

    method: Method
    step_s: float
    """Of as many samples as a step has now; of several micro-batches or local steps, the mean."""
    sent_bytes: float
    """Of each rank in such a step."""
    gain: float = 1.0
    """Times as fast as now."""
    to_equal_loss: float = 1.0
    """The same in time to the loss that plain DDP reaches."""
    buckets: BucketSize | None = None
    """Where the method chooses a size."""
    refusal: str | None = None
    """Why it is not offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnNodes:
    """Step times of all methods with one number of nodes."""

    nodes: int
    ranks: int
    is_scaled: bool
    """The table is of another number."""
    steps_s: Mapping[str, float]
    """By name of the method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What is predicted for one script on one network."""

    step: StepProfile
    now: Prediction
    compute: Prediction
    offered: tuple[Prediction, ...]
    """Best first."""
    refused: tuple[Prediction, ...]
    by_nodes: tuple[OnNodes, ...]


def advise(
    table: BenchTable,
    step: StepProfile,
    *,
    max_nodes: int | None = None,
    steps_left: int | None = None,
    noise_scale: float | None = None,
) -> Advice:
    """Predict a step with all methods, and rank them.

    Args:
        max_nodes: largest number of nodes of a prediction; None: as many as measured.
        steps_left: steps that the run still has; None: not known.
        noise_scale: gradient noise scale, as a multiple of the whole batch; None: not known.
    Raises:
        ValueError: the table has no all-reduces between ranks.
    """
    measured, num_nodes = NetworkCurves.of(table), max(1, len(table.nodes))
    per_node = table.ranks / num_nodes
    model = Model(step, measured, table)
    now, plain = model.predict(methods.TORCH, as_now=True), model.predict(methods.EQUAL)
    found = []
    for one in map(model.predict, _methods(model, noise_scale, steps_left)):
        gain, over_plain = now.step_s / one.step_s, plain.step_s / one.step_s / one.method.samples
        one = replace(one, gain=gain, to_equal_loss=gain / one.method.samples)
        found.append(replace(one, refusal=_refuse(one, over_plain, steps_left)))
    found.sort(key=lambda one: -one.to_equal_loss)
    by_nodes = []
    for nodes in _numbers(num_nodes, max_nodes or num_nodes):
        ranks = round(per_node * nodes)
        if nodes == 1 < num_nodes and ranks > 1:  # nobody measured inside a node
            continue
        there = Model(step, measured.among(ranks), table)
        steps_s = {"now": there.predict(methods.TORCH, as_now=True).step_s}
        steps_s |= {one.method.name: there.predict(one.method).step_s for one in found}
        by_nodes.append(OnNodes(nodes=nodes, ranks=ranks, is_scaled=nodes != num_nodes and ranks > 1, steps_s=steps_s))
    return Advice(
        step=step,
        now=now,
        compute=model.predict(methods.COMPUTE),
        offered=tuple(one for one in found if one.refusal is None),
        refused=tuple(one for one in found if one.refusal is not None),
        by_nodes=tuple(by_nodes),
    )


def _numbers(measured: int, largest: int) -> list[int]:
    """Return the numbers of nodes that are shown: all up to MAX_NUMBERS, else powers of two."""
    if largest <= MAX_NUMBERS:
        return list(range(1, largest + 1))
    doubled = {1 << power for power in range(largest.bit_length()) if 1 << power <= largest}
    return sorted(doubled | {largest} | ({measured} if measured < largest else set()))


def _methods(model: Model, noise_scale: float | None, steps_left: int | None) -> Iterator[Method]:
    plain_steps = "STEPS / 10" if steps_left is None else f"{methods.WARM_UP * steps_left:.0f}"
    for method in methods.METHODS:
        if method is methods.ACCUMULATE and noise_scale is not None:
            tried = (methods.accumulate(every, noise_scale) for every in NOISE_FACTORS)
            yield min(tried, key=lambda one: model.predict(one).step_s * one.samples)
        elif method.has_warm_up:
            yield replace(method, line=method.line.format(plain_steps=plain_steps))
        elif method is not methods.BF16 or model.step.element_bytes > 2:
            yield method


def _refuse(one: Prediction, over_plain: float, steps_left: int | None) -> str | None:
    """Return why a method is not offered; None if it is."""
    method = one.method
    if method is methods.ACCUMULATE:
        return "only the gradient noise scale tells whether a larger batch pays: give --noise-scale"
    if method.is_local:
        if over_plain < methods.MIN_GAIN:
            return f"it changes the result, and gains {over_plain:.1f} x to equal loss over plain DDP, not 2 x"
        needed = round(methods.MIN_SYNCHRONIZATIONS * method.every / (1 - methods.WARM_UP * method.has_warm_up))
        if steps_left is None:
            return f"it changes the result, and pays only if at least {needed} steps are left: give --steps"
        if steps_left < needed:
            return f"it changes the result, and pays only if at least {needed} steps are left, not {steps_left}"
    if one.to_equal_loss < NO_GAIN and one.gain >= NO_GAIN:
        needs = f"{method.samples:.1f} x the samples to equal loss"
        return f"its steps are {one.gain:.1f} x as fast, but it needs {needs}"
    return None if one.to_equal_loss >= NO_GAIN else "it gains nothing here"


@dataclass(frozen=True, slots=True)
class Model:
    """One step on one network."""

    step: StepProfile
    network: NetworkCurves
    table: BenchTable

    def predict(self, method: Method, *, as_now: bool = False) -> Prediction:
        """Return time and bytes of one method.

        Args:
            as_now: with the buckets that the script has now.
        """
        step, ranks = self.step, self.network.ranks
        compute_s, sent_bytes = step.compute_s, bus_factor("all_reduce", ranks) * step.gradient_bytes
        if method is methods.COMPUTE or ranks == 1:
            return Prediction(method=method, step_s=compute_s, sent_bytes=0.0)
        if method.is_local:
            step_s = compute_s + self.network.time_s("all_reduce", step.gradient_bytes) / method.every
            sent_bytes /= method.every
            if method.has_warm_up:
                warm = self.predict(methods.BF16)
                step_s += methods.WARM_UP * (warm.step_s - step_s)
                sent_bytes += methods.WARM_UP * (warm.sent_bytes - sent_bytes)
            return Prediction(method=method, step_s=step_s, sent_bytes=sent_bytes)
        limits, chosen = self._limits(method)
        buckets = split(step.tensor_bytes, *(mb * MIB for mb in limits))
        if as_now and step.bucket_bytes:
            buckets = [float(size) for size in step.bucket_bytes]
        step_s = step.forward_s + end_s(buckets, step.backward_s, partial(self._way, method)) + step.other_s
        step_s = (step_s + (method.every - 1) * compute_s) / method.every
        sent_bytes *= self._share(method) / method.every
        return Prediction(method=method, step_s=step_s, sent_bytes=sent_bytes, buckets=chosen)

    def _limits(self, method: Method) -> tuple[tuple[float, ...], BucketSize | None]:
        """Return the sizes of buckets, and why, where allranks chooses them."""
        if method is methods.TORCH or method.bucket_mb is not None:
            return (method.bucket_mb,) if method.bucket_mb else TORCH_MB, None
        chosen = choose_bucket_size(
            self.step.tensor_bytes,
            ranks=self.network.ranks,
            link_mbit_s=self.table.slowest_mbit_s() or self.network.link_mbit_s,
            interfaces=max((len(names) for names in self.table.interfaces.values()), default=1) or 1,
            backend=self.table.backend,
            compress=method.wire or None,
        )
        return (chosen.mb,) if chosen.mb else TORCH_MB, chosen

    def _share(self, method: Method) -> float:
        """Return the bytes on the wire of one byte of gradients."""
        if method.wire == "powersgd":
            total = self.step.gradient_bytes
            return (self.step.low_rank_bytes or LOW_RANK * total) / total
        return SENT[method.wire] * 4 / self.step.element_bytes if method.wire else 1.0

    def _way(self, method: Method, size: float) -> BucketTimes:
        """Return what becomes of a bucket of this many bytes of gradients."""
        sent, time_s = self._share(method) * size, self.network.time_s

        def leg(collective: str) -> tuple[float, float]:
            return time_s(collective, sent), time_s(collective, sent, in_flight=AMONG)

        code_s = 0.0
        if method.wire and self.table.backend == "gloo":
            code_s = self.network.code_s(method.wire, size, sent) or size * CODE_S[method.wire]
        if method.wire == "int8":
            legs = [leg("all_to_all"), leg("all_gather")]
            return BucketTimes(legs, pack_s=code_s / 2, between_s=code_s / 4, unpack_s=code_s / 4)
        if method.wire == "powersgd":
            vectors_s = time_s("all_reduce", 0) if self.step.has_vectors else 0.0  # of no elements, it takes no time
            sum_s = code_s + vectors_s + self.network.factors_s(sent)
            return BucketTimes([(sum_s, sum_s)])
        return BucketTimes([leg("all_reduce")], pack_s=code_s / 2, unpack_s=code_s / 2)


class BucketTimes(NamedTuple):
    """What becomes of one bucket."""

    legs: Sequence[tuple[float, float]]
    """Seconds of each of its collectives: alone, and while others are under way."""
    pack_s: float = 0.0
    """Code in the thread of the backward pass."""
    between_s: float = 0.0
    """Code between two collectives, in a thread of its own."""
    unpack_s: float = 0.0


def end_s(buckets: Sequence[float], backward_s: float, way: Callable[[float], BucketTimes]) -> float:
    """Return when the last bucket has been reduced, in seconds after the begin of the backward pass.

    >>> end_s([1, 3], 4.0, lambda size: BucketTimes([(size * 2, size)]))
    10.0

    Args:
        buckets: bytes, in the order in which they become ready.
        backward_s: seconds of the backward pass.
        way: of a bucket, by its bytes.
    """
    ways, total = [way(size) for size in buckets], sum(buckets)
    packed_s = accumulate(own.pack_s for own in ways)
    ready_s = [backward_s * size / total + code_s for size, code_s in zip(accumulate(buckets), packed_s, strict=True)]
    waiting = [(at_s, number, 0) for number, at_s in enumerate(ready_s)]  # a heap, since it is sorted
    last_s, free_s = ready_s[-1], 0.0
    while waiting:
        at_s, number, place = heappop(waiting)
        alone_s, among_s = ways[number].legs[place]
        begin_s = max(at_s, free_s)
        free_s = begin_s + alone_s
        if waiting and waiting[0][0] < free_s:
            free_s = begin_s + among_s
        if place + 1 < len(ways[number].legs):
            heappush(waiting, (free_s + ways[number].between_s, number, place + 1))
        else:
            last_s = max(last_s, free_s + ways[number].unpack_s)
    return last_s
