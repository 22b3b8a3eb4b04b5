"""Did ranks call different collectives under one number, or the same one with other shapes or dtypes? Pure.

The same collective of a group has the same number on all its ranks. A rank that skips one calls every later one under
a number too low, so the first number under which they differ is where to look. The majority is right. With two ranks,
or as many on either side, nobody is: both are named, and it is undecided.

Gloo does not look, and may abort an innocent rank (`EnforceNotMet`: it got more bytes than it asked for), while the
guilty one only reads `Connection closed by peer`. What ended how is a symptom here; what was called is the evidence.
Of an aborted rank whose last call nobody knows the others tell: where all of them agree, it is the odd one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from allranks.guard.faults import COLLECTIVE_MISMATCH
from allranks.guard.guard_verdict import GuardVerdict
from allranks.guard.scene import Scene
from allranks.model.beat import POINT_TO_POINT, CallSeen
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Finding
from allranks.recorder.calls import canonical, size_of
from allranks.report.text import fold_ranks

_SAME_SIZE = frozenset({"all_reduce", "broadcast", "reduce"})
"""All ranks hand in as many elements, or bytes; elsewhere sizes may differ, or backends allow it."""
_SAME_DTYPE = _SAME_SIZE | {"all_gather", "reduce_scatter"}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first number under which ranks differ."""

    group: str
    seq: int
    odd: tuple[int, ...]
    """The culprits; everybody where it is not decided."""
    side: frozenset[int] = field(compare=False)
    """Who called something else than the others."""
    calls: Mapping[int, CallSeen] = field(compare=False)
    """By rank."""

    @property
    def is_decided(self) -> bool:
        """Whether one side has the majority."""
        return len(self.odd) == len(self.side)


def find_mismatch(scene: Scene) -> Mismatch | None:
    """Return the first mismatch that somebody is stuck in, or died of."""
    if not any(view.beat.calls for view in scene.ranks.values()):
        return None  # before all memberships are merged, which takes long with many ranks
    by_number: defaultdict[tuple[str, int], dict[int, CallSeen]] = defaultdict(dict)
    twice: set[tuple[str, int]] = set()
    members: defaultdict[str, set[int]] = defaultdict(set)
    for view in scene.ranks.values():
        for seen in view.beat.groups:
            members[seen.name].update(seen.ranks)
    for rank, view in scene.ranks.items():
        for call in view.beat.calls:
            if call.seq <= 0 or canonical(call.op) in POINT_TO_POINT:
                continue
            if rank not in (members[call.group] or (rank,)):  # it was in an earlier group of that name
                continue
            if rank in by_number[call.group, call.seq]:
                twice.add((call.group, call.seq))  # coalesced: parts of it may still be to come
            by_number[call.group, call.seq][rank] = call
    for (group, seq), calls in sorted(by_number.items(), key=lambda item: item[0][1]):
        if len(calls) < 2 or (group, seq) in twice:
            continue
        if all(call.is_done and rank not in scene.ends for rank, call in calls.items()):
            continue
        if (sides := _compare(calls)) is not None:
            return _weigh(group, seq, calls, sides)
    return None


def judge_mismatch(scene: Scene, mismatch: Mismatch) -> GuardVerdict:
    """Return the verdict on a mismatch; an error of the user's code, wherever it runs."""
    calls = mismatch.calls
    odd, usual = sorted(mismatch.side), sorted(calls.keys() - mismatch.side)
    names = {scene.node_of(rank).name for rank in mismatch.odd}
    finding = scene.fault(
        COLLECTIVE_MISMATCH,
        f"at collective {mismatch.seq} of group {mismatch.group} {_say(odd, calls)}, {_say(usual, calls)}",
        *mismatch.odd,
        node=next(iter(names)) if len(names) == 1 else None,
        evidence=[f"rank {rank}: {calls[rank]}{calls[rank].at}" for rank in [*odd[:4], *usual[:4]]],
        confidence=Confidence.CERTAIN if mismatch.is_decided else Confidence.UNDECIDED,
        fix="every rank must call the same collectives in the same order, with the same shapes and dtypes: "
        "compare the places named here, and what decides which of them a rank takes",
    )
    return user_error(finding, mismatch.odd)


