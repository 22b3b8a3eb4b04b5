"""Who joins the group: does every rank and every agent, and does nobody else?"""

from __future__ import annotations

from allranks.causes.cause import Cause
from allranks.causes.net.lines import TRIED
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence

_NOBODY = Blames.NOBODY
_NAMED = Blames.NAMED


def _more_than_wanted() -> str:
    """Return the pattern of `8, worker_count=16`: by their digits alone, more came than were wanted."""
    came = "(?:worker_count|num_workers_joined)="
    cases = [f"[0-9], {came}[0-9]{{2,4}}", f"[0-9]{{2}}, {came}[0-9]{{3,4}}"]
    for digit in range(1, 9):
        for rest in ("", "[0-9]", "[0-9]{2}"):
            cases.append(f"{digit}{rest}, {came}[{digit + 1}-9]{rest}")
    return f"(?:{'|'.join(cases)}), timeout="


class MissingRank(Cause, id="AR401"):
    """A rank never reached init_process_group.

    ## What it means
    The rank's process was started, or should have been, but did not join the group. It hangs before that call, imports
    for minutes, ended early, or never started.

    ## Why it breaks the job
    `init_process_group` returns when all ranks have joined. Plain PyTorch reports how many joined, after 10 to 30
    minutes, but not which rank is missing. On the other ranks, the missing rank is the last number of a key.

    ## Example
    From PyTorch 2.13. The first line is of rank 0; the second, of another rank, means that rank 1 is missing:

        torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.
        DistStoreError: wait timeout after 15000ms, keys: /default_pg/0//cpu//0/1

    The same from PyTorch 1.8 to 1.13, on each rank that joined (pytorch-lightning#4420); rank 4 never prints it:

        INFO:root:Waiting in store based barrier to initialize process group for rank: 5, key: store_based_barrier_key:1 (world_size=8, worker_count=7, timeout=0:30:00)

    ## Fix
    Find out what that rank does instead. Read its .out and .err in the run directory, and its stack while it hangs:

        allranks stack JOB; allranks logs JOB

    Common reasons: the rank first downloads data or a model, it waits for a lock on a shared file system, only this
    rank takes some branch of the script, or an import failed.

    ## Source
    PyTorch, torch/csrc/distributed/c10d/TCPStore.cpp (2.13, seen 2026-11-21).
    PyTorch, torch/distributed/distributed_c10d.py, _store_based_barrier (1.8, 2.0, 2.13, read 2026-11-21).
    https://github.com/OpenRLHF/OpenRLHF/issues/1040 (read 2026-11-21).
    https://github.com/Lightning-AI/pytorch-lightning/issues/4420 (read 2026-11-21).
    """  # noqa: E501  (a real line)

    message = "{what}"
    told = "not all ranks joined the process group; the others waited until the timeout"
    fix = (
        "find out what the rank does before init_process_group: allranks stack {job} while it hangs, and the end of "
        "its .out and .err"
    )
    exit_code = Exit.USER_CODE
    traits = frozenset({Trait.BEFORE_THE_FIRST_STEP, Trait.OTHERS_WAIT_FOR_IT})
    no_fault_yet = "it needs a script that delays one rank; the tests of join start such scripts"
    also = ("AR201", "AR402")
    signs = (
        Sign(
            r"Timed out after (?P<seconds>[0-9]+) seconds waiting for clients\. (?P<present>[0-9]+)/(?P<wanted>[0-9]+) "
            r"clients joined",
            Role.LIKELY,
            _NOBODY,
            where=("log", "end"),
        ),
        # JAX names the tasks that did not come on the lines after it.
        Sign(
            r"Barrier timed out\. (?:Barrier_id|Id): (?:PjRT_Client_Connect|\[Init\]Wait_for_all_tasks)",
            Role.LIKELY,
            _NOBODY,
            Confidence.LIKELY,
        ),
        # Of a barrier later on, or of what one of them would have written: it may also hang, or be slow.
        Sign(r"Barrier timed out\. (?:Barrier_id|Id): ", Role.LIKELY, _NOBODY, Confidence.UNDECIDED),
        Sign(r"GetKeyValue\(\) timed out with key: ", Role.LIKELY, _NOBODY, Confidence.UNDECIDED),
        # PaddlePaddle, of each rank that does not listen yet.
        Sign(r"not ready endpoints:\['" + TRIED + "'", Role.VICTIM, Blames.PEER, Confidence.UNDECIDED),
        Sign(r"/job:[a-z_]{1,40}/replica:[0-9]+/task:(?P<rank>[0-9]+)$", Role.CONTEXT, _NAMED),
        # Gloo's key of a rank ends with its number; NCCL's does not, and is written another way.
        Sign(
            r"wait timeout after (?P<ms>[0-9]+)ms, keys: (?:/[^ ]{0,80})?/default_pg/[0-9]+//cpu//(?:[0-9]+/)+"
            r"(?P<rank>[0-9]+)",
            Role.LIKELY,
            _NAMED,
            Confidence.LIKELY,
        ),
        # The same of Gloo's and Horovod's own stores.
        Sign(
            r"Wait timeout for key\(s\): (?:[^ ]{1,80}/)?(?P<rank>[0-9]{1,6})(?: |$)",
            Role.LIKELY,
            _NAMED,
            Confidence.LIKELY,
        ),
        Sign(
            r"Timed out initializing process group in store based ?barrier on rank:? (?P<rank>[0-9]+), for key: "
            r"(?P<key>[^ ]{1,120}) \(world_size=(?P<wanted>[0-9]+), (?:worker_count|num_workers_joined)="
            r"(?P<present>[0-9]+), timeout=",
            Role.LIKELY,
            _NOBODY,
            Confidence.LIKELY,
            where=("log", "end"),
        ),
        # Of allranks itself (join.group), which names who did not come.
        Sign(r"init_process_group waited ", Role.VICTIM, _NOBODY, where=("end",)),
        Sign(
            r"Waiting in store based barrier to initialize process ?group for (?:[0-9.e-]{1,24} seconds ?)?"
            r"rank: (?P<rank>[0-9]+), key: (?P<key>[^ ]{1,120}) \(world_size=(?P<wanted>[0-9]+), "
            r"(?:worker_count|num_workers_joined)=(?P<present>[0-9]+), timeout=",
            Role.VICTIM,
            _NOBODY,
            Confidence.UNDECIDED,
        ),
    )
    hits = (
        "  what():  [/tmp/third_party/gloo/gloo/rendezvous/file_store.cc:183] Wait timeout for key(s): 51",
        "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
        "torch.distributed.DistStoreError: Timed out after 4 seconds waiting for clients. 1/2 clients joined.",
        "torch.distributed.DistStoreError: wait timeout after 15000ms, keys: /default_pg/0//cpu//0/1",
        "init_process_group waited 15 s for rank 1 (node01)",
        "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Barrier_id: PjRT_Client_Connect. "
        "Timed out task names:",
        "/job:jax_worker/replica:0/task:6",
        "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Barrier_id: "
        "multihost_broadcast_sync0. Timed out task names:",
        "E0000 00:00:1743713172.513857  698835 pjrt_stream_executor_client.cc:3072] Execution of replica 0 failed: "
        "DEADLINE_EXCEEDED: GetKeyValue() timed out with key: devices=[0,1,2,3]; stream=0 and duration: 10m",
        "not ready endpoints:['192.168.4.7:6070', '192.168.4.7:6071']",
        "RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for key: "
        "store_based_barrier_key:1 (world_size=8, worker_count=1, timeout=0:30:00)",
        "torch.distributed.DistStoreError: Timed out initializing process group in store based barrier on rank 3, for "
        "key: store_based_barrier_key:1 (world_size=8, num_workers_joined=6, timeout=0:30:00 error=wait timeout)",
        "INFO:root:Waiting in store based barrier to initialize process group for rank: 5, key: "
        "store_based_barrier_key:1 (world_size=8, worker_count=7, timeout=0:30:00)",
        "INFO:torch.distributed.distributed_c10d:Waiting in store based barrier to initialize process group for rank: "
        "1, key: store_based_barrier_key:1 (world_size=4, num_workers_joined=3, timeout=0:30:00)",
        "Waiting in store based barrier to initialize process group for 10.012 secondsrank: 0, key: "
        "store_based_barrier_key:1 (world_size=2, num_workers_joined=1, timeout=0:05:00 error=wait timeout after",
    )
    misses = (
        "RuntimeError: Wait timeout",
        "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 15000 ms",
        "INFO:torch.distributed.distributed_c10d:Rank 0: Completed store-based barrier for "
        "key:store_based_barrier_key:1 with 8 nodes.",
        "INFO:torch.distributed.distributed_c10d:Added key: store_based_barrier_key:1 to store for rank: 0",
    )


