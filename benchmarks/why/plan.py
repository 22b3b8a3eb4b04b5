"""What job is it? Its shape, programs, launcher and layout of files, drawn from a seed before anything happens."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

TORCH = {"2.0": "2.0.1", "2.4": "2.4.1", "2.8": "2.8.0"}
NCCL = {"2.18": "2.18.1", "2.24": "2.24.3", "2.28": "2.28.3"}
NCCL_OF_TORCH = {"2.0": ("2.18",), "2.4": ("2.18", "2.24"), "2.8": ("2.24", "2.28")}
SLURM = ("20.11", "22.05", "24.11")
LAYOUTS = {
    # Who starts the ranks -> how the output comes into files.
    "srun": ("one", "labelled", "rank-files"),
    "srun-torchrun": ("one", "labelled", "tagged", "node-files", "rank-files"),
    "torchrun": ("node-files", "tagged", "rank-files"),
    "pods": ("prefixed", "node-files"),
}
POLL_S = {"2.0": 5.0, "2.4": 0.1, "2.8": 0.1}
"""Seconds between two looks of torchrun's agent at its workers (monitor_interval: 5 s before torch 2.1)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One job before its fault."""

    seed: int
    launcher: str
    layout: str
    versions: dict[str, str]
    num_nodes: int
    gpus: int
    """Ranks on each node."""
    tensor: int
    pipeline: int
    net: str
    """ib or socket: by what NCCL reaches other nodes."""
    has_nccl_info: bool
    has_kernel_log: bool
    """Whether the folder has the kernel log of the nodes (dmesg)."""
    is_kill_on_bad_exit: bool
    """Whether srun ends all tasks after the first that failed."""
    timeout_s: int
    is_ahead: bool
    """Whether hosts enqueue the rest of a step while a collective runs."""
    start: datetime
    skews_s: tuple[float, ...]
    """By node: by how much its clock is ahead."""
    loss: str
    """What of the culprit's own output the folder lacks: nothing, missing (its file), cut (its last lines)."""
    target_bytes: int
    is_watchdog_stuck: bool
    """Whether the first watchdog that times out gets stuck when it aborts (torch 2.4 and later)."""
    wrap: str
    """How a container's runtime writes lines: plain, timestamps (kubectl), cri, docker (JSON)."""
    is_by_pod: bool
    """Whether kubectl gave one pod's log after another's."""
    survives: str
    """What the job survived before: nothing, oom (caught), flap (of a port), restart (of all workers)."""
    nodes: tuple[str, ...] = field(default=())
    pids: tuple[int, ...] = field(default=())
    job_id: int = 0
    script: str = "/job/train.py"

    @property
    def world(self) -> int:
        return self.num_nodes * self.gpus

    @property
    def data(self) -> int:
        """Ranks in a group of data parallelism."""
        return self.world // (self.tensor * self.pipeline)

    @property
    def is_slurm(self) -> bool:
        return self.launcher.startswith("srun")

    @property
    def has_agents(self) -> bool:
        """Whether torchrun starts the ranks of a node."""
        return self.launcher != "srun"

    def node_of(self, rank: int) -> int:
        return rank // self.gpus

    def local_of(self, rank: int) -> int:
        return rank % self.gpus

    def ranks_of(self, node: int) -> range:
        return range(node * self.gpus, (node + 1) * self.gpus)

    def ip_of(self, node: int) -> str:
        return f"10.{self.seed % 200}.{4 + node // 200}.{10 + node % 200}"

    def agent_pid(self, node: int) -> int:
        return self.pids[node * self.gpus] - 65


def variant_of(fault: str, plan: Plan) -> str:
    """Name of the variant: jobs of one variant differ in numbers only."""
    return f"{fault}/{plan.launcher}/{plan.layout}/torch{plan.versions['torch']}"


def half_of(variant: str) -> str:
    """The half that a variant belongs to: `dev` may be looked at, `held` is withheld."""
    return "held" if hashlib.sha256(variant.encode()).digest()[0] & 1 else "dev"


