"""The guard as the leader uses it: what it believes, what it orders, and that nothing it is told can break it."""

from __future__ import annotations

import math
import os
import re
import signal
import traceback

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.guard import mismatch
from allranks.guard.verdict import EXPLAIN_S, Guard
from allranks.model.beat import CallSeen, GroupSeen, LinkSeen, NodeBeat, ProcessState, RankBeat, TrySeen
from allranks.model.cluster import GuardTable
from allranks.model.finding import Finding
from allranks.model.fix import Reader
from allranks.wire.connection import decode_frames, encode_frame
from allranks.wire.protocol import Beat, Plan, WorkerEnd

from .scenes import FAST, address, away, beat, call, members, scene, waiting

GLOO_LOST = "RuntimeError: [pair.cc:547] Connection closed by peer [10.0.0.2]:41"
GLOO_ABORT = "gloo::EnforceNotMet ... Received data size doesn't match expected size"


def plan(num: int = 3, *, generation: int = 0) -> Plan:
    return Plan(
        members=members(num),
        node_index=0,
        attempt=0,
        store_address="10.0.0.1",
        store_port=1,
        backend="gloo",
        backend_reason="",
        generation=generation,
    )


SLOW = msgspec.structs.replace(FAST, beat_s=0.5, gone_s=10)
"""A node that is silent for SETTLE_S is no suspect yet."""


def guard_of(num: int = 3, now_s: float = 100.0, *, job: str | None = None, settings: GuardTable = FAST) -> Guard:
    guard = Guard(settings, reader=Reader(job=job))
    addresses = {i: {network: address(i, network) for network in ("data", "control")} for i in range(num)}
    guard.begin(plan(num), now_s, addresses=addresses)
    return guard


def end(rank: int, exit_code: int = 1, *, at_s: float = 100.0, **more) -> WorkerEnd:
    return WorkerEnd(rank=rank, node=f"node{rank + 1:02}", exit_code=exit_code, time_s=at_s, **more)


def hear_all(guard: Guard, now_s: float, *ranks: RankBeat, **more) -> None:
    for index, rank in enumerate(ranks):
        guard.hear(Beat(node=beat(index, rank, **more)), now_s)


def test_ranks_that_wait_end_the_job_only_at_hang_s_although_another_one_has_left():
    guard = guard_of(4)
    hear_all(guard, 140.0, *(waiting(rank, num=4) for rank in range(4)))
    guard.ended(end(3, 0), 140.0)
    judged, waited_s = None, 0
    while judged is None and waited_s < FAST.hang_s + 10:
        waited_s += 1
        waits = [waiting(rank, call(5), num=4, for_s=float(waited_s)) for rank in (0, 1)]
        hear_all(guard, 140.0 + waited_s, *waits, away(2, num=4))
        judged = guard.judge(140.0 + waited_s)
    assert judged is not None
    assert (judged.findings[0].cause, judged.ranks) == ("AR408 stuck-rank", (2, 3))
    assert FAST.hang_s <= waited_s <= FAST.hang_s + 2


def test_an_exception_is_judged_when_others_had_the_time_to_break_too_and_not_worth_a_retry():
    guard = guard_of()
    guard.ended(end(1, message="ValueError: no label"), 100.1)
    assert guard.judge(100.3) is None
    judged = guard.judge(100.36)
    assert (judged.findings[0].cause, judged.ranks, judged.exit_code) == ("AR590 user-code-error", (1,), 1)
    assert (judged.is_retryable, judged.cures, judged.nodes) == (False, False, ())
    assert (judged.is_final, judged.told_within_s) == (False, 1.0)


def test_who_broke_before_the_signal_came_is_named_when_all_have_ended():
    guard = guard_of()
    guard.ended(end(1, -11), 100.1)
    assert guard.judge(100.4).ranks == (1,)
    guard.ended(end(2, -15, ended_by_us=True), 100.5)
    guard.ended(end(0, message="ValueError: x", at_s=100.45), 100.5)
    judged = guard.judge(100.6)
    assert [part.ranks for part in judged.parts] == [(1,), (0,)]
    assert (judged.findings[0].victims, judged.is_final) == ((2,), True)


