"""What does the failure of one worker mean: its cause, a headline, evidence, and a fix? Pure."""

from __future__ import annotations

import contextlib
import re
import signal

from allranks.causes.book import find_cause
from allranks.causes.cause import Cause
from allranks.guard.faults import DEAD_RANK, MISSING_RANK, USER_CODE_ERROR
from allranks.guard.origin import CRASHES, killed_by
from allranks.model.errors import Exit, UsageError, exit_for_signal, name_signal
from allranks.model.finding import Evidence
from allranks.model.fix import ANYBODY, Reader
from allranks.model.raised import find_fatal_place, find_origin
from allranks.wire.protocol import WorkerEnd

_NETWORK = re.compile(
    r"Connection (?:closed by (?:remote )?peer|reset by peer|refused|timed out)|Broken pipe|Read timed out"
    r"|Temporary failure in name resolution"
)
"""What a client of the script's own says when another machine failed it: the same code may well succeed next time."""

_LOADER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>\d[\d, ]*)\) "
    r"(?:is killed by signal: (?P<signal>\w[\w ]*)|exited unexpectedly(?! with exit code))"
)
"""Source: torch 2.13, torch/csrc/DataLoader.cpp and torch/utils/data/dataloader.py; measured."""

_WARNING = re.compile(
    r"^(?:\[rank\d+\]:)?\[[WI]\d.*(?:\n|\Z)"  # of torch's own logger
    r"|^\S+:\d+: \w*Warning: .*(?:\n  .*)?(?:\n|\Z)"  # of Python, with the line of code
    r"|^allranks: .*(?:\n|\Z)",
    re.MULTILINE,
)
_CRASHED = re.compile(
    r"^(?:Fatal Python error: |terminate called |\S+: .*: Assertion `|\*\*\* .* \*\*\*: terminated"
    r"|double free or corruption|free\(\): |malloc\(\): |corrupted |munmap_chunk\(\): |realloc\(\): "
    r"|Unexpected bus error encountered in worker|.*(?:CUDA error|AddressSanitizer))",
    re.MULTILINE,
)
"""How the words begin with which a process ends itself. Source: glibc 2.36 (malloc, assert), libstdc++, Python's
faulthandler, torch 2.13."""

_INNERMOST = (
    "native code crashed in the innermost call of this stack: run that call alone, or with "
    "another version of its library"
)
_NAMED = re.compile(r"allranks: (AR\d{3} [a-z0-9-]+): (.+)", re.DOTALL)
"""What allranks raises in a worker where it knows the cause."""

_NO_TORCH = "ModuleNotFoundError: No module named 'torch'"
_NO_INPUT = ("EOFError: EOF when reading a line", "BdbQuit")  # input(), breakpoint()
_UNPARSED = re.compile(r'  File "[^"]+", line \d+\n')
"""How the traceback of a script that Python cannot parse begins: no frame of it has run."""


def is_own_doing(end: WorkerEnd) -> bool:
    """Whether a worker ended by an error of the user's code, which another start would meet again."""
    is_bad_luck = loader_death(end) is not None or _NETWORK.search(end.message or "")
    return end.could_not_start or not (killed_by(end) or is_bad_luck)


def loader_death(end: WorkerEnd) -> tuple[str, int] | None:
    """Return the pids of the data loader's processes whose death ended a worker, and the signal; 0: not known."""
    if not (last := _LOADER.search(end.message or end.stderr_tail or "")):
        return None
    deaths = [last, *_LOADER.finditer(end.traceback or end.stderr_tail or "")]
    names = {signal.strsignal(signum): int(signum) for signum in signal.valid_signals()}
    return last["pids"], max(names.get((death["signal"] or "").strip(), 0) for death in deaths)


def is_killed(end: WorkerEnd) -> bool:
    """Whether a SIGKILL ended a worker, or a process of its data loader, or may have: was that for want of memory?"""
    pids, signum = loader_death(end) or ("", killed_by(end))
    return signum == signal.SIGKILL or bool(pids and not signum)


