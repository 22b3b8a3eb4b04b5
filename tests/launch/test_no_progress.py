"""Is a job ended in which nothing moves, and no healthy one that has no collectives and no output?"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from conftest import Allranks, write

HANG_S = 4
LASTS_S = 3.5 * HANG_S
FORMS = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
"""
HEALTHY = {
    "computes": f"{FORMS}end_s = time.monotonic() + {LASTS_S}\nwhile time.monotonic() < end_s: pass\n",
    "computes in a child": f"""
        {FORMS.replace(chr(10), chr(10) + 8 * " ")}
        import subprocess, sys
        loop = "import time; end_s = time.monotonic() + {LASTS_S}\\nwhile time.monotonic() < end_s: pass"
        subprocess.run([sys.executable, "-I", "-S", "-c", loop], check=True)
        """,
    "downloads": f"""
        {FORMS.replace(chr(10), chr(10) + 8 * " ")}
        import socket
        ours, theirs = socket.socketpair()
        if os.fork() == 0:  # the other side: 20 kB a second
            for _ in range({int(LASTS_S * 10)}):
                theirs.sendall(bytes(2000))
                time.sleep(0.1)
            os._exit(0)
        theirs.close()
        with open(f"part.{{os.environ['RANK']}}", "wb", buffering=0) as file:
            while data := ours.recv(65536):
                file.write(data)
        """,
    "a server without a request": f"""
        import select, socket
        with socket.create_server(("127.0.0.1", 0)) as server:
            select.select([server], [], [], {LASTS_S})
        """,
}


@pytest.mark.by_hand
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_job_without_collectives_and_output_is_not_ended(allranks: Allranks, tmp_path: Path, name: str):
    write(tmp_path / "train.py", HEALTHY[name])
    result = allranks("run", "--nproc-per-node", "2", "--hang-timeout", str(HANG_S), "train.py")
    assert result.returncode == 0, result.stderr
    took_s = float(re.search(r"succeeded: 2 ranks, (\d+) s", result.stderr)[1])
    assert took_s >= 3 * HANG_S


@pytest.mark.torch
def test_ranks_that_print_an_exception_and_block_in_cleanup_are_ended_at_the_hang_timeout(
    allranks: Allranks, tmp_path: Path
):
    text = f"""
        import traceback
        {FORMS.replace(chr(10), chr(10) + 8 * " ")}
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
            time.sleep(600)
        """
    write(tmp_path / "train.py", text)
    result = allranks("run", "--nproc-per-node", "2", "--hang-timeout", str(HANG_S), "train.py")
    finding = json.loads((tmp_path / "runs/latest/attempt_0/verdict.json").read_text())["findings"][0]
    assert (result.returncode, finding["cause"], finding["ranks"]) == (124, "AR408 stuck-rank", [0, 1])
    head = (
        r"they printed ZeroDivisionError: division by zero \(train\.py:\d+ in <module>\) and did not end; no rank has "
    )
    assert re.match(head, finding["message"])
    assert finding["evidence"][0]["seen"].startswith("Traceback (most recent call last):\n")
