"""Starts a script as so many ranks, as torchrun would, but with one import of torch for all of them.

fork_ranks.py NUM[,NUM...] SCRIPT [ARGUMENT...]     several numbers: again and again, EXACT_LIFE counts
fork_ranks.py alone SCRIPT [ARGUMENT...]            one process, without a rank: as `python SCRIPT` does
fork_ranks.py serve FD                              what comes over this socket, each in a process; see forked.py

Prints the exit codes of the ranks after each start.
"""

import importlib
import json
import os
import runpy
import select
import socket
import sys
import traceback
from typing import NoReturn

import torch

for name in (
    "torch._dynamo", "allranks.session", "allranks.state.resumed.begin", "allranks.preflight.ground",
):  # fmt: skip
    importlib.import_module(name)  # once, for all ranks: DDP alone imports 800 modules when it is made
torch.set_num_threads(1)
MAX_BYTES = 1 << 17
"""Of a message."""


def run_script() -> int:
    """Run the script of sys.argv, and return its exit code."""
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


def run_rank(rank: int, num_ranks: int, port: int) -> int:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "TORCHELASTIC_RUN_ID": "forked"}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return run_script()


def start(sizes: str, *command: str) -> int:
    """Start the script of this command, and return an exit code."""
    sys.argv = [*command]
    if sizes == "alone":
        return run_script()
    for life, size in enumerate(map(int, sizes.split(","))):
        with socket.create_server(("127.0.0.1", 0)) as sock:
            free_port = sock.getsockname()[1]
        pids = []
        for number in range(size):
            pids.append(os.fork())
            if not pids[-1]:
                os.environ["EXACT_LIFE"] = str(life)
                leave(run_rank(number, size, free_port))
        print("codes", [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], flush=True)
    return 0


def leave(code: int) -> NoReturn:
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def serve(control: socket.socket) -> None:
    """Fork a process for each message, and answer with its pid; tell its exit code when it has ended."""
    running: dict[int, int] = {}
    """A file descriptor that is readable when the process has ended, and its pid."""
    while True:
        for fd in select.select([control, *running], [], [])[0]:
            if fd is not control:
                os.close(fd)
                _, status = os.waitpid(pid := running.pop(fd), 0)
                control.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())
                continue
            message, fds, _, _ = socket.recv_fds(control, MAX_BYTES, 2)
            if not message:
                os._exit(0)
            if not (pid := os.fork()):
                for other in (*running, control.detach()):
                    os.close(other)
                become(fds, **json.loads(message))
            for own in fds:
                os.close(own)
            running[os.pidfd_open(pid)] = pid
            control.send(json.dumps([pid]).encode())


def become(fds: list[int], folder: str, env: dict[str, str], command: list[str], leads: bool) -> NoReturn:
    """Run the command with these files as stdout and stderr."""
    if leads:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for number, fd in enumerate((os.open(os.devnull, os.O_RDONLY), *fds)):
        os.dup2(fd, number)
        os.close(fd)
    leave(start(*command))


arguments = sys.argv[1:]
if arguments[0] == "serve":
    serve(socket.socket(fileno=int(arguments[1])))
leave(start(*arguments))
