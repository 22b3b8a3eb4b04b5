"""What is the text of the batch script? Pure: options, command and environment in, text out.

    >>> print(render_sbatch(SbatchOptions(nodes="2"), ["allranks", "run", "my train.py"]).splitlines()[1])
    #SBATCH --nodes=2

The text comes from `templates/job.sh.j2`; users can override its blocks with their own template. Every value is quoted
for its reader: the shell, or sbatch, whose `#SBATCH` lines have their own rules.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from allranks.config.keys import SLURM_TIME
from allranks.model.errors import UsageError
from allranks.model.secret_names import is_secret_name
from allranks.report.mask import HIDDEN, mask_command

_TIME = "minutes, H:MM:SS, D-HH or UNLIMITED, for example 90, 2:00:00 or 1-12"
_SIZE = "a number with K, M, G or T, for example 64G"
_GPUS = "a number, or TYPE:NUMBER, for example 4 or a100:4"
FORMS = {
    "time": (rf"{SLURM_TIME}|-1|(?i:UNLIMITED|INFINITE)", _TIME),
    "nodes": (
        r"[1-9]\d*[kKmM]?(?:-[1-9]\d*[kKmM]?)?|[1-9]\d*(?:[-,:]\d+)+",
        "a number, or MIN-MAX, for example 6 or 4-6",
    ),
    "mem": (r"\d+(?:\.\d+)?(?:[KMGT]i?B?|[kmgt])?", _SIZE),
    "gpus": (r"(?:[^\s,:=]+:)?\d+(?:,(?:[^\s,:=]+:)?\d+)*", _GPUS),
    "gpus_per_node": (r"(?:[^\s,:=]+:)?\d+(?:,(?:[^\s,:=]+:)?\d+)*", _GPUS),
    "cpus_per_task": (r"[1-9]\d*", "a number of at least 1"),
    "array": (r"\d+(?:-\d+(?::\d+)?)?(?:,\d+(?:-\d+(?::\d+)?)?)*(?:%\d+)?", "task numbers, for example 0-9%2"),
    "signal": (r"(?:[RB]+:)?\w+(?:@\d+)?", "a signal and seconds before the time limit, for example USR1@120"),
    "open_mode": (r"append|truncate|a|t", "append or truncate"),
}
"""Options whose values can be told from wrong ones without SLURM: a regular expression, and what is expected."""
OPTION_LIMIT = 4000
"""Longest `#SBATCH` argument in characters; sbatch 22.05 copies it into a fixed buffer of 8 KiB without a check."""


def _option(help_text: str, metavar: str | None = None, default: Any = None, *, short: str = "") -> Any:
    return field(default=default, metadata={"help": help_text, "metavar": metavar, "short": short})


@dataclass(frozen=True, slots=True, kw_only=True)
class SbatchOptions:
    """Options of sbatch under its own names, in the order of the script; None leaves the choice to SLURM."""

    job_name: str | None = _option("Name of the job. [default: the script's]", "NAME", short="-J")
    nodes: str | None = _option("Number of nodes to allocate. [default: as --nnodes, else 1]", "N|MIN-MAX", short="-N")
    ntasks_per_node: int = _option("Agents per node, always 1; --nproc-per-node sets the ranks.", "1", 1)
    gpus: str | None = _option("GPUs of the whole job; SLURM distributes them.", "[TYPE:]N", short="-G")
    gpus_per_node: str | None = _option("GPUs per node.", "[TYPE:]N")
    cpus_per_task: int | None = _option("Cores per node, for all its ranks together.", "N", short="-c")
    mem: str | None = _option("Memory per node.", "SIZE[K|M|G|T]")
    gres: str | None = _option("Other resources per node.", "LIST")
    nodelist: str | None = _option("Use these nodes.", "HOSTLIST", short="-w")
    exclude: str | None = _option("Exclude these nodes.", "HOSTLIST", short="-x")
    constraint: str | None = _option("Features that each node must have.", "FEATURES")
    exclusive: bool = _option("Allow no other job on the nodes.", None, False)
    partition: str | None = _option("Partition. [default: cluster.toml]", "NAME", short="-p")
    time: str | None = _option("Time limit: minutes, H:MM:SS or D-HH. [default: cluster.toml]", "TIME", short="-t")
    account: str | None = _option("Account to charge.", "NAME", short="-A")
    qos: str | None = _option("Quality of service.", "NAME", short="-q")
    reservation: str | None = _option("Reservation.", "NAME")
    array: str | None = _option("Submit a job array.", "0-9%2")
    dependency: str | None = _option("Start only after other jobs, as sbatch defines.", "afterok:ID")
    begin: str | None = _option("Start no earlier than this.", "TIME")
    signal: str = _option(
        "Signal before the time limit; the job then saves and is requeued. [default: USR1@120]",
        "[B:]SIGNAL[@SECONDS]",
        "USR1@120",
    )
    requeue: bool = _option("Whether SLURM may requeue the job. [default: yes]", None, True)
    comment: str | None = _option("Comment for SLURM's records.", "TEXT")
    mail_type: str | None = _option("Events that send a mail.", "BEGIN,END,FAIL")
    mail_user: str | None = _option("Address for mails.", "ADDRESS")
    chdir: str | None = _option("Working directory. [default: this one]", "DIR")
    # The default needs no directory: SLURM creates none, and a job that cannot open its output fails without a message.
    output: str = _option("File of the job's output. [default: slurm-%j.out]", "FILE", "slurm-%j.out")
    error: str | None = _option("File of its standard error. [default: the output file]", "FILE")
    open_mode: str = _option(
        "Append to the output files after a requeue, or truncate them. [default: append]", "append|truncate", "append"
    )

    @property
    def handed_on(self) -> str:
        """Signal that only the batch script gets, `USR1` of `B:USR1@120`; empty if SLURM signals the ranks."""
        match = re.fullmatch(r"R*B[BR]*:(\w+)(?:@\d+)?", self.signal)
        return match[1] if match else ""


def render_sbatch(
    options: SbatchOptions,
    command: Sequence[str],
    *,
    more: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    log_dir: str | Path = "runs",
    template: Path | None = None,
) -> str:
    """Return the text of the batch script.

    Args:
        command: the agent's command, `allranks run ...`, as words.
        more: further options of sbatch, `--licenses=matlab:2`, each one word.
        log_dir: where run directories are; `command` says the same.
        env: variables for the ranks; not for secrets, because the script contains the values.
    Raises:
        UsageError: a value cannot be written into a script, or the template is wrong.
    """
    import jinja2  # importing jinja2 takes 80 ms, which only these verbs need

    environment = jinja2.Environment(  # no autoescape: this is shell code, and every value goes through `quote`
        loader=jinja2.PrefixLoader({"allranks": jinja2.PackageLoader("allranks.launch.batch")}),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quote"] = shlex.quote
    ours = '{% extends "allranks/job.sh.j2" %}'
    try:
        text = environment.from_string(template.read_text() if template else ours).render(
            directives=[*_directives(options), "--no-kill", *map(_more_option, more)],
            command=list(command),
            env=dict(env or {}),
            log_dir=str(log_dir),
            handed_on=options.handed_on,
        )
    except jinja2.TemplateNotFound as exc:  # also an OSError
        raise UsageError(f"{template}: no template {exc.name!r}; expected {ours}") from exc
    except jinja2.TemplateError as exc:
        line = f":{exc.lineno}" if isinstance(exc, jinja2.TemplateSyntaxError) else ""
        raise UsageError(f"{template}{line}: {exc.message}") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"{template}: cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    return text.rstrip("\n") + "\n"


def _directives(options: SbatchOptions) -> Iterator[str]:
    if options.ntasks_per_node != 1:
        raise UsageError(
            f"--ntasks-per-node {options.ntasks_per_node}: allranks starts one agent per node, which starts the ranks; "
            f"use --nproc-per-node {options.ntasks_per_node}, and --cpus-per-task for the cores of all ranks together"
        )
    for option in fields(options):
        flag, value = "--" + option.name.replace("_", "-"), getattr(options, option.name)
        if value is True:
            yield flag
        elif option.name == "requeue":
            yield "--no-requeue"
        elif value is not None and value is not False:
            _refuse_misspelled(option.name, flag, str(value))
            yield f"{flag}={quote_for_sbatch(flag, str(value))}"


def _refuse_misspelled(name: str, flag: str, value: str) -> None:
    pattern, expected = FORMS.get(name, (".*", ""))
    if not re.fullmatch(pattern, value.strip(), re.DOTALL):
        raise UsageError(f"{flag} {value!r}: expected {expected}")


def quote_for_sbatch(flag: str, value: str) -> str:
    r"""Quote a value for a `#SBATCH` line: between double quotes, with `\` before `"` and `\`.

    >>> quote_for_sbatch("--comment", 'two "words" # and more')
    '"two \\"words\\" # and more"'

    Source: `_get_argument` in slurm 22.05, src/sbatch/opt.c: both quotes group, `\` escapes everywhere, `#` ends.

    Raises:
        UsageError: it is empty, too long, or would end the line.
    """
    if not value.strip():
        raise UsageError(f"{flag}: expected a value, got an empty text")
    if odd := next((c for c in value if not c.isprintable()), None):
        raise UsageError(f"{flag} {value[:80]!r}: an #SBATCH line cannot contain {odd!r}")
    if len(value) > OPTION_LIMIT:
        raise UsageError(f"{flag}: {len(value)} characters; expected at most {OPTION_LIMIT}")
    if re.fullmatch(r"[A-Za-z0-9_./:,=%@+&|*()\[\]^~-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _more_option(text: str) -> str:
    match = re.fullmatch(r"(--[a-z][a-z0-9-]*)(?:=(.*))?", text, re.DOTALL)
    if match is None:
        raise UsageError(f"--sbatch-option {text!r}: expected an option of sbatch, for example --licenses=matlab:2")
    flag, value = match[1], match[2]
    if flag[2:].replace("-", "_") in (*(option.name for option in fields(SbatchOptions)), "no_requeue"):
        raise UsageError(f"--sbatch-option {flag}: give {flag} directly, without --sbatch-option")
    if flag in ("--export", "--export-file", "--get-user-env"):
        raise UsageError(f"--sbatch-option {flag}: set the job's variables with --env NAME or --env NAME=VALUE instead")
    if flag in ("--wrap", "--parsable", "--test-only", "--quiet", "--wait", "--ntasks", "--uid", "--gid"):
        raise UsageError(f"--sbatch-option {flag}: conflicts with the way allranks submits jobs")
    return flag if value is None else f"{flag}={quote_for_sbatch(flag, value)}"


# --- Environment ------------------------------------------------------------------------------------------------------


def parse_env(words: Sequence[str], environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Read the values of `--env`.

    Returns:
        The variables that are written into the script (`--env NAME=VALUE`), and the names of those that the job gets
        from the environment of the submission (`--env NAME`): the secrets.
    Raises:
        UsageError: not a name of a variable, the value of a secret, or a variable that is not set here.
    """
    values = dict(word.split("=", 1) for word in words if "=" in word)
    names = tuple(word for word in words if "=" not in word)
    for name in (*values, *names):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--env {name!r}: expected NAME=VALUE or NAME, the name of a variable")
        if name in names and name not in environ:
            raise UsageError(f"--env {name}: not set in this shell; export it first")
        if name in values and is_secret_name(name):
            raise UsageError(
                f"--env {name}=...: everybody could read the secret in the script; export {name} and give "
                f"--env {name}, which passes it by name"
            )
    return values, names


