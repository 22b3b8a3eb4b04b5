"""What a healthy job writes: its start, its steps, warnings that mean nothing, and faults that it survived."""

from __future__ import annotations

import math

from .job import Job

ASIDE_EVERY = 7
"""Steps between two lines that are not about steps, on average."""


def start_up(job: Job) -> None:
    """Write what the job writes before its first step, within the first minute."""
    plan, rng = job.plan, job.rng
    if plan.has_agents:
        for node in range(plan.num_nodes):
            job.now_s = rng.uniform(0, 3)
            job.say(("agent", node), "agent-starts")
    for node in range(plan.num_nodes):
        job.now_s = rng.uniform(0, 9)
        job.forget("kernel-aside")
        job.kernel(node, "kernel-aside")
    job.now_s = 10.0
    job.say(("rank", 0), "start", stream="out")
    for rank in range(plan.world):
        job.now_s = 10 + rng.uniform(0, 5)
        if rng.random() < 0.5:
            job.say(("rank", rank), "start-rank", stream="out" if rng.random() < 0.5 else "err")
        if plan.has_nccl_info:
            _nccl_info(job, rank)
    job.now_s = 60.0


def _nccl_info(job: Job, rank: int) -> None:
    plan = job.plan
    peer = (rank + 1) % plan.world
    name, interface = ("IB", "ib0") if plan.net == "ib" else ("Socket", "eth0")
    local = plan.local_of(rank)
    hcas = " ".join(f"[{number}]mlx5_{number}:1/IB" for number in range(plan.gpus))
    ip = plan.ip_of(plan.node_of(rank))
    used = f"{hcas} [RO]; OOB {interface}:{ip}<0>" if name == "IB" else f"[0]{interface}:{ip}<0>"
    net_line = f"NET/{name} : Using {used}"
    job.say(("rank", rank), "nccl-init", net_line=net_line, net_name=name, interface=interface)
    for channel in range(4):
        job.say(
            ("rank", rank),
            "nccl-channel",
            channel=channel,
            next=peer,
            next_local=plan.local_of(peer),
            net_name=name,
            hca=local,
        )


def train(job: Job) -> None:
    """Write steps until the job has the size that it was drawn with; `job.now_s` is then the time of the fault."""
    plan, rng = job.plan, job.rng
    speakers = _step_speakers(job)
    is_bar = job.wording("step").text.startswith("\r")
    written = sum(len(line.text) for line in job.lines)
    rest = plan.target_bytes - written
    per_step = len(speakers) * (230 if "iteration" in job.wording("step").text else 110) + 160 / ASIDE_EVERY
    num_steps = max(4, min(150_000, int(rest / per_step)))
    step_s = math.exp(rng.uniform(math.log(0.4), math.log(12)))
    job.step = rng.choice((0, 1000, 48_000))
    loss = rng.uniform(1.8, 3.2)
    survived_at = rng.randrange(1, num_steps) if plan.survives != "nothing" else -1
    for number in range(num_steps):
        job.now_s += step_s * rng.uniform(0.95, 1.08)
        job.step += 1
        values = {
            "loss": loss + rng.gauss(0, 0.03),
            "norm": rng.uniform(0.2, 1.4),
            "lr": 3e-4,
            "ms": step_s * 1000,
            "tflops": rng.uniform(380, 430),
            "tok": rng.randrange(9_000, 19_000),
            "samples": job.step * 1024,
            "epoch": job.step / 5000,
            "percent": job.step * 100 // 500_000,
            "rate": 1 / step_s,
            "clock": f"{int(job.now_s) // 3600}:{int(job.now_s) % 3600 // 60:02d}:{int(job.now_s) % 60:02d}",
        }
        for rank in speakers:
            job.say(("rank", rank), "step", stream="err" if is_bar else "out", **values)
        if rng.random() < 1 / ASIDE_EVERY:
            _aside(job, values)
        if number == survived_at:
            _survive(job)


def _step_speakers(job: Job) -> list[int]:
    wording = job.wording("step")
    if "rank" in wording.names and job.plan.world <= 64:
        return list(range(job.plan.world))
    return [0]


def _aside(job: Job, values: dict[str, float | int | str]) -> None:
    rank = job.rng.randrange(job.plan.world)
    job.forget("aside")
    job.say(
        ("rank", rank),
        "aside",
        stream="out" if job.rng.random() < 0.4 else "err",
        tok=values["tok"],
        second=job.rng.randrange(1, 59),
        shard=job.rng.randrange(8192),
        mb=job.rng.uniform(20, 300),
    )


def _survive(job: Job) -> None:
    rank = job.rng.randrange(job.plan.world)
    if job.plan.survives == "oom":
        job.say(("rank", rank), "survived-oom")
    elif job.plan.survives == "restart":
        if job.plan.has_agents and not job.aliases:
            _restart(job, rank)
    elif job.plan.net == "ib":
        hca = job.plan.local_of(rank)
        node = job.plan.node_of(rank)
        job.say(("rank", rank), "port-error", hca=hca)
        job.kernel(node, "link-down")
        job.now_s += 2.5
        job.say(("rank", rank), "port-active", hca=hca)
        job.kernel(node, "link-up")


def _restart(job: Job, rank: int) -> None:
    """An exception that does not come back: torchrun's agents start all workers again."""
    plan = job.plan
    failed = plan.node_of(rank)
    job.say_exception(rank, job.rng.choice(("raise", "cuda-oom", "loader-killed")))
    job.now_s += 1.2
    for node in (failed, *(other for other in range(plan.num_nodes) if other != failed)):
        for other in plan.ranks_of(node):
            if other != rank:
                job.say(("agent", node), "agent-closes", pid=job.pids[other])
        job.say(("agent", node), "agent-restarts" if node == failed else "agent-joins-again", left=2, group_rank=failed)
        job.now_s += 0.1
    job.attempt += 1
    job.pids = [pid + 1000 for pid in job.pids]
    job.now_s += 15
    for other in range(plan.world):
        if job.rng.random() < 0.5:
            job.say(("rank", other), "start-rank", stream="out" if job.rng.random() < 0.5 else "err")
