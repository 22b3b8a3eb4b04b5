"""How do parts that many processes write become one checkpoint, or none? The protocol on the directory.

All ranks' writers, on any node, and nothing but the shared directory between them:

    Phase 1  every writer makes `step_N.tmp.<attempt>` (the first one does), puts `rank_k.json` there (who is writing),
             writes its part, fsyncs it, reads it back unless the next save waits, replaces `rank_k.json` by one with
             size and checksums, fsyncs the directory.
    Phase 2  rank 0's writer, the coordinator, waits until every rank's `rank_k.json` is there and its part is as
             large as it says. One that failed, or none that comes on for PATIENCE_S, ends the attempt. Only
             `given_up` stays of its directory, for a writer that has not even begun; the next save removes it.
    Phase 3  the coordinator writes MANIFEST.json, fsyncs it and the directory.
    Phase 4  it renames the directory to `step_N`, or `step_N.2` where that is taken, fsyncs the parent, and removes
             `rank_*.json`, by which a living writer could be told from a dead one until then.

Only what has been renamed is a checkpoint, so there is no instant at which a kill, a full disk or a lost node leaves
half of one under the name of a whole one; checksums are for what happens to it afterwards. The other writers learn the
outcome by the directory: it is renamed, or given up.

Why not torch's store: it lives in rank 0's training process, and a checkpoint must be finished when that is dead.

Standard library only: it runs in the writer's process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allranks.files.regular import open_regular
from allranks.state.saved.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    Damaged,
    Manifest,
    Part,
    final_name,
    part_from_json,
    part_name,
    part_to_json,
    report_name,
    temp_name,
)
from allranks.state.saved.parts import (
    LARGEST_MANIFEST_BYTES,
    PartReader,
    list_checkpoints,
    read_manifest,
)

PATIENCE_S = 600.0
"""How long the coordinator waits without any other part coming on: a rank may be evaluating before it saves."""
ORPHANED_PATIENCE_S = 15.0
"""The same once its trainer is dead, or asks for the next save: all ranks' parts of this one have been written by then,
or have failed."""
NOT_BEGUN_S = 3.0
"""The same where a rank has not even begun by then: its trainer died before it could ask for it."""
GIVEN_UP = "given_up"
"""An empty file in an attempt's directory, for which a full disk has room too: nobody goes on with it."""
_POLL_S = (0.01, 0.2)
"""First and longest pause between two looks at the directory."""


class AttemptFailedError(Exception):
    """This save comes to nothing; the message says on whose part and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One save, as one rank's writer sees it."""

    root: Path
    step: int
    name: str
    """Of the run and of this save in it: `<hex>-<n>`, the same on all ranks."""
    rank: int
    world_size: int

    @property
    def directory(self) -> Path:
        """Where it is being written."""
        return self.root / temp_name(self.step, self.name)


# Phase 1


