"""Runs all external programs (nvidia-smi, systemctl, dmesg ...), each with a deadline.

    >>> run_command(["echo", "hello"], deadline_s=5).stdout
    'hello\\n'

A command runs in a process group of its own, without a shell and without an input. At the deadline the group is killed,
and a child that the kernel does not let die (state D: a driver or a file system that hangs) is not waited for. Whatever
a command that ended has left running in its group is killed, too. Only the search on PATH has no deadline: call this
from a daemon thread where PATH may lead to a file system that hangs.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allranks.host.threads import start_thread

OWN_COMMAND = (sys.executable, "-P", "-m", "allranks")
"""Starts allranks; without -P, a file of the user's directory (`cuda.py`) would stand for the module that it needs."""
MAX_OUTPUT_BYTES = 1 << 20
_REAP_S = 0.1
_TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a command."""

    rc: int | None
    """Exit status, -n for signal n; None where it could not be run or was killed at the deadline."""
    stdout: str = ""
    stderr: str = ""
    problem: str = ""
    """Why there is no exit status: `nvidia-smi: not installed`, `nvidia-smi: no answer within 3 s`."""

    @property
    def words(self) -> str:
        """The first line it said, on stderr before stdout; else how it ended."""
        said = [line.strip() for line in (self.stderr + "\n" + self.stdout).splitlines() if line.strip()]
        return self.problem or (said[0] if said else f"exit status {self.rc}")


def run_command(
    command: Sequence[str], *, deadline_s: float, env: Mapping[str, str] | None = None, keep_end: bool = False
) -> Ran:
    """Run a command and return what it said; never raises for what the command or the machine does.

    Args:
        command: program, searched on PATH, and arguments.
        deadline_s: seconds until it is killed.
        env: its environment, the own one if None; LC_ALL=C is added, so that its words can be read.
        keep_end: of more than MAX_OUTPUT_BYTES a stream, keep the last ones instead of the first.
    """
    end_s = time.monotonic() + deadline_s
    name = os.path.basename(command[0])  # noqa: PTH119  (no path may be wrong here)
    env = {**(os.environ if env is None else env), "LC_ALL": "C"}
    # Looking first also keeps a hanging file system away from exec, where the interpreter's lock is held.
    program = shutil.which(command[0], path=env.get("PATH"))
    if program is None:
        return Ran(None, problem=f"{name}: not installed")
    try:
        child = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            process_group=0,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as exc:
        return Ran(None, problem=f"{name}: {getattr(exc, 'strerror', None) or exc}")
    try:
        out, err = _read_streams(child, end_s, keep_end=keep_end)
        rc = _reap(child, max(0.0, end_s - time.monotonic()))
    finally:
        _let_go(child)
    problem = f"{name}: no answer within {deadline_s:.3g} s" if rc is None else ""
    return Ran(rc, out.decode(errors="backslashreplace"), err.decode(errors="backslashreplace"), problem)


def _read_streams(child: subprocess.Popen[bytes], end_s: float, *, keep_end: bool) -> tuple[bytes, bytes]:
    """Read both streams until they end, the child has ended, or the deadline."""
    assert child.stdout
    assert child.stderr
    kept = {child.stdout: bytearray(), child.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for stream in kept:
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        has_ended = False
        while selector.get_map() and (left_s := end_s - time.monotonic()) > 0:
            ready = selector.select(0 if has_ended else min(left_s, _TICK_S))
            for key, _ in ready:
                stream = child.stdout if key.fileobj is child.stdout else child.stderr
                if chunk := os.read(stream.fileno(), 1 << 16):
                    _keep(kept[stream], chunk, keep_end=keep_end)
                else:
                    selector.unregister(stream)
            if has_ended and not ready:
                break  # somebody else holds the streams open
            has_ended = has_ended or _has_ended(child.pid)
    return bytes(kept[child.stdout]), bytes(kept[child.stderr])


def _keep(kept: bytearray, chunk: bytes, *, keep_end: bool) -> None:
    if keep_end:
        kept += chunk
        del kept[:-MAX_OUTPUT_BYTES]
    else:
        kept += chunk[: max(0, MAX_OUTPUT_BYTES - len(kept))]


def _has_ended(pid: int) -> bool:
    """Whether it is a zombie; it stays one, so that its number, which names the group, is not given away."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody in this process collects all children
        return True


def _reap(child: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Wait for the end without collecting it; returns the exit status, or None at the limit."""
    end_s = time.monotonic() + limit_s
    pause_s = 0.0005
    while not _has_ended(child.pid):
        if time.monotonic() >= end_s:
            return None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _TICK_S)
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)  # before its number is free again
    return child.wait()


def _let_go(child: subprocess.Popen[bytes]) -> None:
    """Close what we hold of a child and kill it; one that cannot die is collected by a thread, whenever that may be."""
    for stream in (child.stdout, child.stderr):
        if stream:
            stream.close()
    if child.returncode is None:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_REAP_S)
            return
        start_thread(child.wait, name="allranks-reaper")
