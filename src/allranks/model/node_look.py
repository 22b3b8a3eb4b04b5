"""What one look at a node's part of a running job shows, from outside its processes. Frozen data.

    probe on each node --NodeLook, some times a second--> watch.since (since when) --> watch.judge (verdict, states)

Whoever started the job: nothing here was told by a worker, but what torch answers to `watch --ask`. Of a program's
variables only whole numbers whose names say that they count (`step`, `epoch`, `batch`) are kept, never a text. Times
are seconds of the node's monotonic clock, and only differences of one node's times mean anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import msgspec

from allranks.model.beat import Age, Amount, CallSeen, ProcessState, Whole, Word

MAX_SOCKETS, MAX_COUNTERS, MAX_PROCESSES = 4096, 8, 4096
MAX_TOLD_CALLS, MAX_MEMBERS = 1024, 1 << 16
STEPS = ("step", "iter", "batch", "idx", "epoch")
"""Parts of a counter's name, the best one to tell a person first."""


class ProcessRole(StrEnum):
    """What a process is in its job."""

    WORKER = "worker"
    """A rank."""
    CHILD = "child"
    """Of a rank: a DataLoader worker, a compiler."""
    LAUNCHER = "launcher"
    """What started ranks: torchrun, deepspeed, a script with mp.spawn, Ray's raylet."""
    STORE = "store"
    """It owns the port of the job's store, and is neither a rank nor a launcher."""


class EndSeen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a process ended."""

    at_s: Age
    """When it was noticed."""
    code: Whole | None = None
    """Exit code, -n for signal n; None: nobody could tell any more."""

    @property
    def signal(self) -> int:
        """Which signal ended it; 0: none, or nobody can tell."""
        return max(0, -(self.code or 0))


class SocketSeen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One TCP socket of a process of the job. The other end has the same addresses the other way round.

    A part of `host.sockets.TcpConnection`, by the same names.
    """

    own_address: Word
    own_port: Amount
    peer_address: Word = ""
    """Empty: it listens."""
    peer_port: Amount = 0
    unread_bytes: Amount = 0
    """Arrived and not read by the process; of one that listens: connections that were not accepted."""
    unacked_bytes: Amount = 0
    """Written and not acknowledged by the other kernel."""
    acked_bytes: Amount | None = None
    """Acknowledged and received since it began; None: this kernel, or this way of asking, does not say."""
    received_bytes: Amount | None = None
    retransmits: Amount = 0
    """Timeouts in a row, without an acknowledgement."""

    @property
    def ends(self) -> tuple[str, int, str, int]:
        """What tells it from others: own address and port, peer's address and port."""
        return self.own_address, self.own_port, self.peer_address, self.peer_port

    @property
    def carried(self) -> tuple[int | None, ...]:
        """What changes while bytes go through it, in either direction."""
        return self.acked_bytes, self.received_bytes, self.unread_bytes, self.unacked_bytes


class StackSeen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the main thread of a process was."""

    at_s: Age
    operation: Word = ""
    """The known call that the user's innermost line is in, as `launch.look.stack_groups` names it: `all_reduce`."""
    place: Word = ""
    """The innermost line of the user's code: `data.py:9 in __getitem__`; empty: none of it is on the stack."""
    is_collective: bool = False
    """It waits in a call that ends only when other ranks make it, too."""
    counters: Annotated[tuple[tuple[Word, Whole], ...], msgspec.Meta(max_length=MAX_COUNTERS)] = ()
    """Whole numbers of the user's frames that count, innermost frame first: `("step", 150)`."""

    @property
    def counter(self) -> tuple[str, int] | None:
        """The one that tells a person best how far its rank is; of equals, the innermost one."""
        found = [counter for part in STEPS for counter in self.counters if part in counter[0].lower()]
        return next(iter([*found, *self.counters]), None)

    @property
    def where(self) -> str:
        """`in all_reduce at train.py:40`, `at data.py:9 in load`."""
        parts = [f"in {self.operation}"] * bool(self.operation) + [f"at {self.place}"] * bool(self.place)
        return " ".join(parts) or "at an unknown place"


class FlightSeen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What torch's flight recorder of a rank has answered: a part of `recorder.calls.Dump`, by the same names."""

    at_s: Age
    """When it was asked."""
    called_s: Age = 0.0
    """When the last of its calls was made; 0: it has made none."""
    calls: Annotated[tuple[CallSeen, ...], msgspec.Meta(max_length=MAX_TOLD_CALLS)] = ()
    """The last ones of each group, and the first that is open."""
    enqueued: Mapping[Word, Whole] = {}
    started: Mapping[Word, Whole] = {}
    members: Mapping[Word, Annotated[tuple[Whole, ...], msgspec.Meta(max_length=MAX_MEMBERS)]] = {}
    """Of the groups that have not all ranks, where the recorder knows it."""
    descs: Mapping[Word, Word] = {}
    formed_again: tuple[Word, ...] = ()
    is_whole: bool = False


class ProcessLook(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process of the job."""

    pid: Amount
    role: ProcessRole
    start_ticks: Amount = 0
    """Since the boot: tells it from a later process with the same pid."""
    rank: Whole | None = None
    world_size: Whole | None = None
    state: ProcessState = ProcessState.RUNNING
    cpu_s: Age = 0.0
    """Processor time so far, all threads."""
    num_switches: Amount = 0
    """How often its main thread went to sleep; a process that still moves changes it."""
    rss_bytes: Amount = 0
    end: EndSeen | None = None
    """It has ended; it is told so for the rest of the watch."""
    sockets: Annotated[tuple[SocketSeen, ...], msgspec.Meta(max_length=MAX_SOCKETS)] = ()
    stack: StackSeen | None = None
    """The last one that was read; None: none was."""
    problem: Word = ""
    """Why no stack is read: another user's, `ptrace_scope`, no Python frames."""
    gpu_percent: Amount | None = None
    """Use of its GPU, by NVML; None: not known."""
    nccl_ops: Amount | None = None
    """Collectives that it has started, by NCCL's RAS; None: not known."""
    flight: FlightSeen | None = None
    """None: nobody asked, it has not answered, or something has moved since."""


class NodeLook(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One look at one node."""

    node: Word
    at_s: Age
    """When it was taken."""
    processes: Annotated[tuple[ProcessLook, ...], msgspec.Meta(max_length=MAX_PROCESSES)] = ()
    store: tuple[Word, Amount] | None = None
    """Address and port of the job's store, as its processes' environments or connections tell; None: not known."""
    limits: tuple[Word, ...] = ()
    """What could not be seen, and why, each once."""
