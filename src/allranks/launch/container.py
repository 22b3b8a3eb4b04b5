"""Workers in containers: the agent stays on the host and passes every variable into the container by name.

    allranks run --container image.sif train.py        apptainer exec --bind ... image.sif python3 train.py

A container may have been told to forget the environment, and some site hooks preset RANK and WORLD_SIZE on their own.
So every variable that allranks sets is passed explicitly: as APPTAINERENV_NAME to apptainer and singularity (they
split `--env` at commas), as `--env NAME` to enroot (it takes the values from its environment). The hook's directory
is mounted where it is on the host. Whether a runtime keeps inherited sockets is its own business, so in a container
rank 0 binds the store's port itself.

Source: apptainer 1.3 user guide, "Environment and Metadata"; enroot 3.5 doc/cmd/start.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from allranks.model.errors import SetupError

RUNTIMES = ("apptainer", "singularity", "enroot")
"""Order matters: the first one on PATH is taken where none is named."""
PYTHON = "python3"
"""The image's own; the host's may not be there."""


def find_runtime(wanted: str | None) -> str:
    """Return the runtime to use, by name.

    Raises:
        SetupError: it is not on PATH.
    """
    for runtime in (wanted,) if wanted else RUNTIMES:
        if shutil.which(runtime):
            return runtime
    names = wanted or ", ".join(RUNTIMES)
    raise SetupError(
        f"--container: {names} not found on PATH; load its module, or choose another with --container-runtime"
    )


def wrap_command(
    runtime: str,
    image: str,
    command: Sequence[str],
    *,
    names: Sequence[str],
    hook_root: Path,
    cwd: Path,
    has_gpus: bool,
) -> list[str]:
    """Return the command that runs a worker in the image.

    Args:
        command: the worker's, as it is inside.
        names: variables to hand in.
        hook_root: directory that is mounted where it is, read-only.
        cwd: working directory, the same inside; mounted, too.
    """
    if runtime == "enroot":
        # NVIDIA's hook of enroot mounts the driver by itself.
        variables = [word for name in names for word in ("--env", name)]
        mounts = ["--mount", f"{hook_root}:{hook_root}", "--mount", f"{cwd}:{cwd}"]
        return ["enroot", "start", *variables, *mounts, image, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *command]
    gpus = ["--nv"] if has_gpus else []
    binds = ["--bind", f"{hook_root}:{hook_root}:ro", "--bind", str(cwd), "--pwd", str(cwd)]
    return [runtime, "exec", *gpus, *binds, image, *command]


def handed_in(runtime: str, values: Mapping[str, str]) -> dict[str, str]:
    """Return what the runtime itself needs in its environment, to pass `values` on whatever else it forgets."""
    prefix = {"apptainer": "APPTAINERENV_", "singularity": "SINGULARITYENV_"}.get(runtime)
    return dict(values) if prefix is None else dict(values) | {prefix + name: value for name, value in values.items()}
