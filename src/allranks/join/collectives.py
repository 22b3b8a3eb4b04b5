"""How long do collectives take in a process group, as its slowest rank sees it?

join/trial.py forms the group and loads this file by path, with the cases that one entry of its order lists:

    {"cases": [{"collective": "all_reduce", "size_bytes": 4194304, "in_flight": 8}, ...],   `list_cases` makes them
     "budget_s": 60,                  for all cases together; what does not fit is skipped
     "repeat": [2, 100]}              fewest and most repetitions of a case

Rank 0 answers with a line for each case, in their order:

    {"row": {...}}                    the fields of comm/bench_table.py, Row
    {"skipped": {...}, "why": "..."}  the case, and the reason

Phases of one case; where ranks agree, they do so at the store, which names a rank that is missing:

1 try      once, with numbers whose result is known; wrong elements are counted            timeout_s
2 agree    on the number of repetitions, by the slowest rank's time                        timeout_s
3 repeat   each repetition is timed alone, to the end of all that are in flight            timeout_s each
4 agree    on the time of each repetition: the slowest rank's                              timeout_s

As in nccl-tests, repetitions follow each other without a barrier: the time of a small broadcast is the time from one
to the next. Gloo carries reduce-scatter out as an all-reduce (torch 2.13), which its times show.
Standard library and torch only: it runs in the Python of the job.
"""

from __future__ import annotations

import math
import runpy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

