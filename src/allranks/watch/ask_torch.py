"""Which calls does torch's flight recorder of each rank here have? Asked only where the job has it on (`--ask`).

    recorders = TorchRecorders()
    recorders.look(history, now_s)        # at each look: by pid, what has been answered by now

While nothing moves between the ranks here, all of them are asked at once, every EVERY_S, in a thread that waits
ANSWER_S:

    worker server   start_debug_server (torch 2.10): HTTP, POST /handler/fr_trace_json (Gloo) and
                    /handler/dump_nccl_trace_json
    dump pipe       else, with TORCH_NCCL_DEBUG_INFO_PIPE_FILE: a byte into `<its value><rank>.pipe`, and NCCL's monitor
                    writes the file `<TORCH_FR_DUMP_TEMP_FILE><rank>`, within a second or so; once in a standstill

The server's thread waits in accept(2), and the kernel tells for which socket: nothing else is connected to. A rank that
does not answer is not asked again, since its queue would fill up. What it answers may be anything: it is read up to
MAX_BYTES and MAX_ENTRIES, and costs no other rank its answer.

Limits: Linux on x86-64 and aarch64. A server of a Unix socket (worker_main with TORCH_WORKER_SERVER_SOCKET), or in
another network namespace, is not asked. What RDMA and NVLink carry, and connections to ranks of other nodes, is not
seen here, so such ranks are also asked while they run; whether they wait, the times of their calls tell
(standstill.py). JSON has no stacks: no call has its line of code.
Source: torch 2.13, torch/csrc/distributed/c10d: control_plane/WorkerServer.cpp and Handlers.cpp, FlightRecorder.cpp;
struct DumpPipe in ProcessGroupNCCL.hpp.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from allranks.files.regular import read_regular
from allranks.host.live_environment import read_live_environment
from allranks.host.process import path_of, read_file
from allranks.host.sockets import read_proc
from allranks.host.threads import ThreadQuestion
from allranks.model.beat import MAX_SIZES
from allranks.model.node_look import MAX_TOLD_CALLS, FlightSeen
from allranks.report.text import fold_ranks
from allranks.watch.since import LookHistory
from allranks.why.dumps import DumpError, parse_dump

EVERY_S, STILL_S, ANSWER_S = 5.0, 3.0, 2.0
"""Between two questions; how long nothing has moved before one; for all answers to one."""
KEPT_CALLS = 16
"""Of each rank, beside the last and the first open one of each group."""
MAX_BYTES, MAX_ENTRIES = 8 << 20, 20_000
"""Of one answer. Torch keeps 2,000 calls, each of some 700 bytes."""
SERVER = "pt_workerserver"
"""Name of the server's thread, and of those that it starts."""
NCCL, GLOO = "dump_nccl_trace_json", "fr_trace_json"
SILENT = f"torch did not answer within {ANSWER_S:.0f} s"
NOT_ASKED = "torch was not asked, as something has moved between ranks all the time"
NOTHING_ON = "torch's worker server is not on, nor NCCL's dump pipe"
_ACCEPT = {"x86_64": ("43", "288"), "aarch64": ("202", "242")}
"""Numbers of accept(2) and accept4(2)."""
_Told = FlightSeen | str
"""What a rank tells, or why it tells nothing."""


