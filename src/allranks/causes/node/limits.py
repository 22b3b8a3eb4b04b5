"""Are the node's limits high enough for a job: shared memory, locked memory, open files, cores?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from allranks.causes.cause import PASSED, Cause, Outcome, failed, skipped, unknown, warned
from allranks.causes.net.cards import most_common, with_facts
from allranks.causes.sign import Role, Sign
from allranks.causes.trait import Trait
from allranks.model.card import Card, Facts
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Status

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LIKELY = Confidence.LIKELY


class ShmTooSmall(Cause, id="AR002"):
    """Shared memory is too small for NCCL and data loaders.

    ## What it means
    `/dev/shm` is a directory in memory, through whose files the processes of a node exchange data. On this node it is
    small or nearly full.

    ## Why it breaks the job
    NCCL and Gloo keep the buffers between ranks of one node there, about 10 MiB for each pair and channel. PyTorch's
    data loaders put whole batches there. When it is full, NCCL fails with a system error, and a data loader worker dies
    of a bus error, often hours into the run. Containers are the usual reason: Docker gives them 64 MiB.

    ## Example
    From pytorch/ci-infra#490:

        misc/shmutils.cc:88 NCCL WARN Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes, error: No space left on device (28)

    ## Fix
    List its files. You may remove `nccl-*` and `torch_*` files of processes that no longer exist:

        df -h /dev/shm; ls -l /dev/shm

    Make it larger, as root on the node; a line in /etc/fstab makes it permanent:

        mount -o remount,size=8G /dev/shm

    In a container, use `docker run --shm-size=8g` or `--ipc=host`; Apptainer uses the node's own. In Kubernetes, mount
    an emptyDir with `medium: Memory` at /dev/shm.

    ## Source
    NCCL user guide, "Troubleshooting", Shared Memory:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html (NCCL 2.30).
    """  # noqa: E501  (a real line)

    message = "/dev/shm has {free} free of {size}"  # noqa: S108
    told = "/dev/shm is full: NCCL or MPI could not create a shared memory segment"  # noqa: S108
    fix = "as root on {node}: mount -o remount,size=8G /dev/shm; in a container: --shm-size=8g"
    exit_code = Exit.NODE_FAULT
    traits = frozenset({Trait.ENDS_RANKS})
    signs = (
        Sign(r"failed to extend (?P<thing>/dev/shm)/nccl-"),
        Sign(r"Error while creating shared memory segment (?P<thing>/dev/shm|nccl-)"),
        Sign(r"Error while attaching to shared memory segment /dev/shm/nccl-", Role.LIKELY, confidence=LIKELY),
        Sign(r"Call to (?:posix_fallocate|ftruncate) failed"),
        Sign(r"Call to shm_open failed", Role.LIKELY, confidence=LIKELY),
        Sign(r"No space left on device: ['\"](?P<thing>/dev/shm)"),
        Sign(r"there is not enough space for (?P<thing>[^ ]{1,200}) \(the shared-memory backing", confidence=LIKELY),
        # A page of a mapped file that could not be had: UCX's handler, Open MPI's (as it spells it).
        Sign(
            r"(?:\[(?P<node>[A-Za-z0-9][A-Za-z0-9_.-]{0,120}):(?P<pid>[0-9]+) ?(?::[0-9]+){1,2}\] Caught signal 7 )?"
            r"\(Bus error: nonexistent physical address\)",
            confidence=LIKELY,
        ),
        Sign(
            r"(?:\[(?P<node>[A-Za-z0-9][A-Za-z0-9_.-]{0,120}):(?P<pid>[0-9]+)\] )?"
            r"Signal code: Non-exist[ae]nt physical address \(2\)",
            confidence=LIKELY,
        ),
        Sign(r"NCCL INFO transport/shm\.c[cu]:[0-9]+ -> 2\b", Role.LIKELY, confidence=Confidence.UNDECIDED),
    )
    hits = (
        "ubuntu:9621 [6] misc/shmutils.cc:71 NCCL WARN Error: failed to extend /dev/shm/nccl-fjwOOB to 5967876 bytes",
        "misc/shmutils.cc:132 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-WU88OE "
        "(size 9637888), error: No space left on device (28)",
        "gpu2-ru7:2143:2561 [1] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",
        "Error while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 10617216)",
        "misc/shmutils.cc:132 NCCL WARN Error while attaching to shared memory segment /dev/shm/nccl-Ub (size 9637888)",
        "gpu2-ru7:2143:2561 [1] include/shm.h:24 NCCL WARN Call to shm_open failed : No space left on device",
        "OSError: [Errno 28] No space left on device: '/dev/shm/torch_2194_3017881412_12'",
        "[8d6bf97c3bf4:3039 :0:3095] Caught signal 7 (Bus error: nonexistent physical address)",
        "[gpu07:2216] Signal code: Non-existant physical address (2)",
        "mt-1:202016:202235 [0] NCCL INFO transport/shm.cc:551 -> 2",
        "It appears as if there is not enough space for /dev/shm/vader_segment.node01.1001.1 (the shared-memory "
        "backing",
    )
    also = ("AR407", "AR607")
    misses = ("OSError: [Errno 28] No space left on device: 'runs/12/events.jsonl'",)

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Fails below 128 MiB or 64 MiB free (warns without GPUs); with GPUs, warns below 1 GiB or 512 MiB free."""
        if card.facts is None:
            return unknown("this node reported no facts")
        place = next((place for place in card.facts.places if place.purpose == "/dev/shm"), None)  # noqa: S108
        if place is None or place.size_bytes is None or place.free_bytes is None:
            why = place.problem if place else card.facts.unread.get("places")
            return unknown(why or "shared memory was not checked")
        values = {"free": size_text(place.free_bytes), "size": size_text(place.size_bytes)}
        if place.size_bytes < 128 * MIB or place.free_bytes < 64 * MIB:
            return failed(**values) if card.num_gpus else warned(**values)
        if card.num_gpus and (place.size_bytes < GIB or place.free_bytes < 512 * MIB):
            return warned(**values)
        return PASSED


