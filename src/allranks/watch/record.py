"""What does a watch leave when its job ends? `runs/watch-<job>/`, which is no run: `list` and `clean` pass it over.

verdict.json    the last opinion, in the form of a job's own verdict: `allranks why` reads it as such
looks.jsonl     the last looks, one a line; no log
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Collection
from pathlib import Path

import msgspec

from allranks.causes.book import find_cause
from allranks.files.folder import Folder
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Finding, Severity, Verdict
from allranks.model.node_look import EndSeen, NodeLook
from allranks.report.last_files import VERDICT
from allranks.report.mask import mask_verdict
from allranks.report.rundir import as_file_name
from allranks.watch.judge import Opinion

MAX_BYTES = 4 << 20
"""Of all looks that are kept: minutes of a few ranks, seconds of thousands."""


class LastLooks:
    """The last looks, as lines, in bounded memory."""

    def __init__(self) -> None:
        self._lines, self._size = deque[bytes](), 0

    def keep(self, look: NodeLook) -> None:
        """Keep a look, and drop the oldest ones where there are too many."""
        self._lines.append(msgspec.json.encode(look) + b"\n")
        self._size += len(self._lines[-1])
        while self._size > MAX_BYTES and len(self._lines) > 1:
            self._size -= len(self._lines.popleft())

    def save(self, log_dir: Path, verdict: Verdict) -> Path:
        """Write looks and verdict into a new directory, and return its path.

        Raises:
            OSError: it cannot be written.
        """
        log_dir.mkdir(parents=True, exist_ok=True)
        root, first = Folder.root(log_dir), f"watch-{as_file_name(verdict.job)}"
        for number in itertools.count(1):
            name = first if number == 1 else f"{first}-{number}"  # the port of a store is soon another job's
            with contextlib.suppress(FileExistsError):
                root.make_new(name)
                break
        folder = root.sub(name)
        folder.write_whole(VERDICT, mask_verdict(verdict).to_json())  # first: the disk may be full
        folder.write_whole("looks.jsonl", b"".join(self._lines))
        return log_dir / name


def make_verdict(job: str, opinion: Opinion, ends: Collection[EndSeen | None]) -> Verdict:
    """Return the last opinion as a verdict; a state is a warning in it.

    Args:
        ends: of all ranks; that a job succeeded is said only if each is known to have ended with code 0.
    """
    has_succeeded = bool(ends) and all(end is not None and end.code == 0 for end in ends)
    code = opinion.exit_code or (Exit.OK if has_succeeded else Exit.UNKNOWN)
    states = [
        Finding(
            cause=find_cause(state.cause).label,
            severity=Severity.WARN,
            confidence=Confidence.LIKELY if state.is_suspicion else Confidence.UNDECIDED,
            node=state.node or None,
            ranks=state.ranks,
            message=state.text,
        )
        for state in opinion.states
    ]
    return Verdict(job=job, attempt=0, exit_code=code, findings=(*opinion.verdicts, *states))