def test_ends_of_one_node_keep_their_order_whatever_is_learned_of_its_clock_meanwhile():
    guard = Guard(FAST)
    guard.begin(msgspec.structs.replace(plan(2), members=members(2, workers=2)), 90.0)
    for second, rank in enumerate((0, 1)):  # the first way took 1 s, the second one 2 ms
        now_s, way_s = 100.0 + second, 0.001 if second else 0.5
        node = msgspec.structs.replace(beat(0, away(0, num=4)), time_ns=int((now_s - way_s) * 1e9))
        guard.hear(Beat(node=node, ping_ns=int((now_s - 1.2 * way_s) * 1e9)), now_s)
        told = WorkerEnd(rank=rank, node="node01", exit_code=1, time_s=99.0, message=f"ValueError: {'ab'[rank]}")
        guard.ended(told, now_s, wall_s=98.0 + second / 100)
    assert guard.judge(102.0).findings[0].notes == ("also by itself: rank 1, ValueError, 10 ms later",)


def test_nothing_else_is_judged_while_others_may_still_break():
    guard = guard_of()
    hear_all(guard, 99.0, *(away(rank, num=3) for rank in range(3)))
    guard.ended(end(1, message="ValueError: x"), 100.0)
    stopped = away(2, num=3, state=ProcessState.STOPPED, state_for_s=60.0)
    guard.hear(Beat(node=beat(2, stopped)), 100.1)
    assert guard.judge(100.1) is None
    assert guard.judge(100.3).ranks == (1,)


def test_the_times_of_two_nodes_are_compared_by_their_clocks_as_far_as_these_are_known():
    """Rank 1 broke first, by the nodes' clocks; its message came late."""
    guard, clock_s = guard_of(), {0: 5000.0, 1: 7000.0}
    for index, ahead_s in clock_s.items():  # there and back in 4 ms
        node = msgspec.structs.replace(beat(index, away(index, num=3)), time_ns=int((99.998 + ahead_s) * 1e9))
        guard.hear(Beat(node=node, ping_ns=int(99.996e9)), 100.0)
    for rank, at_s in {0: 100.3, 1: 100.1}.items():
        told = end(rank, message=f"ValueError: {'ab'[rank]}", at_s=100.5)
        guard.ended(told, 100.5, wall_s=at_s + clock_s[rank])
    first, second = guard.judge(100.8).findings
    assert (first.ranks, first.notes, second.ranks) == (
        (1,),
        ("also by itself: rank 0, ValueError, 0.2 s later",),
        (0,),
    )


@pytest.mark.parametrize(("exit_code", "is_retryable"), [(-9, True), (-11, True), (3, False), (1, False)])
def test_a_signal_is_worth_a_retry_and_an_exit_code_is_not(exit_code, is_retryable):
    guard = guard_of()
    guard.ended(end(1, exit_code), 100.0)
    assert guard.judge(101.0).is_retryable is is_retryable


@pytest.mark.parametrize(
    ("message", "is_retryable"),
    [
        ("ValueError: no label", False),
        ("ConnectionResetError: [Errno 104] Connection reset by peer: s3://bucket/shard-00017", True),
        ("ReadTimeout: HTTPSConnectionPool(host='hf.co', port=443): Read timed out. (read timeout=10)", True),
    ],
)
def test_an_error_of_the_users_own_network_client_is_worth_a_retry(message, is_retryable):
    guard = guard_of()
    guard.ended(end(0, message=GLOO_LOST), 100.0)
    guard.ended(end(1, message=message), 100.0)
    judged = guard.judge(100.3)
    assert (judged.findings[0].cause, judged.ranks) == ("AR590 user-code-error", (1,))
    assert judged.is_retryable is is_retryable


