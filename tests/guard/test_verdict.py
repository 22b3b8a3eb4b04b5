"""The guard as the leader uses it: what it believes, what it orders, and that nothing it is told can break it."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allranks.guard.verdict import Guard
from allranks.guard.vet import vet_beat
from allranks.model.beat import CallSeen, GroupSeen, LinkSeen, NodeBeat, ProcessState, RankBeat, TrySeen
from allranks.model.finding import Finding
from allranks.wire.protocol import Beat, Plan, WorkerEnd

from .scenes import FAST, address, away, beat, call, members, waiting

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


def guard_of(num: int = 3, now_s: float = 100.0) -> Guard:
    guard = Guard(FAST)
    addresses = {i: {network: address(i, network) for network in ("data", "control")} for i in range(num)}
    guard.begin(plan(num), now_s, addresses=addresses)
    return guard


def end(rank: int, exit_code: int = 1, *, at_s: float = 100.0, **more) -> WorkerEnd:
    return WorkerEnd(rank=rank, local_rank=0, node=f"node{rank + 1:02}", exit_code=exit_code, time_s=at_s, **more)


def hear_all(guard: Guard, now_s: float, *ranks: RankBeat, **more) -> None:
    for index, rank in enumerate(ranks):
        guard.hear(Beat(node=beat(index, rank, **more)), now_s)


def test_an_exception_is_judged_at_once_and_not_worth_a_retry():
    guard = guard_of()
    guard.ended(end(1, message="ValueError: no label"), 100.1)
    judged = guard.judge(100.1)
    assert (judged.findings[0].cause, judged.ranks, judged.exit_code) == ("AR590 user-code-error", (1,), 1)
    assert (judged.is_retryable, judged.cures, judged.nodes, judged.is_final) == (False, False, (), True)


@pytest.mark.parametrize(("exit_code", "is_retryable"), [(-9, True), (-11, True), (3, False), (1, False)])
def test_a_signal_is_worth_a_retry_and_an_exit_code_is_not(exit_code, is_retryable):
    guard = guard_of()
    guard.ended(end(1, exit_code), 100.0)
    assert guard.judge(101.0).is_retryable is is_retryable


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
    assert guard.judge(100.3).ranks == (2,)


def test_a_late_end_still_names_the_culprit_where_there_were_only_victims():
    guard = guard_of()
    guard.ended(end(0, message=GLOO_LOST), 100.0)
    first = guard.judge(101.9)
    assert (first.findings[0].cause, first.is_final) == ("AR490 collective-timeout", False)
    guard.ended(end(2, message="ValueError: x", at_s=100.2), 103.0)
    assert guard.judge(103.0).findings[0].message == "ValueError: x"


RANK_2_LEAVES = [away(rank, num=3, phase="leaving" if rank == 2 else "training") for rank in range(3)]


def test_victims_wait_for_a_rank_on_its_way_out():
    guard = guard_of()
    guard.ended(end(0, message=GLOO_LOST), 100.0)
    hear_all(guard, 101.4, *RANK_2_LEAVES)
    assert guard.judge(104.9) is None
    guard.ended(end(2, message="ValueError: x", at_s=100.2), 105.0)
    assert guard.judge(105.0).ranks == (2,)


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
    judged = guard.judge(100.3)
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
    local_rank=st.just(0),
    node=TEXTS,
    exit_code=st.sampled_from([0, 1, -6, -9, -11, 3]),
    time_s=st.floats(0, 2000),
    ended_by_us=st.booleans(),
    message=st.none()
    | st.sampled_from([GLOO_LOST, "ValueError: x", "Timed out waiting 5ms for recv operation"])
    | TEXTS,
    stderr_tail=st.none() | st.just(GLOO_ABORT) | TEXTS,
)
WORDS = st.one_of(
    st.tuples(st.just("hear"), NODES, INTS, INTS),
    st.tuples(st.just("ended"), ENDS),
    st.tuples(st.just("lost"), st.integers(0, 2), TEXTS),
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(st.tuples(st.floats(0, 40), WORDS), max_size=12))
def test_nothing_that_is_said_breaks_the_guard(said):
    guard = guard_of()
    now_s = 100.0
    for after_s, (what, *words) in said:
        now_s += after_s
        if what == "hear":
            node, ping_ns, held_ns = words
            guard.hear(Beat(node=node, ping_ns=ping_ns, held_ns=held_ns), now_s)
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
def test_what_is_vetted_is_finite_and_of_the_node(node):
    vetted = vet_beat(node, members(3)[1], 3)
    for rank in vetted.ranks:
        assert rank.rank == 1
        assert all(math.isfinite(group.waiting_s) and group.waiting_s >= 0 for group in rank.groups)
    assert all(math.isfinite(link.stalled_s) for link in vetted.links)
    assert all(0 <= each.target < 3 for each in vetted.tries)


def test_a_sound_beat_is_handed_on_as_it_came():
    node = beat(1, waiting(1, call(), num=3))
    assert vet_beat(node, members(3)[1], 3) == node


def test_a_flood_of_calls_and_groups_is_cut():
    rank = RankBeat(
        rank=1,
        groups=tuple(GroupSeen(name=str(i)) for i in range(2000)),
        calls=tuple(call(i + 1) for i in range(9000)),
        main_at="x\x1b[2J" * 500,
    )
    (vetted,) = vet_beat(beat(1, rank), members(3)[1], 3).ranks
    assert (len(vetted.groups), len(vetted.calls)) == (512, 4096)
    assert vetted.main_at.isprintable()
    assert len(vetted.main_at) <= 300
