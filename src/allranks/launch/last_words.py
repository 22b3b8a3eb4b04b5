"""What did a worker leave about how it ended? The files that the hook writes, or `@record`; its cell; its stderr."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Annotated, Any

import msgspec

from allranks.files.folder import Folder
from allranks.guard.inside.cell import Cell, CellRead
from allranks.guard.node.activity import Output
from allranks.join.raised_text import cut
from allranks.launch.worker_end import ExitCall, Left
from allranks.model.beat import Age
from allranks.model.foreign import Unreadable, decode_fields, decode_json
from allranks.model.raised import split_fatal
from allranks.model.safe_text import as_one_line, as_utf8

MAX_BYTES = 1 << 20
"""Of a file that the hook writes."""
STDERR_TAIL_BYTES = 4096
CRASH_BYTES = 65536
"""Of stderr, where a signal has ended a worker: faulthandler prints the stacks of all threads and many modules."""
ABORT_LINES = 8
"""Of what native code says before it aborts."""
TRACEBACK_LIMIT = 32_000
MESSAGE_LIMIT = 8_000
EXCEPTION_LIMIT = 2_000
"""Characters of an exception that others came after."""
MOST_BEFORE = 16
"""Such exceptions."""
MOST_THREADS = 8


class _Raised(msgspec.Struct):
    """An exception as the hook tells of it in the cell, and, but for its message, in the error file."""

    message: str = ""
    py_callstack: str = ""
    time_s: Age | None = None
    python: str | None = None
    before: tuple[str, ...] = ()
    threads: tuple[str, ...] = ()


class _Recorded(msgspec.Struct):
    """What torch's `@record` has under `message`, and the hook as well."""

    message: str
    extraInfo: msgspec.Raw = msgspec.Raw(b"{}")  # noqa: N815  (torch's name)


class _ErrorFile(msgspec.Struct):
    message: _Recorded | str


class _Called(msgspec.Struct):
    """A call of sys.exit or os._exit, as the hook notes it."""

    exit_code: Annotated[int, msgspec.Meta(ge=1, le=255)]
    time_s: Age
    before: tuple[str, ...] = ()


class _Words(msgspec.Struct):
    failed: str = ""


def read_left(folder: Folder, error_name: str, exit_name: str, cell: Cell) -> Left:
    """Return what a worker left behind; what it left in another shape than the hook counts as not left."""
    read, raised = cell.read(), _Raised()
    if read.raised is not None:
        with contextlib.suppress(Unreadable):
            raised = decode_fields(read.raised.data, _Raised)
    lost_lines, code = cell.lost_lines()
    return Left(
        error=_as_fields(raised) | _read_error(folder, error_name),  # the file may not have been written
        exit=_read_exit(folder, exit_name) if read.leaves is None else _exit_of(read.leaves.data),
        failed_call=_failed_call(read),
        lost_lines=lost_lines,
        lost_why=os.strerror(code) if lost_lines else "",
        threads=tuple(as_one_line(name) for name in raised.threads[:MOST_THREADS]),
    )


def read_crash(stderr: Output, exit_code: int) -> dict[str, Any]:
    """Return what faulthandler printed of a crash, and what stands before it, as fields of WorkerEnd."""
    before, stack = split_fatal(read_tail(stderr, CRASH_BYTES) or "")
    if not stack:
        return {}
    if exit_code == -signal.SIGABRT:  # native code has said why
        stack = "\n".join([*before.splitlines()[-ABORT_LINES:], stack])
    return {"stderr_tail": before.strip()[-STDERR_TAIL_BYTES:] or None, "traceback": stack[-TRACEBACK_LIMIT:]}


def read_tail(stderr: Output, num_bytes: int = STDERR_TAIL_BYTES) -> str | None:
    """The last lines this worker wrote to stderr."""
    return stderr.tail(num_bytes).strip("\0 \t\r\n") or None  # zeros: a hole in the file


def _read_error(folder: Folder, name: str) -> dict[str, Any]:
    """Return what the error file says; nothing, where it is no error file, and then stderr says more."""
    with contextlib.suppress(OSError, Unreadable):
        record = decode_json(folder.read(name, at_most=MAX_BYTES), _ErrorFile).message
        recorded, extra = _Recorded(record) if isinstance(record, str) else record, _Raised()
        with contextlib.suppress(Unreadable):
            extra = decode_fields(recorded.extraInfo, _Raised)
        extra.message = recorded.message
        return {"time_s": folder.status(name).st_mtime} | found if (found := _as_fields(extra)) else {}
    return {}


def _as_fields(raised: _Raised) -> dict[str, Any]:
    """Return what is told of an exception as fields of WorkerEnd, without those that are not known."""
    if not raised.message:
        return {}
    found: dict[str, Any] = {
        "message": as_utf8(cut(raised.message, MESSAGE_LIMIT)),
        "traceback": as_utf8(cut(raised.py_callstack, TRACEBACK_LIMIT)) or None,
        "before": _cut_before(raised.before),
        "python": raised.python and as_utf8(raised.python[:EXCEPTION_LIMIT]),
        "time_s": raised.time_s,
    }
    return {name: value for name, value in found.items() if value is not None}


def _read_exit(folder: Folder, name: str) -> ExitCall | None:
    with contextlib.suppress(OSError):
        return _exit_of(folder.read(name, at_most=MAX_BYTES))
    return None


def _exit_of(data: bytes) -> ExitCall | None:
    with contextlib.suppress(Unreadable):
        called = decode_json(data, _Called)
        return ExitCall(exit_code=called.exit_code, time_s=called.time_s, before=_cut_before(called.before))
    return None


def _cut_before(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(as_utf8(cut(text, EXCEPTION_LIMIT)) for text in texts[:MOST_BEFORE])


def _failed_call(read: CellRead) -> str:
    if read.words is None or (read.call is not None and read.call.written_ns > read.words.written_ns):
        return ""
    with contextlib.suppress(Unreadable):
        return as_utf8(cut(decode_json(read.words.data, _Words).failed, EXCEPTION_LIMIT))
    return ""
