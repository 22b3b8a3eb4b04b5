"""The heartbeat of this node: its workers, and their connections as the kernel sees them. One NodeBeat when it is due.

    watch = WorkerWatch(cluster.guard, data_address="192.168.20.13", control_address="10.0.0.13")
    watch.begin(plan.generation, workers, now_s, node_index=plan.node_index)
    while running:
        if (beat := watch.turn(now_s)) is not None: ...      # every beat_s; never waits
    watch.keep(folder, within_s=4.0)                         # at a verdict: last calls and stacks

Everything is read from outside the workers, so that it answers when they cannot. `now_s` is time.monotonic().
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from allranks.files.folder import Folder
from allranks.guard.node.booking import NodeBook
from allranks.guard.node.gpus import GpuMeter
from allranks.guard.node.traffic import TrafficMeter
from allranks.guard.node.tries import Listener, Tries
from allranks.guard.node.worker import WatchedWorker
from allranks.host.glance import Glance, render
from allranks.host.net import read_interfaces
from allranks.host.oom import OomWatch
from allranks.host.sockets import SocketWatch
from allranks.model.beat import CallSeen, LinkSeen, NodeBeat, ProcessState, RankBeat
from allranks.model.cluster import GuardTable
from allranks.model.room import FullPlace, Room
from allranks.model.safe_text import plain_address
from allranks.wire.protocol import Try

TOLD_STALL_S = 0.5
"""A connection is told of when nothing was acknowledged for so long."""
MAX_LINKS = 64
OOM_EVERY_S = 1.0
SHM_S = 10.0
"""How long the largest use of /dev/shm is told."""


class WorkerWatch:
    """Watches one node's workers.

    Args:
        data_address: of this node on the network that carries gradients.
        further: names of its other interfaces that do.
        control_address: where the leader reaches this node's agent, or comes from; equal where there is one network.
        see_room: returns what is known of the run directory's room; it never waits.
        see_full: returns which directories were full when a worker failed; it never waits.
        gpus: asks how busy they are; None: this node has none.
    """

    def __init__(
        self,
        settings: GuardTable,
        *,
        data_address: str,
        control_address: str,
        further: Sequence[str] = (),
        see_room: Callable[[], Room | None] = lambda: None,
        see_full: Callable[[], tuple[FullPlace, ...]] = tuple,
        gpus: GpuMeter | None = None,
    ) -> None:
        self._gpus = gpus
        self._table = self._settings = settings
        self._see_full = see_full
        self._see_room = see_room
        self._node_index = 0
        self._generation = 0
        self._everybody = range(0)
        self._workers: Sequence[WatchedWorker] = ()
        self._next_s = 0.0
        self.looked_s = 0.0
        """When the last beat's `time_ns` was read, monotonic. What else is in a beat takes time on a busy machine."""
        data, control = plain_address(data_address), plain_address(control_address)
        more = {
            plain_address(address): network
            for nic in (read_interfaces() if further else ())
            if nic.name in further
            for address, network in zip(nic.addresses, nic.networks, strict=False)
        }
        self._addresses = (*_all_of_interface(data), *more)
        self._tried_at = data, control
        self._listeners: dict[str, Listener] = {}
        """By address; none where that is not this machine's, and nobody can try it."""
        for address in dict.fromkeys(self._tried_at):
            with contextlib.suppress(OSError):
                self._listeners[address] = Listener(address)
        for address in more if data in self._listeners else ():
            with contextlib.suppress(OSError):
                self._listeners.setdefault(address, Listener(address, port=self._listeners[data].port))
        self._tries = Tries(own_data_address=data, further=more)
        self._sockets = SocketWatch()
        self._traffic = TrafficMeter(data)
        self._oom_watch = OomWatch()
        self._ooms = 0
        self._ooms_at_s = 0.0
        self._shm = (0.0, 0.0)
        """The largest share of /dev/shm in use, and when that was seen."""
        self._last: dict[int, RankBeat] = {}
        self.book = NodeBook()
        """What the ranks have spent their time on: each beat is noted in it."""

    def begin(
        self,
        generation: int,
        workers: Sequence[WatchedWorker],
        now_s: float,
        *,
        node_index: int,
        num_nodes: int = 1,
        num_ranks: int = 0,
    ) -> None:
        """Watch these workers from now on; the node may have another index in each generation."""
        self._settings = self._table.for_nodes(num_nodes)
        self._generation, self._workers, self._node_index = generation, workers, node_index
        self._everybody = range(num_ranks)
        self._next_s = now_s
        self._last.clear()
        self._traffic.begin()

    def note_end(self, rank: int) -> None:
        """Say that this rank's process has ended just now."""
        for worker in self._workers:
            if worker.rank == rank:
                worker.note_end()

    def order(self, order: Try, now_s: float) -> None:
        """Begin the tries that the leader asked for; what came of them is in the next beats."""
        self._tries.begin(order, now_s)

    def turn(self, now_s: float) -> NodeBeat | None:
        """Return a beat when one is due. Call it often (every 50 ms): tries go on in it, too."""
        for listener in self._listeners.values():
            listener.turn(now_s)
        self._tries.turn(now_s)
        self._traffic.turn(now_s)
        self._look_at_shm(now_s)
        if now_s < self._next_s:
            return None
        self._next_s = now_s + self._settings.beat_s
        return self.beat(now_s)

    def beat(self, now_s: float) -> NodeBeat:
        """Return how this node is now, due or not: after a worker's end, its last calls are in it."""
        ranks = tuple(worker.look() for worker in self._workers)
        self.looked_s, time_ns = time.monotonic(), time.time_ns()
        self.book.note(ranks, generation=self._generation, now_s=now_s, wall_s=time_ns / 1e9)
        self._last.update((rank.rank, rank) for rank in ranks)
        links = self._links(now_s)
        pids = {rank.rank: rank.pid for rank in ranks}
        self._traffic.look(now_s, self._sockets.connections, pids)
        if self._gpus is not None:
            self._gpus.look(now_s, pids)
        data_port, control_port = (self._listeners[at].port if at in self._listeners else 0 for at in self._tried_at)
        return NodeBeat(
            node_index=self._node_index,
            generation=self._generation,
            ranks=tuple(map(self._with_counts, ranks)),
            links=links,
            tries=self._tries.results(now_s),
            addresses=self._addresses,
            try_ports=(data_port, control_port),
            oom_kills=self._count_ooms(now_s, is_urgent=any(rank.state is ProcessState.GONE for rank in ranks)),
            shm_used=self._shm[0],
            full=self._see_full(),
            room=self._see_room(),
            interfaces=self._traffic.interfaces,
            time_ns=time_ns,
        )

    def _with_counts(self, rank: RankBeat) -> RankBeat:
        """Return the beat of a rank with what it has sent and what its GPU does, as far as that is known."""
        sent = self._traffic.sent.get(rank.rank)
        gpu = self._gpus.of_rank.get(rank.rank) if self._gpus is not None else None
        more = (sent._asdict() if sent is not None else {}) | ({} if gpu is None else {"load": rank.load.with_gpu(gpu)})
        return msgspec.structs.replace(rank, **more) if more else rank

    def place_of(self, rank: int) -> str:
        """Return where a rank's main thread was in the user's code, as far as it is known."""
        return self._last[rank].main_at if rank in self._last else ""

    def keep(self, folder: Folder, *, within_s: float) -> list[str]:
        """Write what each rank did last into a directory, and return the names: its calls (`recorder_rank_3.json`,
        which `allranks why` reads) and its stack (`rank_3.stack.txt`), if it could be read in that time.
        """
        written = []
        for name, data in self._to_keep(within_s):
            with contextlib.suppress(OSError):
                folder.write_whole(name, data)
                written.append(name)
        return written

    def _to_keep(self, within_s: float) -> Iterator[tuple[str, bytes]]:
        for rank, beat in sorted(self._last.items()):
            if beat.calls:
                data = msgspec.json.encode(_as_recorder(beat, self._everybody))
                yield f"recorder_rank_{rank}.json", msgspec.json.format(data, indent=1)
        pids = {beat.pid: rank for rank, beat in self._last.items() if beat.state is not ProcessState.GONE and beat.pid}
        if pids:
            glance = Glance(*pids)
            glance.wait(within_s)
            for process in glance.found:
                if process.pid in pids:
                    yield f"rank_{pids[process.pid]}.stack.txt", render(process).encode()

    def close(self) -> None:
        """Close the sockets of tries, and let go of the kernel's log."""
        self._oom_watch.close()
        self._traffic.close()
        self._tries.close()
        for listener in self._listeners.values():
            listener.close()

    def _links(self, now_s: float) -> tuple[LinkSeen, ...]:
        own_ports = self._tries.own_ports()
        least_s = min(TOLD_STALL_S, self._settings.stalled_s)
        links = [
            LinkSeen(
                own_address=stuck.connection.own_address,
                peer_address=stuck.connection.peer_address,
                unacked_bytes=stuck.connection.unacked_bytes,
                stalled_s=stuck.stalled_s,
                retransmits=stuck.connection.retransmits,
            )
            for stuck in self._sockets.look(now_s, addresses=self._addresses)
            if stuck.stalled_s >= least_s and stuck.connection.own_port not in own_ports
        ]
        return tuple(sorted(links, key=lambda link: -link.stalled_s)[:MAX_LINKS])

    def _look_at_shm(self, now_s: float) -> None:
        with contextlib.suppress(OSError):
            room = os.statvfs("/dev/shm")  # noqa: S108
            used = 1 - room.f_bavail / room.f_blocks if room.f_blocks else 0.0  # 0 blocks: without a limit
            if used >= self._shm[0] or now_s > self._shm[1] + SHM_S:
                self._shm = used, now_s

    def _count_ooms(self, now_s: float, *, is_urgent: bool) -> int:
        if is_urgent or now_s >= self._ooms_at_s:
            self._ooms_at_s = now_s + OOM_EVERY_S
            self._ooms = self._oom_watch.num_kills()
        return self._ooms