Case = dict[str, Any]
Answer = dict[str, Any]
Agree = Callable[[str, Answer, float, Callable[[list[Answer]], Answer]], Answer]
"""What the ranks do, what this rank says, when rank 0 stops waiting, and what it then decides: its decision."""
MIB = 1 << 20
BUCKET_SIZES = tuple(MIB // 2 << power for power in range(7))
"""0.5 to 32 MiB, as DDP sends its buckets."""
SIZES = (4 << 10, 64 << 10, 256 << 10, MIB, 16 * MIB)
"""Of the collectives other than all-reduce."""
IN_FLIGHT = (1, 8)
EXCHANGES, EXCHANGED_SIZES = ("all_to_all", "all_gather"), (256 << 10, MIB)
"""What buckets of 1 and 4 MiB become as int8: they are timed eight at a time, too."""
FORMATS = {"pack_bf16": (4 * MIB,), "pack_int8": (4 * MIB,), "reduce_powersgd": (4 * MIB, 16 * MIB)}
"""Bytes of buckets: a wire format's code without a network, and PowerSGD whole, whose buckets are large."""
REPEAT = (2, 100)
MAX_SHARES = 4
"""A case whose fewest repetitions take more than this many of its shares of the time is skipped."""
LONG_S = 1.0
NUM_VALUES, NUM_WEIGHTS = 127, 61
"""Of the numbers that are sent: their sum over 2,000 ranks is still exact in float32, whoever adds them."""
ITEM_BYTES = 4
"""float32"""


def list_cases(
    *,
    bucket_sizes: Sequence[int] = BUCKET_SIZES,
    collectives: Iterable[str] = ("all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"),
    sizes: Sequence[int] = SIZES,
    has_formats: bool = False,
) -> list[Case]:
    """Return the cases of a whole measurement: all-reduce as DDP uses it, then the others, smallest first. Pure.

    Args:
        bucket_sizes: bytes of the all-reduces, which run alone and eight at a time.
        sizes: bytes of each of the other collectives, and of small all-reduces, as PowerSGD uses them.
        has_formats: whether wire formats are timed.
    """
    cases = [_case("all_reduce", size) for size in sorted(sizes) if size < min(bucket_sizes, default=0)]
    cases += [_case("all_reduce", size, count) for count in IN_FLIGHT for size in sorted(bucket_sizes)]
    cases += [_case(name, size) for name in FORMATS for size in FORMATS[name] if has_formats]
    for collective in collectives:
        cases += [_case(collective, size) for size in sorted(sizes)]
        if collective in EXCHANGES:
            cases += [_case(collective, size, IN_FLIGHT[-1]) for size in EXCHANGED_SIZES if size in sizes]
    return [*cases, _case("barrier", 0)]


def _case(collective: str, size_bytes: int, in_flight: int = 1) -> Case:
    return {"collective": collective, "size_bytes": size_bytes, "in_flight": in_flight}


def measure(work: dict[str, Any], agree: Agree, tell: Callable[[Answer], None], *, timeout_s: float) -> None:
    """Measure the cases in the default group; all its ranks call this.

    Args:
        work: one entry of the order of join/trial.py.
        agree: all ranks say something, and learn what rank 0 decides.
        tell: gets the answers.
    """
    import torch

    torch.set_num_threads(1)  # ranks of one machine would fight for its cores with the threads that compare results
    warm_up = _Run(_case("all_reduce", ITEM_BYTES), work, timeout_s)
    agree("the first all_reduce", *warm_up.guard(warm_up.try_it), lambda said: {})
    end_s = time.monotonic() + work["budget_s"]
    ranks, repeat = len(work["names"]), tuple(work.get("repeat", REPEAT))
    left_s, rows = float(work["budget_s"]), list[Answer]()
    obstacles = [find_obstacle(case, ranks) for case in work["cases"]]
    weights = [0.0 if why else weigh(case) for case, why in zip(work["cases"], obstacles, strict=True)]
    for number, case in enumerate(work["cases"]):
        answer: Answer = {"why": obstacles[number]}
        if not answer["why"]:
            share = weights[number] / sum(weights[number:])
            limit = Limit(left_s=left_s, share=share, timeout_s=timeout_s, repeat=repeat)
            answer = {"why": limit.why_too_long(estimate_s(case, rows))}
        if not answer["why"]:
            answer = _time_case(case, work, agree, limit, end_s)
            left_s = answer["left_s"]
        if "row" in answer:
            rows.append(answer["row"])
            tell({"row": answer["row"]})
        else:
            tell({"skipped": case, "why": answer["why"]})


@dataclass(frozen=True, slots=True)
class Limit:
    """The time of one case, the same on all ranks."""

    left_s: float
    """Of the budget, for this case and those after it."""
    share: float
    """Its part of that time."""
    timeout_s: float
    repeat: tuple[int, int]

    def choose_repetitions(self, took_s: float) -> int:
        """Return the repetitions of a case that takes the slowest rank `took_s` once."""
        fewest, most = self.repeat
        return max(fewest, min(most, int(self.left_s * self.share / max(took_s, 1e-9))))

    def why_too_long(self, took_s: float) -> str:
        """Return why a case that takes so long is skipped; empty: it is not."""
        needed_s = took_s * (self.repeat[0] + (not is_long(took_s)))
        allowed_s = max(0.0, self.left_s * min(1.0, MAX_SHARES * self.share))
        if needed_s > allowed_s:
            return f"it takes about {needed_s:.2g} s with its repetitions, and has {allowed_s:.2g} s"
        if took_s > self.timeout_s / 2:
            return f"one takes about {took_s:.1f} s, and a collective times out after {self.timeout_s:g} s"
        return ""


def is_long(took_s: float) -> bool:
    """Return whether the first run counts as a repetition: that its memory is new costs milliseconds only. Pure."""
    return took_s > LONG_S


def describe(case: Case) -> str:
    """`8 x all_reduce of 0.5 MiB`. Pure."""
    size = case["size_bytes"]
    text = f"{size / MIB:g} MiB" if size >= MIB // 2 else f"{size / 1024:g} KiB" if size >= 1024 else f"{size} B"
    times = f"{case['in_flight']} x " if case["in_flight"] > 1 else ""
    return f"{times}{case['collective']}{f' of {text}' if size else ''}"


def weigh(case: Case) -> float:
    """Return a case's share of the time, in shares of the smallest: large ones take longer, and get more. Pure."""
    return max(1.0, math.sqrt(case["size_bytes"] * case["in_flight"] / MIB))


def estimate_s(case: Case, rows: Sequence[Answer]) -> float:
    """Return at least how long one run takes, by the rows so far; 0 if they do not say. Pure.

    Small sizes tell nothing about large ones; a collective that has no row is at best as fast as the fastest one.
    """
    large = [row for row in rows if row["size_bytes"] * row["in_flight"] >= MIB // 2]
    own = [row for row in large if row["collective"] == case["collective"]]
    s_per_byte = min((row["time_s"] / row["size_bytes"] for row in own or large), default=0.0)
    return float(s_per_byte * case["size_bytes"] * case["in_flight"])


def find_obstacle(case: Case, num_ranks: int) -> str:
    """Return why no group of this size can run the case; empty: it can. Pure."""
    size, in_flight = case["size_bytes"], case["in_flight"]
    if case["collective"] not in _OPERATIONS:
        return f"no such collective: expected one of {', '.join(_OPERATIONS)}"
    if case["collective"] == "send_recv" and num_ranks < 2:
        return "needs at least two ranks"
    fewest = 0 if case["collective"] == "barrier" else ITEM_BYTES * (num_ranks if case["collective"] in _SHARED else 1)
    if not isinstance(size, int) or size < fewest:
        return f"size_bytes = {size}: expected at least {fewest}, for {num_ranks} ranks"
    if not isinstance(in_flight, int) or in_flight < 1:
        return f"in_flight = {in_flight}: expected at least 1"
    return ""


def _count(case: Case, num_ranks: int) -> int:
    """Elements, as nccl-tests counts them: of a rank's share, where ranks share the size."""
    if case["collective"] == "barrier":
        return 0
    return int(case["size_bytes"]) // ITEM_BYTES // (num_ranks if case["collective"] in _SHARED else 1)


def to_row(case: Case, num_ranks: int, took_s: Sequence[Sequence[float]], wrong: int | None) -> Answer:
    """Return the fields of a Row. Pure.

    Args:
        took_s: of each rank, the seconds of each repetition.
        wrong: elements, over all ranks.
    """
    slowest_s = sorted(max(of_ranks) / case["in_flight"] for of_ranks in zip(*took_s, strict=True))
    return {
        "collective": case["collective"],
        "size_bytes": _count(case, num_ranks) * ITEM_BYTES * (num_ranks if case["collective"] in _SHARED else 1),
        "count": _count(case, num_ranks),
        "redop": "sum" if case["collective"] in ("all_reduce", "reduce_scatter") else "none",
        "root": 0 if case["collective"] == "broadcast" else -1,
        "in_flight": case["in_flight"],
        "time_s": median(slowest_s),
        "p95_s": slowest_s[math.ceil(0.95 * len(slowest_s)) - 1],
        "best_s": slowest_s[0],
        "repetitions": len(slowest_s),
        "wrong": wrong,
    }


def _time_case(case: Case, work: dict[str, Any], agree: Agree, limit: Limit, end_s: float) -> Answer:
    """Return {"row": ...} or {"why": ...} for one case, the same on all ranks, with "left_s" of the budget."""
    run, what = _Run(case, work, limit.timeout_s), describe(case)

    def plan(said: list[Answer]) -> Answer:
        left = {"left_s": end_s - time.monotonic()}
        if unsupported := [words["unsupported"] for words in said if "unsupported" in words]:
            return {"why": unsupported[0], **left}
        took_s, wrong = max(words["took_s"] for words in said), [words["wrong"] for words in said]
        if why := limit.why_too_long(took_s):
            return {"why": why, **left}
        num_more = limit.choose_repetitions(took_s) - is_long(took_s)
        return {"num_more": num_more, "wrong": None if None in wrong else sum(wrong), "first": is_long(took_s), **left}

    def conclude(said: list[Answer]) -> Answer:
        row = to_row(case, len(said), [words["took_s"] for words in said], planned["wrong"])
        return {"row": row, "left_s": end_s - time.monotonic()}

    planned = agree(what, *run.guard(run.try_it), plan)
    if "why" in planned:
        return planned
    first_s = [run.first_s] if planned["first"] else []
    return agree(
        what, *run.guard(lambda: {"took_s": first_s + [run.once() for _ in range(planned["num_more"])]}), conclude
    )


class _Run:
    """One case on this rank."""

    def __init__(self, case: Case, work: dict[str, Any], timeout_s: float) -> None:
        import torch

        self.case, self.timeout_s = case, timeout_s
        ranks, device = len(work["names"]), f"cuda:{work.get('device', 0)}" if work["backend"] == "nccl" else "cpu"
        self.place = _Place(work["rank"], ranks, _count(case, ranks), torch.device(device))
        self.operations: list[_Operation] = []
        self.began_s = time.monotonic()
        self.first_s = 0.0  # of the first run, once it has ended

    def guard(self, step: Callable[[], Answer]) -> tuple[Answer, float]:
        """Return what the step says, or its error, and until when the other ranks may be as far."""
        try:
            return step(), time.monotonic() + self.timeout_s
        except Exception as exc:  # torch has one type for what Gloo reports, and another for NCCL
            kind = "unsupported" if not self.first_s and "support" in str(exc) else "error"
            return {kind: str(exc) or type(exc).__name__}, self.began_s + self.timeout_s

    def try_it(self) -> Answer:
        """Run it once with known numbers, and count the wrong ones."""
        make = _OPERATIONS[self.case["collective"]]
        self.operations += [make(self.place) for _ in range(self.case["in_flight"])]
        took_s, wrong = self.once(), None
        if self.place.count and self.operations[0].output is not None:
            expected = self.operations[0].expected()
            wrong = sum(int((operation.output != expected).sum()) for operation in self.operations)
        if self.place.device.type == "cuda" or self.case["collective"] in FORMATS:  # it opened connections, or threads
            took_s = self.once()
        self.first_s = took_s
        return {"took_s": took_s, "wrong": wrong}

    def once(self) -> float:
        """Return the seconds from the first call to the end of all in flight."""
        import torch

        self.began_s = time.monotonic()
        for under_way in [handle for operation in self.operations for handle in operation.begin()]:
            under_way.wait()
        if self.place.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            while not event.query():  # synchronize() would wait for a missing rank as long as NCCL's watchdog lets it
                if time.monotonic() - self.began_s > self.timeout_s:
                    raise TimeoutError(f"NCCL did not finish within {self.timeout_s:g} s")
        return time.monotonic() - self.began_s


@dataclass(frozen=True, slots=True)
class _Place:
    """What one rank's part in a collective depends on."""

    rank: int
    num_ranks: int
    count: int
    device: Any

    def numbers(self, rank: int, target: int = 0, *, parts: int = 1) -> Any:
        """What a rank sends to another one: whole numbers, so that every order of adding gives the same sum."""
        import torch

        values = torch.arange(self.count * parts, dtype=torch.float32, device=self.device) % NUM_VALUES
        return values * (rank % NUM_WEIGHTS + 1) + target

    def sums(self, *, parts: int = 1) -> Any:
        return self.numbers(0, parts=parts) * sum(rank % NUM_WEIGHTS + 1 for rank in range(self.num_ranks))

    def empty(self, *, parts: int = 1) -> Any:
        import torch

        return torch.empty(self.count * parts, dtype=torch.float32, device=self.device)


@dataclass(frozen=True, slots=True)
class _Operation:
    begin: Callable[[], list[Any]]
    """Starts it, and returns what to wait for."""
    output: Any = None
    expected: Callable[[], Any] = lambda: None
    """What the output is after the first run."""


def _all_reduce(place: _Place) -> _Operation:
    import torch.distributed as dist

    bucket = place.numbers(place.rank)
    return _Operation(lambda: [dist.all_reduce(bucket, async_op=True)], bucket, place.sums)


def _all_gather(place: _Place) -> _Operation:
    import torch
    import torch.distributed as dist

    own, whole = place.numbers(place.rank), place.empty(parts=place.num_ranks)
    return _Operation(
        lambda: [dist.all_gather_into_tensor(whole, own, async_op=True)],
        whole,
        lambda: torch.cat([place.numbers(rank) for rank in range(place.num_ranks)]),
    )


def _reduce_scatter(place: _Place) -> _Operation:
    import torch.distributed as dist

    whole, own = place.numbers(place.rank, parts=place.num_ranks), place.empty()
    return _Operation(
        lambda: [dist.reduce_scatter_tensor(own, whole, async_op=True)],
        own,
        lambda: place.sums(parts=place.num_ranks).chunk(place.num_ranks)[place.rank],
    )


def _broadcast(place: _Place) -> _Operation:
    import torch.distributed as dist

    tensor = place.numbers(place.rank)
    return _Operation(lambda: [dist.broadcast(tensor, 0, async_op=True)], tensor, lambda: place.numbers(0))


def _all_to_all(place: _Place) -> _Operation:
    import torch
    import torch.distributed as dist

    sent = torch.cat([place.numbers(place.rank, target) for target in range(place.num_ranks)])
    received = place.empty(parts=place.num_ranks)
    return _Operation(
        lambda: [dist.all_to_all_single(received, sent, async_op=True)],
        received,
        lambda: torch.cat([place.numbers(source, place.rank) for source in range(place.num_ranks)]),
    )


def _send_recv(place: _Place) -> _Operation:
    import torch.distributed as dist

    sent, received = place.numbers(place.rank), place.empty()
    source, target = (place.rank - 1) % place.num_ranks, (place.rank + 1) % place.num_ranks
    ends = [dist.P2POp(dist.isend, sent, target), dist.P2POp(dist.irecv, received, source)]
    return _Operation(lambda: dist.batch_isend_irecv(ends), received, lambda: place.numbers(source))


def _barrier(place: _Place) -> _Operation:
    import torch.distributed as dist

    ids = [place.device.index] if place.device.type == "cuda" else None
    return _Operation(lambda: [dist.barrier(async_op=True, device_ids=ids)])


def _reduce(place: _Place, name: str) -> _Operation:
    kind, wire_format = name.split("_")
    packing = runpy.run_path(str(Path(__file__).with_name("packing.py")))
    reduce = packing["make_reduce"](wire_format, place.numbers(place.rank), is_alone=kind == "pack")
    return _Operation(lambda: [reduce()])


_OPERATIONS: dict[str, Callable[[_Place], _Operation]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
    "barrier": _barrier,
    **{name: partial(_reduce, name=name) for name in FORMATS},
}
_SHARED = ("all_gather", "reduce_scatter", "all_to_all")
"""Ranks share the size: each has an equal part of the larger buffer."""
