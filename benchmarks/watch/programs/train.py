"""A small training that knows nothing of allranks: three ranks, Gloo, steps of some milliseconds.

    torchrun --nproc-per-node 3 train.py DIR          also as `srun python train.py DIR`, and under DeepSpeed's launcher

DIR/board has the orders of the harness (board.py): a fault in the script happens where a user's own would.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import data
import torch
import torch.distributed as dist
from board import Board, Code

PAUSE_S = 0.01
STOPS_S = 0.2
"""By then the store's owner is stopped: it has not read what the others ask."""
SLURM_NAMES = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}


def average(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # place: average
        parameter.grad /= dist.get_world_size()


def descend(model: torch.nn.Module) -> None:
    with torch.no_grad():  # torch.optim would import half of torch first
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad


def train(directory: str) -> None:
    board = Board(f"{directory}/board")
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    step = 0
    while not board.is_over(step):
        step += 1
        board.tell(rank, step)
        loss = model(data.load_batch(step)).square().mean()
        model.zero_grad()
        loss.backward()
        code = board.code_at(step, rank)
        if code is not Code.NOTHING:
            board.strike()
        if code is Code.EXIT:
            os._exit(0)
        elif code is Code.SKIP:
            dist.all_reduce(model.weight.grad)
            continue
        elif code is Code.NEW_GROUP:
            if board.is_named(rank):
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(STOPS_S)
            dist.new_group(list(range(dist.get_world_size())))  # place: new_group
        elif code is Code.READ:
            data.read_shard(f"{directory}/shard")
        elif code is Code.LOOP:
            data.shuffle(board)
        elif code is Code.GIL:
            data.decode()
        elif code is Code.REGEX:
            data.clean("a" * 40 + "b")
        elif code is Code.BROADCAST:
            dist.broadcast(loss.detach(), src=(rank + 1) % dist.get_world_size())  # place: broadcast
        average(model)
        descend(model)
        time.sleep(PAUSE_S)
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    if "RANK" not in os.environ:  # under srun a script fills its own environment
        os.environ.update({name: os.environ[slurm] for name, slurm in SLURM_NAMES.items()})
    if os.environ.get("STORE_AT"):  # a store that another process serves, as torchrun's
        host, _, port = os.environ["STORE_AT"].rpartition(":")
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")
    (directory,) = (word for word in sys.argv[1:] if not word.startswith("--"))
    train(directory)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
