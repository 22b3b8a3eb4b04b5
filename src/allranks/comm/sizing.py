"""How large should DDP's buckets be on this network? Pure, and standard library only: it is also loaded by path.

    size = choose_bucket_size([4 << 20] * 3, ranks=6, link_mbit_s=500)
    DistributedDataParallel(module, bucket_cap_mb=size.mb)      # None: torch's own, 1 MiB and then 25 MiB

Buckets go over the network one after the other, none before its gradients are ready. Large ones begin late, and a ring
beside which no other one is under way leaves gaps; but each one costs its setup and its hops. Gloo gives each
all-reduce one interface in turn, so with several interfaces the busiest one decides. The size is the one with which the
last all-reduce ends first; of sizes that are as good, the largest, since a busy machine makes each all-reduce dearer.

The size decides which gradients are summed together, and so the last bits of the sums: whoever resumes keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

LINK_VARIABLE = "ALLRANKS_LINK_MBIT"
"""What one data interface carries one way, in 1e6 bits a second; `allranks run` gives it to the workers."""
INTERFACES_VARIABLE = "GLOO_SOCKET_IFNAME"
SIZES_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0)
"""In MiB, as DDP counts `bucket_cap_mb`. Under torch.compile, DDP refuses less than its first bucket's 1 MiB."""
TORCH_MB = (1.0, 25.0)
"""Torch's own: dist._DEFAULT_FIRST_BUCKET_BYTES, then `bucket_cap_mb`."""
LEAST_MBIT_S = 1e-3
"""Less is no speed of a network."""
FAST_MBIT_S = 5000.0
"""From here on the processors decide about the speed of Gloo, not the link: torch's sizes stay."""
SETUP_S, HOP_S = 3e-4, 1e-4
"""Of one all-reduce of Gloo, and of each of its 2 (n - 1) hops, on cores that are free."""
ALONE = 0.15
"""What a byte takes longer in an all-reduce beside which no other one is under way. Six nodes at 100 Mbit/s: one
all-reduce of 12 MB took 0.18 longer than its bytes, 13 of 1 MB, two at a time, 0.05 (docs/evidence/benchmarks.md)."""
AS_GOOD = 1.02
"""Sizes whose end is not later than this factor of the earliest."""
SENT = {None: 1.0, "bf16": 0.5, "int8": 0.254}
"""Bytes on the wire of a byte of gradients, by wire format (comm.hooks)."""
_MIB = 1 << 20


class BucketSize(NamedTuple):
    """A size and why."""

    mb: float | None
    """MiB, for `bucket_cap_mb`; None: torch's own sizes."""
    reason: str
    """`13.1 MB of gradients take 0.35 s at 500 Mbit/s, and ...`: follows a colon."""


def choose_bucket_size(
    gradients: int | Sequence[int],
    *,
    ranks: int,
    link_mbit_s: float | None,
    interfaces: int = 1,
    backward_s: float | None = None,
    backend: str = "gloo",
    compress: str | None = None,
) -> BucketSize:
    """Return the size of DDP's buckets with which a step ends first.

    Args:
        gradients: bytes of each parameter's gradient, in the order in which the backward pass makes them (the last
            parameter first), or of all of them together.
        ranks: world size.
        link_mbit_s: what one data interface carries one way; None: not known.
        interfaces: data interfaces that Gloo uses in turn.
        backward_s: seconds of a backward pass; None: not known, then half of what the gradients take on the wire.
        backend: gloo or nccl.
        compress: wire format of the gradients; None: as they are.
    """
    parts = [gradients / 64] * 64 if isinstance(gradients, int) else [float(part) for part in gradients]
    total = sum(parts)
    if ranks < 2 or not total:
        return BucketSize(None, "there is nothing to send")
    if backend != "gloo":
        return BucketSize(None, f"{backend} sends several buckets at a time")
    if compress not in SENT:
        return BucketSize(None, f"{compress} needs few, large buckets")
    if link_mbit_s is None or not link_mbit_s >= LEAST_MBIT_S:  # nan is not
        return BucketSize(None, "the speed of the network is unknown; allranks bench measures it")
    times = "" if interfaces == 1 else f"{interfaces} x "
    link = f"{times}{link_mbit_s:.4g} Mbit/s"
    if link_mbit_s >= FAST_MBIT_S:
        return BucketSize(None, f"at {link}, torch's sizes are as fast")
    wire_s = SENT[compress] * 2 * (ranks - 1) / ranks * 8e-6 / link_mbit_s  # of a byte
    cost_s = SETUP_S + HOP_S * 2 * (ranks - 1)
    sent_s = total * wire_s / interfaces
    backward = sent_s / 2 if backward_s is None else backward_s

    def end_s(*limits_mb: float) -> float:
        free_s, ready, buckets = [0.0] * interfaces, 0.0, split(parts, *(mb * _MIB for mb in limits_mb))
        for number, size in enumerate(buckets):
            ready += size
            begins_s = max(free_s[number % interfaces], backward * ready / total)
            free_s[number % interfaces] = begins_s + size * wire_s + cost_s
        return max(free_s) + ALONE * wire_s * max(0.0, 2 * max(buckets) - total)

    ends_s = {mb: end_s(mb) for mb in SIZES_MB}
    best_s, torch_s = min(ends_s.values()), end_s(*TORCH_MB)
    what = f"{total / 1e6:.3g} MB of gradients take {sent_s:.3g} s at {link}"
    if torch_s <= best_s * AS_GOOD:
        return BucketSize(None, f"{what}, and other sizes are not faster")
    mb = max(mb for mb, ends in ends_s.items() if ends <= best_s * AS_GOOD)
    torchs = f"torch's buckets ({TORCH_MB[0]:g} MiB, then {TORCH_MB[1]:g} MiB)"
    return BucketSize(mb, f"{what}, and with {torchs} the network would start later")


def choose_by_environment(
    env: Mapping[str, str],
    gradients: int | Sequence[int],
    *,
    ranks: int,
    backend: str,
    compress: str | None = None,
) -> BucketSize:
    """Return the size by what `allranks run` has put into a worker's environment; arguments as above.

    The environments of two ranks may differ, so one rank chooses for all.
    """
    told = env.get(LINK_VARIABLE, "")
    try:
        link_mbit_s = float(told) if told else None
    except ValueError:
        link_mbit_s = 0.0
    if link_mbit_s is not None and not link_mbit_s >= LEAST_MBIT_S:
        return BucketSize(None, f"{LINK_VARIABLE} is {told!r}: expected Mbit/s, for example 940")
    return choose_bucket_size(
        gradients,
        ranks=ranks,
        link_mbit_s=link_mbit_s,
        interfaces=len([name for name in env.get(INTERFACES_VARIABLE, "").split(",") if name]) or 1,
        backend=backend,
        compress=compress,
    )


def split(parts: Sequence[float], *limits: float) -> list[float]:
    """Return the bytes of DDP's buckets: one ends with the gradient that fills it; the last limit holds for the rest.

    >>> split([3, 3, 3, 3, 3], 2, 5)
    [3, 6, 6]

    Source: compute_bucket_assignment_by_size in torch/csrc/distributed/c10d/reducer.cpp.
    """
    buckets, filled = list[float](), 0.0
    for part in parts:
        filled += part
        if filled >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(filled)
            filled = 0.0
    return [*buckets, filled] if filled else buckets
