"""The run directory: all files that a job leaves behind, without secrets.

runs/<job>/attempt_<k>/<node>/rank_<r>.out, .err, .error.json     output of the workers
                      /<node>/env.json                            the workers' environment, with reasons
                      /<node>/growth                              when the output files grew (report/growth.py)
                      /<node>/book.bin                            what the ranks spent their time on (report/books.py)
                      /<node>/members                             nodes with their ranks, if there are thousands
                      /events.jsonl                               events, as the leader saw them
                      /roll_call.json                             node reports and pair tests
                      /verdict.json                               the verdict
                      /exit_code                                  the job's, for its batch script
                      /<node>/verdict.json                        the verdict, as this node received it
                      /curves.jsonl                               values of `step.log`
                      /cancel.log                                 who cancelled the job with `allranks cancel`
runs/<job>/checkpoints/, culprits.json                            kept for all attempts
runs/<job>/leader.json, secret                                    the leader's address, the job's key
runs/<job>/status.json, goodput.json                              what the job does now; where its time went
runs/<job>/report.html                                            a page about the run (report/page.py)
runs/latest                                                       link to the newest job
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import queue
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import msgspec

from allranks.files.folder import Folder, RefusedError, why_not_ours
from allranks.files.regular import find_regular
from allranks.model.errors import UsageError
from allranks.model.finding import Verdict
from allranks.model.setting import Setting
from allranks.report.last_files import EVENTS, EXIT_CODE, VERDICT, LastFiles
from allranks.report.mask import mask_fields, mask_setting, mask_verdict
from allranks.report.readback import MAX_BYTES, read_events
from allranks.report.status_files import StatusFiles

LATEST = "latest"
REPORT = "report.html"
MAX_MEMBERS = 64 << 10
"""Bytes of a variable; execve(2) takes at most 128 KiB (MAX_ARG_STRLEN), which 4,000 to 8,000 names of nodes exceed."""
ALIVE_S = 10.0
"""How often the leader touches events.jsonl: its time tells when a run was last alive."""
MAX_QUEUED = 10_000
"""Events that wait for a file server; later ones are counted only. Those of 1,000 nodes that join."""
WRITE_S = 2.0
"""How long the last events may take to be written; then their thread is left alone with the file server."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


_OF_ATTEMPT = frozenset((
    "events.jsonl", "roll_call.json", "verdict.json", "exit_code", "requeued", "hosts", "lost_hosts", "driver.jsonl",
    "curves.jsonl",
))  # fmt: skip
_OF_NODE = frozenset(("env.json", "verdict.json", "members", "growth", "book.bin"))
_OF_RUN = frozenset((
    "secret", "leader.json", "culprits.json", "submission.sh", "preempted", "status.json", "goodput.json",
    REPORT,
))  # fmt: skip
_OWN = _OF_ATTEMPT | _OF_NODE | _OF_RUN
"""Files in which the state of a run is kept, by the directory that has them; horovod/run.py writes some of them."""


def is_own_file(path: Path | str) -> bool:
    """Whether this is a file in which allranks keeps the state of a run: it is no log.

    >>> is_own_file(Path("runs/7/attempt_0/events.jsonl")), is_own_file(Path("runs/7/attempt_0/n1/rank_0.err"))
    (True, False)
    """
    name = str(path).rpartition("/")[2]
    if name not in _OWN:
        return False
    folder = Path(path).absolute().parent
    is_of_attempt = name in _OF_ATTEMPT and re.fullmatch(r"attempt_\d+", folder.name)
    is_of_node = name in _OF_NODE and re.fullmatch(r"attempt_\d+", folder.parent.name)
    is_of_run = name in _OF_RUN and next(folder.glob("attempt_*"), None)  # others may have such names, too
    return bool(is_of_attempt or is_of_node or is_of_run)


def as_file_name(text: str) -> str:
    """Return the text with every character replaced that is unsafe in a path.

    >>> as_file_name("my run/7")
    'my_run_7'
    """
    name = _UNSAFE.sub("_", text)[:128]
    return name if name.strip(".") and name != LATEST else f"_{name}"


