"""What do this machine's processes of a job do now? Looks at them again and again, from outside.

    watcher = NodeWatcher(WantedStacks(job="123"), node="node01")
    while True:
        look = watcher.look(time.monotonic())
        watcher.wait(0.25)                          # ends early if a process of the job ends

Nothing is stopped, signalled or written to: the kernel tells states, ends and sockets, and py-spy reads stacks from
outside. Only NCCL's RAS is connected to, which is there for that, and, with `--ask`, torch (ask_torch.py). Threads run
py-spy and search for processes that have come, so that only the first look waits: it has no stacks, and later ones have
those that were read by then. Searches and sockets are repeated the more rarely the more they cost (`_next_s`), and
stacks as since.py chooses.

Limits: exit codes of processes that their parent has reaped need Linux 6.15. In another network namespace, sockets are
looked at more rarely, and the bytes that they have carried are not known: a dead link is told there by TCP's timeouts,
as long as bytes are to be sent.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from msgspec import convert
from msgspec.structs import replace

from allranks.host.gpu_load import load_of, read_gpu_loads
from allranks.host.job_processes import FoundProcess, WantedStacks, find_processes, find_store
from allranks.host.nccl_ras import read_operation_counts
from allranks.host.process import read_process, read_wait_status
from allranks.host.py_spy import DUMP_S, ask_py_spy
from allranks.host.sockets import TcpConnection, ask_kernel, read_proc
from allranks.host.source import read_source_lines
from allranks.host.stacks import is_library
from allranks.host.threads import ThreadQuestion
from allranks.host.traffic import find_sockets
from allranks.launch.look.stack_groups import summarize
from allranks.model.beat import ProcessState
from allranks.model.node_look import MAX_SOCKETS, EndSeen, NodeLook, ProcessLook, ProcessRole, SocketSeen, StackSeen
from allranks.watch.ask_torch import TorchRecorders
from allranks.watch.since import MAIN, MAX_AT_ONCE, LookHistory, choose

FIND_EVERY_S, FIND_AFTER_END_S, INODES_EVERY_S = 3.0, 0.5, 1.0
FIND_SHARE, SOCKETS_SHARE = 0.002, 0.003
"""Of a core for each rank, spent on searching for processes, and on asking for sockets."""
MAX_ENDED_CHILDREN = 64
"""DataLoader workers end with every epoch; the last ones are told."""
NCCL_EVERY_S, GPU_S = 5.0, 5.0
"""NCCL and nvidia-smi are asked so often; nvidia-smi is waited for so long."""
_BY_KERNEL = ("state", "cpu_s", "num_switches", "rss_bytes")
"""Fields that the kernel tells at each look, by the same names in ProcessSeen and ProcessLook."""
_Found = tuple[Sequence[FoundProcess], tuple[str, int] | None, float]
"""Processes, the store's address, and processor time for it."""
_Read = tuple[StackSeen | None, str]
"""The stack of a main thread, or why there is none."""
_Nccl = tuple[dict[int, int], dict[int, int | None], str]
"""By pid, operations of NCCL that were started, and percent of a GPU; why NCCL does not tell."""


@dataclass(slots=True, eq=False)
class _Watched:
    """A process of the job."""

    told: ProcessLook
    pidfd: int | None = None
    reading: ThreadQuestion[_Read] = field(default_factory=lambda: ThreadQuestion("allranks-stack"))


