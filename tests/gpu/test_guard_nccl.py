"""What does the guard say of ranks that break in NCCL, and of ranks that are merely late?

Each job has two nodes of one rank, which share the GPU. `[guard]` has stopped_s = 2 and slow_s = 2.
"""

from __future__ import annotations

import re
import signal
import time

import pytest

from .conftest import Note, StartJob
from .job import is_rehearsal

STEPS = """\
import time
from rank import add_up, dist, form_group, rank
form_group()
for number in range(10_000):
    add_up()
    time.sleep(0.02)
"""
"""Trains for ever, as far as the guard can see."""
ENOUGH_S = 40.0 if is_rehearsal() else 15.0
"""Between a strike and the end of the job; much longer than the guard needs, much shorter than torch's 600 s."""

pytestmark = pytest.mark.rehearsable


def test_a_killed_rank_is_the_culprit(start: StartJob, note: Note):
    """Expected: AR407 with rank 1 alone, exit code 137 on both nodes, long before NCCL's timeout. The survivor waits
    in cudaStreamSynchronize and is ended; what its NCCL says of the lost connection blames nobody else.
    """
    job = start(STEPS)
    job.wait_for("READY")
    struck_s = job.strike(1, signal.SIGKILL)
    codes = job.end()
    took_s = time.monotonic() - struck_s
    note("seconds from SIGKILL to the end", f"{took_s:.1f}")
    assert codes == [137, 137], job.tail()
    assert job.culprits() == [("AR407", [1])]
    assert took_s < ENOUGH_S


def test_a_stopped_rank_is_the_culprit(start: StartJob, note: Note):
    """Expected: AR010 with rank 1, after stopped_s and a few beats. The kernel shows state T also of a process whose
    GPU is busy.
    """
    job = start(STEPS)
    job.wait_for("READY")
    struck_s = job.strike(1, signal.SIGSTOP)
    job.end()
    took_s = time.monotonic() - struck_s
    note("seconds from SIGSTOP to the end", f"{took_s:.1f}")
    assert job.culprits() == [("AR010", [1])], job.tail()
    assert took_s < ENOUGH_S


def test_a_late_rank_is_named_and_left_alone(start: StartJob):
    """Expected: rank 1 sleeps 8 s between two collectives; one line says `slow: rank 1`, there is no finding, and
    both nodes exit with 0.
    """
    script = """\
    import time
    from rank import add_up, dist, form_group, rank
    form_group()
    for number in range(20):
        if (rank, number) == (1, 10):
            time.sleep(8)
        add_up()
    dist.destroy_process_group()
    """
    job = start(script)
    assert job.end() == [0, 0], job.tail()
    slow = re.findall(r"slow: (.*)", job.err)
    assert slow, job.tail()
    assert all(line.startswith("rank 1 ") and "script.py" in line for line in slow), slow
    assert job.findings == [] or {each["severity"] for each in job.findings} == {"warn"}
    assert "✗" not in job.err


def test_a_rank_two_seconds_late_in_gloo_and_nccl_is_no_fault(start: StartJob):
    """Expected: a session whose steps sum a tensor of the CPU over Gloo and one of the GPU over NCCL; rank 1 comes 2
    s late once. No verdict, exit code 0. The two backends count their groups apart in the flight recorder.
    """
    script = """\
    import time
    import torch, torch.distributed as dist
    import allranks
    from rank import rank
    with allranks.session() as s:
        for number in range(30):
            if (rank, number) == (1, 15):
                time.sleep(2)
            for where in (torch.device("cpu"), s.device):
                total = torch.ones(8, device=where)
                dist.all_reduce(total)
            assert float(total[0].item()) == 2.0
    """
    job = start(script, cluster="[train]\ntimeout_s = 600\n")
    assert job.end() == [0, 0], job.tail()
    assert "✗" not in job.err
    assert "slow:" not in job.err


@pytest.mark.parametrize("what", ["operation", "size"])
def test_ranks_in_different_collectives_are_told_apart(start: StartJob, what: str, note: Note):
    """Expected: AR410 names both ranks or the odd one, with both calls in its evidence. NCCL checks nothing: it
    hangs, or leaves garbage (NCCL user guide, "Error handling and communicator abort"); the guard compares what the
    ranks said they called.
    """
    other = {"operation": "dist.broadcast(data, 0)", "size": "dist.all_reduce(data[:512].clone())"}[what]
    script = f"""\
    from rank import add_up, device, dist, form_group, rank, synchronize, torch
    form_group()
    data = torch.ones(1 << 20, device=device)
    if rank == 1:
        {other}
    else:
        dist.all_reduce(data)
    synchronize()
    add_up()
    """
    job = start(script)
    ready_s = job.wait_for("READY")
    job.end()
    note("seconds to the end", f"{time.monotonic() - ready_s:.1f}")
    causes = [cause for cause, _ in job.culprits()]
    assert causes[:1] == ["AR410"], job.tail()


def test_a_rank_that_never_joins_is_named(start: StartJob):
    """Expected: rank 0 says after 3 s for whom it waits at init_process_group, and gives up with the name of rank 1
    when the group's timeout has passed. NCCL takes no part in this: the store does.
    """
    script = """\
    import time
    from rank import form_group, rank
    if rank == 1:
        time.sleep(600)
    form_group(timeout_s=8)
    """
    job = start(script)
    job.end()
    waiting = r"still waiting in init_process_group after \d+ s for rank 1 \(b\)"
    assert re.search(waiting, job.err + job.rank_errors), job.tail()
    assert job.culprits()[:1] == [("AR401", [1])], job.tail()


def test_a_rank_that_stays_away_from_the_first_collective_is_named(start: StartJob):
    """Expected: with NCCL the first collective makes the communicator, and rank 0 blocks in it, in C++, before
    anything is enqueued (torch 2.11, ProcessGroupNCCL::initNCCLComm). The guard still says `slow: rank 1`, since rank
    0 told its call before it made it; when rank 1 comes, both end well.
    """
    script = """\
    import time
    from rank import add_up, dist, rank
    dist.init_process_group("cpu:gloo" if str(__import__("rank").device) == "cpu" else "nccl")
    if rank == 1:
        time.sleep(7)
    print("sum", add_up(), flush=True)
    dist.destroy_process_group()
    """
    job = start(script)
    assert job.end() == [0, 0], job.tail()
    assert "slow: rank 1 " in job.err, job.tail()
    assert job.out.count("sum 2.0") == 2


def test_a_rank_in_a_kernel_that_does_not_end_is_ended_with_the_job(start: StartJob, note: Note):
    """Expected: rank 1 waits for a kernel of its own that runs for minutes; it is named as slow, and ended as a hang
    after hang_s. SIGKILL ends a process with a running kernel: the driver tears its context down.
    """
    spin = "time.sleep(300)" if is_rehearsal() else "torch.cuda._sleep(1 << 40); torch.cuda.synchronize()"
    script = f"""\
    import time
    from rank import add_up, form_group, rank, torch
    form_group()
    if rank == 1:
        {spin}
    add_up()
    """
    job = start(script, flags=["--hang-timeout", "8"])
    job.wait_for("READY")
    codes = job.end()
    note("exit codes", codes)
    assert 0 not in codes
    assert "slow: rank 1 " in job.err, job.tail()
    assert job.culprits()[:1] == [("AR408", [1])], job.tail()
