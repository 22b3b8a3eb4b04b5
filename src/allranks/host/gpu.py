"""This machine's NVIDIA GPUs, from the driver's /proc tree: no torch, no NVML, nothing that can hang.

SLURM sets CUDA_VISIBLE_DEVICES=0 also on nodes without a GPU where its `gres.conf` names a device file, so that
variable only narrows what the driver lists, and never adds to it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path


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