def describe(end: WorkerEnd, *, reader: Reader = ANYBODY) -> tuple[str, str, str | None]:
    """Cause, one line, and what to do about it, for this reader."""
    if end.could_not_start:
        return MISSING_RANK, f"could not be started: {end.message}", None
    death = loader_death(end)
    if death is not None or killed_by(end):
        pids, signum = death or ("", killed_by(end))
        name = f"{name_signal(signum)} (signal {signum})" if signum in set(signal.Signals) else f"signal {signum}"
        cause, fix = find_cause(DEAD_RANK), None
        if signum == signal.SIGSEGV and end.traceback:
            fix = _INNERMOST
        elif name_signal(signum) in cause.by_signal:
            fix = cause.fix_of(signum).tell(reader, {"node": end.node})
        how = f"killed by {name}, not by allranks"
        if pids:
            how = f"its DataLoader worker (pid {pids}) {f'was {how}' if signum else 'exited unexpectedly'}"
        elif place := find_fatal_place(end.traceback or ""):
            how += f" ({place})"
        return DEAD_RANK, how, fix
    if (named := _named(end)) is not None:
        return named[0].id, named[1], None
    last_line = (end.stderr_tail or "").rpartition("\n")[2]
    if end.message or last_line == _NO_TORCH:  # without the hook (python -S, ALLRANKS_HOOK=0), only stderr has it
        told = find_origin(end.traceback or "")
        origin = told or find_origin(end.stderr_tail or "", is_one=False)
        where = origin and origin.place
        first_line = (end.message or last_line).strip().partition("\n")[0]
        if told is not None and not first_line.startswith(told.headline):  # another one handed it on
            first_line = told.headline
        fix = None
        if first_line == _NO_TORCH:
            fix = f"{end.python or 'python'} -m pip install torch: that interpreter runs the script and has no torch"
        elif first_line in _NO_INPUT and end.rank:
            fix = "only rank 0 reads standard input: ask there, and broadcast the answer"
        lingers = "" if end.lingers is None else f"; has not exited{f': {end.lingers}' if end.lingers else ''}"
        return USER_CODE_ERROR, f"{first_line}{f' ({where})' if where else ''}{lingers}", fix
    return USER_CODE_ERROR, f"ended with exit code {end.exit_code}", None


def _named(end: WorkerEnd) -> tuple[Cause, str] | None:
    """Return the cause that allranks' own words in a worker name, and what they say of it."""
    if (named := _NAMED.search(end.message or "")) is not None:
        with contextlib.suppress(UsageError):  # the user's own words
            return find_cause(named[1]), named[2].partition("\n")[0]
    return None


def find_evidence(end: WorkerEnd) -> tuple[Evidence, ...]:
    """What proves how a worker ended; warnings printed before do not, and nothing that it prints proves a SIGKILL."""
    seen = end.traceback if killed_by(end) in (0, *CRASHES) or loader_death(end) else None
    if seen and _UNPARSED.match(seen):  # its last line is the message
        seen = seen.rstrip().rpartition("\n")[0]
    if not seen and not end.could_not_start:
        seen = _last_words(end)
    return (Evidence(seen=seen.rstrip(), source=end.stderr_path),) if seen else ()


def _last_words(end: WorkerEnd) -> str:
    """Return the lines at the end of its stderr that say why it ended."""
    text = _WARNING.sub("", end.stderr_tail or "").strip("\n")
    if signum := killed_by(end):
        found = _CRASHED.search(text) if signum in CRASHES else None
        return text[found.start() :] if found else ""
    return text


def exit_code_of(end: WorkerEnd) -> int:
    """Return the job's exit code where this worker is the reason."""
    if end.could_not_start:
        return Exit.SETUP
    if killed_by(end):
        return exit_for_signal(killed_by(end))
    named = _named(end)
    return named[0].exit_code if named is not None else Exit.USER_CODE
