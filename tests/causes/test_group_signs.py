"""What the signs of the group's causes read out of a line, in the words of several versions."""

from __future__ import annotations

import re

import pytest

from allranks.causes.book import find_cause
from allranks.causes.cause import Blames, Role, Sign


def strongest(cause: str, line: str) -> Sign | None:
    """Return the sign of a cause that proves most on this line."""
    firing = [sign for sign in find_cause(cause).signs if re.search(sign.pattern, line)]
    return min(firing, key=lambda sign: sign.role, default=None)


def read(cause: str, line: str) -> dict[str, str]:
    """Return what the strongest sign of a cause says of this line."""
    sign = strongest(cause, line)
    assert sign is not None, line
    match = re.search(sign.pattern, line)
    assert match is not None
    return {name: value for name, value in match.groupdict().items() if value is not None}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "[rank1]:[E304 10:42:45.1 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=2, OpType=ALLGATHER, NumelIn=1, NumelOut=32, Timeout(ms)=600000) ran for 600008 "
            "milliseconds before timing out.",
            {
                "rank": "1",
                "seq": "2",
                "op": "ALLGATHER",
                "numel": "1",
                "numel_out": "32",
                "ms": "600000",
                "ran_ms": "600008",
            },
        ),
        (
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=56693, "
            "OpType=_ALLGATHER_BASE, Timeout(ms)=1800000) ran for 1804371 milliseconds before timing out.",
            {"rank": "3", "seq": "56693", "op": "_ALLGATHER_BASE", "ms": "1800000", "ran_ms": "1804371"},
        ),
        (
            "Watchdog caught collective operation timeout: WorkNCCL(OpType=BROADCAST, TensorShape=[25, 3], "
            "Timeout(ms)=60000) ran for 60043 milliseconds before timing out.",
            {"op": "BROADCAST", "shape": "25, 3", "ms": "60000", "ran_ms": "60043"},
        ),
        (
            "[PG 0 Rank 2] Timeout at NCCL work: 7487, last enqueued NCCL work: 7489, last completed NCCL work: -1.",
            {"group": "0", "rank": "2", "seq": "7487", "enqueued": "7489", "completed": "-1"},
        ),
        (
            "[PG 0 (default_pg) Rank 1] Exception (either an error or timeout) detected by watchdog at work: 2, last "
            "enqueued NCCL work: 2, last completed NCCL work: 1.",
            {"group": "0", "rank": "1", "seq": "2", "enqueued": "2", "completed": "1"},
        ),
        (
            "[PG ID 12 PG GUID 120 Rank 0] Timeout at NCCL work: 151, last enqueued NCCL work: 152, last completed "
            "NCCL work: 150.",
            {"group": "120", "rank": "0", "seq": "151", "enqueued": "152", "completed": "150"},
        ),
        (
            "[PG ID 0 PG GUID 0(default_pg) Rank 5]  failure detected by watchdog at work sequence id: 120049 PG "
            "status: last enqueued work: 120051, last completed work: 120048",
            {"group": "0", "rank": "5", "seq": "120049", "enqueued": "120051", "completed": "120048"},
        ),
        (
            "[PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal due to a collective timeout from  rank 6 "
            "and we will try our best to dump it. Last enqueued NCCL work: 62, last completed NCCL work: 61",
            {"group": "0", "rank": "2", "first": "6", "enqueued": "62", "completed": "61"},
        ),
    ],
)
def test_a_watchdog_s_timeout_says_who_waited_in_which_collective(line: str, said: dict[str, str]) -> None:
    assert read("AR490", line) == said
    assert strongest("AR490", line).role is Role.VICTIM  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("cause", "line", "role", "said"),
    [
        (
            "AR401",
            "Waiting in store based barrier to initialize process group for rank: 5, key: store_based_barrier_key:1 "
            "(world_size=8, worker_count=7, timeout=0:30:00)",
            Role.VICTIM,
            {"rank": "5", "wanted": "8", "present": "7", "key": "store_based_barrier_key:1"},
        ),
        ("AR401", "DistStoreError: wait timeout after 15000ms, keys: /default_pg/0//cpu//0/1", Role.LIKELY,
         {"ms": "15000", "rank": "1"}),
        ("AR405", "NCCL WARN Bootstrap Root : rank 1 of 4 ranks has already checked in", Role.PRIMARY,
         {"rank": "1", "wanted": "4"}),
        ("AR407", "failed (exitcode: -11) local_rank: 2 (pid: 33) of binary: /usr/bin/python", Role.PRIMARY,
         {"code": "-11", "local_rank": "2", "pid": "33"}),
        ("AR407", "  exitcode  : -9 (pid: 3309)", Role.LIKELY, {"code": "-9", "pid": "3309"}),
        ("AR407", "exitcode: -9", Role.LIKELY, {"code": "-9"}),
        ("AR407", "  exitcode  : -6 (pid: 3309)", Role.VICTIM, {"code": "-6", "pid": "3309"}),
        ("AR407", "srun: error: n07: tasks 0-3: Killed", Role.LIKELY, {"node": "n07", "thing": "tasks 0-3"}),
        ("AR407", "mpirun noticed that process rank 1 with PID 0 on node n-3.x exited on signal 11 (SIGSEGV).",
         Role.PRIMARY, {"rank": "1", "node": "n-3.x", "signal": "11"}),
        ("AR408", "Ranks 1, 2 failed to pass monitoredBarrier in 120000 ms", Role.PRIMARY,
         {"ranks": "1, 2", "ms": "120000"}),
        ("AR408", "1!: [allreduce.layer1.weight, allreduce.layer1.bias]", Role.LIKELY, {"rank": "1"}),
        ("AR409", "Affected ranks: [76, 13, 45]", None, {}),
        (
            "AR409",
            "STRAGGLER DETECTION WARNING: Some GPUs performance dropped. Affected ranks: [76, 13, 45]",
            Role.PRIMARY,
            {"ranks": "76, 13, 45"},
        ),
        ("AR409", "    _try_get_data (torch/utils/data/dataloader.py:1011)", Role.LIKELY, {}),
        ("AR409", 'Thread 688514 (idle): "MainThread"', Role.CONTEXT, {"pid": "688514"}),
        (
            "AR410",
            "Detected mismatch between collectives on ranks. Rank 7 is running collective: "
            "CollectiveFingerPrint(SequenceNumber=18, OpType=BROADCAST), but Rank 0 is running",
            Role.PRIMARY,
            {"rank": "7", "seq": "18", "op": "BROADCAST", "ranks": "0"},
        ),
        ("AR412", "Parameters which did not receive grad for rank 3: net2.weight, net2.bias", Role.PRIMARY,
         {"rank": "3", "thing": "net2.weight"}),
        (
            "AR414",
            "recvValue failed on SocketImpl(fd=76, addr=[n2]:60950, remote=[n1]:29500): Connection reset by peer",
            Role.VICTIM,
            {"peer": "n1", "port": "29500"},
        ),
    ],
)  # fmt: skip
def test_a_line_says_whom_it_means(cause: str, line: str, role: Role | None, said: dict[str, str]) -> None:
    sign = strongest(cause, line)
    assert (sign.role if sign else None) == role
    if sign:
        assert read(cause, line) == said


