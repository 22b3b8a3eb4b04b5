"""What does the training thread of this worker spend its time on? Booked by the thread itself, in the worker's cell.

    wrap(torch)            the functions whose beginning and end are marks, once torch has been imported
    book.begin(cell)       this thread trains from now on: its book is in this cell

Each moment of the training thread belongs to one state (model.pace), so the totals sum to the time by construction. A
mark begins a state, or goes back to the one before. The innermost state counts, but all of a save is `save`, and all
is `start` until the first step has ended. Marks of other threads count for nothing: what goes on beside the training
thread costs no time of its own.

A step ends with an optimizer's step; of several optimizers, the one that steps most often counts, and those that step
as often move the end of the step. A gap between a step and the last batch before the next backward pass is `eval`
where it is longer than EVAL_STEPS median steps.

The book is in words of the cell (guard.inside.pace_words), and as new as the last mark, whoever dies after it.

Nothing here raises, waits or reads more than a clock: a mark costs 0.3 us (benchmarks/marks_cost.py). torch.compile
does not trace it. Runs in the worker's Python.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import sys
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any

from .cell import Cell
from .pace_words import ASYNC, BACK, BEGAN, DATA_MOVED, LEFT, PACE_WORDS, STATE, STEP_MOVED, STEPS, TOTALS
from .user_frames import drop_frame, hide_from_dynamo

START, STEP, BACKWARD, DATA, EVAL, SAVE, BLOCKED = range(7)
"""As in model.pace.PACE_STATES."""
NOT_OURS = -1
"""What a mark of another thread returns."""
KEPT = 32
"""Steps of which the median is taken, and backward passes of which the end is measured."""
EVAL_STEPS = 5
"""A gap longer than so many median steps is an evaluation."""
ENOUGH = 20
"""An optimizer that steps so often in a row has taken the place of the others: all of these are steps."""
_COMPILED = object()
"""In place of the optimizer whose step is in a graph of torch.compile."""
_MAX_NS = 2**62


def _is_compiling() -> bool:
    return False  # until torch is imported: torch.compiler's


class Optimizers:
    """Which optimizer's steps are those of the training: the one that steps most often."""

    def __init__(self) -> None:
        self.leader = 0
        """The optimizer that stepped last, ENOUGH times in a row and more: each of its steps is one of the training."""
        self._counts: dict[int, int] = {}
        """By identity of an optimizer: how often it has stepped."""
        self._last = self._in_a_row = self._steps_before_row = 0
        """The optimizer that stepped last, how often in a row, and what was counted before that."""

    def count(self, key: int, steps: int) -> int:
        """Return how often an optimizer that steps now has stepped, as far as that tells of the training.

        Args:
            key: its identity.
            steps: of the training so far.
        """
        if self.leader:
            self._counts[self.leader], self.leader = steps, 0
        if key != self._last:
            self._last, self._in_a_row, self._steps_before_row = key, 0, steps
        self._in_a_row += 1
        known = self._counts.get(key)  # a new one, as if it had stepped beside the others from the beginning
        count = (steps or 1) if known is None else known + 1
        if self._in_a_row == ENOUGH:
            count = max(count, self._steps_before_row + ENOUGH)
        self._counts[key] = count
        if count > steps and self._in_a_row >= ENOUGH:
            self.leader = key
        return count