class TorchRecorders:
    """The flight recorders of this node's ranks; /proc lies below `root`."""

    def __init__(self, *, root: Path = Path("/")) -> None:
        self._root = root
        self._question = ThreadQuestion[dict[int, _Told]]("allranks-ask")
        self._told: dict[int, _Told] = {}
        """By pid, the last answer since something moved."""
        self._poked_s: dict[int, float] = {}
        """When a pipe was written to last, by pid."""
        self._moved_s = self._due_s = 0.0
        self.limits: list[str] = []
        """What is not known, and why."""

    def look(self, history: LookHistory, now_s: float) -> Mapping[int, FlightSeen]:
        """Return by pid what ranks have told since nothing moves, and ask again if it is time."""
        ranks = {track.look.pid: rank for rank, track in history.living.items()}
        try:
            self._told |= self._question.take() or {}
        except Exception as exc:  # no answer, and nothing that makes one impossible, ends the watch
            self._told |= dict.fromkeys(ranks, f"torch cannot be asked: {exc!r}")
        if history.moved_s > self._moved_s:
            self._told = {pid: told for pid, told in self._told.items() if isinstance(told, str)}
        self._moved_s = history.moved_s
        free = [track for track in history.living.values() if not track.is_held]
        asked = {track.look.pid: track for track in free if self._told.get(track.look.pid) != SILENT}
        if asked and not self._question.is_open and now_s >= max(self._due_s, history.moved_s + STILL_S):
            # Of ranks that are not seen to move, the pipe is asked again once they stand elsewhere.
            stood_s = {pid: max(history.moved_s, track.place_s, track.ops_s) for pid, track in asked.items()}
            pokes = {pid for pid in asked if stood_s[pid] >= self._poked_s.get(pid, 0.0)}
            self._poked_s, self._due_s = self._poked_s | dict.fromkeys(pokes, now_s), now_s + EVERY_S
            of = {pid: ranks[pid] for pid in asked}
            self._question.ask(partial(ask_recorders, of, at_s=now_s, root=self._root, pokes=pokes))
        problems = defaultdict[str, list[int]](list)
        for pid, rank in ranks.items():
            if isinstance(told := self._told.get(pid), str):
                problems[told].append(rank)
        self.limits = [f"the calls of {fold_ranks(those)}: {problem}"[:300] for problem, those in problems.items()]
        is_late = any(now_s - node.first_s > STILL_S + EVERY_S for node in history.nodes.values())
        self.limits += [NOT_ASKED] * (is_late and not self._due_s)
        return {pid: told for pid, told in self._told.items() if isinstance(told, FlightSeen)}


def ask_recorders(
    ranks: Mapping[int, int], *, at_s: float, root: Path = Path("/"), pokes: Collection[int] | None = None
) -> dict[int, _Told]:
    """Return by pid what the recorders of processes tell within ANSWER_S.

    Args:
        ranks: by pid.
        at_s: the time now, by the clock of the looks.
        pokes: pids whose dump pipe may be written to; None: all. Others that have no server are not in the answer.
    """
    import asyncio  # which only --ask needs, and which is slow to import

    async def ask(pid: int, rank: int) -> Mapping[str, bytes] | FlightSeen | str | None:
        async with asyncio.timeout(ANSWER_S):
            if (port := find_server(pid, root=root)) is not None:
                told = {handler: await post(port, handler) for handler in (NCCL, GLOO)}
                return {handler: body for handler, body in told.items() if body is not None}
            if pokes is not None and pid not in pokes:
                return None
            if (poked := poke_pipe(pid, rank, root=root)) is None:
                return NOTHING_ON
            while True:
                await asyncio.sleep(0.05)
                with contextlib.suppress(OSError, DumpError):  # it is still being written
                    if _stamp(poked[0]) != poked[1]:
                        return _as_flight({NCCL: read_regular(poked[0], at_most=MAX_BYTES)}, rank, *now)

    async def post(address: tuple[str, int], handler: str) -> bytes | None:
        answer = bytearray()
        reader, writer = await asyncio.open_connection(*address)
        try:
            writer.write(f"POST /handler/{handler} HTTP/1.0\r\nContent-Length: 0\r\n\r\n".encode())
            while part := await reader.read(1 << 18):
                answer += part
                if len(answer) > MAX_BYTES:
                    raise OSError(f"its answer has more than {MAX_BYTES >> 20} MiB")
        finally:
            writer.transport.abort()
        head, _, body = bytes(answer).partition(b"\r\n\r\n")
        if not (status := re.match(rb"HTTP/1\.\d (200|404)\b", head)):
            raise OSError(f"its answer begins with {head[:60]!r}")
        return body if status[1] == b"200" else None

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*map(ask, ranks, ranks.values()), return_exceptions=True)

    now, told = (at_s, time.time_ns()), dict[int, _Told]()
    for (pid, rank), answer in zip(ranks.items(), asyncio.run(ask_all()), strict=True):
        try:
            if isinstance(answer, BaseException):
                raise answer
            if answer is not None:
                told[pid] = _as_flight(answer, rank, *now) if isinstance(answer, Mapping) else answer
        except TimeoutError:
            told[pid] = SILENT
        except Exception as exc:  # whatever it has answered, it costs only this
            told[pid] = f"torch cannot be asked: {exc}"
    return told


