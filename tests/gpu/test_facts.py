"""Does allranks read of a real GPU what NVML and CUDA say of it, in time, and is a healthy GPU called healthy?

Elsewhere the same readers are fed with recorded output (tests/host/recorded).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.host.fabric import read_fabric_manager, read_fabric_manager_version, read_xids, try_cuda
from allranks.host.gpu import (
    count_gpus,
    find_unknown_fields,
    read_driver_version,
    read_gpu_processes,
    read_gpus,
    read_nvlinks,
    read_remapped_rows,
)
from allranks.host.node import read_card_facts
from allranks.model.card import Card
from allranks.preflight.judge import Observations, judge
from allranks.preflight.roster import RollCallTerms
from conftest import allranks_command

from .conftest import Note, StartJob
from .job import run_one, suite_env

pytestmark = pytest.mark.alone
DEADLINE_S = 20.0


def test_the_proc_tree_has_as_many_gpus_as_nvidia_smi(note: Note):
    """Expected: both show the same GPUs, at least one. `allranks run` counts by the driver's /proc tree; a sandboxed
    kernel that has no such tree would make it take Gloo.
    """
    answer = read_gpus(deadline_s=DEADLINE_S)
    note("nvidia-smi", ", ".join(gpu.name for gpu in answer.gpus) or answer.problem)
    note("/proc/driver/nvidia/gpus", count_gpus({}))
    assert answer.problem == ""
    assert len(answer.gpus) == count_gpus({}) >= 1


def test_the_fields_that_checks_use_are_there(note: Note):
    """Expected: UUID, memory, bus id, compute mode and PCIe width of each GPU. Source: nvidia-smi --help-query-gpu,
    r580.
    """
    for gpu in read_gpus(deadline_s=DEADLINE_S).gpus:
        note("GPU", gpu)
        assert gpu.uuid.startswith("GPU-")
        assert gpu.memory_total_mib
        assert gpu.memory_used_mib is not None
        assert gpu.pci_bus
        assert gpu.compute_mode
        assert gpu.pcie_max_width


def test_nvml_says_the_same(tmp_path, note: Note):
    """Expected: what nvidia-smi prints is what NVML says: UUID, name, driver, memory, bus id, PCIe widths. NVML is
    asked in a child process within the test's limit. Source: NVML API reference, r580.
    """
    pytest.importorskip("pynvml", reason="pynvml is not installed")
    script = """\
    import pynvml as n
    from rank import tell
    n.nvmlInit()
    gpus = []
    for index in range(n.nvmlDeviceGetCount()):
        gpu = n.nvmlDeviceGetHandleByIndex(index)
        gpus.append({
            "uuid": n.nvmlDeviceGetUUID(gpu), "name": n.nvmlDeviceGetName(gpu),
            "memory_mib": n.nvmlDeviceGetMemoryInfo(gpu).total / 2**20, "bus": n.nvmlDeviceGetPciInfo(gpu).busId,
            "width": n.nvmlDeviceGetCurrPcieLinkWidth(gpu), "max_width": n.nvmlDeviceGetMaxPcieLinkWidth(gpu),
        })
    tell(driver=n.nvmlSystemGetDriverVersion(), gpus=[
        {key: value.decode() if isinstance(value, bytes) else value for key, value in gpu.items()} for gpu in gpus])
    """
    told = run_one(tmp_path / "nvml", script)
    answer = read_gpus(deadline_s=DEADLINE_S)
    note("NVML", json.dumps(told))
    assert told["driver"] == answer.driver_version
    for ours, theirs in zip(answer.gpus, told["gpus"], strict=True):
        assert (ours.uuid, ours.name) == (theirs["uuid"], theirs["name"])
        assert ours.memory_total_mib == pytest.approx(theirs["memory_mib"], rel=0.01)
        assert (ours.pci_bus or "").upper() == theirs["bus"].upper()
        assert (ours.pcie_width, ours.pcie_max_width) == (theirs["width"], theirs["max_width"])


def test_torch_says_the_same(tmp_path, note: Note):
    """Expected: torch.cuda shows a GPU of the same name and UUID, with at most as much memory (the driver keeps
    some).
    """
    script = """\
    from rank import tell, torch
    seen = torch.cuda.get_device_properties(0)
    tell(name=seen.name, uuid=str(getattr(seen, "uuid", "")), mib=seen.total_memory / 2**20)
    """
    told = run_one(tmp_path / "torch", script)
    gpu = read_gpus(deadline_s=DEADLINE_S).gpus[0]
    note("torch", json.dumps(told))
    assert told["name"] == gpu.name
    assert gpu.uuid in (f"GPU-{told['uuid']}", told["uuid"])
    assert 0.9 * (gpu.memory_total_mib or 0) < told["mib"] <= (gpu.memory_total_mib or 0)


def test_the_kernel_module_has_the_version_that_nvidia_smi_says():
    """Expected: /proc/driver/nvidia/version, which is read without a tool, has the driver's version."""
    assert read_driver_version() == read_gpus(deadline_s=DEADLINE_S).driver_version


