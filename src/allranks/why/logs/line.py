"""Which rank wrote a line of a log, and when? Parsed from the prefixes of launchers, loggers and programs.

    line = read_line(b"3: [rank3]:[E1218 20:27:21.48 ProcessGroupNCCL.cpp:667] Stack trace ...", source, 4711)
    line.rank == 3, line.text == "[E1218 20:27:21.48 ProcessGroupNCCL.cpp:667] Stack trace ..."

What launchers and collectors put before a line (`formats.toml` has the table) is not part of `text`; a header of the
program itself is (NCCL's `node:pid:tid [0]`, glog's header, `[Rank 3]`, the kernel's in syslog). A rank in the words
of a message counts only if neither launcher nor path names one.

Only called for lines that match: about 10 us each.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache

import msgspec

from allranks.why.logs.formats import LineWriter, load_formats, read_prefixes
from allranks.why.logs.log_path import MAX_RANK
from allranks.why.logs.sources import Source
from allranks.why.logs.when import find_time

MAX_TEXT = 4000
_MAX_RAW = 1 << 15
"""Maximum number of bytes: text with up to four bytes a character, and colors."""
_HEAD = 240
"""Number of characters in which a header is searched."""
_KEPT = 512
"""Segments that are kept for others of the same text: more than the end of one file has, and 16 MiB at most."""
_MAX_DEVICE = 127
_MAX_PID = 1 << 22
"""Largest pid in Linux; torch before 2.5 prints the thread's address in the place of the process."""


class Line(msgspec.Struct, frozen=True, gc=False):
    """One line, or the part of it between two carriage returns."""

    source: Source
    number: int
    """Number of the physical line in its source, from 1."""
    text: str
    """At most MAX_TEXT characters, without colors, other control characters and the launcher's prefix."""
    node: str | None
    rank: int | None
    local_rank: int | None
    pid: int | None
    time: float | None
    """Seconds since the epoch; a time without a zone is taken as UTC.

    Without a year (`has_year` is False: glog's 1218, syslog's May 19) the year is 1972, which has a 29 February;
    without a date (`has_date` is False: 22:13:28) the day is 1970-01-01. Such times are comparable among each other.
    """
    has_year: bool
    has_date: bool
    pod: str | None = None
    """The pod that wrote it, where a collector of a Kubernetes cluster names it."""
    is_of_task: bool = False
    """Whether its rank is the number that srun gives its task, which may be an agent of several ranks."""

    @property
    def is_of_pod(self) -> bool:
        """Whether a collector named the pod that wrote it."""
        return self.pod is not None

    @property
    def at(self) -> tuple[str, int]:
        """Where it stands, as a key."""
        return self.source.shown, self.number

    @property
    def writer(self) -> tuple[object, ...]:
        """What tells writers apart, in all logs together."""
        return self.source.shown, self.rank, self.local_rank, self.node


def read_line(raw: bytes, source: Source, number: int) -> Line:
    """Parse one segment of a line: at most its first 32 KiB. The path of its source tells what the line does not."""
    is_one = source.rank is not None or source.local_rank is not None
    text, writer, is_of_task, (time, has_year, has_date) = _read_segment(raw[:_MAX_RAW], is_one=is_one)
    rank = writer.rank if writer.rank is not None else source.rank
    local_rank = writer.local_rank if writer.local_rank is not None else source.local_rank
    return Line(
        source=source,
        number=number,
        text=text,
        node=writer.node or source.node or writer.pod or writer.container,
        rank=rank if rank is not None or not writer.is_message_global else writer.message_rank,
        local_rank=local_rank if local_rank is not None else writer.device,
        pid=writer.pid,
        time=time,
        has_year=has_year,
        has_date=has_date,
        pod=writer.pod,
        is_of_task=is_of_task,
    )