class RunDir:
    """The directory of one job; several nodes share its file system.

    The job makes it itself, or finds it made by the same user. It is held by its descriptor from then on, as are the
    directories of the attempt and of the nodes: who owns its parent can rename it, but not lead the job elsewhere.
    """

    def __init__(self, root: Path, job: str) -> None:
        self.root = root
        self.path = root / as_file_name(job)
        self.attempt = 0
        self._held: dict[tuple[str, ...], Folder] = {}
        self._own_uid: int | None = None
        self.last_files = LastFiles(self.hold_attempt)
        """Those that are written on a full disk, too."""
        self.status_files = StatusFiles(self.hold)

    def hold(self, *below: str, make: bool = True) -> Folder:
        """Return the run directory, or one below it, held from now on; made anew if somebody has deleted it.

        Args:
            below: names that lead there, the attempt's and the node's.
            make: False: only if it is there.
        Raises:
            OSError: it cannot be made or opened, or belongs to somebody else.
        """
        held = self._held.get(below)
        if held is not None and not held.is_deleted:
            return held
        chain = [self._open_run(make=make)]
        for depth in range(1, len(below) + 1):
            known = self._held.get(below[:depth])
            if known is None or known.is_deleted:
                known = (chain[-1].make if make else chain[-1].sub)(below[depth - 1])
            chain.append(known)
        if self._own_uid is None:
            self._own_uid = chain[-1].find_own_uid()
        for depth, folder in enumerate(chain):
            if (why := why_not_ours(folder.owner, self._own_uid)) is not None:
                raise RefusedError(errno.EPERM, why, str(folder.path))
            self._held[below[:depth]] = folder
        return chain[-1]

    def find_own_uid(self) -> int | None:
        """Return the user id of what this process writes there; None if it writes nothing there."""
        with contextlib.suppress(OSError):
            self.hold(make=False)
        return self._own_uid

    def hold_attempt(self, *, make: bool = True) -> Folder:
        """Return the directory of this attempt, as `hold` does."""
        return self.hold(self.attempt_path.name, make=make)

    def hold_node(self, node: str, *, make: bool = True) -> Folder:
        """Return the directory of one node of this attempt, as `hold` does."""
        return self.hold(self.attempt_path.name, as_file_name(node), make=make)

    def look(self, *below: str) -> Folder | None:
        """Return the run directory, or one below it, to read in it; None if it is not there. Nothing is made."""
        with contextlib.suppress(OSError):
            folder = self._open_run(make=False)
            for name in below:
                folder = folder.sub(name)
            return folder
        return None

    def _open_run(self, *, make: bool) -> Folder:
        held = self._held.get(())
        if held is not None and not held.is_deleted:
            return held
        if not make:
            return Folder.at(self.path)
        return open_root(self.root).make(self.path.name)

    def create(self) -> None:
        """Make the job's directory and point `latest` to it.

        Raises:
            UsageError: it cannot be written, or belongs to somebody else.
        """
        try:
            self.hold()
        except OSError as exc:
            raise cannot_use(self.path, exc, why="; logs and verdicts go there") from exc
        point_latest(self.root, self.path.name)

    def create_attempt(self, attempt: int | None) -> None:
        """Make the directory of this attempt.

        Args:
            attempt: its number, if a scheduler counts; None: the first free one.
        Raises:
            UsageError: it cannot be written, or belongs to somebody else.
        """
        try:
            for number in itertools.count() if attempt is None else [attempt]:
                self.attempt = number
                with contextlib.suppress(FileExistsError):
                    self.hold(make=False).make_new(self.attempt_path.name)
                    break
            self.hold_attempt()
        except OSError as exc:
            raise cannot_use(self.attempt_path, exc) from exc
        self.last_files.keep()

    @property
    def attempt_path(self) -> Path:
        """Directory of this attempt."""
        return self.path / f"attempt_{self.attempt}"

    def checkpoints_path(self, named: str | None) -> Path:
        """Return the directory of the job's checkpoints, the same for all attempts.

        Args:
            named: the user's choice; None: next to the attempts.
        """
        return Path(named or self.path / "checkpoints").absolute()

    def node_path(self, node: str) -> Path:
        """Directory of one node of this attempt."""
        return self.attempt_path / as_file_name(node)

    def create_node(self, node: str) -> Folder:
        """Make the directory of one node of this attempt.

        Raises:
            UsageError: it cannot be written, or belongs to somebody else.
        """
        try:
            return self.hold_node(node)
        except OSError as exc:
            raise cannot_use(self.node_path(node), exc) from exc

    def write_settings(self, node: str, settings: Iterable[Setting]) -> None:
        """Write a node's environment with reasons, without secrets."""
        rows = [asdict(mask_setting(setting)) for setting in settings]
        with contextlib.suppress(OSError):  # a full disk does not stop a job
            self.hold_node(node, make=False).write_whole("env.json", json.dumps(rows, indent=2).encode() + b"\n")

    def share_members(self, node: str, text: str) -> str:
        """Return ALLRANKS_MEMBERS for this node's workers: the text, or `@path` of a file with it if it is too long."""
        if len(text) <= MAX_MEMBERS:
            return text
        with contextlib.suppress(OSError):
            self.hold_node(node, make=False).write_whole("members", text.encode())
        return f"@{(self.node_path(node) / 'members').absolute()}"

    def write_verdict(self, verdict: Verdict, *, node: str, is_of_all: bool = True) -> bool:
        """Write the job's verdict without secrets, as this node received it; it is the same on all nodes.

        Args:
            verdict: the verdict.
            node: this node.
            is_of_all: False for the verdict of a single agent, which counts only if there is no better one.
        Returns:
            Whether this is now the job's verdict; False if another node was first.
        """
        data = mask_verdict(verdict).to_json()
        is_first = self.last_files.publish(VERDICT, data, replaces=is_of_all)
        with contextlib.suppress(OSError):  # the job's own is what counts
            own = self.hold_node(node)
            if is_of_all or not own.has(VERDICT):
                own.write_whole(VERDICT, data)
        return is_first

    def write_exit_code(self, exit_code: int) -> None:
        """Write the job's exit code for its batch script: srun knows only those of its tasks."""
        self.last_files.publish(EXIT_CODE, f"{int(exit_code)}\n".encode())

    def write_roll_call(self, observations: object) -> None:
        """Write all observations of the roll call, so that its verdict can be checked."""
        with contextlib.suppress(OSError):  # a full disk does not stop a job
            self.hold_attempt(make=False).write_whole("roll_call.json", msgspec.json.encode(observations))

    def add_event(self, event: str, **fields: object) -> None:
        """Append one line to events.jsonl; a full disk does not stop a job."""
        self.last_files.append(event_line(event, **fields))

    def touch_events(self) -> None:
        """Set the time of events.jsonl to now."""
        with contextlib.suppress(OSError):
            self.hold_attempt(make=False).touch(EVENTS)

    def read_events(self) -> list[dict[str, Any]]:
        """Return the events of events.jsonl that are read; none if it cannot be read."""
        if (attempt := self.look(self.attempt_path.name)) is not None:
            with contextlib.suppress(OSError), attempt.open_read(EVENTS) as file:
                return list(read_events(file).lines)
        return []


