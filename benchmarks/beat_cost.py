"""What does the guard cost inside a worker: processor time of the beat thread, time with the GIL, and wall time?

python benchmarks/beat_cost.py [--pairs 20] [--device cuda]
python benchmarks/beat_cost.py --group 2 [--rounds 7] [--steps 2000]      what all of allranks costs a group of ranks
python benchmarks/beat_cost.py --network                                 what a look at the network costs a node

One rank trains in steps of 10 ms (DDP on a small model, and a collective from Python). Blocks of 2 s with and without
the guard alternate, in random order within each pair. The ratio of their median steps has a 95 % confidence interval
over the pairs; processor time and time with the GIL are the beat thread's own.

With --group, jobs of `allranks run` and of torchrun alternate, in random order within each round. Both train the same
model with Gloo, and each step multiplies matrices for 10 ms. Below `allranks run` the script uses a session: agent,
heartbeats, agreement between the ranks, `s.ddp`, and four checkpoints in the measured steps. Below torchrun it uses
torch's DDP and saves nothing. Processor time is the kernel's (/proc/PID/stat), from the same step to the same step.

With --network, one process does what an agent does for its interface and for the connections of its ranks: processor
time of that, on a node with 1 and with 8 ranks. What the marks of the training thread cost: marks_cost.py.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import allranks
from allranks.guard.inside.cell import Cell

SITE = Path(allranks.__file__).parent / "join" / "site"
STEP_S = 0.010
BLOCK_S = 2.0
TURN_S = 0.05
"""Of an agent's loop, at most."""
WARM_UP_STEPS = 2500
"""More than the recorder keeps: its dumps are then as long as they get."""
KINDS = {"-m allranks.state.saved.writer": "writers", "--train": "workers"}
"""What a process is, by words of its command line."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--device", default="cpu", help="cuda: NCCL, and kernels on the GPU")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--group", type=int, metavar="RANKS", help="measure everything that allranks costs a group")
    parser.add_argument("--rounds", type=int, default=7, help="of --group: one job of each launcher a round")
    parser.add_argument("--steps", type=int, default=2000, help="of --group: those measured of each job")
    parser.add_argument("--network", action="store_true", help="measure only what looks at the network cost")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.network:
        measure_network()
        return
    if arguments.inside:
        measure(arguments.pairs, arguments.device)
        return
    if arguments.train:
        train(Path(arguments.train[0]), *map(int, arguments.train[1:]))
        return
    if arguments.group:
        compare_launchers(arguments.group, arguments.rounds, arguments.steps)
        return
    cell = Cell.create()
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {
        **os.environ, "ALLRANKS_CELL_FD": str(cell.fd), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RANK": "0",
        "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    command = [sys.executable, __file__, "--inside", "--pairs", str(arguments.pairs), "--device", arguments.device]
    sys.exit(subprocess.run(command, env=env, pass_fds=(cell.fd,), check=False).returncode)


def measure(num_pairs: int, device: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    has_gpu = device != "cpu"
    dist.init_process_group("nccl" if has_gpu else "gloo")
    inside = sys.modules["_allranks_inside.entry"]
    beat_module = sys.modules["_allranks_inside.beat_thread"]
    cell, flight = inside._teller.cell, inside._teller.flight
    inside._beat.end()
    model = DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
    width = 2048 if has_gpu else 256
    batch, matrix = torch.ones(8, 64, device=device), torch.ones(width, width, device=device)

    def step() -> float:
        began_s = time.perf_counter()
        model(batch).sum().backward()
        dist.all_reduce(batch[0])
        for _ in range(num_products):
            matrix @ matrix
        if has_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    num_products = 1
    while statistics.median(step() for _ in range(20)) < STEP_S:
        num_products += 1
    for _ in range(WARM_UP_STEPS):
        dist.all_reduce(batch[0])

    spans_ns: list[int] = []
    cpu_ns, on_s = 0, 0.0
    told_lags: dict[str, int] = {}
    dump_in_ns = 0

    def block(is_on: bool) -> float:
        nonlocal cpu_ns, on_s, dump_in_ns
        inside._teller.cell = cell if is_on else None
        beat = beat_module.BeatThread(cell, flight)
        if is_on:
            # It is one beat for the whole run; time without it does not count.
            beat._told_lags, beat._next_dump_ns = told_lags, time.monotonic_ns() + dump_in_ns
            tell = beat._tell

            def timed() -> None:
                began_ns = time.perf_counter_ns()
                tell()
                spans_ns.append(time.perf_counter_ns() - began_ns)

            beat._tell = timed
            beat.start()
        began_s, times = time.perf_counter(), []
        while time.perf_counter() - began_s < BLOCK_S:
            times.append(step())
        if is_on:
            clock = time.pthread_getcpuclockid(beat._thread.ident)
            cpu_ns += int(time.clock_gettime(clock) * 1e9)
            on_s += time.perf_counter() - began_s
            beat.end()
            dump_in_ns = beat._next_dump_ns - time.monotonic_ns()
        return statistics.mean(times)

    ratios = []
    for _ in range(num_pairs):
        order = [True, False]
        random.shuffle(order)
        seen = {is_on: block(is_on) for is_on in order}
        ratios.append(math.log(seen[True] / seen[False]))
    middle, spread = statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(num_pairs)
    low, high = (100 * (math.exp(middle + sign * 1.96 * spread) - 1) for sign in (-1, 1))
    calls_ns = cost_of_a_call(dist, batch[0], inside._teller, cell)
    blocks = f"{num_pairs} pairs of blocks of {BLOCK_S:.0f} s"
    print(f"steps of {1000 * STEP_S:.0f} ms, {blocks}, beats every {beat_module.EVERY_S} s")
    print(f"  beat thread, processor time   {100 * cpu_ns / 1e9 / on_s:6.3f} % of a core")
    print(f"  beat thread, with the GIL     {100 * sum(spans_ns) / 1e9 / on_s:6.3f} % of the time (at most)")
    spans_ns.sort()
    median_us, longest_ms = spans_ns[len(spans_ns) // 2] / 1000, spans_ns[-1] / 1e6
    print(f"  one beat                      {median_us:6.0f} us, longest {longest_ms:.1f} ms")
    print(f"  one collective from Python    {calls_ns / 1000:6.1f} us more than without")
    wall = f"{100 * (math.exp(middle) - 1):+6.2f} %, 95 % interval {low:+.2f} to {high:+.2f} %"
    print(f"  wall time of a step           {wall}")


def cost_of_a_call(dist: object, tensor: object, teller: object, cell: object) -> float:
    times: dict[bool, list[int]] = {True: [], False: []}
    for number in range(4000):
        is_on = bool(number % 2)
        teller.cell = cell if is_on else None  # type: ignore[attr-defined]
        began_ns = time.perf_counter_ns()
        dist.all_reduce(tensor)  # type: ignore[attr-defined]
        times[is_on].append(time.perf_counter_ns() - began_ns)
    return statistics.median(times[True]) - statistics.median(times[False])


# The cost of looking at the network


def measure_network() -> None:
    from allranks.guard.node.traffic import LOOK_EVERY_S, TrafficMeter
    from allranks.host.net import read_interfaces

    interface = next((each for each in read_interfaces() if each.kind != "loopback" and each.addresses), None)
    if interface is None:
        sys.exit("this machine has no interface but loopback")
    traffic = TrafficMeter(interface.addresses[0])
    number = itertools.count()
    turn_us = cost_us(lambda: traffic.turn(next(number) * TURN_S), 4000)
    look_us = {num_ranks: cost_of_looks(interface.addresses[0], num_ranks) for num_ranks in (1, 8)}
    print(f"interface {interface.name}; a turn every {TURN_S} s, a look every {LOOK_EVERY_S:g} s")
    print(f"  agent, one turn               {turn_us:6.1f} us")
    for num_ranks, one_us in look_us.items():
        print(f"  agent, one look, {num_ranks} ranks      {one_us:6.1f} us, 16 connections a rank, all new")
    for num_ranks, one_us in look_us.items():
        share = (turn_us / TURN_S + one_us / LOOK_EVERY_S) / 1e4
        print(f"  a node with {num_ranks} ranks           {share:6.3f} % of a core")


def cost_of_looks(address: str, num_ranks: int) -> float:
    """At worst: each look finds sockets that it does not know, and looks for them among all files of all ranks."""
    from allranks.guard.node.traffic import LOOK_EVERY_S, WINDOW_S, TrafficMeter
    from allranks.host.sockets import TcpConnection

    connections = [
        TcpConnection(
            own_address=address, own_port=port, peer_address="192.0.2.1", peer_port=port, unacked_bytes=0,
            is_pending=False, retransmits=0, acked_bytes=port << 20, inode=port, segments=port,
            delivery_bytes_s=10**8,
        )
        for port in range(1, 1 + 16 * num_ranks)
    ]  # fmt: skip
    traffic, number, ranks = TrafficMeter(address), itertools.count(1), dict.fromkeys(range(num_ranks), os.getpid())
    for turn in range(round(WINDOW_S / TURN_S)):  # its window is full
        traffic.turn(turn * TURN_S)

    def look() -> None:
        traffic._owners.clear()
        traffic.look(next(number) * LOOK_EVERY_S, connections, ranks)

    return cost_us(look, 300)


def cost_us(do: Callable[[], object], times: int) -> float:
    """Processor time of one call, in microseconds."""
    began_s = time.process_time()
    for _ in range(times):
        do()
    return 1e6 * (time.process_time() - began_s) / times


# The cost of everything, in a group


def compare_launchers(num_ranks: int, num_rounds: int, num_steps: int) -> None:
    import torch

    torch.set_num_threads(1)
    matrix, num_products = torch.ones(256, 256), 500
    began_s = time.process_time()
    for _ in range(num_products):
        matrix @ matrix
    num_products = max(1, round(STEP_S * num_products / (time.process_time() - began_s)))
    rounds = []
    for number in range(num_rounds):
        kinds = ["allranks", "torchrun"]
        random.shuffle(kinds)
        rounds.append({kind: run_job(kind, num_ranks, num_steps, num_products) for kind in kinds})
        ratio = rounds[-1]["allranks"]["step"] / rounds[-1]["torchrun"]["step"]
        print(f"round {number + 1}: ratio of the steps {ratio:.3f}, load {os.getloadavg()[0]:.1f}", flush=True)
    print(f"{num_ranks} ranks, {num_rounds} rounds of {num_steps} steps, a save every {num_steps // 4} steps")
    print(f"{'median over the rounds':44} {'allranks':>12} {'torchrun':>12}   ratio of a round (quartiles)")
    for name, unit in {
        "step": "ms", "processor time of a step, all processes": "ms", "agent": "% of a core",
        "workers": "% of a core", "beat threads": "% of a core", "writers": "% of a core", "agreement": "% of the time",
        "saves, stall": "% of the time",
    }.items():  # fmt: skip
        allranks, torchrun = ([one[kind].get(name, 0.0) for one in rounds] for kind in ("allranks", "torchrun"))
        line = f"  {name + ', ' + unit:42} {statistics.median(allranks):12.3f} {statistics.median(torchrun):12.3f}"
        if unit == "ms" and num_rounds > 1:
            low, middle, high = statistics.quantiles(map(lambda a, b: a / b, allranks, torchrun), method="inclusive")
            line += f"   {middle:.3f} ({low:.3f} to {high:.3f})"
        print(line)


def run_job(kind: str, num_ranks: int, num_steps: int, num_products: int) -> dict[str, float]:
    """What one job cost: ms of a step, and percent of the measured time or of a core."""
    launcher = ["allranks", "run", "--checkpoint-every", str(num_steps // 4)]
    launcher = launcher if kind == "allranks" else ["torch.distributed.run", "--standalone"]
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w") as log:
        command = [sys.executable, "-m", *launcher, f"--nproc-per-node={num_ranks}", str(Path(__file__).absolute())]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        arguments = ["--train", folder, str(num_steps), str(num_products)]
        job = subprocess.Popen([*command, *arguments], cwd=folder, env=env, stdout=log, stderr=log)
        looks = []
        for name in ("began", "ended"):
            while not Path(folder, name).exists():
                if job.poll() is not None:
                    sys.exit(f"{kind} ended with {job.returncode}:\n{Path(folder, 'log').read_text()}")
                time.sleep(0.005)
            looks.append(cpu_seconds(job.pid))
            Path(folder, f"{name}.seen").touch()
        if job.wait():
            sys.exit(f"{kind} ended with {job.returncode}:\n{Path(folder, 'log').read_text()}")
        ranks = [json.loads(path.read_text()) for path in Path(folder).glob("rank_*.json")]
    wall_s = ranks[0]["wall_s"]
    spent = {kind: 100 * (looks[1][kind] - looks[0][kind]) / wall_s for kind in looks[1]}
    return spent | {
        "step": 1000 * wall_s / num_steps,
        "processor time of a step, all processes": 10 * sum(spent.values()) * wall_s / num_steps,
        "beat threads": 100 * sum(rank["beat_s"] for rank in ranks) / wall_s,
        # The rank that waited least: the others' time is that of waiting for it, as in any collective.
        "agreement": 100 * min(rank["agreement_s"] for rank in ranks) / wall_s,
        "saves, stall": 100 * max(rank["save_s"] for rank in ranks) / wall_s,
    }


def cpu_seconds(launcher: int) -> dict[str, float]:
    """Processor time of a launcher and of all processes below it, until now, by their kind."""
    spent: dict[str, float] = defaultdict(float)
    pids = [launcher]
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            kind = next((kind for sign, kind in KINDS.items() if sign in words and pid != launcher), "agent")
            # With that of children that have ended.
            spent[kind] += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    return spent


def train(folder: Path, num_steps: int, num_products: int) -> None:
    """One rank of a job: the same training with and without a session."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    first = num_steps * 3 // 8  # after the first save, which also starts the writers
    spent_s: dict[str, float] = defaultdict(float)
    dataset, matrix = TensorDataset(torch.ones(1 << 16, 64)), torch.ones(256, 256)
    net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    with contextlib.ExitStack() as stack:
        batches: Iterator[Any]
        if "ALLRANKS_AGENT_PID" in os.environ:
            from allranks.state.resumed.agree import Agreement
            from allranks.state.saved.checkpoint import Checkpointer

            Agreement.reach = timed(Agreement.reach, "agreement_s", spent_s)  # type: ignore[method-assign]
            Checkpointer.save = timed(Checkpointer.save, "save_s", spent_s)  # type: ignore[method-assign]
            session = stack.enter_context(allranks.session(backend="gloo"))
            model = session.ddp(net)
            optimizer = torch.optim.AdamW(model.parameters())
            sampler = session.sampler(dataset, global_batch_size=8 * session.world_size, seed=1)
            state = session.track(model=model, optimizer=optimizer, sampler=sampler)
            batches = state.steps(DataLoader(dataset, batch_sampler=sampler), total=first + num_steps + 1)
        else:
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
            model = DistributedDataParallel(net)
            optimizer = torch.optim.AdamW(model.parameters())
            loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
            batches = map(contextlib.nullcontext, itertools.chain.from_iterable(itertools.repeat(loader)))
        rank, began, began_s = dist.get_rank(), dict[str, float](), 0.0
        for number in range(first + num_steps + 1):
            with next(batches) as (inputs,):
                if number in (first, first + num_steps):
                    spent_s["beat_s"] = beat_seconds()
                    told = {name: spent_s[name] - began.get(name, 0.0) for name in ("beat_s", "agreement_s", "save_s")}
                    told["wall_s"] = time.perf_counter() - began_s
                    name = "began" if number == first else "ended"
                    began, began_s = dict(spent_s), tell(folder, name, rank, told)
                model(inputs).sum().backward()
                for _ in range(num_products):
                    matrix @ matrix
                optimizer.step()
                optimizer.zero_grad()
        next(batches, None)


def tell(folder: Path, name: str, rank: int, told: dict[str, float]) -> float:
    """Have the processor time read while all ranks wait, and return when they go on."""
    import torch.distributed as dist

    (folder / f"rank_{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    if rank == 0:
        (folder / name).touch()
        while not (folder / f"{name}.seen").exists():
            time.sleep(0.002)
    dist.barrier()
    return time.perf_counter()


def timed(call: Callable[..., Any], name: str, spent_s: dict[str, float]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spent_s[name] += time.perf_counter() - began_s

    return wrapped


def beat_seconds() -> float:
    """Processor time of this worker's beat thread; 0 where it has none."""
    threads = [thread for thread in threading.enumerate() if thread.name == "allranks-beat"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in threads)


if __name__ == "__main__":
    main()
