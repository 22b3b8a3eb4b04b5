"""Can CUDA start on this machine: the fabric manager, cuInit in a child process, Xid lines of the kernel log.

Never ran on hardware: what CUDA and the driver say comes from the CUDA driver API's error table and from the Xid
lines that NVIDIA's "XID Errors" documentation shows.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from allranks.host.programs import Ran, run_command
from allranks.model.card import MAX_TEXT

XID_WINDOW = timedelta(hours=2)
MAX_XIDS = 20
# Isolated and without site: neither the user's PYTHONPATH nor a sitecustomize takes part.
_CU_INIT = """\
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    print("rc", cuda.cuInit(0))
except (OSError, AttributeError) as exc:
    print("no", exc)
"""
_XID = re.compile(r"NVRM: Xid \(|SXid \(")


@dataclass(frozen=True, slots=True)
class ValueOrProblem:
    """A value, or why there is none; both None and "" where there is just nothing."""

    value: str | None = None
    problem: str = ""


def read_fabric_manager(*, deadline_s: float, env: Mapping[str, str] | None = None) -> ValueOrProblem:
    """Ask systemd how nvidia-fabricmanager is: `active`, `inactive`, `failed`; no value where there is no such unit.

    Args:
        deadline_s: for the answer.
        env: PATH in it says where systemctl is.
    """
    # `is-active` says `inactive` also of a unit that does not exist.
    command = ("systemctl", "show", "nvidia-fabricmanager.service", "--property=LoadState,ActiveState")
    return parse_unit(run_command(command, deadline_s=deadline_s, env=env))


def parse_unit(ran: Ran) -> ValueOrProblem:
    """Read the answer of `systemctl show --property=LoadState,ActiveState`."""
    found = dict(line.strip().split("=", 1) for line in ran.stdout.splitlines() if "=" in line)
    if ran.rc != 0 or "LoadState" not in found:
        return ValueOrProblem(problem=ran.problem or f"systemctl: {ran.words}"[:MAX_TEXT])
    if found["LoadState"] == "not-found":
        return ValueOrProblem()
    return ValueOrProblem(found.get("ActiveState", found["LoadState"])[:64])


def read_fabric_manager_version(*, deadline_s: float, env: Mapping[str, str] | None = None) -> ValueOrProblem:
    """Ask nv-fabricmanager for its version, which must be the driver's.

    Args:
        deadline_s: for the answer.
        env: PATH in it says where it is.
    """
    ran = run_command(("nv-fabricmanager", "--version"), deadline_s=deadline_s, env=env)
    match = re.search(r"\d+\.\d+(?:\.\d+)*", ran.stdout + ran.stderr)
    if match:
        return ValueOrProblem(match[0])
    return ValueOrProblem(problem=ran.problem or f"nv-fabricmanager: {ran.words}"[:MAX_TEXT])


def try_cuda(*, deadline_s: float, env: Mapping[str, str] | None = None) -> tuple[int | None, str]:
    """Call cuInit(0) in a child process; returns what it returned, and why there is no such number.

    0 is success, 802 a fabric manager that is not running, 803 a driver that does not fit its library, 100 no GPU,
    which is also what an empty CUDA_VISIBLE_DEVICES leads to.

    Args:
        deadline_s: for the answer; a hanging driver hangs the child alone.
        env: environment of the child; LD_LIBRARY_PATH in it may lead to another libcuda.
    """
    return parse_cuda(run_command((sys.executable, "-I", "-S", "-c", _CU_INIT), deadline_s=deadline_s, env=env))


def parse_cuda(ran: Ran) -> tuple[int | None, str]:
    """Read what the child printed."""
    match = re.search(r"^(rc|no) (.*)$", ran.stdout, re.MULTILINE)
    if match and match[1] == "rc" and re.fullmatch(r"-?[0-9]{1,9}", match[2]):
        return int(match[2]), ""
    if match and match[1] == "no":
        is_absent = "No such file" in match[2] and "libcuda.so.1" in match[2]
        return None, "libcuda.so.1: not installed" if is_absent else match[2][:MAX_TEXT]
    if ran.rc is None:
        name, _, why = ran.problem.partition(": ")
        return None, f"cuInit: {why}" if why.startswith("no answer") else f"{name}: {why}"
    how = f"ended by signal {-ran.rc}" if ran.rc < 0 else ran.words
    return None, f"cuInit: {how}"[:MAX_TEXT]


def read_xids(*, deadline_s: float, env: Mapping[str, str] | None = None) -> tuple[tuple[str, ...], str]:
    """Return the Xid lines of the last two hours, and why the kernel log cannot be read.

    Args:
        deadline_s: for the answer.
        env: PATH in it says where dmesg and journalctl are.
    """
    end_s = time.monotonic() + deadline_s
    now = datetime.now().astimezone()
    ran = run_command(("dmesg", "--time-format", "iso"), deadline_s=deadline_s, env=env, keep_end=True)
    if ran.rc == 0:
        return select_xids(ran.stdout, now=now), ""
    # kernel.dmesg_restrict, or a dmesg without ISO times.
    journal = ("journalctl", "--dmesg", "--since=-2h", "--output=short-iso", "--no-pager")
    ran = run_command(journal, deadline_s=max(0.0, end_s - time.monotonic()), env=env, keep_end=True)
    lines = select_xids(ran.stdout, now=now)
    has_log = ran.rc == 0 and " kernel: " in ran.stdout
    # To a user who may not read it the journal looks empty.
    is_late = ran.rc is None and "no answer" in ran.problem
    return lines, "" if has_log or lines else (ran.problem if is_late else "no permission")


def select_xids(text: str, *, now: datetime) -> tuple[str, ...]:
    """Return the lines of a kernel log with an Xid or SXid of the last two hours, the newest MAX_XIDS.

    Args:
        text: lines that begin with an ISO time; one without a time is taken for a new one.
        now: with time zone.
    """
    found = [line.strip()[:MAX_TEXT] for line in text.splitlines() if _XID.search(line) and _is_recent(line, now)]
    return tuple(found[-MAX_XIDS:])


def _is_recent(line: str, now: datetime) -> bool:
    try:
        when = datetime.fromisoformat(line.split(maxsplit=1)[0].replace(",", "."))
        return when.astimezone() >= now - XID_WINDOW
    except (ValueError, OverflowError, OSError):
        return True
