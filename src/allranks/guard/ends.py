"""Who failed first: from the ends of all workers to one verdict, as far as ends alone can tell. Pure.

A group fails all at once: one rank breaks, and the others die of the lost connection, sometimes sooner than the one
that broke (its `finally` closes the group, and its interpreter takes its time to leave). So the ends are divided in
primary ones (an exception of the user's, an exit code, a signal) and secondary ones (a lost connection, a collective
that waited in vain), and the earliest primary end is the culprit, whenever it was noticed.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable

from allranks.causes.catalogue import find_cause
from allranks.guard.judged import Judged
from allranks.guard.scene import Scene
from allranks.model.errors import Exit, UsageError, exit_for_signal
from allranks.model.finding import Confidence, Evidence, Finding
from allranks.model.hostlist import expand_hosts
from allranks.model.raised import find_fatal_place, find_origin
from allranks.wire.protocol import WorkerEnd

SETTLE_S = 1.5
"""How long the last victim's failure waits for the culprit's: 0.02 to 0.46 s were seen between them with Gloo."""
MAX_SETTLE_S = 4.0
"""How long the first one's does: victims end one after the other where cores are few."""

_LOST = r"Connection (?:closed by (?:remote )?peer|reset by peer|refused)|Broken pipe"
_SECONDARY = re.compile(
    # Any client of the script's own says these, too: of torch they are where its name stands before them.
    rf"(?:gloo|pair\.cc|c10d|Dist[A-Z]\w+Error|NCCL|TCPStore|SocketImpl|socket[A-Z]\w+)\b.*(?:{_LOST})"
    rf"|^RuntimeError: (?:{_LOST})$"
    r"|does not count, a collective failed"  # state.resumed.track
    r"|Application timeout caused pair closure"
    r"|Timed out waiting \d+ms for (?:recv|send) operation"
    r"|wait timeout after \d+ms"
    r"|init_process_group waited"
    r"|client socket has timed out"
    r"|recvValue failed|sendBytes failed|Failed to recv, got 0 bytes"
    r"|connectFullMesh failed"
    r"|ncclRemoteError|NCCL communicator was aborted|[Ww]atchdog caught collective operation timeout",
    re.MULTILINE,
)
"""What torch says when another rank is the reason. Source: texts of torch 2.13 with Gloo, measured; NCCL's from
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp 2.13."""

_SIZE = re.compile(r"EnforceNotMet|Received data size doesn't match expected size")
"""Gloo's words when more bytes came than were asked for, before it aborts: whoever was wrong, this rank only noticed.
Source: gloo/transport/tcp/pair.cc as in torch 2.13; measured."""

_NETWORK = re.compile(rf"{_LOST}|Connection timed out|Read timed out|Temporary failure in name resolution")
"""What a client of the script's own says when another machine failed it: the same code may well succeed next time."""

_LOADER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>\d[\d, ]*)\) "
    r"(?:is killed by signal: (?P<signal>\w[\w ]*)|exited unexpectedly(?! with exit code))"
)
"""Source: torch 2.13, torch/csrc/DataLoader.cpp and torch/utils/data/dataloader.py; measured."""

_NAMED = re.compile(r"allranks: (AR\d{3} [a-z0-9-]+): (.+)", re.DOTALL)
"""What join.group says of a cause of the catalogue."""

_NO_TORCH = "ModuleNotFoundError: No module named 'torch'"
_UNPARSED = re.compile(r'  File "[^"]+", line \d+\n')
"""How the traceback of a script that Python cannot parse begins: no frame of it has run."""


def is_secondary(end: WorkerEnd) -> bool:
    """Whether a worker only says that another one was lost."""
    # torch's NCCL watchdog ends a victim by abort(); any other signal is its own story.
    if end.could_not_start or (end.exit_code < 0 and end.exit_code != -signal.SIGABRT):
        return False
    if is_abort_for_size(end):
        return True
    return bool(_SECONDARY.search(end.message or end.stderr_tail or ""))


def is_abort_for_size(end: WorkerEnd) -> bool:
    """Whether Gloo aborted a worker because ranks are in different collectives; it may be an innocent one."""
    return end.exit_code == -signal.SIGABRT and bool(_SIZE.search(end.stderr_tail or end.message or ""))


def is_own_doing(end: WorkerEnd) -> bool:
    """Whether a worker ended by an error of the user's code, which another start would meet again."""
    is_bad_luck = loader_death(end) is not None or _NETWORK.search(end.message or "")
    return end.could_not_start or (end.exit_code > 0 and not is_bad_luck)


def loader_death(end: WorkerEnd) -> tuple[str, int] | None:
    """Return the pids of the data loader's processes whose death ended a worker, and the signal; 0: not known."""
    if not (last := _LOADER.search(end.message or end.stderr_tail or "")):
        return None
    deaths = [last, *_LOADER.finditer(end.traceback or end.stderr_tail or "")]
    names = {signal.strsignal(signum): int(signum) for signum in signal.valid_signals()}
    return last["pids"], max(names.get((death["signal"] or "").strip(), 0) for death in deaths)


def should_stop(scene: Scene, now_s: float) -> bool:
    """Whether the rest is to be ended now. One failed worker ends the job; a worker that ends with 0 does not."""
    if len(scene.ended) == scene.num_ranks:
        return True
    if not scene.ends:
        return False
    heard_s = [each_s for _, each_s in scene.ends.values()]
    has_settled = now_s - max(heard_s) >= SETTLE_S or now_s - min(heard_s) >= MAX_SETTLE_S
    return has_settled or find_primary(scene) is not None


def find_primary(scene: Scene) -> WorkerEnd | None:
    """Return the end of the worker that broke first by itself."""
    return _earliest(scene, lambda end: not is_secondary(end))


