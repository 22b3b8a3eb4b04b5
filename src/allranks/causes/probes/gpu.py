"""Are the GPUs there, healthy, free, and do driver, CUDA and ranks fit each other?"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from allranks.causes.book import all_xids
from allranks.causes.outcome import PASSED, Alike, Checks, Outcome, Surveyed, failed, skipped, unknown, warned
from allranks.causes.probes.cards import is_same_machine
from allranks.model.card import Card, Facts, Gpu
from allranks.model.finding import Severity

# What the probes of GPUs share: is there one at all, and which of them does this job use?


def gpu_facts(card: Card) -> Facts | Outcome:
    """Return the facts of a node with GPUs; else why they cannot be judged: there is none, or they were not read."""
    facts = card.facts
    if facts is None:
        return unknown("this node reported no facts")
    if facts.gpus:
        return facts
    reason = facts.unread.get("gpus")
    if facts.driver_version is None and facts.cuda_init is None and (reason is None or "not installed" in reason):
        return skipped("no NVIDIA GPU")
    return unknown(reason or "nvidia-smi lists no GPU")


def visible_gpus(facts: Facts) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to the workers: all where it is not set, or names slices."""
    said = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if said is None or "MIG-" in said:
        return facts.gpus
    visible: list[Gpu] = []
    for entry in said.split(","):
        gpu = _gpu_named(entry.strip(), facts.gpus)
        if gpu is None:
            break  # CUDA hides what comes after an entry that it does not know
        visible.append(gpu)
    return tuple(visible)


def _gpu_named(entry: str, gpus: tuple[Gpu, ...]) -> Gpu | None:
    if entry.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(entry)), None)
    return next((gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)), None)


def name_of(gpu: Gpu) -> str:
    """`GPU 3 (00000000:3B:00.0)`."""
    return f"GPU {gpu.index} ({gpu.pci_bus})" if gpu.pci_bus else f"GPU {gpu.index}"


def read_state(text: str | None) -> str | None:
    """What nvidia-smi says, or None where it says that there is nothing to say."""
    return None if text is None or text.strip("[] ").upper() in {"", "N/A", "NOT SUPPORTED"} else text.strip()


def read_version(text: str | None) -> tuple[int, ...] | None:
    """`580.65.06-1` -> (580, 65, 6)."""
    found = re.match(r"\s*([0-9]+(?:\.[0-9]+)*)", text or "")
    return tuple(map(int, found[1].split("."))) if found else None


# Can the GPUs behind NVSwitch reach each other: does the fabric manager run, in the driver's version?

_NVSWITCH = re.compile(r"SXM|HGX|HBM3|\bH200\b|\bH800\b|\b[GB]B[23]00\b|\bB[23]00\b")
"""Names of GPUs that sit behind NVSwitch on most boards; PCIe and NVL cards do not."""


def probe_fabric_manager(card: Card) -> Outcome:
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


# Does the driver match CUDA, is every GPU present, and are all GPUs of one model?

_OLDEST_DRIVER = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
"""CUDA major version -> oldest Linux driver that runs programs built for it. Source: CUDA 13.1 release notes."""


def probe_driver_cuda_mismatch(card: Card) -> Outcome:
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


def probe_gpu_missing(card: Card) -> Outcome:
    """Fails if nvidia-smi works and lists fewer GPUs than SLURM allocated; MIG slices are not counted."""
    facts = _counted_facts(card)
    if isinstance(facts, Outcome):
        return facts
    promised, seen = card.num_promised_gpus, len(facts.gpus)
    if promised is not None and seen < promised:
        return failed(_listed_gpus(facts), seen=seen, wanted=promised, source="allocated by SLURM")
    return PASSED