KILLED = "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed. "
BUS = (
    "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that dataloader's "
    "workers are out of shared memory. Please try to raise your shared memory limit."
)
UNEXPECTED = "RuntimeError: DataLoader worker (pid(s) 4242) exited unexpectedly"
WORKER = "its DataLoader worker (pid 4242)"
BY_SIGKILL = "was killed by SIGKILL (signal 9), not by allranks"
LOADER_TABLE = {
    # name: (message, traceback, what the node says besides, cause, what the finding says of the worker)
    "killed": (KILLED, "", {}, "AR407", BY_SIGKILL),
    "killed, and the kernel says memory": (KILLED, "", {"oom_kills": 1}, "AR008", "was killed: the node, or the job's"),
    "gone": (UNEXPECTED, "", {}, "AR407", "exited unexpectedly"),
    "gone, and the kernel says memory": (UNEXPECTED, "", {"oom_kills": 1}, "AR008", "was killed: the node"),
    "killed, as the first of two exceptions says": (UNEXPECTED, KILLED, {}, "AR407", BY_SIGKILL),
    "bus error": (BUS, "", {"shm_used": 0.5}, "AR407", "was killed by SIGBUS (signal 7), not by allranks"),
    "bus error, and /dev/shm is full": (BUS, "", {"shm_used": 0.97}, "AR607", "got SIGBUS: /dev/shm was full"),
    "bus error, as the first of two exceptions says": (UNEXPECTED, BUS, {"shm_used": 1.0}, "AR607", "got SIGBUS"),
}


@pytest.mark.parametrize("case", LOADER_TABLE)
def test_a_data_loaders_process_that_died_is_no_error_of_the_code(case):
    message, trace, more, cause, said = LOADER_TABLE[case]
    guard = guard_of()
    hear_all(guard, 99.5, *(away(rank, num=3) for rank in range(3)))
    guard.hear(Beat(node=beat(1, away(1, num=3), **more)), 99.9)
    guard.ended(end(1, message=message, traceback=trace), 100.0)
    guard.hear(Beat(node=beat(1, away(1, num=3), **more)), 100.2)
    judged = guard.judge(101.0)
    assert judged.findings[0].cause_id == cause
    assert judged.findings[0].message.startswith(f"{WORKER} {said}")
    assert (judged.ranks, judged.is_retryable, judged.exit_code) == ((1,), True, 1)


@pytest.mark.parametrize(
    "message",
    [
        "ValueError: Caught ValueError in DataLoader worker process 0.",
        "RuntimeError: DataLoader worker (pid 42) exited unexpectedly with exit code 1. Details are lost due to",
    ],
)
def test_an_error_of_the_code_in_a_data_loaders_process_stays_one(message):
    guard = guard_of()
    guard.ended(end(1, message=message), 100.0)
    judged = guard.judge(101.0)
    assert (judged.findings[0].cause, judged.is_retryable) == ("AR590 user-code-error", False)


@pytest.mark.torch
def test_torch_says_of_a_killed_process_what_we_read():
    data = pytest.importorskip("torch.utils.data")

    class Killer(data.Dataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError) as raised:
        list(data.DataLoader(Killer(), num_workers=1))
    trace = "".join(traceback.format_exception(raised.value))
    guard = guard_of()
    guard.ended(end(1, message=f"RuntimeError: {raised.value}", traceback=trace), 100.0)
    finding = guard.judge(101.0).findings[0]
    assert finding.cause == "AR407 dead-rank"
    assert re.fullmatch(
        r"its DataLoader worker \(pid \d+\) was killed by SIGKILL \(signal 9\), not by allranks", finding.message
    )


def test_all_well_is_no_verdict():
    guard = guard_of()
    for rank in range(3):
        assert not guard.is_all_well
        guard.ended(end(rank, 0), 100.0 + rank)
    assert guard.is_all_well
    assert guard.judge(103.0) is None
    assert guard.judge(1000.0) is None
    assert guard.lines(1000.0) == []
    assert guard.wants(1000.0) == {}


def arriving(rank: int, *, silent_s: float = 0.1, phase: str = "arriving") -> RankBeat:
    return RankBeat(rank=rank, pid=100 + rank, silent_s=silent_s, main_at="train.py:5 in main", phase=phase)


