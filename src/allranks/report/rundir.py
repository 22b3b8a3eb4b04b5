"""The run directory: all files that a job leaves behind, without secrets.

runs/<job>/attempt_<k>/<node>/rank_<r>.out, .err, .error.json     output of the workers
                      /<node>/env.json                            the workers' environment, with reasons
                      /events.jsonl                               events, as the leader saw them
                      /roll_call.json                             node reports and pair tests
                      /verdict.json                               the verdict
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
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from allranks.model.errors import UsageError
from allranks.model.finding import Verdict
from allranks.model.setting import Setting

_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
LATEST = "latest"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


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
        path = self.node_path(node)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise UsageError(f"{path}: {exc.strerror}; choose another directory with --log-dir") from exc
        return path

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
        _write_whole(self.node_path(node) / "env.json", json.dumps(rows, indent=2).encode() + b"\n")

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
            _write_whole(own, verdict.to_json())
            _write_whole(common, verdict.to_json())
            return True
        if not own.exists():
            _write_whole(own, verdict.to_json())
        try:
            with common.open("xb") as file:
                file.write(verdict.to_json())
        except FileExistsError:
            return False
        except OSError:
            return True  # who cannot write must speak
        return True

    def write_roll_call(self, observations: object) -> None:
        """Write all observations of the roll call, so that its verdict can be checked."""
        _write_whole(self.attempt_path / "roll_call.json", msgspec.json.encode(observations))

    def add_event(self, event: str, **fields: object) -> None:
        """Append one line to events.jsonl; a full disk does not stop a job."""
        line = json.dumps({"time_s": round(time.time(), 3), "event": event, **fields})
        with contextlib.suppress(OSError), (self.attempt_path / "events.jsonl").open("a") as file:
            file.write(line + "\n")

    def count_events(self, event: str, **fields: object) -> int:
        """Return the number of matching lines in events.jsonl; 0 if it cannot be read."""
        wanted, found = {"event": event, **fields}.items(), 0
        with contextlib.suppress(OSError), (self.attempt_path / "events.jsonl").open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):  # its last line may be half written
                    found += wanted <= json.loads(line).items()
        return found


def point_latest(root: Path, name: str) -> None:
    """Point `latest` to this run; a file system without links does not stop the job."""
    draft = root / f".latest.{os.getpid()}"
    with contextlib.suppress(OSError):
        draft.unlink(missing_ok=True)
        draft.symlink_to(name)
        draft.replace(root / LATEST)


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


def _write_whole(path: Path, data: bytes) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        draft.write_bytes(data)
        draft.replace(path)
