"""The same training as Ray starts one: a parent starts workers that know nothing, and tells each its rank by a pipe.

    python ray_like.py DIR                 the driver
    python ray_like.py --worker            a worker: its environment and its name are set after it began

Like Ray's, workers have a title of their own in place of `python` (`ray::train`).
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from datetime import timedelta

NUM_RANKS, PORT = 3, 29566
PR_SET_NAME = 15


def work() -> None:
    told = json.loads(sys.stdin.readline())
    os.environ.update(told["env"])
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"ray::train", 0, 0, 0)
    sys.argv = ["train.py", told["directory"]]
    import train

    train.main()


def drive(directory: str) -> int:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", PORT, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10))
    command = [sys.executable, __file__, "--worker"]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for _ in range(NUM_RANKS)]
    for rank, worker in enumerate(workers):
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "STORE_AT": f"127.0.0.1:{PORT}"}
        told = {"env": {name: str(value) for name, value in env.items()}, "directory": directory}
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(told) + "\n")
        worker.stdin.flush()
    codes = [worker.wait() for worker in workers]
    del store
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(work() if sys.argv[1] == "--worker" else drive(sys.argv[1]))
