"""What is this machine: does it have an NVIDIA GPU, and which versions of everything are here?

Standard library only: `run.py` asks before it knows whether anything else can be imported.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

DEADLINE_S = 20.0
"""For nvidia-smi without persistence mode, which starts the driver first."""
_VERSIONS = """\
import json, sys
said = {"Python": sys.version.split()[0]}
try:
    import torch
    said["torch"] = torch.__version__
    said["CUDA of torch"] = str(torch.version.cuda)
    said["torch sees GPUs"] = str(torch.cuda.device_count())
    if torch.cuda.is_available():
        said["NCCL of torch"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as exc:
    said["torch"] = f"none ({exc!r})"[:200]
print(json.dumps(said))
"""
_FIELDS = ("name", "driver_version", "memory.total", "compute_mode", "mig.mode.current", "persistence_mode")


def why_no_gpu(*, root: Path = Path("/"), path: str | None = None) -> str:
    """Return why there is no NVIDIA GPU to test on; empty where there is one.

    A device file is asked for, not the driver's /proc tree: a sandboxed kernel may show the one without the other.

    Args:
        root: where /dev is.
        path: where nvidia-smi is looked for, as PATH; the own one if None.
    """
    if any((root / "dev").glob("nvidia[0-9]*")):
        return ""
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return "no /dev/nvidia0, and nvidia-smi is not installed"
    said = _first_line([program, "-L"])
    return "" if said.startswith("GPU ") else f"no /dev/nvidia0, and nvidia-smi -L says: {said or 'nothing'}"


def describe_machine(python: str, env: dict[str, str]) -> dict[str, str]:
    """Return what a reader of the report must know of the machine, by name, in order.

    Args:
        python: the interpreter that runs the tests.
        env: in which it runs them.
    """
    found = {"kernel": platform.release(), "cores": str(len(os.sched_getaffinity(0)))}
    found["user"] = "root" if os.geteuid() == 0 else "not root"
    if shutil.which("nvidia-smi"):
        row = _first_line(["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"])
        values = [value.strip() for value in row.split(",")]
        names = ("GPU", "driver", "memory", "compute mode", "MIG mode", "persistence mode")
        found |= dict(zip(names, values, strict=True)) if len(values) == len(names) else {"nvidia-smi": row}
    said = _first_line([python, "-c", _VERSIONS], env=env, deadline_s=120)
    try:
        found |= json.loads(said)
    except ValueError:
        found["Python"] = f"{python} does not answer: {said}"
    return found


def _first_line(command: Sequence[str], *, env: dict[str, str] | None = None, deadline_s: float = DEADLINE_S) -> str:
    """What a command prints first; its error, where it prints nothing."""
    try:
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=deadline_s, check=False)
    except (OSError, subprocess.SubprocessError) as exc:
        return str(exc)
    return ((ran.stdout.strip() or ran.stderr.strip()).splitlines() or [""])[0].strip()
