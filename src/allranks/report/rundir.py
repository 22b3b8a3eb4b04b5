"""The run directory: all files that a job leaves behind, without secrets.

runs/<job>/attempt_<k>/<node>/rank_<r>.out, .err, .error.json     output of the workers
                      /<node>/env.json                            the workers' environment, with reasons
                      /<node>/growth                              when the output files grew (report/growth.py)
                      /<node>/members                             nodes with their ranks, if there are thousands
                      /events.jsonl                               events, as the leader saw them
                      /roll_call.json                             node reports and pair tests
                      /verdict.json                               the verdict
                      /exit_code                                  the job's, for its batch script
                      /<node>/verdict.json                        the verdict, as this node received it
                      /cancel.log                                 who cancelled the job with `allranks cancel`
runs/<job>/checkpoints/, culprits.json                            kept for all attempts
runs/<job>/leader.json, secret                                    the leader's address, the job's key
runs/latest                                                       link to the newest job
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import re
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from allranks.model.errors import UsageError
from allranks.model.finding import Verdict
from allranks.model.setting import Setting

_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
LATEST = "latest"
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
))  # fmt: skip
_OF_NODE = frozenset(("env.json", "verdict.json", "members", "growth"))
_OF_RUN = frozenset(("secret", "leader.json", "culprits.json", "submission.sh", "preempted"))
_OWN = _OF_ATTEMPT | _OF_NODE | _OF_RUN
"""Files in which the state of a run is kept, by the directory that has them; horovod/run.py writes some of them."""


def is_own_file(path: Path) -> bool:
    """Whether this is a file in which allranks keeps the state of a run: it is no log.

    >>> is_own_file(Path("runs/7/attempt_0/events.jsonl")), is_own_file(Path("runs/7/attempt_0/n1/rank_0.err"))
    (True, False)
    """
    name = path.name
    if name not in _OWN:
        return False
    folder = path.absolute().parent
    is_of_attempt = name in _OF_ATTEMPT and re.fullmatch(r"attempt_\d+", folder.name)
    is_of_node = name in _OF_NODE and re.fullmatch(r"attempt_\d+", folder.parent.name)
    is_of_run = name in _OF_RUN and next(folder.glob("attempt_*"), None)  # others may have such names, too
    return bool(is_of_attempt or is_of_node or is_of_run)


def is_secret_name(name: str) -> bool:
    """Whether the value of a variable with this name must not be shown or written."""
    return bool(_SECRET_NAME.search(name))


def as_file_name(text: str) -> str:
    """Return the text with every character replaced that is unsafe in a path.

    >>> as_file_name("my run/7")
    'my_run_7'
    """
    name = _UNSAFE.sub("_", text)[:128]
    return name if name.strip(".") and name != LATEST else f"_{name}"


class RunDir:
    """The directory of one job; several nodes share its file system."""

    def __init__(self, root: Path, job: str) -> None:
        self.root = root
        self.path = root / as_file_name(job)
        self.attempt = 0

    def create(self) -> None:
        """Make the job's directory and point `latest` to it.

        Raises:
            UsageError: it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise UsageError(
                f"{self.path}: {exc.strerror}; logs and verdicts go there; choose another directory with --log-dir"
            ) from exc
        point_latest(self.root, self.path.name)

    def create_attempt(self, attempt: int | None) -> None:
        """Make the directory of this attempt.

        Args:
            attempt: its number, if a scheduler counts; None: the first free one.
        Raises:
            UsageError: it cannot be written.
        """
        try:
            if attempt is not None:
                self.attempt = attempt
                self.attempt_path.mkdir(exist_ok=True)
                return
            for number in itertools.count():
                self.attempt = number
                with contextlib.suppress(FileExistsError):
                    self.attempt_path.mkdir()
                    return
        except OSError as exc:
            raise UsageError(f"{self.attempt_path}: {exc.strerror}; choose another directory with --log-dir") from exc

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

    def create_node(self, node: str) -> Path:
        """Make the directory of one node of this attempt.

        Raises:
            UsageError: it cannot be written.
        """
        return make_directory(self.node_path(node))

    def write_settings(self, node: str, settings: Iterable[Setting]) -> None:
        """Write a node's environment with reasons, without secrets."""
        rows = [
            {
                "name": setting.name,
                "value": "(hidden)" if is_secret_name(setting.name) else setting.value,
                "reason": setting.reason,
                "source": setting.source,
            }
            for setting in settings
        ]
        write_whole(self.node_path(node) / "env.json", json.dumps(rows, indent=2).encode() + b"\n")

    def share_members(self, node: str, text: str) -> str:
        """Return ALLRANKS_MEMBERS for this node's workers: the text, or `@path` of a file with it if it is too long."""
        if len(text) <= MAX_MEMBERS:
            return text
        path = (self.node_path(node) / "members").absolute()
        write_whole(path, text.encode())
        return f"@{path}"

    def write_verdict(self, verdict: Verdict, *, node: str, is_of_all: bool = True) -> bool:
        """Write the job's verdict, as this node received it; it is the same on all nodes.

        Args:
            verdict: the verdict.
            node: this node.
            is_of_all: False for the verdict of a single agent, which counts only if there is no better one.
        Returns:
            Whether this is now the job's verdict; False if another node was first.
        """
        with contextlib.suppress(OSError):
            self.node_path(node).mkdir(parents=True, exist_ok=True)
        own, common = self.node_path(node) / "verdict.json", self.attempt_path / "verdict.json"
        if is_of_all:
            write_whole(own, verdict.to_json())
            write_whole(common, verdict.to_json())
            return True
        if not own.exists():
            write_whole(own, verdict.to_json())
        try:
            with common.open("xb") as file:
                file.write(verdict.to_json())
        except FileExistsError:
            return False
        except OSError:
            return True  # who cannot write must speak
        return True

    def write_exit_code(self, exit_code: int) -> None:
        """Write the job's exit code for its batch script: srun knows only those of its tasks."""
        write_whole(self.attempt_path / "exit_code", f"{int(exit_code)}\n".encode())

    def write_roll_call(self, observations: object) -> None:
        """Write all observations of the roll call, so that its verdict can be checked."""
        write_whole(self.attempt_path / "roll_call.json", msgspec.json.encode(observations))

    def add_event(self, event: str, **fields: object) -> None:
        """Append one line to events.jsonl; a full disk does not stop a job."""
        self.append_events(event_line(event, **fields))

    def append_events(self, lines: str) -> None:
        """Append lines to events.jsonl."""
        with contextlib.suppress(OSError), (self.attempt_path / "events.jsonl").open("a") as file:
            file.write(lines)

    def read_events(self) -> list[dict[str, Any]]:
        """Return the lines of events.jsonl; none if it cannot be read."""
        told = []
        with contextlib.suppress(OSError), (self.attempt_path / "events.jsonl").open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):  # its last line may be half written
                    told.append(json.loads(line))
        return told


