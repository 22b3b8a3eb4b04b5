"""Report why a process cannot begin: in full once per node, and as one error with the right exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

from allranks.model.errors import AllranksError
from allranks.model.finding import Finding, Verdict
from allranks.model.world import World
from allranks.report.mask import mask_secrets
from allranks.report.rundir import RunDir
from allranks.report.text import Style, one_line, print_error, render_findings, say


class SessionError(AllranksError, SystemExit):
    """The session could not begin; the reason has been printed. Uncaught, it ends the process with `exit_code`.

    75: a node is at fault, excluding it helps. 78: the cluster or its setup. 2: the environment or the call.
    """

    def __init__(self, message: str, *, exit_code: int, findings: tuple[Finding, ...] = ()) -> None:
        super().__init__(message, finding=findings[0] if findings else None)
        self.exit_code = exit_code
        self.code = exit_code  # what the interpreter ends with
        self.findings = findings
        """Culprit first; the same on all ranks that the roll call reached."""


def pronounce(verdict: Verdict, run_dir: RunDir, world: World, *, node: str, is_speaker: bool) -> SessionError:
    """Write the verdict, print it unless another process prints it on this terminal, and return it as an error."""
    run_dir.attempt = verdict.attempt
    if is_speaker or world.local_rank == 0:
        run_dir.write_verdict(verdict, node=node)
    if is_speaker:
        run_dir.add_event("ended", exit_code=verdict.exit_code)
        print_findings(verdict.findings, after="\n")
        if lost := run_dir.last_files.close():
            say(lost)
    culprit = verdict.findings[0]
    return SessionError(
        f"{culprit.cause}: {culprit.node + ': ' if culprit.node else ''}{culprit.message}",
        exit_code=verdict.exit_code,
        findings=verdict.findings,
    )


def refuse(exc: AllranksError) -> SessionError:
    """Print why this process cannot begin, in full in one process per node, and return it as an error."""
    is_first = all(os.environ.get(name, "0") == "0" for name in ("SLURM_LOCALID", "LOCAL_RANK"))
    if exc.finding is not None and is_first:
        print_findings((exc.finding,), after="\n")
    else:
        text = str(exc).removeprefix("allranks: ")  # which an agent looks for
        cause = f"{exc.finding.cause}: " if exc.finding and exc.finding.cause not in text else ""
        print_error(f"error: {one_line(mask_secrets(f'{cause}{text}'))}")
    findings = (exc.finding,) if exc.finding else ()
    return SessionError(str(exc), exit_code=exc.exit_code, findings=findings)


def as_raised(exc: AllranksError) -> AllranksError:
    """Return what a script raises: the error itself where an agent reports it, else one that has been printed."""
    return exc if "ALLRANKS_AGENT_PID" in os.environ else refuse(exc)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Raise errors of the block as a script does."""
    try:
        yield
    except SystemExit:  # it has been printed
        raise
    except AllranksError as exc:
        if (raised := as_raised(exc)) is exc:
            raise
        raise raised from exc


def print_findings(findings: Sequence[Finding], *, after: str = "") -> None:
    """Print findings on standard error, if there are any, and this text after them."""
    if findings:
        print_error("\n" + render_findings(findings, Style.of(sys.stderr)) + after)
