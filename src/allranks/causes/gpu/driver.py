"""Does the driver match CUDA, is every GPU present, and are all GPUs of one model?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from allranks.causes.cause import PASSED, Cause, Outcome, failed, skipped, unknown
from allranks.causes.gpu.seen import gpu_facts, read_state, read_version
from allranks.causes.sign import Role, Sign
from allranks.model.card import Card, Facts
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Severity

_OLDEST_DRIVER = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
"""CUDA major version -> oldest Linux driver that runs programs built for it. Source: CUDA 13.1 release notes."""


class DriverCudaMismatch(Cause, id="AR102"):
    """The GPU driver does not match the CUDA version of PyTorch.

    ## What it means
    Three parts must match: the kernel's driver, its library libcuda, and the CUDA version inside PyTorch. Two of them
    do not.

    ## Why it breaks the job
    CUDA fails to start, and PyTorch reports that there are no GPUs. If this happens on one node of many, the driver was
    updated without a reboot, or a container image brings another libcuda. The other nodes wait for the ranks of this
    one.

    ## Example
    From torch/cuda (text unchanged since 1.x), and from nvidia-smi after an update without a reboot:

        RuntimeError: The NVIDIA driver on your system is too old (found version 11040).
        Failed to initialize NVML: Driver/library version mismatch

    ## Fix
    Compare the three:

        cat /proc/driver/nvidia/version; nvidia-smi; python -c 'import torch; print(torch.version.cuda)'

    If the driver was updated without a reboot, reboot, or unload and load the modules. If the driver is too old,
    install a PyTorch for an older CUDA (the same major version is enough), or a newer driver. In a container, let the
    runtime bring libcuda (`--nv`, `--gpus all`), and keep none in the image.

    ## Source
    CUDA compatibility: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html (r590, read
    2026-09).
    """

    no_fault_yet = "the lab has no libcuda that could answer cuInit with 803"
    message = "{what}"
    told = "the GPU driver does not match the CUDA version of the program"
    fix = "on {node}: reboot after a driver update, or install a PyTorch that was built for the driver's CUDA version"
    exit_code = Exit.NODE_FAULT
    also = ("AR504", "AR101", "AR503")
    signs = (
        Sign(r"NVIDIA driver on your system is too old(?: \(found (?P<thing>version [0-9]+)\))?"),
        Sign(r"CUDA driver version is insufficient for CUDA runtime version"),
        Sign(r"API call is not supported in the installed CUDA driver"),
        Sign(r"CUDA driver is a stub library"),
        Sign(
            r"cudaError(?:InsufficientDriver|CallRequiresNewerDriver|StubLibrary|SystemDriverMismatch"
            r"|CompatNotSupportedOnDevice|NoKernelImageForDevice|UnsupportedPtxVersion)\b"
        ),
        Sign(r"CUDA_ERROR_(?:SYSTEM_DRIVER_MISMATCH|COMPAT_NOT_SUPPORTED_ON_DEVICE|UNSUPPORTED_PTX_VERSION)"),
        Sign(r"no kernel image is available for execution on the device"),
        Sign(r"provided PTX was compiled with an unsupported toolchain"),
        Sign(r"device kernel image is invalid", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(
            r"with CUDA capability (?P<thing>sm_[0-9]+a?) is not compatible with the current PyTorch installation",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(r"NVRM: API mismatch: the client has (?:the )?(?P<thing>version [0-9.]+)"),
        Sign(r"unsatisfied condition: cuda ?>= ?(?P<wanted>[0-9.]+)"),
        Sign(r"compatibility mode is UNAVAILABLE", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"system has unsupported display driver / cuda driver combination"),
        Sign(r"(?:Failed to initialize NVML|nvml error): [Dd]river/library version mismatch"),
        Sign(r"forward compatibility was attempted on non supported HW"),
    )
    hits = (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your driver",
        "gpu-node:2143:2561 [1] init.cc:1186 NCCL WARN Cuda failure 'CUDA driver version is insufficient for CUDA "
        "runtime version'",
        "n1:81:90 [0] enqueue.cc:63 NCCL WARN Cuda failure 'API call is not supported in the installed CUDA driver'",
        "RuntimeError: CUDA error: CUDA driver is a stub library",
        "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version",
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: system has unsupported display driver / cuda driver combination",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.",
        "RuntimeError: CUDA error: device kernel image is invalid",
        "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch installation.",
        "NVRM: API mismatch: the client has the version 470.57.02, but",
        "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.4, please update your driver",
        "ERROR: version 470.57 was detected and compatibility mode is UNAVAILABLE.",
        "nvidia-container-cli: initialization error: nvml error: driver/library version mismatch: unknown",
        "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version",
        "Error 804: forward compatibility was attempted on non supported HW",
        "Error 803: system has unsupported display driver / cuda driver combination",
        "Failed to initialize NVML: Driver/library version mismatch",
    )
    misses = ("Failed to initialize NVML: Unknown Error",)
    never_on_hardware = True

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Fails on cuInit 803 and 804, and if PyTorch's CUDA needs a newer driver than the node has."""
        if card.facts and card.facts.cuda_init in (803, 804):
            code, driver = card.facts.cuda_init, card.facts.driver_version or "unknown"
            return failed(what=f"CUDA fails to start (error {code}): libcuda does not match driver {driver}")
        facts = gpu_facts(card)
        if isinstance(facts, Outcome):
            return facts
        built_for, ours = read_version(facts.torch_cuda), read_version(facts.driver_version)
        oldest = _OLDEST_DRIVER.get(built_for[0]) if built_for else None
        # With NVIDIA's compatibility package in front, an older driver may do.
        if oldest and ours and ours < oldest and "compat" not in facts.environment.get("LD_LIBRARY_PATH", ""):
            needed = ".".join(f"{part:02}" for part in oldest)
            wanted = f"PyTorch was built for CUDA {facts.torch_cuda}, which needs driver {needed} or newer"
            return failed(what=f"{wanted}; the node has {facts.driver_version}")
        if facts.cuda_init not in (None, 0, 802):
            return unknown(f"CUDA fails to start: cuInit returned {facts.cuda_init}")
        return PASSED


