"""What does a worker tell its agent, also while it is blocked, stopped, or dead? The shared memory between the two.

    agent:   cell = Cell.create(); start the worker with ALLRANKS_CELL_FD=<cell.fd>, cell.fd passed on
    worker:  cell = Cell.inherited(); cell.claim(); cell.step(12)
    agent:   cell.read().step

One cell is for one start of one worker: a restarted one gets a fresh cell. The layout, all numbers u64 of the machine:

       0  magic and version          16  pid of the process that writes
       8  size of the whole          24  number of the call that is done (of its record)
      32  whether the agent is ending the worker
      40  whether all steps are made         48  how many blocks of `allranks.saving()` are open
      56  which signals the script handles, and since when (guard.inside.handlers)
     240  how many lines of output could not be written, and why (guard.inside.output)
     256  the book of the training thread (guard.inside.pace_words)
     384  the records, one after the other, of these rooms:
            told, words, raised 64 KiB, leaves 32 KiB, call 4 KiB, step, saved, phase 256 B   written by the worker
            order 4 KiB                                                                      written by the agent

A record is a number n and two slots, each (n, time by CLOCK_MONOTONIC, length, CRC-32, bytes). The n-th writing fills
slot n % 2 and only then sets the number, so the last whole one can always be read, whenever the writer dies or is
stopped; a reader takes a slot only where its own n and CRC fit. No lock is shared, no side ever waits for the other.

A process writes only after it has claimed the cell. The first one that asks gets it, and the next one only when that
one is gone: so a shell may stand between agent and Python, and DataLoader workers and other children stay silent.

A worker may write anything here, so the agent believes no length, number or text: what makes no sense reads as not
written. Nobody can make the memory shorter (F_SEAL_SHRINK): a load from a page that is gone would kill the agent with
SIGBUS. Where the kernel has no seals, the agent maps nothing and reads a copy. Standard library only; runs in the
worker's Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from .handlers import BEGUN, HANDLES, OWN, TOLD
from .handlers import PID as HANDLERS_PID
from .lost_output import ERRNO, LINES
from .pace_words import PACE, PACE_WORDS, read_book

ENV_FD = "ALLRANKS_CELL_FD"
NAME = "allranks-cell"
MAGIC = int.from_bytes(b"allrnk\x06\x00", "little")
"""The last two bytes are the version of the layout."""

_MAGIC, _SIZE, _PID, _DONE, _ENDING, _FINISHED, _SAVING = range(7)
_RECORDS_AT = 384
_ROOMS = {
    "told": 65536, "words": 65536, "raised": 65536, "leaves": 32768, "call": 4096, "step": 256, "saved": 256,
    "phase": 256, "order": 4096,
}  # fmt: skip
_TOLD = ("told", "words", "raised", "leaves", "call", "step", "saved", "phase")
_SLOT = struct.Struct("QQII")
_PAIR = struct.Struct("qq")  # a step, and what belongs to it; less than 0: that is not known
_PHASE_BYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_WORDS = 2**64
_NEVER_NS = 2**63
"""No clock says so much: 292 years."""
_MAX_ERRNO = 4095
"""Source: linux/err.h."""
_MAX_STEP = 10**15
"""A larger one is none, and sums of it would not fit into a cell."""
_ORDER = struct.Struct("q?")


class Written(NamedTuple):
    """One record as it was written."""

    number: int
    """1 is the first that was written into its room."""
    written_ns: int
    """By CLOCK_MONOTONIC, which all processes of a machine share."""
    data: bytes


class CellOrder(NamedTuple):
    """What the agent wants from the worker's next step boundaries; see wire.protocol.Order."""

    at_step: int
    why: str
    leaves: bool


class Handlers(NamedTuple):
    """What a worker handles, as it says; bit n is signal n."""

    pid: int
    """The process that says so; 0: none does, it may not be Python."""
    handled: int
    """By the script."""
    own: int
    """By allranks, in the worker."""
    begun_s: dict[int, float]
    """By signal: when a handler of the script began last, by time.monotonic()."""