def judge_for(guard: Guard, from_s: float, for_s: float, *ranks: RankBeat):
    """What the guard says first while these ranks stay as they are, and when."""
    for tick in range(round(for_s / 0.2)):
        now_s = from_s + 0.2 * tick
        hear_all(guard, now_s, *ranks)
        if (judged := guard.judge(now_s)) is not None:
            return judged, now_s
    return None, from_s + for_s


@pytest.mark.parametrize("others_come_after_s", [0.0, 30.0])
def test_a_rank_that_ends_with_0_while_others_wait_for_it_to_come_is_named_within_5_s(others_come_after_s):
    guard = guard_of()
    guard.ended(end(1, 0), 100.0)
    importing = [arriving(rank, phase="") for rank in range(3)]
    judged, came_s = judge_for(guard, 100.0, others_come_after_s, *importing)
    assert judged is None
    judged, judged_s = judge_for(guard, came_s, 20.0, arriving(0), importing[1], arriving(2))
    assert judged_s <= came_s + 5
    finding = judged.findings[0]
    assert (finding.cause, finding.ranks, finding.confidence) == ("AR401 missing-rank", (1,), "certain")
    assert finding.message == (
        "it exited with code 0 before it reached init_process_group, where ranks 0,2 waited for it"
    )
    assert (judged.exit_code, judged.is_retryable, finding.victims) == (1, False, (0, 2))


@pytest.mark.parametrize(
    "rank",
    [arriving(0, phase="init"), arriving(0, phase="training"), arriving(0, silent_s=30.0)],
    ids=["in a group of its own", "trains", "told so long ago"],
)
def test_a_rank_that_nobody_waits_for_may_end_with_0(rank):
    guard = guard_of()
    guard.ended(end(1, 0), 100.0)
    assert judge_for(guard, 100.0, 20.0, rank, arriving(1, phase=""), arriving(2, phase="training"))[0] is None


def test_an_end_that_is_told_twice_is_one():
    guard = guard_of()
    for _ in range(3):
        guard.ended(end(0, 0), 100.0)
    assert not guard.is_all_well
    assert guard.judge(100.1) is None


def test_victims_wait_for_their_culprit():
    guard = guard_of()
    guard.ended(end(0, message=GLOO_LOST), 100.0)
    assert guard.judge(100.1) is None
    guard.ended(end(2, message="ValueError: x", at_s=100.2), 100.3)
    assert guard.judge(100.6).ranks == (2,)


def test_a_late_end_still_names_the_culprit_where_there_were_only_victims():
    guard = guard_of()
    guard.ended(end(0, message=GLOO_LOST), 100.0)
    first = guard.judge(101.9)
    assert (first.findings[0].cause, first.is_final) == ("AR490 collective-timeout", False)
    guard.ended(end(2, message="ValueError: x", at_s=100.2), 103.0)
    assert guard.judge(103.3).findings[0].message == "ValueError: x"


@pytest.mark.parametrize(("num", "most"), [(256, 256), (2048, 20)], ids=["small", "large"])
def test_the_beats_of_a_large_job_do_not_each_bring_a_look_for_what_explains_a_crash(num, most, monkeypatch):
    """2,048 looks took 12 s in which the leader did nothing else."""
    looks, look = [], mismatch.find_mismatch
    monkeypatch.setattr(mismatch, "find_mismatch", lambda scene: looks.append(1) or look(scene))
    guard = guard_of(num)
    guard.ended(end(0, message=GLOO_LOST), 100.0)
    for index in range(num):
        guard.hear(Beat(node=beat(index, away(index, num=num))), 100 + index / num)
    assert 2 <= len(looks) <= most


RANK_2_LEAVES = [away(rank, num=3, phase="leaving" if rank == 2 else "training") for rank in range(3)]


def test_victims_wait_for_a_rank_on_its_way_out():
    guard = guard_of()
    guard.ended(end(0, message=GLOO_LOST), 100.0)
    hear_all(guard, 101.4, *RANK_2_LEAVES)
    assert guard.judge(104.9) is None
    guard.ended(end(2, message="ValueError: x", at_s=100.2), 105.0)
    assert guard.judge(105.3).ranks == (2,)