class IbMemlock(Cause, id="AR003"):
    """The limit on locked memory is too low for RDMA.

    ## What it means
    An RDMA network card reads and writes memory directly, so that memory must not move: it is locked. How much a
    process may lock is limited (`ulimit -l`), and on this node the limit is low.

    ## Why it breaks the job
    NCCL locks its buffers when it sets up InfiniBand or RoCE. With a low limit that call fails with "Cannot allocate
    memory", although enough memory is free. The job fails when the first collective starts. Without RDMA the limit does
    no harm, but a node whose limit differs was configured differently from the others.

    ## Example
    From NVIDIA/nccl-tests#206, with a limit of 8 MiB:

        misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory

    ## Fix
    Read the limit where the job runs, not in a login shell:

        srun --nodelist=NODE bash -c 'ulimit -l'

    The admin should set `LimitMEMLOCK=infinity` in slurmd's systemd unit (systemctl edit slurmd) and restart slurmd.
    With `PropagateResourceLimitsExcept=MEMLOCK` in slurm.conf, SLURM does not copy the low limit of the login node. In
    a container, use `--ulimit memlock=-1`. To run without RDMA, set `NCCL_IB_DISABLE=1`.

    ## Source
    NCCL user guide, "Troubleshooting", InfiniBand:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html (NCCL 2.30).
    SLURM FAQ, "memory locking": https://slurm.schedmd.com/faq.html.
    The figure of 16 GiB: awsome-distributed-training, hyperpod-precheck.py (2026-02).
    """

    message = "a process may lock only {limit} of memory; {wanted}"
    told = "memory could not be locked for RDMA, most probably because the limit (ulimit -l) is low"
    fix = (
        "for the admin of {node}: LimitMEMLOCK=infinity for slurmd, PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
    )
    exit_code = Exit.NODE_FAULT
    also = ("AR301", "AR002")
    signs = (
        Sign(
            r"Call to ibv_(?:reg_mr(?:_iova2)?|create_cq|create_qp) failed with (?:error )?(?:[0-9]+ )?"
            r"Cannot allocate memory"
        ),
        # UCX names the port before it, where it knows it.
        Sign(
            r"(?:UCX  ERROR (?P<hca>[a-z0-9_]{2,30}(?::[0-9]+)?): )?ibv_(?:exp_)?(?:create_[a-z_]{2,12}|reg_mr)"
            r"\([^)]{0,120}\) failed: Cannot allocate memory"
        ),
        Sign(r"Please set max locked memory \(ulimit -l\) to 'unlimited'"),
        # NCCL before 2.12 did not say why
        Sign(
            r"Call to ibv_(?:reg_mr(?:_iova2)?|create_cq|create_qp) failed(?:$|[^ ])",
            Role.LIKELY,
            confidence=LIKELY,
        ),
        Sign(r"NET/OFI .{0,120}Cannot allocate memory", Role.LIKELY, confidence=LIKELY),
        Sign(r"the memlock limits are set too low", Role.LIKELY, confidence=LIKELY),
        Sign(r"libibverbs: Warning: RLIMIT_MEMLOCK is (?P<limit>[0-9]+) bytes", Role.CONTEXT),
    )
    hits = (
        "misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        "misc/ibvwrap.cc:190 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory",
        "a100-node-3:3778851:3779883 [4] ibvwrap.c:130 NCCL WARN Call to ibv_create_qp failed",
        "misc/ibvwrap.cc:252 NCCL WARN Call to ibv_reg_mr failed",
        "NCCL WARN NET/OFI Unable to register memory (type = 1) for device 0. RC: -12, Error: Cannot allocate memory",
        "indicate that the memlock limits are set too low.  For most HPC installations, the memlock limits should be "
        "set",
        "libibverbs: Warning: RLIMIT_MEMLOCK is 65536 bytes.",
        "ib_iface.c:1029 UCX  ERROR ibv_create_cq(cqe=4096) failed: Cannot allocate memory",
        "ibvwrap.cc:262 NCCL WARN Call to ibv_create_qp failed with 12 Cannot allocate memory, on dev mlx5_0:1",
        "[1668693503.473099] [ampere:1188443:0]  ib_log.c:246  UCX  ERROR mlx5_0: ibv_create_cq() failed: Cannot "
        "allocate memory. Please set max locked memory (ulimit -l) to 'unlimited' (current: 64 kbytes)",
    )
    misses = ("misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Bad address",)

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Fails below 16 GiB if the node has an active RDMA port."""
        if card.facts is None:
            return unknown("this node reported no facts")
        if card.facts.environment.get("NCCL_IB_DISABLE") == "1":
            return skipped("NCCL_IB_DISABLE=1")
        if not _has_rdma(card.facts):
            return skipped("no active RDMA port")
        if "memlock_bytes" not in card.facts.limits:
            return unknown(card.facts.unread.get("limits", "the limit could not be read"))
        limit = card.facts.limits["memlock_bytes"]
        if limit is not None and limit < 16 * GIB:
            return failed(f"ulimit -l: {limit // KIB} KiB", limit=size_text(limit), wanted="RDMA needs unlimited")
        return PASSED

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Without RDMA, warns about nodes whose limit is lower than that of most nodes."""
        known = [
            (card, math.inf if limit is None else float(limit))
            for card in cards
            if card.facts and "memlock_bytes" in card.facts.limits
            for limit in [card.facts.limits["memlock_bytes"]]
        ]
        if not known:
            return []
        usual, times = Counter(limit for _, limit in known).most_common(1)[0]
        if times * 2 <= len(known):
            return []
        wanted = f"{times} of {len(known)} nodes allow {size_text(usual)}"
        odd = [(card, limit) for card, limit in known if limit < usual and card.facts and not _has_rdma(card.facts)]
        return [
            ((card.host,), warned(f"ulimit -l: {int(limit) // KIB} KiB", limit=size_text(limit), wanted=wanted))
            for card, limit in odd
        ]


