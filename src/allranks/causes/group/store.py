"""Did the group lose its store, which all ranks read, or does the thread that watches NCCL hang?"""

from __future__ import annotations

from allranks.causes.cause import Cause
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence

_NOBODY = Blames.NOBODY


class HeartbeatStuck(Cause, id="AR413"):
    """NCCL's watchdog thread hangs, and its monitor ends the process.

    ## What it means
    PyTorch's watchdog thread checks the running collectives all the time. A second thread monitors it and found no
    progress: the watchdog hangs in a call of CUDA or NCCL, or waits for the GIL that another thread holds in such a
    call.

    ## Why it breaks the job
    The process is aborted after TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC (480 s; 600 s in PyTorch 2.2 and 2.3). If all ranks
    report this, they hang together in a collective that never completes. If one rank reports it, that rank is at fault.

    ## Example
    From Intellindust-AI-Lab/DEIM#105:

        [rank1]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 1] Heartbeat monitor timed out! Process will be terminated after dumping debug info. workMetaList_.size()=103

    ## Fix
    Find where it hangs before it is ended. Print the Python and C++ stacks of that rank:

        py-spy dump --native --pid PID

    Often the rank has other data than the rest (streaming datasets), a long checkpoint holds the GIL, or a GPU is
    broken. Raise TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC only if the wait is legitimate.

    ## Source
    PyTorch, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, HeartbeatMonitor::runLoop (read 2026-11-21).
    https://github.com/Intellindust-AI-Lab/DEIM/issues/105 (read 2026-11-21).
    """  # noqa: E501  (a real line)

    message = "{what}"
    told = "NCCL's watchdog thread hung, and its monitor ended the process"
    fix = (
        "while that rank hangs: py-spy dump --native --pid PID; if the wait is legitimate, raise "
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
    )
    exit_code = Exit.HANG
    traits = frozenset({Trait.FOLLOWS_A_DEATH})
    no_fault_yet = "it needs a GPU and a CUDA call that hangs"
    also = ("AR490",)
    signs = (
        Sign(
            r"ProcessGroup[A-Z]{2,6}'s watchdog got stuck for (?P<seconds>[0-9]+) seconds",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"Heartbeat monitor timed out! Process will be terminated after dumping debug info",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(r"that detected no heartbeat of its watchdog", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"due to ProcessGroup[A-Z]{2,6} watchdog hang", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(
            r"Could not acquire GIL within 300 ms on exit, possible GIL induced hang",
            Role.CONTEXT,
            confidence=Confidence.UNDECIDED,
        ),
    )
    hits = (
        "[rank1]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 1] [PG 0 Rank 1] ProcessGroupNCCL's watchdog got stuck for "
        "600 seconds without making progress in monitoring enqueued collectives. This typically indicates a NCCL/CUDA "
        "API hang blocking the watchdog",
        "[rank2]:[E718 04:48:58.260494728 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) Rank 2] "
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued",
        "[rank1]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 1] Heartbeat monitor timed out! Process will be terminated "
        "after dumping debug info. workMetaList_.size()=103",
        "[rank0]:[E ProcessGroupNCCL.cpp:1310] [PG 0 Rank 0] First PG on this rank that detected no heartbeat of its "
        "watchdog.",
        "[rank0]:[F725 02:47:41.268394894 ProcessGroupNCCL.cpp:1653] [PG ID 0 PG GUID 0(default_pg) Rank 0] "
        "Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.",
        "[rank0]:[E725 02:47:41 ProcessGroupNCCL.cpp:1600] [PG ID 0 PG GUID 0(default_pg) Rank 0] Could not acquire "
        "GIL within 300 ms on exit, possible GIL induced hang",
    )
    misses = (
        "[rank0]:[I ProcessGroupNCCL.cpp:955] [PG ID 0 PG GUID 0 Rank 0] HeartbeatMonitor environments: "
        "TORCH_NCCL_ENABLE_MONITORING (Whether to kill program when no watchdog heartbeat detected): 1, "
        "TORCH_NCCL_DUMP_ON_TIMEOUT: 0, TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC: 480",
        "frame #3: c10d::ProcessGroupNCCL::HeartbeatMonitor::runLoop() + 0x4a5 (0x7d377118f8c5 in libtorch_cuda.so)",
    )


class StoreLost(Cause, id="AR414"):
    """The group's key-value store, or that of torchrun's rendezvous, is gone.

    ## What it means
    One process hosts the store: rank 0, or with torchrun's c10d rendezvous the agent at the endpoint. That process
    ended, its node is gone, or the path to it is broken.

    ## Why it breaks the job
    No group can be formed any more. Everything that reads the store fails on all other ranks: the start of a
    communicator, barriers, the exchange of dumps. They report a broken connection; the reason is in the log of the
    process that hosted it.

    ## Example
    From PyTorch 2.7 (tdrussell/diffusion-pipe#333), and hpcaitech/ColossalAI#2748:

        [rank6]:[W729 10:15:17.529361055 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=76, addr=[localhost]:60950, remote=[localhost]:29500): Connection reset by peer
        WARNING:torch.distributed.elastic.rendezvous.dynamic_rendezvous:The node 'xxxxxx' has failed to send a keep-alive heartbeat to the rendezvous 'colossalai-default-job' due to an error of type RendezvousConnectionError.

    ## Fix
    Read the log of the store's host: the first lines of the failure are there. The host is MASTER_ADDR, or the host in
    `--rdzv-endpoint`:

        echo $MASTER_ADDR; sacct -j JOB --format=JobID,NodeList,State,ExitCode,MaxRSS

    At the end of a run, the same lines mean only that rank 0 finished first: call `torch.distributed.barrier()` and
    `destroy_process_group()` on all ranks.

    ## Source
    PyTorch, torch/csrc/distributed/c10d/TCPStore.cpp, Utils.hpp, ProcessGroupNCCL.cpp, and
    torch/distributed/elastic/rendezvous/dynamic_rendezvous.py (2.13 and older, read 2026-11-21).
    https://github.com/tdrussell/diffusion-pipe/issues/333, https://github.com/hpcaitech/ColossalAI/issues/2748, and
    https://github.com/pytorch/pytorch/pull/153586 (read 2026-11-21).
    """  # noqa: E501  (real lines)

    message = "{what}"
    told = "the process that hosts the store ended, and the others lost their connection to it"
    fix = "read the log of the store's host (MASTER_ADDR, --rdzv-endpoint): its process ended before the others"
    exit_code = Exit.NODE_FAULT
    traits = frozenset({Trait.AFTER_THE_END, Trait.AT_THE_MEETING, Trait.FOLLOWS_A_DEATH})
    no_fault_yet = "it needs a plain torchrun job whose first agent is killed"
    also = ("AR201", "AR215", "AR602", "AR404")
    signs = (
        Sign(
            r"has failed to send a keep-alive heartbeat to the rendezvous '[^']*' due to an error of type "
            r"(?P<error>RendezvousConnectionError|RendezvousStateError)",
            Role.LIKELY,
            _NOBODY,
            Confidence.LIKELY,
        ),
        Sign(
            r"has failed to send a keep-alive heartbeat to the rendezvous '[^']*' due to an error of type "
            r"RendezvousTimeoutError",
            Role.VICTIM,
            _NOBODY,
            Confidence.UNDECIDED,
        ),
        # The agent had its store, and asks it for the state again.
        Sign(r'self\._call_store\("(?:get|compare_set)", ', Role.LIKELY, _NOBODY, Confidence.LIKELY),
        Sign(r"has failed to shutdown the rendezvous '", Role.VICTIM, _NOBODY, Confidence.UNDECIDED),
        # Who wants NCCL's id from the first rank, and finds its store closed.
        Sign(
            r"etr(?:ie|ei)ving ncclUniqueId from \[(?P<rank>[0-9]+)\] via c10d key-value store by key '[^']*', but "
            r"store->get\('[^']*'\) (?:got|returned) error: (?:Connection reset|Broken pipe|[Ff]ailed to recv)",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(
            r"Dist(?:Network|Store)Error: (?:[Ff]ailed to (?:recv|send)|Connection reset by peer|Broken pipe)",
            Role.LIKELY,
            _NOBODY,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        Sign(r"RuntimeError: (?:Connection reset by peer|Broken pipe)", Role.VICTIM, _NOBODY, Confidence.UNDECIDED),
        # All that torch's store says; a client of the script's own goes on with what it wanted.
        Sign(
            r"^RuntimeError: (?:Connection (?:closed by (?:remote )?peer|reset by peer|refused|was likely closed)"
            r"|Broken pipe)$",
            Role.VICTIM,
            _NOBODY,
            Confidence.UNDECIDED,
            where=("end",),
        ),
        Sign(r"[Ff]ailed to recv, got 0 bytes", Role.VICTIM, _NOBODY, Confidence.UNDECIDED, where=("end",)),
        Sign(
            r"(?:recvValue|recvValueWithTimeout|recvVector|sendBytes) failed on SocketImpl\(fd=[0-9]+, addr=[^ ]+, "
            r"remote=\[(?P<peer>[^\]]+)\]:(?P<port>[0-9]+)\): ",
            Role.VICTIM,
            Blames.PEER,
            Confidence.UNDECIDED,
            where=("log", "end"),
        ),
        Sign(
            r'Failed to check the "should dump" flag on TCPStore, \(maybe TCPStore server has shut down too early\)',
            Role.VICTIM,
            _NOBODY,
            Confidence.UNDECIDED,
        ),
        # The same of torch 2.3 and 2.4.
        Sign(r"Failed to get exception dump flag from the global store\.", Role.VICTIM, _NOBODY, Confidence.UNDECIDED),
        # JAX's store: its coordination service.
        Sign(r"from coordination service: UNAVAILABLE: ", Role.VICTIM, _NOBODY, Confidence.UNDECIDED),
        Sign(
            r"Error received from peer ipv[46]:(?P<peer>[0-9a-f.:]+):[0-9]+\",.{1,300}\"grpc_message\":\"Socket closed",
            Role.VICTIM,
            Blames.PEER,
            Confidence.UNDECIDED,
        ),
        Sign(r"Stop_waiting response is expected", Role.LIKELY, _NOBODY, Confidence.LIKELY),
    )
    hits = (
        "RuntimeError: Stop_waiting response is expected",
        "preemption_sync_manager.cc:170] Failed to retrieve preemption notice from coordination service: UNAVAILABLE: "
        "Socket closed",
        ':{"created":"@1706696495.0","description":"Error received from peer ipv4:10.150.0.4:62464","file":"call.cc",'
        '"file_line":1056,"grpc_message":"Socket closed","grpc_status":14}.',
        '    base64_state: bytes = self._call_store("get", self._key)',
        "WARNING:torch.distributed.elastic.rendezvous.dynamic_rendezvous:The node 'node.b_3427_0' has failed to send a "
        "keep-alive heartbeat to the rendezvous 'test' due to an error of type RendezvousConnectionError.",
        "W0813 22:23:32.979031 140204091807488 torch/distributed/elastic/rendezvous/dynamic_rendezvous.py:1267] The "
        "node 'n_1_0' has failed to send a keep-alive heartbeat to the rendezvous '100' due to an error of type "
        "RendezvousTimeoutError.",
        "The node 'sdumont8052_1_0' has failed to shutdown the rendezvous 'none' due to an error of type "
        "RendezvousConnectionError.",
        "torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] "
        "via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer",
        "RuntimeError: [1] is setting up NCCL communicator and retreiving ncclUniqueId from [0] via c10d key-value "
        "store by key '0', but store->get('0') got error: Broken pipe",
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote "
        "server shutdown or crash?",
        "torch.distributed.DistStoreError: Connection reset by peer",
        "RuntimeError: Broken pipe",
        "[rank6]:[W729 10:15:17.529361055 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=76, "
        "addr=[localhost]:60950, remote=[localhost]:29500): Connection reset by peer",
        "[W514 18:33:36.536327028 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd=3, "
        "addr=[n2]:34658, remote=[n1]:1234): Failed to recv, got 0 bytes. Connection was likely closed.",
        "[rank1]:[W618 10:26:54.029068449 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=105, "
        "addr=[::ffff:10.0.0.2]:39468, remote=[::ffff:10.0.0.1]:12201): Broken pipe",
        '[rank1]:[W618 10:26:54 ProcessGroupNCCL.cpp:1771] [PG ID 0 PG GUID 0 Rank 1] Failed to check the "should '
        'dump" flag on TCPStore, (maybe TCPStore server has shut down too early), with error: Broken pipe',
        "[rank1]:[E614 11:14:03.086670611 ProcessGroupNCCL.cpp:1319] [PG 0 Rank 1] Failed to get exception dump flag "
        "from the global store.Connection reset by peer",
    )
    misses = (
        "BrokenPipeError: [Errno 32] Broken pipe",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "[3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', "
        "but store->get('0') got error: Socket Timeout",
        "rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed.",
    )
