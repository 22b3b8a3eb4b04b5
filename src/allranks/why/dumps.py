"""Flight recorder dumps beside the logs: finds them, and reads them without executing anything.

    problems: list[ReadProblem] = []
    dumps = read_dumps(find_dumps(["logs/"]), problems)

torch writes them as pickles (TORCH_FR_DUMP_TEMP_FILE, before 2.9 TORCH_NCCL_DEBUG_INFO_TEMP_FILE: nccl_trace_rank_3,
comm_lib_trace_rank_3), its worker server also as JSON. A pickle is a program; unpickle.py runs only what builds plain
data. Formats 1.0 (torch 2.2) to 2.10 (2.13) are known; fields that a version lacks stay empty. The rank is only in the
file's name. recorder/wait_graph.py decides which rank the others wait for; it does not read files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from allranks.recorder.calls import Call, Dump
from allranks.why.logs.line import strip_control
from allranks.why.logs.log_path import MAX_RANK
from allranks.why.logs.read import ReadProblem
from allranks.why.logs.sources import SNIFF_BYTES, Source, inside, make_source, walk

MAX_BYTES = 32 << 20
"""Limit of one dump: 2,000 calls are 0.4 MB, 20,000 with the C++ stacks about 10 MB."""
KEEP_CALLS = 100_000
"""Limit of calls that are kept of all dumps together, the newest of each: about 100 MB."""

_NAMED = re.compile(r"\d(?:\.(?:json|pickle|pkl|bin|dump|txt))?$")
"""End of a dump's name: the user chooses the prefix, and the rank is appended."""
_KEYS = re.compile(rb"collective_seq_id|profiling_name|nccl_version|comm_lib_version|pg_config|pg_status")


class DumpError(ValueError):
    """A file is not a flight recorder dump, or is damaged."""


# --- Finding ----------------------------------------------------------------------------------------------------------


def find_dumps(targets: Sequence[str]) -> tuple[Source, ...]:
    """Return the dumps in files and directories, each once; other targets (`-`, a job id) have none."""
    found: dict[str, Source] = {}
    for target in targets:
        is_folder = Path(target).is_dir()
        before = inside(target) if is_folder and len(targets) == 1 else ""
        files = walk(target, lambda path: bool(_NAMED.search(path))) if is_folder else [(str(Path(target)), None)]
        for file, status in files:
            if not is_dump(Path(file)):
                continue
            source = make_source(file.removeprefix(before), file, status)
            match = re.search(r"(\d{1,6})(?:\.[a-z]+)?$", file)
            if match and int(match[1]) <= MAX_RANK:
                source = replace(source, rank=int(match[1]))
            found.setdefault(os.path.realpath(file), source)
    return tuple(found.values())


def is_dump(path: Path) -> bool:
    """Whether a file begins like a dump."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(SNIFF_BYTES)
    except (OSError, ValueError):
        return False
    return bool(re.match(rb"\x80[\x02-\x05]|\s*\{", head) and _KEYS.search(head))


# --- Reading ----------------------------------------------------------------------------------------------------------


class _Frame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    line: int = 0


class _Entry(msgspec.Struct):
    """One call as torch writes it; what does not stand in the file is filled in by `_read`."""

    profiling_name: str = ""
    process_group: list[str] | str | None = None
    """(name, description), since format 2.0."""
    pg_id: int | None = None
    """A number within this process; up to 1.x the only one."""
    record_id: int = 0
    collective_seq_id: int | None = None
    p2p_seq_id: int | None = None
    seq_id: int | None = None
    """Before format 2.2, of both kinds."""
    is_p2p: bool | None = None
    input_sizes: list[list[int]] | None = None
    output_sizes: list[list[int]] | None = None
    input_dtypes: list[str] | None = None
    output_dtypes: list[str] | None = None
    state: str | None = None
    retired: bool | None = None
    time_created_ns: int | None = None
    time_discovered_started_ns: int | None = None
    frames: list[_Frame] | None = None
    group: str = msgspec.field(default="", name="its group's name")
    desc: str = msgspec.field(default="", name="its group's description")
    number: int = msgspec.field(default=0, name="from 1, in the file's order")

    @property
    def seq(self) -> int:
        """Its number in its group, among calls of its kind."""
        seq = self.p2p_seq_id if self.is_p2p else self.collective_seq_id
        return seq if seq is not None else self.seq_id or 0

    @property
    def is_gloos(self) -> bool:
        """Whether it is of Gloo's recorder."""
        return self.profiling_name.startswith("gloo:")

    @property
    def is_done(self) -> bool:
        """Gloo never marks a call as completed, but retires it when it is over. NCCL also retires what timed out."""
        return self.state == "completed" or (bool(self.retired) and self.is_gloos)

    @property
    def batch(self) -> object:
        """What entries of one batch share."""
        return self.group, self.pg_id, bool(self.is_p2p), self.seq


