"""Which checkpoints can go? Old ones, and what dead writers left behind; never the newest two that are whole, the one
that `best` links to, nor the newest one on which replicas agreed.

Whole means verified: each part of those that stay has been read back by its writer, and is read again here when its
file looks touched since. Deleting on the word of names alone could delete the last one that can be read.

Standard library only: it runs in the writer's process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allranks.state.saved.commit import identify_process, is_given_up, read_report, started_ticks
from allranks.state.saved.manifest import MANIFEST, Damaged, parse_final, parse_temp, report_name, temp_name
from allranks.state.saved.parts import PartReader, list_checkpoints, read_manifest

KEEP_AT_LEAST = 2
MOST_OVERDUE = 3
"""So many more than wanted may lie there before tidying no longer gives way to the next save."""
BEST = "best"
"""Link to the best checkpoint, beside the checkpoints; rank 0 sets it (state.resumed.best)."""
LEFT_AFTER_S = 3600.0
"""When a temporary directory that nobody has touched is left over, where its writers cannot be seen from here."""


class Keeper:
    """Deletes what is too old; remembers what it has verified."""

    def __init__(self, root: Path, keep: int) -> None:
        self._root = root
        self._keep = max(keep, KEEP_AT_LEAST)
        self._verified: dict[Path, int] = {}

    def retain(self, should_stop: Callable[[], bool]) -> None:
        """Delete checkpoints beyond the newest `keep` whole ones, until `should_stop` has something better to do."""
        whole, found, best = 0, list_checkpoints(self._root), (self._root / BEST).resolve()
        if len(found) > self._keep + MOST_OVERDUE:
            should_stop = bool  # never
        agreed: Path | None = None
        for directory in filter(_is_agreed, found):
            can_load = self.is_whole(directory, should_stop)
            if can_load is None:
                return
            if can_load:
                agreed = directory
                break
        for directory in found:
            if whole >= self._keep:
                if directory != agreed and directory.resolve() != best:
                    _remove(directory)
                continue
            is_whole = self.is_whole(directory, should_stop)
            if is_whole is None:
                return
            whole += is_whole

    def is_whole(self, directory: Path, should_stop: Callable[[], bool]) -> bool | None:
        """Return whether all parts of a checkpoint can be read; None: told to stop."""
        try:
            for part in read_manifest(directory).parts:
                path = directory / part.name
                touched_ns = path.stat().st_mtime_ns
                if touched_ns == self._verified.get(path, part.verified_ns) and path.stat().st_size == part.size_bytes:
                    continue
                with PartReader(directory, part) as reader:
                    if not reader.verify_rest(should_stop):
                        return None
                self._verified[path] = touched_ns
        except (Damaged, OSError):
            return False
        return True


def roll_back(root: Path, say: Callable[[str], object]) -> int | None:
    """Return the step of the newest whole checkpoint on which replicas agreed; newer ones get names that no run loads.

    The link `best` goes if its checkpoint is one of these, so that the next value is the best one.
    """
    found, keeper = list_checkpoints(root), Keeper(root, KEEP_AT_LEAST)
    agreed = next((path for path in found if _is_agreed(path) and keeper.is_whole(path, bool)), None)
    if agreed is None:
        return None
    best = root / BEST
    if best.is_symlink() and best.resolve() in {path.resolve() for path in found[: found.index(agreed)]}:
        say(f"{best} led to {best.resolve().name}, which is set aside: the next saved value counts as the best")
        best.unlink()
    for newer in found[: found.index(agreed)]:
        numbers = (f".{number}" if number else "" for number in itertools.count())
        places = (newer.with_name(f"unverified_{newer.name}{number}") for number in numbers)
        aside = newer.rename(next(place for place in places if not place.exists()))
        say(f"{newer} is newer than {agreed.name}, on which replicas agreed: it is now {aside}")
    return read_manifest(agreed).step


def _is_agreed(directory: Path) -> bool:
    try:
        return read_manifest(directory).verified
    except Damaged:
        return False


def sweep(root: Path, *, run: str, below: int) -> None:
    """Remove temporary directories whose writers are dead, and this run's of saves below this number: given up."""
    for path in list(root.iterdir()):
        temp = parse_temp(path.name)
        if temp is None:
            continue
        of_run, _, number = temp[1].rpartition("-")
        # A rank that is ahead may have written its part of a later save, and be gone.
        is_left = of_run == run and int(number) < below
        if of_run != run:
            is_alive, touched_s = look_at_writers(path)
            is_left = not is_alive if is_alive is not None else time.time() - touched_s >= LEFT_AFTER_S
        if is_left and path.is_dir() and not path.is_symlink():  # rmtree would open a named pipe, and wait
            shutil.rmtree(path, ignore_errors=True)


def look_at_writers(directory: Path) -> tuple[bool | None, float]:
    """Whether somebody can still finish it, None where that cannot be seen from here; and when it was last touched.

    That is the coordinator, rank 0's writer; before it has come, any. Writers of this machine are looked at. Of others
    is only known when they last wrote, in seconds since the epoch.
    """
    owners: dict[str, dict[str, Any]] = {}
    touched_s = 0.0
    try:
        touched_s = directory.stat().st_mtime
        if is_given_up(directory):
            return False, touched_s
        for path in directory.iterdir():
            with contextlib.suppress(OSError):
                touched_s = max(touched_s, path.stat().st_mtime)
                if path.suffix == ".json" and isinstance(owner := read_report(path).get("owner"), dict):
                    owners[path.name] = owner
    except (FileNotFoundError, NotADirectoryError):
        return False, touched_s
    except OSError:
        return None, touched_s
    coordinator = owners.get(report_name(0))
    lives = [_lives(owner) for owner in ([coordinator] if coordinator else owners.values())]
    if not lives or None in lives:
        return None, touched_s
    return any(lives), touched_s


def _lives(owner: dict[str, Any]) -> bool | None:
    """Whether this process lives; None: it is of another machine, or of another container on this one."""
    me = identify_process()
    if owner.get("host") != me["host"]:
        return None
    if owner.get("boot") != me["boot"]:
        return False  # it died with an earlier boot
    if owner.get("pid_namespace") != me["pid_namespace"]:
        return None
    pid, started = owner.get("pid"), owner.get("started")
    if type(pid) is not int or type(started) is not int:
        return None  # others can write files of that name
    return started_ticks(pid) == started


def _remove(directory: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that nobody takes half of it for one; `sweep` removes what is left.

    A `step_N` without a manifest is somebody else's, and stays.
    """
    step, _ = parse_final(directory.name) or (0, 0)
    with contextlib.suppress(OSError):
        if stat.S_ISREG((directory / MANIFEST).lstat().st_mode):
            shutil.rmtree(directory.rename(directory.with_name(temp_name(step, f"{os.urandom(6).hex()}-0"))))