def find_aborted(scene: Scene) -> WorkerEnd | None:
    """Return the end of the first worker that Gloo aborted for the size of what came."""
    return _earliest(scene, is_abort_for_size)


def judge_ends(scene: Scene) -> Judged:
    """Return what the ends come to: one culprit, the others are its victims."""
    if (end := find_primary(scene)) is not None:
        cause_id, message, fix = _describe(end)
        finding = scene.fault(cause_id, message, end.rank, evidence=_evidence(end), fix=fix or "")
        is_retryable = not is_own_doing(end)
        return Judged(findings=(finding,), exit_code=exit_code_of(end), ranks=finding.ranks, is_retryable=is_retryable)
    if (first := _earliest(scene)) is None:
        return Judged(findings=(), exit_code=Exit.UNKNOWN, is_final=False)
    finding = _name_whom_victims_lost(scene, first)
    return Judged(findings=(finding,), exit_code=Exit.USER_CODE, ranks=finding.ranks, is_final=False)


def _earliest(scene: Scene, is_it: Callable[[WorkerEnd], bool] = lambda _: True) -> WorkerEnd | None:
    return min((end for end, _ in scene.ends.values() if is_it(end)), key=lambda end: end.time_s, default=None)


def _name_whom_victims_lost(scene: Scene, first: WorkerEnd) -> Finding:
    if absent := [rank for rank in _ranks_waited_for(first) if rank < scene.membership.world_size]:
        words = (first.message or "").partition("init_process_group waited ")[2].partition("; look at")[0]
        what = "it never reached init_process_group, although its process ran"
        if absent[0] in scene.left:
            what = "it exited with code 0 before it reached init_process_group"
        seen = [Evidence(seen=f"rank {first.rank} waited {words}", source=first.stderr_path)]
        fix = "find out what it does before that call: read its .out and .err in the run directory"
        return scene.fault("AR401", what, *absent, node=scene.node_of(absent[0]).name, evidence=seen, fix=fix)
    rank, left_s = min(scene.left.items(), key=lambda item: item[1], default=(-1, first.time_s))
    if left_s < first.time_s and scene.have_all_told(first.time_s):  # else it may have lost one that is silent
        what = f"it exited with code 0, {first.time_s - left_s:.1f} s before rank {first.rank} lost its connection"
        fix = "every rank must run the same number of steps: check how the data is divided"
        return scene.fault("AR407", what, rank, evidence=_evidence(first), confidence=Confidence.LIKELY, fix=fix)
    what = "it was the first rank to lose a connection; no rank reports why"
    return scene.fault("AR490", what, first.rank, evidence=_evidence(first), confidence=Confidence.UNDECIDED, fix="")


def _ranks_waited_for(end: WorkerEnd) -> tuple[int, ...]:
    """The ranks that join.group named as missing."""
    waited = re.search(r"init_process_group waited \d+ s for ([^;]+);", end.message or "")
    runs = re.findall(r"ranks? ([\d,-]+) \(", waited[1] if waited else "")
    with contextlib.suppress(UsageError):
        return tuple(int(name[1:]) for run in runs for name in expand_hosts(f"r[{run}]"))
    return ()


def _describe(end: WorkerEnd) -> tuple[str, str, str | None]:
    """Cause, one line, and what to do about it."""
    if end.could_not_start:
        return "AR401", f"could not be started: {end.message}", None
    death = loader_death(end)
    if death is not None or end.exit_code < 0:
        pids, signum = death or ("", -end.exit_code)
        known = {int(each): f"{each.name} (signal {int(each)})" for each in signal.Signals}
        name = known.get(signum, f"signal {signum}")
        fixes: dict[int, str] = {
            signal.SIGKILL: f"on {end.node}: dmesg -T | grep -i 'killed process'; "
            "if that lists it, memory ran out: request more (--mem)",
            signal.SIGSEGV: "native code crashed in the innermost call of this stack: run that call alone, or with "
            "another version of its library"
            if end.traceback
            else "run again with PYTHONFAULTHANDLER=1: it prints where native code crashed",
            signal.SIGABRT: "read the last lines of its log: native code aborted",
            signal.SIGBUS: f"on {end.node}: df -h /dev/shm; if it is full, free it or make it larger",
        }
        how = f"killed by {name}, not by allranks"
        if pids:
            how = f"its DataLoader worker (pid {pids}) {f'was {how}' if signum else 'exited unexpectedly'}"
        elif place := find_fatal_place(end.traceback or ""):
            how += f" ({place})"
        return "AR407", how, fixes.get(signum)
    if (named := _NAMED.search(end.message or "")) is not None:
        with contextlib.suppress(UsageError):  # the user's own words
            return find_cause(named[1]).id, named[2].partition("\n")[0], None
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
        lingers = "" if end.lingers is None else f"; has not exited{f': {end.lingers}' if end.lingers else ''}"
        return "AR590", f"{first_line}{f' ({where})' if where else ''}{lingers}", fix
    return "AR590", f"ended with exit code {end.exit_code}", None


def _evidence(end: WorkerEnd) -> tuple[Evidence, ...]:
    seen = end.traceback or (end.stderr_tail if not end.could_not_start else None)
    if seen and _UNPARSED.match(seen):  # its last line is the message
        seen = seen.rstrip().rpartition("\n")[0]
    return (Evidence(seen=seen.rstrip(), source=end.stderr_path),) if seen else ()


def exit_code_of(end: WorkerEnd) -> int:
    """Return the job's exit code where this worker is the reason."""
    if end.could_not_start:
        return Exit.SETUP
    return exit_for_signal(-end.exit_code) if end.exit_code < 0 else Exit.USER_CODE