class RendezvousTimeout(Cause, id="AR402"):
    """torchrun's rendezvous timed out: too few nodes joined.

    ## What it means
    A job that torchrun started waited at the rendezvous for more nodes and gave up. Not all agents were started, their
    `--rdzv-id` or endpoints differ, or some cannot reach the store.

    ## Why it breaks the job
    No worker starts. The message has no text: it says neither how many nodes joined nor which are missing.

    ## Example
    From facebookresearch/av_hubert#19:

        "message": "RendezvousTimeoutError: ",

    ## Fix
    Start the job with `allranks run` instead of torchrun. It takes the same flags, and lists missing nodes within
    seconds. With torchrun, compare `--nnodes`, `--rdzv-id` and `--rdzv-endpoint` on all nodes, and make sure that
    torchrun runs once per node: `srun --ntasks-per-node=1`.

    ## Source
    PyTorch, torch/distributed/elastic/rendezvous/dynamic_rendezvous.py (2.13: join 600 s).
    https://github.com/facebookresearch/av_hubert/issues/19 (read 2026-11-21).
    """

    message = "{what}"
    told = "torchrun's rendezvous timed out: too few nodes joined"
    fix = (
        "start with allranks run, which lists missing nodes; with torchrun: compare --nnodes, --rdzv-id, "
        "--rdzv-endpoint on all nodes"
    )
    exit_code = Exit.SETUP
    traits = frozenset({Trait.AT_THE_MEETING, Trait.BEFORE_THE_FIRST_STEP, Trait.ONLY_WAITS})
    no_fault_yet = "it is torchrun's own fault; allranks has no such rendezvous"
    also = ("AR201", "AR401")
    signs = (
        Sign(r"message.{1,3}: .RendezvousTimeoutError", blames=_NOBODY),
        Sign(r"rendezvous\.api\.RendezvousTimeoutE(?:rror|xception)", blames=_NOBODY),
        Sign(r"raise RendezvousTimeoutError\(", blames=_NOBODY),
        Sign(r"(?:^|[:\])|>] |  |\t)RendezvousTimeoutError(?:$|: ?$|\(\))", blames=_NOBODY),
        # It meets at --rdzv-endpoint only: without one, each node at itself.
        Sign(
            r"rdzv[_-]backend[= ]c10d(?: --?[a-z_-]{1,30}(?:[= ][^ -][^ ]{0,120})?){0,8}? "
            r"--(?P<thing>master[_-]addr)[= ]",
            Role.LIKELY,
            _NAMED,
            Confidence.UNDECIDED,
        ),
        # A warning of healthy runs, too; where the rendezvous timed out, it is why: every node waits at itself.
        Sign(
            r"(?P<thing>master_addr) is only used for static rdzv_backend and when rdzv_endpoint is not specified",
            Role.CONTEXT,
            _NAMED,
            Confidence.UNDECIDED,
        ),
        Sign(
            r"Timed out waiting for (?:processes|tasks) to (?:start|initialize|register)[a-z ]{0,20}\. "
            r"Please check connectivity",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        # Horovod, of whom it waits for then.
        Sign(r"Remote host found: (?P<node>[A-Za-z0-9][A-Za-z0-9_.-]{0,120})$", Role.CONTEXT, _NAMED),
        Sign(
            r"imed out initializing process group in store based ?barrier on rank$",
            Role.LIKELY,
            _NOBODY,
            Confidence.UNDECIDED,
        ),
    )
    hits = (
        "timed out initializing process group in store based barrier on rank",
        "Launcher: Timed out waiting for processes to start. Please check connectivity between servers.",
        "Remote host found: 10.0.7.54",
        "torchrun --nproc_per_node=3 --nnodes=2 --node_rank=1 --rdzv_backend=c10d --master_addr GPU03 train_sft.py",
        "RendezvousTimeoutError",
        '    "message": "RendezvousTimeoutError: ",',
        "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
        "torchelastic.rendezvous.api.RendezvousTimeoutException",
        "    raise RendezvousTimeoutError()",
        "[2023-10-20 11:55:30,978] torch.distributed.run: [WARNING] master_addr is only used for static rdzv_backend "
        "and when rdzv_endpoint is not specified.",
    )
    misses = (
        "torch.distributed.elastic.rendezvous.api.RendezvousClosedError",
        "W0813 22:23:32.979031 140204091807488 torch/distributed/elastic/rendezvous/dynamic_rendezvous.py:1267] The "
        "node 'n_1_0' has failed to send a keep-alive heartbeat to the rendezvous '100' due to an error of type "
        "RendezvousTimeoutError.",
        "from torch.distributed.elastic.rendezvous import RendezvousTimeoutError",
    )


class StaleStore(Cause, id="AR404"):
    """A process left over from an earlier start tried to join.

    ## What it means
    An agent or a rank of an earlier attempt of this job still runs and connected to the leader. The leader rejected it,
    because each attempt has its own id.

    ## Why it breaks the job
    It does not break this job. With plain PyTorch, such a rank joins the new store: the ranks are miscounted, and keys
    of two runs mix. The job hangs, or ends with wrong results. The old process may also hold a GPU or a port, or write
    a checkpoint.

    ## Example
    From our lab: an agent of attempt 0 was still running during attempt 1:

        AR404 stale-store   node03   the leader rejected node03, which tried to join

    With plain PyTorch, 16 ranks joined a group of 8, so the count never matches:

        RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for key: store_based_barrier_key:1 (world_size=8, worker_count=16, timeout=0:15:00)

    ## Fix
    End the leftover process on that node:

        pgrep -u $USER -af 'allranks run|train.py'; kill PID

    With `ProctrackType=proctrack/cgroup`, SLURM ends such processes when the job ends. With linuxproc or pgid,
    processes that left their session survive; ask the admin.

    ## Source
    SLURM, slurm.conf(5), ProctrackType: https://slurm.schedmd.com/slurm.conf.html.
    PyTorch, torch/distributed/distributed_c10d.py, _store_based_barrier (2.13 and older). NCCL, src/bootstrap.cc
    (bootstrapRoot, several versions, read 2026-11-21).
    """  # noqa: E501  (a real line)

    roll_call = "a node belongs to an earlier attempt"
    message = "{what}"
    told = "more ranks joined the store than the job has: some belong to an earlier start or to another job"
    fix = "on {node}: pgrep -u $USER -af 'allranks run' lists leftover processes; end them (kill PID)"
    exit_code = Exit.SETUP
    also = ("AR401", "AR602")
    signs = (
        Sign(r"store based barrier [^(]*\(world_size=" + _more_than_wanted(), blames=_NOBODY),
        Sign(
            r"Bootstrap Root : mismatch in (?:rank count|info) from procs,? (?:nranks )?(?P<wanted>[0-9]+) (?::|vs) "
            r"(?P<present>[0-9]+)",
            Role.LIKELY,
            _NOBODY,
            Confidence.LIKELY,
        ),
        # An agent that has not begun yet finds it closed: by an earlier start with the same id.
        Sign(
            r"(?:rendezvous\.api\.|\": \")RendezvousClosedE(?:rror|xception)",
            Role.VICTIM,
            _NOBODY,
            Confidence.UNDECIDED,
        ),
    )
    hits = (
        "torch.distributed.elastic.rendezvous.api.RendezvousClosedError",
        "torchelastic.rendezvous.api.RendezvousClosedException",
        "RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for key: "
        "store_based_barrier_key:1 (world_size=8, worker_count=16, timeout=0:15:00)",
        "INFO:root:Waiting in store based barrier to initialize process group for rank: 0, key: "
        "store_based_barrier_key:1 (world_size=2, worker_count=4, timeout=0:30:00)",
        "INFO:torch.distributed.distributed_c10d:Waiting in store based barrier to initialize process group for rank: "
        "7, key: store_based_barrier_key:1 (world_size=16, num_workers_joined=24, timeout=0:30:00)",
        "INFO:torch.distributed.distributed_c10d:Waiting in store based barrier to initialize process group for rank: "
        "7, key: store_based_barrier_key:1 (world_size=64, num_workers_joined=128, timeout=0:30:00)",
        "n1:4123:4190 [0] bootstrap.cc:129 NCCL WARN Bootstrap Root : mismatch in rank count from procs 8 : 16",
        "n1:4123:4190 [0] bootstrap.cc:300 NCCL WARN Bootstrap Root : mismatch in info from procs, nranks 8 vs 16, "
        "nroots 1 vs 1, iroot 0 vs 0",
    )
    misses = (
        "INFO:root:Waiting in store based barrier to initialize process group for rank: 5, key: "
        "store_based_barrier_key:1 (world_size=8, worker_count=7, timeout=0:30:00)",
        "INFO:root:Waiting in store based barrier to initialize process group for rank: 5, key: "
        "store_based_barrier_key:1 (world_size=16, worker_count=8, timeout=0:30:00)",
        "INFO:root:Waiting in store based barrier to initialize process group for rank: 5, key: "
        "store_based_barrier_key:1 (world_size=32, worker_count=24, timeout=0:30:00)",
    )


class DuplicateRank(Cause, id="AR405"):
    """Two agents joined as the same node.

    ## What it means
    A second agent joined as node N of the job after another had joined as node N. The leader keeps the first and
    rejected the second.

    ## Why it breaks the job
    With plain PyTorch, the second process with the same rank overwrites the first one's address in the store. Some
    ranks connect to the first, some to the second. The group hangs, and the rank that nobody started is reported as
    missing.

    ## Example
    From our lab; with torchrun by hand, two machines with `--node-rank 1` give the same:

        AR405 duplicate-rank   node03   the leader rejected node03, which tried to join

    NCCL's message:

        NCCL WARN Bootstrap Root : rank 1 of 4 ranks has already checked in

    ## Fix
    Count what is started where. Under SLURM, start one agent per node: `srun --ntasks-per-node=1 allranks run ...`. By
    hand, give each node its own `--node-rank`, from 0 to one less than `--nnodes`. Do not set RANK or GROUP_RANK in
    .bashrc.

    ## Source
    PyTorch, torchrun, --node-rank: https://docs.pytorch.org/docs/stable/elastic/run.html (2.13).
    NCCL, src/bootstrap.cc, bootstrapRoot (several versions, read 2026-11-21).
    """

    roll_call = "a node joins twice"
    message = "{what}"
    told = "two processes joined as rank {rank}"
    fix = (
        "start one agent per node: srun --ntasks-per-node=1 allranks run ...; without SLURM, give each node its own "
        "--node-rank"
    )
    exit_code = Exit.SETUP
    also = ("AR501", "AR404", "AR502")
    signs = (
        Sign(
            r"Bootstrap Root : rank (?P<rank>[0-9]+) of (?P<wanted>[0-9]+) ranks has already checked in", blames=_NAMED
        ),
    )
    hits = ("n1:4123:4190 [0] bootstrap.cc:134 NCCL WARN Bootstrap Root : rank 1 of 4 ranks has already checked in",)
    misses = (
        "n1:4123:4190 [0] NCCL INFO Bootstrap Root : rank 1 of 4 ranks checked in",
        "Duplicate GPU detected : rank 3 and rank 2 both on CUDA device e2000",
    )


class Stranger(Cause, id="AR406"):
    """A process that does not belong to this job connected to the leader's port.

    ## What it means
    It named another job, did not know the job's secret, used another version of the protocol, or sent something else.
    It may be a port scanner, a monitoring agent, a browser, or another user's job with the same port.

    ## Why it breaks the job
    It does not: the leader rejected it in the handshake. Plain PyTorch's store accepts every connection. A foreign
    process that stays silent can block NCCL's bootstrap, and one with the same rank takes a place in the group.

    ## Example
    From NVIDIA/nccl#1612, with NCCL before 2.27.3 and a scanner that disconnected early:

        misc/socket.cc:71 NCCL WARN socketProgress: Connection closed by remote peer 10.10.1.3<36138>

    ## Fix
    Most often, do nothing. The evidence says who connected and what it sent. If another job of yours uses the same
    port, give each its own with `[network] port` or `--master-port`. If nodes have different versions of allranks,
    install the same one everywhere. If it is a scanner, tell the admin which network carries gradients.

    ## Source
    https://github.com/NVIDIA/nccl/issues/1612 (read 2026-11-21). What the handshake proves: allranks' wire protocol.
    """

    roll_call = "a node does not belong to this check"
    message = "{what}"
    fix = (
        "read in the evidence who {node} is and what it sent; if another job uses this port, give each its own "
        "[network] port"
    )
    exit_code = Exit.SETUP
    no_fault_yet = "the tests of wire and preflight connect with other secrets, versions and garbage"
