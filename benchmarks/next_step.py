"""How long does it take from a killed rank to the next step of all ranks: this code against another?

    python benchmarks/next_step.py --other ../before/.venv/bin/allranks
    python benchmarks/next_step.py --other ../before/.venv/bin/allranks --script session --ranks 4 --pairs 10

Each pair is two jobs of one machine, one with each code, one after the other; which goes first alternates, so a noisy
machine disturbs both alike. In each job a rank gets SIGKILL once all ranks have trained for `--after-s`, and the job
restarts its workers. The time ends when the last rank has made its first step after that. The ratio is taken pair by
pair. Without `--other` only this code is timed.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOLD = """\
import os
import time

def told(what):
    path = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}_{os.environ['RANK']}.{what}"
    with open(path, "a") as file:
        file.write(f"{os.getpid()} {time.time()}\\n")
"""
SCRIPTS = {
    "plain": f"""\
import torch
import torch.distributed as dist
{TOLD}
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.ones(16, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    told("step")
    time.sleep(0.05)
""",
    "session": f"""\
import torch
import allranks
{TOLD}
with allranks.session() as s:
    model = s.ddp(torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = s.sampler(10_000, global_batch_size=64)
    loader = torch.utils.data.DataLoader(torch.ones(10_000, 64), batch_sampler=sampler)
    state = s.track(model=model, optimizer=optimizer, sampler=sampler, checkpoint_every=20)
    for step in state.steps(loader):
        with step as batch:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        told("step")
        time.sleep(0.05)
""",
}
"""Train without end; each rank writes its pid and the time of each step."""
DEADLINE_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", help="the command allranks of another environment")
    parser.add_argument("--script", choices=SCRIPTS, default="plain")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--after-s", type=float, default=8.0, help="seconds of training before the kill")
    options = parser.parse_args()
    commands = {"this": [sys.executable, "-m", "allranks"]}
    if options.other:
        commands["other"] = [str(Path(options.other).absolute())]
    times: dict[str, list[float]] = {name: [] for name in commands}
    for pair in range(options.pairs):
        for name, command in sorted(commands.items(), reverse=pair % 2 == 1):
            times[name].append(kill_to_step_s(command, options))
        print(f"  pair {pair}: " + ", ".join(f"{name} {own[-1]:.2f} s" for name, own in times.items()), flush=True)
    print(f"{options.script} script, {options.ranks} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{options.pairs} alternating pairs; seconds from the kill to the last rank's next step")
    for name, own in times.items():
        print(f"  {name:<6} median {statistics.median(own):6.2f}   {min(own):6.2f} to {max(own):6.2f}")
    if options.other:
        ratios = [this / other for this, other in zip(times["this"], times["other"], strict=True)]
        print(f"  this / other: median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def kill_to_step_s(command: list[str], options: argparse.Namespace) -> float:
    """Run one job, kill one of its ranks, and return the seconds until all have made their next step."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPTS[options.script])
        words = ["run", "--nproc-per-node", str(options.ranks), "--max-restarts", "1", "train.py"]
        with Path(folder, "log").open("w") as log:
            job = subprocess.Popen([*command, *words], cwd=folder, stdout=log, stderr=log)
        try:
            begun = wait_for_steps(folder, job, generation=0, ranks=options.ranks)
            time.sleep(options.after_s)
            killed_s = time.time()
            os.kill(begun[options.ranks - 1][0], signal.SIGKILL)
            again = wait_for_steps(folder, job, generation=1, ranks=options.ranks)
        finally:
            job.terminate()
            job.wait(60)
    return max(time_s for _, time_s in again) - killed_s


def wait_for_steps(
    folder: str, job: subprocess.Popen[bytes], *, generation: int, ranks: int
) -> list[tuple[int, float]]:
    """Return pid and time of each rank's first step in a generation; a job that ends before ends the benchmark."""
    paths = [Path(folder, f"{generation}_{rank}.step") for rank in range(ranks)]
    deadline_s = time.monotonic() + DEADLINE_S
    while not all(path.exists() and path.read_text().endswith("\n") for path in paths):
        if job.poll() is not None or time.monotonic() > deadline_s:
            sys.exit(f"no step of all ranks in generation {generation}:\n{Path(folder, 'log').read_text()[-3000:]}")
        time.sleep(0.02)
    lines = [path.read_text().splitlines()[0].split() for path in paths]
    return [(int(pid), float(time_s)) for pid, time_s in lines]


if __name__ == "__main__":
    main()
