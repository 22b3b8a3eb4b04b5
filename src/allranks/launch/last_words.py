"""What did a worker leave about how it ended? The files that the hook writes, or `@record`; its cell; its stderr."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allranks.guard.inside.cell import Cell, CellRead
from allranks.launch.worker_end import Exit, Left
from allranks.model.raised import split_fatal
from allranks.model.text import as_one_line, as_utf8

STDERR_TAIL_BYTES = 4096
CRASH_BYTES = 65536
"""Of stderr, where a signal has ended a worker: faulthandler prints the stacks of all threads and many modules."""
ABORT_LINES = 8
"""Of what native code says before it aborts."""
TRACEBACK_LIMIT = 32_000
EXCEPTION_LIMIT = 2_000
"""Characters of an exception that others came after."""
MOST_BEFORE = 16
"""Such exceptions."""


def read_left(error_path: Path, exit_path: Path, cell: Cell) -> Left:
    """Return what a worker left behind."""
    read = cell.read()
    raised = _decode(read.raised.data) if read.raised is not None else {}
    threads = raised.get("threads")
    lost_lines, code = cell.lost_lines()
    return Left(
        error=_read_record(raised) | _read_error(error_path),  # the file may not have been written
        exit=_read_exit(_decode(read.leaves.data)) if read.leaves is not None else _read_exit_file(exit_path),
        failed_call=_failed_call(read),
        lost_lines=lost_lines,
        lost_why=os.strerror(code) if lost_lines else "",
        threads=tuple(as_one_line(str(name)) for name in threads) if isinstance(threads, list) else (),
    )


def read_crash(path: Path, start: int, exit_code: int) -> dict[str, Any]:
    """Return what faulthandler printed of a crash, and what stands before it, as fields of WorkerEnd."""
    before, stack = split_fatal(read_tail(path, start, CRASH_BYTES) or "")
    if not stack:
        return {}
    if exit_code == -signal.SIGABRT:  # native code has said why
        stack = "\n".join([*before.splitlines()[-ABORT_LINES:], stack])
    return {"stderr_tail": before.strip()[-STDERR_TAIL_BYTES:] or None, "traceback": stack[-TRACEBACK_LIMIT:]}


def read_tail(path: Path, start: int, num_bytes: int = STDERR_TAIL_BYTES) -> str | None:
    """The last lines this worker wrote to stderr."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - num_bytes))
        return file.read().decode(errors="replace").strip() or None
    return None


def _read_error(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        record, written_s = _decode(path.read_bytes()).get("message"), path.stat().st_mtime
        record = {"message": record} if isinstance(record, str) else record
        if isinstance(record, dict):
            extra = record.get("extraInfo")
            told = (extra if isinstance(extra, dict) else {}) | {"message": record.get("message")}
            return {"time_s": written_s} | found if (found := _read_record(told)) else {}
    return {}


def _read_record(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is told of an exception as fields of WorkerEnd, without those that are not known."""
    message, trace, time_s, python = map(told.get, ("message", "py_callstack", "time_s", "python"))
    if not message:
        return {}
    found: dict[str, Any] = {
        "message": as_utf8(str(message)[:TRACEBACK_LIMIT]),
        "traceback": as_utf8(str(trace)[-TRACEBACK_LIMIT:]) if trace else None,
        "before": _read_before(told.get("before")),
        "python": as_utf8(python) if isinstance(python, str) else None,
        "time_s": float(time_s) if isinstance(time_s, int | float) else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _read_exit_file(path: Path) -> Exit | None:
    with contextlib.suppress(OSError):
        return _read_exit(_decode(path.read_bytes()))
    return None


def _read_exit(note: Mapping[str, Any]) -> Exit | None:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        before = _read_before(note.get("before"))
        return Exit(exit_code=int(note["exit_code"]), time_s=float(note["time_s"]), before=before)
    return None


def _read_before(told: object) -> tuple[str, ...]:
    texts = told[:MOST_BEFORE] if isinstance(told, list) else []
    return tuple(as_utf8(str(text)[:EXCEPTION_LIMIT]) for text in texts)


def _failed_call(read: CellRead) -> str:
    if read.words is None or (read.call is not None and read.call.written_ns > read.words.written_ns):
        return ""
    return as_utf8(str(_decode(read.words.data).get("failed") or "")[:EXCEPTION_LIMIT])


def _decode(data: bytes) -> dict[str, Any]:
    """Return the object that a worker wrote as JSON; empty where it is none."""
    try:
        told = json.loads(data)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