def _as_flight(told: Mapping[str, bytes], rank: int, at_s: float, now_ns: int) -> FlightSeen:
    """Return what the recorders of a rank's backends tell.

    Where both answer, Gloo's groups get another name: each backend numbers the calls of a group for itself.

    Raises:
        DumpError: it is no dump, or tells more than any job has.
    """
    if not told:
        raise DumpError("this torch has no flight recorder that can be asked")
    if any(data.count(b"{") > MAX_ENTRIES for data in told.values() if not data.startswith(b"\x80")):
        raise DumpError(f"its answer has more than {MAX_ENTRIES:,} entries")
    dumps = [(handler, parse_dump(data, rank=rank, keep=KEPT_CALLS)) for handler, data in told.items()]
    calls, about = list[dict[str, Any]](), defaultdict[str, dict[str, Any]](dict)
    for handler, dump in dumps:
        more = "/gloo" if len(dumps) > 1 and handler == GLOO else ""
        for call in dump.calls:
            if not call.is_p2p or call.peer is not None:
                few = {"sizes": call.sizes[:MAX_SIZES], "dtypes": call.dtypes[:MAX_SIZES], "place": call.place[:300]}
                calls.append(asdict(call) | few | {"group": call.group + more})
        # What Gloo has enqueued counts sends and receives, too, which its numbers of calls do not.
        for name in ("started", "members", "descs", *["enqueued"] * (handler == NCCL)):
            about[name] |= {group + more: value for group, value in getattr(dump, name).items()}
        about["formed_again"] |= dict.fromkeys(group + more for group in dump.formed_again)
    calls.sort(key=lambda call: call["created_ns"])
    called_s = max(0.0, at_s - max(0, now_ns - calls[-1]["created_ns"]) / 1e9) if calls else 0.0
    # One that has recorded nothing may be off (TORCH_FR_BUFFER_SIZE=0).
    is_whole = bool(calls) and all(dump.is_whole for _, dump in dumps)
    seen = {"at_s": at_s, "called_s": called_s, "calls": calls[-MAX_TOLD_CALLS:], "is_whole": is_whole}
    return msgspec.convert(seen | about | {"formed_again": [*about["formed_again"]]}, FlightSeen)


def find_server(pid: int, *, root: Path = Path("/")) -> tuple[str, int] | None:
    """Return where the worker server of a process listens; None: it has none.

    Raises:
        OSError: that cannot be told, or it cannot be reached from here.
    """
    own, inode = root / f"proc/{pid}", ""
    for task in (own / "task").iterdir():
        if read_file(task / "comm").strip() == SERVER:
            number, fd, *_ = [*read_file(task / "syscall").split(), "", ""]
            if not number:
                raise OSError("the kernel does not show this user where its worker server listens")
            if number in _ACCEPT.get(os.uname().machine, ()):
                inode = str((own / f"fd/{int(fd, 16)}").readlink()).strip("socket:[]")
    if not inode:
        return None
    if (own / "ns/net").readlink() != Path("/proc/self/ns/net").readlink():
        raise OSError("its worker server is in another network namespace")
    for end in read_proc(root=root, of=str(pid), with_listening=True):
        if str(end.inode) == inode:
            return "127.0.0.1" if end.own_address in ("::", "0.0.0.0") else end.own_address, end.own_port
    raise OSError("its worker server listens at no TCP port")


def poke_pipe(pid: int, rank: int, *, root: Path = Path("/")) -> tuple[Path, object] | None:
    """Have NCCL write its dump. Returns the file, and what it is like before; None: the job has no such pipe.

    Raises:
        OSError: the pipe is missing, another user's, or nobody reads it; or nothing says which file it is.
    """
    env = read_live_environment(pid, root=root) or {}
    if not (pipe := env.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")):
        return None
    if not (dump := env.get("TORCH_FR_DUMP_TEMP_FILE") or env.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")):
        raise OSError("NCCL's dump pipe is on, but TORCH_FR_DUMP_TEMP_FILE is not set")
    file = path_of(pid, f"{dump}{rank}", root=root)
    before = _stamp(file)
    with contextlib.ExitStack() as left:
        # Without rights first: whatever a link leads to, only a pipe of the rank's own user is opened.
        held = os.open(path_of(pid, f"{pipe}{rank}.pipe", root=root), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        left.callback(os.close, held)
        seen, owner = os.fstat(held), (root / f"proc/{pid}").stat().st_uid
        if not stat.S_ISFIFO(seen.st_mode) or seen.st_uid != owner:
            raise OSError("NCCL's dump pipe is no pipe of the job's user")
        writable = os.open(f"/proc/self/fd/{held}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        left.callback(os.close, writable)
        os.write(writable, b"1")
    return file, before


def _stamp(path: Path) -> object:
    """Return what changes when a file is written; None: there is none."""
    with contextlib.suppress(OSError):
        seen = path.stat()
        return seen.st_ino, seen.st_size, seen.st_mtime_ns
    return None