class ThreadBook:
    """The book of one process. It has fewer than 30 attributes: with more, Python 3.11 finds each in 10 ns more.

    Args:
        clock: in nanoseconds.
    """

    def __init__(self, clock: Callable[[], int] = monotonic_ns) -> None:
        self.missing: list[str] = []
        """What this torch has not, so that it is not booked."""
        self.has_compiled_step = False
        """One that was not counted yet: torch.compile had an optimizer's step in its graph."""
        self._clock = clock
        self._thread = 0
        """The training thread; 0: not known yet. No thread has the number -1."""
        self._cell: Cell | None = None
        self._forget()
        self._is_refused = False
        """There is no cell for this process."""

    def _forget(self) -> None:
        """Book for nobody: marks go into memory of this process alone."""
        self._words: Any = [0] * PACE_WORDS
        self._totals = [0] * 7
        self._state = STEP
        """As if `start` was over: what comes inside of it."""
        self._has_stepped = False
        self._since = 0
        self._steps = self._steps_before = 0
        self._optimizers = Optimizers()
        self._durations: deque[int] = deque(maxlen=KEPT)
        self._shortest = _MAX_NS
        self._counted_ns = self._boundary_ns = self._batch_ns = 0
        """When a step was counted last, when one ended last, and when the last batch came."""
        self._step_at_boundary = self._data_at_boundary = self._step_at_batch = self._data_at_batch = 0
        """Totals of `step` and `data` then."""
        self._is_gap_open = False
        """No backward pass has begun since the last step."""
        self._backward_ns = self._booked_before = 0
        """When the present backward pass began, and the total of `backward` then."""
        self._passes: deque[tuple[int, int, int]] = deque(maxlen=KEPT)
        """Begin and end of backward passes, and what of each was booked as that."""

    # Who is booked

    def begin(self, cell: Cell) -> None:
        """Have the calling thread be the training thread, and keep its book in this cell."""
        if self._cell is None:
            self._cell, self._words, now = cell, cell.pace, self._clock()
            kept = list(self._words)  # by a process that had the cell, and is gone
            gap = now - kept[BEGAN] - sum(kept[TOTALS : TOTALS + 7])
            if not kept[STATE] or gap < 0:
                kept, gap = [0] * PACE_WORDS, 0
                kept[BEGAN] = now
            kept[TOTALS + START] += gap
            kept[STATE], kept[LEFT] = 1 + START, 0
            for word in reversed(range(PACE_WORDS)):  # the state makes it count
                self._words[word] = kept[word]
            self._totals, self._since = kept[TOTALS : TOTALS + 7], now
            self._steps_before = kept[STEPS]
        self._thread, self._state = get_ident(), STEP

    def end(self) -> None:
        """The script is over, and nothing more is booked: what came after the last step may have been an evaluation."""
        if self.has_compiled_step:
            self._count_compiled()
        if self._thread <= 0:
            return
        if get_ident() == self._thread and self._is_gap_open:
            self._close_gap()
        self._words[LEFT] = self._clock()
        self._words = list(self._words)  # for the marks of handlers that come after this one
        self._thread, self._is_refused = NOT_OURS, True

    def stop(self) -> None:
        """This process is a fork of the one that is booked."""
        self._thread, self._is_refused = NOT_OURS, True
        self._forget()

    def _takes(self, thread: int) -> bool:
        """Tell whether a step in a thread that is not the training thread counts."""
        if self._thread > 0 and (self._state == BACKWARD or self._has_stepped or self._is_refused):
            return self._state == BACKWARD  # a thread of autograd's, for which the training thread waits
        if self._is_refused:
            return False
        cell = self._cell or Cell.inherited()
        if cell is None or not cell.claim():
            self._is_refused = True
            return False
        self.begin(cell)
        if type(threading.current_thread()).__name__ == "_DummyThread":  # autograd's
            self._thread = threading.main_thread().ident or thread
        return True

    # Marks

    # `enter` and `leave` are the same written twice: a call more takes 40 ns.

    def enter(self, state: int) -> int:
        """Begin a state; return the one before, for `leave`."""
        if get_ident() != self._thread:
            return NOT_OURS
        before = self._state
        if before != state and before != SAVE:  # a tuple takes 20 ns more
            self._state = state
            if self._has_stepped:
                now, totals, words = self._clock(), self._totals, self._words
                totals[before] = total = totals[before] + now - self._since
                self._since = now
                words[TOTALS + before] = total  # in this order: see pace_words
                words[STATE] = 1 + state
        return before

    def leave(self, before: int) -> None:
        """Go back to the state that `enter` returned."""
        state = self._state
        if before != state and before != NOT_OURS:
            self._state = before
            if self._has_stepped:
                now, totals, words = self._clock(), self._totals, self._words
                totals[state] = total = totals[state] + now - self._since
                self._since = now
                words[TOTALS + state] = total
                words[STATE] = 1 + before

    def leave_batch(self, before: int) -> None:
        """A batch has come, and `before` goes on."""
        if self.has_compiled_step:
            self._count_compiled()
        self.leave(before)
        if before != NOT_OURS and before != DATA:
            self._batch_ns, self._step_at_batch, self._data_at_batch = (
                self._since,
                self._totals[STEP],
                self._totals[DATA],
            )

    def enter_backward(self, state: int) -> int:
        """A backward pass begins; return the state before."""
        if self.has_compiled_step:
            self._count_compiled()
        before = self.enter(state)
        if before != NOT_OURS and before != self._state:  # else it is inside of another one, or of a save
            self._backward_ns, self._booked_before = self._since, self._totals[BACKWARD]
            if self._is_gap_open:
                self._close_gap()
        return before

    def leave_backward(self, before: int) -> None:
        """It has ended."""
        is_outermost = before != NOT_OURS and before != self._state
        self.leave(before)
        if is_outermost and self._has_stepped:
            own = self._totals[BACKWARD] - self._booked_before
            self._passes.append((self._backward_ns, self._since, own))

    def step_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer has made a step. Source of the arguments: torch.optim.optimizer, GlobalOptimizerPostHook."""
        if _is_compiling():
            self.has_compiled_step = True  # torch.compile repeats this store with each run of its graph
            return
        if get_ident() != self._thread and not self._takes(get_ident()):
            return
        key, steps, optimizers = id(optimizer), self._steps, self._optimizers
        count = steps + 1 if key == optimizers.leader else optimizers.count(key, steps)
        if count < steps:
            return
        now = self._clock()
        if count > steps:
            self._steps = count
            if self._has_stepped:
                took = now - self._counted_ns
                self._durations.append(took)
                if took < self._shortest:
                    self._shortest = took
            else:
                self._end_start(now)
            self._words[STEPS] = count + self._steps_before
            self._counted_ns = now
        step = self._totals[STEP]
        self._step_at_boundary = step + now - self._since if self._state == STEP else step
        self._data_at_boundary = self._totals[DATA]
        self._boundary_ns, self._is_gap_open = now, True

    def _count_compiled(self) -> None:
        self.has_compiled_step = False
        self.step_ended(_COMPILED, (), {})

    def _end_start(self, now: int) -> None:
        self._totals[START] += now - self._since
        self._since, self._has_stepped = now, True
        self._words[TOTALS + START] = self._totals[START]
        self._words[STATE] = 1 + self._state

    def _close_gap(self) -> None:
        """Have the gap since the last step be an evaluation, if it was long, and ended with a batch."""
        self._is_gap_open = False
        gap = self._batch_ns - self._boundary_ns
        if gap > EVAL_STEPS * self._shortest and gap > EVAL_STEPS * statistics.median(self._durations):
            self._words[STEP_MOVED] += self._step_at_batch - self._step_at_boundary
            self._words[DATA_MOVED] += self._data_at_batch - self._data_at_boundary

    # What the beat thread measures

    @property
    def passes(self) -> list[tuple[int, int, int]]:
        """The last backward passes: begin, end, and how much of it was booked as that."""
        return list(self._passes)

    def tell_blocked(self, permille: int) -> None:
        """Write in which share of its backward passes this rank waits for communication; -1: not known."""
        if permille >= 0:
            self._words[BACK] = 1 + permille

    def tell_async(self) -> None:
        """Write that the host runs ahead of its device."""
        self._words[ASYNC] = 1


def blocked_permille(passes: Sequence[tuple[int, int, int]], created_ns: Sequence[int]) -> int:
    """Return in which share of these backward passes the thread waited for its last collective; -1: not known.

    DDP sends its buckets as their gradients come, and blocks from the last one on. What a hook of its blocks by itself
    is booked as `blocked` already.

    Args:
        passes: begin, end, and what of it was booked as `backward`; by the same clock as
        created_ns: when collectives were called, all of them from the first of these on.
    """
    times, whole, blocked = sorted(created_ns), 0, 0
    for begin, end, own in passes:
        if times and times[0] <= begin:
            whole += own
            last = times[bisect_right(times, end) - 1]
            if last >= begin:
                blocked += min(own, max(0, own - (last - begin)))
    return 1000 * blocked // whole if whole else -1


book = ThreadBook()
os.register_at_fork(after_in_child=lambda: book.stop() if book._thread else None)


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Book what the calling thread does in this block as `save`."""
    before = book.enter(SAVE)
    try:
        yield
    finally:
        book.leave(before)


