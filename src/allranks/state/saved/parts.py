"""Is this file what its writer wrote? Reads manifests and parts, and believes only what matches its checksum.

Standard library only: the writer's process imports it, too.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from allranks.files.regular import open_regular
from allranks.state.saved.manifest import BLOCK_BYTES, MANIFEST, Damaged, Manifest, Part, parse_final

LARGEST_MANIFEST_BYTES = 256 << 20


def list_checkpoints(root: Path) -> list[Path]:
    """Directories that are checkpoints by their name, newest first; none where `root` is not there."""
    try:
        names = [path.name for path in root.iterdir()]
    except FileNotFoundError:
        return []
    named = [(place, name) for name in names if (place := parse_final(name))]
    return [root / name for _, name in sorted(named, reverse=True)]


class Mount:
    """Notices that the file system of a directory is gone: a save would fill the disk below its mount point."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._device: int | None = None

    def is_gone(self, *marks: Path) -> bool:
        """Whether the directory would be on another device than at the last call, and none of these files is there.

        A file system that was mounted again may have another number; what was in it is there.
        """
        place = self._directory
        while not place.exists() and place != place.parent:
            place = place.parent
        device = place.stat().st_dev
        if self._device not in (None, device) and not any(mark.exists() for mark in marks):
            return True
        self._device = device
        return False


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest, which says what else must be there.

    Raises:
        Damaged: it is missing, altered, or another directory's.
    """
    with _damage(MANIFEST), open_regular(directory / MANIFEST, follows_links=True) as file:
        manifest = Manifest.from_bytes(file.read(LARGEST_MANIFEST_BYTES))
    place = parse_final(directory.name)
    if place is None or place[0] != manifest.step:
        raise Damaged(f"{MANIFEST}: is of step {manifest.step}, the directory is {directory.name}")
    return manifest


@contextlib.contextmanager
def _damage(name: str) -> Iterator[None]:
    """Raise Damaged for what the file system says of this file."""
    try:
        yield
    except FileNotFoundError:
        raise Damaged(f"{name}: is not there") from None
    except OSError as exc:
        raise Damaged(f"{name}: {exc.strerror}") from exc


class PartReader:
    """Reads slices of one part, as the manifest says it is; every block is verified before a byte of it is given out.

    Raises:
        Damaged: the file is not there or of another size, a block does not match its checksum, or bytes outside of the
            part are asked for.
    """

    def __init__(self, directory: Path, part: Part) -> None:
        self.name, self.size_bytes, self._blocks = part.name, part.size_bytes, part.blocks
        self._seen = bytearray(len(part.blocks))
        self._cached: tuple[int, bytes] = (-1, b"")
        with _damage(part.name):
            self._file = open_regular(directory / part.name, follows_links=True)
        size_bytes = os.fstat(self._file.fileno()).st_size
        if size_bytes != part.size_bytes:
            self._file.close()
            raise Damaged(f"{part.name}: {size_bytes} bytes are there, {part.size_bytes} were written")

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target`, plain bytes, from `offset` on."""
        if offset < 0 or offset + len(target) > self.size_bytes:
            raise Damaged(f"{self.name}: {len(target)} bytes at {offset} are not in it")
        filled = 0
        while filled < len(target):
            index, start = divmod(offset + filled, BLOCK_BYTES)
            piece = memoryview(self._block(index))[start : start + len(target) - filled]
            target[filled : filled + len(piece)] = piece
            filled += len(piece)

    def read(self, offset: int, size_bytes: int) -> bytearray:
        """Return `size_bytes` from `offset` on."""
        if size_bytes > self.size_bytes:
            raise Damaged(f"{self.name}: {size_bytes} bytes at {offset} are not in it")
        data = bytearray(size_bytes)
        self.read_into(offset, memoryview(data))
        return data

    def verify_rest(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Verify what has not been read yet; False: it was told to stop before the end."""
        for index, is_seen in enumerate(self._seen):
            if should_stop():
                return False
            if not is_seen:
                self._block(index)
        return True

    def _block(self, index: int) -> bytes:
        if self._cached[0] == index:
            return self._cached[1]
        place = f"{self.name}: block {index + 1} of {len(self._blocks)}"
        with _damage(place):
            data = os.pread(self._file.fileno(), BLOCK_BYTES, index * BLOCK_BYTES)
        if zlib.crc32(data) != self._blocks[index]:
            raise Damaged(f"{place} does not match its checksum")
        self._seen[index] = 1
        self._cached = (index, data)
        return data

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
