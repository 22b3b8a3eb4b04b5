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
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from allranks.recorder.calls import Call, Dump
from allranks.recorder.unpickle import PickleError, load_plain
from allranks.why.logs.line import strip_control
from allranks.why.logs.log_path import MAX_RANK
from allranks.why.logs.read import ReadProblem
from allranks.why.logs.sources import SNIFF_BYTES, Source, inside, make_source, walk

MAX_BYTES = 32 << 20
"""Limit of one dump: 2,000 calls are 0.4 MB, 20,000 with the C++ stacks about 10 MB."""
KEEP_CALLS = 100_000
"""Limit of calls that are kept of all dumps together, the newest of each: about 100 MB."""

AGAIN = "#"
"""Between the name of a group and which one of that name it is, as in heartbeats."""

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
        for file, status in walk(target, _is_named_like_a_dump) if is_folder else [(str(Path(target)), None)]:
            if not is_dump(Path(file)):
                continue
            source = make_source(file.removeprefix(before), file, status)
            match = re.search(r"(\d{1,6})(?:\.[a-z]+)?$", file)
            if match and int(match[1]) <= MAX_RANK:
                source = replace(source, rank=int(match[1]))
            found.setdefault(os.path.realpath(file), source)
    return tuple(found.values())


def _is_named_like_a_dump(path: str) -> bool:
    return _NAMED.search(path) is not None


def is_dump(path: Path) -> bool:
    """Whether a file begins like a dump."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(SNIFF_BYTES)
    except (OSError, ValueError):
        return False
    return bool(re.match(rb"\x80[\x02-\x05]|\s*[{\[]", head) and _KEYS.search(head))


# --- Reading ----------------------------------------------------------------------------------------------------------


class _Frame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    line: int = 0


class _Entry(msgspec.Struct):
    """One call as torch writes it."""

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


class _Config(msgspec.Struct):
    desc: str = ""
    ranks: str = ""
    """Global ranks, in the group's order: `[0, 1, 2]`."""


class _Status(msgspec.Struct):
    last_enqueued_collective: int = -1
    last_started_collective: int = -1


class _File(msgspec.Struct):
    entries: list[_Entry] = []
    pg_config: dict[str, _Config] = {}
    pg_status: dict[str, _Status] = {}


def read_dumps(sources: Sequence[Source], problems: list[ReadProblem]) -> list[Dump]:
    """Read dumps; for each rank only the newest is kept.

    Args:
        sources: as find_dumps returns them.
        problems: gets a line for each dump that cannot be used.
    """
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
            dump = parse_dump(data, rank=source.rank, source=source.shown, node=source.node, taken_s=taken_s, keep=keep)
        except OSError as exc:
            problems.append(ReadProblem(source, f"cannot be read: {exc.strerror or exc}"))
        except DumpError as exc:
            problems.append(ReadProblem(source, str(exc)))
        else:
            key = (source.attempt or 0, taken_s)
            if source.rank not in newest or newest[source.rank][0] < key:
                newest[source.rank] = (key, dump)
    return [newest[rank][1] for rank in sorted(newest)]


def parse_dump(
    data: bytes,
    *,
    rank: int,
    source: str = "",
    node: str | None = None,
    taken_s: float | None = None,
    keep: int = KEEP_CALLS,
) -> Dump:
    """Read one dump, pickle or JSON.

    Args:
        data: all of it.
        rank: the global rank that wrote it.
        source: name of its file.
        node: node of the rank, if known.
        taken_s: when it was taken.
        keep: maximum number of calls: the newest, and of each group the first that is not done and the last.
    Raises:
        DumpError: it is not a dump, is damaged, or is larger than MAX_BYTES.
    """
    if len(data) > MAX_BYTES:
        raise DumpError(f"a flight recorder dump of more than {MAX_BYTES >> 20} MiB was not read")
    try:
        if data.startswith(b"\x80"):
            plain: Any = load_plain(data)
            file = msgspec.convert({"entries": plain} if isinstance(plain, list) else plain, _File, strict=False)
        elif data.lstrip().startswith(b"["):
            file = _File(entries=msgspec.json.decode(data, type=list[_Entry], strict=False))
        else:
            file = msgspec.json.decode(data, type=_File, strict=False)
    except (PickleError, msgspec.MsgspecError, RecursionError, UnicodeError, ValueError) as exc:
        why = strip_control(str(exc)).replace("\n", " ")[:200]
        raise DumpError(f"a flight recorder dump that cannot be read: {why}") from exc
    file.entries.sort(key=lambda entry: entry.record_id)
    is_whole = not file.entries or file.entries[0].record_id == 0
    _end_with_their_batch(file.entries)
    numbered, formed_again = _last_groups(file.entries, is_whole=is_whole)
    names: dict[str, str] = {}
    descs: dict[str, str] = {}
    for _, entry in numbered:
        name, desc = _group_of(entry)
        descs.setdefault(name, desc)
        names.setdefault(str(entry.pg_id), name)
    # The default group is each process's first; other numbers are local to the process.
    if "0" not in names.values() and not formed_again:
        names.setdefault("0", "0")
    now = {name.partition(AGAIN)[0]: name for name in formed_again}
    config = {now.get(name, name): config for name, config in file.pg_config.items()}
    members = {name: ranks for name, told in config.items() if rank in (ranks := _ranks(told.ranks))}
    descs |= {name: told.desc for name, told in config.items() if name in members}
    statuses = {names[uid]: status for uid, status in file.pg_status.items() if uid in names}
    calls = tuple(_call(entry, number) for number, entry in _newest(numbered, keep))
    described = {call.group for call in calls}
    return Dump(
        rank=rank,
        calls=calls,
        # Sends and receives count into it: only asked where the group has no calls.
        enqueued={name: told.last_enqueued_collective for name, told in statuses.items() if name not in described},
        started=_started([entry for _, entry in numbered], statuses),
        members=members,
        descs=descs,
        is_whole=is_whole,
        formed_again=formed_again,
        taken_s=taken_s,
        source=source,
        node=node,
    )


