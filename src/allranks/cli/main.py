"""The `allranks` command: its verbs, and the exit code of each error. Verbs are imported when called; torch never."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from allranks import __version__
from allranks.cli.std_streams import has_reader, secure_streams
from allranks.cli.verb_groups import VerbGroup
from allranks.model.errors import AllranksError, Exit, StoppedBySignal

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# Order matters: as `allranks --help` lists them.
VERBS = {
    "run": ("allranks.cli.run", "run", "Start a script on all ranks, on this machine or in a SLURM step."),
    "horovod": (
        "allranks.cli.horovod",
        "horovod",
        "Run elastic Horovod in a SLURM job, and explain its pauses.",
    ),
    "check": ("allranks.cli.check", "check", "Check nodes and the network between them before a job needs them."),
    "bench": (
        "allranks.cli.bench",
        "bench",
        "Measure the network between nodes and collectives over it; name the slow link.",
    ),
    "advise": (
        "allranks.cli.advise",
        "advise",
        "Predict what makes a training step faster on this network, and what it costs.",
    ),
    "init": ("allranks.cli.init", "init", "Examine the cluster and write cluster.toml, with a reason for each value."),
    "render": ("allranks.cli.jobs", "render", "Print the batch script that submit would pass to SLURM."),
    "submit": ("allranks.cli.jobs", "submit", "Check a script, submit it to SLURM, and print how to follow it."),
    "status": (
        "allranks.cli.follow",
        "status",
        "Print the state of jobs: why they wait, where they run, how they ended.",
    ),
    "logs": ("allranks.cli.follow", "logs", "Print the output of a job; follow it with -f."),
    "cancel": ("allranks.cli.follow", "cancel", "Cancel jobs."),
    "list": ("allranks.cli.follow", "list_own", "List your pending and running jobs, and the newest runs."),
    "clean": ("allranks.cli.clean", "clean", "Delete old runs, after a look at what would go."),
    "top": ("allranks.cli.top", "top", "Watch a running job: what every rank and node does, the worst first."),
    "watch": (
        "allranks.cli.watch",
        "watch",
        "Find out what is wrong with a job that runs now, whoever started it.",
    ),
    "stack": ("allranks.cli.stack", "stack", "Show where every rank of a running job is."),
    "why": ("allranks.cli.why", "why", "Explain a failed job from its logs, and name the culprit."),
    "diff": ("allranks.cli.diff", "diff", "Find the steps between which two runs part, and what differs there."),
    "report": ("allranks.cli.report", "report", "Write one HTML page about a run, to keep or to send."),
    "export": ("allranks.cli.export", "export", "Write the weights of a checkpoint to one file, for inference."),
    "env": ("allranks.cli.show", "show_env", "Print the environment that a worker would get, and why."),
    "explain": (
        "allranks.cli.explain",
        "explain",
        "Explain a cause: what it means, why it breaks the job, how to fix it.",
    ),
    "config": ("allranks.cli.show", "config", "Print the configuration from cluster.toml."),
    "lab": ("allranks.cli.lab", "lab", "Start a real SLURM cluster on this machine, for practice and tests."),
    "completion": ("allranks.cli.show", "completion", "Print the completion script of a shell."),
}


class _OutputError(Exception):
    """What standard output does not take, as an error that click does not turn into exit code 1."""


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.filename is not None or exc.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise _OutputError(exc.errno) from exc


class _LazyGroup(VerbGroup):
    """Verbs that are imported when called, because every agent loads this from a network file system."""

    def make_context(self, *arguments: Any, **named: Any) -> click.Context:
        """Read the words, and print the help."""
        with _writing():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb."""
        with _writing():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, name, _ = VERBS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the verbs without importing them, or the options of `allranks` itself."""
        from click.shell_completion import CompletionItem

        verbs = [CompletionItem(name, help=text) for name, (_, _, text) in VERBS.items() if name.startswith(incomplete)]
        return verbs or click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in VERBS.items()])


@click.command(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 success, 1 your code failed, 2 usage or configuration error, 3 bench, check, diff, stack, "
    "status, watch or why could not tell, 75 a node is at fault, 78 the cluster or its configuration is at fault, "
    "124 a rank hung, 128 + N a worker was killed by signal N.",
)
@click.version_option(__version__, prog_name="allranks", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Launch distributed PyTorch training, and find the rank, node or link that breaks it.

    \b
    allranks run --nproc-per-node 6 train.py        six ranks on this machine
    allranks submit --nodes 6 train.py              six nodes, through SLURM
    allranks env --explain                          every value that would be set, and why
    """
    if {"FORCE_COLOR", "CLICOLOR_FORCE"} & os.environ.keys():
        from allranks.report.text import is_colour_forced

        ctx.color = is_colour_forced(os.environ) or None  # click takes colors out of what goes to no terminal