class NodeWatcher:
    """Looks at this machine's part of a job; /proc lies below `root`."""

    def __init__(self, wanted: WantedStacks, *, node: str, root: Path = Path("/"), asks: bool = False) -> None:
        self._wanted, self._node, self._root, self._asks = wanted, node, root, asks
        self._limits = dict[str, None]()
        self._store: tuple[str, int] | None = None
        self._watched: dict[tuple[int, int], _Watched] = {}
        self._pidfds: dict[int, _Watched] = {}
        self._poll = select.poll()
        self._history = LookHistory()
        """What this node's looks show, by its clock: who is quiet, and since when nothing moves between its ranks."""
        self._find_s = self._sockets_s = self._inodes_s = self._nccl_s = 0.0
        """When each of these is due."""
        self._search, self._nccl = ThreadQuestion[_Found]("allranks-find"), ThreadQuestion[_Nccl]("allranks-nccl")
        self._nccl_limit = ""
        self._recorders = TorchRecorders(root=root)
        self._owners: dict[int, _Watched | None] = {}
        """Of sockets, by inode; None: no process of the job."""
        self._are_owners_old = False
        """Whether a process has come, or one has ended, whose sockets may be among these as somebody else's."""
        self._own_network = _network(os.getpid(), Path("/"))

    def wait(self, timeout_s: float) -> None:
        """Wait for so long, or until a process of the job ends: the next look tells how."""
        self._poll.poll(max(0.0, timeout_s) * 1000)

    def look(self, now_s: float) -> NodeLook:
        """Return what the processes do now, by this machine's monotonic clock; those that have ended stay in it."""
        for pidfd, _ in self._poll.poll(0):
            self._note_end(self._pidfds[pidfd], now_s)
        self._gather_stacks()
        self._ask_nccl(now_s)
        if not self._search.is_open and now_s >= self._find_s:
            self._search.ask(partial(_find, self._wanted, self._root))
        if (found := self._search.take(waits=not self._watched)) is not None:  # only the first look waits
            self._take_in(found, now_s)
        if now_s >= self._sockets_s:
            self._read_sockets(now_s)
        for watched in self._alive():
            self._look_at(watched, now_s)
        flights = self._recorders.look(self._history, now_s) if self._asks else {}
        for watched in self._alive(ProcessRole.WORKER) if self._asks else ():
            watched.told = replace(watched.told, flight=flights.get(watched.told.pid))
        look = NodeLook(
            node=self._node,
            at_s=now_s,
            processes=tuple(watched.told for watched in self._watched.values()),
            store=self._store,
            limits=(*self._limits, *filter(None, [self._nccl_limit]), *self._recorders.limits),
        )
        self._history.hear(look, now_s)
        self._start_reading(now_s)
        return look

    def close(self) -> None:
        """Let go of the processes."""
        while self._pidfds:
            os.close(self._pidfds.popitem()[0])

    def _alive(self, *roles: ProcessRole) -> list[_Watched]:
        living = [watched for watched in self._watched.values() if watched.told.end is None]
        return [watched for watched in living if not roles or watched.told.role in roles]

    def _next_s(self, now_s: float, every_s: float, cost_s: float, share: float) -> float:
        """Return when something is done again: after a while, and later if it costs more than its share a rank."""
        return now_s + max(every_s, cost_s / (share * max(1, len(self._alive(ProcessRole.WORKER)))))

    def _take_in(self, answer: _Found, now_s: float) -> None:
        """Take in processes that have come, and what is known by now of those that are here."""
        processes, store, cost_s = answer
        for found in processes:
            key = found.pid, found.stat.start_ticks
            if (watched := self._watched.get(key)) is None:
                new = ProcessLook(pid=found.pid, role=ProcessRole.WORKER, start_ticks=found.stat.start_ticks)
                watched = self._watched[key] = _Watched(new)
                self._follow(watched, now_s)
                self._are_owners_old = True
            if found.env or watched.told.rank is None:  # the dead have no environment
                about = {"role": found.role, "rank": found.rank, "world_size": found.world_size}
                watched.told = replace(watched.told, **about)
        ended = [key for key, watched in self._watched.items() if watched.told.end is not None]
        for key in [key for key in ended if self._watched[key].told.role is ProcessRole.CHILD][:-MAX_ENDED_CHILDREN]:
            del self._watched[key]
        self._store = store or self._store
        self._find_s = self._next_s(now_s, FIND_EVERY_S, cost_s, FIND_SHARE)

    def _follow(self, watched: _Watched, now_s: float) -> None:
        """Have the kernel tell when a process ends."""
        try:
            watched.pidfd = os.pidfd_open(watched.told.pid)
        except ProcessLookupError:
            self._note_end(watched, now_s)
        except (OSError, AttributeError) as exc:  # too many open files; a Python that was built for an old kernel
            self._limits[f"ends are noticed late, and exit codes may be missed: {exc}"[:300]] = None
        else:
            self._pidfds[watched.pidfd] = watched
            self._poll.register(watched.pidfd, select.POLLIN)

    def _note_end(self, watched: _Watched, now_s: float) -> None:
        # A zombie has its status in /proc; once it is reaped, the kernel keeps it for holders of a pidfd.
        last = read_process(watched.told.pid, root=self._root)
        status = last.wait_status if last.start_ticks == watched.told.start_ticks else None
        if watched.pidfd is not None:
            status = read_wait_status(watched.pidfd) if status is None else status
            self._poll.unregister(watched.pidfd)
            del self._pidfds[watched.pidfd]
            os.close(watched.pidfd)
        code = None if status is None else os.waitstatus_to_exitcode(status)
        watched.told = replace(watched.told, end=EndSeen(at_s=now_s, code=code), state=ProcessState.GONE, sockets=())
        self._are_owners_old = True
        self._find_s = min(self._find_s, now_s + FIND_AFTER_END_S)  # a launcher may start others in its place

    def _look_at(self, watched: _Watched, now_s: float) -> None:
        seen = read_process(watched.told.pid, root=self._root)
        if seen.start_ticks == watched.told.start_ticks and seen.state is not ProcessState.GONE:
            watched.told = replace(watched.told, **{name: getattr(seen, name) for name in _BY_KERNEL})
        elif watched.pidfd is None:  # else its main thread has ended, and another one has not
            self._note_end(watched, now_s)

    def _read_sockets(self, now_s: float) -> None:
        began_s, alive = time.thread_time(), self._alive(*MAIN)
        members = {_network(watched.told.pid, self._root): watched.told.pid for watched in alive}
        table = [connection for member in members.items() for connection in self._connections(*member)]
        is_new = any(connection.inode and connection.inode not in self._owners for connection in table)
        if (is_new or self._are_owners_old) and now_s - self._inodes_s >= INODES_EVERY_S:
            self._inodes_s, self._are_owners_old = now_s, False
            self._owners = dict.fromkeys(connection.inode for connection in table)
            # Forks share sockets: the process that is older has opened them.
            for watched in sorted(alive, key=lambda watched: -watched.told.start_ticks):
                self._owners.update(dict.fromkeys(find_sockets(watched.told.pid, root=self._root), watched))
        own = defaultdict[_Watched | None, list[TcpConnection]](list)
        for connection in table:
            own[self._owners.get(connection.inode)].append(connection)
        for watched in alive:
            sockets = convert(own[watched][:MAX_SOCKETS], tuple[SocketSeen, ...], from_attributes=True)
            watched.told = replace(watched.told, sockets=sockets)
        self._sockets_s = self._next_s(now_s, 0.0, time.thread_time() - began_s, SOCKETS_SHARE)

    def _connections(self, network: int, pid: int) -> list[TcpConnection]:
        """All of the network namespace that a process is in."""
        if network in (0, self._own_network):
            try:
                return ask_kernel(with_listening=True)
            except OSError:
                self._limits["the kernel does not tell which bytes TCP connections have carried"] = None
        else:
            self._limits["bytes that TCP connections have carried are not known in another network namespace"] = None
        return read_proc(root=self._root, of=str(pid), with_listening=True)

    def _ask_nccl(self, now_s: float) -> None:
        """Take in what NCCL and nvidia-smi have said of the ranks, and ask again."""
        if (told := self._nccl.take()) is not None:
            (counts, percents, self._nccl_limit), self._nccl_s = told, now_s + NCCL_EVERY_S
            for watched in self._watched.values():
                pid = watched.told.pid
                watched.told = replace(watched.told, nccl_ops=counts.get(pid), gpu_percent=percents.get(pid))
        ranks = {rank: track.look.pid for rank, track in self._history.living.items()}
        if ranks and not self._nccl.is_open and now_s >= self._nccl_s:
            self._nccl.ask(partial(_read_nccl, ranks, self._root))

    def _gather_stacks(self) -> None:
        """Take in the stacks that have been read."""
        for watched in self._watched.values():
            if (read := watched.reading.take()) is not None and watched.told.end is None:
                watched.told = replace(watched.told, stack=read[0] or watched.told.stack, problem=read[1])

    def _start_reading(self, now_s: float) -> None:
        """Have the stacks of ranks read whose turn it is."""
        tracks = [track for track in self._history.tracks(ProcessRole.WORKER) if track.is_alive]
        readings = {track: self._watched[track.look.pid, track.look.start_ticks].reading for track in tracks}
        free = [track for track, reading in readings.items() if not reading.is_open]
        most = MAX_AT_ONCE - len(tracks) + len(free)
        for track in choose(free, num_ranks=len(tracks), now_s=now_s, at_most=most):
            read = partial(_read_stack, track.look.pid, self._root, at_s=now_s, is_still=track.is_still)
            readings[track].ask(read)