@pytest.mark.parametrize("speaks", [True, False])
def test_victims_wait_for_the_next_word_of_each_node_where_ranks_still_run(speaks: bool):
    """Rank 1 is done, and rank 0 lost a connection: to it, or to a node that has died since it last spoke?"""
    guard = guard_of(settings=SLOW)
    hear_all(guard, 99.9, *(away(rank, num=3) for rank in range(3)))
    guard.ended(end(1, 0), 100.0)
    guard.ended(end(0, message=GLOO_LOST, at_s=100.1), 100.1)
    hear_all(guard, 100.2, *(away(rank, num=3) for rank in range(2)))
    assert guard.judge(101.8) is None
    if speaks:
        guard.hear(Beat(node=beat(2, away(2, num=3))), 101.9)
        assert guard.judge(101.9).ranks == (1,)
    else:
        asked_s = (102.0 + second for second in range(int(EXPLAIN_S + SLOW.gone_s)))
        judged = next(filter(None, map(guard.judge, asked_s)))
        assert judged.findings[0].confidence == "undecided"


NCCL_TIMEOUT = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=8, "
    "Timeout(ms)=600000) ran for 600012 milliseconds before timing out."
)
GLOO_TIMEOUT = (
    "RuntimeError: [../gloo/tcp/unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation to complete"
)


@pytest.mark.parametrize(("exit_code", "words"), [(-6, NCCL_TIMEOUT), (1, GLOO_TIMEOUT)], ids=["NCCL", "Gloo"])
def test_a_collective_that_timed_out_is_explained_by_who_had_not_come(exit_code, words):
    guard = guard_of(job="4711")
    seen = [*(waiting(rank, call(), num=3, for_s=50.0) for rank in (0, 1)), away(2, num=3)]
    hear_all(guard, 101.0, *seen)
    guard.ended(end(0, exit_code, stderr_tail=words), 101.5)
    hear_all(guard, 102.0, *seen)
    hear_all(guard, 103.0, *seen)
    judged = guard.judge(103.5)
    assert (judged.findings[0].cause, judged.ranks) == ("AR408 stuck-rank", (2,))
    assert judged.findings[0].fix == (
        "read the rank's last lines, and its stack (rank_2.stack.txt) if allranks ended it; allranks stack 4711 "
        "while it hangs; only slow: a longer init_process_group(timeout=...)"
    )


def test_ranks_that_all_timed_out_at_once_are_explained_by_who_had_not_come():
    """Their last word is that they leave, and Gloo counts the call that timed out as done."""
    guard = guard_of()
    seen = [*(waiting(rank, call(), num=3, for_s=600.0) for rank in (0, 1)), away(2, num=3)]
    hear_all(guard, 101.0, *seen)
    for index, rank in enumerate(seen[:2]):
        done = [msgspec.structs.replace(group, completed=group.enqueued, waiting_s=0.0) for group in rank.groups]
        calls = [msgspec.structs.replace(known, is_done=True) for known in rank.calls]
        seen[index] = msgspec.structs.replace(rank, phase="leaving", groups=tuple(done), calls=tuple(calls))
    hear_all(guard, 101.5, *seen)
    for rank in (0, 1):
        guard.ended(end(rank, message=GLOO_TIMEOUT, at_s=101.5), 101.6)
    hear_all(guard, 102.0, *seen)
    hear_all(guard, 103.0, *seen)
    judged = guard.judge(103.5)
    assert (judged.findings[0].cause, judged.ranks, judged.exit_code) == ("AR408 stuck-rank", (2,), 124)
    assert judged.findings[0].message.endswith("ranks 0-1 waited for it in collective 5 of group 0")


def test_a_rank_that_leaves_for_ever_is_not_waited_for():
    guard = guard_of()
    guard.ended(end(0, message=GLOO_LOST), 100.0)
    for tick in range(100):
        hear_all(guard, 100 + tick / 10, *RANK_2_LEAVES)
        assert guard.judge(100 + tick / 10) is None
    hear_all(guard, 110.0, *RANK_2_LEAVES)
    assert guard.judge(110.0).findings[0].cause == "AR490 collective-timeout"


