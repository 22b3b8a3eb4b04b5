"""Prepare a worker before the user's first line: record why it dies, and wrap `init_process_group` once imported.

Called by `site/sitecustomize.py` in every Python process below the agent, so also in DataLoader workers and in
processes that never import torch: nothing here may cost time, import much, or change what the script sees. Standard
library only; torch is never imported here, only waited for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import traceback
from types import ModuleType, TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs every Python process some milliseconds
    from collections.abc import Callable
    from typing import Any, NoReturn

GROUP_MODULE = "torch.distributed.distributed_c10d"
"""Where torch defines `init_process_group`; torch.distributed takes the name from there."""
BOOKED = {
    "torch": (), "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "safetensors.torch": ("save_file",), "lightning_fabric.utilities.cloud_io": ("_atomic_save",),
    "lightning.fabric.utilities.cloud_io": ("_atomic_save",),
}  # fmt: skip
"""Modules whose functions are marks of where time goes (guard.inside.thread_marks), and those of them that save:
Lightning has torch save into memory, and writes that."""

CELL_CHARS = 2500
"""Of a message and of a traceback, in the cell: JSON needs at most 6 bytes for one, and there are 64 KiB."""
CELL_BEFORE_CHARS = 300

_text: Any = None
"""join/raised_text.py, in a worker."""
_refused: ModuleType | None = None
"""join/refused.py, once torch.distributed has been imported."""
_worker_pid = 0
"""Of this process, where it is a worker: a fork of it is none."""
_held: tuple[str, int] = ("", -1)
"""The directory of this worker's files, where another user could swap it: a path through the descriptor, and that."""
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def become_worker() -> None:
    """Take note of the environment that a standby got with its orders, after its imports."""
    global _worker_pid
    _worker_pid = os.getpid()
    _hold_folder()
    if _refused is not None:
        _refused.note_place()
    _tell_of_itself()


def arm() -> None:
    """Install all parts in this process."""
    global _worker_pid, _text
    if os.environ.get("ALLRANKS_AGENT_PID") == str(os.getppid()):
        _worker_pid, _text = os.getpid(), _load("raised_text")
        _hold_folder()
        _record_uncaught_exceptions()
        _record_exits()
        if not faulthandler.is_enabled():  # else as PYTHONFAULTHANDLER or -X has it
            with contextlib.suppress(Exception):  # stderr is closed
                faulthandler.enable()
    with contextlib.suppress(AttributeError, ValueError):  # stdout is closed, or replaced
        # Each line in one write: those of several processes do not mix. PYTHONUNBUFFERED writes its end apart.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _tell_of_itself()
    changes: dict[str, Callable[[ModuleType], None]] = {GROUP_MODULE: _wrap_group}
    if os.environ.keys() & {"ALLRANKS_CELL_FD", "ALLRANKS_STANDBY"}:
        changes |= dict.fromkeys(BOOKED, _mark)
    sys.meta_path.insert(0, _Changes(changes))


