"""What do NCCL and torch write when something breaks, and does `allranks why` understand it?

Ranks without a guard; what they wrote stays in gpu-logs as a sample of each failure. Line numbers: NCCL 2.28.9.
"""

from __future__ import annotations

import re
import signal

import pytest

from .conftest import Note
from .job import NOT_ENDED, is_rehearsal, run_bare, why

TIMEOUT_S = 10
DEBUG = {"NCCL_DEBUG": "WARN", "TORCH_FR_BUFFER_SIZE": "100", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "5000"}
"""The last one: how long a rank whose collective timed out waits for all dumps before it ends."""
STEPS = f"""\
import time
from rank import add_up, form_group
form_group(timeout_s={TIMEOUT_S})
while True:
    add_up()
    time.sleep(0.02)
"""


def shown(text: str) -> str:
    """The lines that say what is wrong, for the report."""
    telling = [line for line in text.splitlines() if re.search(r"NCCL WARN|Watchdog|rror: |ncclRemoteError", line)]
    return " / ".join(line[:240] for line in telling[:6])


@pytest.mark.rehearsable
def test_lines_of_a_killed_rank(tmp_path, note: Note):
    """Expected: the survivor ends by itself within its timeout; NCCL says "Connection closed by remote peer" (misc/
    socket.cc:71) or torch ncclRemoteError, and `why` blames rank 1 or says that its connection was lost (AR407,
    AR215).
    """
    where = tmp_path / "killed"
    ended = run_bare(where, STEPS, env=DEBUG, strike=(1, signal.SIGKILL))
    note("codes", ended.codes)
    note("lines", shown(ended.text))
    assert ended.codes[0] not in (0, NOT_ENDED)
    if not is_rehearsal():
        assert re.search(r"closed by remote peer|ncclRemoteError|Connection reset", ended.text), ended.text[-3000:]
    found = why(where)
    note("why", found)
    assert found[:1] in (["AR407"], ["AR215"])


@pytest.mark.rehearsable
def test_lines_of_a_stopped_rank(tmp_path, note: Note):
    """Expected: after the timeout torch's watchdog says "Watchdog caught collective operation timeout:
    WorkNCCL(SeqNum=", and aborts the survivor; `why` says a collective timed out and cannot name more than who waited
    (AR490, AR408, AR403).
    """
    where = tmp_path / "stopped"
    ended = run_bare(where, STEPS, env=DEBUG, strike=(1, signal.SIGSTOP))
    note("codes", ended.codes)
    note("lines", shown(ended.text))
    assert ended.codes[0] not in (0, NOT_ENDED)
    if not is_rehearsal():
        assert "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=" in ended.text, ended.text[-3000:]
    found = why(where)
    note("why", found)
    assert found[:1] in (["AR490"], ["AR408"], ["AR403"])


@pytest.mark.rehearsable
def test_lines_of_different_sizes(tmp_path, note: Note):
    """Expected: over sockets NCCL notices that a message is longer than the buffer, "message truncated : receiving" (
    transport/net_socket.cc:565), or hangs until the timeout; nobody ends with 0 unnoticed. `why` says mismatch.
    """
    where = tmp_path / "sizes"
    script = f"""\
    from rank import add_up, device, dist, form_group, rank, synchronize, torch
    form_group(timeout_s={TIMEOUT_S})
    dist.all_reduce(torch.ones((1 << 22) if rank else 512, device=device))
    synchronize()
    add_up()
    """
    ended = run_bare(where, script, env=DEBUG)
    note("codes", ended.codes)
    note("lines", shown(ended.text))
    assert 0 not in ended.codes
    found = why(where)
    note("why", found)
    assert is_rehearsal() or found[:1] == ["AR410"]


def test_lines_where_rank_0_does_not_come_to_the_first_collective(tmp_path, note: Note):
    """Expected: rank 1 gives up waiting for NCCL's id: "is setting up NCCL communicator and retrieving ncclUniqueId
    from [0] via c10d key-value store by key" (torch 2.11, ProcessGroupNCCL::broadcastUniqueNCCLID); `why` names rank
    0, AR409.
    """
    where = tmp_path / "unique-id"
    script = f"""\
    import time
    from datetime import timedelta
    from rank import add_up, backend, dist, rank
    dist.init_process_group(backend, timeout=timedelta(seconds={TIMEOUT_S}))
    if rank == 0:
        time.sleep({TIMEOUT_S} + 8)
    else:
        add_up()
    """
    ended = run_bare(where, script, env=DEBUG)
    note("lines", shown(ended.text))
    assert "is setting up NCCL communicator and retrieving ncclUniqueId from [0]" in ended.text, ended.text[-3000:]
    found = why(where)
    note("why", found)
    assert found[:1] == ["AR409"]


def test_lines_of_an_interface_that_is_not_there(tmp_path, note: Note):
    """Expected: "Bootstrap : no socket interface found" (bootstrap.cc:114); `why` says AR208."""
    where = tmp_path / "interface"
    script = "from rank import form_group\nform_group()\n"
    ended = run_bare(where, script, env={**DEBUG, "NCCL_SOCKET_IFNAME": "=nosuch0"}, timeout_s=40)
    note("lines", shown(ended.text))
    found = why(where)
    note("why", found)
    assert 0 not in ended.codes
    assert found[:1] == ["AR208"]


CUDA_ERRORS = {
    "out of memory": ("torch.empty(1 << 45, device=device)", "AR109"),
    "device-side assert": (
        "torch.zeros(4, device=device)[torch.tensor([9], device=device)]; torch.cuda.synchronize()",
        "AR110",
    ),
    "no such device": ("torch.ones(1, device='cuda:7')", "AR106"),
}


@pytest.mark.parametrize("name", CUDA_ERRORS)
def test_lines_of_cuda_errors(tmp_path, name: str, note: Note):
    """Expected: memory that is not there is AR109, an index out of range AR110, an ordinal that is too large AR106;
    each names rank 0's line in the script. Source: torch 2.11, c10/cuda/CUDAException.cpp.
    """
    statement, cause = CUDA_ERRORS[name]
    where = tmp_path / name.replace(" ", "-")
    ended = run_bare(where, f"from rank import device, torch\n{statement}\n", ranks=1, env=DEBUG)
    note("lines", shown(ended.text))
    found = why(where)
    note("why", found)
    assert 0 not in ended.codes
    assert found[:1] == [cause]


@pytest.mark.rehearsable
def test_a_healthy_run_at_level_info_holds_no_fault(tmp_path, note: Note):
    """Expected: NCCL_DEBUG=INFO writes hundreds of lines about a run that ends well; `why` finds no fault in them."""
    where = tmp_path / "healthy"
    script = """\
    from rank import add_up, dist, form_group
    form_group()
    for _ in range(5):
        add_up()
    dist.destroy_process_group()
    """
    ended = run_bare(where, script, env={"NCCL_DEBUG": "INFO"})
    note("lines", len(ended.text.splitlines()))
    assert ended.codes == [0, 0], ended.text[-3000:]
    assert [cause for cause in why(where) if cause != "AR599"] == []