def test_an_abort_for_a_size_is_explained_by_the_calls():
    guard = guard_of()
    hear_all(guard, 100.0, *(waiting(i, call(dtype="Double" if i == 2 else "Float"), num=3) for i in range(3)))
    guard.ended(end(1, -6, stderr_tail=GLOO_ABORT), 100.1)
    guard.ended(end(0, message=GLOO_LOST), 100.2)
    hear_all(guard, 100.3, *(waiting(i, call(dtype="Double" if i == 2 else "Float"), num=3) for i in range(3)))
    for tick in range(20):
        if (judged := guard.judge(100.3 + tick * 0.1)) is not None:
            break
    assert (judged.findings[0].cause, judged.ranks, judged.is_retryable) == ("AR410 collective-mismatch", (2,), False)


def test_an_abort_that_nothing_explains_is_undecided():
    guard = guard_of()
    guard.ended(end(1, -6, stderr_tail=GLOO_ABORT), 100.0)
    judged = guard.judge(101.9)
    assert (judged.findings[0].cause, judged.findings[0].confidence) == ("AR410 collective-mismatch", "undecided")


def test_a_sigkill_beside_a_counted_kill_is_out_of_memory():
    guard = guard_of()
    hear_all(guard, 100.0, *(away(i, num=3) for i in range(3)), oom_kills=0)
    guard.ended(end(1, -9), 100.1)
    assert guard.judge(100.15) is None
    guard.hear(Beat(node=beat(1, away(1, num=3), oom_kills=1)), 100.3)
    judged = guard.judge(100.4)
    assert (judged.findings[0].cause, judged.ranks, judged.exit_code) == ("AR008 host-oom-kill", (1,), 137)


def test_a_kill_long_before_is_not_this_one():
    guard = guard_of()
    hear_all(guard, 100.0, *(away(i, num=3) for i in range(3)), oom_kills=3)
    for at_s in range(101, 130):
        hear_all(guard, float(at_s), *(away(i, num=3) for i in range(3)), oom_kills=3)
    guard.ended(end(1, -9), 130.0)
    assert guard.judge(130.7).findings[0].cause == "AR407 dead-rank"


def test_beats_of_another_generation_or_of_nobody_are_not_believed():
    guard = guard_of()
    stopped = away(1, num=3, state=ProcessState.STOPPED, state_for_s=60.0)
    for node in (
        msgspec.structs.replace(beat(1, stopped), generation=1),
        msgspec.structs.replace(beat(1, stopped), node_index=7),
        msgspec.structs.replace(beat(1, stopped), node_index=-1),
        beat(0, stopped),  # of another node's rank
    ):
        guard.hear(Beat(node=node), 100.0)
    assert guard.judge(100.1) is None
    guard.hear(Beat(node=beat(1, stopped)), 100.2)
    assert guard.judge(100.2).ranks == (1,)


def test_a_new_generation_begins_with_nothing():
    guard = guard_of()
    guard.ended(end(1, -9), 100.0)
    assert guard.judge(101.0) is not None
    guard.begin(plan(2, generation=1), 110.0)
    assert guard.judge(110.1) is None


def test_who_is_blocked_is_told_for_the_end():
    guard = guard_of(4)
    beats = [
        waiting(0, call(), num=4),
        away(1, num=4, state=ProcessState.STOPPED, state_for_s=2.0),
        away(2, num=4, silent_s=5.0),
        away(3, num=4),
    ]
    hear_all(guard, 100.0, *beats)
    assert guard.judge(100.0).blocked == (0, 1, 2)


def test_a_node_that_comes_back_before_its_first_beat_is_not_gone_as_soon_as_it_is_lost_again():
    guard = guard_of(2)
    for now_s in (100 + each / 2 for each in range(15)):
        hear_all(guard, now_s, away(0, num=2))
        if now_s == 106.0:
            guard.returned(1, now_s)
        if now_s in (104.0, 106.5):
            guard.lost(1, "reset", now_s)
        assert guard.judge(now_s) is None, now_s


