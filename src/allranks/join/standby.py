"""A standby: a worker that is started early, imports torch, and waits until it is needed.

The agent starts it with the worker's own command line and ALLRANKS_STANDBY=<socket>:<padding>. Python runs our
sitecustomize before anything of the script; there it

1. imports what takes long, at the lowest priority that it can take back,
2. says one byte, and waits for its orders: the environment, and descriptors for output, cell and store,
3. becomes what a fresh start with that environment would be, and returns: the interpreter goes on to the script.

So sys.argv, sys.path, __main__, tracebacks and exit codes are the interpreter's own work. Where the script could tell
the difference (it sets what torch reads at its import, it shadows a module that is already there, the environment
differs in what is read at start) the process executes its own command line anew instead, with the same pid.
Called by `site/sitecustomize.py`. Standard library only, and torch through the import system.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import socket
import sys
from typing import Any

ENV = "ALLRANKS_STANDBY"
READY = b"r"
IMPORTS = ("numpy", "torch", "torch.distributed", "torch.utils.data", "torch.nn.parallel")
MAX_FDS = 8

_READ_AT_START = re.compile(
    r"PYTHON|OMP_|MKL_|KMP_|GOMP_|OPENBLAS_|NUMEXPR_|VECLIB_|LD_|MALLOC_|GLIBC_|TORCH_|PYTORCH_|ATEN_|LC_|LANG|TZ$"
    r"|HOME$|VIRTUAL_ENV$|ALLRANKS_HOOK$"
)
"""Variables that the interpreter, torch or a library reads when it is loaded."""
_SET_BY_SCRIPT = re.compile(rb"environ|putenv")
_SET_EARLY = re.compile(rb"\b(OMP|MKL|KMP|GOMP|OPENBLAS|NUMEXPR|TORCH|PYTORCH|ATEN|LD|MALLOC)_[A-Z]")
_NICE = 19


def stand_by() -> None:
    """Wait here until this process is wanted; returns as the worker, or never."""
    word = os.environ.pop(ENV)  # before anything starts a child that would wait, too
    cwd, before = os.getcwd(), dict(os.environ)
    control = socket.socket(fileno=int(word.partition(":")[0]))
    control.set_inheritable(False)
    known = set(sys.modules)
    with _at_low_priority():
        for name in IMPORTS:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    from_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    with contextlib.suppress(OSError):  # the orders may lie there already, and the other end be closed
        control.send(READY)
    try:
        message, fds, _, _ = socket.recv_fds(control, 1, MAX_FDS)
    except OSError:
        message, fds = b"", []
    if not message:  # the agent is gone, or does not want it any more
        os._exit(0)
    control.close()
    orders, out, err, *handed = fds
    with os.fdopen(orders, "rb") as file:
        file.seek(0)
        wanted: dict[str, Any] = json.load(file)
    env = dict(wanted["env"])
    for name, fd in zip(wanted["fds"], handed, strict=True):
        os.set_inheritable(fd, True)
        env[name] = str(fd)
    imported = {name.partition(".")[0] for name in set(sys.modules) - known}
    if cwd != wanted["cwd"] or _differs(before, env) or _can_tell(imported):
        _take_output(out, err, keep_words=False)
        os.chdir(wanted["cwd"])
        os.execve(sys.executable, sys.orig_argv, env)
    _take_output(out, err, keep_words=True)
    if "LC_CTYPE" in before and "LC_CTYPE" not in env:
        env["LC_CTYPE"] = before["LC_CTYPE"]  # Python's own, for the C locale
    os.environ.clear()
    os.environ.update(from_imports | env)
    _show_env({name: value for name, value in env.items() if before.get(name) != value})


def _differs(before: dict[str, str], env: dict[str, str]) -> bool:
    names = {name for name in before.keys() | env.keys() if _READ_AT_START.match(name)}
    names -= {name for name in names if name.startswith("TORCHELASTIC_")} | {"LC_CTYPE"}
    return any(before.get(name) != env.get(name) for name in names)


def _can_tell(imported: set[str]) -> bool:
    """Whether the script would meet something else than in a fresh interpreter."""
    arguments = sys.orig_argv[1:]
    is_module = arguments[:1] == ["-m"]
    script = "" if is_module else arguments[0] if arguments else ""
    if is_module:
        spec = importlib.machinery.PathFinder.find_spec(arguments[1].partition(".")[0], [os.getcwd()])
        script = (spec.origin if spec else None) or ""
    home = os.getcwd() if is_module else os.path.dirname(os.path.realpath(script))
    with contextlib.suppress(OSError):
        if any(entry.partition(".")[0] in imported for entry in os.listdir(home)):
            return True
    if not os.path.isfile(script):  # a module of a package: what it sets before it imports torch is not looked for
        return not is_module
    with open(script, "rb") as file:
        text = file.read()
    return bool(_SET_BY_SCRIPT.search(text) and _SET_EARLY.search(text.replace(b"TORCHELASTIC_", b"")))


def _take_output(out: int, err: int, *, keep_words: bool) -> None:
    """Put the worker's files under stdout and stderr, and there what was said so far, as a fresh start would have."""
    sys.stdout.flush()
    sys.stderr.flush()
    for fd, target in ((1, out), (2, err)):
        said = os.pread(fd, os.fstat(fd).st_size, 0) if keep_words else b""
        os.dup2(target, fd)
        os.close(target)
        if said:
            os.write(fd, said)


def _show_env(env: dict[str, str]) -> None:
    """Let /proc/PID/environ say which rank this is: in the room that the agent left there for it."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[47]), int(fields[48])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            area = memory.read(end - start)
            at = area.index(b"\0" + ENV.encode() + b"=") + 1
            room = area.index(b"\0", at) - at
            shown = b""
            # Order matters: what does not fit is left out.
            for name in sorted(env, key=lambda name: "RANK" not in name):
                entry = os.fsencode(f"{name}={env[name]}\0")
                if len(shown) + len(entry) <= room:
                    shown += entry
            memory.seek(start + at)
            memory.write(shown.ljust(room, b"\0"))


@contextlib.contextmanager
def _at_low_priority() -> Any:
    """Leave the cores to who trains, where this process is allowed to come back from it."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    may_return = _may_raise_priority(own)
    if may_return:
        os.setpriority(os.PRIO_PROCESS, 0, max(own, _NICE))
    try:
        yield
    finally:
        for thread in os.listdir("/proc/self/task") if may_return else ():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread), own)


def _may_raise_priority(nice: int) -> bool:
    import resource

    with open("/proc/self/status") as file:
        capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", file.read(), re.MULTILINE)
    has_sys_nice = capabilities is not None and bool(int(capabilities[1], 16) >> 23 & 1)
    return has_sys_nice or resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20 - nice
