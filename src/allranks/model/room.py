"""How much room a node's run directory has: what its agent asked of the file system, and what its own writes met.

An agent asks every few seconds, so a file system that was full for a second may not be seen full. `full_ago_s` keeps
what was seen for a while, since the first who feels a full disk (a rank that dies, the ballast that is freed) makes
room again.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MIB = 1 << 20
GIB = 1 << 30
FULL_BYTES, FULL_SHARE = 4 * MIB, 1 / 128
"""Fewer free bytes than this, and than this share, are none: what file systems keep for themselves, the rest that a
writer left who failed."""
FULL_INODES = 4
"""The same for inodes: the verdict's draft, and a file or two that another process makes at the same time."""
SHORT_BYTES = GIB
SHORT_INODES = 1000
SHORT_SHARE = 0.1
"""Of a small file system, the share that is short where it is less than the figures above."""
FINE_TIMES = 1.5
"""Once short, a file system is fine again with this many times what is short, so that it is not said at each change."""

Amount = Annotated[int, msgspec.Meta(ge=0)]
Phrase = Annotated[str, msgspec.Meta(max_length=300)]


class Room(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is left in the file system of a run directory, as one node sees it."""

    free_bytes: Amount = 0
    """That this job's user may still write."""
    size_bytes: Amount = 0
    """Of the file system; 0: not known."""
    free_inodes: Amount | None = None
    """Files that can still be made; None: the file system does not count them (btrfs), or could not be asked."""
    size_inodes: Amount | None = None
    problem: Phrase | None = None
    """Why it cannot be asked or written: the errno's name and text, `ENOENT: the directory was removed`. ENOSPC and
    EDQUOT where a write of the agent itself met them: a quota is in no other figure."""
    full_ago_s: Annotated[float, msgspec.Meta(ge=0, le=1e15)] | None = None
    """Seconds since it was last seen full; 0: it is; None: it never was."""
    is_shared: bool = False
    """The directory of another node of the job is beside this one's: their file system is the same."""
    kept_bytes: Amount = 0
    """That its agent keeps back for a disk that fills up (report.ballast)."""
    freed_bytes: Amount = 0
    """That it kept back, and gave up when the file system was full; until there is room again."""

    @property
    def is_full(self) -> bool:
        """Nothing can be written now: almost no byte or inode is free, or a write met ENOSPC or EDQUOT."""
        return (
            (self.size_bytes > 0 and self.free_bytes < min(FULL_BYTES, FULL_SHARE * self.size_bytes))
            or (self.free_inodes is not None and self.free_inodes < FULL_INODES)
            or (self.problem or "").startswith(("ENOSPC", "EDQUOT"))
        )

    @property
    def lacks_inodes(self) -> bool:
        """It is full, or soon will be, of files and not of bytes."""
        known = msgspec.structs.replace(self, problem=None)
        of_bytes = msgspec.structs.replace(known, free_inodes=None)
        return known.is_short(was_short=True) and not of_bytes.is_short(was_short=True)

    @property
    def is_gone(self) -> bool:
        """The directory is not there any more: removed, or its file system was unmounted."""
        return (self.problem or "").startswith(("ENOENT", "ESTALE", "ENOTDIR", "ENODEV"))

    def was_full(self, within_s: float = 60.0) -> bool:
        """Return whether it is full, or was seen full at most so long ago."""
        return self.is_full or (self.full_ago_s is not None and self.full_ago_s <= within_s)

    def is_short(self, *, was_short: bool = False) -> bool:
        """Return whether it will soon be full.

        Args:
            was_short: it was at the last look; then it takes FINE_TIMES as much to be fine again.
        """
        times = FINE_TIMES if was_short else 1.0
        of_bytes = self.size_bytes > 0 and self.free_bytes < times * min(SHORT_BYTES, SHORT_SHARE * self.size_bytes)
        if self.free_inodes is None:
            return self.is_full or of_bytes
        at_least = SHORT_INODES if self.size_inodes is None else min(SHORT_INODES, SHORT_SHARE * self.size_inodes)
        return self.is_full or of_bytes or self.free_inodes < times * at_least


class FullPlace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A directory that ranks write to, whose file system was full when one of them failed."""

    purpose: Phrase
    """`run directory`, `TMPDIR`, `checkpoint directory`, `working directory`, `/dev/shm`."""
    path: Phrase
    room: Room
    largest: Phrase = ""
    """What there is the largest, as far as a short look shows: `other (96 MiB, of alice)`."""
