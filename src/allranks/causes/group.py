"""Family 4, the group: does every rank come, is nobody there who should not be, and who left?"""

from __future__ import annotations

from allranks.causes.cause import Cause
from allranks.causes.sign import Sign
from allranks.model.errors import Exit


class MissingRank(Cause, id="AR401"):
    """A rank never came to init_process_group.

    ## What it means
    Its process was started, or should have been, and did not join the group: it hangs before that line, imports for
    minutes, ended early, or never came up.

    ## Why it breaks the job
    `init_process_group` returns when all ranks are there. Plain PyTorch counts who came, after 10 to 30 minutes, and
    does not say which rank did not; on the other ranks the missing one hides in the last number of a key.

    ## Example
    From PyTorch 2.13, on rank 0; then, as another rank words it, rank 1 is missing:

        torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.
        DistStoreError: wait timeout after 15000ms, keys: /default_pg/0//cpu//0/1

    ## Fix
    Look at what that rank does instead: its .out and .err in the run directory, and its stack while it hangs:

        allranks stack JOB; allranks logs JOB

    Usual reasons: it downloads data or a model first, it waits for a lock on a shared file system, a branch of the
    script that only this rank takes, an import error.

    ## Source
    PyTorch, torch/csrc/distributed/c10d/TCPStore.cpp (2.13, seen 2026-11-21).
    https://github.com/OpenRLHF/OpenRLHF/issues/1040 (read 2026-11-21).
    """

    message = "{what}"
    fix = "look at what it does before that line: its .out and .err, or allranks stack JOB while it hangs"
    exit_code = Exit.USER_CODE
    no_fault_yet = "it takes a script that holds a rank back; the tests of join start such ones"
    also = ("AR201", "AR402")
    signs = (
        Sign(r"waiting for clients\. [0-9]+/[0-9]+ clients joined"),
        Sign(r"wait timeout after [0-9]+ms, keys: /default_pg/"),
    )
    hits = (
        "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
        "torch.distributed.DistStoreError: Timed out after 4 seconds waiting for clients. 1/2 clients joined.",
        "torch.distributed.DistStoreError: wait timeout after 15000ms, keys: /default_pg/0//cpu//0/1",
    )
    misses = ("RuntimeError: Wait timeout", "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 15000 ms")


class RendezvousTimeout(Cause, id="AR402"):
    """torchrun's agents did not find together in time.

    ## What it means
    A job that was started with torchrun waited at its rendezvous for more nodes and gave up: not all agents were
    started, they have different `--rdzv-id`s or endpoints, or some do not reach the store.

    ## Why it breaks the job
    No worker is started at all. The message has no text: neither how many nodes came nor which ones did not.

    ## Example
    From facebookresearch/av_hubert#19:

        "message": "RendezvousTimeoutError: ",

    ## Fix
    Start it with `allranks run` in place of torchrun: same flags, and the nodes that are missing are named within
    seconds. With torchrun: compare `--nnodes`, `--rdzv-id` and `--rdzv-endpoint` on all nodes, and see that torchrun
    runs once on each: `srun --ntasks-per-node=1`.

    ## Source
    PyTorch, torch/distributed/elastic/rendezvous/dynamic_rendezvous.py (2.13: join 600 s).
    https://github.com/facebookresearch/av_hubert/issues/19 (read 2026-11-21).
    """

    message = "{what}"
    fix = "allranks run in place of torchrun names the missing nodes; else compare --nnodes, --rdzv-id, --rdzv-endpoint"
    exit_code = Exit.SETUP
    no_fault_yet = "it is torchrun's own; allranks has no such rendezvous"
    also = ("AR201", "AR401")
    signs = (Sign(r"RendezvousTimeoutError"),)
    hits = (
        '    "message": "RendezvousTimeoutError: ",',
        "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
    )
    misses = ("torch.distributed.elastic.rendezvous.api.RendezvousClosedError",)


