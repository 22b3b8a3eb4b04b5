"""Which rank wrote a line of a log, and when? Parsed from the prefixes of launchers, loggers and programs. Pure.

    line = read_line(b"3: [rank3]:[E1218 20:27:21.48 ProcessGroupNCCL.cpp:667] Stack trace ...", source, 4711)
    line.rank == 3, line.text == "[E1218 20:27:21.48 ProcessGroupNCCL.cpp:667] Stack trace ..."

Launchers wrap each other, so prefixes are removed one by one; the innermost that names a rank is the most reliable. A
launcher's prefix is not part of `text`; a header of the program itself is (NCCL's `node:pid:tid [0]`, glog's header,
`[Rank 3]`). A rank in the words of a message counts only if neither launcher nor path names one.

Only called for lines that match: about 10 us each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from allranks.why.logs.log_path import HOST, MAX_RANK, read_path
from allranks.why.logs.sources import Source
from allranks.why.logs.when import find_time

MAX_TEXT = 4000
_MAX_RAW = 1 << 15
"""Maximum number of bytes: text with up to four bytes a character, and colors."""
_HEAD = 240
"""Number of characters in which a header is searched."""
_MAX_PREFIXES = 8
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
    is_of_pod: bool = False
    """Whether `kubectl logs --prefix` named the pod that wrote it."""


def segments(raw: bytes) -> Iterator[bytes]:
    """Return the states of a progress bar: the parts of a line between carriage returns, without empty ones."""
    if b"\r" not in raw:
        if part := raw.rstrip(b"\n"):
            yield part
        return
    yield from filter(None, raw.rstrip(b"\n").split(b"\r"))


def read_line(raw: bytes, source: Source, number: int) -> Line:
    """Parse one segment of a line.

    Args:
        raw: its bytes; only the first 32 KiB or so are used.
        source: its file; its path tells what the line does not.
        number: number of the physical line.
    """
    text = strip_control(raw[:_MAX_RAW].rstrip(b"\r\n").decode(errors="replace"))
    said = _Said()
    start = _read_prefixes(text, said, is_one=source.rank is not None or source.local_rank is not None)
    head = text[start : start + _HEAD]
    _read_header(head, said)
    time, has_year, has_date = find_time(text[: start + _HEAD], start)
    if said.task is not None and _may_be_rank(said.task, said):
        said.rank = said.task
    rank = said.rank if said.rank is not None else source.rank
    local_rank = said.local_rank if said.local_rank is not None else source.local_rank
    return Line(
        source=source,
        number=number,
        text=text[start : start + MAX_TEXT].rstrip(),
        node=said.node or source.node or said.container,
        rank=rank if rank is not None else said.message_rank,
        local_rank=local_rank if local_rank is not None else said.device,
        pid=said.pid,
        time=time,
        has_year=has_year,
        has_date=has_date,
        is_of_pod=said.is_of_pod,
    )


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


# --- Prefixes ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Said:
    """What the prefixes tell about the writer of a line."""

    node: str | None = None
    container: str | None = None
    """A host name that is a container's id: any other name is preferred."""
    rank: int | None = None
    task: int | None = None
    """The task number of srun -l: the rank, if each task is one rank."""
    message_rank: int | None = None
    is_message_global: bool = False
    """A subgroup numbers its ranks from 0."""
    local_rank: int | None = None
    device: int | None = None
    pid: int | None = None
    is_of_pod: bool = False