def draw_plan(seed: int, rng: random.Random, *, is_small: bool, launchers: tuple[str, ...], layouts: tuple[str, ...],
              is_flat: bool, net: str | None, loss: str | None) -> Plan:  # fmt: skip
    """Draw a job.

    Args:
        seed: of the job, for names and addresses.
        is_small: at most 16 ranks and some ten kilobytes.
        launchers: those with which the fault can happen.
        layouts: those in which it can be written; empty for all.
        is_flat: data parallelism only.
        net: by what NCCL reaches other nodes; None draws it.
        loss: what is lost of the culprit's output; None draws it.
    """
    pairs = [
        (launcher, layout) for launcher in launchers for layout in LAYOUTS[launcher] if not layouts or layout in layouts
    ]
    launcher, layout = rng.choice(pairs)
    torch = rng.choice(tuple(TORCH))
    versions = {"torch": torch, "nccl": rng.choice(NCCL_OF_TORCH[torch]), "slurm": rng.choice(SLURM)}
    gpus = rng.choice((1, 2, 4) if is_small else (4, 8, 8, 8))
    num_nodes = rng.choice((2, 3, 4) if is_small else (1, 2, 4, 8, 8, 16, 32, 64))
    world = num_nodes * gpus
    # torch 2.0 names the rank within the group only, so these jobs have one group.
    is_flat = is_flat or torch == "2.0" or rng.random() < 0.4
    tensor = 1 if is_flat else rng.choice([size for size in (1, 2, 4, 8) if size <= gpus])
    fitting = [size for size in (1, 2, 4) if num_nodes % size == 0]
    pipeline = 1 if is_flat else rng.choice(fitting)
    prefix = "train-worker-" if launcher == "pods" else rng.choice(("gpu-b", "node", "nid00", "h100-", "cn"))
    first = 0 if launcher == "pods" else rng.randrange(1, 200)
    width = 0 if launcher == "pods" else rng.choice((2, 3, 4))
    skews = [0.0] * num_nodes
    if rng.random() < 0.25:
        for node in rng.sample(range(num_nodes), rng.randint(1, max(1, num_nodes // 3))):
            skews[node] = rng.choice((-1, 1)) * rng.uniform(2, 240)
    start = datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=rng.randrange(2 * 365 * 86400))
    pids: list[int] = []
    for _ in range(num_nodes):
        base = rng.randrange(3000, 3_000_000) if launcher != "pods" else rng.randrange(70, 500)
        pids += [base + local + (local > 3) for local in range(gpus)]
    target = rng.lognormvariate(0, 0.9) * (12_000 if is_small else 2_900_000)
    return Plan(
        seed=seed,
        launcher=launcher,
        layout=layout,
        versions=versions,
        num_nodes=num_nodes,
        gpus=gpus,
        tensor=tensor if world % (tensor * pipeline) == 0 else 1,
        pipeline=pipeline,
        net=net or rng.choice(("ib", "ib", "socket")),
        has_nccl_info=rng.random() < (0.3 if is_small else 0.5),
        has_kernel_log=launcher != "pods" and rng.random() < 0.4,
        is_kill_on_bad_exit=rng.random() < 0.6,
        timeout_s=600 if torch != "2.0" else 1800,
        is_ahead=rng.random() < 0.5,
        start=start,
        skews_s=tuple(skews),
        loss=loss if loss is not None else rng.choices(("nothing", "missing", "cut"), (70, 15, 15))[0],
        target_bytes=int(min(target, 40_000 if is_small else 30_000_000)),
        is_watchdog_stuck=torch != "2.0" and rng.random() < 0.1,
        wrap=rng.choice({"prefixed": ("plain", "timestamps"), "node-files": ("plain", "cri", "docker")}[layout])
        if launcher == "pods"
        else "plain",
        is_by_pod=rng.random() < 0.5,
        survives=rng.choices(("nothing", "oom", "flap", "restart"), (76, 8, 8, 8))[0],
        nodes=tuple(f"{prefix}{first + node:0{width}d}" for node in range(num_nodes)),
        pids=tuple(pids),
        job_id=rng.randrange(10_000, 9_000_000),
        script=rng.choice(("/job/train.py", "/home/ada/llm/pretrain_gpt.py", "/workspace/src/main.py")),
    )