class GlooTimeout(Cause, id="AR403"):
    """Gloo cannot carry a collective between two nodes.

    ## What it means
    Two nodes reach each other, and yet an all-reduce over Gloo between them does not come to its end: the connections
    are not made, bytes stop flowing, or the sum is wrong.

    ## Why it breaks the job
    Every collective of every rank waits for these two. With Gloo all ranks report a timeout of their own, 30 minutes
    later by default, and each of them names a neighbour, not the culprit.

    ## Example
    From meta-pytorch/torchtune#2676, and from PyTorch 2.13 where the other process was stopped:

        RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete
        [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete

    ## Fix
    Gloo listens on an ephemeral port of the interface in GLOO_SOCKET_IFNAME, or of what the host name resolves to. On
    the culprit see that this is the data interface and that nothing filters those ports:

        echo $GLOO_SOCKET_IFNAME; getent hosts $(hostname); cat /proc/sys/net/ipv4/ip_local_port_range; nft list ruleset

    ## Source
    Gloo, gloo/transport/tcp/pair.cc and unbound_buffer.cc (as in PyTorch 2.13).
    https://github.com/meta-pytorch/torchtune/issues/2676 (read 2026-11-21).
    """  # noqa: E501  (real lines)

    message = "{what}"
    fix = "see on {node} that GLOO_SOCKET_IFNAME is the data interface and that no firewall filters its ephemeral ports"
    exit_code = Exit.NODE_FAULT
    no_fault_yet = "found by check --deep only; the roll call names what the lab can break before"
    also = ("AR490",)
    signs = (Sign(r"Timed out waiting [0-9]+ms for (?:recv|send) operation to complete"),)
    hits = (
        "[rank2]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
        "1800000ms for recv operation to complete",
        "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for "
        "recv operation to complete",
    )
    misses = ("RuntimeError: Wait timeout",)


class StaleStore(Cause, id="AR404"):
    """A left-over of an earlier start wanted to join.

    ## What it means
    An agent or a rank of an earlier attempt of this job still runs somewhere and knocked at the leader's door. It was
    refused: attempts are told apart.

    ## Why it breaks the job
    It does not break this one. With plain PyTorch such a rank joins the new store: ranks count wrong, keys of two
    runs mix, and the job hangs or ends with numbers that nobody can explain. It may still hold a GPU, a port, or
    write a checkpoint.

    ## Example
    From our lab, an agent of attempt 0 that survived into attempt 1:

        AR404 stale-store   node03   node03 wanted to join and was refused

    ## Fix
    End what was left behind on that node:

        pgrep -u $USER -af 'allranks run|train.py'; kill PID

    SLURM does that at the end of a job where `ProctrackType=proctrack/cgroup` is set; with linuxproc or pgid processes
    that left their session survive. Ask the admin.

    ## Source
    SLURM, slurm.conf(5), ProctrackType: https://slurm.schedmd.com/slurm.conf.html.
    """

    message = "{what}"
    fix = "on {node}: pgrep -u $USER -af 'allranks run' shows what was left behind; end it"
    exit_code = Exit.SETUP


class DuplicateRank(Cause, id="AR405"):
    """Two agents came for the same place in the group.

    ## What it means
    A second agent came that said it were node N of the job, when node N was there already. The first one stays, the
    second was refused.

    ## Why it breaks the job
    With plain PyTorch the second process with the same rank overwrites the first one's address in the store. Some ranks
    connect to the one, some to the other; the group hangs, and the rank that nobody started is reported missing.

    ## Example
    From our lab; the same with torchrun by hand is two machines with `--node-rank 1`:

        AR405 duplicate-rank   node03   node03 wanted to join and was refused

    ## Fix
    Count what is started where. Under SLURM one agent a node: `srun --ntasks-per-node=1 allranks run ...`. By hand each
    node its own `--node-rank`, 0 to one less than `--nnodes`. Do not set RANK or GROUP_RANK in .bashrc.

    ## Source
    PyTorch, torchrun, --node-rank: https://docs.pytorch.org/docs/stable/elastic/run.html (2.13).
    """

    message = "{what}"
    fix = "start one agent for each node: srun --ntasks-per-node=1, or by hand another --node-rank for each"
    exit_code = Exit.SETUP


