"""What may a process take here: resource limits, cores, and the directories that the job writes to.

Whatever touches a directory may hang with its file system: `read_place` is called from a thread of its own
(host.node does so). The limits are those of this process, and its workers inherit them; a login shell's may differ.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from allranks.model.card import JobDirectory

NONCE = ".nonce"
"""The leader's file in the run directory: who sees its text shares the directory."""
_NOFILE = resource.RLIMIT_NOFILE
_LIMITS = {
    "memlock_bytes": resource.RLIMIT_MEMLOCK,
    "nofile": _NOFILE,
    "stack_bytes": resource.RLIMIT_STACK,
    "nproc": resource.RLIMIT_NPROC,
}
_BLOCK = b"\0" * 4096


def read_limits() -> dict[str, int | None]:
    """Return the soft resource limits of this process; None is unlimited."""
    soft = {name: resource.getrlimit(which)[0] for name, which in _LIMITS.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()}


def raise_open_files(wanted: int) -> int:
    """Raise this process's soft limit of open files to `wanted`, as far as the hard limit lets; return what it is then.

    Workers inherit it: rank 0's store has a connection to each rank.
    """
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(_NOFILE))
    reached = max(soft, min(wanted, hard))
    if reached > soft:
        resource.setrlimit(_NOFILE, (int(reached), resource.getrlimit(_NOFILE)[1]))
    return wanted if reached == math.inf else int(reached)


def describe_shortage(error: BaseException) -> str | None:
    """Return what this machine has no more of, and which limit to look at; None: the error tells of no shortage."""
    nofile, nproc = (read_limits()[name] or "unlimited" for name in ("nofile", "nproc"))
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        number = errno.EAGAIN
    elif number == errno.EAGAIN and not _is_of_new_process(error):  # a stream or socket that is not ready
        return None
    return {
        errno.EAGAIN: "no more processes or threads can be started here: end other programs, or raise the limit "
        f"(ulimit -u is {nproc}; in a container or job, its cgroup has one, too: pids.max)",
        errno.EMFILE: f"a process may open no more files here (ulimit -n is {nofile}); to raise it: "
        "ulimit -n $(ulimit -Hn)",
        errno.ENFILE: "this machine opens no more files: end other programs, or raise fs.file-max",
        errno.ENOMEM: "this machine, or the share of it that this process may use, has no more memory: end other "
        "programs, or request more",
    }.get(number or 0)


def _is_of_new_process(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    names = ("_execute_child", "_fork_exec")
    return bool(frames) and (frames[-1].name in names or "os.fork()" in (frames[-1].line or ""))


def count_cpus(*, root: Path = Path("/")) -> int:
    """Return how many cores this process may use: its affinity, narrowed by the cgroup's quota (v1 and v2)."""
    affinity = len(os.sched_getaffinity(0))
    quota = min(_quotas(root), default=math.inf)
    return min(affinity, max(1, math.ceil(quota))) if quota < affinity else affinity


def read_load(*, root: Path = Path("/")) -> float | None:
    """Return how many processes wanted to run, averaged over a minute."""
    try:
        return float((root / "proc/loadavg").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def name_places(env: Mapping[str, str], *, run_dir: Path | None = None, root: Path = Path("/")) -> dict[str, Path]:
    """Return the directories that a job writes to, by purpose; nothing is touched.

    Args:
        env: TMPDIR and HOME in it are two of them.
        run_dir: the job's own, where there is one.
        root: where /dev/shm and /tmp are; the others are taken as they are.
    """
    places = {"/dev/shm": root / "dev/shm", "TMPDIR": Path(env.get("TMPDIR") or root / "tmp")}  # noqa: S108
    if env.get("HOME"):
        places["HOME"] = Path(env["HOME"])
    if run_dir is not None:
        places["run directory"] = run_dir
    return places


def read_place(purpose: str, path: Path) -> JobDirectory:
    """Look at a directory: how much is free, and whether a block can really be written. Leaves nothing there.

    Blocks as long as the file system does.

    Args:
        purpose: what the job uses it for; a `run directory` is also asked for the leader's nonce.
        path: the directory.
    """
    name = str(path).encode("utf-8", "backslashreplace").decode()
    try:
        stat = os.statvfs(path)
    except (OSError, ValueError) as exc:
        return JobDirectory(purpose=purpose, path=name, problem=_reason(exc))
    is_writable, problem = _try_to_write(path)
    return JobDirectory(
        purpose=purpose,
        path=name,
        free_bytes=stat.f_bavail * stat.f_frsize,
        size_bytes=stat.f_blocks * stat.f_frsize,
        free_inodes=stat.f_favail if stat.f_files else None,
        is_writable=is_writable,
        problem=problem,
        nonce=_read_nonce(path) if purpose == "run directory" else None,
    )


def _try_to_write(path: Path) -> tuple[bool, str | None]:
    """Write one block to a file without a name, where the file system can do that: nothing can be left behind."""
    if not os.access(path, os.W_OK | os.X_OK):
        return False, _refusal(path)
    try:
        descriptor = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            return False, _reason(exc)
        try:
            # NFS and old kernels: a name for a moment.
            descriptor, name = tempfile.mkstemp(prefix=".allranks-", dir=path)
            Path(name).unlink()
        except OSError as named:
            return False, _reason(named)
    try:
        try:
            os.write(descriptor, _BLOCK)
        finally:
            os.close(descriptor)  # where NFS says that the quota is used up
    except OSError as exc:
        return False, _reason(exc)
    return True, None


def _refusal(path: Path) -> str:
    """Why access(2) said no: without the reason that only a second call tells, EACCES."""
    is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if is_read_only else errno.EACCES)


def _read_nonce(path: Path) -> str | None:
    try:
        with (path / NONCE).open("rb") as file:
            return file.read(256).decode(errors="backslashreplace").strip()
    except OSError:
        return None


def _reason(exc: Exception) -> str:
    return getattr(exc, "strerror", None) or str(exc)


def _quotas(root: Path) -> Iterator[float]:
    """Cores that each cgroup above this process grants."""
    base = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = [base, base / "unified"] if not controllers else [base / controllers, base / "cpu"]
        # In a container the path may be the host's: whatever is not there is passed over.
        above = [parent for parent in (PurePosixPath(group), *PurePosixPath(group).parents) if ".." not in parent.parts]
        for mount in mounts:
            for cgroup in above:
                directory = mount / str(cgroup).lstrip("/")
                with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                    yield _quota_v1(directory) if controllers else _quota_v2((directory / "cpu.max").read_text())


def _quota_v2(text: str) -> float:
    quota, period = text.split()
    return math.inf if quota == "max" else int(quota) / int(period)


def _quota_v1(directory: Path) -> float:
    quota = int((directory / "cpu.cfs_quota_us").read_text())
    return math.inf if quota <= 0 else quota / int((directory / "cpu.cfs_period_us").read_text())
