"""The standby: a process with torch imported that forks the workers of its node.

The agent starts it with the workers' own command line and ALLRANKS_STANDBY=<number of a socket>. Python runs our
sitecustomize before anything of the script. There this process

1. imports torch, and says `ready` or why it cannot be forked: threads that a fork would lose, a device in use;
2. forks a worker for each message of the agent, twice, so that the worker becomes a child of the agent (a subreaper);
3. returns in the worker, which has its own output, environment, session and seeds: the interpreter goes on to the
   script.

Many scripts import more of torch later: the first optimizer, or DDP, imports torch._dynamo, which takes as long as
torch itself. The first generation does not wait for that. Each worker notes which modules of LATER it imports; then the
standby forks a child that imports the same, and that child forks the workers of the next generations. If the child
cannot be forked, or ends, the standby goes on without it.

So sys.argv, sys.path, __main__, tracebacks and exit codes are the interpreter's own work. A worker that the agent does
not expect any more ends before step 3. A script may change what torch reads at its import (OMP_NUM_THREADS) before it
imports torch, so torch and numpy appear in the worker only at the script's own import; if such a variable differs then,
the process executes its command line anew, with the same pid, and imports torch itself.

Limits: Python's hash seed and the addresses of libraries are the same in all workers of a node. Called by
`site/sitecustomize.py`. Standard library only, and torch through the import system.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.abc
import importlib.machinery
import mmap
import os
import re
import select
import signal
import socket
import stat
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

ENV = "ALLRANKS_STANDBY"
ENVIRONMENT = "allranks-environment"
"""Name of the memory file that each forked worker keeps: /proc/PID/environ is the standby's."""
READY, NO_TORCH = "ready", "torch is not installed"
"""Two of the answers of a standby; all others say why it cannot be forked."""
GO = b"go"
MAX_FDS, MAX_BYTES = 8, 4096
"""Of a message."""

HELD = ("torch", "numpy")
"""Modules whose libraries read the environment when they are loaded."""
LATER = ("torch._dynamo", "torch.distributed.checkpoint", "allranks.session", "allranks.state.resumed.begin")
"""What scripts import after torch, in the order in which the standby's child does. torch._dynamo is 820 modules."""
IDLE_S = 3.0
"""Without a fork and without another import of LATER, before the child imports: until then, the cores are the
workers'."""
_SAME, _CHANGED = 1, 2
"""A worker's notes of a module in LATER: whether the variables that its import reads are as at the worker's start."""
_OF_TORCH = r"TORCH(?!ELASTIC_|_NCCL_|_FR_)"
_AT_IMPORT = (
    r"OMP_|GOMP_|GOTO_|KMP_|MKL_|MKLDNN_|DNNL_|ONEDNN_|OPENBLAS_|NPY_|NUMPY_|ATEN_|KINETO_"
    rf"|PYTORCH_(?!NVML_BASED_CUDA_CHECK$)|{_OF_TORCH}"
)
_READ_AT_IMPORT = re.compile(_AT_IMPORT)
"""Variables that torch or a library reads when it is loaded. NCCL and the flight recorder read theirs when a group is
formed, CUDA when a device is first used. Each call of torch.cuda.is_available reads PYTORCH_NVML_BASED_CUDA_CHECK,
which Lightning sets before it imports torch. Source: getenv and os.environ, logged during `import torch` (2.13)."""
_READ_LATER = re.compile(
    rf"{_OF_TORCH}|AOT|INDUCTOR_|PT2_|PARTITIONER_|FAKE_|CUT|TRITON_|SYMPY_|MPMATH_|LOG_|DUMP_|CI$|CXX$|TMP|TEMP$"
)
"""Variables that an import of LATER reads. Source: os.environ, logged likewise."""
_READ_AT_START = re.compile(
    rf"{_AT_IMPORT}|PYTHON|LD_|MALLOC_|GLIBC_|LC_(?!CTYPE$)|LANG|TZ$|HOME$|VIRTUAL_ENV$|ALLRANKS_HOOK$"
)
"""And those that the interpreter or the C library reads when a process starts."""

