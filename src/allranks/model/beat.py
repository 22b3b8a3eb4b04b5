"""Heartbeats: what each worker reports to its agent, and each agent to the leader. Frozen data.

    worker --cell (shared memory)--> agent --NodeBeat, one message a node--> leader --> guard

A worker tells what only it knows: its step, its place in the code, the calls of its process groups. The agent adds what
is seen from outside: the state of the process, the kernel's view of its connections. Ages are seconds by the sender's
monotonic clock, since clocks of nodes differ; times since the epoch are the sender's wall clock and marked as such.

An agent is of this job (the wire proved it), but a worker's cell may hold anything: NaN, names without an end, ten
thousand calls. The types below say what can be worked with. Where a message breaks them, `drop_unsound` drops the
items that do, each alone, and the rest counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from allranks.model.pace import Pace
from allranks.model.room import FullPlace, Room

MAX_GROUPS = 512
MAX_CALLS = 4096
MAX_PRINTED = 3000
MAX_INTERFACES = 16
MAX_SIZES = 64
"""Tensors of one call that are told, and dimensions of each."""
GPU_UNIT_MIB = 16

Age = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""Seconds; neither NaN nor infinite."""
Moment = Annotated[float, msgspec.Meta(ge=0, le=4e9)]
"""Seconds since the epoch, up to the year 2096, so that it is a date for whoever shows it."""
Word = Annotated[str, msgspec.Meta(max_length=300)]
"""Whatever its characters: who prints it makes them harmless (report.text)."""
_MOST = 2**62
Whole = Annotated[int, msgspec.Meta(ge=-_MOST, le=_MOST)]
"""One that can be sent on: MessagePack has 64 bits, and JSON any number of digits."""
Amount = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
Number = Annotated[int, msgspec.Meta(ge=-1, le=_MOST)]
"""Of a collective."""
Few = msgspec.Meta(max_length=MAX_SIZES)
Network = Annotated[str, msgspec.Meta(pattern=r"^(data|control)\Z")]


class ProcessState(StrEnum):
    """What the kernel says a process is doing, from /proc/PID/stat."""

    RUNNING = "running"
    """On a core, or waiting for one (R)."""
    SLEEPING = "sleeping"
    """Waiting for something that a signal interrupts (S, I)."""
    BLOCKED = "blocked"
    """In uninterruptible sleep: a disk, a file server (D)."""
    STOPPED = "stopped"
    """By SIGSTOP, SIGTSTP, or a frozen cgroup (T)."""
    TRACED = "traced"
    """Held by a debugger (t)."""
    GONE = "gone"
    """Dead, or not there (Z, X, no such process)."""


POINT_TO_POINT = ("send", "recv", "isend", "irecv")
"""Operations that are counted apart from collectives, and are different on the two sides by nature."""
HELD_STATES = (ProcessState.STOPPED, ProcessState.TRACED, ProcessState.BLOCKED)