_ADDRESS = r"\d{1,3}(?:\.\d{1,3}){3}"
_HOST_LABEL = rf"(?i:{HOST})(?:\.[a-z][\w.-]*)?"
_INDENTED = r" {1,8}(?:File \"|(?:time|host|rank|exitcode|error_file|traceback) {1,6}: )"
"""A frame of a traceback, a line of torchrun's summary: launchers also prefix these."""
# Order matters: most specific first. Each ends where the next prefix, or the message, may begin.
_PREFIX = re.compile(
    "|".join(
        (
            r"(?P<own>\[(?:\S+ )?(?P<own_node>[\w.-]+) r(?P<own_rank>\d{1,6})\] ?)",  # allranks
            # whose ESC was lost in a copy; `[m` only where no name begins
            r"(?P<colour>(?:\[(?:\d{1,2}(?:;\d{1,3})*m|m(?![\w.-])) ?)+)",
            r"(?P<blank>\s+(?=[\[(]))",
            r"(?P<grep>[\w./-]{1,120}\.(?:txt|log|out|err):(?:\d+:)? ?(?=\S))",  # grep over several files
            r"(?P<torch>\[rank(?P<torch_rank>\d{1,6})\]:[ ]?)",  # torch >= 2.2
            r"(?P<tee>\[(?:default|trainer|worker|train|learner|actor|local_rank|local)(?P<tee_rank>\d{1,4})\]:)",
            # TorchX: role and number of the node's agent, then torchrun's tee without a role
            r"(?P<replica>(?P<replica_node>[a-z][\w-]*/\d{1,5}) (?:\[(?P<replica_rank>\d{1,4})\]:)?(?=\S))",
            r"(?P<bar>\[(?P<bar_node>[A-Za-z][\w.-]*)\|(?P<bar_rank>\d{1,4})\]:)",
            r"(?P<mpi>(?:(?P<mpi_date>[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}) ?)?"
            r"\[(?:[^\[\],\s]*@)?(?:\d+,)?(?P<mpi_rank>\d{1,6})\](?:\[[^\]]*\])?<std(?:out|err|diag)>:)",
            r"(?P<ray>\((?:[^()]{0,80}? )?(?:rank=(?P<ray_rank>\d{1,6}),? )?pid=(?P<ray_pid>\d{1,7})"
            r"(?:, ip=(?P<ray_node>[\w.:-]+))?\)(?: \[repeated \d+x across cluster\])? ?)",
            r"(?P<pod>\[pod/(?P<pod_node>[a-z0-9.-]+)(?:/[\w.-]+)?\] ?)",  # kubectl logs --prefix
            # docker compose: service and number
            r"(?P<compose>(?P<compose_node>(?:[a-z0-9]+[-_])*(?:node|worker|trainer|train|master|rank|ddp|host|launcher|"
            r"replica)[a-z]*[-_]\d{1,5})\s*\| ?(?=\S))",
            # pdsh (DeepSpeed), clush
            rf"(?P<host>(?P<host_node>{_ADDRESS}|{_HOST_LABEL}): (?=\S|{_INDENTED}))",
            # Any other name with a number, where a program's header follows.
            r"(?P<name>(?P<name_node>(?!(?i:rank|gpu|cuda)\d{1,4}:)(?:[a-z][a-z0-9-]*|[A-Z][A-Z0-9-]*)\d[A-Za-z0-9.-]*)"
            rf": (?=\[\d{{4}}-|\[rank\d|[\w.-]+:\d+:\d+ \[|Traceback \(|{_INDENTED}"
            r"|(?:\w+\.)*[A-Z]\w+(?:Error|Exception)\b))",
            r"(?P<when>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3,9}(?:Z|[+-]\d\d:\d\d):? )",  # docker, kubectl --timestamps
        )
    )
)
# Not Horovod's list of who is missing: `1: [allreduce.grad_0, ...]`.
_TASK = re.compile(
    rf" {{0,4}}(?P<task>\d{{1,6}}):(?: (?=\S|{_INDENTED})"
    r"|(?= *\[(?:rank|default)\d))"
    r"(?!\[[^\]\s]{0,200}(?:Horovod|[Aa]llreduce|[Bb]roadcast|[Aa]llgather)[._A-Z])"
)


def _read_prefixes(text: str, said: _Said, *, is_one: bool) -> int:
    """Parse the prefixes of launchers; return their end.

    Args:
        is_one: the source belongs to a single process, so `3: ` is not a prefix.
    """
    at = end = 0
    if not is_one and (match := _TASK.match(text, 0, _HEAD)):
        said.task = int(match["task"])
        at = end = match.end()
    for _ in range(_MAX_PREFIXES):
        match = _PREFIX.match(text, at, at + _HEAD)
        if match is None:
            break
        at = match.end()
        kind = match.lastgroup
        if kind in ("blank", "when"):  # belongs to the program, unless a launcher's prefix follows
            continue
        end = at
        if kind == "grep":
            said.node, said.rank, said.local_rank, _ = read_path(match["grep"].rstrip(": 0123456789"))
        if kind in ("colour", "grep"):
            continue
        if kind == "torch":
            said.rank = int(match["torch_rank"])
        elif kind == "tee":
            said.local_rank = int(match["tee_rank"])
        elif kind == "mpi":
            said.rank = int(match["mpi_rank"])
        elif kind == "replica":
            said.node = match["replica_node"]
            said.local_rank = int(match["replica_rank"]) if match["replica_rank"] else said.local_rank
        elif kind == "bar":
            said.node, said.local_rank = match["bar_node"], int(match["bar_rank"])
        elif kind == "own":
            said.node, said.rank = match["own_node"], int(match["own_rank"])
        elif kind == "ray":
            said.node, said.pid = match["ray_node"] or said.node, int(match["ray_pid"])
            said.rank = int(match["ray_rank"]) if match["ray_rank"] else said.rank
        else:
            said.node = match[f"{kind}_node"]
            said.is_of_pod = kind == "pod"
    if said.rank is not None and said.rank > MAX_RANK:
        said.rank = None
    return end


def _may_be_rank(task: int, said: _Said) -> bool:
    """Whether srun's task number is the rank: not if a task starts several ranks, as torchrun does."""
    if said.rank is not None or said.local_rank is not None or task > MAX_RANK:
        return False
    if said.is_message_global and said.message_rank != task:
        return False
    return said.device is None or task >= said.device  # number of the task on its node, one per GPU


# --- Headers of the program itself ---------------------------------------------------------------------------------