def _hold_folder() -> None:
    """Have torch's own files go into the directory that the agent holds, where another user could swap that.

    NCCL's flight recorder and `@record` open files by their paths, and follow links. Here their paths begin with a
    descriptor of this process instead. Without the agent's directory, they have no files to write.
    """
    global _held
    path = os.path.dirname(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    agents = os.environ.get("ALLRANKS_FOLDER")
    if not agents or not path:
        return
    with contextlib.suppress(OSError):
        fd = os.open(path, _OPEN)
        status = os.fstat(fd)
        if f"{status.st_dev}:{status.st_ino}" == agents:
            _held = f"/proc/{os.getpid()}/fd/{fd}", fd
        else:
            os.close(fd)
    for name in ("TORCHELASTIC_ERROR_FILE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        parent, file = os.path.split(os.environ.get(name, ""))
        if parent == path and _held[0]:
            os.environ[name] = f"{_held[0]}/{file}"
        elif parent == path:
            del os.environ[name]


class _Changes(importlib.abc.MetaPathFinder):
    """Lets the imports of these modules happen as ever, and then changes what they defined."""

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = self._changes.pop(fullname, None)  # once; and find_spec below must not meet us again
        if change is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            spec.loader.exec_module = execute  # type: ignore  # it may be the loader of other modules, too
            try:
                execute(module)
            except BaseException as exc:  # Python leaves its own frames out, unless one of ours stands among them
                exc.__traceback__ = exc.__traceback__ and exc.__traceback__.tb_next
                raise
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap_group(module: ModuleType) -> None:
    global _refused
    try:
        _load("group").wrap(module, _refused := _load("refused"))
    except Exception as exc:  # a torch whose inside we do not know: the worker goes on as it is
        print(f"allranks: init_process_group is not watched: {exc!r}", file=sys.stderr)
    if "ALLRANKS_CELL_FD" in os.environ or "_allranks_standby" in sys.modules:
        try:
            load_inside().arm(module)
        except Exception as exc:
            print(f"allranks: this process does not report its state to the guard: {exc!r}", file=sys.stderr)
    if os.environ.keys() & {"ALLRANKS_COMPRESS", "ALLRANKS_BUCKET_MB"} or "_allranks_standby" in sys.modules:
        _load("ddp").arm(module)


def _mark(module: ModuleType) -> None:
    try:
        load_inside("thread_marks").wrap(module, BOOKED[module.__name__])
    except Exception as exc:
        print(f"allranks: what {module.__name__} does is not booked: {exc!r}", file=sys.stderr)


def _load(name: str) -> ModuleType:
    """Return a module beside this one, by path, see site/sitecustomize.py."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_allranks_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tell_of_itself() -> None:
    """Have the agent know which signals the script handles, and which lines are lost, where this process has a cell."""
    fd = os.environ.get("ALLRANKS_CELL_FD", "")
    with contextlib.suppress(OSError):  # a shell between may have closed it
        if fd.isdecimal() and "allranks-cell" in os.readlink(f"/proc/self/fd/{fd}"):
            load_inside("handlers").begin(int(fd))
            load_inside("lost_output").begin(int(fd))


def load_inside(name: str = "entry") -> ModuleType:
    """Return a module of guard/inside, as part of a package of its own that is found by path."""
    own = "_allranks_inside"
    if own not in sys.modules:
        package = ModuleType(own)
        here = os.path.dirname(os.path.abspath(__file__))
        package.__path__ = [os.path.join(os.path.dirname(here), "guard", "inside")]
        sys.modules[own] = package
    return importlib.import_module(f"{own}.{name}")


def _record_uncaught_exceptions() -> None:
    """Have an uncaught exception leave the file that torch's `@record` would, and tell the agent: it is an end."""
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            with contextlib.suppress(Exception):
                cause = _unrecorded(value)
                kind_, trace_ = type(cause), cause.__traceback__
                is_end = getattr(sys, "last_value", None) is value  # else the script has called this, and goes on
                frames = "".join(traceback.format_tb(trace_, -_text.MOST_FRAMES))
                first = _record(f"{_text.HEADER}{frames}{kind_.__name__}\n")
                if is_end:  # before the exception says what it is: that may take forever
                    with contextlib.suppress(Exception):
                        _tell_agent(kind_.__name__, first)
                message, extra = _text.say(kind_, cause), first | {"before": _text.before(cause)}
                extra["py_callstack"] = _text.format_all(cause)
                if is_end:  # before the file: it needs no disk
                    with contextlib.suppress(Exception):
                        _tell_agent(message, extra)
                _write_error_file(message, extra)
        if "_allranks_inside.entry" in sys.modules:
            load_inside().last_words()
        previous(kind, value, trace)

    sys.excepthook = excepthook


def _unrecorded(value: BaseException) -> BaseException:
    """Return the exception that ended the worker where torch's `@record` then could not write its file of it.

    Source: torch 2.13, elastic/multiprocessing/errors/error_handler.py, which catches no error of its own there.
    """
    trace = value.__traceback__
    while trace is not None and isinstance(value, OSError):
        if trace.tb_frame.f_code.co_name == "record_exception":
            for before in _text.chain(value)[1:]:
                if before.__traceback__ is not None:  # a close that fails raises two
                    value = before
                    break
            return value
        trace = trace.tb_next
    return value


def _record_exits() -> None:
    """Have a call of sys.exit or os._exit tell the agent: a script that has caught an exception may end so."""
    for module, name in ((sys, "exit"), (os, "_exit")):
        setattr(module, name, _noting(getattr(module, name)))


def _noting(leave: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    @functools.wraps(leave)
    def noting(*args: Any, **kwargs: Any) -> NoReturn:
        with contextlib.suppress(Exception):  # whatever is wrong with it, Python says
            _note_exit(*args, **kwargs)
        leave(*args, **kwargs)

    return noting


def _note_exit(status: object = None) -> None:
    exit_code = status & 0xFF if isinstance(status, int) else int(status is not None)
    if not exit_code or os.environ.get("ALLRANKS_AGENT_PID") != str(os.getppid()):
        return
    value = sys.exc_info()[1]
    before = _text.before(value) if value is not None else []
    before += [_text.cut(_text.say(type(value), value), _text.EXCEPTION_LIMIT)] if value is not None else []
    note = {"exit_code": exit_code, "time_s": time.time(), "before": before}
    if (cell := _own_cell()) and cell.leaves(
        _as_json({**note, "before": [_text.cut(text, CELL_BEFORE_CHARS) for text in before]})
    ):
        return
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if path.endswith(".error.json"):
        _write(f"{path.removesuffix('.error.json')}.exit.json", note)


def _record(py_callstack: str) -> dict[str, Any]:
    """Return what torchelastic keeps of an exception beside its message.

    Source: torch 2.13, elastic/multiprocessing/errors/error_handler.py.
    """
    now_s = time.time()
    return {
        "py_callstack": py_callstack,
        "timestamp": str(int(now_s)),
        "time_s": now_s,
        "python": sys.executable,
        "before": [],
    }


def _write_error_file(message: str, extra: dict[str, object]) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not os.path.exists(path):
        _write(path, {"message": {"message": message, "extraInfo": extra}})


def _write(path: str, record: object) -> None:
    """Write a file at once, or not at all; never through a link, or in a directory of another user.

    Somebody who owns a directory above it may put his own one there (files/folder.py). The owner of the draft tells
    whose it should be: a file server may turn root into another user.
    """
    parent, name = os.path.split(path)
    folder = os.dup(_held[1]) if parent == _held[0] else os.open(parent, _OPEN)
    draft = f".{name}.{os.urandom(8).hex()}"  # nobody can guess it
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
        with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            if os.fstat(fd).st_uid != os.fstat(folder).st_uid:
                return
            json.dump(record, file, ensure_ascii=False)
        os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        with contextlib.suppress(OSError):  # it has been renamed
            os.unlink(draft, dir_fd=folder)
        os.close(folder)


def _own_cell() -> Any:
    """Return the cell of this worker; None where it has none, or another process writes into it."""
    if os.getpid() != _worker_pid or "ALLRANKS_CELL_FD" not in os.environ:
        return None
    cell = load_inside("cell").Cell.inherited()
    return cell if cell is not None and cell.claim() else None


def _as_json(record: object) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace")


def _tell_agent(message: str, extra: dict[str, Any]) -> None:
    """Write it into the cell, with the threads that keep the process from ending."""
    if (cell := _own_cell()) is None:
        return
    threads = sys.modules.get("threading")
    alive = [thread for thread in threads.enumerate() if not thread.daemon] if threads else []
    names = [thread.name[:100] for thread in alive if threads and thread is not threads.main_thread()][:8]
    told = extra | {
        "message": _text.cut(message, CELL_CHARS),
        "py_callstack": _text.cut(extra["py_callstack"], CELL_CHARS),
        "before": [_text.cut(text, CELL_BEFORE_CHARS) for text in extra["before"]],
        "threads": names,
    }
    cell.raised(_as_json(told))
