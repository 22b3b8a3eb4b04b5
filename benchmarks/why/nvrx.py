"""The answer of NVRx's Restart Agent to one merged log, in the benchmark's format.

nvidia-resiliency-ext 0.7.0 answers without a model (`--disable-l1`). It reads one log, in which all output is
interleaved, and says which failure class began it, in which line, and often of which rank. It states no confidence: an
answer counts as `likely`, and none as undecided.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODULE = "nvidia_resiliency_ext.attribution.restart_agent.cli"
TIMEOUT_S = 120
CAUSES = {
    "gpu_hardware_fault": "gpu-hardware",
    "peer_gpu_memory_access_failure": "gpu-hardware",
    "time_limit": "time-limit",
    "user_cancelled": "cancelled",
    "cuda_oom": "cuda-oom",
    "nan_or_inf": "nan-loss",
    "framework_crash": "dead-rank",
    "linux_oom_kill_confirmation": "host-oom-kill",
    "observed_distributed_operation_timeout": "collective-timeout",
    "nccl_rdma_port_error_event": "ib-link-error",
    "nccl_cascade": "peer-connection-lost",
    "cuda_previous_error_cascade": "peer-connection-lost",
    "terminal_transport_failure_surface": "peer-connection-lost",
}
"""Its failure classes (l0/registry.py) -> names of this benchmark; the others are exceptions of a script."""
WORDS = {
    "No space left": "disk-full",
    "StorageFull": "disk-full",
    "quota exceeded": "disk-full",
    "EADDRINUSE": "port-in-use",
    "Address already in use": "port-in-use",
    "illegal memory access": "cuda-illegal-access",
    "uncorrectable ECC": "gpu-hardware",
    "insufficient shared memory": "dataloader-shm",
    "out of shared memory": "dataloader-shm",
    "is killed by signal: Killed": "host-oom-kill",
    "clients joined": "missing-rank",
    "trying to connect to": "missing-rank",
    "SIGSEGV": "dead-rank",
    "Segmentation fault": "dead-rank",
    "port error": "ib-link-error",
    "remote process exited": "peer-connection-lost",
    "should dump": "store-lost",
    "Killed": "host-oom-kill",
    "PREEMPTION": "preempted",
    "Preempted": "preempted",
    "ode failure": "node-failure",
    "NODE FAILURE": "node-failure",
    "heartbeat": "stuck-rank",
}
"""Words in the line that it chose -> names: its class for them is any exception, and the line says more."""


def ask(merged: Path, python: str) -> dict[str, Any]:
    """Return the answer for a merged log.

    Args:
        merged: the log.
        python: an interpreter that has nvidia-resiliency-ext.

    Raises:
        RuntimeError: the agent broke.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "result.json"
        command = [python, "-m", MODULE, str(merged.resolve()), "--job-id", "1", "--cycle-id", "1", "--disable-l1"]
        done = subprocess.run(
            [*command, "--result-json", str(place)], capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if not place.exists():
            raise RuntimeError(f"{merged}: {done.stderr[-2000:]}")
        result = json.loads(place.read_text())
    with merged.open(encoding="utf-8", newline="\n") as lines:
        primary = result.get("primary_failure")
        number = primary["line"] if primary else 0
        text = next((line for at, line in enumerate(lines, 1) if at == number), "")
    return to_answer(primary, text)


def to_answer(primary: Mapping[str, Any] | None, text: str) -> dict[str, Any]:
    """Return its primary failure in the benchmark's format.

    Args:
        primary: as the result has it; None if there is none.
        text: the line of the log that it names.
    """
    if not primary:
        return {"cause": None, "confidence": "undecided"}
    cause = CAUSES.get(primary["failure_class"])
    if cause is None or primary["failure_class"] == "infra_policy_event":
        cause = next((name for words, name in WORDS.items() if words in text), "user-code-error")
    rank = primary.get("rank")
    node = primary.get("node")
    return {
        "cause": cause,
        "confidence": "likely",
        "ranks": [int(rank)] if rank is not None and str(rank).isdecimal() else [],
        "nodes": [node] if node else [],
        "message": f"{primary['failure_class']}: {text.strip()[:200]}",
    }
