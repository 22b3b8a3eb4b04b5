"""Who is where while ranks wait for each other? Pure: states of a job, true, and perhaps as they should be.

An evaluation on rank 0 looks like a stuck rank, so nothing here is a verdict. What only stacks show counts when nothing
has moved between ranks for STILL_S, and everybody who is said to wait has used no processor meanwhile.

With `--ask`, torch's flight recorders tell the calls of each rank by group and number, and recorder/ (as for guard and
`why`) who is missing or elsewhere. Nodes are asked at different times, and ranks may run meanwhile: what they tell
counts if no rank has called anything for STILL_S before the first of them was asked.

Limits: otherwise process groups cannot be seen, so ranks in different calls may be right to be there. Ranks that poll
while they wait (UCX, MPI) are never said to wait; those that wait for their GPU only where NCCL tells its counts.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict

from allranks.model.beat import ProcessState
from allranks.model.node_look import MAX_MEMBERS, FlightSeen
from allranks.recorder.calls import Call, Dump
from allranks.recorder.wait_graph import Standstill, StandstillKind, find_stops
from allranks.report.text import count_of, describe_time, fold_ranks
from allranks.watch.since import MAIN, LookHistory, Track, is_open, say_for

STILL_S = 3.0
"""For so long nothing has moved between ranks before a state of theirs is told."""
STALE_S = 1.5
"""A look that is older does not show what is now."""
ASLEEP, BUSY_GPU = 0.1, 50
"""A process that waits uses at most this share of a core; from this percentage a GPU computes, or waits in NCCL."""
MAX_STOPS = 4
_CAUSES = {
    **dict.fromkeys((StandstillKind.MISMATCH, StandstillKind.CIRCLE), "collective-mismatch"),
    StandstillKind.ALL_THERE: "collective-timeout",
}
_TWO_SIDED = re.compile(r"i?send\w*|i?recv\w*|batch_isend_irecv")


@dataclass(frozen=True, slots=True)
class WatchState:
    """Something that is so, and need not be wrong."""

    text: str
    ranks: tuple[int, ...] = ()
    """Whom it is about: who is elsewhere, or behind."""
    node: str = ""
    place: str = ""
    for_s: float = 0.0
    is_at_least: bool = False
    """It was so at the first look already: `for_s` is a lower bound."""
    is_suspicion: bool = False
    """Ranks are in different calls, or at different steps of one."""
    cause: str = "stuck-rank"
    """What it would be, if it should not be so: a name of the book of causes."""


class RanksNow:
    """The ranks at one moment, and who of them waits."""

    def __init__(self, history: LookHistory, now_s: float) -> None:
        self.history, self.now_s, self.still_s = history, now_s, history.moved_s
        self.workers, self.living = history.workers, history.living
        self.told_s = min((track.told_s for track in self.living.values()), default=now_s)
        """Of the oldest look that has a rank."""
        self._first_s = max((track.began_s for track in self.living.values()), default=now_s)
        asleep = {rank: track for rank, track in self.living.items() if (track.cpu_share or 0.0) < ASLEEP}
        self.waiting = {rank: track for rank, track in asleep.items() if self._is_inside(track)}
        """Ranks that are in a collective since nothing moves, and asleep."""
        self.stops = self._find_stops()
        """Why ranks wait, as torch's flight recorders tell."""

    def states(self, named: Collection[int], *, is_explained: bool) -> Iterator[WatchState]:
        """Yield the states of ranks.

        Args:
            named: ranks that a verdict names; nothing more is said of them.
            is_explained: something is proven, or ends are being looked into: no mismatch is suspected then.
        """
        if self.now_s - self.told_s > STALE_S or self.told_s - self.still_s < STILL_S or len(self.workers) < 2:
            return
        elsewhere = {rank: track for rank, track in self.living.items() if rank not in self.waiting}
        yield from () if is_explained else self._tell_stops()
        # DDP's waits are inside of `backward`, like its computation; in any other collective, who is awake polls.
        polls = any(self._is_inside(track) and track.stack.operation != "backward" for track in elsewhere.values())
        if self.waiting and elsewhere and not polls:
            yield from self._tell_elsewhere({rank: elsewhere[rank] for rank in elsewhere if rank not in named})
        elif not is_explained and not self.stops:
            uses_gpu = any((track.look.gpu_percent or 0) >= BUSY_GPU for track in self.living.values())
            yield from self._tell_counts() if elsewhere or uses_gpu else self._tell_waiting()

    def summary(self) -> str:
        """Return what was seen, without a judgment: `3 ranks run, step 150; looked at for 5 s`."""
        tracks = self.living.values()
        if not tracks:
            return f"{count_of(len(self.workers), 'rank')} ended" if self.workers else "no rank of the job was seen"
        steps = [track.stack.counter for track in tracks if track.stack.counter is not None]
        num_ended = len(self.workers) - len(tracks)
        parts = [f"{count_of(len(tracks), 'rank')} {'runs' if len(tracks) == 1 else 'run'}"]
        parts += [f"{num_ended} ended"] if num_ended else []
        parts += ["{} {}".format(*min(steps, key=lambda step: step[1]))] if steps else []
        return f"{', '.join(parts)}; looked at for {self._ago(min(track.began_s for track in tracks))}"

    def limits(self) -> Iterator[str]:
        """Yield what cannot be seen, one line each."""
        nodes = self.history.nodes
        yield from dict.fromkeys(limit for node in nodes.values() for limit in node.look.limits)
        for problem, ranks in _group(self.living, lambda track: track.look.problem).items():
            if problem:
                yield f"where {fold_ranks(ranks)} {_be(ranks)}: {problem}"
        for name in dict.fromkeys(track.node for track in self.living.values()):
            if self.now_s - nodes[name].told_s > STALE_S:
                yield f"{name}, for {self._ago(nodes[name].told_s)}"
        if missing := [rank for rank in range(self._world_size) if rank not in self.workers]:
            yield f"{fold_ranks(missing)}: no process was found"

    def _ago(self, since_s: float) -> str:
        return describe_time(self.now_s - since_s)

    def _is_inside(self, track: Track) -> bool:
        """Whether it has been seen in a collective since nothing moves."""
        return track.stack.is_collective and track.stack_s >= self.still_s

    def _find_stops(self) -> Sequence[Standstill]:
        told = [
            (rank, flight, track, self.history.nodes[track.node].offset_s)
            for rank, track in self.living.items()
            if (flight := track.look.flight) is not None and rank < MAX_MEMBERS
        ]
        asked_s = min((flight.at_s + offset_s for _, flight, _, offset_s in told), default=-math.inf)
        called_s = max((flight.called_s + offset_s for _, flight, _, offset_s in told), default=math.inf)
        if asked_s < max(called_s + STILL_S, self.still_s):
            return ()
        answers = [(rank, flight.at_s, self._is_inside(track)) for rank, flight, track, _ in told]
        if self.history.told_stops[0] != answers:
            dumps = [_as_dump(rank, flight, may_block=self._is_inside(track)) for rank, flight, track, _ in told]
            is_waited = any(not call.is_done for dump in dumps for call in dump.calls)
            self.history.told_stops = answers, find_stops(dumps, self._world_size or None) if is_waited else ()
        return self.history.told_stops[1]

    @property
    def _world_size(self) -> int:
        """Of the job, as its processes' environments tell; 0: not known."""
        return min(max((track.look.world_size or 0 for track in self.living.values()), default=0), MAX_MEMBERS)

    def _tell_stops(self) -> Iterator[WatchState]:
        """Who is missing in which call, or elsewhere, as torch's flight recorders tell."""
        for stop in self.stops[:MAX_STOPS]:
            ranks = list(stop.ranks) if stop.is_decided else []
            first = next((self.living[rank] for rank in (*stop.ranks, *stop.victims) if rank in self.living), None)
            if first is not None:
                # Of two numbers, a rank may be through the first: whom a broadcast does not hold up.
                is_suspicion = stop.kind is StandstillKind.MISMATCH and len({call.seq for _, call in stop.calls}) == 1
                text = f"{'mismatch suspected (likely), ' * is_suspicion}torch's flight recorder: {stop.message}"
                about = {"cause": _CAUSES.get(stop.kind, "stuck-rank"), "is_suspicion": is_suspicion}
                yield make_state(text, ranks, first, self.still_s, **about)

    def _tell_elsewhere(self, elsewhere: Mapping[int, Track]) -> Iterator[WatchState]:
        calls = Counter(track.stack.where for track in self.waiting.values())
        waits = ", ".join(f"{count_of(num, 'rank')} wait{'s' * (num == 1)} {call}" for call, num in calls.items())

        def key(track: Track) -> object:
            seen = track.stack.operation, track.stack.place
            return seen if track.stack_s >= self.still_s else track.look.problem

        for ranks in sorted(_group(elsewhere, key).values(), key=len):
            track, who = elsewhere[ranks[0]], f"{fold_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} been"
            since_s = max(track.place_s, self.still_s)  # between two stacks it may have been with the others
            if track.stack_s < self.still_s and not track.look.problem:
                continue  # its stack is still to be read
            if track.stack_s < self.still_s:
                why = f"cannot be seen ({track.look.problem})"
                text, since_s = f"where {fold_ranks(ranks)} {_be(ranks)} {why}", self.still_s
            elif track.told_s - since_s < STILL_S:  # it moves, but not to where the others are
                since_s = self.still_s
                text = f"{who} elsewhere {say_for(since_s, track.told_s, track.first_s)}, now {_say_where(track)}"
            else:
                text = f"{who} {_say_where(track, since_s)}"
            yield make_state(f"{text}; {waits}", ranks, track, since_s)

    def _tell_waiting(self) -> Iterator[WatchState]:
        """All ranks wait: in different calls, at different steps, or for somebody who is not seen."""
        since_s = max([self.still_s, *(track.place_s for track in self.waiting.values())])
        are_bytes_open = any(flow.seen.unacked_bytes for _, flow, _, _ in self.history.links)
        # Whose stack has shown another place shortly before may be on its way to the others' call.
        living = [track for track in self.history.tracks(*MAIN) if track.is_alive]
        are_bytes_open |= any(track.unread_at(self.history.store_port) for track in living)
        if not self.waiting or are_bytes_open or self.told_s - since_s < STILL_S - 1.0:
            return
        calls = _group(self.waiting, lambda track: track.stack.where)
        steps = _group(self.waiting, lambda track: track.stack.counter and track.stack.counter[1])
        steps.pop(None, None)
        if len(calls) == 1 and len(steps) > 1:
            groups, odd = [steps[step] for step in sorted(steps)], steps[min(steps)]  # who is behind is waited for
            where = [f"{fold_ranks(steps[step])} at step {step}" for step in sorted(steps)]
            where.append(f"all {next(iter(calls))}")
        else:
            groups = sorted(calls.values(), key=lambda ranks: (len(ranks), ranks))
            odd = sorted(rank for ranks in groups for rank in ranks if 2 * len(ranks) < len(self.waiting))
            where = [f"{fold_ranks(ranks)} {self.waiting[ranks[0]].stack.where}" for ranks in groups]
        is_two_sided = any(_TWO_SIDED.fullmatch(track.stack.operation) for track in self.waiting.values())
        is_suspicion = len(groups) > 1 and not is_two_sided
        head = "mismatch suspected (likely)" if is_suspicion else f"all {count_of(len(self.waiting), 'rank')} wait"
        still = f"nothing has moved between them {say_for(self.still_s, self.told_s, self._first_s)}"
        first = self.waiting[groups[0][0]]
        cause = "collective-mismatch" if is_suspicion else "stuck-rank"
        text = f"{head}: {', '.join(where)}; {still}"
        yield make_state(text, odd, first, self.still_s, is_suspicion=is_suspicion, cause=cause)

    def _tell_counts(self) -> Iterator[WatchState]:
        """Who has started fewer of NCCL's collectives than the others, while nobody starts any."""
        counts = _group(self.living, lambda track: -1 if track.look.nccl_ops is None else track.look.nccl_ops)
        behind = [rank for count in counts if count < max(counts) for rank in counts[count]]
        since_s = max((track.ops_s for track in self.living.values()), default=self.now_s)
        are_idle = all((self.living[rank].look.gpu_percent or 0) < BUSY_GPU for rank in behind)
        is_told = behind and -1 not in counts and 2 * len(behind) <= len(self.living)
        if not is_told or not are_idle or self.told_s - since_s < STILL_S:
            return
        first = self.living[behind[0]]
        said = ", ".join(f"{fold_ranks(counts[count])} {count}" for count in sorted(counts))
        text = f"{fold_ranks(behind)} {_be(behind)} behind, {first.stack.where}: collectives of NCCL that were started"
        text = f"{text}: {said}; no more {say_for(since_s, self.told_s, self._first_s)}"
        yield make_state(text, behind, first, since_s)


