"""What the book's lines say: which cause they show, how much they prove, whom they blame, and what else they tell.

The lines stand in the texts (`causes/text`). Here an excerpt stands for the one line that contains it.
"""

from __future__ import annotations

import pytest

from allranks.causes.book import all_causes, all_xids, find_cause
from allranks.causes.cause import CULPRIT_GROUPS
from allranks.model.fact_kind import FactKind, Said
from allranks.why.logs.line import read_line
from allranks.why.logs.log_events import list_patterns, read_events
from allranks.why.logs.sources import Source

HITS = frozenset(hit for cause in all_causes() for hit in cause.hits)
LINES = HITS | {miss for cause in all_causes() for miss in cause.misses}
PATTERNS = list_patterns(all_causes())
STDIN = Source("-", None, None, None, None, None, 0)

SELF, KERNEL, SCHEDULER, LAUNCHER, OBSERVER = Said.SELF, Said.KERNEL, Said.SCHEDULER, Said.LAUNCHER, Said.OBSERVER


def line_of(excerpt: str, lines: frozenset[str] = HITS) -> str:
    """Return the line that an excerpt, or a whole short line, stands for."""
    found = [excerpt] if excerpt in lines else [line for line in lines if excerpt in line]
    assert len(found) == 1, found
    return found[0]


def read(line: str) -> dict[str, tuple[FactKind | None, Said, dict[str, str]]]:
    """Return what a line states of each cause, by the cause's strongest sign."""
    events = read_events(read_line(line.encode(), STDIN, 1), PATTERNS)
    return {event.kind: (event.sign.fact, event.sign.said, dict(event.values)) for event in events if event.sign}


