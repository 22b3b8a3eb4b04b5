"""Who keeps the others waiting: a rank that never enters a collective, and one that enters late."""

from __future__ import annotations

from allranks.causes.cause import Cause
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence

_NOBODY = Blames.NOBODY
_NAMED = Blames.NAMED

_RANKS = r"(?P<ranks>[0-9]+(?:, ?[0-9]+)*)"


class StuckRank(Cause, id="AR408"):
    """A rank is alive but does not enter a collective.

    ## What it means
    The other ranks are in a collective and wait for this one. Its process exists. It waits for a lock, a file, its data
    loader or a collective of another group, or its code took another branch.

    ## Why it breaks the job
    A collective completes only when all ranks have entered it. Nothing is printed until the timeout. Then each waiting
    rank reports its own timeout, and the rank that caused it often reports nothing.

    ## Example
    From Lightning-AI/pytorch-lightning#5155 (Horovod), the PyTorch documentation (monitored_barrier), and a run with
    TORCH_NCCL_DESYNC_DEBUG=1:

        Missing ranks:
        0: [broadcast.bool.sz]
        [Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms
         - To our best knowledge, ranks [3] are the lagging ranks that caused this timeout. They never joined any

    ## Fix
    Find out what that rank does while it hangs, and what its log says last:

        allranks stack JOB; py-spy dump --pid PID; cat /proc/PID/wchan

    In PyTorch, TORCH_DISTRIBUTED_DEBUG=DETAIL runs a monitored barrier before every collective, which names the rank.

    ## Source
    PyTorch, torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, monitoredBarrier (2.13 and older), TraceUtils.h (2.13 and
    older) and torch/distributed/flight_recorder/components (2.13). Horovod, horovod/common/stall_inspector.cc, before
    that operations.cc (several versions). All read 2026-11-21.
    https://github.com/Lightning-AI/pytorch-lightning/pull/5155, https://github.com/horovod/horovod/issues/1012.
    """

    message = "{what}"
    told = "a rank never entered a collective in which the others waited"
    fix = (
        "read the rank's last lines, and its rank_{rank}.stack.txt if allranks ended it; allranks stack {job} while it "
        "hangs; only slow: a longer --hang-timeout"
    )
    exit_code = Exit.HANG
    traits = frozenset({Trait.OTHERS_WAIT_FOR_IT})
    also = ("AR410", "AR409", "AR401", "AR411")
    signs = (
        Sign(
            rf"Ranks? {_RANKS} failed to pass monitoredBarrier in (?P<ms>[0-9]+) ms",
            blames=_NAMED,
            where=("log", "end"),
        ),
        Sign(
            r"timed out in monitoredBarrier after (?P<ms>[0-9]+) ms",
            Role.VICTIM,
            _NOBODY,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"successfully reached monitoredBarrier, but received errors while waiting ?for send/recv from rank "
            r"(?P<rank>0)",
            Role.VICTIM,
            _NAMED,
            Confidence.UNDECIDED,
            where=("log", "end"),
        ),
        Sign(
            rf"To our best knowledge, ranks \[{_RANKS}\] are the lagging ranks that caused this timeout", blames=_NAMED
        ),
        Sign(rf"\[{_RANKS}\] finished collective #(?P<seq>[0-9]+), but didn't join collective #", blames=_NAMED),
        Sign(
            rf"\[{_RANKS}\] joined but didn't finish collective #(?P<seq>[0-9]+)",
            Role.LIKELY,
            _NAMED,
            Confidence.LIKELY,
        ),
        # What the analyser of PyTorch's flight recorder says of its dumps.
        Sign(rf"\bmissing ranks: \{{{_RANKS}\}}", blames=_NAMED),
        Sign(
            r"Not all ranks joining collective, sequence number: (?P<seq>[0-9]+)",
            Role.LIKELY,
            _NOBODY,
            Confidence.LIKELY,
        ),
        # XLA
        Sign(
            r"threads to join the rendezvous, but not all of them arrived on time",
            Role.VICTIM,
            _NOBODY,
            Confidence.UNDECIDED,
        ),
        # HCCL
        Sign(
            r"Getting socket times out\. Reason: Remote Rank did not send the data in time",
            Role.VICTIM,
            _NOBODY,
            Confidence.UNDECIDED,
        ),
        # Horovod writes who is missing, line by line: `3: [allreduce.grad_0, ...]`, `3!: [...]` before it gives up.
        Sign(
            r"submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of "
            r"ranks for more than (?P<seconds>[0-9]+) seconds",
            Role.VICTIM,
            _NOBODY,
            Confidence.LIKELY,
        ),
        Sign(r"(?P<rank>[0-9]+)!?: \[[^\]]*Horovod[A-Z]", Role.LIKELY, _NAMED, Confidence.LIKELY),
        Sign(r"(?P<rank>[0-9]+)!?: \[(?:horovod_)?allreduce\.", Role.LIKELY, _NAMED, Confidence.LIKELY),
        Sign(r"(?P<rank>[0-9]+)!?: \[broadcast[._]", Role.LIKELY, _NAMED, Confidence.LIKELY),
        Sign(r"(?P<rank>[0-9]+)!?: \[allgather[._]", Role.LIKELY, _NAMED, Confidence.LIKELY),
        Sign(rf"\[missing ranks: ?{_RANKS}\]", Role.LIKELY, _NAMED, Confidence.LIKELY),
        Sign(r"\[ready ranks: ?(?P<ready>[0-9]+(?:, ?[0-9]+)*)\]", Role.VICTIM, _NOBODY, Confidence.LIKELY),
        Sign(
            r"is stalled for longer than (?P<seconds>[0-9]+) seconds\. Will shutdown",
            Role.LIKELY,
            _NOBODY,
            Confidence.LIKELY,
        ),
    )
    hits = (
        "EI0006: 2024-08-05-18:15:21.270.506 Getting socket times out. Reason: Remote Rank did not send the data in "
        "time. Please check the reason for the rank being stuck",
        "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms",
        "[E ProcessGroupGloo.cpp:138] [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 120000 ms",
        "RuntimeError: Rank 0 timed out in monitoredBarrier after 15000 ms.",
        "[rank1]:[E325 17:13:23.163175227 ProcessGroupGloo.cpp:145] Rank 1 successfully reached monitoredBarrier, but "
        "received errors while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.",
        "\t - To our best knowledge, ranks [3] are the lagging ranks that caused this timeout. They never joined any "
        "collectives",
        "\t     [1, 4] finished collective #25, but didn't join collective #26 (count from 1)",
        "\t   - [0] joined but didn't finish collective #12 (count from 1)",
        "missing ranks: {1}",
        "E external/xla/xla/service/rendezvous.cc:38] This thread has been waiting for `initialize clique for rank 6; "
        "stream=0` for 10 seconds and may be stuck. Expected 8 threads to join the rendezvous, but not all of them "
        "arrived on time.",
        "Not all ranks joining collective, sequence number: 5",
        "[0]<stderr>:[2020-12-29 16:50:57.724380: W /tmp/pip-install-uk4q7bn5/horovod/horovod/common/stall_inspector.cc"
        ":105] One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
        "waiting for remainder of ranks for more than 60 seconds. This may indicate that different ranks are trying to "
        "submit different tensors or that only subset of ranks is submitting tensors, which will cause deadlock.",
        "[0]<stderr>:0: [broadcast.bool.sz]",
        "1: [allreduce.c_d1.bias, allreduce.c_d1.weight, allreduce.c_d1_bn.bias ...]",
        "3!: [allgather.noname.1]",
        "4: [horovod_allreduce.0, horovod_allreduce.1, horovod_allreduce.10 ...]",
        "0: [cond_1/then/_10/cond_1/SGD/PartitionedCall/DistributedSGD_Allreduce/cond/then/HorovodAllreduce_grads_0]",
        "[2019-04-13 13:53:31.851588: W horovod/common/operations.cc:588] HorovodBroadcast_conv2d_1_kernel_0 [missing "
        "ranks: 1]",
        "HorovodBroadcast_InceptionV3_AuxLogits_Conv2d_2a_5x5_weights_0 [ready ranks: 5, 6, 3, 1, 4, 0],",
        'One or more rank (marked by "!") is stalled for longer than 120 seconds. Will shutdown.',
    )
    misses = (
        "time (ms): 3: [forward-compute 12.1, backward-compute 22.3]",
        "torch.distributed.monitored_barrier(group=group_gloo, timeout=timedelta(seconds=2))",
        "[rank1]:[E304 10:42:45.196832485 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600008 "
        "milliseconds before timing out.",
    )