class Stranger(Cause, id="AR406"):
    """Something that is not of this job knocked at the leader's port.

    ## What it means
    It named another job, did not know the job's secret, speaks another version of the protocol, or sent something
    that is no message of ours at all: a port scanner, a monitoring agent, a browser, a job of somebody else with the
    same port.

    ## Why it breaks the job
    It does not: it was refused before it was believed. Plain PyTorch's store lets in whoever connects; a stranger that
    stays silent can hold up NCCL's bootstrap, and one with the same rank takes a place in the group.

    ## Example
    From NVIDIA/nccl#1612, NCCL before 2.27.3 and a scanner that hangs up early:

        misc/socket.cc:71 NCCL WARN socketProgress: Connection closed by remote peer 10.10.1.3<36138>

    ## Fix
    Most often nothing. The evidence says who it was and what it sent. Another job of yours at the same port: give
    each its own, `[network] port` or `--master-port`. Other versions of allranks on some nodes: install the same on
    all. A scanner: tell the admin which network gradients use.

    ## Source
    https://github.com/NVIDIA/nccl/issues/1612 (read 2026-11-21). What the handshake proves: allranks' wire protocol.
    """

    message = "{what}"
    fix = "see who {node} is and what it sent; another job at this port: give each its own [network] port"
    exit_code = Exit.SETUP
    no_fault_yet = "the tests of wire and preflight knock with other secrets, versions and garbage"


class DeadRank(Cause, id="AR407"):
    """A rank died or left, and the others lost it in the middle of a collective.

    ## What it means
    Its process was killed by a signal that nobody of allranks sent, or it ended by itself before the others were done.
    What the other ranks report afterwards (connection closed, timeout) are consequences.

    ## Why it breaks the job
    A collective needs every rank. With NCCL the survivors wait until the watchdog's timeout, 10 minutes by default,
    and each of them reports a timeout of its own: hundreds of ranks, none of which is at fault. The one that died
    says nothing, because it is dead. With Gloo the error comes at once and names a neighbour.

    ## Example
    From hpcaitech/ColossalAI#3514, torchrun on the node of the dead rank; -9 is SIGKILL, most often out of memory:

        ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 3 (pid: 812917) of binary: /opt/conda/bin/python

    ## Fix
    Look at how it ended, on its own node:

        dmesg -T | grep -iE 'killed process|segfault'; sacct -j JOB --format=JobID,NodeList,State,ExitCode,MaxRSS

    SIGKILL: memory; fewer data loader workers, a smaller batch, `--mem`. SIGSEGV, SIGABRT: a crash in native code;
    run with PYTHONFAULTHANDLER=1. SIGBUS: a full /dev/shm. Exit code 0: it was done before the others; every rank
    must run the same number of steps.

    ## Source
    signal(7). PyTorch, torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, kProcessGroupNCCLDefaultTimeout (2.13).
    https://github.com/hpcaitech/ColossalAI/issues/3514 (read 2026-11-21).
    """  # noqa: E501  (a real line)

    aliases = ("MN3",)
    message = "{what}"
    fix = "look at how it ended on {node}: dmesg -T | grep -iE 'killed process|segfault', and the end of its .err"
    exit_code = Exit.USER_CODE
    no_fault_yet = "it takes a running job; the tests of launch kill ranks of one"
    signs = (Sign(r"failed \(exitcode: -[0-9]+\) local_rank: [0-9]+ \(pid: [0-9]+\)"),)
    hits = (
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 3 (pid: 812917) of "
        "binary: /data/chenhao/anaconda3/envs/ColossalAI-Chat/bin/python",
        "E1223 05:18:02.971000 3304089 site-packages/torch/distributed/elastic/multiprocessing/api.py:882] failed "
        "(exitcode: -11) local_rank: 0 (pid: 3304209) of binary: /root/miniconda3/envs/qat-env/bin/python3.12",
    )
    misses = (
        "E0213 12:07:20.086000 870572 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) "
        "local_rank: 0 (pid: 876053) of binary: /usr/bin/python3.11",
        "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 812914 closing signal SIGTERM",
    )


