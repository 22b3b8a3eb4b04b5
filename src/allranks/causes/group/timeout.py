"""What timed out: Gloo or NCCL between two nodes, a collective of the job, or a hang without a message."""

from __future__ import annotations

from allranks.causes.cause import Cause
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence

_NOBODY = Blames.NOBODY

_PG = r"(?:\[PG (?:ID [0-9]+ PG GUID )?(?P<group>[0-9A-Za-z_.:-]+)(?: ?\([^)]*\))? Rank (?P<rank>[0-9]+)\] *)?"
"""`[PG ID 0 PG GUID 0(default_pg) Rank 1] `, before 2.6 `[PG 0 (default_pg) Rank 1] `, in 2.3 `[PG 0 Rank 1] `."""
_WORK = (
    r"(?:SeqNum=(?P<seq>[0-9]+), )?OpType=(?P<op>[A-Za-z0-9_]+)(?:, TensorShape=\[(?P<shape>[0-9, ]*)\])?"
    r"(?:, NumelIn=(?P<numel>[0-9]+), NumelOut=(?P<numel_out>[0-9]+))?, Timeout\(ms\)=(?P<ms>[0-9]+)\)"
)
"""What stands in `WorkNCCL(...)`: PyTorch 1.8 has no SeqNum, and there is no NumelIn up to 2.0."""


class GlooTimeout(Cause, id="AR403"):
    """Gloo cannot complete a collective between two nodes.

    ## What it means
    Two nodes reach each other, but an all-reduce over Gloo between them does not complete: the connections are not
    made, bytes stop flowing, or the sum is wrong.

    ## Why it breaks the job
    Every collective of every rank waits for these two. With Gloo, all ranks report their own timeout, 30 minutes later
    by default, and each names a neighbor, not the culprit.

    ## Example
    From meta-pytorch/torchtune#2676, and from PyTorch 2.13 where the other process was stopped:

        RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete
        [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete

    ## Fix
    Gloo listens on an ephemeral port of the interface in GLOO_SOCKET_IFNAME, or of the address of the host name. Check
    on the culprit that this is the data interface, and that no firewall filters those ports:

        echo $GLOO_SOCKET_IFNAME; getent hosts $(hostname); cat /proc/sys/net/ipv4/ip_local_port_range; nft list ruleset

    ## Source
    Gloo, gloo/transport/tcp/pair.cc and unbound_buffer.cc (as in PyTorch 2.13).
    https://github.com/meta-pytorch/torchtune/issues/2676 (read 2026-11-21).
    """  # noqa: E501  (real lines)

    deep = "Gloo between pairs of nodes"
    message = "{what}"
    told = "a Gloo operation between two ranks timed out"
    fix = (
        "on {node}: echo $GLOO_SOCKET_IFNAME must show the data interface; nft list ruleset must not filter its "
        "ephemeral ports"
    )
    exit_code = Exit.NODE_FAULT
    traits = frozenset({Trait.ONLY_WAITS})
    no_fault_yet = "only check --deep finds it; the roll call finds the faults of the lab earlier"
    also = ("AR409", "AR490")
    signs = (
        Sign(
            r"Timed out waiting (?P<ms>[0-9]+)ms for (?:recv|send) operation to complete",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
        Sign(
            r"(?:Read|Write) timeout \[(?P<peer>[^\]]+)\]:(?P<port>[0-9]+)",
            Role.VICTIM,
            Blames.PEER,
            Confidence.UNDECIDED,
            where=("log", "end"),
        ),
        Sign(
            r"Application timeout caused pair closure", Role.VICTIM, confidence=Confidence.LIKELY, where=("log", "end")
        ),
    )
    hits = (
        "RuntimeError: Application timeout caused pair closure",
        "[rank2]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
        "1800000ms for recv operation to complete",
        "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for "
        "recv operation to complete",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:181] Read timeout [10.0.0.3]:41234",
    )
    misses = ("RuntimeError: Wait timeout", "requests.exceptions.ReadTimeout: HTTPSConnectionPool: Read timed out.")