class TooManyOpenFiles(Cause, id="AR004"):
    """A process may open too few files.

    ## What it means
    Every socket, pipe, shared-memory block and file that a process has open counts toward one limit (`ulimit -n`). On
    this node that limit is low.

    ## Why it breaks the job
    A rank has connections to many others, and each data loader has pipes and shared tensors. At the limit, the next
    call that opens a file fails: a data loader, a checkpoint, NCCL, or an import. It happens late and looks like
    another fault. The need grows with the number of ranks, so a job that works on two nodes can fail on forty.

    ## Example
    CPython's text for EMFILE:

        OSError: [Errno 24] Too many open files: '/dev/shm/torch_2194_3017881412_12'

    ## Fix
    In the batch script, raise it to the hard limit:

        ulimit -n $(ulimit -Hn)

    The admin should set `LimitNOFILE=131072` in slurmd's systemd unit, and check whether slurm.conf copies the login
    node's limit (`PropagateResourceLimits`). Data loaders need fewer files with fewer workers, or with
    `torch.multiprocessing.set_sharing_strategy("file_system")`.

    ## Source
    NCCL user guide, "Troubleshooting":
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html (NCCL 2.30).
    PyTorch, "Multiprocessing package", sharing strategies: https://docs.pytorch.org/docs/stable/multiprocessing.html
    (2.13).
    """

    message = "a process may open only {limit} files"
    told = "a process reached its limit of open files (ulimit -n)"
    fix = (
        "in the batch script: ulimit -n $(ulimit -Hn); permanently, for the admin of {node}: LimitNOFILE=131072 for "
        "slurmd"
    )
    exit_code = Exit.NODE_FAULT
    signs = (
        Sign(r"\[Errno 24\] Too many open files(?:: '(?P<thing>[^']{1,200}))?"),
        Sign(r"(?:: |- )Too many open files(?:$|[^ ]| \()"),
        Sign(r"Too many open files\. Communication with the workers is no longer possible"),
        Sign(r"received 0 items of ancdata", confidence=LIKELY),
        Sign(r"Too many open files \(os error 24\)"),
        Sign(
            r"pthread_create failed for thread [0-9]+ of [0-9]+: Resource temporarily unavailable",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(r"RuntimeError: can't start new thread", Role.LIKELY, confidence=Confidence.UNDECIDED),
    )
    hits = (
        "RuntimeError: can't start new thread",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 3 of 64: Resource temporarily unavailable",
        "OSError: [Errno 24] Too many open files: '/dev/shm/torch_2194_3017881412_12'",
        "misc/socket.cc:484 NCCL WARN socketStartConnect: Call to socket failed : Too many open files",
        "[W socket.cpp:426] [c10d] The server socket has failed to accept a connection (errno: 24 - Too many open "
        "files).",
        "RuntimeError: unable to open shared memory object </torch_2194_3017881412> in read-write mode: Too many open "
        "files (24)",
        "RuntimeError: [enforce fail at /gloo/transport/tcp/device.cc:276] fd != -1. Error: Too many open files",
        "RuntimeError: Too many open files. Communication with the workers is no longer possible. Please increase the "
        "limit using `ulimit -n` in the shell",
        "RuntimeError: received 0 items of ancdata",
        "Error: Io(Os { code: 24 }): Too many open files (os error 24)",
    )
    also = ("AR607",)
    misses = ("OSError: [Errno 23] Too many open files in system",)

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Fails below 1024, the soft limit of most machines."""
        if card.facts is None:
            return unknown("this node reported no facts")
        if "nofile" not in card.facts.limits:
            return unknown(card.facts.unread.get("limits", "the limit could not be read"))
        limit = card.facts.limits["nofile"]
        if limit is None or limit >= 1024:
            return PASSED
        return failed(f"ulimit -n: {limit}", limit=limit)


class CpuStarved(Cause, id="AR011"):
    """A node has fewer cores than ranks, or fewer than the other nodes.

    ## What it means
    The job may use fewer cores on the node than it has workers there, or fewer than on most nodes with as many workers.
    allranks counts the cores of the job step: its affinity (SLURM's binding, cgroup cpusets) and the quotas of all
    cgroups above it.

    ## Why it breaks the job
    The job runs slowly. Each rank needs a core to feed its GPU and to drive the network, and Gloo computes on it. If
    several ranks share a core, one always waits, and a collective waits for the slowest. Usually the batch script
    requests tasks or GPUs but no cores. SLURM then gives each task one core, and `srun` of SLURM 22.05 and 23.02 ignores
    the `--cpus-per-task` of `sbatch`.

    ## Example
    From torch/utils/data/dataloader.py, 2.13:

        UserWarning: This DataLoader will create 8 worker processes in total. Our suggested max number of worker in current system is 1

    ## Fix
    Request cores, and pass them to the step:

        #SBATCH --cpus-per-task=16
        export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

    Or start fewer workers: `--nproc-per-node`. `allranks submit` does both.

    ## Source
    SLURM, srun(1), --cpus-per-task: https://slurm.schedmd.com/srun.html (changed in 22.05 and
    in 23.11).
    """  # noqa: E501  (a real line)

    message = "the node has {cores} for {workers} workers{others}"
    told = "the node has fewer cores than workers, as the data loader reports"
    fix = "request more cores per task (#SBATCH --cpus-per-task, export SRUN_CPUS_PER_TASK), or start fewer workers"
    traits = frozenset({Trait.OF_GRANTED_CORES})
    no_fault_yet = "the lab divides the machine's cores among its nodes and cannot take one away"
    signs = (
        Sign(
            r"Our suggested max number of worker in current system is (?P<cpus>[0-9]+), which is smaller", Role.CONTEXT
        ),
    )
    hits = (
        "UserWarning: This DataLoader will create 8 worker processes in total. Our suggested max number of worker in "
        "current system is 1, which is smaller than what this DataLoader is going to create.",
    )

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Warns if the job may use fewer cores than it has workers with GPUs."""
        if card.facts is None or card.facts.num_cpus < 1:
            return unknown("the number of cores is unknown")
        # Workers without a GPU are what somebody asked for, on a laptop often more than cores.
        if card.num_gpus and card.facts.num_cpus < card.num_workers:
            return warned(cores=_cores(card.facts.num_cpus), workers=card.num_workers, others="")
        return PASSED

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Warns if a node has fewer cores than most nodes, and fewer per worker."""
        known = [
            (card, facts.num_cpus) for card, facts in with_facts(cards) if facts.num_cpus > 0 and card.num_workers > 0
        ]
        usual = most_common(cpus for _, cpus in known)
        if usual is None:
            return []
        shares = [cpus / card.num_workers for card, cpus in known if cpus == usual]
        others = f"; {len(shares)} of {len(known)} nodes have {usual}"
        return [
            ((card.host,), warned(cores=_cores(cpus), workers=card.num_workers, others=others))
            for card, cpus in known
            if cpus < usual and cpus / card.num_workers < min(shares) and cls.probe(card).status is Status.PASS
        ]


def size_text(size_bytes: float) -> str:
    """`64 MiB`, `1.5 GiB`, `unlimited`."""
    if size_bytes == math.inf:
        return "unlimited"
    unit, name = next(((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB")) if size_bytes >= unit), (KIB, "KiB"))
    return f"{size_bytes / unit:.1f}".removesuffix(".0") + f" {name}"


def _cores(number: int) -> str:
    return f"{number} core{'s' * (number != 1)}"


def _has_rdma(facts: Facts) -> bool:
    return any(port.state == "ACTIVE" for port in facts.rdma_ports)
