"""Which calls does torch's flight recorder of each rank here have? Asked only where the job has it on (`--ask`).

    recorders = TorchRecorders(is_on=True)
    recorders.look(ranks, now_s, store_port=29500)    # at each look: by pid, what has been answered by now

While nothing moves between the ranks here, all of them are asked at once, every EVERY_S, in a thread that waits
ANSWER_S:

    worker server   start_debug_server (torch 2.10), or worker_main with TORCH_WORKER_SERVER_SOCKET: HTTP, POST
                    /handler/fr_trace_json (Gloo) and /handler/dump_nccl_trace_json
    dump pipe       else, with TORCH_NCCL_DEBUG_INFO_PIPE_FILE: a byte into `<its value><rank>.pipe`, and NCCL's monitor
                    writes the file `<TORCH_FR_DUMP_TEMP_FILE><rank>`, within a second or so; once in a standstill

The server's thread waits in accept(2), and the kernel tells for which socket: nothing else is connected to. A Unix
socket's path is a name that any process may have given to its own: who answers there must be that rank's process. A
rank that does not answer is not asked again, since its queue would fill up. What it answers may be anything: it is
read up to MAX_BYTES and MAX_ENTRIES, and costs no other rank its answer.

Limits: Linux on x86-64 and aarch64. A server in another network namespace is not asked. What RDMA and NVLink carry, and
connections to ranks of other nodes, is not seen here, so such ranks are also asked while they run; whether they wait,
the times of their calls tell (standstill.py). JSON has no stacks: no call has its line of code. The pipe's one answer
makes no verdict, which takes two.
Source: torch 2.13, torch/csrc/distributed/c10d: control_plane/WorkerServer.cpp and Handlers.cpp, FlightRecorder.cpp;
struct DumpPipe in ProcessGroupNCCL.hpp.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from allranks.files.regular import read_regular
from allranks.host.live_environment import read_live_environment
from allranks.host.process import path_of, read_file
from allranks.host.sockets import read_proc
from allranks.host.threads import ask_in_thread
from allranks.model.beat import MAX_SIZES, ProcessState
from allranks.model.node_look import MAX_TOLD_CALLS, FlightSeen, ProcessLook
from allranks.report.text import fold_ranks
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
NOTHING_ON = "torch's worker server is not on, nor NCCL's dump pipe"
NOBODY_ASKED = "torch was not asked, as something has moved between ranks all the time"
_UNIX = re.compile(r"[0-9a-f]+:(?: [0-9A-F]+){5} +(\d+) ([^@].*)")
"""A line of /proc/net/unix: flags and state, the inode, and the path."""
_ACCEPT = {"x86_64": ("43", "288"), "aarch64": ("202", "242")}
"""Numbers of accept(2) and accept4(2)."""
_PEER = struct.Struct("=iII")
"""struct ucred of SO_PEERCRED: pid, user, group."""
_Told = FlightSeen | str
"""What a rank tells, or why it tells nothing."""
_Address = tuple[str, int] | str
"""Of TCP, or a path."""


class TorchRecorders:
    """The flight recorders of this node's ranks; /proc lies below `root`."""

    def __init__(self, *, is_on: bool, root: Path = Path("/")) -> None:
        self._is_on, self._root = is_on, root
        self._told: Mapping[int, FlightSeen] = {}
        self._problems: dict[int, tuple[int, str]] = {}
        """By pid, the rank and why it tells nothing."""
        self._asked: Future[dict[int, _Told]] | None = None
        self._unasked: list[int] = []
        """Ranks, where nobody has been asked for long."""
        self._moves: dict[object, object] = {}
        self._due_s = self._began_s = 0.0
        self._was_asked = False
        self._poked: dict[int, object] = {}
        """Where ranks stood when they were asked, by pid, since nothing moves."""

    @property
    def limits(self) -> list[str]:
        """What is not known, and why."""
        ranks = defaultdict[str, list[int]](list)
        for rank, problem in self._problems.values():
            ranks[problem].append(rank)
        if self._unasked:
            ranks[NOBODY_ASKED] += self._unasked
        return [f"the calls of {fold_ranks(those)}: {problem}"[:300] for problem, those in ranks.items()]

    def look(self, ranks: Sequence[ProcessLook], now_s: float, *, store_port: int) -> Mapping[int, FlightSeen]:
        """Return by pid what ranks have told since nothing moves, and ask again if it is time."""
        known = {look.pid: look.rank for look in ranks if look.rank is not None}
        silent = {pid for pid, (_, problem) in self._problems.items() if problem == SILENT}
        if self._asked is not None and self._asked.done():
            self._take_in(self._asked, known)
            self._asked = None
        before, self._moves = self._moves, dict(_moves(ranks, store_port))
        # A connection that comes or goes is no sign: ours does.
        if not before or any(before.get(key, value) != value for key, value in self._moves.items()):
            self._told, self._poked, self._due_s = {}, {}, max(self._due_s, now_s + STILL_S)
        self._began_s = self._began_s or now_s
        held = {look.pid for look in ranks if look.state in (ProcessState.STOPPED, ProcessState.TRACED)}
        asked = {pid: rank for pid, rank in known.items() if pid not in silent | held}
        if asked and self._is_on and self._asked is None and now_s >= self._due_s:
            self._due_s, self._was_asked = now_s + EVERY_S, True
            stood = {look.pid: _stand(look) for look in ranks if look.pid in asked}
            pokes = {pid for pid in asked if self._poked.get(pid) != stood[pid]}
            self._poked |= stood
            ask = partial(ask_recorders, asked, at_s=now_s, root=self._root, pokes=pokes)
            self._asked = ask_in_thread(ask, name="allranks-ask")
        is_late = self._is_on and not self._was_asked and now_s - self._began_s > STILL_S + EVERY_S
        self._unasked = [*asked.values()] if is_late else []
        return self._told

    def _take_in(self, asked: Future[dict[int, _Told]], known: Mapping[int, int]) -> None:
        """Take in answers; of a rank that was not asked this time, its last one stays."""
        try:
            answers = asked.result()
        except Exception as exc:  # no answer, and nothing that makes one impossible, ends the watch
            answers = dict.fromkeys(known, f"torch cannot be asked: {exc!r}")
        told = {pid: flight for pid, flight in self._told.items() if pid not in answers and pid in known}
        self._told = told | {pid: answer for pid, answer in answers.items() if isinstance(answer, FlightSeen)}
        problems = {pid: problem for pid, problem in self._problems.items() if pid not in answers}
        self._problems = problems | {
            pid: (known[pid], answer) for pid, answer in answers.items() if isinstance(answer, str) and pid in known
        }

    def close(self) -> None:
        """Wait until nothing is asked any more."""
        wait([self._asked] if self._asked else (), timeout=ANSWER_S)