class NcclPairFailed(Cause, id="AR416"):
    """NCCL cannot complete a collective between two nodes.

    ## What it means
    Two nodes reach each other over TCP, but an all-reduce over NCCL between one GPU of each does not complete, or its
    sum is wrong. Their RDMA ports, GPUs, plugins or NCCL settings do not work together. `allranks check --deep` names
    the two nodes. A log may contain only NCCL's "unhandled system error", which names no node.

    ## Why it breaks the job
    The first collective of the job hangs on all ranks. NCCL's watchdog ends them after 10 minutes by default, and no
    rank says between which two nodes it hung.

    ## Example
    From NVIDIA/nccl#1409, the last line of each rank:

        [rank7]:[E816 01:45:40.183009389 ProcessGroupNCCL.cpp:607] [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=80078, OpType=BROADCAST, NumelIn=5056, NumelOut=5056, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.

    ## Fix
    Run the pair again with NCCL's log, and once without RDMA to see whether the fabric is at fault:

        NCCL_DEBUG=INFO allranks run train.py; NCCL_IB_DISABLE=1 allranks run train.py

    ## Source
    https://github.com/NVIDIA/nccl/issues/1409 (read 2026-11-21).
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html.
    """  # noqa: E501  (a real line)

    deep = "NCCL between pairs of nodes"
    message = "{what}"
    told = "NCCL could not complete a collective; its log, which says why, was not enabled"
    also = ("AR215", "AR206", "AR203")
    # All that NCCL says where its own lines were not asked for: a socket, a device or shared memory refused it.
    signs = (
        Sign(
            r"NCCL error(?:: | in: ).{0,160}unhandled system error",
            Role.VICTIM,
            confidence=Confidence.LIKELY,
        ),
    )
    hits = (
        "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, "
        "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3",
    )
    misses = ("NCCL error in: ../torch/lib/c10d/ProcessGroupNCCL.cpp:911, invalid usage, NCCL version 2.7.8",)
    fix = (
        "run with NCCL_DEBUG=INFO, and once with NCCL_IB_DISABLE=1 to see whether the fabric is at fault; until then "
        "exclude {node}"
    )
    exit_code = Exit.NODE_FAULT
    no_fault_yet = "only check --deep on nodes with GPUs finds it"
    never_on_hardware = True


class SlowCollective(Cause, id="AR417"):
    """Collectives with this node are much slower than those between other nodes.

    ## What it means
    An all-reduce between this node and each of its partners completes, but takes longer than those of other pairs, even
    at its best. The link may be slow, or the cores that serve it, memory, or PCIe. With NCCL the transport may be the
    reason: sockets instead of RDMA, or no GPUDirect.

    ## Why it breaks the job
    The job runs, but at the speed of this node: in a ring every byte passes through every node, and all GPUs wait for
    it in each step.

    ## Example
    From our lab: six nodes with links of 1 Gbit/s, and node03 with 400 Mbit/s, in `allranks check --deep -v`:

        gloo, round 2: master-node <-> node04: 4 MiB in 0.05024 s, 83.5 MB/s; 16 MiB in 144 ms, busbw 0.117 GB/s
        gloo, round 2: node05 <-> node03: 4 MiB in 0.089746 s, 46.7 MB/s; 16 MiB in 351 ms, busbw 0.0477 GB/s

    ## Fix
    Run this on both nodes of a slow pair and of a fast pair, and compare. NCCL logs which transport it chose:

        top -b -n 1 | head -15; ethtool IFACE | grep Speed; tc qdisc show dev IFACE; lspci -vv | grep LnkSta:
        NCCL_DEBUG=INFO allranks run train.py 2>&1 | grep -E 'via NET|NET/'

    ## Source
    nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth": https://github.com/NVIDIA/nccl-tests (commit 03a204a).
    """

    deep = "bandwidth of pairs of nodes, compared"
    message = "{what}"
    fix = (
        "compare {node} with a fast node: top (busy cores), ethtool on its data interface, tc qdisc; with "
        "NCCL_DEBUG=INFO, NCCL's transport"
    )
    exit_code = Exit.NODE_FAULT
    no_fault_yet = "only check --deep finds it; the roll call reports the lab's slow-link earlier, as AR213"