_PR_SET_PDEATHSIG = 1
_HARMLESS = ("/dev/null", "/dev/urandom", "/dev/random")


def differing(
    before: Mapping[str, str], after: Mapping[str, str], *, read: re.Pattern[str] = _READ_AT_START
) -> list[str]:
    """Return the names of the variables that differ and are read only once.

    >>> differing({"OMP_NUM_THREADS": "1", "RANK": "0"}, {"OMP_NUM_THREADS": "2", "RANK": "1"})
    ['OMP_NUM_THREADS']
    """
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    return sorted(name for name in names if read.match(name))


@dataclass(frozen=True)
class _Start:
    """What the standby was when it started, before it imported anything."""

    env: Mapping[str, str]
    modules: frozenset[str]
    files: frozenset[str]
    """As `_open_files`."""


def stand_by() -> None:
    """Fork workers until the agent is gone; returns in each worker, never in the standby."""
    control = socket.socket(fileno=int(os.environ.pop(ENV)))  # before anything starts a child that would wait, too
    control.set_inheritable(False)
    start = _Start(dict(os.environ), frozenset(sys.modules), _open_files())
    obstacle = _import("torch") or _find_obstacle(start)
    with contextlib.suppress(OSError):  # the agent is gone
        control.send((obstacle or READY).encode(errors="replace")[:MAX_BYTES])
    if obstacle:
        os._exit(0)
    _serve(control, start)


def _import(*names: str) -> str:
    """Import these modules, and return why one of them cannot be imported; empty if all are."""
    try:
        for name in names:
            importlib.import_module(name)
    except Exception as exc:
        is_missing = isinstance(exc, ModuleNotFoundError) and exc.name == name
        return f"{name} {'is not installed' if is_missing else f'cannot be imported: {exc}'}"
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return ""


def _serve(control: socket.socket, start: _Start) -> None:
    """Fork a worker for each message of the agent; returns in each of them."""
    agent, notes = os.getppid(), mmap.mmap(-1, len(LATER))
    gc.freeze()  # no collection in a worker touches, and so copies, what all of them share
    child = pipe = 0
    looks, before = True, notes[:]
    while True:
        ends = [control.fileno(), *([pipe] if child else [])]
        readable, _, _ = select.select(ends, [], [], IDLE_S if looks else None)
        if not readable:
            looks, before = not any(now := notes[:]) or now != before, now
            if not looks and _CHANGED not in now:
                names = [name for name, note in zip(LATER, now, strict=True) if note]
                child, pipe = _fork_child(names, start)
        elif ends[0] in readable:
            if _fork_worker(control, agent, start, notes, pipe):
                return
        else:  # the child is ready, or has ended: until then, this process forks
            os.close(pipe)
            os.waitpid(child, 0)
            child = pipe = 0


def _fork_child(names: list[str], start: _Start) -> tuple[int, int]:
    """Fork a process that imports these modules, and return its pid and a pipe, readable when it can fork workers.

    Returns 0 and 0 in that process once its parent has closed the pipe, as only one of them may take messages; and
    where it cannot be forked.
    """
    standby, (pipe, end) = os.getpid(), os.pipe()
    child = _try_to_fork()
    if child == 0:
        os.close(pipe)
        _die_with(standby)
        if _import(*names) or _find_obstacle(start):
            os._exit(0)
        gc.freeze()
        os.write(end, b"r")
        parent = select.poll()
        parent.register(end, 0)  # POLLERR: nobody has the other end open
        parent.poll()
    os.close(end)
    if child is None:
        os.close(pipe)
    return (child, pipe) if child else (0, 0)