@pytest.mark.parametrize(
    ("causes", "excerpt", "fact", "said", "groups"),
    [
        # Nodes
        ("shm-too-small", "segment /dev/shm/nccl-WU88OE", "raised", SELF, {"thing": "/dev/shm"}),
        ("disk-full", "'/scratch/run7/checkpoint-600/optimizer.pt'", "raised", SELF,
         {"thing": "/scratch/run7/checkpoint-600/optimizer.pt"}),
        ("host-oom-kill", "nid006024: task 0: Out Of Memory", "ended", SCHEDULER,
         {"node": "nid006024", "thing": "task 0"}),
        ("host-oom-kill", "Memory cgroup out of memory: Killed process 21044", "ended", KERNEL, {"pid": "21044"}),
        ("host-oom-kill", "PID 2144 on node gpu-node-2 exited on signal 9", "ended", LAUNCHER,
         {"rank": "3", "pid": "2144", "node": "gpu-node-2", "signal": "9"}),
        ("node-failure", "Nodes node[03,07] not responding", "node_lost", SCHEDULER, {"node": "node[03,07]"}),
        ("node-failure", "jean-zay-iam17 CANCELLED", "node_lost", SCHEDULER, {"ran_on": "jean-zay-iam17"}),
        ("missing-rank", "Completed store-based barrier", "recovered", SELF,
         {"rank": "0", "key": "store_based_barrier_key:1"}),
        # GPUs
        ("driver-cuda-mismatch", "(found version 11040)", "raised", SELF, {"thing": "version 11040"}),
        ("gpu-hardware", "145, RLW_CTRL", "device_fault", KERNEL,
         {"gpu": "0000:04:00", "code": "145", "thing": "Link 00"}),
        ("duplicate-gpu", "rank 3 and rank 0 both on", "raised", OBSERVER, {"rank": "3", "ranks": "0", "gpu": "f000"}),
        ("cuda-oom", "GPU 3 has a total capacity of 79.15 GiB", "raised", SELF,
         {"gpu": "3", "wanted": "2.00 GiB", "present": "79.15 GiB"}),
        # Network
        ("master-unreachable", "while trying to connect to (no-such-host.invalid, 29555)", "store_gone", SELF,
         {"node": "no-such-host.invalid", "port": "29555"}),
        ("master-unreachable", "192.0.0.1:1234", "store_gone", SELF, {"address": "192.0.0.1", "port": "1234"}),
        ("master-unreachable", "(fd00:1148::7, 29500)", "store_gone", SELF,
         {"address": "fd00:1148::7", "port": "29500"}),
        ("master-unreachable", "[253.110.170.34.bc.googleusercontent.com]", "store_gone", SELF,
         {"node": "253.110.170.34.bc.googleusercontent.com", "port": "29500", "error": "Connection timed out"}),
        ("master-unreachable", "[::ffff:203.0.113.7]:3254", "store_gone", SELF,
         {"address": "203.0.113.7", "port": "3254", "error": "Connection timed out"}),
        ("master-dns", "[::ffff:0.0.0.5]:40323", "raised", SELF, {"address": "0.0.0.5"}),
        ("master-dns", "(6841231, 47389)", "raised", SELF, {"thing": "6841231", "port": "47389"}),
        ("wrong-nic", "Connect to fe80::380d:bfff:fe5b:54d2%veth25f2e72<40123> failed", "raised", SELF,
         {"address": "fe80::380d:bfff:fe5b:54d2%veth25f2e72", "error": "No route to host"}),
        ("wrong-nic", "169.254.3.1<4", "raised", SELF,
         {"address": "169.254.3.1", "error": "Connection timed out"}),
        ("wrong-nic", "[172.17.0.1]:8463", "raised", SELF,
         {"address": "172.17.0.1", "error": "Connection refused"}),
        ("wrong-nic", "[172.17.0.1]:34567", "raised", SELF,
         {"address": "172.17.0.1", "error": "Connection refused"}),
        ("firewall-port", "10.0.0.4<56849> returned 113(No", "peer_lost", SELF, {"peer": "10.0.0.4", "port": "56849"}),
        ("firewall-port", "No route to host, exceeded error", "peer_lost", SELF, {"peer": "10.0.0.4", "port": "56849"}),
        ("port-in-use", "] The server socket has failed to bind to [::]:29500", "raised", SELF, {"port": "29500"}),
        ("nic-not-found", "Unable to find address for: eth99", "raised", SELF, {"interface": "eth99"}),
        ("loopback-hostname", "connect [127.0.1.1]:3496", "raised", SELF,
         {"address": "127.0.1.1", "error": "Connection refused"}),
        ("link-down or ib-link-error", "0000:3b:00.1 ens1f1np1: Link down", "link_fault", KERNEL,
         {"interface": "ens1f1np1"}),
        ("peer-connection-lost", "Read error [10.1.3.122]:42916", "peer_lost", SELF,
         {"peer": "10.1.3.122", "port": "42916", "error": "Connection reset by peer"}),
        ("peer-connection-lost", "a100-22.pcluster<", "peer_lost", SELF, {"peer": "a100-22.pcluster", "port": "47861"}),
        # RDMA
        ("ib-config", "next state RTR, local GID index 3, local GID ::ffff:10.0.0.1", "raised", SELF,
         {"said": "Connection timed out", "hca": "mlx5_0:1"}),
        ("ib-link-error", "IBV_WC_RETRY_EXC_ERR(12) opcode", "peer_lost", SELF, {"peer": "10.0.0.2", "status": "12"}),
        ("ib-link-error", "peer fe80::1%ib0<33057>", "peer_lost", SELF, {"peer": "fe80::1%ib0", "status": "5"}),
        ("hca-set-differs", "Rank 8 has 1 local Net devices", "setting", OBSERVER,
         {"rank": "8", "present": "1", "wanted": "2"}),
        # The group of ranks, and its collectives
        ("missing-rank", "rank: 5, key: store_based_barrier_key:1 (world_size=8", "waited", SELF,
         {"rank": "5", "wanted": "8", "present": "7", "key": "store_based_barrier_key:1"}),
        ("missing-rank", "/default_pg/0//cpu//0/1", "missing", OBSERVER, {"ms": "15000", "rank": "1"}),
        ("duplicate-rank", "rank 1 of 4 ranks has already", "raised", OBSERVER, {"rank": "1", "wanted": "4"}),
        ("dead-rank", "(exitcode: -11) local_rank: 0 (pid: 3304209)", "ended", LAUNCHER,
         {"code": "-11", "local_rank": "0", "pid": "3304209"}),
        ("host-oom-kill", "  exitcode  : -9 (pid: 79468)", "ended", LAUNCHER, {"code": "-9", "pid": "79468"}),
        ("host-oom-kill", "exitcode: -9", "ended", LAUNCHER, {"code": "-9"}),
        ("dead-rank", "  exitcode  : -6 (pid: 3309)", "ended", LAUNCHER, {"code": "-6", "pid": "3309"}),
        ("host-oom-kill", "node03: task 3: Killed", "ended", LAUNCHER, {"node": "node03", "thing": "task 3"}),
        ("dead-rank", "with PID 0 on node gpu-3.cluster", "ended", LAUNCHER,
         {"rank": "1", "node": "gpu-3.cluster", "signal": "11"}),
        ("dead-rank", "Sending process 812914 closing signal", "ended", LAUNCHER, {"pid": "812914"}),
        ("stuck-rank", "Ranks 1, 2 failed to pass", "missing", OBSERVER, {"ranks": "1, 2", "ms": "120000"}),
        ("stuck-rank", "1!: [allreduce.layer1.weight", "missing", OBSERVER, {"rank": "1"}),
        ("straggler-rank", "worse relative performance. Affected ranks", "missing", OBSERVER, {"ranks": "76, 13, 45"}),
        ("straggler-rank", "_try_get_data (torch/utils/data/dataloader.py:1011)", "missing", OBSERVER, {}),
        ("collective-mismatch", "SequenceNumber=485, OpType=ALLREDUCE", "raised", OBSERVER,
         {"rank": "1", "seq": "485", "op": "ALLREDUCE", "ranks": "0"}),
        ("unused-parameters", "rank 3: net2.weight", "raised", SELF, {"rank": "3", "thing": "net2.weight"}),
        ("store-lost", "remote=[::ffff:10.0.0.1]:12201", "store_gone", SELF,
         {"peer": "::ffff:10.0.0.1", "port": "12201"}),
        ("collective-timeout", "OpType=_ALLGATHER_BASE, NumelIn=110336", "waited", SELF,
         {"rank": "1", "seq": "1", "op": "_ALLGATHER_BASE", "numel": "110336", "numel_out": "220672", "ms": "600000",
          "ran_ms": "600033"}),
        ("collective-timeout", "SeqNum=469508", "waited", SELF,
         {"rank": "1", "seq": "469508", "op": "ALLREDUCE", "ms": "1800000", "ran_ms": "1802212"}),
        ("collective-timeout", "TensorShape=[25, 3]", "waited", SELF,
         {"op": "BROADCAST", "shape": "25, 3", "ms": "60000", "ran_ms": "60043"}),
        ("collective-timeout", "last enqueued NCCL work: 7489", "waited", SELF,
         {"group": "0", "rank": "2", "seq": "7487", "enqueued": "7489", "completed": "-1"}),
        ("collective-timeout", "[PG 0 (default_pg) Rank 1] Exception", "waited", SELF,
         {"group": "0", "rank": "1", "seq": "2", "enqueued": "2", "completed": "1"}),
        ("collective-timeout", "[PG ID 11 PG GUID 119 Rank 1]", "waited", SELF,
         {"group": "119", "rank": "1", "seq": "216", "enqueued": "220", "completed": "215"}),
        ("collective-timeout", "work sequence id: 120049", "waited", SELF,
         {"group": "0", "rank": "5", "seq": "120049", "enqueued": "120051", "completed": "120048"}),
        ("collective-timeout", "collective timeout from  rank 6", "enqueued", SELF,
         {"group": "0", "rank": "2", "first": "6", "enqueued": "460631", "completed": "460630"}),
        # Jobs
        ("slurm-env", "MEMBER: 2/8", None, SELF, {"rank": "1", "present": "2", "wanted": "8"}),
        ("slurm-env", "KeyError: 'SLURM_PROCID'", "raised", SELF, {"thing": "SLURM_PROCID"}),
        ("nccl-version-mismatch", "NCCL WARN Mismatched NCCL version", "raised", OBSERVER,
         {"rank": "1", "version": "22705", "own_version": "22703"}),
        ("preempted", "JOB 11509447 ON nodeau01 CANCELLED", "scheduler_end", SCHEDULER, {}),
        ("preempted", "DUE TO JOB REQUEUE", "scheduler_end", SCHEDULER, {}),
        ("time-limit", "JOB 42221 ON clr1247 CANCELLED", "scheduler_end", SCHEDULER, {}),
        ("cancelled", "JOB 524547 ON ault43 CANCELLED", "scheduler_end", SCHEDULER, {}),
        ("cancelled", "STEP 524547.1 ON ault43 CANCELLED", "ended", SCHEDULER, {}),
        # State
        ("world-size-changed", "DP world size of 256 but", "raised", OBSERVER, {"wanted": "256", "present": "2"}),
        ("nan-loss", "Rank 11: found NaN", "raised", SELF, {"rank": "11"}),
        ("nan-loss", "Rank 55, node g21u01", "raised", SELF, {"rank": "55", "node": "g21u01", "gpu": "7"}),
        ("nfs-stale", "'/mnt/nas/run/checkpoint-500'", "raised", SELF, {"thing": "/mnt/nas/run/checkpoint-500"}),
        ("filesystem-hang", "user001   280058", "device_fault", KERNEL, {"pid": "280058"}),
        ("filesystem-hang", "task python:280058 blocked", "device_fault", KERNEL,
         {"command": "python", "pid": "280058", "seconds": "120"}),
        ("filesystem-hang", "(at 10.0.1.5@tcp) was lost", "device_fault", KERNEL,
         {"thing": "fs-OST0000", "server": "10.0.1.5@tcp"}),
        ("dataloader-shm", "(pid 3867) is killed by signal: Bus", "raised", SELF,
         {"thing": "DataLoader worker (pid 3867)", "signal": "Bus error"}),
        ("horovod-elastic-timeout", "blacklist failing host: ip-10-0-1-7", "ended", LAUNCHER,
         {"node": "ip-10-0-1-7"}),
        # Jobs without a fault print these, too.
        ("master-unreachable", "delay=3569ms): recv failed", None, SELF, {"node": "n1", "port": "29555"}),
        ("wrong-nic", "[1]veth25f2e72:fe80::380d:bfff:fe5b:54d2%veth25f2e72<0>", None, SELF,
         {"interface": "veth25f2e72"}),
        ("wrong-nic", "Bootstrap : Using lo:127.0.0.1<0>", None, SELF, {"interface": "lo"}),
        ("ip-family-mismatch", "The IPv6 network addresses of (10.0.0.1, 29500)", None, SELF, {}),
        ("nan-loss", "[deepspeed] OVERFLOW! Rank 0 Skipping step", None, SELF, {}),
    ],
)  # fmt: skip
def test_what_a_line_states(causes: str, excerpt: str, fact: str | None, said: Said, groups: dict[str, str]) -> None:
    names = causes.split(" or ")
    found = read(line_of(excerpt))
    assert found[names[0]] == (FactKind(fact) if fact else None, said, groups)
    assert {name for name, (kind, *_) in found.items() if kind is found[names[0]][0]} == {*names}


