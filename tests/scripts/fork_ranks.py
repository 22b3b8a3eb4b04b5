"""Starts a script as so many ranks, as torchrun would, but with one import of torch for all of them.

fork_ranks.py NUM[,NUM...] SCRIPT [ARGUMENT...]     several numbers: again and again, EXACT_LIFE counts
fork_ranks.py --serve                               one import for many such commands; see tests/forked.py

Prints the exit codes of the ranks after each start.
"""

import importlib
import json
import os
import runpy
import socket
import sys
import traceback

import torch


def run_rank(rank: int, num_ranks: int, port: int, argv: list[str]) -> int:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "TORCHELASTIC_RUN_ID": "forked"}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    sys.argv = argv
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


def run_lives(sizes: str, *argv: str) -> None:
    for life, size in enumerate(map(int, sizes.split(","))):
        with socket.create_server(("127.0.0.1", 0)) as sock:
            free_port = sock.getsockname()[1]
        pids = []
        for number in range(size):
            pids.append(os.fork())
            if not pids[-1]:
                os.environ["EXACT_LIFE"] = str(life)
                code = run_rank(number, size, free_port, list(argv))
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)
        print("codes", [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], flush=True)


def serve() -> None:
    """Run a command for each line on stdin, in a fork of this process, and answer with its pid and its exit code."""
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            for fd, name in ((0, os.devnull), (1, order["out"]), (2, order["err"])):
                os.dup2(os.open(name, os.O_RDWR | os.O_APPEND), fd)
            os.chdir(order["folder"])
            os.environ.clear()
            os.environ |= order["env"]
            run_lives(*order["argv"])
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


for name in ("torch._dynamo", "allranks.session", "allranks.state.resumed.begin"):
    importlib.import_module(name)  # once, for all ranks: DDP alone imports 800 modules when it is made
torch.set_num_threads(1)
if sys.argv[1] == "--serve":
    serve()
else:
    run_lives(*sys.argv[1:])