@pytest.mark.parametrize(
    ("wanted", "came", "is_stale"),
    [(8, 7, False), (8, 8, False), (8, 9, True), (8, 16, True), (1, 2, True), (16, 8, False), (16, 24, True),
     (32, 24, False), (64, 128, True), (128, 64, False), (128, 256, True), (99, 100, True), (9, 9, False)],
)  # fmt: skip
def test_more_ranks_than_the_job_has_are_of_an_earlier_start(wanted: int, came: int, is_stale: bool) -> None:
    line = (
        f"Timed out initializing process group in store based barrier on rank: 0, for key: k:1 (world_size={wanted}, "
    )
    sign = strongest("AR404", line + f"num_workers_joined={came}, timeout=0:30:00)")
    assert (sign is not None) == is_stale


HARMLESS = [
    "node03:21:21 [0] NCCL INFO NET/Plugin: Failed to find ncclCollNetPlugin_v8 symbol.",
    "[rank0]:[W303 09:17:03.2938 ProcessGroupNCCL.cpp:1168] Warning: WARNING: process group has NOT been destroyed "
    "before we destruct ProcessGroupNCCL. On normal program exit, the application should call destroy_process_group",
    "[W socket.cpp:426] [c10d] The server socket has failed to bind to [::]:29500 (errno: 97 - Address family not "
    "supported by protocol).",
    "[W reducer.cpp:1300] Warning: find_unused_parameters=True was specified in DDP constructor, but did not find any "
    "unused parameters in the forward pass.",
    "Reducer buckets have been rebuilt in this iteration.",
    "INFO:torch.distributed.distributed_c10d:Rank 0: Completed store-based barrier for key:store_based_barrier_key:1",
    "W0303 09:17:03.837000 140066 torch/distributed/elastic/multiprocessing/api.py:858] Sending process 48006 closing "
    "signal SIGTERM",
    "INFO:torch.distributed.distributed_c10d:Waiting in store based barrier to initialize process group for rank: 0, "
    "key: store_based_barrier_key:1 (world_size=2, worker_count=1, timeout=0:30:00)",
    " iteration    29030/  311541 | consumed samples: 10708304 | elapsed time per iteration (ms): 22336.4",
    "slurmstepd: error: *** STEP 11509447.0 ON nodeau01 CANCELLED AT 2026-03-25T10:34:07 DUE TO PREEMPTION ***",
    "StopIteration",
]


@pytest.mark.parametrize("line", HARMLESS)
def test_alarming_words_of_a_healthy_run_accuse_nobody(line: str) -> None:
    for number in (401, 402, 403, 404, 405, 407, 408, 409, 410, 411, 412, 413, 414, 490):
        sign = strongest(f"AR{number}", line)
        assert sign is None or (sign.role >= Role.VICTIM and sign.blames is Blames.NOBODY), number
