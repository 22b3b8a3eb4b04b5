"""Disks that can be broken: small file systems of a situation's own, and the faults that strike them.

Each is mounted in the mount namespace of its situation, so it is gone with it. Full, without inodes, removed and
unmounted ones are tmpfs; `abort` makes an ext4 read-only below files that are open, as an I/O error does; only a block
device can be frozen; btrfs enforces quotas for root, too, and this is how EDQUOT is met here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FIFREEZE, FITHAW = 0xC0045877, 0xC0045878  # linux/fs.h
FROZEN_S = 3.0
SIZES_MB = {"tmpfs": 100, "ext4": 100, "btrfs": 300}
"""The roll call wants 64 MiB free in the run directory and in TMPDIR."""
QUOTA_MB = 120


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system that only one situation has."""

    path: Path
    file_system: str


def mount(path: Path, file_system: str, *, images: Path) -> Disk:
    """Make and mount one.

    Args:
        path: where; it is made.
        file_system: tmpfs, ext4 or btrfs.
        images: directory for the image of ext4 and btrfs.
    """
    path.mkdir(exist_ok=True)
    size = f"{SIZES_MB[file_system]}M"
    if file_system == "tmpfs":
        _call("mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes=2000,mode=1777", "tmpfs", path)
        return Disk(path, file_system)
    image = images / f"{path.name}.img"
    _call("truncate", "-s", size, image)
    _call(f"mkfs.{file_system}", "-q", *(["-m", "0"] if file_system == "ext4" else []), image)
    _call("mount", "-o", "loop", image, path)
    path.chmod(0o1777)
    if file_system == "btrfs":
        _call("btrfs", "quota", "enable", path)
        _call("btrfs", "qgroup", "limit", f"{QUOTA_MB}M", "0/5", path)
    return Disk(path, file_system)


def _call(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=20)


def fill(disk: Disk) -> None:
    """Write until nothing fits, to the last byte."""
    with (disk.path / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def keep_filling(disk: Disk) -> None:
    """Fill it, and take at once what becomes free."""
    fill(disk)

    def go_on() -> None:
        while True:
            fill(disk)
            threading.Event().wait(0.005)

    threading.Thread(target=go_on, daemon=True).start()


def use_up_inodes(disk: Disk) -> None:
    """Make empty files until no inode is left."""
    folder = disk.path / "many"
    folder.mkdir()
    with contextlib.suppress(OSError):
        for number in range(1_000_000):
            (folder / str(number)).touch()


def make_room(disk: Disk) -> None:
    """Delete what `fill` and `use_up_inodes` have left."""
    (disk.path / "filler").unlink(missing_ok=True)
    shutil.rmtree(disk.path / "many", ignore_errors=True)


def make_read_only(disk: Disk) -> None:
    """As ext4 does after an I/O error; a tmpfs as an administrator does, which open files prevent."""
    _call("mount", "-o", "remount,abort", disk.path)


def remove(disk: Disk) -> None:
    """Delete all that is in it, as a clean-up of a scratch file system does."""
    for each in disk.path.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each, ignore_errors=True)
        else:
            each.unlink(missing_ok=True)


def unmount(disk: Disk) -> None:
    """Take it away, while it is in use."""
    _call("umount", "--lazy", disk.path)


def freeze(disk: Disk) -> None:
    """Let nobody write for FROZEN_S; stage.py thaws it, too, whatever happens here."""
    descriptor = os.open(disk.path, os.O_RDONLY)
    fcntl.ioctl(descriptor, FIFREEZE, 0)
    timer = threading.Timer(FROZEN_S, lambda: fcntl.ioctl(descriptor, FITHAW, 0))
    timer.daemon = True
    timer.start()


def thaw(path: Path) -> None:
    """End a freeze, if there is one."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        with contextlib.suppress(OSError):
            fcntl.ioctl(descriptor, FITHAW, 0)
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Fault:
    """What can happen to a disk."""

    strike: Callable[[Disk], None]
    file_system: str
    has_verdict: bool = True
    """The verdict can still be written there, if the job began before."""


FAULTS = {
    "full": Fault(fill, "tmpfs"),
    "kept-full": Fault(keep_filling, "tmpfs"),
    "full-ext4": Fault(fill, "ext4"),
    "quota": Fault(fill, "btrfs"),
    "no-inodes": Fault(use_up_inodes, "tmpfs"),
    "read-only": Fault(make_read_only, "ext4", has_verdict=False),
    "removed": Fault(remove, "tmpfs", has_verdict=False),
    "unmounted": Fault(unmount, "tmpfs", has_verdict=False),
    "frozen": Fault(freeze, "ext4"),
}


def can_mount(file_system: str) -> bool:
    """Whether this kernel and machine have it."""
    known = Path("/proc/filesystems").read_text().split()
    return file_system in known and (file_system == "tmpfs" or shutil.which(f"mkfs.{file_system}") is not None)
