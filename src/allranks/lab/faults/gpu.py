"""Faults of GPUs and their fabric, for nodes without GPUs: tools with recorded output on the PATH of the tasks.

On every node, `nvidia-smi`, `systemctl` and `nv-fabricmanager` answer for eight H100, so that there is a majority; on
the faulty node they show the fault. Workers still find no GPU, and use Gloo. The answers follow the formats in the
driver's manual; they were never compared with hardware.
"""

from __future__ import annotations

import csv
import hashlib
import io
import random
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from allranks.lab.faults.fault import Fault, LabScene, Where

RECORDED = Path(__file__).parent / "recorded"
DRIVER_VERSION = "550.90.07"
OTHER_VERSION = "550.54.15"
PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")


@dataclass(kw_only=True)
class Recording:
    """The answers of the tools of one node."""

    gpus: list[dict[str, str]]
    """One row per GPU, with nvidia-smi's names of the fields."""
    processes: list[dict[str, str]] = field(default_factory=list)
    fabric_manager_state: str = "active"
    fabric_manager_version: str = DRIVER_VERSION


class GpuFault(Fault):
    """A fault of GPUs: the tools of all nodes are rebuilt from the injected faults."""

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Build them with this fault."""
        _furnish(scene, [*scene.others, (cls.name, scene.where)])

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Build them without it; remove them if no other fault needs them."""
        _furnish(scene, scene.others)

    @classmethod
    def change(cls, recording: Recording, chance: random.Random) -> None:
        """Add the fault to the answers of the node's tools."""


class FabricManagerStopped(GpuFault, name="fabric-manager-stopped", cause="AR101"):
    """nvidia-fabricmanager is not running on the node; its GPUs wait for their fabric."""

    @classmethod
    def change(cls, recording: Recording, chance: random.Random) -> None:
        """Inactive."""
        recording.fabric_manager_state = "inactive"
        _wait_for_fabric(recording)


class FabricManagerVersion(GpuFault, name="fabric-manager-version", cause="AR101"):
    """The node's nvidia-fabricmanager has a different version than the driver, and refuses to start."""

    @classmethod
    def change(cls, recording: Recording, chance: random.Random) -> None:
        """Failed, and of another version."""
        recording.fabric_manager_state = "failed"
        recording.fabric_manager_version = OTHER_VERSION
        _wait_for_fabric(recording)


class GpuMissing(GpuFault, name="gpu-missing", cause="AR103"):
    """The node lists seven GPUs, all others eight: one has fallen off the bus."""

    @classmethod
    def change(cls, recording: Recording, chance: random.Random) -> None:
        """Remove one; the GPUs after it move up."""
        del recording.gpus[chance.randrange(len(recording.gpus))]
        for index, gpu in enumerate(recording.gpus):
            gpu["index"] = str(index)


class GpuBusy(GpuFault, name="gpu-busy", cause="AR104"):
    """A foreign process holds 40 GiB of one of the node's GPUs."""

    @classmethod
    def change(cls, recording: Recording, chance: random.Random) -> None:
        """Add the process."""
        gpu, used_mib = chance.choice(recording.gpus), 40960
        gpu["memory.used"], gpu["memory.free"] = str(used_mib + 4), str(int(gpu["memory.free"]) - used_mib)
        values = (gpu["uuid"], "812", "python3", str(used_mib))
        recording.processes.append(dict(zip(PROCESS_FIELDS, values, strict=True)))


class GpuEcc(GpuFault, name="gpu-ecc", cause="AR105"):
    """One of the node's GPUs has uncorrected ECC errors, and a row that waits to be remapped."""

    @classmethod
    def change(cls, recording: Recording, chance: random.Random) -> None:
        """Count the errors."""
        gpu = chance.choice(recording.gpus)
        gpu |= {"ecc.errors.uncorrected.volatile.total": "3", "ecc.errors.uncorrected.aggregate.total": "3"}
        gpu |= {"remapped_rows.pending": "Yes", "gpu_recovery_action": "Reset"}


def record(node: str, faults: Iterable[tuple[str, Where]]) -> Recording:
    """Return the answers of a node's tools; pure except that it starts from the recording."""
    number = hashlib.sha256(node.encode()).hexdigest()[:8]  # a different one on each node
    text = (RECORDED / "gpus.csv").read_text().replace("{node}", number)
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    recording = Recording(gpus=list(rows))
    for name, where in faults:
        if where.node == node and name in _GPU_FAULTS:
            _GPU_FAULTS[name].change(recording, random.Random(where.seed))
    return recording


def _wait_for_fabric(recording: Recording) -> None:
    for gpu in recording.gpus:
        gpu |= {"fabric.state": "In Progress", "fabric.status": "N/A"}


def _furnish(scene: LabScene, faults: Sequence[tuple[str, Where]]) -> None:
    """Build the tools of all nodes, or remove them if no fault needs them."""
    is_needed = any(name in _GPU_FAULTS for name, _ in faults)
    for node in scene.hosts:
        tools = scene.own_dir(node, "gpu")
        variables = scene.own_dir(node, "environment", "gpu")
        if not is_needed:
            variables.unlink(missing_ok=True)
            shutil.rmtree(tools, ignore_errors=True)
            continue
        tools.mkdir(exist_ok=True)
        recording = record(node, faults)
        shebang = f"#!{sys.executable} -IS\n"
        scripts = {
            "nvidia-smi": shebang + (RECORDED / "nvidia_smi.py").read_text(),
            "systemctl": (RECORDED / "systemctl.sh").read_text(),
            "nv-fabricmanager": (RECORDED / "nv-fabricmanager.sh").read_text(),
        }
        answers = {
            "gpus.csv": _to_csv(recording.gpus, tuple(recording.gpus[0])),
            "processes.csv": _to_csv(recording.processes, PROCESS_FIELDS),
            "fabric_manager_state": recording.fabric_manager_state,
            "fabric_manager_version": recording.fabric_manager_version,
        }
        for name, text in (scripts | answers).items():
            (tools / name).write_text(text)
        for name in scripts:
            (tools / name).chmod(0o755)
        variables.parent.mkdir(exist_ok=True)
        variables.write_text(f"PATH+={tools}\n")


def _to_csv(rows: Iterable[dict[str, str]], fields: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


_GPU_FAULTS = {fault.name: fault for fault in (FabricManagerStopped, FabricManagerVersion, GpuMissing, GpuBusy, GpuEcc)}
