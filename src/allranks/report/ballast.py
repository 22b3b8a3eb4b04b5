"""Blocks that a run directory keeps back while it has some: for a disk that fills up, and for the job's last files.

    room = look(path)                               how much is left; may hang with its file system, as all of this
    ballast = Ballast.keep(folder, 64 << 20)        blocks that nobody else can take; folder: an open directory
    ballast.free()                                  ... until the disk is full
    draft = Draft.keep(folder, 64 << 10)            a file without a name, with the blocks of the verdict
    draft.publish(data, "verdict.json")             ... which gets its name when it is whole

Neither has a name while it is kept, so the kernel gives the blocks back however this process ends, nothing is left
behind, and no reader finds half a file. NFS has no files without a name: there the client hides the ballast
(`.nfs...`) and deletes it, and a draft has a name nobody can guess.

The blocks are real: fallocate(2), or random bytes where the file system has no such call, which no compression makes
smaller. What does not hold: on a file system that writes each change to new blocks (ZFS) the draft's blocks are of no
use, and only the ballast helps; a quota of blocks that a server counts late; and whoever writes first when the ballast
is freed gets its blocks. On tmpfs the blocks are memory of this node, so there the ballast is small.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import struct
import weakref
from pathlib import Path

from allranks.model.room import MIB, Room

BALLAST_BYTES = 64 * MIB
"""Of each node: minutes of what ranks usually print."""
SHARED_BYTES = 1024 * MIB
"""Of all nodes that share a file system, together."""
MEMORY_BYTES = 4 * MIB
"""On tmpfs and ramfs."""
WRITTEN_BYTES = 8 * MIB
"""Where the blocks have to be written: a file server gets them over the network."""
LEAST_BYTES = MIB // 4
"""Less is of no use."""
DISK_SHARE, FREE_SHARE = 1 / 32, 1 / 8
"""Of the whole file system, and of what is free: no more than this is kept back."""
VERDICT_BYTES = MIB // 16
"""Of the verdict's draft: a verdict of ordinary size, with tracebacks."""
_KEEP_SIZE = 1
"""linux/falloc.h, FALLOC_FL_KEEP_SIZE: blocks behind the end of a file."""
_IN_MEMORY = (0x01021994, 0x858458F6)
"""linux/magic.h: tmpfs, ramfs."""
_EXT, _EXT_RESERVE_BYTES = 0xEF53, 16 * MIB
"""ext2 to ext4 keep blocks for root, and ext4 some more that nobody gets (s_resv_clusters: 2 %, at most 4096)."""
_CHUNK, _BLOCK = MIB, 4096