# What is wrapped


def wrap(module: ModuleType, saves: Sequence[str]) -> None:
    """Have the functions of a module be marks, before anybody takes them from it: at the end of its import.

    Args:
        saves: those that save; of torch itself, it is known.
    """
    for name in saves:
        _mark(module, name, SAVE)
    if module.__name__ == "torch":
        _wrap_torch(module)


def _wrap_torch(module: ModuleType) -> None:
    global _is_compiling
    _is_compiling = getattr(getattr(module, "compiler", None), "is_dynamo_compiling", _is_compiling)
    for method in (function for function in vars(ThreadBook).values() if hasattr(function, "__code__")):
        hide_from_dynamo(method, with_calls=True)
    register = getattr(_found("torch.optim.optimizer"), "register_optimizer_step_post_hook", None)
    if register is None:
        book.missing.append("register_optimizer_step_post_hook")
    else:
        register(book.step_ended)
    _mark(module.autograd, "backward", BACKWARD, enter=book.enter_backward, leave=book.leave_backward)
    loader = _found("torch.utils.data.dataloader")
    _mark(getattr(loader, "DataLoader", None), "__iter__", DATA)  # it starts the worker processes
    _mark(getattr(loader, "_BaseDataLoaderIter", None), "__next__", DATA, leave=book.leave_batch)
    _mark(_found("torch.serialization"), "save", SAVE)
    module.save = _found("torch.serialization").save  # type: ignore[attr-defined]
    if distributed := _found("torch._C._distributed_c10d"):
        _mark(distributed.Work, "wait", BLOCKED)


def _found(name: str) -> Any:
    """Return a module that torch's import has brought, whatever attribute torch then deleted; None: there is none."""
    return sys.modules.get(name)


def _mark(
    owner: Any,
    name: str,
    state: int,
    *,
    enter: Callable[[int], int] = book.enter,
    leave: Callable[[int], None] = book.leave,
) -> None:
    original = getattr(owner, name, None)
    if original is None:
        book.missing.append(name)
        return

    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return original(*args, **kwargs)
        before = enter(state)
        try:
            return original(*args, **kwargs)
        except BaseException as exc:
            drop_frame(exc)
            raise
        finally:
            leave(before)

    hide_from_dynamo(marked)
    setattr(owner, name, marked)
