"""Which faults are there, and what does each do to a job? A table of plain functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from .collectives import Deviation, program_of
from .job import Job
from .lines import Mark
from .plan import LAYOUTS

ALL = tuple(LAYOUTS)
TORCHRUN = ("srun-torchrun", "torchrun", "pods")
SLURM = ("srun", "srun-torchrun")
EXIT = ("user-code-error", "dead-rank")
"""Causes that a plain exit code fits."""
KILL = ("host-oom-kill", "dead-rank")
"""Causes that a SIGKILL fits which nobody claims."""
HANG = ("stuck-rank", "straggler-rank", "collective-timeout")
"""Names of a rank for which all others wait."""


@dataclass(frozen=True, slots=True)
class Struck:
    """What a fault did, as only the generator knows it."""

    causes: tuple[str, ...]
    """Right names of the cause."""
    culprit: str
    """rank, node, nobody, all."""
    rank: int = 0
    fits: tuple[str, ...] = ()
    """Further names that count where only the way it ended is left (Mark.level below 2)."""
    names: tuple[str, ...] = ()
    """Further names of the culprit's node: the machine of a pod."""
    is_hang: bool = False
    """Whether only a comparison of the ranks tells the culprit."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault."""

    name: str
    strike: Callable[[Job, int, int, bool], Struck]
    """Let it happen now: job, number of the fault, rank, whether it is the second of the job."""
    launchers: tuple[str, ...] = ALL
    layouts: tuple[str, ...] = ()
    is_flat: bool = False
    net: str | None = None
    is_before_steps: bool = False
    can_lose: bool = True
    """Whether the culprit's output may be missing or cut."""
    can_be_second: bool = False
    min_nodes: int = 1
    is_ft: bool = False
    """Whether NVIDIA's ft_launcher takes torchrun's place."""


def _stop(job: Job, rank: int, is_second: bool) -> None:
    if not is_second:
        index = job.rng.randrange(len(program_of(job.plan, rank)))
        job.block({rank: Deviation("stop", index)})


