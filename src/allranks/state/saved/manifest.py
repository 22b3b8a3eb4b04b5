"""What is a whole checkpoint made of? Names, checksums and the MANIFEST, pure.

    step_300/
        rank_00000.safetensors    what is common to all ranks, and what is rank 0's own
        rank_00001.safetensors    rank 1's own, and its shards of sharded tensors
        MANIFEST.json             written last: step, world size, size and checksums of every part

Checksums are CRC-32 of blocks of 4 MiB, so that a rank which needs a slice of a part can verify what it reads. A CRC
finds every burst of up to 32 bits, and leaves 1 of 4 billion of all other alterations; it runs at memory speed, which
matters beside a training that needs the cores. The manifest's own is its second line.

Standard library only: the writer's process, which runs without any installed package, imports it.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FORMAT = 4
BLOCK_BYTES = 4 << 20
MANIFEST = "MANIFEST.json"

_FINAL = re.compile(r"step_(?P<step>[0-9]{1,18})(?:\.(?P<take>[0-9]{1,9}))?")
_TEMP = re.compile(r"step_(?P<step>[0-9]{1,18})\.tmp\.(?P<attempt>[0-9a-f]{4,64}-[0-9]{1,9})")
_PART = re.compile(r"rank_[0-9]{5,9}\.safetensors")


_MOST_CHARS = 300


class Damaged(ValueError):
    """What is there is not what was written; the message says what and where, in one line, whatever is there."""

    def __init__(self, what: str) -> None:
        shown = what if len(what) <= _MOST_CHARS else f"{what[:_MOST_CHARS]}..."
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in shown))


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a checkpoint, as its writer wrote it."""

    name: str
    size_bytes: int
    blocks: tuple[int, ...]
    """CRC-32 of each block of BLOCK_BYTES; the last one may be shorter."""
    verified_ns: int = 0
    """The file's mtime when its writer had read it back and found it right; 0: it had no time to."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What belongs to a checkpoint. A directory without a manifest is none."""

    step: int
    world_size: int
    attempt: str
    """The run, and the save's number within it: the same on all ranks."""
    torch: str
    """Version that wrote it."""
    saved_s: float
    """When, in seconds since the epoch, by the coordinator's clock."""
    parts: tuple[Part, ...]
    """One a rank, in order."""
    verified: bool = False
    """Ranks with the same state were compared when it was saved, and were equal."""
    healed: int = 0
    """How often a rank got the bits of others before that: then it is not what an undisturbed run would have."""

    def to_bytes(self) -> bytes:
        """The file: one line of JSON, and one with its CRC-32."""
        fields = {"format": FORMAT, **asdict(self), "parts": [part_to_json(part) for part in self.parts]}
        line = json.dumps(fields).encode() + b"\n"
        return line + _checksum_line(line)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Return what `to_bytes` wrote, or raise Damaged: it is not exactly that, or of another format."""
        line, newline, checksum = data.partition(b"\n")
        if not newline or checksum != _checksum_line(line + newline):
            raise Damaged(f"{MANIFEST}: does not match its own checksum")
        try:
            fields = json.loads(line)
            if (found := fields.pop("format")) != FORMAT:
                raise Damaged(f"{MANIFEST}: format {found}, this allranks reads format {FORMAT}")
            parts = tuple(part_from_json(part) for part in fields.pop("parts"))
            manifest = cls(**fields, parts=parts)
            told = ("step", "world_size", "attempt", "torch", "verified", "healed")
            kinds = [type(getattr(manifest, name)) for name in told]
            if kinds != [int, int, str, str, bool, int] or not 0 <= float(manifest.saved_s) < 1e15:
                raise TypeError("a field of another type")
        except Damaged:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as exc:
            raise Damaged(f"{MANIFEST}: is no manifest of ours ({exc!r})") from exc
        names = [part.name for part in parts]
        if len(names) != manifest.world_size or names != [part_name(rank) for rank in range(len(names))]:
            raise Damaged(f"{MANIFEST}: its parts are not those of {manifest.world_size} ranks")
        return manifest


def part_to_json(part: Part) -> dict[str, object]:
    """As plain values."""
    return {**asdict(part), "blocks": [f"{block:08x}" for block in part.blocks]}


def part_from_json(fields: Mapping[str, Any]) -> Part:
    """Return the part of plain values, or raise Damaged: there can be no such part."""
    try:
        name, size_bytes, verified_ns = str(fields["name"]), int(fields["size_bytes"]), int(fields["verified_ns"])
        blocks = tuple(int(block, 16) for block in fields["blocks"])
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise Damaged(f"{MANIFEST}: is no manifest of ours ({exc!r})") from exc
    if not _PART.fullmatch(name) or size_bytes < 0 or len(blocks) != -(-size_bytes // BLOCK_BYTES):
        raise Damaged(f"{MANIFEST}: {name} of {size_bytes} bytes in {len(blocks)} blocks cannot be")
    return Part(name, size_bytes, blocks, verified_ns)


def part_name(rank: int) -> str:
    """File name of a rank's part: `rank_00003.safetensors`."""
    return f"rank_{rank:05d}.safetensors"


def report_name(rank: int) -> str:
    """File in which a rank's writer says how far it is, while the checkpoint is being written."""
    return f"rank_{rank:05d}.json"


def temp_name(step: int, attempt: str) -> str:
    """Directory name while it is being written: `step_300.tmp.5eed-2`."""
    return f"step_{step}.tmp.{attempt}"


def final_name(step: int, take: int) -> str:
    """Directory name of the whole; further takes where the step was saved before.

    >>> final_name(300, 1), final_name(300, 2)
    ('step_300', 'step_300.2')
    """
    return f"step_{step}" if take == 1 else f"step_{step}.{take}"


def parse_final(name: str) -> tuple[int, int] | None:
    """Step and take of a checkpoint's directory; None: it is none. They sort as the checkpoints are new."""
    match = _FINAL.fullmatch(name)
    return (int(match["step"]), int(match["take"] or 1)) if match else None


def parse_temp(name: str) -> tuple[int, str] | None:
    """Step and attempt of a directory that is being written, or was left so; None: it is none."""
    match = _TEMP.fullmatch(name)
    return (int(match["step"]), match["attempt"]) if match else None


def _checksum_line(line: bytes) -> bytes:
    return b"%08x\n" % zlib.crc32(line)