def _moves(ranks: Sequence[ProcessLook], store_port: int) -> Iterator[tuple[object, object]]:
    """Yield what changes while ranks run: counts of NCCL, and what has passed between them, but through the store."""
    known = {seen.ends for look in ranks for seen in look.sockets}
    for look in ranks:
        yield look.pid, look.nccl_ops
        for seen in look.sockets:
            # A connection to anybody else, a service for metrics, is no sign of theirs.
            if (*seen.ends[2:], *seen.ends[:2]) in known and store_port not in (seen.own_port, seen.peer_port):
                yield seen.ends, seen.carried


def _stand(look: ProcessLook) -> object:
    """Return what changes once a rank goes on, also where nothing is seen to move between ranks."""
    return look.nccl_ops, look.stack and (look.stack.operation, look.stack.place, look.stack.counters)


def ask_recorders(
    ranks: Mapping[int, int], *, at_s: float, root: Path = Path("/"), pokes: Collection[int] | None = None
) -> dict[int, _Told]:
    """Return by pid what the recorders of processes tell within ANSWER_S.

    Args:
        ranks: by pid.
        at_s: the time now, by the clock of the looks.
        pokes: pids whose dump pipe may be written to; None: all. Others that have no server are not in the answer.
    """
    until_s, now = time.monotonic() + ANSWER_S, (at_s, time.time_ns())
    answers: dict[int, _Told] = dict.fromkeys(ranks, NOTHING_ON)
    servers, files = dict[int, _Address](), dict[int, tuple[Path, object]]()
    for pid, rank in ranks.items():
        try:
            if (address := find_server(pid, root=root)) is not None:
                servers[pid] = address
            elif pokes is not None and pid not in pokes:
                del answers[pid]
            elif (file := poke_pipe(pid, rank, root=root)) is not None:
                answers[pid], files[pid] = SILENT, file
        except Exception as exc:  # whatever there is in /proc, it costs only this
            answers[pid] = f"torch cannot be asked: {exc}"
    for pid, told in ask_servers(servers).items():
        try:
            answers[pid] = SILENT if isinstance(told, TimeoutError) else _as_flight(told, ranks[pid], *now)
        except Exception as exc:  # whatever it has answered, it costs only this
            answers[pid] = f"torch's worker server: {exc}"
    while files and time.monotonic() < until_s:
        time.sleep(0.05)
        for pid in [pid for pid, (path, before) in files.items() if _stamp(path) != before]:
            with contextlib.suppress(Exception):  # it is still being written
                answers[pid] = _as_flight({NCCL: read_regular(files[pid][0], at_most=MAX_BYTES)}, ranks[pid], *now)
                del files[pid]
    return answers


