"""What follows from what torch's recorders tell of ranks that wait? Written looks at one node, four a second."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from allranks.model.beat import CallSeen
from allranks.model.node_look import FlightSeen, NodeLook, ProcessLook, ProcessRole, SocketSeen, StackSeen
from allranks.watch.judge import Opinion, judge
from allranks.watch.since import LookHistory
from allranks.watch.standstill import RanksNow

SECOND_S = 9.0
"""When ranks are asked again, five seconds after the first time."""


def told(op: str = "all_reduce", *, group: str = "1", called_s: float = 1.0, **more: Any) -> FlightSeen:
    """What a rank tells whose last call this is; `called_s` after the first look."""
    about = {"members": more.pop("members", {group: (0, 1, 2)}), "formed_again": more.pop("formed_again", ())}
    call = CallSeen(**{"group": group, "seq": 5, "op": op, "sizes": ((4,),), "dtypes": ("Float",)} | more)
    return FlightSeen(at_s=0.0, called_s=1000.0 + called_s, calls=(call,), is_whole=call.seq == 1, **about)


def stack(operation: str = "all_reduce", *, is_collective: bool = True) -> StackSeen:
    return StackSeen(at_s=0.0, operation=operation, place="train.py:7", is_collective=is_collective)


class Job:
    """A job of ranks that wait, each with a connection to rank 0; torch answers at 4 s, and at SECOND_S."""

    def __init__(self, flights: Mapping[int, FlightSeen], *, world_size: int = 3, **stacks: StackSeen) -> None:
        self.history, self.flights, self.now_s = LookHistory(), dict(flights), 0.0
        self.stacks = {rank: stacks.get(f"rank{rank}", stack()) for rank in flights}
        self.world_size = world_size
        self.opinion = Opinion()
        self.asked_s = 0.0

    def _process(self, rank: int, at_s: float) -> ProcessLook:
        flight = replace(self.flights[rank], at_s=self.asked_s) if self.asked_s else None
        return ProcessLook(
            pid=100 + rank % 8,
            role=ProcessRole.WORKER,
            rank=rank,
            world_size=self.world_size,
            sockets=tuple(self._sockets(rank)),
            stack=replace(self.stacks[rank], at_s=at_s),
            flight=flight,
        )

    def _sockets(self, rank: int) -> Iterator[SocketSeen]:
        for other in self.flights:
            ports = (4000 + other % 8, 5000 + other % 8)
            if other and rank in (0, other):
                own, peer = ports if rank == 0 else ports[::-1]
                ends = {"own_address": "10.0.0.1", "peer_address": "10.0.0.1", "own_port": own, "peer_port": peer}
                yield SocketSeen(**ends, acked_bytes=0, received_bytes=0)

    def pass_by(self, until_s: float) -> Opinion:
        """Look until then, and return what is wrong at the end."""
        while self.now_s < until_s:
            self.now_s += 0.25
            at_s = 1000.0 + self.now_s
            for due_s in (4.0, SECOND_S):
                if self.now_s == due_s:
                    self.asked_s = at_s
            processes = tuple(self._process(rank, at_s) for rank in self.flights)
            self.history.hear(NodeLook(node="n01", at_s=at_s, processes=processes), self.now_s)
            self.opinion = judge(self.history, self.now_s)
        return self.opinion


def differ(**about: Any) -> dict[int, FlightSeen]:
    """Rank 1 is in a broadcast, the others are in an all-reduce."""
    return {rank: told("broadcast" if rank == 1 else "all_reduce", **about) for rank in range(3)}


def job_that_differs(**about: Any) -> Job:
    return Job(differ(**about), rank1=stack("broadcast"))


def test_operations_that_differ_are_suspected() -> None:
    opinion = job_that_differs().pass_by(8.0)
    assert (opinion.verdicts, opinion.exit_code, opinion.culprits) == ((), 3, (1,))
    assert opinion.states[0].is_suspicion
    said = "at collective 5 of group 1 rank 1 called broadcast [4] Float, ranks 0,2 all_reduce [4] Float"
    assert opinion.states[0].text == f"mismatch suspected (likely), torch's flight recorder: {said}"


def test_a_rank_that_is_missing_is_a_state() -> None:
    behind = {0: told(group="0"), 1: told(seq=4, group="0", is_done=True), 2: told(group="0")}
    opinion = Job(behind).pass_by(12.0)
    assert (opinion.verdicts, opinion.states[0].ranks, opinion.exit_code) == ((), (1,), 3)
    assert opinion.states[0].text.startswith(
        "torch's flight recorder: rank 1 did not enter collective 5 (all_reduce) of group 0; ranks 0,2 waited in it"
    )


def test_ranks_that_have_called_shortly_before_they_were_asked_may_run() -> None:
    """What NVLink carries is not seen: such ranks run on, and each is somewhere else when it is asked."""
    flights = {rank: told(seq=500 + rank, called_s=SECOND_S - 1.0) for rank in range(3)}
    assert "torch" not in str(Job(flights).pass_by(12.0))
    flights = {rank: told(seq=500 + rank) for rank in range(3)}
    assert "torch's flight recorder" in Job(flights).pass_by(12.0).states[0].text


@pytest.mark.parametrize("seq", [5, 6])
def test_what_was_told_goes_once_newer_answers_tell_that_it_is_over(seq: int) -> None:
    """What NVLink carries is not seen to move: the ranks are through that number, or have called another one since."""
    job = job_that_differs()
    assert "torch" in str(job.pass_by(12.0).states)
    called_s = 1.0 if seq == 5 else 13.5
    job.flights = {rank: told(seq=seq, is_done=seq == 5, called_s=called_s) for rank in range(3)}
    job.asked_s = 1014.0
    assert "torch" not in str(job.pass_by(17.0).states)


# --- What may be anything ---------------------------------------------------------------------------------------------


def test_only_a_rank_whose_stack_is_in_a_collective_is_blocked_by_a_call_of_gloo_s() -> None:
    """With `async_op=True` the main thread may come to the other group's call: no circle is proven."""
    members = {"a": (0, 1), "b": (0, 1)}
    flights = {rank: told(seq=1, group=group, blocks=True, members=members) for rank, group in enumerate("ab")}
    asleep = stack("sleep", is_collective=False)
    proven = []
    for stacks in ({}, {"rank0": asleep, "rank1": asleep}):
        job = Job(flights, world_size=2, **stacks)
        job.pass_by(6.0)
        proven.append([stop.is_proven for stop in RanksNow(job.history, job.now_s).stops])
    assert proven == [[True], [False]]


def test_a_forged_size_of_the_job_or_rank_costs_neither_time_nor_memory() -> None:
    began_s = time.monotonic()
    job = Job(differ(group="0", members={}), world_size=1 << 40, rank1=stack("broadcast"))
    assert job.pass_by(12.0).states[0].is_suspicion
    assert job.opinion.limits == ("ranks 3-65535: no process was found",)
    flights: Sequence[FlightSeen] = [*differ(group="0", members={}).values()]
    Job(dict(zip((0, 1, (1 << 40) + 2), flights, strict=True))).pass_by(12.0)
    assert time.monotonic() - began_s < 30.0
