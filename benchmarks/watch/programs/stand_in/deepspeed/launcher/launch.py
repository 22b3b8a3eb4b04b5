"""The process tree of DeepSpeed's launcher, where DeepSpeed is not installed. One node.

    python -u -m deepspeed.launcher.launch --world_info=BASE64 --master_addr=A --master_port=P train.py DIR

It has the same command line, environments and children as deepspeed/launcher/launch.py of DeepSpeed 0.19.8, looks at
its ranks once a second, and ends all of them when one fails.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("world_info", "master_addr", "master_port", "node_rank"):
        parser.add_argument(f"--{name}", default="0")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    (ids,) = json.loads(base64.urlsafe_b64decode(options.world_info)).values()
    env = {**os.environ, "MASTER_ADDR": options.master_addr, "MASTER_PORT": options.master_port}
    env |= {"WORLD_SIZE": str(len(ids)), "LOCAL_SIZE": str(len(ids)), "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-u", options.script[0], f"--local_rank={rank}", *options.script[1:]],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in ids
    ]

    def end(code: int) -> None:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        sys.exit(code)

    signal.signal(signal.SIGTERM, lambda *_: end(1))
    while any(process.poll() is None for process in processes):
        failed = [process.returncode for process in processes if process.returncode]
        if failed:
            end(failed[0])
        time.sleep(1)


if __name__ == "__main__":
    main()
