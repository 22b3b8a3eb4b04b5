"""The job of a drill, as a script that uses allranks: a small training that resumes where it stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from orders import Orders
from torch.utils.data import DataLoader, TensorDataset

import allranks

WIDTH = 384
"""Two layers of 0.6 MB each: an all-reduce loads the links, and is short compared with a step."""
SAMPLES = 4096
GLOBAL_BATCH = 96


def main() -> None:
    """Train until an order ends the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--mix", type=int, metavar="SEED", help="mix in slow steps and evaluations")
    parser.add_argument("--replay-every", type=int, metavar="STEPS", help="have ranks repeat each other's steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, WIDTH))
    with allranks.session() as s:
        layers = (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
        model = s.ddp(torch.nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        sampler = s.sampler(data, global_batch_size=GLOBAL_BATCH, seed=0)

        def train(batch: list[torch.Tensor]) -> torch.Tensor:
            loss = (model(batch[0]) - batch[0]).square().mean()
            loss.backward()
            return loss

        every = arguments.replay_every
        parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
        state = s.track(**parts, replay=train if every else None, replay_every=every)
        orders = Orders(arguments.dir, rank=s.rank, seed=arguments.mix, weights=[*model.parameters()])
        for step in state.steps(DataLoader(data, batch_sampler=sampler)):
            number = step.number + 1
            with step as batch:
                orders.obey(number)
                optimizer.zero_grad()
                loss = train(batch)
                optimizer.step()
                orders.reduce(loss)
            orders.write(number)
            if orders.is_last():
                break


if __name__ == "__main__":
    main()