def _end_with_their_batch(entries: Sequence[_Entry]) -> None:
    """Let coalesced calls, and those of batch_isend_irecv, be as the entry that closes their batch.

    torch keeps the state of that one only: the others are `scheduled` for ever.
    Source: torch 2.13, ProcessGroupNCCL::endCoalescing.
    """
    if not any(entry.profiling_name.endswith("coalesced") for entry in entries):
        return
    closing: dict[object, _Entry] = {}
    for entry in reversed(entries):
        batch = _batch_of(entry)
        if entry.profiling_name.endswith("coalesced") and not entry.input_sizes:
            closing.setdefault(batch, entry)
        elif (last := closing.get(batch)) is not None and not _is_done(entry):
            entry.state, entry.retired = last.state, last.retired


def _last_groups(entries: Sequence[_Entry], *, is_whole: bool) -> tuple[list[tuple[int, _Entry]], frozenset[str]]:
    """Return entries with their numbers, of groups that were formed again under one name only those of the last.

    A group that was destroyed and formed again begins at 1 anew, and has another `pg_id`. Where no entry is lost, its
    name tells which one it is (`0#2`, the second), as in heartbeats: the last one of other ranks may be another.

    Args:
        entries: in their order; those of such groups get the new name.
        is_whole: no entry is lost.
    Returns:
        The entries, and the new names of such groups.
    """
    if not _may_be_formed_again(entries):
        return list(enumerate(entries, start=1)), frozenset()
    last: dict[str, tuple[int, int | None, int]] = {}
    """By name: which one it is, its id, and its last number."""
    which = []
    for entry in entries:
        name, seq = _group_of(entry)[0], 0 if entry.is_p2p else _seq_of(entry, is_p2p=False)
        count, pg_id, before = last.get(name, (1, entry.pg_id, 0))
        if pg_id != entry.pg_id or 0 < seq < before:
            count, before = count + 1, 0
        last[name] = count, entry.pg_id, max(seq, before)
        which.append((name, count))
    again = {name for name, (count, pg_id, _) in last.items() if count > 1 or (name == "0" and pg_id)}
    numbered = [
        (number, entry)
        for number, (entry, (name, count)) in enumerate(zip(entries, which, strict=True), start=1)
        if count == last[name][0]
    ]
    new = {name: f"{name}{AGAIN}{last[name][0]}" if is_whole and last[name][0] > 1 else name for name in again}
    for _, entry in numbered:
        name, desc = _group_of(entry)
        if name in new:
            entry.process_group = [new[name], desc]
    return numbered, frozenset(new.values())


def _may_be_formed_again(entries: Sequence[_Entry]) -> bool:
    """Whether to look closer: a quick look, as there are many entries."""
    last: dict[int | None, int] = {}
    first: list[tuple[str, int | None]] = []
    for entry in entries:
        if entry.pg_id not in last:
            last[entry.pg_id] = 0
            first.append((_group_of(entry)[0], entry.pg_id))
        if not entry.is_p2p and (seq := entry.collective_seq_id or entry.seq_id):
            if seq < last[entry.pg_id]:
                return True
            last[entry.pg_id] = seq
    return None in last or len(dict(first)) < len(first) or bool(dict(first).get("0"))


