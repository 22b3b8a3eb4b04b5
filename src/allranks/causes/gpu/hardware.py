"""Is the GPU healthy: memory errors, Xids, PCIe, NVLink, heat and power?"""

from __future__ import annotations

import re

from allranks.causes.cause import PASSED, Cause, Outcome, failed, skipped, warned
from allranks.causes.gpu.seen import gpu_facts, name_of, visible_gpus
from allranks.causes.gpu.xids import FATAL_XIDS, LINK_XIDS, PROGRAM_XIDS, XIDS, told_xid_patterns, xid_pattern
from allranks.causes.sign import Blames, Role, Sign
from allranks.model.card import Card, Facts, Gpu
from allranks.model.errors import Exit
from allranks.model.finding import Confidence

_XID = re.compile(r"Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<code>[0-9]+)")

_SLOWED = {
    0x08: "hardware slowdown",
    0x40: "too hot (hardware thermal slowdown)",
    0x80: "power brake",
}
"""Bits of clocks_event_reasons.active. Source: nvml.h, nvmlClocksEventReason*, r580."""


_BROKEN_XIDS = FATAL_XIDS.keys() | LINK_XIDS - {155} | {94}
_ASKING_XIDS = XIDS.keys() - PROGRAM_XIDS - _BROKEN_XIDS - {45}
"""Xids that a job may survive, and that mean its GPU all the same."""


