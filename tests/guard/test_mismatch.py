"""Who called something else than the others?"""

from __future__ import annotations

import pytest

from allranks.guard.mismatch import explain_abort, find_mismatch, judge_mismatch
from allranks.guard.scene import keep_calls
from allranks.model.beat import CallSeen, GroupSeen, RankBeat
from allranks.model.finding import Confidence

from .scenes import away, beat, call, end, scene, waiting

ABORT = "terminate called after throwing 'gloo::EnforceNotMet' ... Received data size doesn't match expected size"


def scene_of(*calls: CallSeen | tuple[CallSeen, ...] | None, **more):
    """One rank a node; None: nothing is known of its calls."""
    num = len(calls)
    beats = []
    for rank, own in enumerate(calls):
        own = own if isinstance(own, tuple) else () if own is None else (own,)
        beats.append(beat(rank, waiting(rank, *own, num=num) if own else away(rank, num=num)))
    return scene(beats, **more)


SAME = call()
TABLE = {
    # name: (calls, odd ranks or None, is decided)
    "all alike": ((SAME, SAME, SAME), None, True),
    "another operation": ((SAME, call(op="broadcast"), SAME), (1,), True),
    "another shape": ((SAME, SAME, call(size=9)), (2,), True),
    "another dtype": ((call(dtype="Double"), SAME, SAME), (0,), True),
    "two of five": ((SAME, call(size=9), SAME, call(size=9), SAME), (1, 3), True),
    "two ranks": ((SAME, call(size=9)), (0, 1), False),
    "two against two": ((SAME, call(size=9), SAME, call(size=9)), (0, 1, 2, 3), False),
    "the first number counts": (
        ((call(5), call(6)), (call(5, op="barrier", size=0), call(6, op="x")), (call(5), call(6))),
        (1,),
        True,
    ),
    "one rank skipped one, and all later ones are off": (
        (
            (call(5, size=1), call(6, size=100)),
            (call(5, size=100), call(6, size=1)),
            (call(5, size=1), call(6, size=100)),
        ),
        (1,),
        True,
    ),
    "only two of four have come": ((SAME, call(op="broadcast"), None, None), (0, 1), False),
    "spellings of one operation": (
        (call(op="_allgather_base"), call(op="all_gather_into_tensor"), call(op="allgather", size=9)),
        None,
        True,
    ),
    "a barrier, as NCCL's recorder has it and as Python called it": (
        (call(op="all_reduce_barrier", size=1), call(op="barrier", size=0)),
        None,
        True,
    ),
    "the same number of elements in another shape": (
        (SAME, CallSeen(group="0", seq=5, op="all_reduce", sizes=((4, 2),), dtypes=("Float",)), SAME),
        None,
        True,
    ),
    "a broadcast copies bytes": ((call(op="broadcast"), call(op="broadcast", size=4, dtype="Double")), None, True),
    "a broadcast of more bytes": (
        (call(op="broadcast"), call(op="broadcast", dtype="Double"), call(op="broadcast")),
        (1,),
        True,
    ),
    "a broadcast whose dtype one does not tell": (
        (call(op="broadcast"), CallSeen(group="0", seq=5, op="broadcast", sizes=((8,),))),
        None,
        True,
    ),
    "dtypes of one width": ((SAME, call(dtype="Int"), SAME), None, True),
    "sizes that may differ": ((call(op="scatter"), call(op="scatter", size=0), call(op="scatter", size=9)), None, True),
    "sizes that one does not tell": ((SAME, CallSeen(group="0", seq=5, op="all_reduce"), SAME), None, True),
    "a dtype beside unknown ones": (
        (CallSeen(group="0", seq=5, op="all_reduce"), call(dtype="Double"), SAME, SAME),
        (1,),
        True,
    ),
    "sends and receives": ((call(op="send"), call(op="recv"), call(op="recv")), None, True),
    "another group": ((SAME, call(op="broadcast", group="1"), SAME), None, True),
    "it ended everywhere": ((call(is_done=True), call(op="broadcast", is_done=True), call(is_done=True)), None, True),
    "it ended for some": ((call(is_done=True), call(op="broadcast"), call(is_done=True)), (1,), True),
    "numbers that are not known": ((call(-1), call(-1, op="broadcast"), call(-1)), None, True),
    "coalesced": (((SAME, SAME), (SAME, call(size=9)), (SAME, SAME)), None, True),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_majority_is_right(case):
    calls, odd, is_decided = TABLE[case]
    found = find_mismatch(scene_of(*calls))
    assert (None if found is None else found.odd) == odd
    assert found is None or found.is_decided is is_decided


def test_the_finding_says_who_called_what_and_where():
    picture = scene_of(SAME, call(dtype="Double", place="odd.py:3 in f"), SAME)
    judged = judge_mismatch(picture, find_mismatch(picture))
    finding = judged.findings[0]
    assert finding.message == (
        "at collective 5 of group 0 rank 1 called all_reduce [8] Double at odd.py:3 in f, "
        "ranks 0,2 called all_reduce [8] Float at train.py:12 in step"
    )
    assert (finding.cause, finding.node, finding.ranks) == ("AR410 collective-mismatch", "node02", (1,))
    assert (finding.confidence, finding.victims) == (Confidence.CERTAIN, (0, 2))
    assert (judged.exit_code, judged.is_retryable, judged.cures, judged.nodes) == (1, False, False, ())
    assert len(finding.evidence) == 3


def test_two_ranks_are_both_named():
    picture = scene_of(SAME, call(size=9))
    finding = judge_mismatch(picture, find_mismatch(picture)).findings[0]
    assert (finding.confidence, finding.ranks, finding.node) == (Confidence.UNDECIDED, (0, 1), None)
    assert "rank 0 called all_reduce [8]" in finding.message
    assert "rank 1 called all_reduce [9]" in finding.message


def test_a_done_call_of_a_rank_that_died_of_it_counts():
    picture = scene_of(call(is_done=True), call(op="broadcast", is_done=True), call(is_done=True), ends={0: end(0, -6)})
    assert find_mismatch(picture).odd == (1,)


def test_an_aborted_rank_of_unknown_call_is_odd_where_all_others_agree():
    judged = explain_abort(scene_of(SAME, None, SAME, ends={1: end(1, -6, stderr_tail=ABORT)}), 1)
    finding = judged.findings[0]
    assert (finding.ranks, finding.confidence, finding.node) == ((1,), Confidence.LIKELY, "node02")


@pytest.mark.parametrize("calls", [(SAME, None), (SAME, None, None), (None, None, None)])
def test_else_an_abort_is_undecided(calls):
    finding = explain_abort(scene_of(*calls, ends={1: end(1, -6, stderr_tail=ABORT)}), 1).findings[0]
    assert (finding.cause, finding.confidence) == ("AR410 collective-mismatch", Confidence.UNDECIDED)
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in finding.ask


def test_a_rank_that_was_in_an_earlier_group_of_that_name_is_not_compared():
    old = call(group="1", op="broadcast", is_done=True)
    pair = GroupSeen(name="1", ranks=(1, 2), enqueued=5, completed=4, waiting_s=2.0)
    ranks = [RankBeat(rank=rank, silent_s=0.0, groups=(pair,), calls=(call(group="1"),)) for rank in (1, 2)]
    seen = scene([beat(0, away(0, num=3, calls=(old,))), *(beat(rank.rank, rank) for rank in ranks)])
    assert find_mismatch(seen) is None


def test_of_a_rank_that_tells_of_many_calls_the_open_ones_and_the_last_ones_are_kept():
    calls = tuple(CallSeen(group="0", seq=number, op="all_reduce", is_done=number != 2) for number in range(10))
    assert [call.seq for call in keep_calls(calls, 4)] == [2, 7, 8, 9]
    assert [call.seq for call in keep_calls(calls, 1)] == [2]


def test_the_leader_keeps_only_so_many_calls_of_all_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("allranks.guard.scene.MAX_KEPT_CALLS", 100)
    monkeypatch.setattr("allranks.guard.scene.MIN_KEPT_CALLS", 8)
    seen = scene_of(tuple(call(number) for number in range(200)), SAME)
    assert [len(view.beat.calls) for view in seen.ranks.values()] == [50, 1]
    assert len(seen.nodes[0].beat.ranks[0].calls) == 50