def _find(wanted: WantedStacks, root: Path) -> _Found:
    began_s = time.thread_time()
    processes = find_processes(wanted, root=root)
    return processes, find_store(processes, root=root), time.thread_time() - began_s


def _read_stack(pid: int, root: Path, *, at_s: float, is_still: bool) -> _Read:
    dump = ask_py_spy(pid, deadline_s=time.monotonic() + DUMP_S, with_locals=True, root=root)
    frames, text = next((thread.frames for thread in dump.threads if thread.is_main(pid)), []), ""
    if frames and not is_library(frames[0].filename):
        line = frames[0].filename, frames[0].line
        text = read_source_lines({pid: {line}}, root=root).get(pid, {}).get(line, "")
    stack = summarize(frames, at_s=at_s, is_still=is_still, text=text) if frames else None
    problem = dump.problem or ("" if frames else "its main thread has no Python frames")
    return stack, problem[:300]


def _read_nccl(ranks: Mapping[int, int], root: Path) -> _Nccl:
    limit = ""
    try:
        counts = read_operation_counts(ranks.values(), root=root)
    except Exception as exc:  # whatever it has answered, it costs only the counts
        counts, limit = {}, f"NCCL's RAS does not tell which operations its ranks have started: {exc}"[:300]
    loads = load_of(ranks, read_gpu_loads(deadline_s=GPU_S), root=root) if counts is not None else {}
    return counts or {}, {ranks[rank]: load.percent for rank, load in loads.items()}, limit


def _network(pid: int, root: Path) -> int:
    """Return the inode of a process's network namespace; 0: not known."""
    with contextlib.suppress(OSError):
        return (root / f"proc/{pid}/ns/net").stat().st_ino
    return 0
