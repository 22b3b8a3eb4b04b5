"""SLURM's epilog: it starts the explanation of a job that has ended, and costs its node nothing.

    start(os.environ, to=Path("/var/log/allranks"), command=[sys.executable, "-m", "allranks.cli.why_epilog"])

A node is drained if its Epilog exits with another code than 0, or is stopped by PrologEpilogTimeout, and without that
timeout a job whose Epilog hangs stays COMPLETING. So `start` forks, and returns at once. What it leaves behind:

- The *watcher* is in a session of its own, without files, at a low priority on one core. It has the rights of
  the epilog (root), asks SLURM, writes the comment and the file, and never opens a file that the job's user names.
  SIGALRM ends it at LIFE_S, wherever it hangs, and at most SLOTS of them run on one machine.
- The *reader* is its child, with the rights of the job's user (setpriv), in the job's directory. It reads the logs,
  and prints what it has found (told.Explained). It is killed after EXPLAIN_S.

Problems go to syslog, since SLURM keeps no output of an epilog.

slurmd kills the process group of an epilog as soon as it has exited (seen with 22.05: what `setsid -f` had just forked
was killed before it had its session). So the caller waits here until its child has a session.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import signal
import socket
import syslog
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from allranks.files.folder import Folder, can_swap
from allranks.host.programs import run_command
from allranks.host.slurm import JobState, find_jobs, list_nodes
from allranks.host.slurm_command import NoSlurmError
from allranks.host.slurm_job import set_comment_in_accounting
from allranks.model.errors import AllranksError
from allranks.model.foreign import Unreadable, decode_json
from allranks.model.hostlist import expand_hosts, fold_hosts
from allranks.report.rundir import as_file_name
from allranks.why.fleet.job_end import encode_end
from allranks.why.fleet.told import Duty, Explained, choose_duty, end_of, is_well, may_comment

EXPLAIN_S = 240.0
"""Deadline for reading the logs: 2 GB take 2 s, and a file server that hangs takes for ever."""
COMPLETING_S = 60.0
"""How long the first node waits for SLURM to say how the job ended: it is COMPLETING until all epilogs have ended."""
STAND_IN_S = 600.0
"""How long the second node waits for that: until SLURM gives the first one up (SlurmdTimeout, 300 s by default)."""
LIFE_S = 1000
"""When SIGALRM ends a watcher: nothing in it takes so long, unless the file server or SLURM hangs."""
SLOTS = 8
"""Watchers on one machine; jobs that end while all are busy are not explained."""
SLOT = "allranks-epilog"
"""Name of an abstract socket, which is no file: the kernel keeps it as long as its process lives."""
NICENESS = 10
"""Of the watcher: a tenth of the time of a job that competes with it; with 19 it would be a seventieth."""
ASK_AGAIN_S = 1.0
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/opt/slurm/bin"
"""An epilog has no PATH. Source: SLURM's prolog and epilog guide."""


def start(env: Mapping[str, str], *, to: Path | None, command: Sequence[str], life_s: int = LIFE_S) -> str:
    """Start a watcher, if this node is to explain the job; returns at once, with a problem or an empty text.

    Args:
        env: the epilog's environment.
        to: file, or directory of one file per node, that gets a line; None: only the job's comment is set.
        command: the reader; the job's id is added.
        life_s: when SIGALRM ends the watcher.
    Raises:
        OSError: this machine can start no process.
    """
    duty = choose_duty(env)
    if not isinstance(duty, Duty):
        return duty or ""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return ""
    try:  # nothing may return into the frames of the caller: they belong to the epilog
        os.setsid()
        if os.fork() == 0:
            _become_watcher(life_s)
            watch(duty, to=to, command=command, env=env)
    except Exception as exc:
        _log(duty, f"{type(exc).__name__}: {exc}")
    finally:
        os._exit(0)


