"""A training with a session, of which one rank dies once; all ranks write down when each step ended.

    allranks run --nproc-per-node 2 --max-restarts 1 session.py --dir DIR --steps 160 --checkpoint-every 60 --lose 50

The rank dies that many steps after the first complete checkpoint. DIR/steps_<rank>.txt has a line for each step that
has ended, DIR/died.txt the moment of the SIGKILL: generation, step, seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch

import allranks

STEP_S = 0.04
VICTIM = 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--checkpoint-every", type=int, required=True)
    parser.add_argument("--lose", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    last = options.checkpoint_every + options.lose
    with allranks.session() as s, (options.dir / f"steps_{s.rank}.txt").open("a", buffering=1) as file:
        model = s.ddp(torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        state = s.track(model=model, optimizer=optimizer, checkpoint_every=options.checkpoint_every)
        for step in state.steps([torch.ones(8)] * options.steps, total=options.steps):
            if generation == 0 and s.rank == VICTIM and step.number == last:
                (options.dir / "died.txt").write_text(f"{generation} {step.number} {time.monotonic()}")
                os.kill(os.getpid(), signal.SIGKILL)
            with step as batch:
                time.sleep(STEP_S)
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            file.write(f"{generation} {step.number + 1} {time.monotonic()}\n")


if __name__ == "__main__":
    main()