def _started(entries: Sequence[_Entry], statuses: Mapping[str, _Status]) -> dict[str, int]:
    """Return the last collective that the GPU has started, by group; nothing where the recorder does not time calls."""
    found = {name: told.last_started_collective for name, told in statuses.items() if told.last_started_collective >= 0}
    if not found and not any(entry.state == "started" or entry.time_discovered_started_ns for entry in entries):
        return {}
    for entry in entries:
        if not entry.is_p2p and not entry.profiling_name.startswith("gloo:"):
            has_started = entry.state in ("started", "completed") or bool(entry.time_discovered_started_ns)
            name, seq = _group_of(entry)[0], _seq_of(entry, is_p2p=False)
            found[name] = max(found.get(name, 0), seq if has_started else 0)
    return found


@lru_cache(maxsize=4096)
def _ranks(text: str) -> tuple[int, ...]:
    """Parse `[0, 1, 2]`."""
    return tuple(dict.fromkeys(map(int, re.findall(r"\d{1,7}", text))))


def _group_of(entry: _Entry) -> tuple[str, str]:
    group = entry.process_group
    if isinstance(group, list) and group:
        return group[0], group[1] if len(group) > 1 else ""
    return group if isinstance(group, str) and group else str(entry.pg_id or 0), ""


_MAX_NAME = 200
"""Maximum number of characters of a name or path."""
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python3|^<|(?:^|[/\\])torch[/\\]")
_MAX_NS = 1 << 63
"""JSON and pickles have any number of digits, and few such numbers are a float of seconds."""
_PAIR = re.compile(r"(send|recv)\w* (\d{1,7})(?:->|<-)(\d{1,7})")


def _call(entry: _Entry, number: int) -> Call:
    _, _, op = entry.profiling_name[:_MAX_NAME].rpartition(":")
    pair = _PAIR.match(op)
    is_p2p = entry.is_p2p if entry.is_p2p is not None else pair is not None
    return Call(
        group=_group_of(entry)[0],
        seq=_seq_of(entry, is_p2p=is_p2p),
        op=strip_control(op),
        sizes=tuple(map(tuple, entry.input_sizes or ())),
        output_sizes=tuple(map(tuple, entry.output_sizes or ())),
        dtypes=tuple(entry.input_dtypes or ()),
        output_dtypes=tuple(entry.output_dtypes or ()),
        is_done=_is_done(entry),
        blocks=entry.profiling_name.startswith("gloo:"),
        peer=int(pair[3]) if pair else None,
        is_p2p=is_p2p,
        place=_place(entry.frames or ()),
        created_ns=created_ns if 0 < (created_ns := entry.time_created_ns or 0) < _MAX_NS else 0,
        number=number,
    )


def _seq_of(entry: _Entry, *, is_p2p: bool) -> int:
    seqs = (entry.p2p_seq_id if is_p2p else entry.collective_seq_id, entry.seq_id)
    return next((seq for seq in seqs if seq is not None), 0)


def _is_done(entry: _Entry) -> bool:
    """Gloo never marks a call as completed: it retires it when it is over. NCCL also retires calls that timed out."""
    return entry.state == "completed" or (bool(entry.retired) and entry.profiling_name.startswith("gloo:"))


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


def _newest(numbered: list[tuple[int, _Entry]], keep: int) -> list[tuple[int, _Entry]]:
    """Return the entries to keep, no batch in part: creating a call for each costs more than reading the file."""
    if len(numbered) <= keep:
        return numbered
    first_open: dict[str, tuple[int, _Entry]] = {}
    last: dict[str, tuple[int, _Entry]] = {}
    for entry in numbered:
        name = _group_of(entry[1])[0]
        last[name] = entry
        if not _is_done(entry[1]):
            first_open.setdefault(name, entry)
    chosen = [entry for _, entry in (*first_open.values(), *last.values(), *numbered[-keep:])]
    kept, seqs = {*map(_batch_of, chosen)}, {*map(_number_of, chosen)}
    # Order matters: by their numbers alone, most are told apart.
    return [pair for pair in numbered if _number_of(pair[1]) in seqs and _batch_of(pair[1]) in kept]


def _number_of(entry: _Entry) -> int | None:
    """Return its number in formats since 2.2; None in others."""
    return entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id


def _batch_of(entry: _Entry) -> object:
    """Return what entries of one batch share: group, kind and number."""
    is_p2p = bool(entry.is_p2p)
    return _group_of(entry)[0], entry.pg_id, is_p2p, _seq_of(entry, is_p2p=is_p2p)
