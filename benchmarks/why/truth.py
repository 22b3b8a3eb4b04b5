"""What is the right answer? Decided by what the generator wrote, and by nothing that a solver does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .faults import HANG, Struck
from .layout import Written
from .plan import Plan


@dataclass(frozen=True, slots=True)
class Culprit:
    """Who broke the job, in all names that an answer may use."""

    level: str
    """rank: the files name the rank. node: they name the node only. undecidable: they do not tell. nobody: no rank or
    node is at fault. all: all ranks failed alike."""
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Truth:
    """The right answer for one job."""

    fault: str
    causes: tuple[str, ...]
    """Each of them is right."""
    is_cause_decidable: bool
    may_be_certain: bool
    """False where other causes fit as well, so that `certain` is wrong whatever the answer says."""
    culprit: Culprit
    why: str
    """What decides, in words."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def tell_truth(
    plan: Plan, name: str, index: int, struck: Struck, written: Sequence[Written], pids: Sequence[int]
) -> Truth:
    """Return the right answer for one fault.

    Args:
        index: number of the fault in the job.
        struck: what it did.
        written: what reached the files.
        pids: of the ranks when it happened.
    """
    if struck.culprit in {"nobody", "all"}:
        culprit = Culprit(struck.culprit)
        return Truth(name, struck.causes, True, True, culprit, f"written whole; culprit: {struck.culprit}")
    marked = [entry for entry in written if entry.line.mark and entry.line.mark.fault == index]
    level = max((entry.line.mark.level for entry in marked if entry.line.mark and entry.line.mark.causes), default=-1)
    floor = level if level == 2 else 0
    best = [entry.line.mark for entry in marked if entry.line.mark and entry.line.mark.level >= floor]
    is_open = level < 2 and any(mark.causes and mark.level == 0 for mark in best)
    causes = tuple(dict.fromkeys(cause for mark in best for cause in mark.causes)) if level >= 0 else ()
    if level == 0 or level == 1:
        causes = tuple(dict.fromkeys((*struck.causes, *causes)))
    told = _tell_culprit(plan, struck, marked)
    why = {2: "a line shows the cause", 1: "an exit status is left", 0: "a SIGKILL or an unclear error is left"}.get(
        level, "no line tells the cause"
    )
    is_decidable = level >= 0
    if struck.is_hang and not (level == 2 and told != "undecidable"):
        hang = _compare_ranks(plan, struck.rank, written)
        if hang:
            why, told, is_decidable = hang, "rank", True
            causes = tuple(dict.fromkeys((*struck.causes, *causes)))
        elif level < 2:
            causes, is_decidable = struck.causes, False
            why = "ranks waited; the files do not tell for whom"
    elif not is_decidable and _compare_ranks(plan, struck.rank, written):
        causes = (*struck.causes, *HANG)  # the files of a job with a stuck rank are the same
    node = plan.node_of(struck.rank)
    culprit = Culprit(
        level=told,
        ranks=tuple(plan.ranks_of(node)) if struck.culprit == "node" else (struck.rank,),
        nodes=(plan.nodes[node], *struck.names),
        addresses=(plan.ip_of(node),),
        pids=tuple(pids[rank] for rank in plan.ranks_of(node)) if struck.culprit == "node" else (pids[struck.rank],),
    )  # fmt: skip
    return Truth(name, causes or struck.causes, is_decidable, not is_open, culprit, why)


def _tell_culprit(plan: Plan, struck: Struck, marked: Sequence[Written]) -> str:
    has_rank = has_node = False
    for entry in marked:
        line, mark = entry.line, entry.line.mark
        assert mark is not None
        kind = line.speaker[0]
        if mark.address:
            has_node |= "peer_node" in line.names
            continue
        if kind == "srun" and "task" in line.names:
            has_rank |= plan.launcher == "srun"
            has_node = True
            continue
        has_rank |= "rank" in line.names or (mark.is_of_speaker and entry.has_rank)
        has_node |= bool({"lost", "machine"} & line.names) or ("node" in line.names and kind != "stepd") or (
            entry.has_node and (mark.is_of_speaker or kind in {"agent", "kernel"})
        )  # fmt: skip
    if has_rank and struck.culprit == "rank":
        return "rank"
    return "node" if has_node or has_rank else "undecidable"


def _compare_ranks(plan: Plan, culprit: int, written: Sequence[Written]) -> str:
    """Return why a comparison of what ranks wrote of their collectives names the culprit; empty if it does not."""
    timeouts = {entry.line.stuck[1]: entry.line.stuck for entry in written if entry.line.stuck[:1] == ("timeout",)}
    behind = {entry.line.stuck[1]: entry.line.stuck for entry in written if entry.line.stuck[:1] == ("behind",)}
    others = {rank: stuck for rank, stuck in timeouts.items() if rank != culprit}
    if not others:
        return ""
    is_flat = plan.world == plan.data
    if culprit in timeouts and is_flat:
        places = Counter(stuck[2:5] for stuck in others.values())
        place, count = places.most_common(1)[0]
        if count >= 2 and count == len(others) and timeouts[culprit][2:5] != place:
            return "the culprit waits in another collective than all others"
        return ""
    if culprit in behind and is_flat:
        seqs = [stuck[3] for stuck in others.values() if stuck[2].startswith("dp")]
        if seqs and behind[culprit][3] < max(seqs):
            return "the culprit says that it has enqueued less than the others wait in"
    is_world_known = any("world" in entry.line.names for entry in written)
    if len(others) == plan.world - 1 and culprit not in timeouts and is_world_known:
        return "all other ranks wait; the culprit says nothing of the kind"
    return ""
