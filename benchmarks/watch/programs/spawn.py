"""The same training as a script that starts its own ranks: `python spawn.py DIR`. It serves the store itself.

A rank's number is an argument; os.environ is filled after the process began, so /proc/PID/environ does not show it.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp
import train

NUM_RANKS, PORT = 3, 29555


def work(rank: int, directory: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), STORE_AT=f"127.0.0.1:{PORT}")
    sys.argv = ["spawn.py", directory]
    train.main()


def main() -> None:
    store = dist.TCPStore("127.0.0.1", PORT, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10))
    mp.spawn(work, args=(sys.argv[1],), nprocs=NUM_RANKS)
    del store


if __name__ == "__main__":
    main()