def _all_of_interface(address: str) -> tuple[str, ...]:
    """The address first, then the others of the same interface: a library may use any of them."""
    for interface in read_interfaces():
        addresses = [plain_address(known) for known in interface.addresses]
        if address in addresses:
            return (address, *(other for other in addresses if other != address and not other.startswith("fe80")))
    return (address,)


def _as_recorder(beat: RankBeat, everybody: range) -> dict[str, object]:
    """A rank's calls in the shape of torch's recorder (format 2.10)."""
    return {
        "version": "2.10",
        "pg_config": {
            group.name: {"name": group.name, "desc": "", "ranks": str(list(group.ranks or everybody))}
            for group in beat.groups
        },
        "pg_status": {
            group.name: {
                "last_enqueued_collective": group.enqueued,
                "last_started_collective": -1,
                "last_completed_collective": group.completed,
            }
            for group in beat.groups
        },
        "entries": [_as_entry(number, call) for number, call in enumerate(beat.calls)],
    }


def _as_entry(number: int, call: CallSeen) -> dict[str, object]:
    file, _, rest = call.place.partition(":")
    line, _, function = rest.partition(" in ")
    is_line = line.isdecimal() and len(line) < 10
    is_p2p = call.peer is not None
    return {
        "record_id": number,
        "process_group": [call.group, ""],
        "profiling_name": call.op,
        "p2p_seq_id" if is_p2p else "collective_seq_id": call.seq,
        "is_p2p": is_p2p,
        "input_sizes": call.sizes,
        "input_dtypes": call.dtypes,
        "retired": call.is_done,
        "state": "completed" if call.is_done else "scheduled",
        "time_created_ns": call.created_ns,
        "frames": [{"name": function, "filename": file, "line": int(line)}] if is_line else [],
    }
