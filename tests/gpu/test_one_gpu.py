"""Can several ranks use one GPU, and what does everybody say where they cannot?"""

from __future__ import annotations

import re
import shutil

import pytest

from allranks.host.gpu import read_gpus

from .conftest import Note, StartJob
from .job import is_rehearsal, run_bare, why

SUM = """\
from rank import add_up, dist, form_group, rank
form_group()
print("sum", add_up(rank + 1), flush=True)
dist.destroy_process_group()
"""


def nccl_version(text: str) -> tuple[int, ...]:
    """As NCCL_DEBUG=VERSION prints it; empty: it does not."""
    found = re.search(r"NCCL version (\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def test_nccl_refuses_a_gpu_that_two_ranks_of_a_host_use(tmp_path, note: Note):
    """Expected: both ranks fail with "Duplicate GPU detected" (NCCL before 2.30), or "Multiple Ranks are using the
    same GPU" from then on, and `allranks why` says AR107. Source: NCCL 2.28.9, src/init.cc:903; 2.30,
    src/init.cc:1291.
    """
    where = tmp_path / "duplicate-gpu"
    ended = run_bare(where, SUM, env={"GPU_SUITE_SAME_HOST": "1", "NCCL_DEBUG": "WARN"})
    note("NCCL", nccl_version(ended.text))
    assert 0 not in ended.codes
    assert re.search(r"Duplicate GPU detected|Multiple Ranks are using the same GPU", ended.text), ended.text[-3000:]
    assert why(where)[:1] == ["AR107"]


@pytest.mark.rehearsable
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_are_hosts_of_their_own_share_a_gpu_over_sockets(tmp_path, ranks: int, note: Note):
    """Expected: with a NCCL_HOSTID of its own for each rank NCCL takes them for hosts, and connects them by its
    socket transport; the sum is right on all. Source: NCCL 2.28.9, src/misc/utils.cc:87, src/transport/net.cc:313.
    """
    ended = run_bare(tmp_path / "shared", SUM, ranks=ranks, env={"NCCL_DEBUG": "INFO"})
    ways = sorted(set(re.findall(r"via (NET/\w+|SHM\S*|P2P\S*)", ended.text)))
    note("transport", ", ".join(ways))
    assert ended.codes == [0] * ranks, ended.text[-3000:]
    assert ended.text.count(f"sum {ranks * (ranks + 1) / 2}") == ranks
    assert is_rehearsal() or ways == ["NET/Socket"]


def test_nccl_from_2_30_on_shares_a_gpu_when_it_is_told_to(tmp_path, note: Note):
    """Expected: NCCL_MULTI_RANK_GPU_ENABLE=1 lets two ranks of one host use one GPU; NCCL before 2.30 does not know
    the variable and refuses. Source: NCCL 2.30, src/init.cc:68 and 1291.
    """
    env = {"GPU_SUITE_SAME_HOST": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "INFO"}
    ended = run_bare(tmp_path / "multi-rank", SUM, env=env)
    version = nccl_version(ended.text)
    note("NCCL", version)
    if version < (2, 30):
        assert 0 not in ended.codes
        pytest.skip(f"NCCL {version} has no NCCL_MULTI_RANK_GPU_ENABLE")
    assert ended.text.count("sum 3.0") == 2, ended.text[-3000:]


@pytest.mark.rehearsable
def test_two_agents_that_see_the_same_gpu_take_nccl_and_come_up(start: StartJob, note: Note):
    """Expected: each node has a GPU for its rank, so the backend is nccl; that two agents of one machine see the same
    GPU (AR107) is a warning and stops nothing. On the CPU the backend is gloo, and nothing is said.
    """
    job = start(SUM)
    codes = job.end()
    warned = sorted(set(re.findall(r"(AR\d{3} [a-z-]+)", job.err)))
    note("warnings", ", ".join(warned))
    assert codes == [0, 0], job.tail()
    assert job.out.count("sum 3.0") == 2
    assert f", {'gloo' if is_rehearsal() else 'nccl'} over lo; roll call" in job.err
    assert is_rehearsal() or "AR107 duplicate-gpu" in warned


def test_two_nccl_ranks_of_one_agent_are_refused_before_they_start(start: StartJob):
    """Expected: exit code 78, and one line with the node and the numbers. Source: launch/plan.py, choose_backend."""
    job = start(SUM, nodes=1, ranks_per_node=2, flags=["--backend", "nccl"])
    assert job.end() == [78], job.tail()
    assert "backend nccl needs a GPU for each rank, but a has 1 GPU for 2 ranks" in job.err


@pytest.mark.rehearsable
def test_gloo_sums_what_two_ranks_computed_on_one_gpu(start: StartJob):
    """Expected: with one GPU for two ranks the backend that nobody chose is gloo; each rank may compute on the GPU,
    and Gloo sums tensors of the CPU and of the GPU. Source: torch 2.11, ProcessGroupGloo::allreduce,
    AsyncAllreduceCUDAWork.
    """
    script = """\
    from rank import device, dist, rank, torch
    dist.init_process_group()
    product = torch.full((64, 64), rank + 1.0, device=device) @ torch.eye(64, device=device)
    on_cpu = product.cpu().clone()
    dist.all_reduce(on_cpu)
    group = dist.new_group(backend="gloo")
    dist.all_reduce(product, group=group)
    print("sums", float(on_cpu[0, 0]), float(product[0, 0].item()), flush=True)
    dist.destroy_process_group()
    """
    job = start(script, nodes=1, ranks_per_node=2, flags=["--backend", "gloo"])
    assert job.end() == [0], job.tail()
    assert job.out.count("sums 3.0 3.0") == 2


@pytest.mark.rehearsable
def test_the_backend_of_two_ranks_with_one_gpu_is_gloo(start: StartJob):
    """Expected: `allranks run --nproc-per-node 2` on a machine with one GPU takes gloo by itself, and comes up."""
    script = """\
    import allranks
    with allranks.session() as s:
        s.barrier()
        print("backend", s.backend, s.device, flush=True)
    """
    job = start(script, nodes=1, ranks_per_node=2)
    assert job.end() == [0], job.tail()
    assert job.out.count("backend gloo cpu") == 2


def test_which_other_ways_to_share_the_gpu_there_are(note: Note):
    """Expected: compute mode Default, which lets several processes use the GPU. MIG and MPS are looked for and left
    as they are: a setting of the GPU would outlive the test.
    """
    (gpu, *_) = read_gpus(deadline_s=20).gpus
    note("MIG mode", gpu.mig_mode)
    note("MPS control program", shutil.which("nvidia-cuda-mps-control"))
    assert gpu.compute_mode == "Default"