class CollectiveTimeout(Cause, id="AR490"):
    """Ranks waited in a collective until the timeout, and no line says why.

    ## What it means
    This is an outcome, not a cause: some rank did not enter a collective in which the others waited. The ranks that
    report it are victims.

    ## Why it breaks the job
    The process group is unusable afterwards; NCCL's watchdog ends the process. The cause is on another rank: it died,
    it hangs, it took another branch, it is slow, or it lost its network. That rank's log shows it, or its silence does.

    ## Example
    From NVIDIA/nccl#1409 (NCCL) and meta-pytorch/torchtune#2676 (Gloo):

        [rank7]:[E816 01:45:40.183009389 ProcessGroupNCCL.cpp:607] [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=80078, OpType=BROADCAST, NumelIn=5056, NumelOut=5056, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.
        [rank2]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete

    PyTorch 2.5 and later print the progress of each rank. Look at the rank that completed less work than the others:

        [rank1]:[E1218 20:27:21.484903450 ProcessGroupNCCL.cpp:2168] [PG ID 1 PG GUID 1 Rank 1]  failure detected by watchdog at work sequence id: 1 PG status: last enqueued work: 547, last completed work: -1

    ## Source
    PyTorch, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (1.8, 1.13, 2.13 and some between, read 2026-11-21).
    https://github.com/NVIDIA/nccl/issues/1409 and https://github.com/meta-pytorch/torchtune/issues/2676 (read 2026-11-21).
    """  # noqa: E501  (real lines)

    message = "{what}"
    told = "ranks waited in a collective until the timeout; the logs do not say for which rank"
    exit_code = Exit.HANG
    traits = frozenset({Trait.ONLY_WAITS})
    is_outcome = True
    also = ("AR409", "AR407", "AR410", "AR411", "AR403")
    signs = (
        Sign(
            r"(?:\[[Rr]ank ?(?P<rank>[0-9]+)\] )?(?:Watchdog c|C)aught collective operation timeout"
            r"(?:: *Work[A-Z]+\(" + _WORK + r"(?: ran for (?P<ran_ms>[0-9]+) milliseconds)?)?",
            Role.VICTIM,
            where=("log", "end"),
        ),
        Sign(r"WorkNCCL\(" + _WORK, Role.VICTIM),  # where somebody broke the line
        Sign(
            _PG + r"(?:Timeout at NCCL|Exception \(either an error or timeout\) detected by watchdog at) work: "
            r"(?P<seq>[0-9]+), last enqueued NCCL work: (?P<enqueued>-?[0-9]+), "
            r"last completed NCCL work: (?P<completed>-?[0-9]+)",
            Role.VICTIM,
        ),
        Sign(
            _PG + r"failure detected by watchdog at work sequence id: (?P<seq>[0-9]+) PG status: "
            r"last enqueued work: (?P<enqueued>-?[0-9]+), last completed work: (?P<completed>-?[0-9]+)",
            Role.VICTIM,
        ),
        Sign(
            _PG + r"Received a (?:dump signal due to a collective timeout|timeout signal|global timeout) from +"
            r"(?:this local rank|another rank|some other rank|rank (?P<first>[0-9]+))(?:.*Last enqueued NCCL work: "
            r"(?P<enqueued>-?[0-9]+), last completed NCCL work: (?P<completed>-?[0-9]+))?",
            Role.VICTIM,
        ),
        Sign(_PG + r"Observed flight recorder dump signal from another rank", Role.VICTIM),
        Sign(
            r"NCCL communicator was aborted on rank (?P<rank>[0-9]+)",
            Role.VICTIM,
            confidence=Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(r"Found key in store: NCCLABORTEDCOMM:.*from rank: (?P<first>[0-9]+)", Role.VICTIM, _NOBODY),
        Sign(r"due to collective timeout or exception", Role.VICTIM, confidence=Confidence.LIKELY),
        # An error of any kind ends so, too.
        Sign(
            r"To avoid (?:data|this) inconsistency, we are taking the entire process down",
            Role.VICTIM,
            confidence=Confidence.UNDECIDED,
        ),
        Sign(r"Some NCCL operations have failed or timed out", Role.VICTIM, confidence=Confidence.UNDECIDED),
        Sign(r"RuntimeError: Operation timed out!", Role.VICTIM, confidence=Confidence.LIKELY),
        Sign(
            r"Timed out waiting (?P<ms>[0-9]+)ms for (?:recv|send) operation to complete",
            Role.VICTIM,
            confidence=Confidence.LIKELY,
            where=("log", "end"),
        ),
    )
    hits = (
        "[rank7]:[E816 01:45:40.183009389 ProcessGroupNCCL.cpp:607] [Rank 7] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=80078, OpType=BROADCAST, NumelIn=5056, NumelOut=5056, Timeout(ms)=600000) ran for "
        "600026 milliseconds before timing out.",
        "[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=469508, "
        "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds before timing out.",
        "[E ProcessGroupNCCL.cpp:566] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(OpType=ALLREDUCE, TensorShape=[1], Timeout(ms)=1800000) ran for 1803308 milliseconds",
        "[rank3] Watchdog caught collective operation timeout:",
        "RuntimeError: [Rank 2] Caught collective operation timeout: WorkNCCL(SeqNum=10, OpType=BROADCAST, "
        "Timeout(ms)=60000) ran for 60043 milliseconds before timing out.",
        "RuntimeError: NCCL communicator was aborted on rank 2.  Original reason for failure was: [Rank 2] Watchdog "
        "caught collective operation timeout: WorkNCCL(SeqNum=10, OpType=BROADCAST, Timeout(ms)=1800000) ran for "
        "1805457 milliseconds before timing out.",
        "WorkNCCL(SeqNum=64214, OpType=ALLGATHER, NumelIn=1, NumelOut=32, Timeout(ms)=600000)",
        "[rank0]:[E626 06:24:44.160366013 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 0] Exception "
        "(either an error or timeout) detected by watchdog at work: 808, last enqueued NCCL work: 811, last completed "
        "NCCL work: 807.",
        "[rank2]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 2] Timeout at NCCL work: 7487, last enqueued NCCL work: "
        "7487, last completed NCCL work: 7486.",
        "[rank5]:[E626 16:48:25.440238649 ProcessGroupNCCL.cpp:2268] [PG ID 0 PG GUID 0(default_pg) Rank 5]  failure "
        "detected by watchdog at work sequence id: 120049 PG status: last enqueued work: 120051, last completed work: "
        "120048",
        "[rank2]:[E901 05:20:03.118859045 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a "
        "dump signal due to a collective timeout from  rank 6 and we will try our best to dump the debug info. Last "
        "enqueued NCCL work: 460631, last completed NCCL work: 460630.This is most likely caused by incorrect usages",
        "[rank1]:[E418 01:32:50.907313453 ProcessGroupNCCL.cpp:1890] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a "
        "dump signal due to a collective timeout from this local rank and we will try our best to dump the debug info.",
        "[rank0]:[E1128 21:11:49.041188078 ProcessGroupNCCL.cpp:1806] [PG ID 0 PG GUID 0(default_pg) Rank 0] Observed "
        "flight recorder dump signal from another rank via TCPStore.",
        "RuntimeError: [Rank 3] Found key in store: NCCLABORTEDCOMM:4b0e, from rank: 1. This means that rank has "
        "aborted its NCCL communicators previously and is not in a healthy state.",
        "[rank0]:[F725 02:47:41.268394894 ProcessGroupNCCL.cpp:1653] [PG ID 0 PG GUID 0(default_pg) Rank 0] "
        "Terminating the process after attempting to dump debug info, due to collective timeout or exception.",
        "[rank1]:[E1218 20:27:21.484966856 ProcessGroupNCCL.cpp:695] [Rank 1] To avoid data inconsistency, we are "
        "taking the entire process down.",
        "[E ProcessGroupNCCL.cpp:414] Some NCCL operations have failed or timed out. Due to the asynchronous nature of "
        "CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data. To avoid this inconsistency, "
        "we are taking the entire process down.",
        "RuntimeError: Operation timed out!",
        "[rank2]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
        "1800000ms for recv operation to complete",
    )
    misses = (
        "[rank1]:[E1218 20:27:21.484941868 ProcessGroupNCCL.cpp:667] Stack trace of the failed collective not found, "
        "potentially because FlightRecorder is disabled.",
        "[rank0]:[W303 09:17:03.293812312 ProcessGroupNCCL.cpp:1168] Warning: WARNING: process group has NOT been "
        "destroyed before we destruct ProcessGroupNCCL.",
        "frame #1: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<std::chrono::duration<long>>) + 0x282",
    )


class SilentHang(Cause, id="AR491"):
    """The job hangs without an error: its logs just stop.

    ## What it means
    This is an outcome, not a cause: all ranks printed for a while, and then none did, without an error before the end.

    ## Why it breaks the job
    The job keeps its nodes until somebody looks, or until its time limit. No log shows what it waits for: a collective
    without a timeout (the watchdog is off, or the wait is in CUDA), a file system, or a lock.

    ## Example
    From Lightning-AI/pytorch-lightning#19606, the whole output:

        [rank: 0] Seed set to 42
        Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/5

    ## Source
    https://github.com/Lightning-AI/pytorch-lightning/issues/19606 (read 2026-11-21). What would show it while it
    hangs: `allranks stack JOB`, or `py-spy dump --pid PID` on one rank of each node.
    """

    message = "{what}"
    told = "the logs stop, and no line says why"
    exit_code = Exit.HANG
    traits = frozenset({Trait.SAYS_NOTHING})
    is_outcome = True
    also = ("AR409", "AR599")