@pytest.mark.parametrize(
    "excerpt",
    [
        "server socket cannot be initialized on [::]:29500 (errno: 97",
        "client socket cannot be initialized to connect to [node05.example.org]:8000 (errno: 97",
        "[localhost]:29500 (errno: 99 - Cannot assign requested address)",
        "[kubernetes.docker.internal]:50656 (system error: 10049",
        "connect to 10.0.0.4<40123> returned Connection refused, retrying",
        "Call to connect returned Connection refused, retrying",
        "Connection closed by localRank 5",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "LocalEntryNotFoundError: [Errno 101] Network is unreachable",
        "NET/Plugin: Failed to find ncclCollNetPlugin_v8 symbol",
        "node05:44753:44753 [7] NCCL INFO NET/IB : No device found",
        "misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so",
        "max memory allocated: 71.2 GiB, reserved 76.0 GiB",
        "saved checkpoint to /dev/shm/ckpt, 12 GiB left on device",
        "Setting OMP_NUM_THREADS",
        "WARNING: process group has NOT been destroyed",
        "find_unused_parameters=True was specified in DDP constructor, but",
        "Reducer buckets have been rebuilt",
        "iteration   42780/ 115311",
        "StopIteration",
        "Affected ranks: [76, 13, 45]",
        "SLURM auto-requeueing enabled",
        "srun: Job step aborted: Waiting up to 32 seconds",
        "number of nan iterations:   0",
        "FutureWarning: You are using `torch.load`",
        "? Rl  00:36 217:52 python",
    ],
)
def test_alarming_words_of_a_job_without_a_fault_prove_nothing(excerpt: str) -> None:
    assert read(line_of(excerpt, LINES)) == {}


