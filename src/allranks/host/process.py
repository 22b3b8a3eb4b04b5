"""What is a process doing, according to the kernel? Cheap enough to be asked several times a second.

    read_process(4711).state is ProcessState.STOPPED

Tests feed it a tree in place of /proc.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from allranks.files.regular import read_regular
from allranks.model.beat import ProcessState
from allranks.model.named_agent import LiveProcess

_STATES = {
    "R": ProcessState.RUNNING, "S": ProcessState.SLEEPING, "I": ProcessState.SLEEPING, "D": ProcessState.BLOCKED,
    "T": ProcessState.STOPPED, "t": ProcessState.TRACED,
}  # fmt: skip
"""Letters of proc(5); all others (Z, X) are of the dead."""


_PAGE = os.sysconf("SC_PAGE_SIZE")
_READS_STDIN = re.compile(rf"{63 if os.uname().machine == 'aarch64' else 0} 0x0 ")
"""How /proc/PID/syscall of one begins. Source: the kernel's tables of system calls, x86-64 and arm64."""
STANDBY, FORKED_ENVIRONMENT = "ALLRANKS_STANDBY", "allranks-environment"
"""The variable of a process that forks workers, and the name of the file that has a worker's (join/standby.py)."""
MAX_ENVIRONMENT = 8 << 20
"""Bytes; execve(2) takes a quarter of the stack, usually 2 MB."""
_PIDFD_INFO = struct.Struct("=QQ11Ii")
"""struct pidfd_info as far as Linux 6.13 had it: mask, cgroup, eleven ids, exit_code. Source: linux/pidfd.h."""
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC000FF0B | _PIDFD_INFO.size << 16, 1 << 3


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """One look at a process."""

    pid: int
    state: ProcessState
    parent: int = 0
    cpu_s: float = 0.0
    """Of all its threads, user and system."""
    rss_bytes: int = 0
    """Resident memory; 0: not known."""
    num_switches: int = 0
    """How often its main thread went to sleep: a process that still moves changes it."""
    start_ticks: int = 0
    """Since the boot: tells it from a later process with the same pid."""
    wait_status: int | None = None
    """How it ended, as waitpid(2) says; None: it has not, it was reaped already, or the kernel does not tell us."""


def read_process(pid: int, *, root: Path = Path("/")) -> ProcessSeen:
    """Look at a process; one that is not there is GONE.

    Args:
        pid: as this process's own namespace counts.
        root: where /proc is; tests feed a tree.
    """
    head, _, rest = read_file(root / f"proc/{pid}/stat").rpartition(")")
    fields = rest.split()
    if not head or len(fields) < 13:
        return ProcessSeen(pid, ProcessState.GONE)
    state = _STATES.get(fields[0], ProcessState.GONE)
    is_told = fields[0] == "Z" and len(fields) > 49 and _is_ours(root / f"proc/{pid}")
    if state in (ProcessState.SLEEPING, ProcessState.RUNNING) and _is_frozen(pid, root):
        state = ProcessState.STOPPED
    status = read_file(root / f"proc/{pid}/status")
    switches = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)
    return ProcessSeen(
        pid=pid,
        state=state,
        parent=int(fields[1]),
        cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        rss_bytes=int(fields[21]) * _PAGE if len(fields) > 21 else 0,
        num_switches=int(switches[1]) if switches else 0,
        start_ticks=int(fields[19]) if len(fields) > 19 else 0,
        wait_status=int(fields[49]) if is_told else None,
    )


def read_wait_status(pidfd: int) -> int | None:
    """Return how a process ended that its parent has reaped already; None: it was not reaped, or Linux is before 6.15.

    Args:
        pidfd: of the process, opened while it lived.
    """
    asked = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, asked)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(asked)
    return int(status) if mask & _PIDFD_INFO_EXIT else None


def _is_ours(own: Path) -> bool:
    """Whether the kernel tells us how this process ended: to others it says 0, as if all were well."""
    try:
        return os.geteuid() in (0, own.stat().st_uid)
    except OSError:
        return False


def read_boot_id(*, root: Path = Path("/")) -> str:
    """Return the name that the kernel gave this boot of the machine; empty where it gives none."""
    return read_file(root / "proc/sys/kernel/random/boot_id").strip()