def main() -> None:
    """Run the command line; the process ends here."""
    if sys.argv[1:2] == ["why"] and "--epilog" in sys.argv:
        _end_as_epilog()
    secure_streams()
    try:
        sys.exit(cli.main(standalone_mode=False, prog_name="allranks") or Exit.OK)
    except StoppedBySignal as exc:
        sys.exit(exc.exit_code)
    except AllranksError as exc:
        if _is_first_to_say(exc):
            cause = f" ({exc.finding.cause})" if exc.finding else ""
            _print_error(f"{_say_variables(_go_on_in_lab(str(exc)))}{cause}", exc.more)
        sys.exit(exc.exit_code)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.exceptions.Exit as exc:
        sys.exit(exc.exit_code)
    except click.UsageError as exc:
        hint = f"; see {exc.ctx.command_path} --help" if exc.ctx else ""
        _print_error(f"{_say_variables(_one_line(_message_of(exc)))}{hint}")
        sys.exit(Exit.USAGE)
    except click.ClickException as exc:
        _print_error(_one_line(exc.format_message()))
        sys.exit(Exit.USAGE)
    except FileNotFoundError:
        from allranks.report.rundir import this_directory

        if this_directory():
            raise
        print("error: the current directory is gone: removed, or unmounted; cd to another one", file=sys.stderr)
        sys.exit(Exit.USAGE)
    except _OutputError as exc:
        number = exc.args[0]
        if number == errno.EPIPE and has_reader(1):  # it was another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what Python still holds is written when the interpreter ends
        if number == errno.EPIPE:  # the reader has all that it wanted, as after `| head`
            sys.exit(Exit.OK)
        _print_error(f"the output cannot be written: {os.strerror(number).lower()}")
        sys.exit(Exit.UNKNOWN)
    except (OSError, RuntimeError) as exc:
        from allranks.host.limits import describe_shortage

        shortage = describe_shortage(exc)
        if shortage is None:
            raise
        _print_error(shortage)
        sys.exit(Exit.SETUP)


def _end_as_epilog() -> NoReturn:
    """Run the command line, and end with 0 also for a wrong option: SLURM drains a node whose epilog fails."""
    try:
        cli.main(standalone_mode=False, prog_name="allranks")
    except BaseException as exc:
        with contextlib.suppress(BaseException):
            print(f"error: {exc}", file=sys.stderr, flush=True)
    os._exit(Exit.OK)  # closing its streams could fail, too


def _print_error(text: str, more: Sequence[str] = ()) -> None:
    """Print one line, whatever file or name it quotes, without secrets; and the lines below it."""
    from allranks.report.mask import mask_secrets
    from allranks.report.text import one_line, printable

    print(
        f"error: {one_line(mask_secrets(text))}",
        *(printable(mask_secrets(line)) for line in more),
        sep="\n",
        file=sys.stderr,
    )


def _is_first_to_say(exc: AllranksError) -> bool:
    """Whether this process prints the error; if a whole step was started wrongly, only task 0 does."""
    from allranks.model.contradiction import NestedStartError

    return not isinstance(exc, NestedStartError) or os.environ.get("SLURM_PROCID", "0") == "0"


def _go_on_in_lab(message: str) -> str:
    """Return the message; where SLURM is missing and a lab is up on this machine, with the command that works."""
    from allranks.host.slurm_command import CURE

    if CURE not in message:
        return message
    from allranks.cli.context import command_in_lab

    command = command_in_lab(sys.argv[1:])
    return message.replace(CURE, f"a lab is up here: {command}") if command else message


def _message_of(exc: click.UsageError) -> str:
    """What click says, with the nearest option alone: it also suggests other spellings and far ones."""
    if isinstance(exc, click.NoSuchOption):
        longer = sorted(
            possibility for possibility in exc.possibilities or () if possibility.startswith(exc.option_name)
        )
        nearest = next(iter(longer or exc.possibilities or ()), None)
        return f"no such option {exc.option_name!r}" + (f" (did you mean {nearest!r}?)" if nearest else "")
    *_, flag, word = "", *sys.argv
    options = [name for parameter in exc.ctx.command.params for name in parameter.opts] if exc.ctx else []
    if isinstance(exc, click.MissingParameter) and flag in options and word.endswith(".py"):
        return f"{exc.format_message().rstrip('.')}: {flag} took {word!r} as its value"
    return exc.format_message().replace("is not a valid integer range", "is not a whole number")


def _say_variables(message: str) -> str:
    """Return the message, and which options in it nobody typed, because torchrun's PET_ variables set them."""
    typed = {word.partition("=")[0].replace("_", "-") for word in sys.argv}
    for flag in sorted(set(re.findall("--[a-z-]+", message)) - typed):
        name = "PET_" + flag[2:].replace("-", "_").upper()
        message += f" ({flag} is from {name})" if os.environ.get(name) else ""
    return message


def _one_line(text: str) -> str:
    joined = " ".join(text.split())
    return joined[:1].lower() + joined[1:].rstrip(".")