class CellRead(NamedTuple):
    """All that stands in a cell; None: never written."""

    pid: int
    """0: nobody has claimed it."""
    told: Written | None
    """By the beat thread: JSON."""
    words: Written | None
    """Last words, at an exception: JSON."""
    raised: Written | None
    """The exception that nobody caught, as in the error file: JSON. With it the worker is at its end."""
    leaves: Written | None
    """The last call of sys.exit or os._exit, other than with 0, as in the exit file: JSON."""
    call: Written | None
    """The last collective that Python code called: JSON, with the fields of model.beat.CallSeen."""
    is_call_done: bool
    """The Python call has come back."""
    pace: tuple[int, ...] | None
    """What its training thread has booked: the words from PACE on, of one moment."""
    step: int | None
    saved: int | None
    phase: str
    total: int | None
    """How many steps there will be, where the script says so."""
    write_ms: int | None
    """How long it took to write the last checkpoint, where this worker knows."""


class Cell:
    """One cell, in either process.

    Args:
        copy: of an agent whose kernel has no seals: it reads into this.
    """

    def __init__(self, fd: int, copy: bytearray | None = None) -> None:
        self.fd = fd
        self._copy = copy
        self._memory = mmap.mmap(fd, _TOTAL) if copy is None else copy
        self._view = memoryview(self._memory)
        self._numbers = self._view[:_RECORDS_AT].cast("Q")
        self.pace = self._numbers[PACE : PACE + PACE_WORDS]
        """The words of the training thread's book."""
        self._records = {name: _Record(self._view, at, room) for name, (at, room) in _PLACES.items()}
        self._call_lock = threading.Lock()
        self._owner = 0
        self._order_seen: tuple[int, CellOrder | None] = (0, None)

    @classmethod
    def create(cls) -> Cell:
        """Return a fresh one, in the agent. Its `fd` is for the worker's `pass_fds`.

        Raises:
            OSError: there is no memory, or no descriptor left.
        """
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _TOTAL)
            os.pwrite(fd, struct.pack("QQ", MAGIC, _TOTAL), 0)
            return cls(fd, None if _seal(fd) else bytearray(_TOTAL))
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def inherited(cls, env: Mapping[str, str] | None = None) -> Cell | None:
        """Return the one that this process got from its agent; None where there is none, or one of another version."""
        try:  # in a child that did not inherit it, the number may be any other file's
            fd = int((os.environ if env is None else env).get(ENV_FD, ""))
            if NAME not in os.readlink(f"/proc/self/fd/{fd}") or os.fstat(fd).st_size != _TOTAL:
                return None
            cell = cls(fd)
        except (OSError, ValueError):
            return None
        return cell if cell._numbers[_MAGIC] == MAGIC and cell._numbers[_SIZE] == _TOTAL else None

    def close(self) -> None:
        """Give the memory and the descriptor back, in the agent."""
        for record in self._records.values():
            record.release()
        self.pace.release()
        self._numbers.release()
        self._view.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
        with contextlib.suppress(OSError):
            os.close(self.fd)

    # The worker's side

    def claim(self) -> bool:
        """Become the process that writes, unless another one is and lives; tell whether this one now is."""
        pid, own = int(self._numbers[_PID]), os.getpid()
        if pid != own:
            if pid and os.path.exists(f"/proc/{pid}"):
                return False
            self._numbers[_PID] = own
        self._owner = own
        return True

    @property
    def is_mine(self) -> bool:
        """Tell whether this process may write: not in a fork of the one that claimed it."""
        return self._owner == os.getpid() == self._numbers[_PID]

    def tell(self, blob: bytes) -> bool:
        """Write what the beat thread has to tell; False where it did not fit or is not ours."""
        return self.is_mine and self._records["told"].write(blob)

    def last_words(self, blob: bytes) -> bool:
        """Write what is known when an exception ends the worker; False where it did not fit or is not ours."""
        return self.is_mine and self._records["words"].write(blob)

    def raised(self, blob: bytes) -> bool:
        """Write which exception nobody caught; False where it did not fit or is not ours."""
        return self.is_mine and self._records["raised"].write(blob)

    def leaves(self, blob: bytes) -> bool:
        """Write which call of sys.exit or os._exit ends the worker; False where it did not fit or is not ours."""
        return self.is_mine and self._records["leaves"].write(blob)

    def enter_call(self, blob: bytes) -> int:
        """Write which collective comes now; return its number for `leave_call`, 0 where it could not be written."""
        # Never waits: a signal handler may come here while its own thread holds the lock.
        if not self.is_mine or not self._call_lock.acquire(blocking=False):
            return 0
        try:
            record = self._records["call"]
            return record.number if record.write(blob) else 0
        finally:
            self._call_lock.release()

    def leave_call(self, number: int) -> None:
        """Say that the call of this number has come back."""
        if self.is_mine and number > self._numbers[_DONE]:
            self._numbers[_DONE] = number

    def step(self, number: int, total: int | None = None) -> None:
        """Say which optimizer step the script has reached, and of how many."""
        if self.is_mine:
            self._records["step"].write(_PAIR.pack(number, -1 if total is None else total))

    def saved(self, step: int, write_ms: int | None = None) -> None:
        """Say that the checkpoint of this step is complete, and how long writing it took."""
        if self.is_mine:
            self._records["saved"].write(_PAIR.pack(step, -1 if write_ms is None else write_ms))

    def phase(self, name: str) -> None:
        """Say what the worker does: `init`, `training`, `saving`, `leaving`."""
        if self.is_mine:
            self._records["phase"].write(name.encode()[:_PHASE_BYTES])

    def finish(self, *, is_finished: bool = True) -> None:
        """Say whether all steps of the training are made: what comes then is its end, whatever was ordered."""
        if self.is_mine:
            self._numbers[_FINISHED] = is_finished

    def save(self, *, is_begun: bool) -> None:
        """Say that the script has begun to save, or has ended it; once more for each block inside of another."""
        if self.is_mine:
            self._numbers[_SAVING] = max(0, self._numbers[_SAVING] + (1 if is_begun else -1))

    def marks(self) -> tuple[int, int, int]:
        """Return numbers that change when a call begins or ends and when a step is told."""
        return self._records["call"].number, int(self._numbers[_DONE]), self._records["step"].number

    def order(self) -> CellOrder | None:
        """Return the agent's last order. Costs one load where nothing is new."""
        record = self._records["order"]
        if record.number != self._order_seen[0] and (written := record.read()):
            at_step, leaves = _ORDER.unpack_from(written.data)
            why = written.data[_ORDER.size :].decode(errors="replace")
            self._order_seen = written.number, CellOrder(at_step, why, leaves)
        return self._order_seen[1]

    @property
    def is_ending(self) -> bool:
        """Tell whether the agent is ending this worker: then SIGTERM is its, and means it."""
        return bool(self._numbers[_ENDING])

    # The agent's side

    @property
    def is_finished(self) -> bool:
        """Tell whether the worker has made all its steps."""
        self._look()
        return bool(self._numbers[_FINISHED])

    @property
    def has_raised(self) -> bool:
        """Tell whether the worker has told of an exception that nobody caught."""
        self._look()
        return self._records["raised"].number > 0

    @property
    def is_saving(self) -> bool:
        """Tell whether the worker writes a checkpoint, and should not be ended now."""
        self._look()
        phase = self._records["phase"].read()
        return bool(self._numbers[_SAVING]) or (phase is not None and phase.data == b"saving")

    def handlers(self) -> Handlers:
        """Return what the worker handles."""
        self._look()
        begun_s = {
            int(signum): at_ns / 1e9 for signum in TOLD if 0 < (at_ns := self._numbers[BEGUN + signum]) < _NEVER_NS
        }
        return Handlers(self._numbers[HANDLERS_PID], self._numbers[HANDLES], self._numbers[OWN], begun_s)

    def lost_lines(self) -> tuple[int, int]:
        """Return how many lines of output could not be written, and the errno of the last one; 0 and 0: none."""
        self._look()
        code = int(self._numbers[ERRNO])
        return min(int(self._numbers[LINES]), _MAX_STEP), code if code <= _MAX_ERRNO else 0

    def end(self) -> None:
        """Say that the signals which come from now on are the agent's."""
        self._numbers[_ENDING] = 1
        self._put(8 * _ENDING, 8)

    def give_order(self, at_step: int, why: str, *, leaves: bool) -> None:
        """Ask the worker for a checkpoint at the first boundary whose step is this or a later one."""
        self._look()
        self._records["order"].write(_ORDER.pack(at_step, leaves) + why.encode(errors="replace")[:2048])
        at, room = _PLACES["order"]
        self._put(at + 8, 2 * (_SLOT.size + room))  # before the number that makes it count
        self._put(at, 8)

    def read(self) -> CellRead:
        """Return all that the worker wrote, whatever state it is in now."""
        pace = read_book(self._look, self.pace)
        told, words, raised, leaves, call, *pairs, phase = (self._records[name].read() for name in _TOLD)
        (step, total), (saved, write_ms) = map(_as_pair, pairs)
        is_call_done = call is not None and self._numbers[_DONE] >= call.number
        text = phase.data[:_PHASE_BYTES].decode(errors="replace") if phase else ""
        pid = int(self._numbers[_PID])
        return CellRead(pid, told, words, raised, leaves, call, is_call_done, pace, step, saved, text, total, write_ms)

    def _look(self) -> None:
        """Read the file where it is not mapped; what somebody has cut off reads as never written."""
        if self._copy is not None:
            num_bytes = os.preadv(self.fd, [self._copy], 0)
            self._copy[num_bytes:] = bytes(_TOTAL - num_bytes)

    def _put(self, at: int, size: int) -> None:
        """Write a part of the copy where the file is not mapped."""
        if self._copy is not None:
            os.pwrite(self.fd, self._view[at : at + size], at)


