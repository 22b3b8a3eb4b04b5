"""Are the fields that the checks use there on a real GPU? Skipped, with the reason, where there is none.

Elsewhere the same readers are fed with recorded output (tests/host/recorded).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from allranks.host.fabric import try_cuda
from allranks.host.gpu import count_gpus, read_gpus
from allranks.host.node import read_card_facts
from allranks.model.card import Card
from allranks.model.finding import Severity
from allranks.preflight.judge import Observations, judge
from allranks.preflight.roster import Terms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA GPU: nvidia-smi is not installed"),
]
DEADLINE_S = 20.0


def test_the_driver_lists_as_many_gpus_as_its_proc_tree() -> None:
    answer = read_gpus(deadline_s=DEADLINE_S, env=os.environ)
    assert answer.problem is None
    assert len(answer.gpus) >= count_gpus(os.environ) >= 1


def test_the_fields_that_checks_use_are_there() -> None:
    for gpu in read_gpus(deadline_s=DEADLINE_S, env=os.environ).gpus:
        assert gpu.uuid.startswith("GPU-")
        assert gpu.memory_total_mib
        assert gpu.memory_used_mib is not None
        assert gpu.pci_bus
        assert gpu.compute_mode
        assert gpu.pcie_max_width


def test_cuda_initialises() -> None:
    assert try_cuda(deadline_s=DEADLINE_S, env=os.environ) == (0, None)


def test_a_healthy_gpu_stops_no_job() -> None:
    facts = read_card_facts(os.environ, deadline_s=DEADLINE_S)
    card = Card(
        host="here", pid=1, node_index=0, num_workers=1, num_gpus=count_gpus(os.environ), facts=facts
    )  # fmt: skip
    terms = Terms(job="gpu", attempt=0, num_nodes=1, min_nodes=1)
    found = judge(Observations(cards={0: card}), terms).findings
    assert [each for each in found if each.severity is Severity.FAIL and each.cause.startswith("AR1")] == []


@pytest.mark.torch
def test_two_nccl_ranks_share_one_gpu_over_sockets(tmp_path: Path) -> None:
    """NCCL refuses two ranks on one GPU of one host; as two hosts they speak over sockets."""
    script = tmp_path / "sum.py"
    script.write_text(
        textwrap.dedent("""\
        import os
        os.environ["NCCL_HOSTID"] = os.environ["RANK"]
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        import torch, torch.distributed as dist
        torch.cuda.set_device(0)
        dist.init_process_group("nccl")
        total = torch.ones(4, device="cuda")
        dist.all_reduce(total)
        print("sum", int(total[0]), flush=True)
        dist.destroy_process_group()
        """)
    )
    command = [sys.executable, "-m", "allranks", "run", "--nproc-per-node", "2", "--backend", "gloo", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.count("sum 2") == 2, done.stderr