def test_a_real_nvidia_smi_refuses_unknown_fields_as_recorded(note: Note):
    """Expected: `Field "no.such.field" is not a valid field to query.` and exit code 2, which is how older drivers
    are asked for less. Source: nvidia-smi(1), RETURN VALUE.
    """
    command = ["nvidia-smi", "--query-gpu=index,no.such.field", "--format=csv,noheader,nounits"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    note("nvidia-smi", f"exit code {ran.returncode}: {ran.stdout} {ran.stderr}")
    assert find_unknown_fields(ran.stdout + ran.stderr) == {"no.such.field"}


READERS: dict[str, Callable[..., Any]] = {
    "gpus": read_gpus, "remapped rows": read_remapped_rows, "processes": read_gpu_processes, "NVLinks": read_nvlinks,
    "cuInit": try_cuda, "fabric manager": read_fabric_manager, "its version": read_fabric_manager_version,
    "Xids": read_xids,
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_each_reader_answers_within_the_deadline_of_a_card(name: str, note: Note):
    """Expected: each reader has its answer within 3 s, the deadline of the roll call's card, also the first time;
    without persistence mode the driver may take longer, and that would be news.
    """
    began_s = time.monotonic()
    answer = READERS[name](deadline_s=3.0, env=os.environ)
    took_s = time.monotonic() - began_s
    note("answer", answer)
    note("seconds", f"{took_s:.2f}")
    assert took_s < 3.3
    assert "no answer" not in str(answer)


def test_cuda_starts_and_an_empty_list_of_gpus_is_error_100():
    """Expected: cuInit returns 0; with CUDA_VISIBLE_DEVICES empty 100 (CUDA_ERROR_NO_DEVICE). Source: CUDA driver
    API.
    """
    assert try_cuda(deadline_s=DEADLINE_S, env=os.environ) == (0, "")
    assert try_cuda(deadline_s=DEADLINE_S, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}) == (100, "")


def judged(note: Note) -> list[str]:
    """Ids and severities of what the roll call's causes say of this machine's GPUs."""
    facts = read_card_facts(os.environ, deadline_s=DEADLINE_S)
    note("unread", json.dumps(dict(facts.unread)))
    card = Card(host="here", pid=1, node_index=0, num_workers=1, num_gpus=count_gpus(os.environ), facts=facts)
    found = judge(Observations(cards={0: card}), RollCallTerms(job="gpu", attempt=0, num_nodes=1, min_nodes=1)).findings
    shown = [f"{each.cause} {each.severity}: {each.message}" for each in found if each.cause_id.startswith("AR1")]
    note("GPU findings", shown)
    return [f"{each.cause_id} {each.severity}" for each in found if each.cause_id.startswith("AR1")]


def test_a_healthy_gpu_stops_no_job(note: Note):
    """Expected: no cause of family 1 (GPU) fails on a GPU that computes; nothing is even warned of."""
    assert judged(note) == []


def test_check_calls_a_healthy_gpu_healthy(tmp_path, note: Note):
    """Expected: `allranks check --select AR1` ends with 0; each GPU cause passes, or is skipped with a reason that is
    true of this machine (the report has them).
    """
    command = allranks_command("check", "--select", "AR1", "--json")
    ran = subprocess.run(
        command, cwd=tmp_path, env=suite_env(), capture_output=True, text=True, timeout=50, check=False
    )
    results = json.loads(ran.stdout)["results"]
    for each in results:
        note(each["cause"], f"{each['status']} {each['note']}")
    assert ran.returncode == 0
    assert {each["status"] for each in results} <= {"pass", "skip"}
    assert {"AR103 gpu-missing", "AR104 gpu-busy"} <= {each["cause"] for each in results if each["status"] == "pass"}


def test_a_foreign_process_on_the_gpu_is_seen(start: StartJob, tmp_path: Path, note: Note):
    """Expected: a process with 2 GiB on the GPU is a foreign one for `allranks check`: AR104 warns of it, with its
    pid and at least 2048 MiB. The process that started it does not count it. In a container the driver may give other
    pids.
    """
    hold = """\
    import time
    from rank import device, torch
    held = torch.empty(2 << 30, dtype=torch.uint8, device=device)
    print("holds", flush=True)
    time.sleep(100)
    """
    job = start(hold, nodes=1)
    job.wait_for("holds")
    pid = int((job.where / "0.pid").read_text())
    own = read_gpu_processes(deadline_s=DEADLINE_S)
    note("as its parent sees it", own.by_uuid)
    command = allranks_command("check", "--select", "AR104", "--json")
    ran = subprocess.run(
        command, cwd=tmp_path, env=suite_env(), capture_output=True, text=True, timeout=50, check=False
    )
    note("as a stranger sees it", ran.stdout)
    assert own.by_uuid == {}
    assert ("AR104 gpu-busy", "warn") in [(each["cause"], each["status"]) for each in json.loads(ran.stdout)["results"]]
    (memory,) = re.findall(rf"\(pid {pid}, (\d+) MiB\)", ran.stdout)
    assert int(memory) >= 2048