class _Config(msgspec.Struct):
    desc: str = ""
    ranks: str = ""
    """Global ranks, in the group's order: `[0, 1, 2]`."""


class _Status(msgspec.Struct):
    last_enqueued_collective: int = -1


class _File(msgspec.Struct):
    entries: list[_Entry] = []
    pg_config: dict[str, _Config] = {}
    pg_status: dict[str, _Status] = {}


def read_dumps(sources: Sequence[Source], problems: list[ReadProblem]) -> list[Dump]:
    """Return the dumps, of each rank the newest; `problems` gets a line for each that cannot be used."""
    newest: dict[int, tuple[tuple[int, float], Dump]] = {}
    keep = max(64, KEEP_CALLS // max(len(sources), 1))
    for source in sources:
        if source.path is None or source.rank is None:
            problems.append(ReadProblem(source, "a flight recorder dump whose file name does not end with a rank"))
            continue
        try:
            with Path(source.path).open("rb") as file:
                taken_s = os.fstat(file.fileno()).st_mtime
                data = file.read(MAX_BYTES + 1)
            dump = parse_dump(data, rank=source.rank, source=source.shown, taken_s=taken_s, keep=keep)
        except OSError as exc:
            problems.append(ReadProblem(source, f"cannot be read: {exc.strerror or exc}"))
        except DumpError as exc:
            problems.append(ReadProblem(source, str(exc)))
        else:
            key = (source.attempt or 0, taken_s)
            if source.rank not in newest or newest[source.rank][0] < key:
                newest[source.rank] = (key, dump)
    return [newest[rank][1] for rank in sorted(newest)]


def parse_dump(data: bytes, *, rank: int, keep: int = KEEP_CALLS, **about: Any) -> Dump:
    """Read one dump, pickle or JSON.

    Args:
        keep: maximum number of calls: the newest, and of each group the first that is not done and the last.
        about: other fields of a Dump: source, taken_s.
    Raises:
        DumpError: it is not a dump, is damaged, or is larger than MAX_BYTES.
    """
    file = _read(data)
    is_whole = not file.entries or file.entries[0].record_id == 0
    _end_with_their_batch(file.entries)
    entries, formed_again = _last_groups(file.entries)
    names = {str(entry.pg_id): entry.group for entry in reversed(entries)}
    # The default group is each process's first; other numbers are local to the process.
    if "0" not in names.values() and not formed_again:
        names.setdefault("0", "0")
    members = {name: ranks for name, told in file.pg_config.items() if rank in (ranks := _ranks(told.ranks))}
    last = {names[uid]: status.last_enqueued_collective for uid, status in file.pg_status.items() if uid in names}
    calls = tuple(map(_call, _newest(entries, keep)))
    described = {call.group for call in calls}
    return Dump(
        rank=rank,
        calls=calls,
        # Sends and receives count into it: only asked where the group has no calls.
        enqueued={name: number for name, number in last.items() if name not in described},
        started=_started(entries),
        members=members,
        descs={entry.group: entry.desc for entry in entries} | {name: file.pg_config[name].desc for name in members},
        is_whole=is_whole,
        formed_again=formed_again,
        **about,
    )


def _read(data: bytes) -> _File:
    """Return what a dump holds, its entries in their order, with numbers and the names of their groups."""
    if len(data) > MAX_BYTES:
        raise DumpError(f"a flight recorder dump of more than {MAX_BYTES >> 20} MiB was not read")
    try:
        if data.startswith(b"\x80"):
            from allranks.recorder.unpickle import load_plain  # with pickletools, which takes a moment

            plain: Any = load_plain(data)
            file = msgspec.convert({"entries": plain} if isinstance(plain, list) else plain, _File, strict=False)
        else:
            file = msgspec.json.decode(data, type=_File, strict=False)
    except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
        why = strip_control(str(exc)).replace("\n", " ")[:200]
        raise DumpError(f"a flight recorder dump that cannot be read: {why}") from exc
    file.entries.sort(key=lambda entry: entry.record_id)
    for number, entry in enumerate(file.entries, start=1):
        told = entry.process_group
        name, entry.desc, *_ = [*told, "", ""] if isinstance(told, list) else [told or "", ""]
        entry.group, entry.number = name or str(entry.pg_id or 0), number
    return file


def _end_with_their_batch(entries: Sequence[_Entry]) -> None:
    """Let coalesced calls, and those of batch_isend_irecv, be as the entry that closes their batch.

    torch keeps the state of that one only: the others are `scheduled` for ever.
    Source: torch 2.13, ProcessGroupNCCL::endCoalescing.
    """
    closing: dict[object, _Entry] = {}
    for entry in reversed(entries):
        if entry.profiling_name.endswith("coalesced") and not entry.input_sizes:
            closing.setdefault(entry.batch, entry)
        elif closing and not entry.is_done and (last := closing.get(entry.batch)) is not None:
            entry.state, entry.retired = last.state, last.retired


def _last_groups(entries: Sequence[_Entry]) -> tuple[list[_Entry], set[str]]:
    """Return the entries without those of groups that were destroyed and formed again, and the names of these.

    Such a group begins at 1 anew, and has another `pg_id`; the default one's first is 0.
    """
    last: dict[str, tuple[int | None, int]] = {}
    """By name: its id, and its last number."""
    begun: dict[str, int] = {}
    """By name: where the last one begins."""
    for entry in entries:
        seq = 0 if entry.is_p2p else entry.seq
        pg_id, before = last.get(entry.group, (entry.pg_id, 0))
        if pg_id != entry.pg_id or 0 < seq < before:
            begun[entry.group], before = entry.number, 0
        last[entry.group] = entry.pg_id, max(seq, before)
    formed_again = {name for name, (pg_id, _) in last.items() if name in begun or (name == "0" and pg_id)}
    return [entry for entry in entries if entry.number >= begun.get(entry.group, 0)], formed_again


def _started(entries: Sequence[_Entry]) -> dict[str, int]:
    """Return the last collective that the GPU has started, by group; nothing where the recorder does not time calls."""
    found: dict[str, int] = {}
    if not any(entry.state == "started" or entry.time_discovered_started_ns for entry in entries):
        return found
    for entry in entries:
        if not entry.is_p2p and not entry.is_gloos:
            has_started = entry.state in ("started", "completed") or bool(entry.time_discovered_started_ns)
            found[entry.group] = max(found.get(entry.group, 0), entry.seq if has_started else 0)
    return found


@lru_cache(maxsize=4096)
def _ranks(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(int, re.findall(r"\d{1,7}", text))))