class StragglerRank(Cause, id="AR409"):
    """A rank enters collectives late, and all others wait for it.

    ## What it means
    The rank works, but it is slower than the others, or it does something that the others do not: it evaluates,
    tokenizes, downloads, or saves a checkpoint. Or its GPU, disk or data loader is slow.

    ## Why it breaks the job
    Every step takes as long as the slowest rank. If it is later than the timeout (10 minutes with NCCL, 30 with Gloo
    and the store), the others give up, and the run fails although nothing is broken.

    ## Example
    From a repository's README, where rank 0 waited for a person to log in, and from NVIDIA's resiliency extension:

        torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout
        STRAGGLER DETECTION WARNING: Some GPUs have worse relative performance. Affected ranks: [76, 13, 45]

    ## Fix
    Find what only that rank does. If it does that once, move it before `init_process_group`, or raise the timeout:

        torch.distributed.init_process_group("nccl", timeout=timedelta(hours=2))

    If the rank is slower in every step, no timeout helps. Compare its GPU and node with the others: `nvidia-smi -q -d
    CLOCK,PERFORMANCE`, `allranks check --deep`. The report then says by how much it is later than all other ranks
    (median over the sampled collectives), and up to which share of the time they wait for it: 100 ms in a step of 200
    ms are 50%. Buckets of one backward pass that are late together count once.

    ## Source
    PyTorch, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, broadcastUniqueNCCLID (2.13 and older), socket.cpp and
    TCPStore.cpp (2.13). nvidia-resiliency-ext, attribution of stragglers (0.4). All read 2026-11-21.
    https://github.com/huggingface/transformers/issues/15618 (read 2026-11-21).
    """  # noqa: E501  (real lines)

    message = "{what}"
    told = "a rank missed the timeout of a collective"
    fix = (
        "find what only that rank does before the collective (data, evaluation, checkpoint): allranks stack {job} "
        "while others wait; or raise the timeout"
    )
    exit_code = Exit.USER_CODE
    traits = frozenset({Trait.ALL_OTHERS_REPORT_IT, Trait.OTHERS_WAIT_FOR_IT})
    also = ("AR401", "AR408")
    signs = (
        Sign(
            r"STRAGGLER DETECTION WARNING: Some GPUs .{5,40}\. Affected ranks: [\[{(](?:StragglerId\(rank="
            r"(?P<rank>[0-9]+)(?:, node='(?P<node>[^']{1,120})')?|(?P<ranks>[0-9][0-9, ]*))",
            blames=_NAMED,
        ),
        Sign(r"Detected [Ss]tragglers: \[(?P<ranks>[0-9][0-9, ]*)\]", blames=_NAMED),  # FlagScale
        # The store works and has no such key: the first rank of the group has not come to this collective.
        Sign(
            r"etr(?:ie|ei)ving ncclUniqueId from \[(?P<rank>[0-9]+)\] via c10d key-value store by key '[^']*', but "
            r"store->get\('[^']*'\) (?:got|returned) error: (?:Socket Timeout|[Ww]ait timeout|Timeout waiting)",
            Role.LIKELY,
            _NAMED,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"waitForInput: socket SocketImpl\(.*\) timed out after (?P<ms>[0-9]+)ms",
            Role.LIKELY,
            _NOBODY,
            Confidence.UNDECIDED,
        ),
        Sign(
            r"wait timeout after (?P<ms>[0-9]+)ms, keys: (?:/[^ ]{0,80})?/default_pg/[0-9]+//(?:[0-9]+//)?cuda//",
            Role.LIKELY,
            _NOBODY,
            Confidence.UNDECIDED,
        ),
        # Of any key: who should have set it?
        Sign(r"wait timeout after [0-9]+ms", Role.VICTIM, _NOBODY, Confidence.UNDECIDED, where=("end",)),
        Sign(r"(?:Error|error): Socket Timeout", Role.VICTIM, _NOBODY, Confidence.UNDECIDED),
        # py-spy's dumps: who waits for data sleeps, who waits in a collective of NCCL spins.
        Sign(
            r"_(?:try_)?get_data \(torch/utils/data/dataloader\.py:[0-9]+\)", Role.LIKELY, _NOBODY, Confidence.UNDECIDED
        ),
        Sign(r'Thread (?P<pid>[0-9]+) \(idle\): "MainThread"', Role.CONTEXT, _NAMED, Confidence.UNDECIDED),
        # Of a process group that was aborted: what came from rank 0 is nothing at all.
        Sign(
            r"has [0-9]+ params, while rank (?P<peer>[0-9]+) has inconsistent 0 params",
            Role.VICTIM,
            Blames.PEER,
            Confidence.UNDECIDED,
        ),
        Sign(r"DataLoader timed out after (?P<seconds>[0-9.]+) seconds", Role.LIKELY, confidence=Confidence.LIKELY),
    )
    hits = (
        "RuntimeError: DataLoader timed out after 120 seconds",
        "STRAGGLER DETECTION WARNING: Some GPUs have worse relative performance. Affected ranks: [76, 13, 45]",
        "STRAGGLER DETECTION WARNING: Some GPUs performance dropped. Affected ranks: "
        "{StragglerId(rank=3, node='h100-1')}",
        "[default0]:Detected Stragglers: [3, 11]",
        "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] "
        "via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout",
        "[5] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key "
        "'0', but store->get('0') got error: wait timeout after 300000ms, keys: /default_pg/0//cuda//0",
        "[rank1]:[W602 11:34:56.854597329 socket.cpp:489] [c10d] waitForInput: socket SocketImpl(fd=79, "
        "addr=[localhost]:41170, remote=[localhost]:29500) timed out after 1800000ms",
        "torch.distributed.DistStoreError: Socket Timeout",
        "    _try_get_data (torch/utils/data/dataloader.py:1011)",
        'Thread 688514 (idle): "MainThread"',
        "RuntimeError: DDP expects same model across all ranks, but Rank 1 has 221 params, while rank 0 has "
        "inconsistent 0 params.",
    )
    misses = (
        "[3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', "
        "but store->get('0') got error: Connection reset by peer",
        "[default7]: iteration   42780/ 115311 | consumed samples: 71455664 | elapsed time per iteration (s): 105.16",
        "Straggler report processing time: 0.042 sec.",
        '  File "/opt/venv/lib/python3.8/site-packages/torch/utils/data/dataloader.py", line 872, in _try_get_data',
        'Thread 688510 (active): "MainThread"',
    )