class CallSeen(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One collective of one process group, as one rank called it."""

    group: Word
    """Key of the process group, the same on all its ranks: its name, `0`; where it has several backends, also which,
    `0/nccl`; where it was destroyed and formed again, also a count, `0#2`."""
    seq: Whole
    """Its number in the group; the same collective has the same one on all ranks, 1 is the first."""
    op: Word
    """`all_reduce`, without the backend."""
    sizes: Annotated[tuple[Annotated[tuple[Whole, ...], Few], ...], Few] = ()
    dtypes: Annotated[tuple[Word, ...], Few] = ()
    """As torch's recorder writes them: `Float`."""
    is_done: bool = False
    blocks: bool = False
    """The main thread is in it, and calls nothing else before it ends."""
    created_ns: Whole = 0
    """When it was called: since the epoch, by the worker's wall clock."""
    place: Word = ""
    """Where the user's code called it: `train.py:12 in step`; empty: not known."""
    peer: Whole | None = None
    """Of a send or a receive: the other side's rank in the group. Their `seq` counts the group's sends and receives."""

    def __str__(self) -> str:
        return show_call(self.op, self.sizes, self.dtypes)

    @property
    def at(self) -> str:
        """Its place, to be put behind what it is: ` at train.py:12 in step`."""
        return f" at {self.place}" if self.place else ""


def show_call(op: str, sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> str:
    """Return a call as people read it: `all_reduce [8] Float`."""
    shown = " ".join(str(list(size)) for size in sizes[:3]) + (" ..." if len(sizes) > 3 else "")
    return " ".join(filter(None, (op, shown, " ".join(dict.fromkeys(dtypes)))))


class GroupSeen(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """How far one rank is in one process group."""

    name: Word
    """Its key, as in CallSeen."""
    ranks: tuple[Whole, ...] = ()
    """Global ranks of its members; empty: all of the job (of thousands, they would be most of what a node tells)."""
    enqueued: Number = -1
    """Number of the last collective that it called; -1: not known."""
    completed: Number = -1
    """Number of the last one that is done."""
    waiting_s: Age = 0.0
    """How long the first open one has been open; 0: none is."""


class GpuSeen(msgspec.Struct, frozen=True, gc=False):
    """What the GPU of one rank does; of several, all of them."""

    percent: Annotated[int, msgspec.Meta(ge=0, le=100)] | None
    """Of the time, in which a kernel ran; of several GPUs, the idlest. A collective that waits for others is one."""
    used_mib: Amount
    """Memory in use, whoever uses it."""
    total_mib: Amount


class LoadSeen(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one rank takes of its machine, without keys: a beat grows by at most 100 bytes a rank with it and `pace`."""

    rss_mib: Amount = 0
    """Resident memory of its process; 0: not known."""
    gpu_percent: Annotated[int, msgspec.Meta(ge=0, le=100)] | None = None
    gpu_used: Amount = 0
    """Memory, in units of GPU_UNIT_MIB: two bytes hold a TiB."""
    gpu_total: Amount = 0
    """0: it has no GPU, or nobody can tell."""

    @property
    def gpu(self) -> GpuSeen | None:
        """What its GPUs do; None: it has none, or nobody can tell."""
        used_mib, total_mib = GPU_UNIT_MIB * self.gpu_used, GPU_UNIT_MIB * self.gpu_total
        return GpuSeen(percent=self.gpu_percent, used_mib=used_mib, total_mib=total_mib) if self.gpu_total else None

    def with_gpu(self, gpu: GpuSeen) -> LoadSeen:
        """Return it with what its GPUs do."""
        used, total = round(gpu.used_mib / GPU_UNIT_MIB), round(gpu.total_mib / GPU_UNIT_MIB)
        return LoadSeen(rss_mib=self.rss_mib, gpu_percent=gpu.percent, gpu_used=used, gpu_total=total)


class RankBeat(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One worker, as its agent knows it now."""

    rank: int
    pid: int = 0
    state: ProcessState = ProcessState.RUNNING
    state_for_s: Age = 0.0
    """How long it has been in that state, as seen from outside."""
    cpu_s: Age = 0.0
    """Processor time that it has used, all threads."""
    silent_s: Age | None = None
    """Since its beat thread last told anything; None: it never did (no torch, no hook)."""
    main_at: Word = ""
    """Where its main thread is in the user's code: `evaluate.py:88 in run`; empty: not known."""
    step: Whole | None = None
    """Where the script says it."""
    checkpoint: Whole | None = None
    """Step of its last complete checkpoint."""
    total_steps: Whole | None = None
    """That the whole run has, where the script says it; from rank 0."""
    write_s: Age | None = None
    """How long it took to write that checkpoint; from the rank that waits for the writers, if it was not loaded."""
    phase: Word = ""
    """`init` until its first group is formed, `arriving` while it waits in init_process_group for all ranks of the job,
    `training` after, `saving` inside a checkpoint, `leaving` at the end."""
    handles: Annotated[tuple[int, ...], Few] = ()
    """Signals that the script handles, of those that an agent passes on."""
    is_saving: bool = False
    """It writes a checkpoint, and should not be ended now."""
    groups: Annotated[tuple[GroupSeen, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    calls: Annotated[tuple[CallSeen, ...], msgspec.Meta(max_length=MAX_CALLS)] = ()
    """The last ones of each group, oldest first: always the open ones; many where it waits or has failed."""
    lags: tuple[tuple[Word, Whole, Whole], ...] = ()
    """(group, seq, created_ns) of some calls, chosen by their number, so that all ranks tell of the same ones."""
    idle_s: Age = 0.0
    """For how long it has made no progress: no call, no step, no output, and neither it nor a child of it has used a
    core or written to a file."""
    reads_terminal: bool = False
    """It, or a child of it, waits for a line from a terminal."""
    printed: Annotated[str, msgspec.Meta(max_length=MAX_PRINTED)] = ""
    """The traceback that it printed last, where it has made no progress for long since; cut."""
    blind: tuple[Word, ...] = ()
    """What cannot be seen, and why: `no flight recorder in torch 2.8`."""
    segments: Amount = 0
    """Of TCP, that its connections to other machines have sent since it began; and of those, sent again."""
    retransmits: Amount = 0
    pace: Pace | None = msgspec.field(default=None, name="p")
    """None: it has booked nothing (no hook, no torch, not begun). Its key is short, as is that of `load`."""
    begun_ago_s: Age | None = None
    """Since it began to book, with init_process_group; told for a minute."""
    load: LoadSeen = msgspec.field(default=LoadSeen(), name="l")


class LinkSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One connection of a worker on the data network that does not get its bytes across, as the kernel has it."""

    own_address: str
    peer_address: Word
    unacked_bytes: Annotated[int, msgspec.Meta(ge=0)]
    stalled_s: Age
    """Since the other machine last acknowledged anything."""
    retransmits: int
    """Timeouts in a row without an acknowledgement."""


class InterfaceSeen(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One interface that carries the connections of this node's ranks, over the last seconds (guard.node.traffic)."""

    name: Word
    sent_mbit_s: Age
    received_mbit_s: Age
    limit_mbit_s: Age | None = None
    """What it can carry one way; None: not known."""
    is_measured: bool = False
    """It reports no speed, so the limit is what its connections reached."""
    busy_share: Age = 0.0
    """Fraction of the time in which it carried nearly that, one way."""
    busy_mbit_s: Age = 0.0
    """What it carried then."""


class TrySeen(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one agent's try to reach another one's machine: only what two kernels do, whatever runs there."""

    target: Annotated[int, msgspec.Meta(ge=0)]
    """Node index."""
    network: Network
    connects: bool
    """A SYN was answered, also by a refusal."""
    refused: bool = False
    """The machine answered that nobody listens: it lives, its agent does not."""
    carries: bool | None = None
    """Full-sized packets were acknowledged; None: not tried, since it did not connect."""
    error: Word = ""
    age_s: Age = 0.0


class NodeBeat(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as its agent knows it now."""

    node_index: int
    generation: int
    """Which start of the workers it tells of."""
    ranks: tuple[RankBeat, ...] = ()
    links: tuple[LinkSeen, ...] = ()
    tries: tuple[TrySeen, ...] = ()
    addresses: tuple[str, ...] = ()
    """Of this node on the data network, as its workers' connections use them."""
    try_ports: tuple[int, int] = (0, 0)
    """Where its agent listens for tries: on the data network, on the control network; 0: nowhere."""
    oom_kills: int = 0
    """Of the job's cgroup and the kernel, since the agent began."""
    shm_used: float = 0.0
    """Of /dev/shm: the largest share that was in use lately, since what a dead process had there is free at once."""
    room: Room | None = None
    """In its run directory; None: not asked yet."""
    full: Annotated[tuple[FullPlace, ...], msgspec.Meta(max_length=8)] = ()
    """Other directories that its workers write to and that were full when one of them failed, until there is room."""
    interfaces: Annotated[tuple[InterfaceSeen, ...], msgspec.Meta(max_length=MAX_INTERFACES)] = ()
    time_ns: int = 0
    """The node's wall clock when this was sent."""


Parts = Mapping[Any, Mapping[str, tuple[Any, int]]]
NODE_PARTS: Parts = {
    NodeBeat: {
        "ranks": (RankBeat, MAX_CALLS),
        "links": (LinkSeen, MAX_CALLS),
        "tries": (TrySeen, MAX_CALLS),
        "interfaces": (InterfaceSeen, MAX_INTERFACES),
    },
    RankBeat: {"groups": (GroupSeen, MAX_GROUPS), "calls": (CallSeen, MAX_CALLS)},
}
"""By type and key, the lists that lose what is unsound: of what, and how many items count, the last ones."""


def drop_unsound(told: Any, kind: Any, parts: Parts = NODE_PARTS) -> Any:
    """Return a message without the items of its lists that are not what their type says.

    Args:
        told: as JSON or MessagePack is decoded without a type; is changed.
        kind: its type.
        parts: which lists it and its items have.
    """
    for key, (item_kind, at_most) in parts.get(kind, {}).items():
        if isinstance(told, dict) and isinstance(items := told.get(key), list):
            sound = [item for item in items if _is_sound(drop_unsound(item, item_kind, parts), item_kind)]
            told[key] = sound[-at_most:]
    return told


def _is_sound(item: Any, kind: Any) -> bool:
    try:
        msgspec.convert(item, kind)
    except msgspec.ValidationError:
        return False
    return True
