"""What does the record of a training look like on disk? Numbers that stand for its state, at steps of two powers.

    checkpoints/trace/rank_00000.jsonl

    5f0c9a31 {"format":4,"since":64,"about":{"torch":"2.13.0", ...}}
    71aa03c8 [64,{"batch":-81230042,"generator/torch":7712,"part/model":590031}]

Files are only appended to. An object says what the rows below it have in common, and that rows from its step on that
stand above it do not count: the training was resumed there. Each line begins with its CRC-32, which for a row continues
that of its object: torn and damaged lines are passed over, and so are the rows of a damaged object. Of these it counts
from which step on they cut what stands above; where that cannot be read, nothing above counts.

`allranks diff` reads it without torch.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from allranks.files.regular import find_regular
from allranks.model.errors import UsageError

FORMAT = 4
FOLDER = "trace"
MOST_ROWS = 1024
"""From any step to twice as many steps, besides those at saves: 0.2 MB."""
MAX_BYTES = 64 << 20
PREFIXES = (
    "ALLRANKS_BACKEND", "ALLRANKS_BUCKET", "ALLRANKS_COMPRESS", "CUBLAS", "CUDA", "CUDNN", "GLOO_", "KMP_", "MKL_",
    "NCCL_", "NVIDIA_", "OMP_", "OPENBLAS", "PYTHONHASHSEED", "PYTORCH", "TORCH",
)  # fmt: skip
"""Of variables that change what is computed, or how."""
_BEGUN = re.compile(rb'.{8} (?:\[|\{"format":[0-9]+,"since":)([0-9]{1,18}),')
"""The step of a damaged line: a row of an object that cannot be read has at least the step from which on that cuts."""
_TORN_BYTES = 48
"""A shorter line was torn by the end of its process, and has no rows below it."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """What one rank had when so many steps were done."""

    step: int
    numbers: Mapping[str, int]
    """64 bits each, by column: `part/model` (rank 0), `generator/torch`, `batch` (of the step that comes then)."""
    about: Mapping[str, Any]
    """Of the process that wrote it: world size, script, arguments, torch, hardware, environment."""


class _Head(msgspec.Struct):
    format: int
    since: int = 0
    about: dict[str, Any] = {}


def is_recorded(step: int) -> bool:
    """Whether a check at this step has a row: a power of two divides it that grows with it.

    So two records of one training have steps in common.

    >>> [step for step in range(4 * MOST_ROWS + 9) if is_recorded(step)][-3:]
    [4096, 4100, 4104]
    """
    return step & -step >= step // MOST_ROWS


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank:05d}.jsonl"


def to_bytes(rows: Iterable[TraceRow], first: TraceRow | None = None) -> bytes:
    """Return the lines of rows; each begins a line, whatever was torn before it.

    Args:
        first: the first row below the last object in the file; None: this process has written none.
    """
    crc, lines = zlib.crc32(_head_of(first)) if first else 0, list[bytes]()
    for row in rows:
        if first is None or row.about != first.about:
            first, head = row, _head_of(row)
            crc = zlib.crc32(head)
            lines.append(b"\n%08x %s" % (crc, head))
        line = msgspec.json.encode((row.step, row.numbers))
        lines.append(b"\n%08x %s" % (zlib.crc32(line, crc), line))
    return b"".join(lines)


def _head_of(row: TraceRow) -> bytes:
    return msgspec.json.encode(_Head(FORMAT, row.step, dict(row.about)))


def parse_rows(data: bytes) -> list[TraceRow]:
    """Return the rows of this format that are whole, by step."""
    rows, about, crc_of_head = dict[int, TraceRow](), dict[str, Any](), 0
    for line in data.splitlines():
        told_crc, _, text = line.partition(b" ")
        crc = zlib.crc32(text, 0 if text.startswith(b"{") else crc_of_head)
        is_whole = told_crc == b"%08x" % crc
        told = msgspec.json.decode(text, type=_Head | tuple[int, dict[str, int]]) if is_whole else None
        if isinstance(told, tuple):
            step, numbers = told
            rows[step] = TraceRow(step, numbers, about)
        elif told is not None and told.format == FORMAT:
            rows, about, crc_of_head = _before(rows, told.since), told.about, crc
        elif (begun := _BEGUN.match(line)) or len(line) > _TORN_BYTES:
            rows = _before(rows, int(begun[1]) if begun else 0)
    return [rows[step] for step in sorted(rows)]


def _before(rows: Mapping[int, TraceRow], since: int) -> dict[int, TraceRow]:
    return {step: row for step, row in rows.items() if step < since}


def read_record(directory: Path) -> dict[int, list[TraceRow]]:
    """Return the rows of each rank beside these checkpoints; none where there is no record.

    Raises:
        UsageError: the record is damaged, or of another version of allranks.
    """
    record, has_other = {}, False
    for path in (directory / FOLDER).glob("rank_*"):
        number = path.name.removeprefix("rank_").removesuffix(".jsonl")
        data = find_regular(path, at_most=MAX_BYTES)
        if number.isdecimal() and path.name == file_name(int(number)) and (rows := parse_rows(data or b"")):
            record[int(number)] = rows
        has_other |= bool(data)
    if has_other and not record:
        raise UsageError(
            f"{directory}: its record has no whole row of format {FORMAT}, which this allranks reads; it is damaged, "
            "or of another version"
        )
    return record
