"""Can the GPUs behind NVSwitch reach each other: does the fabric manager run, in the driver's version?"""

from __future__ import annotations

import re

from allranks.causes.cause import PASSED, Cause, Outcome, failed, skipped
from allranks.causes.gpu.seen import gpu_facts, read_state, read_version
from allranks.causes.sign import Role, Sign
from allranks.model.card import Card, Facts, Gpu
from allranks.model.errors import Exit
from allranks.model.finding import Confidence

_NVSWITCH = re.compile(r"SXM|HGX|HBM3|\bH200\b|\bH800\b|\b[GB]B[23]00\b|\bB[23]00\b")
"""Names of GPUs that sit behind NVSwitch on most boards; PCIe and NVL cards do not."""


class FabricManager(Cause, id="AR101"):
    """The fabric manager does not run, or does not match the driver.

    ## What it means
    On boards with NVSwitch, a service named `nvidia-fabricmanager` configures the switches so that the GPUs reach each
    other. On this node it is down, failed, has another version than the driver, or has not finished.

    ## Why it breaks the job
    Until it has finished, CUDA does not start: error 802, "system not yet initialized". `nvidia-smi` lists all GPUs as
    healthy, so nodes in this state can stay in service for weeks. PyTorch reports that there are no GPUs, and the other
    nodes wait for the missing ranks. If one GPU of a multi-node NVLink domain is not ready, NCCL silently runs without
    NVLink between nodes, which is slow.

    ## Example
    From huggingface/huggingface_hub#4134:

        RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 802: system not yet initialized

    ## Fix
    As root on the node:

        systemctl status nvidia-fabricmanager
        systemctl restart nvidia-fabricmanager
        nvidia-smi -q | grep -A4 Fabric          # State: Completed, Status: Success

    If it reports another version than the driver's, install the package of exactly the driver's version (`nvidia-smi
    --query-gpu=driver_version --format=csv,noheader`), and pin both so that neither is updated alone. If it stays "In
    Progress", read its log, /var/log/fabricmanager.log, and reboot the node.

    ## Source
    NVIDIA Fabric Manager user guide: https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/index.html
    (r580). cudaErrorSystemNotReady = 802: CUDA Runtime API, error types (13.1).
    """  # noqa: E501  (a real line)

    aliases = ("MN1",)
    message = "{what}"
    told = "CUDA fails to start: the fabric manager does not run, or does not match the driver"
    fix = "as root on {node}: systemctl restart nvidia-fabricmanager (its version must equal the driver's)"
    exit_code = Exit.NODE_FAULT
    also = ("AR105", "AR102")
    signs = (
        Sign(r"system not yet initialized"),
        Sign(r"cudaErrorSystemNotReady"),
        Sign(r"CUDA_ERROR_SYSTEM_NOT_READY"),
        Sign(r"interface version (?P<thing>[0-9][0-9.]{2,20}) don't match with driver version"),
        Sign(
            r"nvidia-fabricmanager\.service:? (?:Failed with result|(?:failed because the )?[Cc]ontrol process exited)"
        ),
        Sign(r"configuration error in the Fabric Manager"),
        Sign(r"transport/nvls\.cc:[0-9]+ NCCL WARN Cuda failure", Role.LIKELY, confidence=Confidence.UNDECIDED),
    )
    hits = (
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
        "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized",
        "cuInit failed: CUDA_ERROR_SYSTEM_NOT_READY",
        "nv-fabricmanager[104230]: fabric manager NVIDIA GPU driver interface version 550.127.05 don't match with "
        "driver version 550.120. Please update with matching NVIDIA driver package.",
        "systemd[1]: nvidia-fabricmanager.service: Control process exited, code=exited, status=1/FAILURE",
        "Job for nvidia-fabricmanager.service failed because the control process exited with error code.",
        "node01:4123:4190 [0] transport/nvls.cc:244 NCCL WARN Cuda failure 401 'the operation cannot be performed'",
        "This is usually caused by a system or configuration error in the Fabric Manager or NVSwitches.",
        "gpu-a: Test CUDA failure common.cu:1030 'system not yet initialized'",
        'CUDA error at bandwidthTest.cu:256 code=802(cudaErrorSystemNotReady) "cudaSetDevice(currentDevice)"',
    )
    misses = ("RuntimeError: CUDA error: initialization error",)
    never_on_hardware = True

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Fails on cuInit 802, if the service is down or has another version than the driver, or an unready fabric."""
        if card.facts and card.facts.cuda_init == 802:
            return failed(*_fabric_evidence(card.facts), what="CUDA fails to start: system not yet initialized (802)")
        facts = gpu_facts(card)
        if isinstance(facts, Outcome):
            return facts
        registered = [gpu for gpu in facts.gpus if read_state(gpu.fabric_state)]
        has_switches = bool(registered) or any(_NVSWITCH.search(gpu.name) for gpu in facts.gpus)
        # CUDA that starts on a board whose GPUs register nowhere needs no service, installed or not.
        needs_service = bool(registered) or (has_switches and facts.cuda_init != 0)
        if needs_service and facts.fabric_manager not in (None, "active", "activating"):
            return failed(*_fabric_evidence(facts), what=f"nvidia-fabricmanager is {facts.fabric_manager}")
        for gpu in registered:
            state, status = read_state(gpu.fabric_state), read_state(gpu.fabric_status)
            if state != "Completed" or status not in (None, "Success"):
                said = f"{state} / {status}" if status else state
                return failed(*_fabric_evidence(facts), what=f"the fabric of GPU {gpu.index} is not ready: {said}")
        theirs, ours = read_version(facts.fabric_manager_version), read_version(facts.driver_version)
        if has_switches and theirs and ours and theirs != ours:
            what = f"fabric manager {facts.fabric_manager_version} does not match driver {facts.driver_version}"
            return failed(*_fabric_evidence(facts), what=what)
        return PASSED if has_switches else skipped("no NVSwitch")


def _fabric_evidence(facts: Facts) -> tuple[str, ...]:
    seen = []
    if facts.cuda_init not in (None, 0):
        seen.append(f"cuInit(0) returned {facts.cuda_init}")
    if facts.fabric_manager is not None:
        version = f", version {facts.fabric_manager_version}" if facts.fabric_manager_version else ""
        seen.append(
            f"nvidia-fabricmanager: {facts.fabric_manager}{version}; driver {facts.driver_version or 'unknown'}"
        )
    seen += [_fabric_of(gpu) for gpu in facts.gpus if read_state(gpu.fabric_state)][:2]
    return tuple(seen)


def _fabric_of(gpu: Gpu) -> str:
    more = [
        f"{name} {value}" for name, value in (("clique", gpu.fabric_clique), ("cluster", gpu.fabric_cluster)) if value
    ]
    return f"GPU {gpu.index}: fabric {' / '.join(filter(None, [gpu.fabric_state, gpu.fabric_status, *more]))}"
