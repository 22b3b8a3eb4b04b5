"""Does one rank a GPU come up by itself, compute, and leave well, also after an exception?"""

from __future__ import annotations

import re
import sys
import time

import pytest

from .conftest import Note, StartJob
from .job import HERE, is_rehearsal, run_bare

EXAMPLES = HERE.parents[1] / "examples"
DEVICE, BACKEND = ("cpu", "gloo") if is_rehearsal() else ("cuda:0", "nccl")
HARMLESS = re.compile(r"allranks: |\s*$|.*The hostname of the client socket cannot be retrieved")  # no name service


@pytest.mark.rehearsable
def test_a_session_takes_nccl_and_its_gpu_by_itself(start: StartJob):
    """Expected: backend nccl, device cuda:0, and a sum over one rank; nothing but allranks's own lines on the
    standard error of the rank, since torch warns where the device of a group or a barrier has to be guessed (torch
    2.11, distributed_c10d.barrier).
    """
    script = """\
    import torch, torch.distributed as dist
    import allranks
    with allranks.session() as s:
        total = torch.ones(4, device=s.device)
        dist.all_reduce(total)
        s.barrier()
        print("session", s.backend, s.device, float(total.sum().item()), flush=True)
    """
    job = start(script, nodes=1)
    assert job.end() == [0], job.tail()
    assert f"session {BACKEND} {DEVICE} 4.0" in job.out
    assert [line for line in job.rank_errors.splitlines() if not HARMLESS.match(line)] == []


@pytest.mark.rehearsable
def test_a_group_with_a_backend_a_device_carries_tensors_of_cpu_and_gpu(start: StartJob):
    """Expected: a tensor of each device is summed. Without a backend torch takes that of the accelerator alone (2.11,
    distributed_c10d.BackendConfig), and a tensor of the CPU then ends with "No backend type associated".
    """
    script = """\
    from rank import device, dist, torch
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo")
    for where in ("cpu", device):
        total = torch.ones(4, device=where)
        dist.all_reduce(total)
        print("summed on", total.device.type, float(total.sum().item()), flush=True)
    dist.destroy_process_group()
    """
    job = start(script, nodes=1)
    assert job.end() == [0], job.tail()
    assert "summed on cpu 4.0" in job.out
    assert f"summed on {DEVICE[:4].rstrip(':')} 4.0" in job.out


@pytest.mark.rehearsable
def test_the_demo_trains_on_the_gpu(start: StartJob, note: Note):
    """Expected: examples/six-node/py_exe.py with one rank takes nccl, trains, and agrees with one process to 1e-5
    (its own --check).
    """
    job = start(EXAMPLES / "six-node/py_exe.py", "--batch-size", "48", "--epochs", "5", "--check", nodes=1)
    assert job.end() == [0], job.tail()
    assert is_rehearsal() or "nccl" in job.out + job.err
    note("last line", (job.out.strip().splitlines() or [""])[-1])


@pytest.mark.rehearsable
def test_the_gpt_example_trains_on_the_gpu(start: StartJob, note: Note):
    """Expected: 20 steps of examples/gpt/train.py end well, on cuda:0 by nccl."""
    size = ("--layers", "2", "--heads", "2", "--width", "64", "--context", "32", "--steps", "20")
    job = start(EXAMPLES / "gpt/train.py", *size, "--max-bytes", "200000", "--json", nodes=1)
    assert job.end() == [0], job.tail()
    note("last line", (job.out.strip().splitlines() or [""])[-1][:300])


@pytest.mark.rehearsable
@pytest.mark.parametrize("how", ["session", "plain"])
def test_an_exception_ends_all_ranks_and_is_named(start: StartJob, how: str, note: Note):
    """Expected: rank 1 raises between two collectives while rank 0 waits in the next one; the verdict has rank 1's
    exception, both nodes exit with 1, and no rank hangs in destroy_process_group, which with NCCL waits for
    communicators of a peer that is gone (torch 2.11, ProcessGroupNCCL::shutdown; the session leaves by it).
    """
    begin = {
        "session": "with allranks.session() as s:\n    dist.all_reduce(torch.ones(4, device=s.device))",
        "plain": "form_group()\nif True:\n    pass",
    }[how]
    script = f"""\
import allranks
from rank import add_up, device, dist, form_group, rank, torch
{begin}
    print("READY", flush=True)
    if rank == 1:
        raise ValueError("batch 3 has no label")
    add_up()
dist.destroy_process_group()
"""
    job = start(script)
    began_s = job.wait_for("READY")
    codes = job.end()
    note("seconds from the first collective to the end", f"{time.monotonic() - began_s:.1f}")
    assert codes == [1, 1], job.tail()
    assert job.culprits()[0] == ("AR590", [1])
    assert "ValueError: batch 3 has no label" in job.findings[0]["message"]


@pytest.mark.rehearsable
def test_a_rank_that_destroys_its_group_and_forms_it_again_comes_up_twice(start: StartJob):
    """Expected: the second group has a communicator of its own; its sum is right on both ranks."""
    script = """\
    from rank import add_up, dist, form_group, rank
    for number in (1, 2):
        form_group()
        print("sum", number, add_up(rank + number), flush=True)
        dist.destroy_process_group()
    """
    job = start(script)
    assert job.end() == [0, 0], job.tail()
    assert (job.out.count("sum 1 3.0"), job.out.count("sum 2 5.0")) == (2, 2)


@pytest.mark.rehearsable
def test_aborting_a_group_while_a_collective_waits_returns(tmp_path, note: Note):
    """Expected: torch.distributed.distributed_c10d._abort_process_group() on a rank whose all-reduce waits for a peer
    returns within seconds, and the process can leave with 0. Source: torch 2.11, ProcessGroupNCCL::abort, which calls
    ncclCommAbort. Gloo's waits out the timeout of the collective.
    """
    script = """\
    import os, time
    from rank import device, dist, form_group, rank, tell, torch
    form_group(timeout_s=20)
    if rank == 0:
        waiting = dist.all_reduce(torch.ones(4, device=device), async_op=True)
        began_s = time.monotonic()
        dist.distributed_c10d._abort_process_group()
        tell(abort_s=time.monotonic() - began_s)
        open("aborted", "w").close()
    else:
        while not os.path.exists("aborted"):
            time.sleep(0.05)
    print("left", flush=True)
    os._exit(0)
    """
    ended = run_bare(tmp_path / "abort", script)
    assert ended.codes == [0, 0], ended.text[-3000:]
    text = (tmp_path / "abort/0.json").read_text()
    note("abort", text)
    assert float(re.findall(r"[\d.]+", text)[0]) < (30 if is_rehearsal() else 10)


def test_the_python_of_the_suite_is_the_one_whose_torch_has_cuda(tmp_path):
    """Expected: torch sees at least one GPU, its compute capability is in the list it was built for, and a matrix
    product comes out right.
    """
    script = """\
    from rank import device, tell, torch
    square = torch.full((256, 256), 0.5, device=device)
    major, minor = torch.cuda.get_device_capability(device)
    tell(sum=float((square @ square).sum().item()), built=torch.cuda.get_arch_list(), own=f"sm_{major}{minor}")
    """
    ended = run_bare(tmp_path / "product", script, ranks=1)
    assert ended.codes == [0], f"{sys.executable}: {ended.text}"
    told = (tmp_path / "product/0.json").read_text()
    assert '"sum": 4194304.0' in told