def survey_gpu_missing(cards: Sequence[Card]) -> Surveyed:
    """Fails if a node shows fewer GPUs than most nodes, unless it shows the number that SLURM allocated."""
    counted = [(card, len(facts.gpus)) for card in cards if isinstance(facts := _counted_facts(card), Facts)]
    if not counted:
        return []
    usual, times = Counter(number for _, number in counted).most_common(1)[0]
    if times * 2 <= len(counted):
        return []
    source = f"{times} of {len(counted)} nodes show {usual}"
    return [
        ((card.host,), failed(_listed_gpus(card.facts), seen=number, wanted=usual, source=source))
        for card, number in counted
        if number < usual and card.facts and not _is_as_promised(card, number)
    ]


def collect_gpu_software_differs(card: Card) -> Alike:
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


def weigh_gpu_software_differs(key: str) -> Severity:
    """Only compute mode and VBIOS are harmless enough to run with."""
    return Severity.WARN if key in {"compute mode", "VBIOS"} else Severity.FAIL


def _all_of(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


def _listed_gpus(facts: Facts) -> str:
    return "nvidia-smi: " + (", ".join(gpu.pci_bus or gpu.uuid for gpu in facts.gpus) or "no GPU")


def _counted_facts(card: Card) -> Facts | Outcome:
    """The facts of a node whose GPUs are counted, or why they are not."""
    if card.facts and any(read_state(gpu.mig_mode) == "Enabled" for gpu in card.facts.gpus):
        return skipped("GPUs in slices (MIG)")
    if card.facts and not card.facts.gpus and "No devices" in card.facts.unread.get("gpus", ""):
        return card.facts  # nvidia-smi works, and says that there is none
    return gpu_facts(card)


def _is_as_promised(card: Card, number: int) -> bool:
    """Whether the node shows exactly what SLURM gave; fewer than that is what probe_gpu_missing finds."""
    return card.num_promised_gpus is not None and number <= card.num_promised_gpus


# Which worker uses which GPU: is it free, does no other node use it, and are there enough?


def probe_gpu_busy(card: Card) -> Outcome:
    """Fails if other processes hold over 30 % of a GPU's memory; warns about less, or about ownerless memory."""
    facts = gpu_facts(card)
    if isinstance(facts, Outcome):
        return facts
    worst = PASSED
    for gpu in visible_gpus(facts):
        used, total = gpu.memory_used_mib or 0, gpu.memory_total_mib or 0
        is_much = used > 0.3 * total > 0
        if not gpu.processes and not is_much:
            continue
        who = "" if gpu.processes else "; no process visible here owns them"
        values: dict[str, Any] = {"gpu": name_of(gpu), "used": used, "total": total or "?", "who": who}
        if gpu.processes and is_much:
            return failed(*gpu.processes[:4], **values)
        if worst is PASSED:
            worst = warned(*gpu.processes[:4], **values)
    return worst


def probe_duplicate_gpu(card: Card) -> Outcome:
    """Fails if CUDA_VISIBLE_DEVICES lists a GPU twice."""
    facts = gpu_facts(card)
    if isinstance(facts, Outcome):
        return facts
    said = facts.environment.get("CUDA_VISIBLE_DEVICES", "")
    twice = [entry for entry, times in Counter(filter(None, map(str.strip, said.split(",")))).items() if times > 1]
    if twice:
        what = f"CUDA_VISIBLE_DEVICES={said} lists {twice[0]} twice, so CUDA hides all GPUs"
        return failed(what=what, variable="CUDA_VISIBLE_DEVICES")
    return PASSED


def survey_duplicate_gpu(cards: Sequence[Card]) -> Surveyed:
    """Fails if two machines show the same serial number; warns if two agents of one machine see the same GPU."""
    owners: dict[str, list[Card]] = defaultdict(list)
    for card in cards:
        if card.facts is None:
            continue
        for gpu in visible_gpus(card.facts):
            if gpu.uuid and gpu.mig_mode != "Enabled" and card not in owners[gpu.uuid]:
                owners[gpu.uuid].append(card)
    found: dict[tuple[str, ...], Outcome] = {}
    for uuid, same in owners.items():
        if len(same) < 2:
            continue
        one, other = (card.facts for card in same[:2])
        hosts = tuple(card.host for card in same)
        if one and other and is_same_machine(one, other):
            found.setdefault(hosts, warned(what=f"{len(same)} agents on one machine both see {uuid}"))
        else:
            found.setdefault(hosts, failed(what=f"{len(same)} nodes show the same GPU, {uuid}"))
    return list(found.items())


def probe_gpu_binding(card: Card) -> Outcome:
    """Warns if the variable shows fewer GPUs than workers although the node has enough; Gloo needs none."""
    facts = gpu_facts(card)
    if isinstance(facts, Outcome):
        return facts
    if card.wanted_backend == "gloo":
        return skipped("the backend is gloo")
    said = facts.environment.get("CUDA_VISIBLE_DEVICES")
    visible, present = len(visible_gpus(facts)), len(facts.gpus)
    if said is not None and "MIG-" not in said and visible < card.num_workers <= present:
        counts: dict[str, Any] = {"visible": visible, "present": present, "workers": card.num_workers}
        return warned(said=said, variable="CUDA_VISIBLE_DEVICES", **counts)
    return PASSED


# Is the GPU healthy: memory errors, Xids, PCIe, NVLink, heat and power?

_XID = re.compile(r"Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)(?: GPU-C?I:[0-9]+){0,2}\): (?P<code>[0-9]+)")

_SLOWED = {
    0x08: "hardware slowdown",
    0x40: "too hot (hardware thermal slowdown)",
    0x80: "power brake",
}
"""Bits of clocks_event_reasons.active. Source: nvml.h, nvmlClocksEventReason*, r580."""

_FATAL = frozenset({"reset", "reboot", "hands"})
"""What an Xid may ask for after which no job may start on its GPU."""


def probe_gpu_hardware(card: Card) -> Outcome:
    """Fails on uncorrected memory errors, a failed row remap, a requested recovery, or a fatal Xid."""
    facts = card.facts if card.facts and card.facts.xids else gpu_facts(card)
    if isinstance(facts, Outcome):
        return facts
    for line, code, name in _fatal_xids(facts):
        return failed(line, gpu=name, what=f"Xid {code}: {all_xids()[code].what}")
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


def probe_pcie_degraded(card: Card) -> Outcome:
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


def probe_nvlink_degraded(card: Card) -> Outcome:
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


def probe_gpu_throttled(card: Card) -> Outcome:
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
        xid = all_xids().get(int(match["code"])) if match else None
        if match is None or xid is None or xid.asks not in _FATAL:
            continue
        gpu = by_bus.get(_short_bus(match["bus"]))
        if gpu is None or gpu in visible:
            found.append((line, int(match["code"]), name_of(gpu) if gpu else f"GPU at {match['bus']}"))
    return found


def _short_bus(bus: str) -> str:
    """`00000000:3B:00.0` of nvidia-smi and `0000:3b:00` of the kernel are one: `0000:3b:00`."""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


CHECKS = {
    "AR101": Checks(probe=probe_fabric_manager),
    "AR102": Checks(probe=probe_driver_cuda_mismatch),
    "AR103": Checks(probe=probe_gpu_missing, survey=survey_gpu_missing),
    "AR104": Checks(probe=probe_gpu_busy),
    "AR105": Checks(probe=probe_gpu_hardware),
    "AR107": Checks(probe=probe_duplicate_gpu, survey=survey_duplicate_gpu),
    "AR108": Checks(probe=probe_gpu_binding),
    "AR112": Checks(probe=probe_pcie_degraded),
    "AR113": Checks(probe=probe_nvlink_degraded),
    "AR114": Checks(probe=probe_gpu_throttled),
    "AR115": Checks(alike=collect_gpu_software_differs, severity_of=weigh_gpu_software_differs),
}