def read_shared_members(value: str) -> str:
    """Return the members that ALLRANKS_MEMBERS names; nothing where its file cannot be read."""
    if not value.startswith("@"):
        return value
    try:
        return (find_regular(Path(value[1:]), at_most=MAX_BYTES) or b"").decode()
    except UnicodeDecodeError:
        return ""


class EventWriter:
    """Writes events in a thread of its own, all that have come at once: a slow file server delays nobody.

    with EventWriter(run_dir) as events:
        events.add("joined", node="node02")
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._num_lost = 0
        self._thread = threading.Thread(target=self._run, name="allranks-events", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.put(None)
        self._thread.join(WRITE_S)

    def add(self, event: str, **fields: object) -> None:
        """Write an event soon, with the time of now."""
        if self._lines.qsize() < MAX_QUEUED:
            self._lines.put(event_line(event, **fields))
        else:
            self._num_lost += 1

    def _run(self) -> None:
        is_over = False
        while not is_over:
            lines = [self._lines.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    lines.append(self._lines.get_nowait())
            is_over = None in lines
            if text := "".join(line for line in lines if line is not None):
                self._run_dir.last_files.append(text)
            if num_lost := self._num_lost:
                self._num_lost = 0
                self._run_dir.add_event("events_lost", number=num_lost)


class SignOfLife:
    """Touches events.jsonl every ALIVE_S, in a thread of its own: a slow file server delays nobody."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir, self._is_over = run_dir, threading.Event()
        threading.Thread(target=self._run, name="allranks-alive", daemon=True).start()

    def end(self) -> None:
        """Touch it no more."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(ALIVE_S):
            self._run_dir.touch_events()


def event_line(event: str, **fields: object) -> str:
    """Return an event as events.jsonl has it, without secrets."""
    return json.dumps({"time_s": round(time.time(), 3), "event": event, **mask_fields(fields)}) + "\n"


def open_root(path: Path) -> Folder:
    """Open the parent of run directories, which is made, with its parents, if it is missing; it may be anybody's.

    Raises:
        OSError: it cannot be made or opened.
    """
    with contextlib.suppress(FileNotFoundError):
        return Folder.root(path)
    path.mkdir(parents=True, exist_ok=True)
    return Folder.root(path)


def cannot_use(path: Path, exc: OSError, *, why: str = "") -> UsageError:
    """Return what a user is told of a directory that cannot be made, or is somebody else's."""
    path = exc.filename if isinstance(exc, RefusedError) else path
    return UsageError(f"{path}: {exc.strerror}{why}; choose another directory with --log-dir")


def point_latest(root: Path, name: str) -> None:
    """Point `latest` to this run; a file system without links does not stop the job."""
    with contextlib.suppress(OSError):
        Folder.root(root).link_to(LATEST, name)


def this_directory() -> str:
    """Return the working directory for the record; empty if it was removed."""
    with contextlib.suppress(OSError):
        return str(Path.cwd())
    return ""
