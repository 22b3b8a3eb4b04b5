"""Runs one command of SLURM: with a deadline, without variables that filter its output, with SLURM's own error.

Source: SQUEUE_STATES and its like, and SLURM_TIME_FORMAT, in squeue(1), scontrol(1), sinfo(1).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from allranks.model.errors import SetupError, UsageError

DEADLINE_S = 60.0
"""A busy controller answers late; its clients give up themselves after some tries of MessageTimeout (10 s) each."""

_WORDS_OF_USAGE = (
    "invalid partition", "invalid account", "invalid qos", "invalid node name", "invalid feature", "invalid wckey",
    "invalid job array", "invalid constraint", "invalid generic resource", "invalid trackable resource",
    "reservation is invalid", "requested time limit is invalid", "unrecognized option", "ambiguous option",
    "requires an argument", "doesn't allow an argument", "dependency problem", "specification", "bad value",
)  # fmt: skip

_WORDS_OF_NO_CLUSTER = (
    "dns srv lookup failed", "could not establish a configuration source", "unable to process configuration file",
)  # fmt: skip
CURE = "load the slurm module, or log in to a login node of the cluster"
"""How errors of a machine without a cluster end; the command line knows better where a lab is up."""


class NoSlurmError(SetupError):
    """This machine belongs to no SLURM cluster: no commands, or no slurm.conf."""


def run_slurm(
    tool: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    deadline_s: float = DEADLINE_S,
) -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's commands and return what it said, whatever its exit code.

    Args:
        tool: its name, searched on PATH.
        arguments: of the command.
        env: its environment; None for the own one, without what would filter its answer.
        stdin: what it reads.
        deadline_s: seconds until it is killed.
    Raises:
        SetupError: it is not there, has no cluster, or does not answer.
    """
    if env is None:
        # What the user set for their own view (SQUEUE_STATES, SLURM_TIME_FORMAT=relative) must not filter ours.
        own = ("SQUEUE_", "SACCT_", "SCONTROL_", "SINFO_", "SCANCEL_", "SLURM_TIME_FORMAT")
        env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    require_slurm(tool, env)
    try:
        answer = subprocess.run(
            [tool, *arguments],
            env=dict(env),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
        )
    except OSError as exc:
        raise SetupError(f"{tool}: {exc.strerror}") from exc
    except subprocess.TimeoutExpired as exc:
        raise SetupError(f"{tool}: SLURM did not answer within {deadline_s:.0f} s; check that slurmctld is up") from exc
    if answer.returncode != 0:
        refuse_without_cluster(tool, answer.stderr)
    return answer


def require_slurm(tool: str, env: Mapping[str, str]) -> None:
    """Check what one of SLURM's commands needs on this machine.

    Raises:
        NoSlurmError: the command is not on PATH.
        SetupError: the file that SLURM_CONF names is not there.
    """
    if shutil.which(tool, path=env.get("PATH", os.defpath)) is None:
        raise NoSlurmError(f"{tool}: not found on this machine; SLURM's commands are needed: {CURE}")
    conf = env.get("SLURM_CONF")
    if conf and not Path(conf).exists():  # SLURM's own commands would look for it for 60 s
        raise SetupError(f"{tool}: SLURM_CONF={conf}: no such file; SLURM's commands need it: {CURE}")


def refuse_without_cluster(tool: str, words: str) -> None:
    """Check what a command that failed has said.

    Raises:
        NoSlurmError: it found no configuration, so this machine belongs to no cluster.
    """
    if any(part in words.lower() for part in _WORDS_OF_NO_CLUSTER):
        raise NoSlurmError(f"{tool}: no slurm.conf on this machine; SLURM's commands need it: {CURE}")


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Hold signals back, from this thread and from the commands that it runs meanwhile.

    SLURM signals everything in a job that it ends: the command that asked for it would be ended by its own success,
    and the next one with it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def words_of(answer: subprocess.CompletedProcess[str]) -> str:
    """SLURM's own words, on one line."""
    lines = [
        re.sub(r"^(?:\w+: )?(?:error: |fatal: )?", "", line.strip()).rstrip(".")
        for line in (answer.stderr or answer.stdout).splitlines()
        if line.strip() and not line.startswith('Try "')
    ]
    said = "; ".join(dict.fromkeys(lines)) or f"exit code {answer.returncode} without a message"
    return "".join(c if c.isprintable() else " " for c in said)[:500]


def refusal_of(tool: str, words: str) -> SetupError | UsageError:
    """Return the error for a command that SLURM refused: a wrong value, or a set-up that cannot do it."""
    is_usage = any(part in words.lower() for part in _WORDS_OF_USAGE)
    return (UsageError if is_usage else SetupError)(f"{tool}: {words}")