def _fork_worker(control: socket.socket, agent: int, start: _Start, notes: mmap.mmap, pipe: int) -> bool:
    """Fork a worker for the next message; returns whether this process is the worker."""
    message, fds, _, _ = socket.recv_fds(control, MAX_BYTES, MAX_FDS)
    if not message or _num_threads() > 1:  # the agent is gone, or does not want it any more
        os._exit(0)
    if (between := _try_to_fork()) == 0:
        if pipe:
            os.close(pipe)
        _fork_again(agent)
        control.close()
        _become(message.decode().split(), fds, start)
        sys.meta_path.insert(0, _Noted(notes))
        return True
    for fd in fds:
        os.close(fd)
    if between is not None:
        os.waitpid(between, 0)
    return False


def _try_to_fork() -> int | None:
    """As os.fork(); None if no process is left. The agent then sees that the other end of the tether is closed."""
    try:
        return os.fork()
    except OSError:
        return None


def _fork_again(agent: int) -> None:
    """Return in a child that the agent has adopted."""
    between = os.getpid()
    if _try_to_fork() != 0:
        os._exit(0)
    while os.getppid() == between:  # it is on its way out
        time.sleep(0.0005)
    _die_with(agent)


def _die_with(agent: int) -> None:
    """Have the kernel end this process when its agent, which must be its parent by now, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        os._exit(0)


def _become(names: list[str], fds: list[int], start: _Start) -> None:
    """Turn this fork of the standby into the worker that the message describes."""
    tether_fd, environment, out, err, *handed = fds
    answer = b""
    with socket.socket(fileno=tether_fd) as tether, contextlib.suppress(ConnectionError):  # the agent waits no longer
        tether.send(str(os.getpid()).encode())
        answer = tether.recv(len(GO))
    if answer != GO:
        os._exit(0)
    os.setsid()
    entries = os.pread(environment, os.fstat(environment).st_size, 0).split(b"\0")[:-1]
    env = dict(os.fsdecode(entry).split("=", 1) for entry in entries)
    for name, fd in zip(names, handed, strict=True):
        os.set_inheritable(fd, True)
        env[name] = str(fd)
    _take_output(out, err)
    from_import = {name: value for name, value in os.environ.items() if start.env.get(name) != value}
    if "LC_CTYPE" in start.env and "LC_CTYPE" not in env:
        env["LC_CTYPE"] = start.env["LC_CTYPE"]  # Python's own, for the C locale
    os.environ.clear()
    os.environ.update({**from_import, **env})
    _draw_seeds()
    sys.meta_path.insert(0, _Held(env))


def _take_output(out: int, err: int) -> None:
    """Put the worker's files under stdout and stderr, and there what the import said, as a fresh start would have."""
    for fd, target in ((1, out), (2, err)):
        said = os.pread(fd, os.fstat(fd).st_size, 0)
        os.dup2(target, fd)
        os.close(target)
        if said:
            os.write(fd, said)


def _draw_seeds() -> None:
    """Draw from the system what an import draws once a process; Python's own `random` does so at a fork by itself."""
    sys.modules["torch"].default_generator.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)


# What cannot be forked


def _find_obstacle(start: _Start) -> str:
    """Return why this process cannot be forked into workers; empty if it can."""
    if shadow := _find_shadow({name.partition(".")[0] for name in sys.modules.keys() - start.modules}):
        return f"{shadow} has the name of a module that torch imports"
    in_use = sorted(name for name in _open_files() - start.files if name.startswith(("/dev/", "socket:")))
    if in_use or sys.modules["torch"].cuda.is_initialized():
        return f"import torch leaves a device or socket in use: {', '.join(in_use) or 'CUDA'}"
    if _num_threads() > 1:
        _let_pools_end()
    if (num_threads := _num_threads()) > 1:
        return f"import torch starts threads, which a fork would lose: {num_threads - 1}"
    return ""


def _find_shadow(imported: set[str]) -> str | None:
    """Return what lies beside the script and would be imported in place of one of these modules."""
    arguments = sys.orig_argv[1:]
    script = os.path.realpath(arguments[0])
    home = os.getcwd() if arguments[0] == "-m" else script if os.path.isdir(script) else os.path.dirname(script)
    try:
        beside = {entry.partition(".")[0] for entry in os.listdir(home)}
        for name in sorted(imported & beside):
            spec = importlib.machinery.PathFinder.find_spec(name, [home])
            if spec is not None and spec.origin is not None:  # None: a directory that is no package loses to a module
                return spec.origin
    except OSError:
        pass
    finally:
        sys.path_importer_cache.pop(home, None)
    return None