def make_state(text: str, ranks: Sequence[int], track: Track, since_s: float, **about: Any) -> WatchState:
    """Return a state of these ranks, at the place of a process, and since then."""
    for_s, is_at_least = track.told_s - since_s, is_open(since_s, track.first_s)
    return WatchState(text, tuple(ranks), track.node, track.stack.place, for_s, is_at_least, **about)


def _as_dump(rank: int, flight: FlightSeen, *, may_block: bool) -> Dump:
    """Return what a rank has told; `may_block`: its main thread is in a collective, and not in what it does beside."""
    names = ("enqueued", "started", "members", "descs", "formed_again", "is_whole")
    calls = (
        Call(**asdict(call) | {"blocks": call.blocks and may_block}, is_p2p=call.peer is not None)
        for call in flight.calls
    )
    return Dump(rank, tuple(calls), **{name: getattr(flight, name) for name in names})


def _group(tracks: Mapping[int, Track], key: Callable[[Track], Any]) -> dict[Any, list[int]]:
    """Return the ranks with the same key."""
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for rank, track in tracks.items():
        groups[key(track)].append(rank)
    return groups


def _say_where(track: Track, since_s: float | None = None) -> str:
    """`in load at data.py:9 for 41 s (step 150, 3 % CPU)`."""
    for_s = "" if since_s is None else f" {say_for(since_s, track.told_s, track.first_s)}"
    step = "" if track.stack.counter is None else "{} {}, ".format(*track.stack.counter)
    is_blocked = track.look.state is ProcessState.BLOCKED
    how = "waits in the kernel, state D" if is_blocked else f"{100 * (track.cpu_share or 0.0):.0f} % CPU"
    return f"{track.stack.where}{for_s} ({step}{how})"


def _be(ranks: Collection[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