def read_shared_members(value: str) -> str:
    """Return the members that ALLRANKS_MEMBERS names; nothing where its file cannot be read."""
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text()
    except (OSError, UnicodeDecodeError):
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
                self._run_dir.append_events(text)
            if num_lost := self._num_lost:
                self._num_lost = 0
                self._run_dir.add_event("events_lost", number=num_lost)


class SignOfLife:
    """Touches events.jsonl every ALIVE_S, in a thread of its own: a slow file server delays nobody."""

    def __init__(self, run_dir: RunDir) -> None:
        self._path, self._is_over = run_dir.attempt_path / "events.jsonl", threading.Event()
        threading.Thread(target=self._run, name="allranks-alive", daemon=True).start()

    def end(self) -> None:
        """Touch it no more."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(ALIVE_S):
            with contextlib.suppress(OSError):
                os.utime(self._path)


def event_line(event: str, **fields: object) -> str:
    """Return an event as events.jsonl has it."""
    return json.dumps({"time_s": round(time.time(), 3), "event": event, **fields}) + "\n"


def make_directory(path: Path) -> Path:
    """Make a directory of a run, with its parents, and return it.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}; choose another directory with --log-dir") from exc
    return path


def point_latest(root: Path, name: str) -> None:
    """Point `latest` to this run; a file system without links does not stop the job."""
    draft = root / f".latest.{os.getpid()}"
    with contextlib.suppress(OSError):
        draft.unlink(missing_ok=True)
        draft.symlink_to(name)
        draft.replace(root / LATEST)


def this_directory() -> str:
    """Return the working directory for the record; empty if it was removed."""
    with contextlib.suppress(OSError):
        return str(Path.cwd())
    return ""


def describe_command(command: Iterable[str], env: Mapping[str, str]) -> list[str]:
    """Return a command for the record, with the values of secret variables hidden."""
    values = {value for name, value in env.items() if is_secret_name(name) and len(value) >= 8}
    hidden = sorted(values, key=len, reverse=True)  # one may be the beginning of another
    shown = []
    for word in command:
        for value in hidden:
            word = word.replace(value, "(hidden)")
        shown.append(word)
    return shown


def write_whole(path: Path, data: bytes) -> None:
    """Write a file at once, or not at all; a full disk does not stop a job."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        draft.write_bytes(data)
        draft.replace(path)