@lru_cache(maxsize=_KEPT)
def _read_segment(raw: bytes, *, is_one: bool) -> tuple[str, LineWriter, bool, tuple[float | None, bool, bool]]:
    """Return the text of a segment, who wrote it, whether its rank is srun's task, and its time.

    Cached: thousands of ranks end with the same lines, each in a file of its own.
    """
    text = strip_control(raw.rstrip(b"\r\n").decode(errors="replace"))
    writer = LineWriter()
    start = read_prefixes(text, writer, is_one=is_one)
    _read_header(text[start : start + _HEAD], writer)
    time = find_time(text[: start + _HEAD], start)
    is_of_task = writer.task is not None and _may_be_rank(writer.task, writer)
    if is_of_task:
        writer.rank = writer.task
    return text[start : start + MAX_TEXT].rstrip(), writer, is_of_task, time


_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])"  # ECMA-48: CSI, strings, others
    r"|\x9b[0-?]*[ -/]*[@-~]|[\x00-\x08\x0a-\x1f\x7f-\x9f\ufeff]"
    r"|(?:\^\[|#033)\[[0-9;]*[A-Za-z]"  # written out: by `cat -v`, by rsyslog
)


def strip_control(text: str) -> str:
    """Return text without colors, cursor movements and control characters, except tabs.

    >>> strip_control("\\x1b[31mloss\\x1b[0m 0.1\\x07")
    'loss 0.1'
    """
    is_plain = text.isprintable() and "^[[" not in text and "#033[" not in text
    return text if is_plain else _ESCAPES.sub("", text)


def _may_be_rank(task: int, writer: LineWriter) -> bool:
    """Whether srun's task number is the rank: not if a task starts several ranks, as torchrun does."""
    if writer.rank is not None or writer.local_rank is not None or task > MAX_RANK:
        return False
    if writer.is_message_global and writer.message_rank != task:
        return False
    return writer.device is None or task >= writer.device  # number of the task on its node, one per GPU


# --- Headers of the program itself ---------------------------------------------------------------------------------

_CONTAINER = re.compile(r"(?=.*\d)[0-9a-f]{12}")
_RANK = r"[Rr](?:ank|ANK)[ :=]{0,2}(\d{1,6})"
_MESSAGE_RANK = re.compile(
    rf"\[(PG[^][]*)?{_RANK}\]|(?:GLOBAL_|process group for |to store for ){_RANK}(?!\d)|(?:^|\] ){_RANK}(?: ?[:|]| - )"
)
"""The rank that a message gives as its own; first, the process group that numbers it."""
_IS_DEFAULT_GROUP = re.compile(r"PG (?:ID )?0\b|.*default_pg")


def _read_header(head: str, writer: LineWriter) -> None:
    if match := _find_header(head):
        said = match.groupdict()
        if (pid := said.get("pid")) and int(pid) <= _MAX_PID:
            writer.pid = int(pid)
        if device := said.get("device"):  # -1 and garbage: not known yet
            writer.device = int(device) if 0 <= int(device) <= _MAX_DEVICE else None
        if node := said.get("node"):  # the most reliable name, unless it is the id of a container
            setattr(writer, "container" if _CONTAINER.fullmatch(node) else "node", node)
    if ("ank" in head or "RANK" in head) and (match := _MESSAGE_RANK.search(head)):
        group, *ranks = match.groups()
        if (rank := int(next(filter(None, ranks)))) <= MAX_RANK:
            writer.message_rank = rank
            writer.is_message_global = not group or bool(_IS_DEFAULT_GROUP.match(group))


def _find_header(head: str) -> re.Match[str] | None:
    for text, pattern in _headers():
        if text in head and (match := pattern.search(head)):
            return match
    return None


@cache
def _headers() -> list[tuple[str, re.Pattern[str]]]:
    """Return the headers of `formats.toml`, each with a text without which it need not be looked for."""
    return [(text, re.compile(header.match)) for header in load_formats().header for text in header.needs]
