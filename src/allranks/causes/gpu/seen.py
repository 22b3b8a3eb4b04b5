"""What the probes of GPUs share: is there one at all, and which of them does this job use?"""

from __future__ import annotations

import re

from allranks.causes.cause import Outcome, skipped, unknown
from allranks.model.card import Card, Facts, Gpu


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