def _become_watcher(life_s: int) -> None:
    """Keep nothing of the epilog that could hold it up: SLURM waits until its output is closed."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, 1 << 20)
    os.chdir("/")
    os.umask(0o022)
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(signum, signal.SIG_DFL)
    signal.alarm(life_s)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    syslog.openlog("allranks", syslog.LOG_PID, syslog.LOG_DAEMON)


def watch(duty: Duty, *, to: Path | None, command: Sequence[str], env: Mapping[str, str]) -> None:
    """Do what the duty says; problems go to syslog."""
    os.environ["PATH"] = env.get("PATH") or SYSTEM_PATH
    with take_slot() as slot:
        if slot is None:
            _log(duty, f"not explained: {SLOTS} others are being explained on this machine")
            return
        for problem in _attend(duty, to=to, command=command):
            _log(duty, problem)


def _attend(duty: Duty, *, to: Path | None, command: Sequence[str]) -> Iterator[str]:
    """Explain the job, and write what was found; yields problems."""
    try:
        state = _wait_for_end(duty)
    except AllranksError as exc:
        yield str(exc)
        return
    if state is None:
        return
    explained = Explained() if is_well(state) else explain(duty, state, command)
    if explained.problem:
        yield f"not explained: {explained.problem}"
    if explained.comment and may_comment(state.comment):
        try:
            set_comment_in_accounting(duty.number, explained.comment)
        except AllranksError as exc:
            yield f"its comment: {exc}"
    if to is not None:
        nodes = fold_hosts(duty.nodes) or state.nodes
        try:
            append_line(to, encode_end(end_of(state, explained, nodes=nodes)), node=duty.node or os.uname().nodename)
        except OSError as exc:
            yield f"{exc.filename or to}: {(exc.strerror or str(exc)).lower()}"


def _wait_for_end(duty: Duty) -> JobState | None:
    """Return the job as SLURM has it when it has ended; None if another node explains it, or nobody knows it.

    Raises:
        SetupError: SLURM does not answer, for COMPLETING_S: its controller may be restarted just now.
    """
    began = time.monotonic()
    while True:
        try:
            state = next((job for job in find_jobs(duty.number) if job.number == duty.number), None)
        except AllranksError as exc:
            if isinstance(exc, NoSlurmError) or time.monotonic() - began > COMPLETING_S:
                raise
            time.sleep(ASK_AGAIN_S)
            continue
        if state is None:
            return None
        nodes = duty.nodes or expand_hosts(state.nodes or duty.node)
        turn = duty.turn(nodes) if nodes else 0  # without a node it has never run
        if turn is None:
            return None
        waited_s = time.monotonic() - began
        if state.state != "COMPLETING" or waited_s > (STAND_IN_S if turn else COMPLETING_S):
            break
        time.sleep(10 * ASK_AGAIN_S if turn else ASK_AGAIN_S)
    if turn and any(node.is_available for node in list_nodes(nodes=nodes[0])):
        return None
    return state


def explain(duty: Duty, state: JobState, command: Sequence[str], *, deadline_s: float = EXPLAIN_S) -> Explained:
    """Let a process of the job's user read the logs; whatever it does, this returns by the deadline."""
    become = _setpriv(duty)
    if isinstance(become, str):
        return Explained(problem=become)
    enter = ["sh", "-c", 'cd -- "$1" 2>/dev/null; shift; exec "$@"', "sh", state.work_dir or "/"]
    own = {name: value for name, value in os.environ.items() if name in ("PATH", "SLURM_CONF", "SLURM_CLUSTER_NAME")}
    ran = run_command([*become, *enter, *command, state.id], deadline_s=deadline_s, env=own | _home(duty.uid))
    if ran.rc != 0:
        return Explained(problem=ran.words)
    try:
        return decode_json(ran.stdout.encode(), Explained)
    except Unreadable as exc:
        return Explained(problem=f"its reader said something else: {exc}")


def _setpriv(duty: Duty) -> list[str] | str:
    """Return the command that gives a program the rights of the job's user; a text: why that cannot be done."""
    if os.geteuid() == duty.uid:
        return []
    if os.geteuid() != 0:
        own = pwd.getpwuid(os.geteuid()).pw_name
        return (
            f"the epilog runs as {own}, and may not become user {duty.user or duty.uid}; it never reads with its own "
            "rights what a user names: use Epilog, which runs as root"
        )
    try:
        gid, groups = pwd.getpwuid(duty.uid).pw_gid, "--init-groups"
    except KeyError:  # deleted meanwhile, or the directory service is down
        if duty.gid is None:
            return f"user {duty.uid} is not known on this machine"
        gid, groups = duty.gid, "--clear-groups"
    return ["setpriv", f"--reuid={duty.uid}", f"--regid={gid}", groups, "--no-new-privs"]


def _home(uid: int) -> dict[str, str]:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return {}
    return {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name}


def append_line(to: Path, line: bytes, *, node: str) -> None:
    """Append one line with one write.

    Args:
        to: the file, or a directory, in which each node has a file of its own: O_APPEND does not keep the writers of
            several machines apart on a network file system.
        line: with its newline.
        node: that writes.
    Raises:
        OSError: it cannot be written, or another user could lead this process to another file.
    """
    path = to / f"{as_file_name(node)}.jsonl" if to.is_dir() else to
    folder = Folder.root(path.parent)
    above = {path.parent.absolute(), path.parent.resolve()}
    above |= {parent for place in above for parent in place.parents}
    trusted = {0, os.geteuid()}
    seen = [(status.st_uid, status.st_mode) for status in map(os.stat, above)]
    if can_swap(seen, trusted=trusted):
        trusted.add(folder.find_own_uid())  # a file server may turn root into another user
        if can_swap(seen, trusted=trusted):
            raise PermissionError(errno.EPERM, "another user could replace it; expected directories of root", str(path))
    fd = folder.open(path.name, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        status = os.fstat(fd)
        if status.st_nlink > 1 or (status.st_uid not in trusted and status.st_uid != folder.find_own_uid()):
            raise PermissionError(errno.EPERM, "it belongs to another user, or has a second name", str(path))
        # A full disk has cut the line before; or it is being written, and an empty line follows it, which readers skip.
        if status.st_size and os.pread(fd, 1, status.st_size - 1) != b"\n":
            line = b"\n" + line
        os.write(fd, line)
    finally:
        os.close(fd)


@contextlib.contextmanager
def take_slot(name: str = SLOT) -> Iterator[socket.socket | None]:
    """Take one of the SLOTS; None if all are taken."""
    for number in range(SLOTS):
        taken = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            taken.bind(f"\0{name}-{number}")
        except OSError:
            taken.close()
            continue
        with taken:
            yield taken
        return
    yield None


def _log(duty: Duty, problem: str) -> None:
    syslog.syslog(syslog.LOG_WARNING, f"epilog of job {duty.number}: {problem}")