_MAX_NAME = 200
"""Maximum number of characters of a name or path."""
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python3|^<|(?:^|[/\\])torch[/\\]")
_MAX_NS = 1 << 63
"""JSON and pickles have any number of digits, and few such numbers are a float of seconds."""
_PAIR = re.compile(r"(send|recv)\w* (\d{1,7})(?:->|<-)(\d{1,7})")


def _call(entry: _Entry) -> Call:
    _, _, op = entry.profiling_name[:_MAX_NAME].rpartition(":")
    pair = _PAIR.match(op)
    entry.is_p2p = entry.is_p2p if entry.is_p2p is not None else pair is not None
    return Call(
        group=entry.group,
        seq=entry.seq,
        op=strip_control(op),
        sizes=tuple(map(tuple, entry.input_sizes or ())),
        output_sizes=tuple(map(tuple, entry.output_sizes or ())),
        dtypes=tuple(entry.input_dtypes or ()),
        output_dtypes=tuple(entry.output_dtypes or ()),
        is_done=entry.is_done,
        blocks=entry.is_gloos,
        peer=int(pair[3]) if pair else None,
        is_p2p=entry.is_p2p,
        place=_place(entry.frames or ()),
        created_ns=created_ns if 0 < (created_ns := entry.time_created_ns or 0) < _MAX_NS else 0,
        number=entry.number,
    )


def _place(frames: Iterable[_Frame]) -> str:
    """Return the innermost frame in a user's file; frames are innermost first."""
    for frame in frames:
        if _is_users(frame.filename):
            where = f" in {frame.name[:_MAX_NAME]}" if frame.name and frame.name != "<module>" else ""
            return strip_control(f"{frame.filename[-_MAX_NAME:]}:{frame.line}{where}")
    return ""


@lru_cache(maxsize=4096)
def _is_users(path: str) -> bool:
    return path.endswith(".py") and not _LIBRARY.search(path[:_MAX_NAME])


def _newest(entries: list[_Entry], keep: int) -> list[_Entry]:
    """Return the entries to keep, no batch in part: creating a call for each costs more than reading the file."""
    if len(entries) <= keep:
        return entries
    first_open = {entry.group: entry for entry in reversed(entries) if not entry.is_done}
    last = {entry.group: entry for entry in entries}
    kept = {entry.batch for entry in (*first_open.values(), *last.values(), *entries[-keep:])}
    return [entry for entry in entries if entry.batch in kept]