def _as_flight(told: Mapping[str, bytes] | Exception, rank: int, at_s: float, now_ns: int) -> FlightSeen:
    """Return what the recorders of a rank's backends tell.

    Where both answer, Gloo's groups get another name: each backend numbers the calls of a group for itself.

    Raises:
        Exception: what was raised instead of an answer; it is no dump, or tells more than any job has.
    """
    if isinstance(told, Exception):
        raise told
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
    cut = {(call["group"], call["seq"]) for call in calls[:-MAX_TOLD_CALLS]}
    kept = [call for call in calls[-MAX_TOLD_CALLS:] if (call["group"], call["seq"]) not in cut]  # no batch in part
    called_s = max(0.0, at_s - max(0, now_ns - calls[-1]["created_ns"]) / 1e9) if calls else 0.0
    # One that has recorded nothing may be off (TORCH_FR_BUFFER_SIZE=0).
    is_whole = bool(calls) and all(dump.is_whole for _, dump in dumps)
    seen = {"at_s": at_s, "called_s": called_s, "calls": kept, "is_whole": is_whole}
    return msgspec.convert(seen | about | {"formed_again": [*about["formed_again"]]}, FlightSeen)


# --- Worker server ----------------------------------------------------------------------------------------------------


def find_server(pid: int, *, root: Path = Path("/")) -> _Address | None:
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
    is_here = (own / "ns/net").readlink() == Path("/proc/self/ns/net").readlink()
    for end in read_proc(root=root, of=str(pid), with_listening=True):
        if str(end.inode) == inode:
            if not is_here:
                raise OSError("its worker server is in another network namespace")
            return "127.0.0.1" if end.own_address in ("::", "0.0.0.0") else end.own_address, end.own_port
    # Names may hold anything, line ends, too: whose socket it is shows once it is connected to.
    for line in read_file(own / "net/unix").split("\n"):
        if (match := _UNIX.fullmatch(line)) and match[1] == inode:
            return str(path_of(pid, match[2], root=root))
    raise OSError("its worker server listens nowhere")


def ask_servers(servers: Mapping[int, _Address]) -> dict[int, dict[str, bytes] | Exception]:
    """Return by pid what each handler that there is has answered, or what was raised: TimeoutError after ANSWER_S."""
    import asyncio  # which only --ask needs, and which is slow to import

    async def ask(pid: int, address: _Address) -> dict[str, bytes]:
        async with asyncio.timeout(ANSWER_S):
            told = {handler: await post(pid, address, handler) for handler in (NCCL, GLOO)}
        return {handler: body for handler, body in told.items() if body is not None}

    async def post(pid: int, address: _Address, handler: str) -> bytes | None:
        answer = bytearray()
        reader, writer = await (
            asyncio.open_unix_connection(address) if isinstance(address, str) else asyncio.open_connection(*address)
        )
        try:
            own = writer.get_extra_info("socket")
            if (
                own.family == socket.AF_UNIX
                and pid != _PEER.unpack(own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0]
            ):
                raise OSError("another process listens where its worker server should")
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
        return await asyncio.gather(*map(ask, servers, servers.values()), return_exceptions=True)

    return dict(zip(servers, asyncio.run(ask_all()) if servers else [], strict=True))


# --- Dump pipe --------------------------------------------------------------------------------------------------------


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