class GpuHardware(Cause, id="AR105"):
    """A GPU has a hardware fault or needs a reset.

    ## What it means
    The GPU reported memory errors that could not be corrected, the driver logged an error (an Xid) after which the GPU
    is not reliable, or the driver requests a reset.

    ## Why it breaks the job
    A kernel on that GPU fails or never returns, so its rank dies or hangs, and all others wait. Undetected memory
    errors are worse: they make the results wrong.

    ## Example
    From NVIDIA/NVSentinel#155, and the text of cudaErrorECCUncorrectable in CUDA 13:

        NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus
        torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered

    ## Fix
    Read what the GPU reports:

        nvidia-smi -q -d ECC,ROW_REMAPPER; dmesg -T | grep -i xid
        nvidia-smi --query-gpu=index,gpu_recovery_action --format=csv

    Exclude the node (`--exclude=NODE`), and send these lines to the admin. Reset the GPU while it is idle, as root:
    `nvidia-smi --gpu-reset -i INDEX`. After Xid 79, only a reboot or a power cycle helps. If the fault returns, replace
    the card. Xid 63 and 94 leave the GPU usable until it is reset. Xids 74 and 144 to 150, and the SXids of NVSwitch,
    are NVLink faults: `nvidia-smi nvlink --status; nvidia-smi nvlink -e` show which link; the other end of the link may
    be the faulty one. `CUDA error: unknown error` proves nothing by itself: read the kernel log of that node.

    ## Source
    Xid catalogue: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html (read 2026-11-21).
    SXids: NVIDIA Fabric Manager user guide, "NVSwitch SXid errors" (r580).
    GPU memory error management: https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html.
    """

    message = "{gpu}: {what}"
    told = "GPU or NVLink hardware fault; a reset is required"
    fix = (
        "exclude {node} (--exclude={node}) and have it reset or repaired; for the admin: nvidia-smi -q -d "
        "ECC,ROW_REMAPPER"
    )
    exit_code = Exit.NODE_FAULT
    signs = (
        Sign(xid_pattern(_BROKEN_XIDS)),
        Sign(xid_pattern(LINK_XIDS | {74}) + r".{0,160}(?P<thing>[Ll]ink [0-9]+(?: on GPU ?[0-9]+)?)"),
        Sign(xid_pattern(_ASKING_XIDS), Role.LIKELY, confidence=Confidence.LIKELY),
        *(Sign(told) for told in told_xid_patterns(_BROKEN_XIDS)),
        *(Sign(told, Role.LIKELY, confidence=Confidence.LIKELY) for told in told_xid_patterns(_ASKING_XIDS)),
        Sign(xid_pattern({45}), Role.CONTEXT, Blames.NOBODY),
        Sign(
            r"NVRM: Xid \(PCI:(?P<gpu>[0-9a-fA-F:.]{3,20})\): 45,.{1,120} caused by previous Xid "
            r"(?:48|74|79|92|94|95|109|119|120|14[0-9]|15[0-9])\b",
            Role.LIKELY,
        ),
        Sign(r"NVRM: The NVIDIA GPU (?P<gpu>[0-9a-fA-F]{4,8}:[0-9a-fA-F:.]{4,8})\s*$", Role.CONTEXT, Blames.NAMED),
        Sign(
            r"nvidia-nvswitch[0-9]+: SXid \(PCI:(?P<address>[0-9a-fA-F:.]{3,20})\): [0-9]+, Fatal"
            r"(?:, (?P<thing>Link [0-9]+))?"
        ),
        Sign(
            r"nvidia-nvswitch[0-9]+: SXid \(PCI:(?P<address>[0-9a-fA-F:.]{3,20})\): [0-9]+, Non-fatal"
            r"(?:, (?P<thing>Link [0-9]+))?",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        # The fabric manager's own log of the same.
        Sign(
            r"detected NVSwitch (?P<severity>fatal|non-fatal) error [0-9]+ on .{0,60}pci bus id:"
            r"(?P<address>[0-9a-fA-F:.]{3,20})",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        # The driver and its tools
        Sign(r"NVRM: GPU (?:at PCI:)?(?P<gpu>[0-9a-fA-F]{4,8}:[0-9a-fA-F:.]{4,8}):? GPU has fallen off the bus"),
        Sign(r"GPU has fallen off the bus"),
        Sign(r"fallen off the bus and is not responding to commands"),
        Sign(r"GPU is lost"),
        Sign(r"determine the device handle for (?:GPU|gpu) ?(?P<gpu>[0-9a-fA-F:.]{1,20}): "),
        Sign(r"NVML_ERROR_(?:GPU_IS_LOST|RESET_REQUIRED)"),
        Sign(r"Reset required \[NV_ERR_RESET_REQUIRED\]"),
        Sign(r"RmInitAdapter failed!", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"ERR! / +[0-9]+W", confidence=Confidence.LIKELY),
        Sign(r"Remapping Failure Occurred {1,20}: Yes"),
        Sign(r"severity=Uncorrected \(Fatal\)", Role.LIKELY, confidence=Confidence.UNDECIDED),
        # CUDA
        Sign(r"uncorrectable ECC error encountered"),
        Sign(r"device ordinal (?P<gpu>[0-9]+): .{1,200}CUDA_ERROR_ECC_UNCORRECTABLE"),
        Sign(r"cudaErrorECCUncorrectable"),
        Sign(r"CUDA_ERROR_ECC_UNCORRECTABLE"),
        Sign(r"uncorrectable NVLink error"),
        Sign(
            r"Invalid access of peer GPU memory over nvlink or a hardware error",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(r"hardware stack error", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"CUDA error: unknown error", Role.LIKELY, confidence=Confidence.UNDECIDED),
        Sign(r"cuda runtime error \((?:30|999)\) : unknown error", Role.LIKELY, confidence=Confidence.UNDECIDED),
        Sign(r"Cuda failure (?:[0-9]+ )?'unknown error'", Role.LIKELY, confidence=Confidence.UNDECIDED),
        Sign(
            r"AER: (?:Multiple )?Uncorrect(?:ed|able) \((?:Fatal|Non-Fatal)\) error (?:message )?received: "
            r"(?P<gpu>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9])",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
        # AMD's: a kernel that never ends gets its GPU reset, too.
        Sign(
            r"HW Exception by GPU (?P<gpu>node-[0-9]+) (?:\(Agent handle: \w+\) )?reason ?: ?GPU Hang",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(r"amdgpu (?P<gpu>[0-9a-f]{4}:[0-9a-f:.]{3,12}): (?:amdgpu: )?device lost from bus!"),
        Sign(
            r"amdgpu (?P<gpu>[0-9a-f]{4}:[0-9a-f:.]{3,12}): (?:amdgpu: )?GPU reset begin!",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
    )
    hits = (
        "pcieport 0000:00:03.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0",
        "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus",
        "I1025 02:19:08.048185 1 health.go:186] XidCriticalError: Xid=79 on Device=GPU-8dfc3a6a; marking device as "
        "unhealthy.",
        "I1025 02:19:08.048185 1 health.go:186] XidCriticalError: Xid=63 on Device=GPU-8dfc3a6a; marking device as "
        "unhealthy.",
        "Detected XID 79 for GPU 4 Please consult the documentation for details of this XID.",
        "Detected XID 63 for GPU 4 Please consult the documentation for details of this XID.",
        "kernel: [680111.646286] NVRM: Xid (PCI:0000:10:1c): 63, pid=1850, Row Remapper: New row marked for remapping, "
        "reset gpu to activate",
        "NVRM: Xid (PCI:0000:04:00): 145, RLW_CTRL Nonfatal XC0 i0 Link 00 (0x00000003 0x80000000 0x00000000 "
        "0x00000000)",
        "NVRM: Xid (PCI:0000:4e:00): 45, pid=21044, name=python3, Ch 00000008",
        "kernel: NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149",
        "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0",
        "detected NVSwitch fatal error 12028 on fid:0 on NVSwitch pci bus id:00000000:C1:00.0 physical id:8 port:36",
        "kernel: nvidia-nvswitch0: SXid (PCI:0000:59:00.0): 23001, Fatal, Link 12 Always Fatal",
        "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)",
        "NVRM: GPU 0000:c1:00.0: GPU has fallen off the bus.",
        "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.  Reboot the system to recover this "
        "GPU",
        "Unable to determine the device handle for gpu 0000:4E:00.0: Unknown Error",
        "pynvml.nvml.NVMLError_GpuIsLost: NVML_ERROR_GPU_IS_LOST",
        "NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x00000062) returned "
        "from status @ kernel_channel.c:2874",
        "NVRM: GPU 0000:18:00.0: RmInitAdapter failed! (0x26:0xffff:1290)",
        "| N/A   ERR!  P0   ERR! / 400W |  40536MiB / 81920MiB |     ERR!      Default |",
        "        Remapping Failure Occurred        : Yes",
        "pcieport 0000:3a:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)",
        "[ 9312.5] NVRM: Xid (PCI:0000:c1:00): 119, pid=21044, name=python3, Timeout after 45s",
        "NVRM: fallen off the bus and is not responding to commands.",
        "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "RuntimeError: transform: failed to synchronize: cudaErrorECCUncorrectable: uncorrectable ECC error "
        "encountered",
        "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered",
        "Internal: failed initializing StreamExecutor for CUDA device ordinal 0: Internal: failed call to "
        "cuDevicePrimaryCtxRetain: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered",
        "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
        "RuntimeError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
        "RuntimeError: CUDA error: hardware stack error",
        "  what():  CUDA error: unknown error",
        "RuntimeError: cuda runtime error (30) : unknown error at /pytorch/aten/src/THC/THCGeneral.cpp:50",
        "gpu-node:2143:2561 [1] enqueue.cc:1186 NCCL WARN Cuda failure 999 'unknown error'",
        "HW Exception by GPU node-1 (Agent handle: 0x5899c75e9d60) reason :GPU Hang",
        "02:21:32 amdgpu 0000:08:00.0: amdgpu: device lost from bus!",
        "[76914.214195] amdgpu 0000:dd:00.0: amdgpu: GPU reset begin!",
    )
    misses = (
        "NVRM: Xid (PCI:0000:44:00): 13, pid=812, Graphics Exception: ESR 0x404490=0x80000001",
        "NVRM: Xid (PCI:0000:44:00): 43, pid=812, Ch 00000008",
        "        Remapping Failure Occurred        : No",
        "        ECC Errors                        : 0 uncorrectable",
        "| N/A   28C    P0    67W / 400W |  40536MiB / 81920MiB |    100%      Default |",
    )
    never_on_hardware = True

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Fails on uncorrected memory errors, a failed row remap, a requested recovery, or a fatal Xid."""
        facts = card.facts if card.facts and card.facts.xids else gpu_facts(card)
        if isinstance(facts, Outcome):
            return facts
        for line, code, name in _fatal_xids(facts):
            return failed(line, gpu=name, what=f"Xid {code}: {FATAL_XIDS[code]}")
        used = visible_gpus(facts)
        for gpu in used:
            if what := _broken(gpu):
                return failed(gpu=name_of(gpu), what=what)
        pending = next((gpu for gpu in used if gpu.remap_pending), None)
        if pending:
            return warned(gpu=name_of(pending), what="a bad memory row will be remapped at the next reset")
        for gpu in facts.gpus:
            if what := _broken(gpu):
                return warned(gpu=name_of(gpu), what=f"{what}; CUDA_VISIBLE_DEVICES hides it from this job")
        return PASSED


class PcieDegraded(Cause, id="AR112"):
    """A GPU's PCIe link has lost lanes.

    ## What it means
    The link between GPU and board uses fewer lanes than both ends support, for example 8 of 16.

    ## Why it breaks the job
    The job runs, but all traffic over this link takes twice as long or more: input data, checkpoints, and gradients on
    their way to the network card. All ranks wait for this one in each step.

    ## Example
    From nvidia-smi's field names:

        pcie.link.width.current [8], pcie.link.width.max [16]

    ## Fix
    Read the width at both ends; the second command needs root:

        nvidia-smi --query-gpu=index,pcie.link.width.current,pcie.link.width.max --format=csv
        lspci -vv -s BUS | grep -i lnksta

    The admin should reseat the card and check the riser. The speed (GT/s) is no evidence: an idle GPU lowers it. The
    width does not change.

    ## Source
    nvidia-smi(1), "PCIe link width", r580.
    """

    message = "the PCIe link of {gpu} has {width} of {max_width} lanes"
    fix = "for the admin of {node}: reseat the card; lspci -vv shows the width at both ends (LnkSta)"
    exit_code = Exit.NODE_FAULT
    no_fault_yet = "the lab's pretended GPUs all have their full width"
    never_on_hardware = True

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Warns if a GPU's link uses fewer lanes than both ends support."""
        facts = gpu_facts(card)
        if isinstance(facts, Outcome):
            return facts
        known = [(gpu, gpu.pcie_width, gpu.pcie_max_width) for gpu in visible_gpus(facts)]
        for gpu, width, max_width in known:
            if width and max_width and width < max_width:
                return warned(gpu=name_of(gpu), width=width, max_width=max_width)
        if not any(width and max_width for _, width, max_width in known):
            return skipped("the driver does not report the width of the link")
        return PASSED


class NvlinkDegraded(Cause, id="AR113"):
    """A GPU has fewer active NVLinks than others in the node.

    ## What it means
    GPUs of one model in one node usually have the same number of active links. This one has fewer.

    ## Why it breaks the job
    The job runs, but slower: traffic inside the node uses the remaining links, or PCIe. NCCL builds its rings for the
    weakest GPU, so all GPUs of the job become slower.

    ## Example
    From nvidia-smi nvlink --status:

        Link 3: <inactive>

    ## Fix
    Compare the GPUs, and look for link errors:

        nvidia-smi nvlink --status; nvidia-smi nvlink -e; dmesg -T | grep -i -e 'xid.*: 74' -e sxid

    The admin should reset the GPUs, then reseat bridge or board. An inactive link alone is not a fault: an H100 NVL has
    some by design. What counts is the difference between GPUs.

    ## Source
    NVIDIA/nccl#1608 (inactive links by design); nvidia-smi(1), r580.
    """

    message = "{gpu} has {links} active NVLinks; others of its model in the node have {usual}"
    fix = "on {node}: nvidia-smi nvlink --status; for the admin: reset the GPUs, then check bridge and board"
    exit_code = Exit.NODE_FAULT
    no_fault_yet = "the lab's pretended GPUs all have their links"
    never_on_hardware = True

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Warns if a GPU has fewer active links than another of the same model in the node."""
        facts = gpu_facts(card)
        if isinstance(facts, Outcome):
            return facts
        known = [(gpu, gpu.nvlinks_active) for gpu in facts.gpus if gpu.nvlinks_active is not None]
        if not any(links for _, links in known):
            return skipped("no NVLink")
        for gpu, links in known:
            usual = max(other for sibling, other in known if sibling.name == gpu.name)
            if links < usual:
                return warned(gpu=name_of(gpu), links=links, usual=usual)
        return PASSED


class GpuThrottled(Cause, id="AR114"):
    """Heat or power limits slow a GPU down.

    ## What it means
    The GPU lowers its clock because it is too hot, because its power supply requests it, or because its board protects
    itself. allranks measured this before the job, when the GPU should be cool.

    ## Why it breaks the job
    The job runs at the pace of this GPU, often at half the speed or less, and no error appears.

    ## Example
    From nvidia-smi -q -d PERFORMANCE:

        HW Thermal Slowdown : Active

    ## Fix
    Show the reason and the temperature:

        nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER

    The admin should check fans, air flow and power supply (with a "power brake", the node tells its GPUs to save
    power). Exclude the node if speed matters: `--exclude=NODE`.

    ## Source
    NVML, nvmlClocksEventReasons: https://docs.nvidia.com/deploy/nvml-api/ (r580).
    """

    message = "{gpu} lowers its clock: {why}"
    fix = "on {node}: nvidia-smi -q -d PERFORMANCE,TEMPERATURE; for the admin: check fans, air flow, power supply"
    exit_code = Exit.NODE_FAULT
    no_fault_yet = "the lab's pretended GPUs are never hot"
    never_on_hardware = True

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Warns about a hardware slowdown, heat, or a power brake; a power cap is allowed."""
        facts = gpu_facts(card)
        if isinstance(facts, Outcome):
            return facts
        known = [(gpu, gpu.throttle_reasons) for gpu in visible_gpus(facts) if gpu.throttle_reasons is not None]
        if not known:
            return skipped("the driver does not report why clocks are low")
        for gpu, reasons in known:
            if said := [text for bit, text in _SLOWED.items() if reasons & bit]:
                return warned(f"clocks_event_reasons.active: 0x{reasons:x}", gpu=name_of(gpu), why=", ".join(said))
        return PASSED


def _broken(gpu: Gpu) -> str | None:
    if gpu.uncorrected_ecc:
        return f"{gpu.uncorrected_ecc} uncorrected memory errors since the driver was loaded"
    if gpu.remap_failed:
        return "a bad memory row could not be remapped: replace the card"
    if gpu.recovery_action and gpu.recovery_action.strip("[] ").upper() not in {"", "NONE", "N/A"}:
        return f"the driver requests: {gpu.recovery_action}"
    return None


def _fatal_xids(facts: Facts) -> list[tuple[str, int, str]]:
    """Lines of fatal Xids, their number and their GPU; those of GPUs that this job cannot see are left out."""
    by_bus = {_short_bus(gpu.pci_bus): gpu for gpu in facts.gpus if gpu.pci_bus}
    visible = visible_gpus(facts)
    found = []
    for line in facts.xids:
        match = _XID.search(line)
        if match is None or int(match["code"]) not in FATAL_XIDS:
            continue
        gpu = by_bus.get(_short_bus(match["bus"]))
        if gpu is None or gpu in visible:
            found.append((line, int(match["code"]), name_of(gpu) if gpu else f"GPU at {match['bus']}"))
    return found


def _short_bus(bus: str) -> str:
    """`00000000:3B:00.0` of nvidia-smi and `0000:3b:00` of the kernel are one: `0000:3b:00`."""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"