_NCCL = re.compile(
    r"(?<![\w.:/-])-?(?P<node>[A-Za-z0-9][\w.-]*):(?P<pid>\d{1,7}):\d{1,7} \[(?P<device>-?\d{1,10})\] "
    r"(?:[\w./+-]+:\d+ (?:\(\S{1,80}\) )?)?NCCL "  # with the function since 2.30.7: src/debug.cc
)
# NCCL before 2.4 does not print its name; a time of day (10:34:07 [0] INFO) is not a node.
_OLD_NCCL = re.compile(
    r"(?<![\w.:/-])(?P<node>(?=[\w.-]*[A-Za-z])[A-Za-z0-9][\w.-]*):(?P<pid>\d{1,7}):\d{1,7} \[(?P<device>-?\d{1,10})\] "
    r"(?:[\w./+-]+:\d+ )?(?:INFO|WARN) "
)
_NCCL_TESTS = re.compile(r"(?P<node>[A-Za-z0-9][\w.-]*): Test (?:CUDA|NCCL) failure ")
# UCX's: [1668693503.473099] [node01:1188443:0]  ib_log.c:246  UCX  ERROR
_UCX = re.compile(r"\[\d{9,10}\.\d{6}\] \[(?P<node>[A-Za-z0-9][\w.-]*):(?P<pid>\d{1,7}) ?:\d{1,7}(?::\d{1,7})?\] ")
_SYSLOG = re.compile(
    r"(?:(?:[^\W\d_]{3,5}\.?|\d{1,2}[^\W\d_]) [ \d]?\d \d\d:\d\d:\d\d"
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S*(?= \S+ (?:kernel|slurm|systemd)))"
    r" (?!(?:INFO|WARN|WARNING|ERROR|DEBUG|CRITICAL|FATAL)\b)(?P<node>[A-Za-z0-9][\w.-]*) "
    r"[\w./@-]+(?:\[(?P<pid>\d{1,7})\])?: "
)
_CONTAINER = re.compile(r"(?=.*\d)[0-9a-f]{12}")
# torch.distributed.elastic: W0325 10:34:07.578000 3045566 torch/distributed/run.py:123]
_ELASTIC_PID = re.compile(r"[EWIDFC]\d{3,4} \d\d:\d\d:\d\d\.\d{3,9}\s+(?P<pid>\d+) [\w./-]+\.py:\d+\]")
# The rank that a message gives as its own, by the text before and after it.
_MESSAGE_RANK = re.compile(r"[Rr](?:ank|ANK)[ :=]{0,2}(\d{1,6})(?=(\])|( ?[:|]| - )|\D|$)")
_GIVEN_TO_SPEAKER = ("GLOBAL_", "process group for ", "to store for ")
_TENSOR_RANK = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: (?:DP|PP)\d+)* TP(\d{1,4})\b")  # SGLang
_LOCAL = re.compile(r"^LOCAL_RANK: (\d{1,4})\b")
_IS_DEFAULT_GROUP = re.compile(r"PG (?:ID )?0\b|.*default_pg")


def _read_header(head: str, said: _Said) -> None:
    if match := _find_nccl(head):
        said.pid = int(match["pid"])
        device = int(match["device"])  # -1 and garbage: not known yet
        said.device = device if 0 <= device <= _MAX_DEVICE else None
        _note_host(match["node"], said)
    elif head.startswith("[") and (match := _UCX.match(head)):
        said.pid = int(match["pid"])
        _note_host(match["node"], said)
    elif ": Test " in head and (match := _NCCL_TESTS.match(head)):
        _note_host(match["node"], said)
    elif match := _SYSLOG.match(head):
        said.node = match["node"]
        said.pid = int(match["pid"]) if match["pid"] else said.pid
    elif (match := _ELASTIC_PID.match(head)) and int(match["pid"]) <= _MAX_PID:
        said.pid = int(match["pid"])
    if "ank" in head or "RANK" in head:
        _read_message_rank(head, said)
    if said.device is None and (match := _LOCAL.match(head) or _TENSOR_RANK.match(head)):
        said.device = int(match[1])


def _find_nccl(head: str) -> re.Match[str] | None:
    """Return NCCL's header.

    The fixed words are searched first: a search for its beginning takes as long as all the rest.
    """
    if "NCCL " in head:
        return _NCCL.search(head)
    return _OLD_NCCL.search(head) if " INFO " in head or " WARN " in head else None


def _read_message_rank(head: str, said: _Said) -> None:
    for match in _MESSAGE_RANK.finditer(head):
        at = match.start()
        group = ""
        if match[2] and (opening := head.rfind("[", 0, at)) >= 0 and "]" not in head[opening:at]:
            group = head[opening + 1 : at]
            is_own = not group or group.startswith("PG")
        elif head.endswith(_GIVEN_TO_SPEAKER, 0, at):
            is_own = True
        else:
            is_own = bool(match[3]) and (at == 0 or head.endswith("] ", 0, at))
        if is_own and (rank := int(match[1])) <= MAX_RANK:
            said.message_rank = rank
            said.is_message_global = not group or bool(_IS_DEFAULT_GROUP.match(group))
            return


def _note_host(name: str, said: _Said) -> None:
    """NCCL's name of its node is the most reliable, unless it is the id of a container."""
    if _CONTAINER.fullmatch(name):
        said.container = name
    else:
        said.node = name