def read_start_ticks(pid: int, *, root: Path = Path("/")) -> int | None:
    """Return when a process began, in ticks since the boot; None if it is not there. Source: proc(5), starttime."""
    fields = read_file(root / f"proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None


def identify(pid: int, *, run_dir: Path, root: Path = Path("/")) -> LiveProcess | None:
    """Return who a process is; None if it is not there.

    Args:
        pid: as this process's own namespace counts.
        run_dir: the run whose files it may have open.
        root: where /proc is; tests feed a tree.
    """
    own = root / f"proc/{pid}"
    fields = read_file(own / "stat").rpartition(")")[2].split()
    try:
        owner = own.stat().st_uid
        start_ticks = int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
    boot = re.search(r"^btime (\d+)$", read_file(root / "proc/stat"), re.MULTILINE)
    return LiveProcess(
        start_ticks=start_ticks,
        start_s=(int(boot[1]) if boot else 0) + start_ticks / os.sysconf("SC_CLK_TCK"),
        boot_id=read_boot_id(root=root),
        owner=owner,
        command=tuple(read_file(own / "cmdline").rstrip("\0").split("\0")),
        is_dead=fields[0] in "ZX",
        has_file_of_run=_has_open(own, os.path.realpath(run_dir)),
    )


def _has_open(own: Path, folder: str) -> bool:
    """Whether a process has a file of this directory open, or the directory itself."""
    with contextlib.suppress(OSError):
        for file in (own / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if f"{file.readlink()}/".startswith(f"{folder}/"):
                    return True
    return False


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and all below it have used so far."""

    cpu_s: float = 0.0
    """User and system, also of children that have ended and were waited for."""
    read_bytes: int = 0
    """By `read` and the like, and from storage into mapped files; what comes through `recv` does not count."""
    written_bytes: int = 0
    """By `write` and the like, to whatever file, pipe or terminal."""
    reads_terminal: bool = False
    """One of them waits for a line from a terminal."""


def read_usage(pid: int, *, root: Path = Path("/")) -> Usage:
    """Return what a process and its descendants have used; a look costs some 20 us for each thread."""
    cpu_ticks = read_bytes = written_bytes = 0
    reads_terminal, left = False, [pid]
    while left:
        own = root / f"proc/{left.pop()}"
        fields = read_file(own / "stat").rpartition(")")[2].split()
        cpu_ticks += sum(map(int, fields[11:15]))
        counts = dict(re.findall(r"^(\w+): (\d+)$", read_file(own / "io"), re.MULTILINE))
        read_bytes += int(counts.get("rchar", 0)) + int(counts.get("read_bytes", 0))
        written_bytes += int(counts.get("wchar", 0))
        reads_terminal |= _reads_terminal(own)
        with contextlib.suppress(OSError):
            for thread in (own / "task").iterdir():
                left += map(int, read_file(thread / "children").split())
    return Usage(cpu_ticks / os.sysconf("SC_CLK_TCK"), read_bytes, written_bytes, reads_terminal)


def _reads_terminal(own: Path) -> bool:
    """Whether the main thread of a process is in read(0, ...), and that is a terminal."""
    if not _READS_STDIN.match(read_file(own / "syscall")):
        return False
    try:
        return (own / "fd/0").readlink().as_posix().startswith(("/dev/pts/", "/dev/tty", "/dev/console"))
    except OSError:
        return False


def read_environment(pid: int, *, root: Path = Path("/")) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it is gone or another user's.

    A worker that a standby forked shows the standby's in /proc, and keeps its own in a memory file; a child that it
    forked has that file, too.
    """
    env = _parse(read_file(root / f"proc/{pid}/environ"))
    with contextlib.suppress(OSError):
        for file in (root / f"proc/{pid}/fd").iterdir() if STANDBY in env else ():
            with contextlib.suppress(OSError):  # closed meanwhile
                if file.readlink().as_posix().startswith(f"/memfd:{FORKED_ENVIRONMENT}"):
                    own = read_regular(file, at_most=MAX_ENVIRONMENT, follows_links=True)
                    return _parse(own.decode(errors="replace"))
    return env


def _parse(text: str) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def is_below(pid: int, ancestor: int, *, root: Path = Path("/")) -> bool:
    """Tell whether a process is the other one or one of its descendants."""
    for _ in range(16):
        if pid == ancestor:
            return True
        pid = read_process(pid, root=root).parent
        if pid < 1:
            return False
    return False


def _is_frozen(pid: int, root: Path) -> bool:
    """A frozen cgroup leaves its processes in S or R for the eye (version 2), or in D (version 1)."""
    return any("frozen 1" in read_file(path / "cgroup.events") for path in _cgroups(pid, root))


def _cgroups(pid: int, root: Path) -> Iterator[Path]:
    found = re.search(r"^0::/(.*)$", read_file(root / f"proc/{pid}/cgroup"), re.MULTILINE)
    if found and found[1] and ".." not in found[1]:
        yield root / "sys/fs/cgroup" / found[1]


def path_of(pid: int, name: str, *, root: Path = Path("/")) -> Path:
    """Return the path of a file that a process knows by this name: it may be in a container."""
    return root / f"proc/{pid}" / ("root" if name.startswith("/") else "cwd") / name.lstrip("/")


def read_file(path: Path) -> str:
    """Return the text of a file of /proc or /sys; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
