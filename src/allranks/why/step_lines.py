"""Which lines report a step of the training? Pure."""

from __future__ import annotations

import re
from functools import lru_cache

SLURM = re.compile(r"slurmstepd|slurmd\[|srun: |StepId=|error: \*\*\* (?:JOB|STEP) \d")
"""Its steps are no training steps."""
_TRAINS = re.compile(
    r"(?i)\d(?:it/s|s/it)|\bloss\b['\":=\s]{1,4}-?\d|\bloss\b\W{0,4}\d|\b(?:iter(?:ation)?|step)s?\b\W{0,3}\d+(?!\d|\.\d)"
)
NUMBER = re.compile(r"(?i)\b(?:global[_ ]?step|step|iteration|iter|batch)s?\b[^\w\n]{1,12}(\d{1,12})")
"""Of a step."""
EPOCH = re.compile(r"(?i)\bepoch\b\W{0,3}(\d+)")
"""Of a training that tells its epochs alone; another loop may have some, too, so that one is no step."""
MIN_STEPS = 3
"""Number of lines that show a training: a batch script may say `Step 1: data` itself."""
_CHECKS = re.compile(r"(?i)(?<![a-z])(?:eval|valid|val(?![a-z])|test)|^wandb: ")
"""Of a step that is none of the training; wandb tells the last one again when the process ends."""
_NO_WORDS = re.compile(r"[^A-Za-z]+")
_TRAINS_WORDS = ("loss", "step", "iter", "it/s", "s/it")
"""One of these is in each of them: to look for words takes a fifth of the time."""


@lru_cache(maxsize=4096)
def is_step(text: str) -> bool:
    """Whether a line reports a step of the training. Cached: thousands of ranks end alike."""
    words = text.lower()
    return any(word in words for word in _TRAINS_WORDS) and _TRAINS.search(text) is not None


def is_of_training(text: str) -> bool:
    """Whether a line reports a step of the training, and neither SLURM's nor one of an evaluation."""
    return is_step(text) and SLURM.search(text) is None and _CHECKS.search(text) is None


def form_of(text: str) -> str:
    """Return the words of a line without numbers: the same for all steps of one loop."""
    return _NO_WORDS.sub("", text)