def test_tries_are_ordered_once_a_round():
    guard = guard_of()
    hear_all(guard, 100.0, *(away(i, num=3) for i in range(3)))
    for tick in range(15):
        now_s = 100.0 + tick * 0.1
        for index in (0, 1):
            guard.hear(Beat(node=beat(index, away(index, num=3))), now_s)
        wanted = guard.wants(now_s)
        if wanted:
            break
    assert 0.8 < now_s - 100.0 < 1.1
    assert sorted(wanted) == [0, 1]
    assert {(t.node_index, t.network) for t in wanted[0].targets} == {(2, "data"), (2, "control")}
    assert guard.wants(now_s + 0.1) == {}


NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1e4)
TEXTS = st.text(max_size=20) | st.just("x" * 1000)
INTS = st.integers(-3, 9) | st.integers(-(2**63), 2**63 - 1)
CALLS = st.builds(
    CallSeen,
    group=st.sampled_from(["0", "1"]) | TEXTS,
    seq=INTS,
    op=st.sampled_from(["all_reduce", "broadcast", "recv"]) | TEXTS,
    sizes=st.lists(st.lists(INTS, max_size=3).map(tuple), max_size=3).map(tuple),
    dtypes=st.lists(TEXTS, max_size=2).map(tuple),
    is_done=st.booleans(),
    created_ns=INTS,
    place=TEXTS,
    peer=st.none() | INTS,
)
GROUPS = st.builds(
    GroupSeen,
    name=st.sampled_from(["0", "1"]) | TEXTS,
    ranks=st.lists(INTS, max_size=4).map(tuple),
    enqueued=INTS,
    completed=INTS,
    waiting_s=NUMBERS,
)
RANKS = st.builds(
    RankBeat,
    rank=INTS,
    pid=INTS,
    state=st.sampled_from(ProcessState),
    state_for_s=NUMBERS,
    silent_s=st.none() | NUMBERS,
    main_at=TEXTS,
    step=st.none() | INTS,
    groups=st.lists(GROUPS, max_size=2).map(tuple),
    calls=st.lists(CALLS, max_size=3).map(tuple),
    lags=st.lists(st.tuples(st.sampled_from(["0", "1"]), INTS, INTS), max_size=3).map(tuple),
)
ADDRESSES = st.sampled_from([address(0), address(1), address(2)]) | TEXTS
LINKS = st.builds(
    LinkSeen,
    own_address=ADDRESSES,
    peer_address=ADDRESSES,
    unacked_bytes=INTS,
    stalled_s=NUMBERS,
    retransmits=INTS,
)
TRIES = st.builds(
    TrySeen,
    target=INTS,
    network=st.sampled_from(["data", "control", "x"]),
    connects=st.booleans(),
    refused=st.booleans(),
    carries=st.none() | st.booleans(),
    error=TEXTS,
    age_s=NUMBERS,
)
NODES = st.builds(
    NodeBeat,
    node_index=st.integers(-1, 3),
    generation=st.integers(0, 1),
    ranks=st.lists(RANKS, max_size=2).map(tuple),
    links=st.lists(LINKS, max_size=2).map(tuple),
    tries=st.lists(TRIES, max_size=3).map(tuple),
    addresses=st.lists(ADDRESSES, max_size=2).map(tuple),
    try_ports=st.tuples(INTS, INTS),
    oom_kills=INTS,
    time_ns=INTS,
)
ENDS = st.builds(
    WorkerEnd,
    rank=st.integers(-1, 4),
    node=TEXTS,
    exit_code=st.sampled_from([0, 1, -6, -9, -11, 3]),
    time_s=st.floats(0, 2000),
    ended_by_us=st.booleans(),
    message=st.none()
    | st.sampled_from([GLOO_LOST, "ValueError: x", "Timed out waiting 5ms for recv operation to complete"])
    | TEXTS,
    stderr_tail=st.none() | st.just(GLOO_ABORT) | TEXTS,
)
WORDS = st.one_of(
    st.tuples(st.just("hear"), NODES, INTS, INTS),
    st.tuples(st.just("ended"), ENDS),
    st.tuples(st.just("lost"), st.integers(0, 2), TEXTS),
)