def _raises(
    key: str, *causes: str, level: int = 2, fits: tuple[str, ...] = EXIT
) -> Callable[[Job, int, int, bool], Struck]:
    def strike(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
        _stop(job, rank, is_second)
        job.weak_causes[fault] = EXIT
        job.raise_(rank, key, mark=Mark(fault, causes if level == 2 else (*causes, *fits), level), fault=fault)
        return Struck(causes, "rank", rank, fits)

    return strike


def _raise_all(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
    job.weak_causes[fault] = EXIT
    for other in range(job.plan.world):
        mark = Mark(fault, ("user-code-error",), 2)
        job.after(
            job.rng.uniform(0, 0.5), lambda who, told: job.raise_(who, "raise-all", mark=told, fault=fault), other, mark
        )
    return Struck(("user-code-error",), "all", fits=EXIT)


def _host_oom(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
    plan, node = job.plan, job.plan.node_of(rank)
    _stop(job, rank, is_second)
    job.weak_causes[fault], job.code_level[fault] = KILL, 0
    mark = Mark(fault, ("host-oom-kill",), 2, is_of_speaker=False)
    job.kernel(node, "kernel-oom", mark, pid=job.pids[rank], local=plan.local_of(rank))
    if plan.is_slurm and job.rng.random() < 0.7:
        job.after(0.2, lambda: job.say(("stepd", node), "step-oom", mark=mark))
        if plan.launcher == "srun" and plan.versions["slurm"] != "20.11":
            job.end_word[rank] = "Out Of Memory"
    if plan.launcher == "pods" and job.rng.random() < 0.5:
        job.after(30, lambda: job.say(("events", 0), "pod-oom", mark=mark, node=plan.nodes[node]))
    job.end(rank, -9, fault)
    return Struck(("host-oom-kill",), "rank", rank, KILL)


def _loader_killed(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
    node = job.plan.node_of(rank)
    mark = Mark(fault, ("host-oom-kill",), 2, is_of_speaker=False)
    job.kernel(node, "kernel-oom", mark, pid=job.pids[rank] + 733, local=job.plan.local_of(rank))
    fits = (*KILL, "user-code-error")
    return _raises("loader-killed", "host-oom-kill", level=0, fits=fits)(job, fault, rank, is_second)


def _segfault(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
    plan = job.plan
    _stop(job, rank, is_second)
    job.weak_causes[fault], job.code_level[fault] = ("dead-rank",), 2
    mark = Mark(fault, ("dead-rank",), 2, is_of_speaker=False)
    job.kernel(plan.node_of(rank), "kernel-segfault", mark, pid=job.pids[rank])
    if job.rng.random() < 0.4:
        job.say(("rank", rank), "segfault-said", mark=Mark(fault, ("dead-rank",), 2))
    job.end(rank, -11, fault)
    return Struck(("dead-rank",), "rank", rank)


def _store_host(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
    return _segfault(job, fault, 0, is_second)


def _silent_exit(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
    _stop(job, rank, is_second)
    job.weak_causes[fault] = EXIT
    job.end(rank, job.rng.choice((1, 2, 3, 17)), fault)
    return Struck(EXIT, "rank", rank)


def _sigkill(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
    _stop(job, rank, is_second)
    job.weak_causes[fault], job.code_level[fault] = KILL, 0
    job.end(rank, -9, fault)
    return Struck(KILL, "rank", rank)


def _node_lost(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
    plan = job.plan
    if plan.is_slurm and plan.node_of(rank) == 0:  # srun itself runs there
        rank += plan.gpus
    node = plan.node_of(rank)
    job.block({other: Deviation("stop", 0) for other in plan.ranks_of(node)})
    job.weak_causes[fault] = ("node-failure",)
    job.lose_node(node, fault)
    mark = Mark(fault, ("node-failure", "node-silent"), 2, is_of_speaker=False)
    delay = job.rng.uniform(60, 300)
    if plan.is_slurm:
        job.after(delay, lambda: job.say(("srun", 0), "node-failure", mark=mark, lost=plan.nodes[node]))
        job.after(
            delay + 0.3,
            lambda: job.end_step("step-node-failure", is_own=False, mark=dataclasses.replace(mark, address=True)),
        )
    if plan.launcher == "pods" and job.rng.random() < 0.5:
        names = {"node": plan.nodes[node], "machine": f"machine-{node:02d}"}
        job.after(delay, lambda: job.say(("events", 0), "pod-node-lost", mark=mark, **names))
    machines = (f"machine-{node:02d}",) if plan.launcher == "pods" else ()
    return Struck(("node-failure", "node-silent"), "node", rank, names=machines)


def _scheduler(kind: str, cause: str) -> Callable[[Job, int, int, bool], Struck]:
    def strike(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
        plan = job.plan
        job.block({other: Deviation("stop", 0) for other in range(plan.world)})
        mark = Mark(fault, (cause,), 2, is_of_speaker=False)
        if plan.is_slurm:
            job.say(("stepd", 0), f"job-{kind}", mark=mark)
            job.after(0.01, lambda: job.end_step(f"step-{kind}", is_own=False, mark=mark))
        else:
            for node in range(plan.num_nodes):
                names = {"node": plan.nodes[node], "machine": f"machine-{node:02d}"}
                job.say(("events", 0), "pod-preempted", mark=mark, **names)
                job.after(job.rng.uniform(0, 2), job.close_agent, node)
        # Kubernetes says which pods it preempted, here all: naming some of them blames nobody wrongly.
        return Struck((cause,), "nobody" if plan.is_slurm else "all")

    return strike


def _cancelled(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
    job.block({other: Deviation("stop", 0) for other in range(job.plan.world)})
    mark = Mark(fault, ("cancelled",), 2, is_of_speaker=False)
    job.say(("stepd", 0), "job-cancelled", mark=mark)
    job.after(0.01, lambda: job.end_step("step-cancelled", is_own=False, mark=mark))
    return Struck(("cancelled",), "nobody")


def _gpu(kernel: str, said: str, *, level: int) -> Callable[[Job, int, int, bool], Struck]:
    fits = ("cuda-illegal-access", *EXIT)

    def strike(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
        plan = job.plan
        _stop(job, rank, is_second)
        job.weak_causes[fault] = EXIT
        mark = Mark(fault, ("gpu-hardware",), 2, is_of_speaker=False)
        bus = f"0000:{plan.local_of(rank) * 0x11 + 0x0B:02x}:00"
        job.kernel(plan.node_of(rank), kernel, mark, pid=job.pids[rank], bus_id=bus)
        causes = ("gpu-hardware",) if level == 2 else ("gpu-hardware", *fits)
        job.raise_(rank, said, mark=Mark(fault, causes, level), fault=fault)
        return Struck(("gpu-hardware",), "rank", rank, fits)

    return strike


def _port_down(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
    plan = job.plan
    program = program_of(plan, rank)
    index = next((at for at, operation in enumerate(program) if _crosses(job, operation.members)), 0)
    job.block({rank: Deviation("stop", index)}, also_blocked=(rank,))
    job.weak_causes[fault] = ()
    causes = ("ib-link-error", "link-down")
    job.kernel(plan.node_of(rank), "link-down", Mark(fault, causes, 2, is_of_speaker=False))
    job.after(0.2, lambda: job.say(("rank", rank), "port-error", mark=Mark(fault, causes, 2), hca=plan.local_of(rank)))
    members = program[index].members
    at = members.index(rank)
    for step in {1, len(members) - 1}:
        peer = members[(at + step) % len(members)]
        if plan.node_of(peer) != plan.node_of(rank):
            job.after(job.rng.uniform(3, 20), job.lose_peer, rank, peer, None)
            job.after(job.rng.uniform(3, 20), job.lose_peer, peer, rank, fault)
    return Struck(causes, "node", rank)


def _crosses(job: Job, members: tuple[int, ...]) -> bool:
    return len({job.plan.node_of(member) for member in members}) > 1


def _healthy(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
    plan = job.plan
    job.say(("rank", 0), "finished", stream="out", minutes=job.now_s / 60)
    for other in range(plan.world):
        if plan.versions["torch"] != "2.0" and job.rng.random() < 0.3:
            job.say(("rank", other), "not-destroyed")
        job.end(other, 0)
    if plan.has_agents:
        for node in range(plan.num_nodes):
            job.after(0.4, lambda number: job.say(("agent", number), "agent-finished"), node)
    return Struck(("healthy",), "nobody")


def _stuck(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
    _stop(job, rank, False)
    job.weak_causes[fault] = ()
    return Struck(HANG, "rank", rank, is_hang=True)


def _filesystem_hang(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
    plan = job.plan
    _stop(job, rank, False)
    job.weak_causes[fault] = ()
    mark = Mark(fault, ("filesystem-hang",), 2, is_of_speaker=False)
    job.after(120, lambda: job.kernel(plan.node_of(rank), "nfs-hangs", mark, pid=job.pids[rank]))
    return Struck(("filesystem-hang", *HANG), "rank", rank, is_hang=True)


def _deviates(kind: str) -> Callable[[Job, int, int, bool], Struck]:
    def strike(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
        ops = [operation.op for operation in program_of(job.plan, rank)]
        index = ops.index("_REDUCE_SCATTER_BASE" if kind == "skip" else "_ALLGATHER_BASE")
        job.block({rank: Deviation(kind, index)})
        job.weak_causes[fault] = ()
        return Struck(("collective-mismatch", *HANG), "rank", rank, is_hang=True)

    return strike


def _missing(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
    plan = job.plan
    if plan.node_of(rank) == 0:  # the store is there
        rank += plan.gpus
    job.weak_causes[fault] = ("missing-rank", "master-unreachable", "rendezvous-timeout", *EXIT)
    causes = ("missing-rank", "master-unreachable", "rendezvous-timeout", "firewall-port")
    waited = job.rng.choice((600, 1800))
    limits = {"timeout_s": waited, "timeout_ms": waited * 1000}
    job.after(waited, lambda: job.say(("rank", rank), "cannot-connect", mark=Mark(fault, causes, 2), **limits))
    job.after(waited + 1, job.end, rank, 1)  # others end so, too: the code does not tell who was missing
    told = Mark(fault, causes, 2, is_of_speaker=False, address=True)
    seen = {"waited": waited + 1, "present": plan.world - 1}
    job.after(waited + 0.3, lambda: job.say(("rank", 0), "joined", mark=told, **seen))
    job.after(waited + 1.4, job.end, 0, 1)
    return Struck(causes, "rank", rank, EXIT)


def _port_in_use(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
    job.weak_causes[fault] = EXIT
    job.say(("rank", 0), "port-in-use", mark=Mark(fault, ("port-in-use",), 2))
    job.after(1, job.end, 0, 1, fault)
    return Struck(("port-in-use",), "rank", 0, EXIT)


def _heartbeat(job: Job, fault: int, rank: int, is_second: bool) -> Struck:
    plan, node = job.plan, job.plan.node_of(rank)
    _stop(job, rank, False)
    causes = ("stuck-rank", "straggler-rank", "heartbeat-stuck")
    job.weak_causes[fault], job.code_level[fault] = (*causes, *KILL), 0
    waited = job.rng.uniform(180, 500)

    def kill() -> None:
        mark = Mark(fault, causes, 2, is_of_speaker=False)
        names = {"local": plan.local_of(rank), "rank": rank, "pid": job.pids[rank], "waited": f"{waited:.2f}"}
        job.say(("agent", node), "ft-heartbeat", mark=mark, **names)
        job.end(rank, -9, fault)

    job.after(waited, kill)
    return Struck(causes, "rank", rank, KILL)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("exception", _raises("raise", "user-code-error"), can_be_second=True),
        Fault("exception-everywhere", _raise_all, can_lose=False, is_before_steps=True),
        Fault("cuda-oom", _raises("cuda-oom", "cuda-oom"), can_be_second=True),
        Fault("illegal-access", _raises("illegal-access", "cuda-illegal-access")),
        Fault("disk-full", _raises("disk-full", "disk-full")),
        Fault("loader-killed", _loader_killed),
        Fault("loader-shm", _raises("shm", "dataloader-shm", "shm-too-small")),
        Fault("host-oom", _host_oom),
        Fault("segfault", _segfault, can_be_second=True),
        Fault("store-host-dies", _store_host),
        Fault("silent-exit", _silent_exit),
        Fault("sigkill", _sigkill),
        Fault("node-lost", _node_lost, min_nodes=2),
        Fault("preempted", _scheduler("preempted", "preempted"), launchers=(*SLURM, "pods"), can_lose=False),
        Fault("time-limit", _scheduler("time-limit", "time-limit"), launchers=SLURM, can_lose=False),
        Fault("cancelled", _cancelled, launchers=SLURM, can_lose=False),
        Fault("xid-79", _gpu("xid-79", "gpu-lost", level=0)),
        Fault("ecc", _gpu("xid-ecc", "ecc", level=2)),
        Fault("port-down", _port_down, is_flat=True, net="ib", min_nodes=2),
        Fault("healthy", _healthy, can_lose=False),
        Fault("stuck-loader", _stuck),
        Fault("filesystem-hang", _filesystem_hang),
        Fault("skipped-collective", _deviates("skip"), is_flat=True),
        Fault("groups-in-another-order", _deviates("swap"), is_flat=True),
        Fault("rank-missing", _missing, launchers=("srun",), is_before_steps=True, min_nodes=3),
        Fault("port-in-use", _port_in_use, launchers=("srun",), is_before_steps=True),
        Fault("heartbeat-kill", _heartbeat, launchers=TORCHRUN, is_ft=True),
    )
}
