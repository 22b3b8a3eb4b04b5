"""Healthy trainings, whose replicas are compared all the time: is there an alarm? There must be none.

    python benchmarks/healthy_replicas.py --minutes 60 [--only ema] [--page]

All of examples/training, and two trainings of this file: one clips its gradients by their norm, one begins an average
of its weights late, on rank 0 alone. Each runs with 2 and with 3 ranks for an equal share of the time, which counts
from the first step; the end of an example is put off until then. Shares are cut into rounds of at most ROUND_S: what is
watched is learned anew in each process, and each round but the first one resumes the one before, with all that is
compared after a load. The first run is no healthy one: rank 1 flips a bit, and that must be named.

Exit code: 0 if there was no alarm, and the flip was named; else 1. --page writes docs/evidence/healthy-replicas.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
FORK = ROOT / "tests/scripts/fork_ranks.py"
PAGE = ROOT / "docs/evidence/healthy-replicas.md"
OWN = ("clipping", "late average on rank 0")
FLIP, FLIP_AT = "flip", 40
ROUND_S, START_S = 60.0, 300.0
ALARMS = ("AR6", "most tensors differ", "are not compared with each other")
"""In what rank 0 says; the last one is no alarm where parameters are sharded."""


@dataclass
class Row:
    """What the runs of one training with so many ranks have shown."""

    name: str
    num_ranks: int
    num_runs: int = 0
    seconds: float = 0.0
    num_steps: int = 0
    num_checks: int = 0
    num_watched: int = 0
    unlike: set[str] = field(default_factory=set)
    alarms: list[str] = field(default_factory=list)


def list_names() -> list[str]:
    """Return all trainings."""
    return [*(path.name for path in sorted((ROOT / "examples/training").glob("*.py"))), *OWN]


# One rank


def train(name: str, seconds: float) -> None:
    """Run a training for so long; rank 0 prints what its checks have seen."""
    from allranks.session import Session
    from allranks.state.resumed.track import Tracked
    from allranks.state.truth.comparing import Comparing

    steps, heard, sampler, seen = Tracked.steps, Comparing.heard, Session.sampler, {"checks": 0, "steps": 0, "s": 0.0}

    def heard_words(self: Any, step: int, largest: Any, **told: Any) -> bool:
        seen["checks"] += bool(largest)
        return bool(heard(self, step, largest, **told))

    def steps_for_so_long(self: Any, loader: Any, **told: Any) -> Iterator[Any]:
        end = {"epochs": 10**9} if "epochs" in told else {"total": 10**9}
        began_s, began = time.monotonic(), self.step
        for step in steps(self, loader, **(told | end)):
            yield step
            seen["steps"], seen["s"] = self.step - began, time.monotonic() - began_s
            if self._membership.is_leader and seen["s"] > seconds:
                self.stop()
        if self._membership.is_leader:
            own = self._comparing
            seen_of = [own._seen[name] for name in own.numbers if name in own._seen]
            watched = sum(own.is_watched or own.is_frozen for own in seen_of)
            print("SEEN", json.dumps({**seen, "watched": watched, "unlike": sorted(own._dropped)}), flush=True)

    def even_sampler(self: Any, data: Any, *, global_batch_size: int, **told: Any) -> Any:
        return sampler(self, data, global_batch_size=global_batch_size // self.world_size * self.world_size, **told)

    patches: dict[tuple[type, str], Any] = {(Comparing, "heard"): heard_words, (Tracked, "steps"): steps_for_so_long}
    if name.startswith("fsdp"):
        patches[Session, "sampler"] = even_sampler
    for (owner, method), patch in patches.items():
        setattr(owner, method, patch)
    if name in (*OWN, FLIP):
        train_own(name)
    else:
        runpy.run_path(str(ROOT / "examples/training" / name), run_name="__main__")


def train_own(name: str) -> None:
    """Train the small network of the examples, and do what the name says."""
    import allranks

    with allranks.session() as s:
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        model, average = s.ddp(net), torch.optim.swa_utils.AveragedModel(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        inputs = torch.randn(512, 16)
        sampler = s.sampler(inputs, global_batch_size=32, seed=1)
        state = s.track(model=model, optimizer=optimizer, average=average, sampler=sampler)
        loader = torch.utils.data.DataLoader(inputs, batch_sampler=sampler)
        for step in state.steps(loader, total=100):
            with step as x:
                model(x).sub(x.square().mean(1, keepdim=True)).square().mean().backward()
                if name == "clipping":
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                if name == "late average on rank 0" and s.is_leader and step.number >= 200:
                    average.update_parameters(net)
                if name == FLIP and s.rank == 1 and step.number == FLIP_AT:
                    net[0].weight.data.view(torch.int32)[0, 0] ^= 1 << 12


# All of them


def run(row: Row, seconds: float, directory: Path) -> None:
    """Run one round of a training, and add what it has shown."""
    env = {**os.environ, "BENCH_NAME": row.name, "BENCH_SECONDS": str(seconds)}
    env["ALLRANKS_CHECKPOINT_DIR"] = str(directory / f"{row.name}-{row.num_ranks}".replace(" ", "-"))
    command = [sys.executable, str(FORK), str(row.num_ranks), __file__]
    try:
        done = subprocess.run(
            command, env=env, cwd=directory, capture_output=True, text=True, timeout=seconds + START_S, check=False
        )
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired as exc:
        output = f"{(exc.stdout or b'').decode()}\nit did not end"
    lines = output.replace("error: ", "\nerror: ").splitlines()  # two ranks may print at once
    row.num_runs += 1
    for line in lines:
        if line.startswith("SEEN "):
            seen = json.loads(line.removeprefix("SEEN "))
            row.num_checks, row.num_steps = row.num_checks + seen["checks"], row.num_steps + seen["steps"]
            row.seconds, row.num_watched = row.seconds + seen["s"], max(row.num_watched, seen["watched"])
            row.unlike |= {*seen["unlike"]}
    signs = ALARMS[: -1 if row.name.startswith("fsdp") else None]
    if alarms := [line for line in lines if any(sign in line for sign in signs)]:
        row.alarms.append(alarms[0])
    elif f"codes {[0] * row.num_ranks}" not in lines:
        row.alarms.append(" / ".join(lines[-6:]))


def render(rows: list[Row], flip: str, minutes: float) -> str:
    """Return the page."""
    num_checks, num_alarms = sum(row.num_checks for row in rows), sum(len(row.alarms) for row in rows)
    text = f"""# Healthy replicas