def refuse_secret_values(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuse words of the script that contain a secret's value: the shell has expanded `--token $HF_TOKEN`.

    Raises:
        UsageError: names the variable, and never its value.
    """
    for name, value in environ.items():
        if len(value) >= 8 and is_secret_name(name) and any(value in word for word in words):
            raise UsageError(
                f"an argument contains the value of {name}, and everybody could read it in the script; let the "
                f"program read the variable, and give --env {name}, which passes it by name"
            )


def name_secrets(command: Sequence[str]) -> list[str]:
    """Return which arguments of the script's command look like secrets, by their names; their values stay in it.

    >>> name_secrets(["run", "train.py", "--hf-token", "abc", "hub.password=abc", "--lr", "3"])
    ['--hf-token', 'hub.password']
    """
    masked = mask_command(command)
    changed = [at for at, word in enumerate(command) if word != masked[at]]
    flags = (command[at - 1] if masked[at] == HIDDEN and at else masked[at].partition("=")[0] for at in changed)
    return [
        *dict.fromkeys(flag if re.fullmatch(r"[-+]*[A-Za-z][\w.-]{0,40}", flag) else "an argument" for flag in flags)
    ]


_KEPT = frozenset({
    "HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "LIBRARY_PATH",
    "LD_PRELOAD", "VIRTUAL_ENV", "CUDA_HOME", "CUDA_PATH", "CUDA_DEVICE_ORDER", "MODULEPATH", "MODULESHOME",
    "LOADEDMODULES", "_LMFILES_", "BASH_ENV", "XDG_CACHE_HOME", "SLURM_CONF", "ALLRANKS_CLUSTER",
    "ALLRANKS_HOOK",
})  # fmt: skip
_KEPT_PREFIXES = (
    "LC_", "CONDA_", "LMOD_", "BASH_FUNC_", "SBATCH_", "PYTHON", "TORCH_", "PYTORCH_", "TRITON_", "NCCL_", "GLOO_",
    "UCX_", "FI_", "OMP_", "MKL_", "KMP_", "HF_", "WANDB_",
)  # fmt: skip
_FLAG_VARIABLES = {"time": "TIMELIMIT", "mem": "MEM_PER_NODE", "array": "ARRAY_INX"}
# These change what we rely on: the environment, the format of the answer, whether sbatch waits for the job.
_NEVER = frozenset({"SBATCH_EXPORT", "SBATCH_GET_USER_ENV", "SBATCH_WAIT", "SBATCH_DEBUG", "SBATCH_NO_KILL"})


def submission_env(
    environ: Mapping[str, str], names: Sequence[str], *, said: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Return the environment for sbatch and the job, and the names of the secrets that are not passed.

    sbatch passes all of its environment to the job, and into files of the controller. So it gets a short one: the
    paths of programs and libraries, and settings of the libraries that the job uses; never those of an outer job.

    Args:
        names: further variables for the job, also secrets.
        said: fields of SbatchOptions from the command line; SBATCH_ variables would override the script.
    """
    overruled = {f"SBATCH_{_FLAG_VARIABLES.get(name, name.upper())}" for name in said}
    overruled |= {"SBATCH_NO_REQUEUE", "SBATCH_REQUEUE"} if "requeue" in said else set()
    withheld = sorted(name for name in environ if is_secret_name(name) and name not in names)
    usual = {name for name in environ if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
    kept = usual.difference(_NEVER, overruled, withheld).union(names)
    return {name: value for name, value in environ.items() if name in kept}, withheld