class GpuMissing(Cause, id="AR103"):
    """A node shows fewer GPUs than it should have.

    ## What it means
    SLURM gave the job more GPUs than the driver lists on the node, or the other nodes show more.

    ## Why it breaks the job
    The ranks of the missing GPUs cannot start, and all others wait for them. A GPU is missing if it fell off the PCIe
    bus, if the driver could not initialize it at boot, or if a container or cgroup hides it.

    ## Example
    From nvidia-smi:

        NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.

    ## Fix
    Compare what the bus and the driver show:

        lspci -d 10de: ; nvidia-smi -L; dmesg -T | grep -i -e xid -e nvrm | tail

    If the GPU is on the bus but not in nvidia-smi, reboot. If that happens again, the card or its slot is faulty. If it
    is not on the bus, power-cycle the node. Until then, exclude the node: `--exclude=NODE`. SLURM's own count is in
    gres.conf.

    ## Source
    NVIDIA GPU debug guidelines: https://docs.nvidia.com/deploy/gpu-debug-guidelines/index.html.
    """  # noqa: E501  (a real line)

    message = "the node shows {seen} of {wanted} GPUs ({source})"
    told = "a process sees no GPU, or fewer than expected"
    fix = "on {node}: nvidia-smi -L; dmesg -T | grep -i xid; reboot the node, or exclude it: --exclude={node}"
    exit_code = Exit.NODE_FAULT
    also = ("AR106", "AR105", "AR102")
    signs = (
        Sign(r"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"),
        Sign(r"count reported lower than configured \((?P<present>[0-9]+) < (?P<wanted>[0-9]+)\)"),
        Sign(r"Found no NVIDIA driver on your system"),
        Sign(r"No (?:CUDA|HIP) GPUs are available", confidence=Confidence.LIKELY),
        Sign(r"no CUDA-capable device is detected", confidence=Confidence.LIKELY),
        Sign(r"CUDA_ERROR_NO_DEVICE", confidence=Confidence.LIKELY),
        Sign(r"Failed to initialize NVML: (?:Unknown Error|Driver Not Loaded)", confidence=Confidence.LIKELY),
        Sign(r"nvml error: driver not loaded"),
        # NCCL was told of a GPU that this container does not have.
        Sign(r"nvmlDeviceGetHandleBy[A-Za-z]{3,20}\(\) failed: Not Found", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"No devices were found", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"The NVIDIA Driver was not detected", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(
            r"CUDA unknown error - this may be due to an incorrectly set up environment",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
        Sign(r"no accelerator device is detected", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"No supported gpu backend found", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"CUDA driver initialization failed, you might not have a CUDA gpu", Role.LIKELY),
    )
    hits = (
        "n1:6896:7103 [1] misc/nvmlwrap.cc:187 NCCL WARN nvmlDeviceGetHandleByPciBusId() failed: Not Found",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the "
        "latest NVIDIA driver is installed and running.",
        "Reason=gres/gpu count reported lower than configured (7 < 8) [slurm@2026-07-28T17:13:24]",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        "RuntimeError: No CUDA GPUs are available",
        "RuntimeError: No HIP GPUs are available",
        "RuntimeError: cuda runtime error (100) : no CUDA-capable device is detected at THCGeneral.cpp:50",
        "failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected",
        "Failed to initialize NVML: Unknown Error",
        "nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown",
        "No devices were found",
        "WARNING: The NVIDIA Driver was not detected.  GPU functionality will not be available.",
        "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env "
        "variable CUDA_VISIBLE_DEVICES after program start.",
        "RuntimeError: FSDP needs a non-CPU accelerator device, but no accelerator device is detected.",
        "MisconfigurationException: No supported gpu backend found!",
        "RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu.",
    )
    misses = ("NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0",)
    never_on_hardware = True

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Fails if nvidia-smi works and lists fewer GPUs than SLURM allocated; MIG slices are not counted."""
        facts = _counted_facts(card)
        if isinstance(facts, Outcome):
            return facts
        promised, seen = card.num_promised_gpus, len(facts.gpus)
        if promised is not None and seen < promised:
            return failed(_list(facts), seen=seen, wanted=promised, source="allocated by SLURM")
        return PASSED

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Fails if a node shows fewer GPUs than most nodes, unless it shows the number that SLURM allocated."""
        counted = [(card, len(facts.gpus)) for card in cards if isinstance(facts := _counted_facts(card), Facts)]
        if not counted:
            return []
        usual, times = Counter(number for _, number in counted).most_common(1)[0]
        if times * 2 <= len(counted):
            return []
        source = f"{times} of {len(counted)} nodes show {usual}"
        return [
            ((card.host,), failed(_list(card.facts), seen=number, wanted=usual, source=source))
            for card, number in counted
            if number < usual and card.facts and not _is_as_promised(card, number)
        ]


class GpuSoftwareDiffers(Cause, id="AR115"):
    """The GPUs, their driver or their modes differ between nodes.

    ## What it means
    Most nodes have the same GPU model, driver and modes. This node differs.

    ## Why it breaks the job
    With different models or drivers, NCCL and kernels make different choices. The job then hangs in the first
    collective, runs at the pace of the slowest GPU, or computes results that differ by rank. A GPU in MIG mode cannot
    use NVLink, and a GPU in mode Exclusive_Process accepts only one process.

    ## Example
    From pytorch/pytorch#100691; one of the errors that an exclusive GPU causes:

        RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable

    ## Fix
    Compare the nodes, then correct the odd one:

        srun --ntasks-per-node=1 nvidia-smi --query-gpu=name,driver_version,vbios_version,mig.mode.current,compute_mode --format=csv
        nvidia-smi -c DEFAULT; nvidia-smi -mig 0        # as root; MIG needs a reset of the GPU

    If a partition has two models on purpose, request one with `--constraint` or `--gpus-per-node=h100:8`.

    ## Source
    nvidia-smi(1), r580.
    """  # noqa: E501  (a command)

    message = "{what} differs: {usual}; {odd}"
    fix = "change the {what} of {node} to that of the other nodes, or exclude the node: --exclude={node}"
    exit_code = Exit.NODE_FAULT
    no_fault_yet = "the lab's pretended GPUs are all of one kind"
    never_on_hardware = True

    @classmethod
    def alike(cls, card: Card) -> Mapping[str, str | None] | None:
        """GPU model, driver and MIG mode must be equal on all nodes with GPUs; compute mode and VBIOS only warn."""
        facts = card.facts
        if facts is None or not facts.gpus:
            return None
        versions = [gpu.vbios for gpu in facts.gpus]
        return {
            "GPU model": _all_of(gpu.name for gpu in facts.gpus),
            "GPU driver": facts.driver_version,
            "MIG mode": _all_of(gpu.mig_mode or "N/A" for gpu in facts.gpus),
            "compute mode": _all_of(gpu.compute_mode or "N/A" for gpu in facts.gpus),
            "VBIOS": None if None in versions else _all_of(map(str, versions)),
        }

    @classmethod
    def severity_of(cls, key: str) -> Severity:
        """Only compute mode and VBIOS are harmless enough to run with."""
        return Severity.WARN if key in {"compute mode", "VBIOS"} else Severity.FAIL


def _all_of(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


def _list(facts: Facts) -> str:
    return "nvidia-smi: " + (", ".join(gpu.pci_bus or gpu.uuid for gpu in facts.gpus) or "no GPU")


def _counted_facts(card: Card) -> Facts | Outcome:
    """The facts of a node whose GPUs are counted, or why they are not."""
    if card.facts and any(read_state(gpu.mig_mode) == "Enabled" for gpu in card.facts.gpus):
        return skipped("GPUs in slices (MIG)")
    if card.facts and not card.facts.gpus and "No devices" in card.facts.unread.get("gpus", ""):
        return card.facts  # nvidia-smi works, and says that there is none
    return gpu_facts(card)


def _is_as_promised(card: Card, number: int) -> bool:
    """Whether the node shows exactly what SLURM gave; fewer than that is what `probe` finds."""
    return card.num_promised_gpus is not None and number <= card.num_promised_gpus
