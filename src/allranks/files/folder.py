"""A directory that is held by its descriptor: whoever renames it, or puts a link in its place, changes nothing.

    folder = Folder.at(Path("runs/7/attempt_0"))
    folder.write_whole("exit_code", b"0\\n")
    with folder.append("events.jsonl") as file: ...

Everything below it is opened without following links, and only regular files are. All functions raise OSError.

A directory belongs to this process if the owner of a file that this process makes there also owns the directory. The
user id of the process proves nothing: a file server may turn root into another user (root squash).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import weakref
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import BinaryIO, Self

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: a fifo is refused, not waited for
MAX_BYTES = 64 << 20
"""Of a file that is read whole."""


class RefusedError(OSError):
    """A directory is a link, or somebody else's; `filename` is its path."""


class Folder:
    """A directory, open until nobody has this object any more.

    Args:
        fd: its descriptor; this object closes it.
        path: where it was found, for people and for other processes.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self.fd, self.path = fd, path
        weakref.finalize(self, os.close, fd)

    @classmethod
    def at(cls, path: Path) -> Self:
        """Open a directory; only its last name must not be a link."""
        return cls(_open_directory(path, path), path)

    @classmethod
    def root(cls, path: Path) -> Self:
        """Open a directory that may be a link, and that this process may be unable to list, to make others in it."""
        return cls(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), path)

    def sub(self, name: str) -> Folder:
        """Open a directory below it."""
        return Folder(_open_directory(name, self.path / name, self.fd), self.path / name)

    def make(self, name: str) -> Folder:
        """Open a directory below it, which is made if it is missing."""
        with contextlib.suppress(FileExistsError):
            self.make_new(name)
        return self.sub(name)

    def make_new(self, name: str) -> None:
        """Make a directory below it.

        Raises:
            FileExistsError: there is something of that name.
        """
        os.mkdir(name, dir_fd=self.fd)

    # Whose it is

    @property
    def owner(self) -> int:
        """User id of its owner."""
        return os.fstat(self.fd).st_uid

    def find_own_uid(self) -> int:
        """Return the user id that files have which this process makes here."""
        name = f".own.{os.urandom(8).hex()}"
        fd = self.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # the descriptor of what was made
        try:
            return os.fstat(fd).st_uid
        finally:
            os.close(fd)
            self.unlink(name)

    @property
    def identity(self) -> tuple[int, int]:
        """Its device and inode: what a path leads to is this directory if it has both."""
        status = os.fstat(self.fd)
        return status.st_dev, status.st_ino

    @property
    def is_deleted(self) -> bool:
        """Whether somebody has deleted it; what was open below it can still be written."""
        try:
            return os.fstat(self.fd).st_nlink == 0
        except OSError as exc:
            return exc.errno == errno.ESTALE

    @property
    def is_in_place(self) -> bool:
        """Whether its path still leads here: it was not deleted, renamed, replaced or unmounted."""
        with contextlib.suppress(OSError):
            there = self.path.lstat()
            return (there.st_dev, there.st_ino) == self.identity
        return False

    def may_be_swapped(self, own_uid: int) -> bool:
        """Whether another user can put another directory where this one's path leads, as `can_swap` says."""
        above = {*self.path.absolute().parents, *self.path.resolve().parents}
        seen = [(status.st_uid, status.st_mode) for status in map(os.stat, above)]
        return can_swap(seen, trusted={0, os.geteuid(), own_uid})

    # Files below it

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Return the descriptor of a regular file below it, as open(2) does."""
        fd = os.open(name, flags | _FILE, mode, dir_fd=self.fd)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(self.path / name))
            os.set_blocking(fd, True)  # it may become the output of a worker
        except OSError:
            os.close(fd)
            raise
        return fd

    def append(self, name: str, *, mode: int = 0o666) -> BinaryIO:
        """Open a file to write at its end; it is made if it is missing."""
        return os.fdopen(self.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode), "ab")

    def open_new(self, name: str, mode: int = 0o666) -> BinaryIO:
        """Open a new file to write.

        Raises:
            FileExistsError: there is something of that name.
        """
        return os.fdopen(self.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")

    def write_whole(self, name: str, data: bytes, *, mode: int = 0o666) -> None:
        """Write a file at once, or not at all; nobody can guess the name of its draft."""
        draft = f".{name}.{os.urandom(8).hex()}"
        try:
            with self.open_new(draft, mode) as file:
                file.write(data)
            os.replace(draft, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError:
            with contextlib.suppress(OSError):
                self.unlink(draft)
            raise

    def open_read(self, name: str) -> BinaryIO:
        """Open a file to read."""
        return os.fdopen(self.open(name, os.O_RDONLY), "rb")

    def read(self, name: str, *, at_most: int = MAX_BYTES) -> bytes:
        """Return what is in a file; one that is larger is refused."""
        with self.open_read(name) as file:
            data = file.read(at_most + 1)
        if len(data) > at_most:
            raise OSError(errno.EFBIG, f"larger than {at_most} bytes", str(self.path / name))
        return data

    def status(self, name: str) -> os.stat_result:
        """Return what stat(2) says of something below it; of a link, not of what it leads to."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def has(self, name: str) -> bool:
        """Whether there is something of that name."""
        with contextlib.suppress(OSError):
            self.status(name)
            return True
        return False

    def unlink(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def touch(self, name: str) -> None:
        """Set the times of a file to now."""
        os.utime(name, dir_fd=self.fd, follow_symlinks=False)

    def link_to(self, name: str, target: str) -> None:
        """Make a symbolic link to another name below it, or change it."""
        draft = f".{name}.{os.urandom(8).hex()}"
        os.symlink(target, draft, dir_fd=self.fd)
        try:
            os.replace(draft, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError:
            self.unlink(draft)
            raise


def write_named(path: Path, data: bytes) -> None:
    """Write a file that the user has named, whole or not at all: a link stays one, a device or pipe is written to.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))  # which a loop of links does not end
    Folder.root(path.parent).write_whole(path.name, data)


def why_not_ours(owner: int, own_uid: int) -> str | None:
    """Return why a directory must not be written to, as part of a sentence; None: it belongs to this process. Pure.

    Args:
        owner: user id of the directory.
        own_uid: user id of a file that this process made in it, or below it.

    >>> why_not_ours(1000, 0)
    "it belongs to user 1000, but this job's files belong to user 0"
    """
    return None if owner == own_uid else f"it belongs to user {owner}, but this job's files belong to user {own_uid}"


def can_swap(above: Iterable[tuple[int, int]], *, trusted: Collection[int]) -> bool:
    """Whether somebody else owns one of these directories, or everybody may rename what is in it. Pure.

    Args:
        above: owner and mode of each directory that a path leads through.
        trusted: user ids of this process, and root's. Members of a directory's group are trusted, too.
    """
    return any(owner not in trusted or (mode & stat.S_IWOTH and not mode & stat.S_ISVTX) for owner, mode in above)


def _open_directory(name: str | Path, path: Path, dir_fd: int | None = None) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=dir_fd)
    except OSError as exc:
        is_link = False
        with contextlib.suppress(OSError):
            is_link = stat.S_ISLNK(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
        if is_link:
            raise RefusedError(errno.ELOOP, "a link instead of a directory", str(path)) from exc
        raise
