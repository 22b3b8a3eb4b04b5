"""Starts a script as so many ranks, as torchrun would, but with one import of torch for all of them.

fork_ranks.py NUM[,NUM...] SCRIPT [ARGUMENT...]     several numbers: again and again, EXACT_LIFE counts

Prints the exit codes of the ranks after each start.
"""

import importlib
import os
import runpy
import socket
import sys
import traceback

import torch


def run_rank(rank: int, num_ranks: int, port: int) -> int:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "TORCHELASTIC_RUN_ID": "forked"}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    sys.argv = sys.argv[2:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as exc:
        if not isinstance(exc.code, int | None):
            print(exc.code, file=sys.stderr)
            return 1
        return exc.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


for name in (
    "torch._dynamo", "allranks.session", "allranks.state.resumed.begin", "allranks.preflight.ground",
):  # fmt: skip
    importlib.import_module(name)  # once, for all ranks: DDP alone imports 800 modules when it is made
torch.set_num_threads(1)
for life, size in enumerate(map(int, sys.argv[1].split(","))):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        free_port = sock.getsockname()[1]
    pids = []
    for number in range(size):
        pids.append(os.fork())
        if not pids[-1]:
            os.environ["EXACT_LIFE"] = str(life)
            code = run_rank(number, size, free_port)
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print("codes", [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], flush=True)