`python benchmarks/healthy_replicas.py --page` writes this page: healthy trainings on one machine (Gloo, CPU), whose
replicas are compared as in every session. Each round but the first one resumes the one before. A check of a tensor that
is not replicated ends with its first difference; those tensors are listed.

{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores:
{num_checks:,} checks in {minutes:.1f} minutes of training, {num_alarms} alarms. Before that a bit was flipped on
purpose: {flip}

| training | ranks | rounds | minutes | steps | checks | tensors watched | not replicated | alarms |
|---|---|---|---|---|---|---|---|---|
"""
    for row in rows:
        cells = row.name, row.num_ranks, row.num_runs, f"{row.seconds / 60:.1f}", f"{row.num_steps:,}"
        cells += f"{row.num_checks:,}", row.num_watched, ", ".join(sorted(row.unlike)) or "none", len(row.alarms)
        text += f"| {' | '.join(map(str, cells))} |\n"
    return text


def main() -> int:
    """Run all trainings for an equal share of the time."""
    if "BENCH_NAME" in os.environ and "RANK" in os.environ:
        train(os.environ["BENCH_NAME"], float(os.environ["BENCH_SECONDS"]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", default="", help="trainings whose name contains this")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    told = parser.parse_args()
    names = [name for name in list_names() if told.only in name]
    rows = [Row(name, num_ranks) for name in names for num_ranks in (2, 3)]
    share_s = 60 * told.minutes / len(rows)
    num_rounds = max(2, round(share_s / ROUND_S))
    with tempfile.TemporaryDirectory() as folder:
        flipped = Row(FLIP, 3)
        run(flipped, 5.0, Path(folder))
        flip = next((line for line in flipped.alarms if "AR610" in line and "rank 1 " in line), "")
        print(f"a flip on rank 1: {flip or f'not named: {flipped.alarms}'}", flush=True)
        page = ""
        for _ in range(num_rounds):
            for row in rows:
                run(row, share_s / num_rounds, Path(folder))
                print(f"{row.name}, {row.num_ranks} ranks: {row.num_checks} checks, {row.num_watched} tensors "
                      f"watched, {len(row.alarms)} alarms {' '.join(row.alarms)}", flush=True)  # fmt: skip
            page = render(rows, f"`{flip}`" if flip else "**not named**", sum(row.seconds for row in rows) / 60)
            if told.page:
                PAGE.write_text(page)
    print(page)
    return int(not flip or any(row.alarms or not row.num_steps for row in rows))


if __name__ == "__main__":
    sys.exit(main())