def as_it_comes(told: Beat) -> Beat:
    (heard,) = decode_frames(bytearray(encode_frame(told)))
    return heard


@given(st.lists(st.tuples(st.floats(0, 40), WORDS), max_size=12))
def test_nothing_that_is_said_breaks_the_guard(said):
    guard = guard_of()
    now_s = 100.0
    for after_s, (what, *words) in said:
        now_s += after_s
        if what == "hear":
            node, ping_ns, held_ns = words
            guard.hear(as_it_comes(Beat(node=node, ping_ns=ping_ns, held_ns=held_ns)), now_s)
        else:
            getattr(guard, what)(*words, now_s)
        for tick in range(4):
            guard.wants(now_s + tick * 0.3)
            guard.lines(now_s + tick * 0.3)
            judged = guard.judge(now_s + tick * 0.3)
            if judged is not None:
                as_json = msgspec.json.encode(judged.findings)
                assert msgspec.json.decode(as_json, type=tuple[Finding, ...]) == judged.findings
                assert all(0 <= rank < 3 for rank in judged.ranks)
        now_s += 1.0


@given(NODES)
def test_what_the_guard_keeps_is_finite_and_of_the_node(node):
    node = msgspec.structs.replace(node, node_index=1, generation=0)
    picture = scene([], num=3)
    assert picture.hear(as_it_comes(Beat(node=node)).node, 100.0)
    kept = picture.nodes[1].beat
    assert set(picture.ranks) <= {1}
    for rank in kept.ranks:
        assert rank.rank == 1
        assert all(math.isfinite(group.waiting_s) and group.waiting_s >= 0 for group in rank.groups)
    assert all(math.isfinite(link.stalled_s) for link in kept.links)
    assert all(0 <= each.target < 3 for each in kept.tries)


def test_a_sound_beat_is_handed_on_as_it_came():
    told = Beat(node=beat(1, waiting(1, call(), num=3)))
    assert as_it_comes(told) == told


BAD_CALL = call(6, place="x" * 301)
BAD_GROUP = GroupSeen(name="1", waiting_s=math.nan)
BAD_RANK = RankBeat(rank=2, state_for_s=math.inf)
BAD_LINK = LinkSeen(own_address="", peer_address="", unacked_bytes=-1, stalled_s=1.0, retransmits=0)
BAD_TRY = TrySeen(target=0, network="moon", connects=True)


def test_one_bad_item_costs_itself_alone():
    good = waiting(1, call(5), num=3)
    rank = msgspec.structs.replace(good, calls=(*good.calls, BAD_CALL), groups=(BAD_GROUP, *good.groups))
    told = Beat(node=beat(1, rank, BAD_RANK, links=[BAD_LINK], tries=[BAD_TRY]), ping_ns=7)
    assert as_it_comes(told) == Beat(node=beat(1, good), ping_ns=7)


def test_a_flood_of_calls_and_groups_is_cut():
    rank = RankBeat(
        rank=1,
        groups=tuple(GroupSeen(name=str(i)) for i in range(2000)),
        calls=tuple(call(i + 1) for i in range(9000)),
    )
    (kept,) = as_it_comes(Beat(node=beat(1, rank))).node.ranks
    assert (len(kept.groups), len(kept.calls)) == (512, 4096)
    assert kept.calls[-1].seq == 9000


@pytest.mark.parametrize("may_leave", [True, False])
def test_ranks_that_were_told_to_save_and_leave_are_not_blamed_by_those_who_wait_for_them(may_leave: bool):
    guard = guard_of(3)
    hear_all(guard, 100.0, *(away(rank, num=3) for rank in range(3)))
    if may_leave:
        guard.expect_leaving()
    guard.ended(end(0, 0), 101.0)
    for second in range(1, 20):
        waits = [waiting(rank, call(5), num=3, for_s=float(second)) for rank in (1, 2)]
        for rank in waits:
            guard.hear(Beat(node=beat(rank.rank, rank)), 101.0 + second)
        judged = guard.judge(101.0 + second)
    assert (judged is None) == may_leave
