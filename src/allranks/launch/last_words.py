"""What did a worker leave about how it ended? The file of an exception, the cell, the end of its stderr."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allranks.model.raised import split_fatal
from allranks.model.text import as_utf8

STDERR_TAIL_BYTES = 4096
CRASH_BYTES = 65536
"""Of stderr, where a signal has ended a worker: faulthandler prints the stacks of all threads and many modules."""
ABORT_LINES = 8
"""Of what native code says before it aborts."""
TRACEBACK_LIMIT = 32_000


def read_crash(path: Path, start: int, exit_code: int) -> dict[str, Any]:
    """Return what faulthandler printed of a crash, and what stands before it, as fields of WorkerEnd."""
    before, stack = split_fatal(read_tail(path, start, CRASH_BYTES) or "")
    if not stack:
        return {}
    if exit_code == -signal.SIGABRT:  # native code has said why
        stack = "\n".join([*before.splitlines()[-ABORT_LINES:], stack])
    return {"stderr_tail": before.strip()[-STDERR_TAIL_BYTES:] or None, "traceback": stack[-TRACEBACK_LIMIT:]}


def read_error_file(path: Path) -> dict[str, Any]:
    """Return what `@record` or the hook wrote down of an exception, as far as it is there, as fields of WorkerEnd."""
    with contextlib.suppress(OSError):
        record = decode(path.read_bytes()).get("message")
        record = {"message": record} if isinstance(record, str) else record
        if isinstance(record, dict):
            extra = record.get("extraInfo")
            return read_record((extra if isinstance(extra, dict) else {}) | {"message": record.get("message")})
    return {}


def decode(data: bytes) -> dict[str, Any]:
    """Return the object that a worker wrote as JSON; empty where it is none."""
    try:
        told = json.loads(data)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def read_record(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the hook tells of an exception as fields of WorkerEnd, without those that are not known."""
    message, trace, time_s, python = map(told.get, ("message", "py_callstack", "time_s", "python"))
    found: dict[str, Any] = {
        "message": as_utf8(str(message)[:TRACEBACK_LIMIT]) if message else None,
        "traceback": as_utf8(str(trace)[-TRACEBACK_LIMIT:]) if trace else None,
        "python": as_utf8(python) if isinstance(python, str) else None,
        "time_s": float(time_s) if isinstance(time_s, int | float) else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def read_tail(path: Path, start: int, num_bytes: int = STDERR_TAIL_BYTES) -> str | None:
    """The last lines this worker wrote to stderr."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - num_bytes))
        return file.read().decode(errors="replace").strip() or None
    return None
