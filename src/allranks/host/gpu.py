"""This machine's NVIDIA GPUs: how many there are from the driver's /proc tree, what state they are in from nvidia-smi.

`count_gpus` needs no tool and cannot hang. SLURM sets CUDA_VISIBLE_DEVICES=0 also on nodes without a GPU where its
`gres.conf` names a device file, so that variable only narrows what the driver lists, and never adds to it.

`read_gpus` asks nvidia-smi for everything at once, and leaves out what its version has not heard of. It never ran on
hardware: the recorded outputs in the tests are put together after public ones (nvidia-smi(1), the help of
--query-gpu, issue threads), see tests/host/recorded/README.md.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from allranks.host.programs import Ran, run_command
from allranks.model.card import MAX_TEXT, Gpu
from allranks.model.fix import Vendor

QUERY_FIELDS = (
    "index", "uuid", "name", "driver_version", "pci.bus_id", "vbios_version", "memory.total", "memory.used",
    "ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "compute_mode", "mig.mode.current",
    "pcie.link.width.current", "pcie.link.width.max", "clocks_event_reasons.active", "gpu_recovery_action",
    "fabric.state", "fabric.status", "fabric.cliqueId", "fabric.clusterUuid",
)  # fmt: skip
"""Of `nvidia-smi --query-gpu`; drivers before 535 lack the last six."""
MAX_GPUS = 64
MAX_PROCESSES = 16
_OLDER_NAMES = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}  # before 535.54
_MAX_ROUNDS = 8
_ABSENT = re.compile(r"\[?(N/A|Not Supported|Not Available|Insufficient Permissions|Not Found)\]?", re.IGNORECASE)
_BRACKETED = re.compile(r"\[([^\]]*)\]")
_UUID = re.compile(r"(GPU|MIG)-[0-9a-fA-F-]+")
_RC_MEANING = {
    4: "no permission",
    6: "a query to find an object was unsuccessful",
    8: "external power cables of a GPU are not properly attached",
    9: "the NVIDIA driver is not loaded",
    10: "the kernel detected an interrupt issue with a GPU",
    12: "the NVML library could not be found or loaded",
    13: "the local version of NVML does not implement this function",
    14: "the infoROM of a GPU is corrupted",
    15: "a GPU has fallen off the bus or is inaccessible",
    255: "another error of the driver",
}
"""Exit status of nvidia-smi; nvidia-smi(1), RETURN VALUE."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GpuAnswer:
    """What nvidia-smi said of all GPUs."""

    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    problem: str = ""
    """Why there is nothing, or what is wrong beside it: `GPU 3: GPU is lost`, `the infoROM of a GPU is corrupted`."""


def count_gpus(env: Mapping[str, str], *, root: Path = Path("/")) -> int:
    """Return how many GPUs a process with this environment can use.

    Args:
        env: CUDA_VISIBLE_DEVICES in it narrows the count; as in CUDA, entries after an invalid one are hidden, and one
            named twice hides all.
        root: where /proc and /dev are; tests feed a tree.
    Source: CUDA C++ programming guide 13, "CUDA Environment Variables".
    """
    present = _present_gpus(root)
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return len(present)
    entries = [entry.strip() for entry in visible.split(",")]
    if entries[0].startswith("MIG-"):
        return 1  # a process sees one slice, however many are named
    if len(set(entries)) < len(entries):
        return 0
    valid = itertools.takewhile(lambda entry: _names_one_of(entry, present), entries)
    return len(list(valid))


def _names_one_of(entry: str, present: list[str]) -> bool:
    if re.fullmatch(r"[0-9]+", entry):
        return int(entry) < len(present)
    return entry.startswith("GPU-") and any(uuid.startswith(entry) for uuid in present)


def _present_gpus(root: Path) -> list[str]:
    """UUIDs of the GPUs that the driver knows and whose device file is here (a container may hide some)."""
    uuids = []
    for information in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        try:
            text = information.read_text()
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        minor = fields.get("Device Minor", "").strip()
        if (root / f"dev/nvidia{minor}").exists():
            uuids.append(fields.get("GPU UUID", "").strip())
    return uuids


