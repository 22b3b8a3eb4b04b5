"""Who failed first: ends of workers in, one culprit out."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from allranks.guard.ends import MOST_TOLD, judge_ends, should_stop
from allranks.guard.origin import FailureOrigin, origin_of
from allranks.guard.scene import RankView, Scene
from allranks.model.beat import GroupSeen, RankBeat
from allranks.model.finding import Confidence, Evidence, Finding, Severity, Verdict
from allranks.model.membership import Member, Membership
from allranks.wire.protocol import WorkerEnd

from .scenes import FAST

MEMBERS = (
    Member(name="node01", first_rank=0, num_workers=2, host="node01"),
    Member(name="node02", first_rank=2, num_workers=2, host="node02"),
    Member(name="node03", first_rank=4, num_workers=4, host="node03"),
)
GLOO_LOST = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:41"
TRACEBACK = """Traceback (most recent call last):
  File "/home/u/my runs/train.py", line 41, in load_batch
    raise ValueError("batch 17 has no label")
  File "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1751, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
ValueError: batch 17 has no label
"""


def end(rank: int, exit_code: int = 1, *, at: float = 100.0, **more: object) -> WorkerEnd:
    node = "node01" if rank < 2 else "node02" if rank < 4 else "node03"
    return WorkerEnd(rank=rank, node=node, exit_code=exit_code, time_s=at, **more)


def lost(rank: int, *, at: float = 100.0) -> WorkerEnd:
    return end(rank, at=at, message=GLOO_LOST)


def scene_of(*ends: WorkerEnd, exits: dict[int, float] | None = None) -> Scene:
    scene = Scene(FAST, Membership(members=MEMBERS), {}, 0.0)
    for rank, time_s in (exits or {}).items():
        scene.end(end(rank, 0, at=time_s), time_s)
    for worker_end in ends:
        scene.end(worker_end, worker_end.time_s)
    return scene


def judge(*ends: WorkerEnd, exits: dict[int, float] | None = None) -> Verdict:
    judged = judge_ends(scene_of(*ends, exits=exits))
    return Verdict(job="4711", attempt=0, exit_code=judged.exit_code, findings=judged.findings)


def the_finding(verdict: Verdict) -> Finding:
    assert len(verdict.findings) == 1
    return verdict.findings[0]


def test_an_exception_is_told_with_its_line_and_traceback():
    verdict = judge(
        end(3, message="ValueError: batch 17 has no label", traceback=TRACEBACK, stderr_path="runs/4711/rank_3.err")
    )
    assert verdict == Verdict(
        job="4711",
        attempt=0,
        exit_code=1,
        findings=(
            Finding(
                cause="AR590 user-code-error",
                severity=Severity.FAIL,
                confidence=Confidence.CERTAIN,
                node="node02",
                ranks=(3,),
                message="ValueError: batch 17 has no label (train.py:41 in load_batch)",
                evidence=(Evidence(seen=TRACEBACK.rstrip(), source="runs/4711/rank_3.err"),),
                fix=None,
                victims=(0, 1, 2, 4, 5, 6, 7),
            ),
        ),
    )


@pytest.mark.parametrize(
    ("worker_end", "cause", "message", "exit_code"),
    [
        (end(3, 1), "AR590 user-code-error", "ended with exit code 1", 1),
        (end(3, 3), "AR590 user-code-error", "ended with exit code 3", 1),
        (end(3, 255, stderr_tail="oops"), "AR590 user-code-error", "ended with exit code 255", 1),
        (end(3, 1, message="KeyError: 'x'\nin batch 3"), "AR590 user-code-error", "KeyError: 'x'", 1),
        (
            end(3, 1, message="ValueError: bad", traceback=TRACEBACK, lingers="thread upload"),
            "AR590 user-code-error",
            "ValueError: batch 17 has no label (train.py:41 in load_batch); has not exited: thread upload",
            1,
        ),
        (
            end(
                3,
                message="SyntaxError: oops (a.py, line 2)",
                traceback='  File "a.py", line 2\n    x\nSyntaxError: oops',
            ),
            "AR590 user-code-error",
            "SyntaxError: oops (a.py, line 2)",
            1,
        ),
        (  # in allranks' own words
            end(
                3, 1, message="CheckpointError: allranks: AR601 checkpoint-corrupt: none of the 2 checkpoints is whole"
            ),
            "AR601 checkpoint-corrupt",
            "none of the 2 checkpoints is whole",
            78,
        ),
        (end(3, 1, message="OSError: x", lingers=""), "AR590 user-code-error", "OSError: x; has not exited", 1),
        (end(3, -9), "AR407 dead-rank", "killed by SIGKILL (signal 9), not by allranks", 137),
        (
            end(
                3,
                -11,
                traceback="Fatal Python error: Segmentation fault\nCurrent thread 0x1 (most recent call first):\n"
                '  File "/usr/lib/python3.11/ctypes/__init__.py", line 5 in f\n  File "/u/a.py", line 3 in load\n'
                '  File "/u/train.py", line 9 in <module>',
            ),
            "AR407 dead-rank",
            "killed by SIGSEGV (signal 11), not by allranks (a.py:3 in load)",
            139,
        ),
        (end(3, -40), "AR407 dead-rank", "killed by signal 40, not by allranks", 168),
        (end(3, -11), "AR407 dead-rank", "killed by SIGSEGV (signal 11), not by allranks", 139),
        (end(3, -6), "AR407 dead-rank", "killed by SIGABRT (signal 6), not by allranks", 134),
        (end(3, -15), "AR407 dead-rank", "killed by SIGTERM (signal 15), not by allranks", 143),
        (
            end(3, 127, message="python9: No such file or directory", could_not_start=True),
            "AR401 missing-rank",
            "could not be started: python9: No such file or directory",
            78,
        ),
    ],
)
def test_each_kind_of_end_has_its_cause_and_exit_code(worker_end, cause, message, exit_code):
    verdict = judge(worker_end)
    finding = the_finding(verdict)
    assert (finding.cause, finding.message, verdict.exit_code) == (cause, message, exit_code)
    assert (finding.node, finding.ranks, finding.confidence) == ("node02", (3,), "certain")


LOOK_FOR_OOM = "dmesg -T | grep -i 'killed process'"


@pytest.mark.parametrize(
    ("exit_code", "fix"),
    [
        (-9, f"on node02: {LOOK_FOR_OOM}; if that lists it, memory ran out: request more, or use less"),
        (
            -11,
            "native code crashed: PYTHONFAULTHANDLER=1 prints in which call; run that alone, or with another version "
            "of its library",
        ),
        (-7, "on node02: df -h /dev/shm; if it is full, free it or make it larger"),
        (-15, None),
        (1, None),
    ],
)
def test_a_signal_says_what_to_look_at(exit_code, fix):
    assert the_finding(judge(end(3, exit_code))).fix == fix


def test_the_last_words_on_stderr_are_evidence_where_there_is_no_traceback():
    assert the_finding(judge(end(3, 2, stderr_tail="usage: train.py\n"))).evidence == (
        Evidence(seen="usage: train.py", source=None),
    )
    assert the_finding(judge(end(3, 2))).evidence == ()


@pytest.mark.parametrize(
    "worker_end",
    [
        end(0, message="ValueError: batch 17 has no label"),
        end(0, message="torch.OutOfMemoryError: CUDA out of memory", stderr_tail=GLOO_LOST),
        end(0, 3),
        end(0, -9, stderr_tail=GLOO_LOST),
        end(0, 127, message="Connection refused", could_not_start=True),
    ],
)
def test_a_rank_that_broke_by_itself_may_be_the_culprit(worker_end):
    assert origin_of(worker_end) is FailureOrigin.OWN


OWN_NETWORK = [
    "ConnectionResetError: [Errno 104] Connection reset by peer: s3://bucket/shard-00017",
    "ConnectionRefusedError: [Errno 111] Connection refused",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
    "SSHException: Connection closed by peer",
    "RuntimeError: GET s3://bucket/shard-00017 failed: Connection reset by peer",
]


@pytest.mark.parametrize("message", OWN_NETWORK)
def test_an_error_of_the_users_own_network_client_is_no_victims(message):
    own = end(3, message=message, traceback=f"Traceback (most recent call last):\n{message}\n", at=100.1)
    finding = the_finding(judge(lost(0), lost(2, at=100.2), own))
    assert (finding.cause, finding.confidence, finding.ranks) == ("AR590 user-code-error", Confidence.CERTAIN, (3,))
    assert finding.message == message
    assert message in finding.evidence[0].seen
    assert origin_of(end(3, stderr_tail=f"retrying in 5 s\n{message}\n")) is FailureOrigin.OWN


def test_the_culprit_is_named_though_its_victims_end_first():
    for order in itertools.permutations(
        [lost(0, at=100.0), lost(2, at=100.1), end(3, message="ValueError: no label", at=100.4)]
    ):
        verdict = judge(*order)
        finding = the_finding(verdict)
        assert (finding.ranks, finding.message) == ((3,), "ValueError: no label")
        assert finding.victims == (0, 1, 2, 4, 5, 6, 7)
        assert verdict.exit_code == 1


def test_of_two_that_broke_by_themselves_both_are_named_the_earlier_first_whichever_was_noticed_first():
    early, late = end(6, -9, at=100.0), end(1, message="ValueError: no label", at=100.3)
    for order in ((early, late), (late, early)):
        verdict = judge(*order, lost(0, at=100.1))
        first, second = verdict.findings
        assert (first.ranks, first.confidence, second.ranks, second.confidence) == ((6,), "certain", (1,), "certain")
        assert first.notes == ("also by itself: rank 1, ValueError, 0.3 s later",)
        assert (first.victims, second.victims) == ((0, 2, 3, 4, 5, 7), ())
        assert verdict.exit_code == 137


def test_ranks_that_failed_alike_make_one_finding_whatever_numbers_their_messages_have():
    for num, words in ((8, "all 8 ranks failed alike"), (3, "3 ranks failed alike")):
        ends = [end(rank, at=100 + rank / 100, message=f"OSError: shard_{rank}.bin: 0x{rank}f") for rank in range(num)]
        finding = the_finding(judge(*ends))
        assert (finding.ranks, finding.notes, finding.message) == (
            tuple(range(num)),
            (words,),
            "OSError: shard_0.bin: 0x0f",
        )
        assert finding.victims == tuple(range(num, 8))


@pytest.mark.parametrize(
    ("second", "note"),
    [
        (end(1, -11, at=100.1), "also by itself: rank 1, SIGSEGV, 0.1 s later"),
        (end(1, 3, at=100.1), "also by itself: rank 1, exit code 3, 0.1 s later"),
        (end(1, message="a.b.KeyError: 3", at=100.07), "also by itself: rank 1, KeyError, 70 ms later"),
        (end(1, -11, at=100.04), "also by itself: rank 1, SIGSEGV, at the same time within 50 ms"),
        (end(1, message="KeyError: 3", at=100.0004), "also by itself: rank 1, KeyError, 0 ms later"),
        (end(2, message="KeyError: 3", at=100.15), "also by itself: rank 2, KeyError, at the same time within 200 ms"),
    ],
)
def test_what_else_broke_is_told_with_the_time_beyond_the_error_of_the_clocks(second, note):
    assert judge(end(0, message="ValueError: x", at=100.0), second).findings[0].notes == (note,)


def test_ranks_that_were_killed_failed_alike_also_where_one_had_lost_its_connection():
    finding = the_finding(judge(end(0, -9), end(3, -9, message=GLOO_LOST, at=100.1)))
    assert (finding.ranks, finding.notes) == ((0, 3), ("2 ranks failed alike",))


def test_of_many_that_broke_each_in_its_own_way_notes_tell_more_than_findings():
    verdict = judge(*(end(rank, 3 + rank, at=100 + rank) for rank in range(8)))
    assert [each.ranks for each in verdict.findings] == [(rank,) for rank in range(MOST_TOLD)]
    assert len(verdict.findings[0].notes) == 7


def test_each_failure_says_whether_it_may_be_retried():
    segv, error = end(0, -11, at=100.0), end(1, message="ValueError: x", at=100.02)
    judged = judge_ends(scene_of(segv, error))
    assert [(part.ranks, part.exit_code, part.is_retryable) for part in judged.parts] == [
        ((0,), 139, True),
        ((1,), 1, False),
    ]


def test_a_worker_that_we_ended_is_never_the_culprit():
    ours = end(0, -15, at=90.0, ended_by_us=True)
    crashed = end(1, message="ValueError: in its finally", at=91.0, ended_by_us=True)
    assert the_finding(judge(ours, crashed, end(3, 3, at=100.0))).ranks == (3,)
    assert judge(ours, crashed) == Verdict(job="4711", attempt=0, exit_code=3)


def test_victims_alone_leave_the_verdict_undecided():
    verdict = judge(lost(5, at=100.2), lost(2, at=100.1))
    finding = the_finding(verdict)
    assert (finding.cause, finding.confidence, finding.ranks, finding.node) == (
        "AR490 collective-timeout",
        "undecided",
        (2,),
        "node02",
    )
    assert finding.message == "it was the first rank to lose a connection; no rank reports why"
    assert finding.victims == (0, 1, 3, 4, 5, 6, 7)
    assert verdict.exit_code == 1


def test_a_rank_that_left_early_with_zero_is_named_by_those_it_left():
    verdict = judge(lost(0, at=100.0), lost(1, at=100.1), exits={5: 97.5})
    finding = the_finding(verdict)
    assert (finding.cause, finding.confidence, finding.ranks, finding.node) == (
        "AR407 dead-rank",
        "likely",
        (5,),
        "node03",
    )
    assert finding.message == "it exited with code 0, 2.5 s before rank 0 lost its connection"
    assert finding.fix == "every rank must run the same number of steps: check how the data is divided"
    assert finding.victims == (0, 1, 2, 3, 4, 6, 7)
    assert verdict.exit_code == 1


def test_a_rank_whose_exit_with_zero_was_seen_after_its_connections_closed_is_named():
    finding = the_finding(judge(lost(0, at=100.0), exits={5: 100.5}))
    assert (finding.cause, finding.confidence, finding.ranks) == ("AR407 dead-rank", "likely", (5,))
    assert finding.message == "it exited with code 0 when rank 0 lost its connection"


def test_of_several_that_left_with_zero_all_are_named_and_no_victim():
    finding = the_finding(judge(lost(0, at=100.0), lost(1, at=100.1), exits={5: 97.5, 6: 100.2}))
    assert (finding.cause, finding.confidence, finding.ranks) == ("AR407 dead-rank", "undecided", (5, 6))
    assert finding.victims == (0, 1, 2, 3, 4, 7)
    assert finding.message == "rank 0 lost its connection, and one of these is why: ranks 5-6 exited with code 0"


def test_of_those_that_left_only_the_ones_that_had_called_fewer_collectives_are_named():
    scene = scene_of(lost(0, at=100.0), exits={5: 99.9, 6: 99.9})
    for rank, calls in {0: 7, 5: 7, 6: 6}.items():
        beat = RankBeat(rank=rank, groups=(GroupSeen(name="0", enqueued=calls, completed=min(calls, 6)),))
        scene.ranks[rank] = RankView(beat, 100.1, 100.1)
    assert judge_ends(scene).findings[0].ranks == (6,)


def test_a_rank_that_left_long_after_the_first_loss_is_not_blamed():
    assert the_finding(judge(lost(0, at=100.0), exits={5: 102.5})).cause == "AR490 collective-timeout"


@pytest.mark.parametrize(
    ("whom", "ranks", "node"),
    [
        ("rank 5 (node03); 7 of 8 ranks have joined", (5,), "node03"),
        ("ranks 2-3 (node02); 6 of 8 ranks have joined", (2, 3), "node02"),
        ("rank 1 (node01), ranks 4,6-7 (node03); 4 of 8 ranks have joined", (1, 4, 6, 7), "node01"),
        ("ranks 4,6 (node03); 6 of 8 ranks have joined", (4, 6), "node03"),
        ("rank 0 (node01) to open the store", (0,), "node01"),
    ],
)
def test_ranks_that_never_came_are_named_by_those_that_waited(whom, ranks, node):
    message = (
        f"torch.distributed.DistStoreError: allranks: init_process_group waited 15 s for {whom}; look at what they do "
        "(their .err and .out files), or give more time with its timeout argument"
    )
    verdict = judge(
        *(end(rank, at=100 + rank, message=message) for rank in range(8) if rank not in ranks),
        *(end(rank, -15, ended_by_us=True) for rank in ranks),
    )
    finding = the_finding(verdict)
    first = min(set(range(8)) - set(ranks))
    assert (finding.cause, finding.ranks, finding.node) == ("AR401 missing-rank", ranks, node)
    assert finding.confidence is Confidence.CERTAIN
    assert finding.message == "it never reached init_process_group, although its process ran"
    assert finding.evidence == (Evidence(seen=f"rank {first} waited 15 s for {whom}"),)
    assert set(finding.victims) == set(range(8)) - set(ranks)
    assert verdict.exit_code == 1


def test_a_rank_that_had_ended_with_0_was_not_running():
    message = "allranks: init_process_group waited 15 s for rank 5 (node03); 7 of 8 ranks have joined; look at what"
    finding = the_finding(judge(*(end(rank, message=message) for rank in range(8) if rank != 5), exits={5: 80.0}))
    assert (finding.cause, finding.ranks) == ("AR401 missing-rank", (5,))
    assert finding.message == "it exited with code 0 before it reached init_process_group"


def test_all_is_well_where_everybody_ended_with_zero():
    assert scene_of(exits=dict.fromkeys(range(8), 100.0)).is_all_well
    assert not scene_of(end(7, -9), exits=dict.fromkeys(range(7), 100.0)).is_all_well


def test_victims_that_had_already_left_with_zero_are_not_counted():
    assert the_finding(judge(end(3, 1), exits={0: 99.0, 7: 99.5})).victims == (1, 2, 4, 5, 6)


def test_the_verdict_survives_json():
    verdict = judge(end(3, message="ValueError: \u00e9t\u00e9\x1b[2J", traceback=TRACEBACK))
    assert Verdict.from_json(verdict.to_json()) == verdict
    with pytest.raises(msgspec.DecodeError):
        Verdict.from_json(b"{}")


PRIMARY = end(3, 1, at=100.0)
STOP_TABLE = {
    "nothing has happened": ([], {}, 100.0, False),
    "one left with 0": ([], {0: 99.0}, 1000.0, False),
    "all left with 0": ([], dict.fromkeys(range(8), 99.0), 100.0, True),
    "one broke, just now": ([PRIMARY], {}, 100.2, False),
    "one broke, a quarter of a second ago": ([PRIMARY], {}, 100.25, True),
    "another one broke since": ([PRIMARY, end(4, -9, at=100.2)], {}, 100.25, True),
    "the last one broke": ([PRIMARY], dict.fromkeys([0, 1, 2, 4, 5, 6, 7], 99.0), 100.0, True),
    "a victim, just now": ([lost(0, at=100.0)], {}, 100.0, False),
    "a victim, 1.4 s ago": ([lost(0, at=100.0)], {}, 101.4, False),
    "a victim, 1.5 s ago": ([lost(0, at=100.0)], {}, 101.5, True),
    "a later victim, 1.4 s ago": ([lost(0, at=100.0), lost(1, at=101.0)], {}, 102.4, False),
    "a later victim, 1.5 s ago": ([lost(0, at=100.0), lost(1, at=101.0)], {}, 102.5, True),
    "victim after victim": ([lost(rank, at=100.0 + rank) for rank in range(4)], {}, 103.9, False),
    "victim after victim, for 4 s": ([lost(rank, at=100.0 + rank) for rank in range(4)], {}, 104.0, True),
    "a victim and its culprit": ([lost(0, at=100.0), end(3, 1, at=100.4)], {}, 100.7, True),
    "all are victims": ([lost(rank, at=100.0) for rank in range(8)], {}, 100.0, True),
    "victims and zeros make all": ([lost(0, at=100.0)], dict.fromkeys(range(1, 8), 99.0), 100.0, True),
    "one that we ended": ([end(0, -15, ended_by_us=True)], {}, 1000.0, False),
}


@pytest.mark.parametrize("case", STOP_TABLE)
def test_the_rest_is_ended_when_the_culprit_is_known_or_the_time_is_up(case):
    ends, exits, now_s, is_time = STOP_TABLE[case]
    assert should_stop(scene_of(*ends, exits=exits), now_s) is is_time


def test_words_that_only_look_like_a_cause_are_the_users_own():
    finding = the_finding(judge(end(3, message="RuntimeError: allranks: AR999 no-such-cause: x")))
    assert finding.cause == "AR590 user-code-error"


def test_a_watchdog_that_aborts_its_rank_is_a_victim():
    text = "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
    finding = the_finding(judge(end(0, -6, at=1.0, stderr_tail=text), end(2, 1, at=2.0, message="ValueError: x")))
    assert finding.ranks == (2,)


LOST = GLOO_LOST
OWN = "ValueError: no label"
CHAINED = f'Traceback (most recent call last):\n  File "train.py", line 3, in step\n{LOST}\n\n'
CAUSE = "The above exception was the direct cause of the following exception:\n\n"
CONTEXT = "During handling of the above exception, another exception occurred:\n\n"
LATER = 'Traceback (most recent call last):\n  File "train.py", line 9, in main\nTrainerError: step 3 failed\n'
GOES = "terminate called without an active exception"
WARNS = "[W1128 06:11:02.123 socket.cpp:755] [c10d] The client socket has failed to connect: Connection refused"
ORIGINS = {
    # What a script does with the loss of a connection: the oldest exception decides.
    "raises another one from it": (end(0, message="TrainerError: step 3", before=(LOST,)), "lost"),
    "and torchelastic wrote it down": (end(0, message="TrainerError: x", traceback=CHAINED + CAUSE + LATER), "lost"),
    "fails in its clean-up": (end(0, message="KeyError: 'writer'", traceback=CHAINED + CONTEXT + LATER), "lost"),
    "calls sys.exit": (end(0, before=(LOST,)), "lost"),
    "prints it and calls sys.exit": (end(0, stderr_tail=f"training failed\n{LOST}\n"), "lost"),
    "is aborted while it is torn down": (end(0, -6, message=LOST, stderr_tail=GOES), "lost"),
    "is aborted after it has caught it": (end(0, -6, before=(LOST,), stderr_tail=GOES), "lost"),
    "crashes after it": (end(0, -11, message=LOST), "open"),
    # Its own error came first, and its `finally` met the loss; or a handler of something harmless did.
    "loses it in its finally": (end(0, message=LOST, before=(OWN,)), "open"),
    "loses it there, and raises again": (end(0, message="TrainerError: x", before=(OWN, LOST)), "open"),
    # By itself.
    "raises": (end(0, message=OWN), "own"),
    "raises, handling an error of its own": (end(0, message=OWN, before=("KeyError: 3",)), "own"),
    "raises, and is aborted while it is torn down": (end(0, -6, message=OWN, stderr_tail=GOES), "own"),
    "is killed after the loss": (end(0, -9, message=LOST, before=(LOST,)), "own"),
    "crashes": (end(0, -11), "own"),
    "aborts": (end(0, -6, stderr_tail="double free or corruption (out)"), "own"),
    "exits after a connection that was tried again": (end(0, 3, stderr_tail=f"{WARNS}\nno data"), "own"),
    # It cannot be told.
    "is aborted on its way out": (end(0, -6, stderr_tail=GOES), "open"),
}


@pytest.mark.parametrize("case", ORIGINS)
def test_a_rank_broke_by_itself_only_if_nothing_was_lost_before(case):
    worker_end, origin = ORIGINS[case]
    assert origin_of(worker_end) == origin


def test_a_rank_that_was_through_in_the_middle_of_a_collective_may_be_a_victim():
    assert origin_of(end(0, 1), was_in_collective=True) is FailureOrigin.OPEN
    assert origin_of(end(0, 1, message=OWN), was_in_collective=True) is FailureOrigin.OWN
    assert origin_of(end(0, -9), was_in_collective=True) is FailureOrigin.OWN


def test_what_cannot_be_told_is_a_victim_beside_one_that_broke_by_itself():
    unclear = [end(0, -6, stderr_tail=GOES, at=100.1), end(1, message=LOST, before=(OWN,), at=99.9)]
    finding = the_finding(judge(*unclear, end(3, -9, at=100.0)))
    assert (finding.ranks, finding.notes, finding.victims) == ((3,), (), (0, 1, 2, 4, 5, 6, 7))


def test_a_crash_after_a_lost_connection_is_named_and_undecided():
    first, second = judge(end(0, -11, message=LOST, at=100.3), end(3, -9, at=100.0)).findings
    assert (first.ranks, first.confidence, second.ranks, second.confidence) == ((3,), "certain", (0,), "undecided")
    assert first.notes == ("perhaps also by itself: rank 0, SIGSEGV, 0.3 s later, after a lost connection",)
    assert 0 not in first.victims


def test_where_all_others_are_victims_the_one_that_cannot_be_told_is_likely():
    finding = the_finding(judge(lost(0), lost(2), end(1, message=LOST, before=(OWN,), at=100.1)))
    assert (finding.ranks, finding.confidence, finding.victims) == ((1,), "likely", (0, 2, 3, 4, 5, 6, 7))
    assert the_finding(judge(*(end(rank, message=LOST, before=(OWN,)) for rank in range(4)), lost(5))).confidence == (
        "undecided"
    )


TAILS = {
    "a SIGKILL is proven by nothing": (-9, "[W1128 06:11:02.1 socket.cpp:755] [c10d] no hostname\nstep 3", None),
    "a crash by what faulthandler prints": (
        -11,
        "step 3\nFatal Python error: Segmentation fault\n\nCurrent thread",
        "Fatal Python error: Segmentation fault\n\nCurrent thread",
    ),
    "or by nothing": (-11, "step 3", None),
    "an abort by what the C library prints": (-6, "step 3\nfree(): invalid pointer", "free(): invalid pointer"),
    "an exit code by the last words but warnings": (
        2,
        "usage: train.py\n/opt/x.py:3: UserWarning: old\n  import x\n[W1128 06:11:02.1 x.cpp:5] [c10d] no hostname",
        "usage: train.py",
    ),
    "or by nothing but warnings": (2, "allranks: all 2 ranks are up\n[rank0]:[W1128 06:11:02.1 x.cpp:5] no", None),
}


@pytest.mark.parametrize("case", TAILS)
def test_evidence_proves_the_finding_or_there_is_none(case):
    exit_code, tail, seen = TAILS[case]
    evidence = the_finding(judge(end(3, exit_code, stderr_tail=tail))).evidence
    assert [each.seen for each in evidence] == ([] if seen is None else [seen])


DIFFERS = (
    "ReplicaError: allranks: AR610 replica-differs: rank 4 on node03 (GPU-1) has other bits than 7 others, in model/w: "
    "1 of 9 elements at step 40, equal at step 32; may go on from the checkpoint of step 30"
)


def test_the_rank_that_a_message_names_is_the_culprit_and_not_those_that_raise_it():
    judged = judge_ends(scene_of(*(end(rank, message=DIFFERS, at=100 + rank / 1000) for rank in (0, 1, 4, 7)), lost(2)))
    (finding,) = judged.findings
    assert (finding.cause, finding.node, finding.ranks) == ("AR610 replica-differs", "node03", (4,))
    assert finding.message.startswith("rank 4 on node03 (GPU-1) has other bits than 7 others")
    assert finding.victims == (0, 1, 2, 3, 5, 6, 7)
    assert (judged.nodes, judged.cures, judged.may_stay, judged.is_retryable) == ((2,), True, True, True)
    assert (judged.exit_code, judged.comes_back_as) == (75, "model/w at step 40")


@pytest.mark.parametrize(
    ("tie", "ranks"),
    [
        (
            "AR610 replica-differs: ranks 0-1 have different bits, and no majority tells which is wrong, in model/w: 1 "
            "of 9 elements at step 40, equal at step 32",
            (0, 1),
        ),
        (
            "AR611 wrong-arithmetic: ranks 0-2 computed different gradients, and no majority tells which are wrong, "
            "from the batch of rank 1, in model/w at step 40",
            (0, 1, 2),
        ),
    ],
)
def test_without_a_majority_no_node_is_left_out_and_what_is_not_to_be_retried_is_not(tie, ranks):
    words = f'ReplicaError: allranks: {tie}; not retried: on_corruption="stop"'
    judged = judge_ends(scene_of(*(end(rank, message=words) for rank in ranks)))
    assert (judged.ranks, judged.nodes, judged.cures) == (ranks, (), False)
    assert (judged.is_retryable, judged.exit_code) == (False, 78)
    assert judged.findings[0].confidence is Confidence.UNDECIDED
