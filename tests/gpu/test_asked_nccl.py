"""Do torch's worker server and NCCL's dump pipe tell which call a rank waits in, while its GPU waits for a peer?

Elsewhere they are answers and a reader that the test itself wrote (tests/watch/test_ask_torch.py).
"""

from __future__ import annotations

import json
import time

import pytest

from allranks.model.node_look import FlightSeen
from allranks.watch.ask_torch import ask_recorders
from conftest import wait_until

from .conftest import Note, StartJob
from .job import PATIENCE_S, is_rehearsal


@pytest.mark.rehearsable
@pytest.mark.parametrize("way", ["server", "pipe"])
def test_a_rank_that_waits_for_its_peer_tells_its_call_when_it_is_asked(start: StartJob, note: Note, way: str):
    """Expected: rank 0 has collective 2 open, an all-reduce; rank 1 has called only the first one."""
    if way == "pipe" and is_rehearsal():
        pytest.skip("Gloo has no dump pipe")
    script = f"""\
    import time
    from pathlib import Path
    from rank import device, dist, form_group, rank, torch
    if {way == "server"}:
        import torch.distributed.debug
        server = torch._C._distributed_c10d._WorkerServer("::", 0)
    form_group()
    Path(f"{{rank}}.ready").touch()
    while rank == 1 and not Path("end").exists():
        time.sleep(0.01)
    dist.all_reduce(torch.ones(8, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    """
    env = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "pipe_", "TORCH_FR_DUMP_TEMP_FILE": "trace_"} if way == "pipe" else {}
    job = start(script, env=env)
    wait_until(lambda: all((job.where / f"{rank}.ready").exists() for rank in (0, 1)), "both ranks", PATIENCE_S)
    time.sleep(1.0)
    pids = {int((job.where / f"{rank}.pid").read_text()): rank for rank in (0, 1)}
    told = {pids[pid]: answer for pid, answer in ask_recorders(pids, at_s=100.0).items()}
    (job.where / "end").touch()
    note(way, json.dumps({rank: str(answer)[:1000] for rank, answer in told.items()}))
    assert job.end() == [0, 0], job.tail()
    calls = {}
    for rank, answer in told.items():
        assert isinstance(answer, FlightSeen), answer
        own = [call for call in answer.calls if call.group == "0"]
        calls[rank] = [(call.seq, call.op, call.is_done) for call in own]
    assert calls == {0: [(1, "all_reduce", True), (2, "all_reduce", False)], 1: [(1, "all_reduce", True)]}