def _seal(fd: int) -> bool:
    """Have the kernel refuse to make this memory shorter or longer; tell whether it does."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return True
    return False


def _as_pair(written: Written | None) -> tuple[int | None, int | None]:
    data = b"" if written is None else written.data
    step, more = (_WORDS, -1) if len(data) != _PAIR.size else _PAIR.unpack(data)
    return step if abs(step) <= _MAX_STEP else None, more if 0 <= more <= _MAX_STEP else None


class _Record:
    """One room of the cell, with one process that writes and any number that read."""

    def __init__(self, view: memoryview[Any], at: int, room: int) -> None:
        self.room = room
        self._counter = view[at : at + 8].cast("Q")
        size = _SLOT.size + room
        self._slots = tuple(view[at + 8 + i * size : at + 8 + (i + 1) * size] for i in range(2))

    @property
    def number(self) -> int:
        return int(self._counter[0])

    def write(self, data: bytes) -> bool:
        if len(data) > self.room:
            return False
        number = (self._counter[0] + 1) % _WORDS or 1
        slot = self._slots[number % 2]
        slot[_SLOT.size : _SLOT.size + len(data)] = data
        _SLOT.pack_into(slot, 0, number, time.monotonic_ns(), len(data), zlib.crc32(data))
        self._counter[0] = number
        return True

    def read(self) -> Written | None:
        for _ in range(8):  # again only where the writer came round twice meanwhile
            number = self._counter[0]
            if not number:
                return None
            slot = self._slots[number % 2]
            head = bytes(slot[: _SLOT.size])
            own, written_ns, length, check = _SLOT.unpack(head)
            if own == number and length <= self.room:
                data = bytes(slot[_SLOT.size : _SLOT.size + length])
                if zlib.crc32(data) == check and bytes(slot[: _SLOT.size]) == head:
                    return Written(number, written_ns, data)
        return None

    def release(self) -> None:
        for view in (self._counter, *self._slots):
            view.release()


_SIZES = [8 + 2 * (_SLOT.size + room) for room in _ROOMS.values()]
_PLACES = dict(zip(_ROOMS, zip(accumulate(_SIZES, initial=_RECORDS_AT), _ROOMS.values(), strict=False), strict=False))
"""Where each record begins, and its room."""
_TOTAL = _RECORDS_AT + sum(_SIZES)
