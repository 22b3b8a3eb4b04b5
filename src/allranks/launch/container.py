"""Workers in containers: the agent stays on the host and passes every variable into the container by name.

    allranks run --container image.sif train.py        apptainer exec --bind ... image.sif python3 train.py

A container may have been told to forget the environment, and some site hooks preset RANK and WORLD_SIZE on their own.
So every variable that allranks sets is passed explicitly: as APPTAINERENV_NAME to apptainer and singularity (they
split `--env` at commas), as `--env NAME` to enroot (it takes the values from its environment). Whether a runtime keeps
inherited sockets is its own business, so in a container rank 0 binds the store's port itself.

Source: apptainer 1.3 user guide, "Environment and Metadata"; enroot 3.5 doc/cmd/start.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from allranks.launch.worker_environment import HOOK_PATH
from allranks.model.errors import SetupError

RUNTIMES = {"apptainer": "APPTAINERENV_", "singularity": "SINGULARITYENV_", "enroot": ""}
"""What stands before the names of variables that the runtime passes on. Order matters: the first one on PATH is taken
where none is named."""
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


def enter(
    runtime: str, image: str, command: Sequence[str], env: Mapping[str, str], *, names: Sequence[str], has_gpus: bool
) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs a worker's command in the image, and the environment of that command.

    The hook, what it loads and the working directory are mounted where they are; `names` are the variables to pass on.
    """
    hook_roots, cwd = (HOOK_PATH.parent, HOOK_PATH.parent.parent / "comm"), Path.cwd()
    if runtime == "enroot":
        # NVIDIA's hook of enroot mounts the driver by itself.
        variables = [word for name in names for word in ("--env", name)]
        mounts = [word for path in (*hook_roots, cwd) for word in ("--mount", f"{path}:{path}")]
        words = ["enroot", "start", *variables, *mounts, image, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *command]
        return words, dict(env)
    gpus = ["--nv"] if has_gpus else []
    binds = [word for path in hook_roots for word in ("--bind", f"{path}:{path}:ro")]
    binds += ["--bind", str(cwd), "--pwd", str(cwd)]
    passed_on = {RUNTIMES[runtime] + name: env[name] for name in names}
    return [runtime, "exec", *gpus, *binds, image, *command], {**env, **passed_on}