class NcclPairFailed(Cause, id="AR416"):
    """NCCL cannot carry a collective between two nodes.

    ## What it means
    Two nodes reach each other over TCP, and yet an all-reduce over NCCL between one GPU of each does not come to its
    end, or its sum is wrong: their RDMA ports, GPUs, plugins or NCCL settings do not work together.

    ## Why it breaks the job
    The first collective of the job hangs on all ranks. NCCL's watchdog ends them after 10 minutes by default, and no
    rank says between which two nodes it hung.

    ## Example
    From NVIDIA/nccl#1409, as the ranks of such a job end:

        [rank7]:[E816 01:45:40.183009389 ProcessGroupNCCL.cpp:607] [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=80078, OpType=BROADCAST, NumelIn=5056, NumelOut=5056, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.

    ## Fix
    Run the pair again with NCCL's own words, and leave RDMA out to see whether it is the fabric:

        NCCL_DEBUG=INFO allranks run train.py; NCCL_IB_DISABLE=1 allranks run train.py

    ## Source
    https://github.com/NVIDIA/nccl/issues/1409 (read 2026-11-21).
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html.
    """  # noqa: E501  (a real line)

    message = "{what}"
    fix = "leave {node} out, or run it with NCCL_DEBUG=INFO, and with NCCL_IB_DISABLE=1 to see whether it is the fabric"
    exit_code = Exit.NODE_FAULT
    no_fault_yet = "found by check --deep on nodes with GPUs only"
    never_on_hardware = True


class CollectiveTimeout(Cause, id="AR490"):
    """Ranks waited in a collective until it timed out, and nothing says why.

    ## What it means
    An outcome, not a cause: some rank did not come to a collective that the others were in. Who reports it is a victim.

    ## Why it breaks the job
    The process group cannot be used any more; NCCL's watchdog ends the process. The reason is on another rank: it
    died, it hangs, it took another branch, it is slow, or its network is gone. That rank's own log has it, or its
    silence.

    ## Example
    From NVIDIA/nccl#1409 (NCCL), meta-pytorch/torchtune#2676 (Gloo):

        [rank7]:[E816 01:45:40.183009389 ProcessGroupNCCL.cpp:607] [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=80078, OpType=BROADCAST, NumelIn=5056, NumelOut=5056, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.
        [rank2]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete

    ## Source
    PyTorch, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (2.13). https://github.com/NVIDIA/nccl/issues/1409 and
    https://github.com/meta-pytorch/torchtune/issues/2676 (read 2026-11-21).
    """  # noqa: E501  (real lines)

    message = "{what}"
    exit_code = Exit.HANG
    is_outcome = True
    also = ("AR403",)
    signs = (
        Sign(r"Watchdog caught collective operation timeout: WorkNCCL\("),
        Sign(r"Timed out waiting [0-9]+ms for (?:recv|send) operation to complete"),
    )
    hits = (
        "[rank7]:[E816 01:45:40.183009389 ProcessGroupNCCL.cpp:607] [Rank 7] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=80078, OpType=BROADCAST, NumelIn=5056, NumelOut=5056, Timeout(ms)=600000) ran for "
        "600026 milliseconds before timing out.",
        "[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=469508, "
        "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds before timing out.",
        "[rank2]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
        "1800000ms for recv operation to complete",
    )
    misses = (
        "[rank0]:[E626 06:24:44.160366013 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 0] Exception "
        "(either an error or timeout) detected by watchdog at work: 808, last enqueued NCCL work: 811, last completed "
        "NCCL work: 807.",
    )