def read_vendor(*, root: Path = Path("/")) -> Vendor:
    """Return who made the GPUs; NVIDIA, too, where no driver is loaded.

    /dev/kfd is that of ROCm; a processor with graphics of its own has it, too, beside the card that computes.
    """
    is_amd = (root / "dev/kfd").exists() and not (root / "proc/driver/nvidia").exists()
    return Vendor.AMD if is_amd else Vendor.NVIDIA


def read_driver_version(*, root: Path = Path("/")) -> str | None:
    """Return the version of the loaded kernel module, from /proc; None where none is loaded."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(errors="replace")[:4096]
    except OSError:
        return None
    match = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)\s", text)
    return match[1] if match else None


# --- nvidia-smi -------------------------------------------------------------------------------------------------------


def read_gpus(*, deadline_s: float, env: Mapping[str, str] | None = None) -> GpuAnswer:
    """Ask nvidia-smi for the state of every GPU it shows.

    Args:
        deadline_s: for all rounds together. Without persistence mode a cold start takes seconds.
        env: PATH in it says where nvidia-smi is; the own environment if None.
    """
    fields = list(QUERY_FIELDS)
    end_s = time.monotonic() + deadline_s
    ran = Ran(None, problem="nvidia-smi: not run")
    for _ in range(_MAX_ROUNDS):
        query = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
        ran = run_command(query, deadline_s=max(0.0, end_s - time.monotonic()), env=env)
        unknown = find_unknown_fields(ran.stdout + "\n" + ran.stderr)
        if not unknown & set(fields):
            break
        fields = without_fields(fields, unknown)
    if ran.rc is None:
        late = ran.problem.startswith("nvidia-smi: no answer")
        return GpuAnswer(problem=f"nvidia-smi: no answer within {deadline_s:.3g} s" if late else ran.problem)
    return parse_gpus(ran.stdout, fields, rc=ran.rc, stderr=ran.stderr)


def find_unknown_fields(text: str) -> set[str]:
    """Return the fields that this nvidia-smi says it does not have; it names one at a time."""
    return set(re.findall(r'Field "([^"\n]+)" is not a valid field to query', text))


def without_fields(fields: Sequence[str], unknown: set[str]) -> list[str]:
    """Return what to ask for next: older names for the unknown fields, nothing of the fabric where it has no state.

    Args:
        fields: asked for last time.
        unknown: of them, those that it does not have.
    """
    kept = [_OLDER_NAMES.get(name, "") if name in unknown else name for name in fields]
    has_fabric = "fabric.state" not in unknown
    return [name for name in kept if name and (has_fabric or not name.startswith("fabric."))]


def parse_gpus(text: str, fields: Sequence[str], *, rc: int = 0, stderr: str = "") -> GpuAnswer:
    """Read the answer to a --query-gpu; lines that are no row become the problem.

    Args:
        text: its standard output.
        fields: what was asked for, in this order.
        rc: its exit status; rows may be there although it is not 0.
        stderr: its standard error.
    """
    gpus: list[Gpu] = []
    said: list[str] = []
    driver_version = None
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        row = dict(zip(fields, values, strict=False))
        if len(values) != len(fields) or not (_is_number(row.get("index")) or _UUID.fullmatch(row.get("uuid", ""))):
            said += [line.strip()] if line.strip() else []
            continue
        gpu = _parse_gpu(row, position=len(gpus))
        gpus.append(gpu)
        driver_version = driver_version or _value(row.get("driver_version"))
        bad = {word for value in values for word in _BRACKETED.findall(value) if not _ABSENT.fullmatch(word)}
        said += [f"GPU {gpu.index}: {', '.join(sorted(bad))}"] if bad else []
    said += [line.strip() for line in stderr.splitlines() if line.strip()]
    if rc != 0:
        said.append(_RC_MEANING.get(rc, f"exit status {rc}"))
    elif not gpus and not said:
        said.append("it printed nothing")
    problem = f"nvidia-smi: {'; '.join(said[:4])}"[:MAX_TEXT] if said else ""
    return GpuAnswer(tuple(gpus[:MAX_GPUS]), driver_version, problem)


def _parse_gpu(row: Mapping[str, str], *, position: int) -> Gpu:
    index = _number(row.get("index"))
    throttle = row.get("clocks_event_reasons.active", row.get("clocks_throttle_reasons.active"))
    fabric_state = row.get("fabric.state")
    return Gpu(
        index=position if index is None else index,
        uuid=_value(row.get("uuid")) or "",
        name=_value(row.get("name")) or "",
        pci_bus=_value(row.get("pci.bus_id")),
        vbios=_value(row.get("vbios_version")),
        memory_total_mib=_number(row.get("memory.total")),
        memory_used_mib=_number(row.get("memory.used")),
        uncorrected_ecc=_number(row.get("ecc.errors.uncorrected.volatile.total")),
        has_ecc=_flag(row.get("ecc.mode.current")),
        recovery_action=_value(row.get("gpu_recovery_action")),
        # "There is no fabric" is an answer, too.
        fabric_state="N/A" if fabric_state and _ABSENT.fullmatch(fabric_state) else _value(fabric_state),
        fabric_status=_value(row.get("fabric.status")),
        fabric_clique=_value(row.get("fabric.cliqueId")),
        fabric_cluster=_value(row.get("fabric.clusterUuid")),
        compute_mode=_value(row.get("compute_mode")),
        mig_mode=_value(row.get("mig.mode.current")),
        pcie_width=_number(row.get("pcie.link.width.current")),
        pcie_max_width=_number(row.get("pcie.link.width.max")),
        throttle_reasons=_number(throttle),
    )


@dataclass(frozen=True, slots=True)
class Details(Generic[T]):
    """One more thing about the GPUs, by UUID, and why it could not be read."""

    by_uuid: Mapping[str, T] = field(default_factory=dict)
    problem: str = ""


def read_remapped_rows(*, deadline_s: float, env: Mapping[str, str] | None = None) -> Details[tuple[bool, bool]]:
    """Ask which GPUs have a row remapping pending, and on which one failed; none before Ampere.

    Args:
        deadline_s: for the answer.
        env: PATH in it says where nvidia-smi is.
    """
    query = "--query-remapped-rows=gpu_uuid,remapped_rows.pending,remapped_rows.failure"
    ran = run_command(("nvidia-smi", query, "--format=csv,noheader,nounits"), deadline_s=deadline_s, env=env)
    return Details(parse_remapped_rows(ran.stdout), _problem_of(ran))


def parse_remapped_rows(text: str) -> dict[str, tuple[bool, bool]]:
    """Read `GPU-..., No, Yes`: pending and failed by UUID, without the GPUs that cannot tell."""
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines()]
    flags = {row[0]: (_flag(row[1]), _flag(row[2])) for row in rows if len(row) == 3 and _UUID.fullmatch(row[0])}
    return {uuid: (bool(a), bool(b)) for uuid, (a, b) in flags.items() if a is not None or b is not None}


def read_gpu_processes(
    *, deadline_s: float, env: Mapping[str, str] | None = None, root: Path = Path("/")
) -> Details[tuple[str, ...]]:
    """Ask which processes have memory on a GPU, without those that this one started.

    Args:
        deadline_s: for the answer.
        env: PATH in it says where nvidia-smi is.
        root: where /proc is. In a container the driver may name pids that are not of this namespace.
    """
    query = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
    ran = run_command(("nvidia-smi", query, "--format=csv,noheader,nounits"), deadline_s=deadline_s, env=env)
    own = os.getpid()
    foreign = parse_gpu_processes(ran.stdout, is_own=lambda pid: _descends_from(pid, own, root))
    return Details(foreign, _problem_of(ran))


def parse_gpu_processes(text: str, *, is_own: Callable[[int], bool]) -> dict[str, tuple[str, ...]]:
    """Read `GPU-..., 812, python3, 14336`: descriptions of foreign processes by UUID.

    Args:
        text: the answer to --query-compute-apps. A process name may hold commas.
        is_own: whether a process is not to be counted.
    """
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        pid = _number(values[1]) if len(values) >= 4 else None
        if pid is None or not _UUID.fullmatch(values[0]) or is_own(pid):
            continue
        name = ",".join(values[2:-1]).rpartition("/")[2]
        name = "a process" if not name or _BRACKETED.fullmatch(name) else name[:64]
        used = _number(values[-1])
        memory = "" if used is None else f", {used} MiB"
        found.setdefault(values[0], []).append(f"{name} (pid {pid}{memory})")
    return {uuid: tuple(processes[:MAX_PROCESSES]) for uuid, processes in found.items()}


def read_nvlinks(*, deadline_s: float, env: Mapping[str, str] | None = None) -> Details[int]:
    """Ask how many NVLinks of each GPU are up; GPUs without NVLink are not there.

    Args:
        deadline_s: for the answer.
        env: PATH in it says where nvidia-smi is.
    """
    ran = run_command(("nvidia-smi", "nvlink", "-s"), deadline_s=deadline_s, env=env)
    return Details(parse_nvlinks(ran.stdout), _problem_of(ran))


def parse_nvlinks(text: str) -> dict[str, int]:
    """Count `Link 3: 26.562 GB/s` below each `GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-...)`."""
    counts: dict[str, int] = {}
    uuid = ""
    for line in text.splitlines():
        if head := re.match(r"\s*GPU \d+: .*\(UUID: ([^)\s]+)\)", line):
            uuid = head[1]
        elif uuid and (link := re.match(r"\s*Link \d+: (.*)", line)):
            counts[uuid] = counts.get(uuid, 0) + bool(re.match(r"[0-9.]+ GB/s", link[1]))
    return counts


def with_details(
    gpus: Sequence[Gpu],
    *,
    remapped: Mapping[str, tuple[bool, bool]],
    processes: Mapping[str, tuple[str, ...]],
    nvlinks: Mapping[str, int],
) -> tuple[Gpu, ...]:
    """Return the GPUs with what the other queries said; what is not there stays None."""
    return tuple(
        msgspec.structs.replace(
            gpu,
            remap_pending=remapped[gpu.uuid][0] if gpu.uuid in remapped else None,
            remap_failed=remapped[gpu.uuid][1] if gpu.uuid in remapped else None,
            processes=processes.get(gpu.uuid, ()),
            nvlinks_active=nvlinks.get(gpu.uuid),
        )
        for gpu in gpus
    )


def _problem_of(ran: Ran) -> str:
    if ran.problem or ran.rc == 0:
        return ran.problem
    return f"nvidia-smi: {_RC_MEANING.get(ran.rc or 0, ran.words)}"[:MAX_TEXT]


def _descends_from(pid: int, ancestor: int, root: Path) -> bool:
    for _ in range(64):
        if pid == ancestor:
            return True
        try:
            pid = int((root / f"proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
        if pid <= 1:
            return False
    return False


def _value(text: str | None) -> str | None:
    """A value that says something; None for `[N/A]`, `[Not Supported]`, `[Unknown Error]`."""
    if not text or _ABSENT.fullmatch(text) or _BRACKETED.fullmatch(text):
        return None
    return text[:MAX_TEXT]


def _is_number(text: str | None) -> bool:
    return _number(text) is not None


def _number(text: str | None) -> int | None:
    """`81559`, `81559 MiB`, `0x0000000000000004`."""
    match = re.match(r"(0[xX][0-9a-fA-F]{1,16}|[0-9]{1,18})(?: |$)", text or "")
    return int(match[1], 16 if match[1][:2] in ("0x", "0X") else 10) if match else None


def _flag(text: str | None) -> bool | None:
    return {"yes": True, "enabled": True, "1": True, "no": False, "disabled": False, "0": False}.get(
        (text or "").lower()
    )
