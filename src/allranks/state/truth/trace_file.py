"""What does the record of a training look like on disk? Numbers that stand for its state, at steps of two powers.

    checkpoints/trace/rank_00000        a line for what this process is and for the columns, then a line a step

    {"format": 2, "columns": ["batch", "generator/torch", "part/model"], "about": {"torch": "2.13.0", ...}} 5f0c9a31
    64 81c9a3b2d4e5f607 00c1d2e3f4a5b697 9d8c7b6a5f4e3d2c 71aa03c8

Each line ends with a CRC-32; that of a row continues that of the head above it: a row is read with its own columns, or
not at all. Torn and damaged lines are passed over. Of more than MOST_ROWS, every other one goes, those at steps that
the higher power of two does not divide; so two records of one training always have steps in common.

Standard library only: `allranks diff` reads it without torch.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.files.regular import find_regular

FORMAT = 2
FOLDER = "trace"
MOST_ROWS = 4096
MAX_BYTES = 64 << 20
PREFIXES = (
    "ALLRANKS_BACKEND", "ALLRANKS_BUCKET", "ALLRANKS_COMPRESS", "CUBLAS", "CUDA", "CUDNN", "GLOO_", "KMP_", "MKL_",
    "NCCL_", "NVIDIA_", "OMP_", "OPENBLAS", "PYTHONHASHSEED", "PYTORCH", "TORCH",
)  # fmt: skip
"""Of variables that change what is computed, or how."""
_WORD = (1 << 64) - 1


class OtherFormatError(ValueError):
    """Another version of allranks wrote the record."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """What one rank had when so many steps were done."""

    step: int
    numbers: Mapping[str, int]
    """64 bits each, by column: `part/model` (rank 0), `generator/torch`, `batch` (of the step that comes then)."""
    about: Mapping[str, Any]
    """Of the process that wrote it: world size, script, arguments, torch, hardware, environment."""


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank:05d}"


def to_bytes(rows: Iterable[TraceRow], after: TraceRow | None = None) -> bytes:
    """Return the lines of rows.

    Args:
        after: the row before them in the same file; None: they begin it.
    """
    lines, head = list[str](), _head_of(after) if after else ""
    for row in rows:
        if (own := _head_of(row)) != head:
            head = own
            lines.append(_with_crc(head))
        words = " ".join(f"{row.numbers[name] & _WORD:016x}" for name in sorted(row.numbers))
        lines.append(_with_crc(f"{row.step} {words}", head))
    return "".join(lines).encode()


def parse_rows(data: bytes) -> list[TraceRow]:
    """Return the rows that are whole, by step; of several of one step, the last one.

    Raises:
        OtherFormatError: it is of another version.
    """
    rows, head, told = dict[int, TraceRow](), "", dict[str, Any]()
    for line in data.decode("ascii", "replace").splitlines():
        text, _, crc = line.rpartition(" ")
        if text.startswith("{") and crc == _crc(text):
            head, told = text, json.loads(text)
            if told["format"] != FORMAT:
                raise OtherFormatError(f"format {told['format']}, this allranks reads format {FORMAT}")
        elif text and crc == _crc(text, head):
            step, *words = text.split()
            numbers = dict(zip(told["columns"], (int(word, 16) for word in words), strict=True))
            rows[int(step)] = TraceRow(int(step), numbers, told["about"])
    return [rows[step] for step in sorted(rows)]


def thin(rows: Sequence[TraceRow]) -> list[TraceRow]:
    """Return at most MOST_ROWS of them: those at steps that the least sufficient power of two divides.

    >>> [row.step for row in thin([TraceRow(step, {}, {}) for step in range(MOST_ROWS + 1)])][:3]
    [0, 2, 4]
    """
    kept, stride = [*rows], 1
    while len(kept) > MOST_ROWS:
        stride *= 2
        kept = [row for row in kept if row.step % stride == 0]
    return kept


def read_record(directory: Path) -> dict[int, list[TraceRow]]:
    """Return the rows of each rank beside these checkpoints; none where there is no record.

    Raises:
        OtherFormatError: it is of another version.
    """
    record = {}
    folder = directory / FOLDER
    for path in sorted(folder.glob("rank_*")) if folder.is_dir() else ():
        number = path.name.removeprefix("rank_")
        if number.isdecimal() and (rows := parse_rows(find_regular(path, at_most=MAX_BYTES) or b"")):
            record[int(number)] = rows
    return record


def _head_of(row: TraceRow) -> str:
    return json.dumps({"format": FORMAT, "columns": sorted(row.numbers), "about": dict(row.about)})


def _crc(text: str, head: str = "") -> str:
    return f"{zlib.crc32(text.encode(), zlib.crc32(head.encode())):08x}"


def _with_crc(text: str, head: str = "") -> str:
    return f"{text} {_crc(text, head)}\n"
