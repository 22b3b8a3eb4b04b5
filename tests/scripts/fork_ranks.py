"""Starts a script as so many ranks, as torchrun would, but with one import of torch for all of them.

fork_ranks.py NUM SCRIPT [ARGUMENT...]     prints the exit codes of the ranks at the end
"""

import os
import runpy
import socket
import sys
import traceback

import torch

torch.set_num_threads(1)
num_ranks, script = int(sys.argv[1]), sys.argv[2]
with socket.create_server(("127.0.0.1", 0)) as sock:
    port = sock.getsockname()[1]
pids = []
for rank in range(num_ranks):
    if pid := os.fork():
        pids.append(pid)
        continue
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "TORCHELASTIC_RUN_ID": "forked"}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    sys.argv = sys.argv[2:]
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
print("codes", [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], flush=True)
