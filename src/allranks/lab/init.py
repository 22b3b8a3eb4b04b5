"""Process 1 of a lab node: creates the node's namespaces, sets them up, then collects ended processes.

    python -I -S init.py LAB_DIR NODE

Returns when the node is ready; a child remains as process 1 of the node. Killing it kills everything in the node, and
its mounts and interfaces go with it. Its command line is the only record of the lab: a search for LAB_DIR in /proc
finds it, also after an `allranks lab up` that was killed (`hosts.find_inits`).

Standard library only: seven of them start at a time, and each uses little memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID | CLONE_NEWNET
"""Source: linux/sched.h."""
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 0x1000, 0x2000, 0x4000, 0x40000
"""Source: linux/mount.h."""

OWN_FILES = {
    "hosts": "/etc/hosts",
    "hostname": "/etc/hostname",
    "machine-id": "/etc/machine-id",
    "boot_id": "/proc/sys/kernel/random/boot_id",
}
"""Files in LAB_DIR/nodes/NODE -> their path in this node. If the machine lacks the path, so does the node."""
MOUNTS_FILE = "mounts"
"""In LAB_DIR: what is mounted where for another release of SLURM (`release.py`), unless the machine lacks the place."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Become process 1 of a new node; return in the original process once it is set up."""
    lab_dir, node = Path(sys.argv[1]), sys.argv[2]
    is_ready, ready = os.pipe()
    _call("unshare", _libc.unshare(NAMESPACES))
    if os.fork():
        os.close(ready)
        sys.exit(0 if os.read(is_ready, 1) else 1)
    os.close(is_ready)
    os.setsid()
    os.chdir("/")
    furnish(lab_dir, lab_dir / "nodes" / node, node.lstrip("@"))
    # Linux reaps the children of a process that ignores SIGCHLD, also adopted ones.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.write(ready, b"1")
    os.closerange(3, ready + 1)
    while True:
        signal.pause()


def furnish(lab_dir: Path, own: Path, host_name: str) -> None:
    """Set up the node's own name, /proc, /sys, /dev/shm and files of `own`."""
    name = host_name.encode()
    _call("sethostname", _libc.sethostname(name, len(name)))
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("proc", "/proc", "proc")
    # /sys shows the interfaces of the namespace that mounts it. slurmd needs the cgroup tree below it.
    new_sys = own / "sys"
    new_sys.mkdir(exist_ok=True)
    _mount("sysfs", str(new_sys), "sysfs")
    if Path("/sys/fs/cgroup").is_dir():
        _mount("/sys/fs/cgroup", f"{new_sys}/fs/cgroup", None, MS_BIND | MS_REC)
    _mount(str(new_sys), "/sys", None, MS_MOVE)
    _mount("tmpfs", "/dev/shm", "tmpfs", options="mode=1777")  # noqa: S108
    for file, place in OWN_FILES.items():
        if (own / file).exists() and Path(place).exists():
            _mount(str(own / file), place, None, MS_BIND)
    if Path("/etc/slurm").is_dir():  # for commands that start without SLURM_CONF in their environment
        _mount(str(lab_dir / "slurm"), "/etc/slurm", None, MS_BIND)
    if (lab_dir / MOUNTS_FILE).exists():  # in order: the first contains the sources of the others
        for line in (lab_dir / MOUNTS_FILE).read_text().splitlines():
            source, place = line.split("\t")
            if Path(place).exists():
                _mount(source, place, None, MS_BIND)


def _mount(source: str | None, target: str, kind: str | None, flags: int = 0, options: str = "") -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    _call(f"mount {source} on {target}", _libc.mount(*encoded, ctypes.c_ulong(flags), options.encode()))


def _call(what: str, result: int) -> None:
    if result != 0:
        sys.exit(f"{what}: {os.strerror(ctypes.get_errno()).lower()}")


if __name__ == "__main__":
    main()
