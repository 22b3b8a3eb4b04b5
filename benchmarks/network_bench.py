"""`allranks bench` against iperf3 and against a script of 20 lines: do they read the same network alike?

    sudo python benchmarks/network_bench.py --rounds 5 --mbit 500

Six nodes in the lab (real SLURM, network namespaces); `tc tbf` shapes what each node sends. A round runs iperf3 between
two nodes, each way, `allranks bench --network-only`, the script, and `allranks bench`; ratios are taken round by
round, and rounds alternate who is first. Ends with exit code 1 if the median of a ratio is more than 5 % off.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

SCRIPT = """\
import json, os, statistics, sys, time
import torch
import torch.distributed as dist

rank, num_ranks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method="tcp://192.168.20.15:29500", rank=rank, world_size=num_ranks)
found = {}
for size_bytes in map(int, sys.argv[1:]):
    bucket = torch.zeros(size_bytes // 4)
    dist.all_reduce(bucket)
    took_s = []
    for _ in range(10):
        began_s = time.monotonic()
        dist.all_reduce(bucket)
        took_s.append(time.monotonic() - began_s)
    slowest_s = torch.tensor(took_s)
    dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
    found[size_bytes] = statistics.median(slowest_s.tolist())
if rank == 0:
    print(json.dumps(found), flush=True)
time.sleep(1)  # torch 2.13 with Gloo: a worker must not leave while a collective's thread is at work
os._exit(0)
"""
RAW = """\
export GLOO_SOCKET_IFNAME=$(ip -o -4 address show to 192.168.20.0/24 | awk '{print $2; exit}')
exec python "$@"
"""
CLUSTER = Path(__file__).parent.parent / "examples" / "six-node" / "cluster.toml"
SIZES = (1 << 20, 8 << 20)
DEADLINE_S = 240
WITHIN = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mbit", type=int, default=500, help="rate of each node, in Mbit/s")
    parser.add_argument("--only", choices=["tcp", "gloo"], help="one of the two comparisons")
    parser.add_argument("--name", default=f"network-{os.getpid()}", help="of the lab")
    told = parser.parse_args()
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, lab_of(told.name, told.mbit) as lab:
        Path(folder, "reduce.py").write_text(SCRIPT)
        Path(folder, "raw.sh").write_text(RAW)
        for number in range(told.rounds):
            if told.only != "gloo":
                ours, theirs = in_turn(number, lab.streams, lab.iperf)
                for pair, mbit_s in theirs.items():
                    add(ratios, f"TCP {' -> '.join(pair)}", "Mbit/s", ours[pair], mbit_s)
            if told.only != "tcp":
                ours_s, theirs_s = in_turn(number, lambda: lab.collectives(folder), lambda: lab.script(folder))
                for size, took_s in theirs_s.items():
                    add(ratios, f"all-reduce of {size >> 20} MiB", "ms", ours_s[size] * 1e3, took_s * 1e3)
    print(f"\n{told.mbit} Mbit/s a node, {told.rounds} alternating rounds, {os.cpu_count()} cores: ours / theirs")
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    for name, values in ratios.items():
        print(f"  {name:<32} {medians[name]:.3f} ({min(values):.3f} to {max(values):.3f})")
    sys.exit(any(abs(ratio - 1) > WITHIN for ratio in medians.values()))


def in_turn(number, ours, theirs):  # type: ignore[no-untyped-def]
    """Run both, in an order that alternates, and return ours first."""
    if number % 2:
        second = theirs()
        return ours(), second
    return ours(), theirs()


def add(ratios: dict[str, list[float]], name: str, unit: str, ours: float, theirs: float) -> None:
    print(f"{name}: ours {ours:.1f} {unit}, theirs {theirs:.1f} {unit}", flush=True)
    ratios.setdefault(name, []).append(ours / theirs)


class Lab:
    """Six nodes whose links are shaped."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes = {node["name"]: node for node in tomllib.loads(CLUSTER.read_text())["node"]}

    def command(self, node: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "allranks", "lab", "exec", "--name", self.name, node, "--", *arguments]

    def run(self, node: str, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
        return execute(self.command(node, *arguments), codes=codes)

    def shape(self, mbit: int) -> None:
        burst = max(32, mbit // 4)  # kB: what two ticks of 1 ms send, and a segment
        for name, node in self.nodes.items():
            how = f"root tbf rate {mbit}mbit burst {burst}kb latency 20ms"
            self.run(name, "tc", "qdisc", "replace", "dev", node["interface"], *how.split())

    def iperf(self) -> dict[tuple[str, str], float]:
        """Payload that iperf3 receives in 2 s, between the first two nodes, each way."""
        found = {}
        first, second, *_ = self.nodes
        for source, target in ((first, second), (second, first)):
            address = self.nodes[target]["address"]
            with subprocess.Popen(self.command(target, "iperf3", "-s", "-1", "-B", address), stdout=-3) as server:
                time.sleep(1.0)
                said = json.loads(self.run(source, "iperf3", "-c", address, "-t", "2", "-O", "1", "-J"))
                server.wait(DEADLINE_S)
            found[source, target] = said["end"]["sum_received"]["bits_per_second"] / 1e6
        return found

    def streams(self) -> dict[tuple[str, str], float]:
        """What our streams carried, between all nodes."""
        said = self.run(next(iter(self.nodes)), *BENCH, "--network-only", codes=(0, 1, 3))
        return {(pair["source"], pair["target"]): pair["mbit_s"] for pair in json.loads(said)["table"]["pairs"]}

    def collectives(self, folder: str) -> dict[int, float]:
        """Seconds of our all-reduces, one at a time."""
        sizes = ",".join(map(str, SIZES))
        command = [*BENCH, "--sizes", sizes, "--log-dir", folder]
        said = self.run(next(iter(self.nodes)), *command, codes=(0, 1, 3))
        rows = [row for row in json.loads(said)["table"]["rows"] if row["collective"] == "all_reduce"]
        return {row["size_bytes"]: row["time_s"] for row in rows if row.get("in_flight", 1) == 1}

    def script(self, folder: str) -> dict[int, float]:
        """Seconds of the script's all-reduces."""
        flags = ["--nodes=6", "--ntasks-per-node=1", f"--chdir={folder}"]
        sizes = [str(size) for size in SIZES]
        said = self.run(next(iter(self.nodes)), "srun", *flags, "sh", "raw.sh", "reduce.py", *sizes)
        line = next(line for line in said.splitlines() if line.startswith("{"))
        return {int(size): took_s for size, took_s in json.loads(line).items()}


BENCH = ("allranks", "bench", "--nodes", "6", "--cluster", str(CLUSTER), "--json")


@contextlib.contextmanager
def lab_of(name: str, mbit: int) -> Iterator[Lab]:
    execute([sys.executable, "-m", "allranks", "lab", "up", "--name", name, "--cluster", str(CLUSTER)])
    try:
        lab = Lab(name)
        lab.shape(mbit)
        yield lab
    finally:
        execute([sys.executable, "-m", "allranks", "lab", "down", "--name", name])


def execute(command: list[str], *, codes: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode not in codes:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