def test_each_xid_is_of_one_cause() -> None:
    head, _, tail = line_of("name=python3, Timeout after 45s").partition("119")
    said = {code: read(f"{head}{code}{tail}") for code in all_xids()}
    assert {code: list(causes) for code, causes in said.items()} == {
        code: ["cuda-illegal-access" if xid.asks == "program" else "gpu-hardware"] for code, xid in all_xids().items()
    }
    facts = {causes[cause][:2] for causes in said.values() for cause in causes}
    assert facts == {(FactKind.DEVICE_FAULT, KERNEL), (FactKind.RAISED, KERNEL), (None, SELF)}
    assert read(f"{head}7999{tail}") == {}  # begins like another one


@pytest.mark.parametrize(
    ("wanted", "came", "is_stale"),
    [(8, 7, False), (8, 8, False), (8, 9, True), (8, 16, True), (1, 2, True), (16, 8, False), (16, 24, True),
     (32, 24, False), (64, 128, True), (128, 64, False), (128, 256, True), (99, 100, True), (9, 9, False)],
)  # fmt: skip
def test_more_ranks_than_the_job_has_are_of_an_earlier_start(wanted: int, came: int, is_stale: bool) -> None:
    line = line_of("world_size=16, num_workers_joined=24").replace("=16,", f"={wanted},").replace("=24,", f"={came},")
    assert ("stale-store" in read(line)) == is_stale


def test_who_lost_a_connection_does_not_accuse_itself() -> None:
    assert {sign.fact for sign in find_cause("peer-connection-lost").signs} == {FactKind.PEER_LOST}


def test_who_reports_about_others_names_them_or_nobody() -> None:
    """A rank in such a line is never the one that wrote it."""
    named = {
        (cause.name, sign.groups & CULPRIT_GROUPS)
        for cause in all_causes()
        for sign in cause.signs
        if sign.fact is FactKind.MISSING and "wanted" in sign.groups
    }
    assert {groups for _, groups in named} == {frozenset()}