def _let_pools_end() -> None:
    """Fork once: OpenBLAS ends its threads before a fork, and starts them again when it computes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads
        if (child := os.fork()) == 0:
            os._exit(0)
    os.waitpid(child, 0)
    deadline_s = time.monotonic() + 1
    while _num_threads() > 1 and time.monotonic() < deadline_s:  # a thread that was joined leaves /proc a moment later
        time.sleep(0.001)


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _open_files() -> frozenset[str]:
    """Sockets and character devices that this process has open."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mode, name = os.fstat(int(entry)).st_mode, os.readlink(f"/proc/self/fd/{entry}")
            if (stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)) and name not in _HARMLESS:
                found.add(name)
    return frozenset(found)


# The script's own import of torch


class _Held(importlib.abc.MetaPathFinder):
    """Hides torch and numpy until the script imports them, and checks then that a fresh import would be the same.

    Args:
        env: the worker's environment at its start.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = dict(env)
        self._seen, self._pid, self._cwd = dict(os.environ), os.getpid(), os.getcwd()
        self._modules = {name: sys.modules.pop(name) for name in HELD if name in sys.modules}
        self._specs: dict[str, Any] = {name: module.__spec__ for name, module in self._modules.items()}

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            # Only an import calls these two; whoever just looks for the module gets the spec of a fresh process.
            spec.loader.create_module = self._create_module  # type: ignore[method-assign]
            spec.loader.exec_module = self._exec_module  # type: ignore[method-assign]
        return spec

    def _create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        differ = differing(self._seen, os.environ, read=_READ_AT_IMPORT)
        is_other = spec.origin != self._specs[spec.name].origin
        if (differ or is_other) and os.getpid() == self._pid:
            self._start_anew(differ[0] if differ else f"the path to {spec.name}")
        return self._modules[spec.name]

    def _exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__spec__ = self._specs[name]
        del self._modules[name]
        if name == HELD[0]:  # its import brings the others
            sys.meta_path.remove(self)
            for other in self._modules:
                sys.modules.setdefault(other, self._modules[other])

    def _start_anew(self, what: str) -> None:
        """Execute the worker's own command line, as an ordinary start would have."""
        if self._env.get("RANK") == "0":
            words = f"the script changes {what} before it imports torch: its workers start again, without the standby"
            print(f"allranks: {words} (--no-standby avoids the second start)", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        _die_with(os.getppid())  # the kernel knows it of the thread that asked
        with contextlib.suppress(ValueError):  # not the main thread
            for signum in (signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(signum, signal.SIG_IGN)
        os.chdir(self._cwd)
        os.execve(sys.executable, sys.orig_argv, self._env)


class _Noted(importlib.abc.MetaPathFinder):
    """Notes for the standby which modules of LATER this worker imports; finds none.

    Args:
        notes: a byte a module, in memory that the standby shares.
    """

    def __init__(self, notes: mmap.mmap) -> None:
        self._notes, self._env, self._pid, self._path = notes, dict(os.environ), os.getpid(), list(sys.path)

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> None:
        if fullname not in LATER or os.getpid() != self._pid:
            return
        top = sys.modules[fullname.partition(".")[0]]
        found = importlib.machinery.PathFinder.find_spec(top.__name__, self._path)
        if found is not None and top.__spec__ is not None and found.origin == top.__spec__.origin:  # the standby's, too
            # torch._dynamo reads nearly all of these variables, and sets some of them itself.
            differ = LATER[0] not in sys.modules and differing(self._env, os.environ, read=_READ_LATER)
            self._notes[LATER.index(fullname)] = _CHANGED if differ else _SAME