def explain_abort(scene: Scene, aborted: int) -> GuardVerdict:
    """Say what is known of a rank that Gloo aborted because it got too many bytes, where no calls differ."""
    group, seq, calls = _newest_calls(scene)
    unknown = sorted(set(range(scene.num_ranks)) - calls.keys() - scene.left.keys())
    if len(unknown) == 1 and len(calls) >= 2 and _compare(calls) is None:
        rank, agreed = unknown[0], sorted(calls)
        what = f"it was not in collective {seq} of group {group} as all others were: "
        what += f"{fold_ranks(agreed)} agree, and what it called is not known"
        seen = [f"rank {aborted}: Gloo received data of an unexpected size and aborted the process"]
        seen += [f"rank {other}: {calls[other]}{calls[other].at}" for other in agreed[:4]]
        about: dict[str, Any] = {"confidence": Confidence.LIKELY}
    else:
        rank = aborted
        what = "Gloo got data of another size than it asked for, and aborted it: ranks are in different collectives, "
        what += "or in one with other shapes or dtypes; which rank is the odd one is not known"
        seen = [f"rank {other}: {call}{call.at}" for other, call in sorted(calls.items())[:8]]
        ask = "run it again with TORCH_DISTRIBUTED_DEBUG=DETAIL: every collective is compared before it is run"
        about = {"confidence": Confidence.UNDECIDED, "ask": ask}
    return user_error(scene.fault(COLLECTIVE_MISMATCH, what, rank, evidence=seen, **about), (rank,))


def _compare(calls: Mapping[int, CallSeen]) -> dict[int, Hashable] | None:
    """What each rank said where they differ: first in the operation, then in dtypes, then in size; None: nowhere."""
    are_typed = all(call.dtypes for call in calls.values())  # else bytes would be compared with elements

    def size(call: CallSeen) -> tuple[object, ...]:
        return size_of(canonical(call.op), call.sizes, call.dtypes * are_typed)

    aspects: tuple[Callable[[CallSeen], Hashable], ...] = (
        lambda call: canonical(call.op),
        lambda call: size_of(op, (), call.dtypes)[1:] if (op := canonical(call.op)) in _SAME_DTYPE else (),
        lambda call: size(call)[0] if call.sizes and canonical(call.op) in _SAME_SIZE else (),
    )
    for aspect in aspects:
        told = {rank: said for rank, call in calls.items() if (said := aspect(call)) not in ((), "")}
        if len(set(told.values())) > 1:
            return told
    return None


def _weigh(group: str, seq: int, calls: Mapping[int, CallSeen], sides: Mapping[int, Hashable]) -> Mismatch:
    (usual, most), (_, next_most) = Counter(sides.values()).most_common(2)
    is_decided = most > next_most
    last = sides[max(sides)]
    side = frozenset(rank for rank, said in sides.items() if (said != usual if is_decided else said == last))
    odd = tuple(sorted(side if is_decided else sides))
    return Mismatch(group, seq, odd, side, {rank: calls[rank] for rank in sides})


def _say(ranks: list[int], calls: Mapping[int, CallSeen]) -> str:
    kinds = [f"{calls[rank]}{calls[rank].at}" for rank in ranks]
    return f"{fold_ranks(ranks)} called {kinds[0]}{' and others' if len(set(kinds)) > 1 else ''}"


def _newest_calls(scene: Scene) -> tuple[str, int, dict[int, CallSeen]]:
    """The highest number that somebody is in, of the group with the most ranks, and who is in it."""
    found: defaultdict[tuple[str, int], dict[int, CallSeen]] = defaultdict(dict)
    for rank, view in scene.ranks.items():
        for call in view.beat.calls:
            if not call.is_done and call.seq > 0:
                found[call.group, call.seq][rank] = call
    (group, seq), calls = max(found.items(), key=lambda item: (len(item[1]), item[0][1]), default=(("0", 0), {}))
    return group, seq, calls


def user_error(finding: Finding, ranks: tuple[int, ...]) -> GuardVerdict:
    """Return the verdict on an error of the user's code: starting again does not help."""
    return GuardVerdict(findings=(finding,), exit_code=Exit.USER_CODE, ranks=ranks, is_retryable=False)