def write_part(
    attempt: Attempt,
    content: memoryview,
    *,
    written: Callable[[], None] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Part:
    """Write the bytes of this rank's part, verify and report it; what it has made is gone again if that fails.

    Args:
        written: called when the content is needed no more.
        should_stop: whether there is no time to verify.
    Raises:
        OSError: the file system would not take it, or gives back something else.
        AttemptFailedError: the attempt has been given up meanwhile.
    """
    attempt.root.mkdir(parents=True, exist_ok=True)
    attempt.directory.mkdir(exist_ok=True)
    if is_given_up(attempt.directory):
        raise AttemptFailedError("")  # whoever gave it up says why
    path = attempt.directory / part_name(attempt.rank)
    try:
        _report(attempt, {"state": "writing"})
        blocks = []
        with path.open("xb", buffering=0) as file:
            for start in range(0, len(content), BLOCK_BYTES):
                block = content[start : start + BLOCK_BYTES]
                blocks.append(zlib.crc32(block))
                _write_all(file.fileno(), block)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what is read back comes from the disk
        written()
        part = _read_back(Part(path.name, len(content), tuple(blocks)), attempt.directory, should_stop)
        _report(attempt, {"state": "done", **part_to_json(part)})
        sync_directory(attempt.directory)
    except OSError as exc:
        with contextlib.suppress(OSError):
            path.unlink()  # makes room, also for the report
        if is_given_up(attempt.directory) or not attempt.directory.exists():
            raise AttemptFailedError("") from exc
        try:
            _report(attempt, {"state": "failed", "why": explain(exc, attempt.root)})
        except OSError:
            _mark_given_up(attempt.directory)
        else:
            if attempt.rank != 0:
                raise AttemptFailedError("") from exc  # the coordinator says it, for all
        raise
    return part


def _read_back(part: Part, directory: Path, should_stop: Callable[[], bool]) -> Part:
    """Every writer does it for its own part; else rank 0's would read all bytes of all ranks before tidying."""
    try:
        with PartReader(directory, part) as reader:
            is_verified = reader.verify_rest(should_stop)
    except Damaged as exc:
        raise OSError(errno.EIO, f"read back after writing, {exc}") from exc
    return replace(part, verified_ns=(directory / part.name).stat().st_mtime_ns) if is_verified else part


# Phase 2


def gather_parts(
    attempt: Attempt, *, is_orphaned: Callable[[], bool], is_next_due: Callable[[], bool]
) -> tuple[Part, ...]:
    """Wait for all parts of the checkpoint.

    Args:
        is_orphaned: whether the coordinator's trainer is dead.
        is_next_due: whether the trainer asks for the next save, or for nothing more.
    Raises:
        AttemptFailedError: a rank failed, or has not come on for too long.
        OSError: the directory cannot be read any more.
    """
    parts: dict[int, Part] = {}
    seen: object = None
    came_on_s, pause_s, haste = time.monotonic(), _POLL_S[0], (False, False)
    while True:
        begun = 0
        for rank in range(attempt.world_size):
            state, part = _look_for(attempt, rank) if rank not in parts else ("done", parts[rank])
            begun += bool(state)
            if part is not None:
                parts[rank] = part
        if len(parts) == attempt.world_size:
            return tuple(parts[rank] for rank in range(attempt.world_size))
        if is_given_up(attempt.directory):
            raise AttemptFailedError(f"a rank could write neither its part nor why (to {attempt.root})")
        if seen != (seen := _progress(attempt.directory)) or haste != (haste := (is_orphaned(), is_next_due())):
            came_on_s, pause_s = time.monotonic(), _POLL_S[0]
        waited_s = time.monotonic() - came_on_s
        if waited_s > _patience_s(*haste, have_all_begun=begun == attempt.world_size):
            missing = [str(rank) for rank in range(attempt.world_size) if rank not in parts]
            names = f"rank{'s' * (len(missing) > 1)} {', '.join(missing[:8])}{', ...' * (len(missing) > 8)}"
            raise AttemptFailedError(
                f"no part of {names} has come to {attempt.root} in {waited_s:.0f} s: dead, stuck, or it does "
                f"not see this directory"
            )
        time.sleep(pause_s)
        if pause_s == _POLL_S[1]:
            os.utime(attempt.directory)  # else a client of NFS may not ask for half a minute what is new in it
        pause_s = min(pause_s * 2, _POLL_S[1])


def _patience_s(is_orphaned: bool, is_next_due: bool, *, have_all_begun: bool) -> float:
    if is_orphaned and not have_all_begun:
        return NOT_BEGUN_S
    return ORPHANED_PATIENCE_S if is_orphaned or is_next_due else PATIENCE_S


def _look_for(attempt: Attempt, rank: int) -> tuple[str, Part | None]:
    """What a rank's writer says of itself, and its part once all bytes of that are seen from here."""
    report = read_report(attempt.directory / report_name(rank))
    state = str(report.get("state", ""))
    if state == "failed":
        raise AttemptFailedError(f"rank {rank}: {report.get('why')}")
    if state == "done":
        part = part_from_json(report)
        with contextlib.suppress(FileNotFoundError):  # a file server may show the report before the last bytes
            if (attempt.directory / part.name).stat().st_size == part.size_bytes:
                return state, part
    return state, None


def _progress(directory: Path) -> object:
    sizes = []
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                sizes.append((entry.name, entry.stat().st_size))
    return sorted(sizes)


# Phases 3 and 4


def seal(attempt: Attempt, parts: tuple[Part, ...], *, torch: str, **about: Any) -> Path:
    """Make the checkpoint of the parts of all ranks, and return its directory; `about`: of its manifest."""
    manifest = Manifest(attempt.step, attempt.world_size, attempt.name, torch, time.time(), parts, **about)
    with (attempt.directory / MANIFEST).open("xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(manifest.to_bytes()))
        os.fsync(file.fileno())
    sync_directory(attempt.directory)
    final = _rename(attempt)
    sync_directory(attempt.root)
    for rank in range(attempt.world_size):
        with contextlib.suppress(OSError):
            (final / report_name(rank)).unlink()
    return final


def _rename(attempt: Attempt) -> Path:
    """The step may have been saved before: by a run that went on from an older checkpoint, or one that was altered."""
    take = 1
    while True:
        try:
            return attempt.directory.rename(attempt.root / final_name(attempt.step, take))
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            take += 1


# An attempt that comes to nothing


def give_up(attempt: Attempt) -> None:
    """Leave nothing of an attempt but the mark; not even that where it cannot be made, or nobody else looks for it."""
    if attempt.world_size == 1 or not _mark_given_up(attempt.directory):
        shutil.rmtree(attempt.directory, ignore_errors=True)  # what stays is swept later
        return
    with contextlib.suppress(OSError):
        for path in attempt.directory.iterdir():
            if path.name != GIVEN_UP:
                path.unlink(missing_ok=True)


def _mark_given_up(directory: Path) -> bool:
    """Say to whoever comes late that nobody goes on with this attempt; returns whether that could be said."""
    try:
        (directory / GIVEN_UP).touch()
    except OSError:
        return False
    return True


def is_given_up(directory: Path) -> bool:
    """Whether nobody goes on with the attempt of this directory."""
    return (directory / GIVEN_UP).exists()


# The other writers


def watch_outcome(attempt: Attempt, should_stop: Callable[[], bool]) -> bool | None:
    """Wait for what the coordinator makes of it: whole or not; None: told to stop, or it takes too long."""
    pause_s, deadline_s = _POLL_S[0], time.monotonic() + 2 * PATIENCE_S
    while attempt.directory.exists():
        if is_given_up(attempt.directory):
            with contextlib.suppress(OSError):  # this part may have been written after the coordinator had tidied
                (attempt.directory / part_name(attempt.rank)).unlink()
            return False
        if should_stop() or time.monotonic() > deadline_s:
            return None
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _POLL_S[1])
    for path in list_checkpoints(attempt.root):
        with contextlib.suppress(Damaged):
            if read_manifest(path).attempt == attempt.name:
                return True
    return False


# Reports


def identify_process() -> dict[str, object]:
    """Who this process is, so that others on this machine can tell whether it still lives."""
    return {
        "host": os.uname().nodename,
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_namespace": str(Path("/proc/self/ns/pid").readlink()),
        "pid": os.getpid(),
        "started": started_ticks(os.getpid()),
    }


def started_ticks(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks since boot; None: there is none, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def read_report(path: Path) -> dict[str, Any]:
    """What a writer says of itself; empty while there is nothing to be read."""
    try:
        with open_regular(path, follows_links=True) as file:
            report = json.loads(file.read(LARGEST_MANIFEST_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return report if isinstance(report, dict) else {}


def _report(attempt: Attempt, report: dict[str, object]) -> None:
    path = attempt.directory / report_name(attempt.rank)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({**report, "owner": identify_process()}))
    fresh.rename(path)


# The file system


def sync_directory(path: Path) -> None:
    """Have the names in a directory on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # some network file systems do not know this; they write names through
            raise
    finally:
        os.close(descriptor)


def explain(exc: OSError, root: Path) -> str:
    """One line: what the file system said, where, and how much room there is."""
    why = f"{exc.strerror or exc} ({root})"
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            room = os.statvfs(root)
            has_few = room.f_files and room.f_favail < 1000  # some file systems count none
            inodes = f" and {room.f_favail} inodes" if has_few else ""
            why += f", {room.f_bavail * room.f_frsize / 1e6:.0f} MB{inodes} are free"
    return why


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
