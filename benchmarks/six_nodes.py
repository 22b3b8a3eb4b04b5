"""Six nodes through SLURM: `allranks run` with its whole roll call, against torchrun and against raw workers.

    sudo python benchmarks/six_nodes.py --rounds 5

All three run the same script, one rank a node, in the lab (real SLURM, network namespaces), alternately; ratios and
differences are taken round by round. Raw workers get RANK, WORLD_SIZE and MASTER_ADDR from srun's variables and nobody
watches them. Start to exit is srun's; `init` is how long the last worker's own init_process_group took.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """\
import time
import torch.distributed as dist
began_s = time.monotonic()
dist.init_process_group("gloo")
print(f"init {time.monotonic() - began_s:.3f}", flush=True)
dist.barrier()
dist.destroy_process_group()
time.sleep(0.2)  # torch 2.13 with Gloo: a worker must not leave while a collective's thread is at work
"""
RAW = """\
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=0 MASTER_ADDR=192.168.20.15 MASTER_PORT=29500
export GLOO_SOCKET_IFNAME=$(ip -o -4 address show to 192.168.20.0/24 | awk '{print $2; exit}')
exec python "$1"
"""
TORCHRUN = """\
export GLOO_SOCKET_IFNAME=$(ip -o -4 address show to 192.168.20.0/24 | awk '{print $2; exit}')
exec torchrun --nnodes=6 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=bench --rdzv-endpoint=master-node:29500 "$1"
"""
CLUSTER = Path(__file__).parent.parent / "examples" / "six-node" / "cluster.toml"
DEADLINE_S = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        script = Path(folder, "form_group.py")
        script.write_text(SCRIPT)
        for name, text in (("raw.sh", RAW), ("torchrun.sh", TORCHRUN)):
            Path(folder, name).write_text(text)
        lab = f"bench-{os.getpid()}"
        commands = {
            "allranks run": ["allranks", "run", "--cluster", str(CLUSTER), str(script)],
            "torchrun": ["sh", f"{folder}/torchrun.sh", str(script)],
            "raw workers": ["sh", f"{folder}/raw.sh", str(script)],
        }
        allranks("lab", "up", "--name", lab, "--cluster", str(CLUSTER))
        try:
            for command in commands.values():  # warms the file cache; not counted
                run(lab, folder, command)
            took: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
            for number in range(options.rounds):
                order = list(commands.items())
                for name, command in order[number % 3 :] + order[: number % 3]:
                    took[name].append(run(lab, folder, command))
        finally:
            allranks("lab", "down", "--name", lab)
    print(f"six nodes, one rank each, {os.cpu_count()} cores, {options.rounds} alternating rounds; seconds")
    for name, values in took.items():
        total, init = [each[0] for each in values], [each[1] for each in values]
        print(
            f"  {name:<13} start to exit {statistics.median(total):6.2f} ({min(total):.2f} to {max(total):.2f})"
            f"   last init {statistics.median(init):5.2f} ({min(init):.2f} to {max(init):.2f})"
        )
    ours = took["allranks run"]
    ratios = [mine[0] / theirs[0] for mine, theirs in zip(ours, took["torchrun"], strict=True)]
    more = [mine[0] - theirs[0] for mine, theirs in zip(ours, took["raw workers"], strict=True)]
    init_more = [mine[1] - theirs[1] for mine, theirs in zip(ours, took["raw workers"], strict=True)]
    print(f"  allranks run / torchrun: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"  allranks run - raw workers: {statistics.median(more):+.2f} s ({min(more):+.2f} to {max(more):+.2f})")
    spread = f"({min(init_more):+.2f} to {max(init_more):+.2f})"
    print(
        f"  the last worker's init_process_group, against raw workers: {statistics.median(init_more):+.2f} s {spread}"
    )


def run(lab: str, folder: str, command: list[str]) -> tuple[float, float]:
    """Seconds from start to exit, and those of the slowest init_process_group."""
    began_s = time.monotonic()
    flags = ["--nodes=6", "--ntasks-per-node=1", f"--chdir={folder}"]
    done = allranks("lab", "exec", "--name", lab, "master-node", "--", "srun", *flags, *command)
    took_s = time.monotonic() - began_s
    inits = [float(text) for text in re.findall(r"init (\d+\.\d+)", done.stdout)]
    if len(inits) != 6:
        sys.exit(f"{command[0]}: {len(inits)} of 6 workers formed the group:\n{done.stdout}{done.stderr}")
    return took_s, max(inits)


def allranks(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "allranks", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done


if __name__ == "__main__":
    main()