def look(path: Path | int) -> Room:
    """Return what is left in the file system of a directory, or why it cannot be asked. Blocks as long as that does.

    Args:
        path: of a directory that exists under this name; a descriptor does not notice that it was removed.
    """
    try:
        stat = os.statvfs(path)
    except OSError as exc:
        return Room(problem=describe(exc))
    free = stat.f_bavail * stat.f_frsize
    if os.geteuid() == 0 and _kind_of(path) == _EXT:  # elsewhere the difference is of no use to root, either
        free = max(free, stat.f_bfree * stat.f_frsize - min(_EXT_RESERVE_BYTES, stat.f_blocks * stat.f_frsize // 50))
    return Room(
        free_bytes=free,
        size_bytes=stat.f_blocks * stat.f_frsize,
        free_inodes=stat.f_favail if stat.f_files else None,
        size_inodes=stat.f_files or None,
        problem=describe(OSError(errno.EROFS, os.strerror(errno.EROFS))) if stat.f_flag & os.ST_RDONLY else None,
    )


def describe(exc: OSError) -> str:
    """Return an error as Room has it: `ENOSPC: No space left on device`."""
    return f"{errno.errorcode.get(exc.errno or 0, 'error')}: {exc.strerror or exc}"


def is_full(exc: OSError) -> bool:
    """Whether an error says that there is no room: on the disk, or in a quota."""
    return exc.errno in (errno.ENOSPC, errno.EDQUOT)


def choose_size(room: Room, *, sharers: int, position: int = 0, is_in_memory: bool = False) -> int:
    """Return how many bytes of ballast one node keeps; 0: none. Pure.

    Args:
        sharers: nodes of the job that share the file system, this one included.
        position: of this node among them: with thousands, the last ones keep none.
        is_in_memory: the file system is tmpfs.
    """
    if room.is_short() or room.problem is not None or position >= SHARED_BYTES // LEAST_BYTES:
        return 0
    share = max(LEAST_BYTES, SHARED_BYTES // max(1, sharers))
    most = min(BALLAST_BYTES, MEMORY_BYTES if is_in_memory else BALLAST_BYTES, share)
    size = min(most, int(room.size_bytes * DISK_SHARE), int(room.free_bytes * FREE_SHARE))
    return size if size >= LEAST_BYTES else 0


class Ballast:
    """Blocks of a file without a name, until `free`, or until nobody has this object any more.

    Args:
        size_bytes: of the blocks; 0: it keeps none.
        fd: of the file, which this object closes.
    """

    def __init__(self, size_bytes: int, fd: int | None = None) -> None:
        self.size_bytes = size_bytes
        self._close = weakref.finalize(self, os.close, fd) if fd is not None else None

    @classmethod
    def keep(cls, folder: int, size_bytes: int) -> Ballast:
        """Take blocks in a directory; where the file system does not give or keep them, the ballast is empty."""
        if not size_bytes:
            return cls(0)
        try:
            fd, name = open_nameless(folder, ".ballast")
        except OSError:
            return cls(0)
        ballast = cls(size_bytes, fd)
        try:
            if name:  # the client of NFS keeps it until it is closed
                os.unlink(name, dir_fd=folder)
            ballast.size_bytes = _take_blocks(fd, size_bytes)
        except OSError:
            ballast.size_bytes = 0
        if not ballast.size_bytes:
            ballast.free()
        return ballast

    def free(self) -> int:
        """Give the blocks back; returns how many bytes that were."""
        size, self.size_bytes = self.size_bytes, 0
        with contextlib.suppress(OSError):
            if self._close is not None:
                self._close()
        return size


class Draft:
    """A file that has its inode and its blocks before there is anything to write into it, and no name until then.

    Args:
        folder: descriptor of the directory; it is the caller's.
        fd: of the file, which this object closes.
        name: where a file without a name is impossible.
    """

    def __init__(self, folder: int, fd: int, name: str) -> None:
        self._folder, self._fd, self._name = folder, fd, name
        self._close = weakref.finalize(self, os.close, fd)

    @classmethod
    def keep(cls, folder: int, size_bytes: int) -> Draft:
        """Make one in a directory; the blocks are only as certain as its file system makes them.

        Raises:
            OSError: no file can be made there.
        """
        fd, name = open_nameless(folder, ".draft")
        with contextlib.suppress(OSError):
            if not _allocate(fd, size_bytes, keeps_size=True):
                _write(fd, os.urandom(size_bytes))
        return cls(folder, fd, name)

    def publish(self, data: bytes, name: str, *, replaces: bool) -> bool:
        """Write the data and give it a name in its directory; returns False if another file has that name.

        It can be called again after an error, and is over after a success.

        Args:
            data: the whole file.
            name: of the file.
            replaces: another file of that name is replaced.
        Raises:
            OSError: it could not be written or named; then nothing has changed under that name.
        """
        os.lseek(self._fd, 0, os.SEEK_SET)
        _write(self._fd, data)
        os.ftruncate(self._fd, len(data))
        try:
            if replaces and self._name:
                os.replace(self._name, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
                self._name = ""
            else:
                self._link(name)
        except FileExistsError:
            if not replaces:
                self.drop()
                return False
            aside = f".{name}.{os.urandom(8).hex()}"
            self._link(aside)
            os.replace(aside, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self.drop()
        return True

    def drop(self) -> None:
        """Give it up."""
        name, self._name = self._name, ""
        with contextlib.suppress(OSError):
            if name:
                os.unlink(name, dir_fd=self._folder)
        with contextlib.suppress(OSError):
            self._close()

    def _link(self, name: str) -> None:
        # linkat(2): a descriptor gets a name through /proc.
        source = self._name or f"/proc/self/fd/{self._fd}"
        os.link(source, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)


def keep_behind(fd: int, size_bytes: int) -> bool:
    """Keep blocks behind the end of an open file, so that it can grow on a full disk; returns whether it has them."""
    end = os.fstat(fd).st_size
    with contextlib.suppress(OSError):
        return _allocate(fd, size_bytes, offset=end, keeps_size=True)
    return False


def open_nameless(folder: int, stem: str) -> tuple[int, str]:
    """Open a new file for reading and writing that has no name; where that is impossible, its name is returned too.

    Raises:
        OSError: no file can be made.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(".", flags | os.O_TMPFILE, 0o666, dir_fd=folder), ""
    except OSError as exc:  # NFS, and kernels or file systems that do not know the flag
        if exc.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
    name = f"{stem}.{os.urandom(8).hex()}"
    return os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=folder), name


def try_to_write(folder: int) -> None:
    """Write one block to a file without a name: a quota, or a broken disk, is seen only so.

    Raises:
        OSError: why that is impossible.
    """
    fd, name = open_nameless(folder, ".try")
    try:
        _write(fd, os.urandom(_BLOCK))
        os.fsync(fd)  # where a file server says that the quota is used up
    finally:
        os.close(fd)
        if name:
            os.unlink(name, dir_fd=folder)


def is_in_memory(path: Path | int) -> bool:
    """Whether the blocks of a directory's file system are memory."""
    return _kind_of(path) in _IN_MEMORY


def _kind_of(path: Path | int) -> int:
    """Return f_type of statfs(2), which Python does not tell; 0: not known."""
    buffer = ctypes.create_string_buffer(256)
    failed = _libc().fstatfs(path, buffer) if isinstance(path, int) else _libc().statfs(os.fsencode(path), buffer)
    return 0 if failed else int(struct.unpack_from("@l", buffer.raw)[0]) & 0xFFFFFFFF


def _take_blocks(fd: int, size_bytes: int) -> int:
    """Give an empty file blocks, and return how many bytes it has; less than half of what was asked for is nothing."""
    if not _allocate(fd, size_bytes):
        size_bytes = min(size_bytes, WRITTEN_BYTES)
        for start in range(0, size_bytes, _CHUNK):
            _write(fd, os.urandom(min(_CHUNK, size_bytes - start)))
        os.fsync(fd)
    return size_bytes if os.fstat(fd).st_blocks * 512 >= size_bytes // 2 else 0


def _allocate(fd: int, size_bytes: int, *, offset: int = 0, keeps_size: bool = False) -> bool:
    """Return whether the file system gave these blocks, as it was asked to; not posix_fallocate(3), which pretends.

    Raises:
        OSError: there is no room for them.
    """
    mode = ctypes.c_int(_KEEP_SIZE if keeps_size else 0)
    if _libc().fallocate64(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(size_bytes)) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV):
        return False
    raise OSError(number, os.strerror(number))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
