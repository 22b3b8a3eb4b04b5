"""One optimizer step: its batch, the weight of its gradients, and what becomes of it when a collective fails inside.

    for step in state.steps(loader, total=10_000):
        with step as batch:                 # the batch of this rank
            loss = train_step(batch)
            step.log(loss=loss)

Where the sampler has a `micro_batch_size`, there may be several, and the last backward pass brings the ranks together:

        with step as batches:
            for batch in batches:
                loss_of(model(batch)).backward()      # a mean over this batch, as always
            optimizer.step()
            optimizer.zero_grad()

A step counts when its block ends: then the position moves, and checkpoints are taken between steps. So when
another rank is lost, the step is as if it had never begun: `StepLost` says so in one line and ends the process (it is a
SystemExit, so no `except Exception` goes on with half a step), and the run resumes from the last checkpoint.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from allranks.causes.book import find_loss
from allranks.model.errors import AllranksError, Exit, UsageError
from allranks.model.membership import Membership
from allranks.report.text import one_line, say
from allranks.state.resumed.experiment import Named
from allranks.state.resumed.sampler import Share
from allranks.state.resumed.step_values import Curves, own_curves
from allranks.state.saved.checkpoint import Checkpointer
from allranks.state.saved.reader import Loaded

PROGRESS_EVERY_S = 10.0

_CALLBACK = re.compile(r"^(?:Got the following error when running the callback: \w+: )+")
"""Before the error of a communication hook, once for each callback."""


class StepLost(AllranksError, SystemExit):
    """A collective failed inside a step: another rank is gone or unreachable. Uncaught, it ends the process with 1."""

    exit_code = Exit.USER_CODE
    code = int(exit_code)


def is_collective_failure(error: BaseException) -> bool:
    """Whether this is torch saying that a collective did not come to its end.

    It has types for what NCCL and its store say; for Gloo's words the causes are asked, which takes up to 0.1 s to
    read. A client of the script's own names more than the lost connection.
    """
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and find_loss(f"RuntimeError: {error}") is not None


def first_words(error: BaseException) -> str:
    """What a failed collective says, without Gloo's advice and what torch puts before it where a hook waited."""
    return one_line(_CALLBACK.sub("", str(error))).partition(". This is typically caused by")[0]


class Losses:
    """What becomes of a step in which a collective fails; as a context, of failures in the block.

    Args:
        membership: of this rank.
        checkpoints: where the step would be saved.
        step: returns how many steps are done.
        on_loss: called before this process ends because another rank was lost.
    """

    def __init__(
        self,
        membership: Membership,
        checkpoints: Checkpointer,
        *,
        step: Callable[[], int],
        on_loss: Callable[[], None] | None,
    ) -> None:
        self._membership, self._checkpoints, self._step, self._on_loss = membership, checkpoints, step, on_loss

    def lose(self, error: BaseException) -> None:
        """Where this is a failed collective, say once what becomes of the step and raise StepLost."""
        if not is_collective_failure(error):
            return
        if self._on_loss is not None:
            self._on_loss()
        who = f"rank {self._membership.rank}: step {self._step()}"
        said = f"{who} does not count, a collective failed; {self._checkpoints.kept}: {first_words(error)}"
        say(said)  # the report names who failed; this rank only waited for it
        raise StepLost(said) from error

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.lose(error)


class StepsLeft:
    """Says how much is left of a training that was resumed, once: when its loop begins, or when the session is left.

    Of a loop without an end it says so.

    Args:
        is_told: whether this rank says anything: rank 0 does.
    """

    def __init__(self, *, is_told: bool) -> None:
        self._is_told = is_told
        self._resumed: Named | None = None
        """From the load until it is said."""
        self._text = ""
        """For the end of the session, if no loop had a step to make."""

    def resumed(self, named: Named) -> None:
        """A checkpoint was loaded, from a directory that the user named so."""
        self._resumed = named

    def note(self, step: int, epochs_done: int, *, total: int | None, epochs: int | None) -> None:
        """A loop begins. One over epochs begins with loops that have nothing left."""
        if self._is_told and total is None and epochs is None:
            say("steps() has no total= and no epochs=: the loop goes on until `break` or state.stop()")
            self._is_told = False
        if self._resumed is None or (total is None and epochs is None):
            return
        is_over, self._text = describe_left(step, epochs_done, total=total, epochs=epochs)
        if is_over:
            self._text += ": the body of the loop does not run"
            if not self._resumed.is_below_agent:
                self._text += f"; to begin anew, {self._resumed.how('NEW_DIRECTORY')}"
        if total is not None or not is_over:
            self.say()

    def say(self) -> None:
        """Say it, if it was not said yet."""
        if self._text:
            say(self._text)
            self._text, self._resumed = "", None


def describe_left(step: int, epoch: int, *, total: int | None, epochs: int | None) -> tuple[bool, str]:
    """Return whether a training is over, and what is left of it in words.

    >>> describe_left(100, 2, total=150, epochs=None), describe_left(100, 3, total=None, epochs=3)
    ((False, '50 of 150 steps are left'), (True, '0 of 3 epochs are left'))
    """
    left = {"steps": (total, step), "epochs": (epochs, epoch)}
    known = {noun: (max(0, whole - done), whole) for noun, (whole, done) in left.items() if whole is not None}
    words = " and ".join(f"{count} of {whole} {noun}" for noun, (count, whole) in known.items())
    return any(count == 0 for count, _ in known.values()), f"{'at most ' * (len(known) > 1)}{words} are left"


def describe_resumed(loaded: Loaded, lines: Sequence[str], *, now: int, accumulates: bool) -> list[str]:
    """Return what to say of a checkpoint that was put back.

    Args:
        lines: what else was found in it.
        now: how many ranks go on.
        accumulates: gradients go on from step to step.
    """
    before = loaded.world_size
    sizes = f"; {before} ranks wrote it, {now} go on" * (before != now)
    said = [f"resumed at step {loaded.common['step']} from {loaded.directory}{sizes}", *lines]
    if accumulates and before != now:
        said += ["accumulated gradients start at 0: each rank has its own, and the number of ranks has changed"]
    if loaded.inner and now != before:
        few, many = sorted((before, now))
        which = f"rank {few}" if many - few == 1 else f"each of ranks {few} to {many - 1}"
        said += [
            f"{which} goes on with a copy of another rank's optimizer, which made local steps"
            if now > before
            else f"the optimizer of {which} made local steps of its own; its state is dropped"
        ]
    return said


@dataclass(slots=True, kw_only=True)
class Step:
    """One step of the training, on this rank; its block is entered once."""

    number: int
    """How many steps are done before it."""
    epoch: int
    """That its samples belong to."""
    share: Share | None
    """What the step means for this rank, where it is known."""
    batches: Sequence[Any]
    is_micro: bool
    """The sampler has a `micro_batch_size`, so there may be several batches."""
    progress: Progress
    """What `log` goes to."""
    begin: Callable[[Share | None, int, bool], None]
    """Told before each batch how its gradients are to be weighed."""
    done: Callable[[], None]
    """Told that the block was left without an exception."""
    lose: Callable[[BaseException], None]
    """What to do with an error inside; it raises StepLost where that is a failed collective."""
    is_open: bool = False
    """The block is running, or was left by an exception."""
    is_done: bool = False
    """The block was left without an exception: the step counts."""

    def log(self, **values: Any) -> None:
        """Show these on rank 0's terminal with the next line of progress, every ten seconds. `track(log=)` gets all,
        and below `allranks run`, `curves.jsonl` of the run.

        Args:
            values: numbers, or tensors of one number; of a GPU they are fetched only when somebody gets them.
        """
        self.progress.note(self.number + 1, values)

    def __enter__(self) -> Any:
        if self.is_open or self.is_done:
            raise UsageError(f"step {self.number} is entered twice: one `with step` block is one step")
        self.is_open = True
        if self.is_micro:
            return self._each()
        self.begin(self.share, 0, True)
        return self.batches[0]

    def __getitem__(self, key: object) -> NoReturn:
        raise UsageError("a step is not its batch: write `with step as batch:`, and use the batch in that block")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a step has no {name!r}; its batch is what `with step as batch:` gives")

    def _each(self) -> Iterator[Any]:
        last = len(self.batches) - 1
        for place, batch in enumerate(self.batches):
            self.begin(self.share, place, place == last)
            yield batch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.lose(error)
            return
        self.is_open, self.is_done = False, True
        self.done()


Sink = Callable[[int, dict[str, float]], object]


def sink_of(log: Any) -> Sink | None:
    """Return what takes the number of a step and its values.

    Args:
        log: a run of W&B or the module itself, a SummaryWriter of TensorBoard, the module mlflow, or such a function;
            None: nothing.
    Raises:
        UsageError: it is none of them.
    """
    if hasattr(log, "add_scalar"):
        return lambda step, values: [log.add_scalar(name, value, step) for name, value in values.items()]
    if hasattr(log, "log_metrics"):
        return lambda step, values: log.log_metrics(values, step=step)
    if hasattr(log, "log"):
        return lambda step, values: log.log(values, step=step)
    if log is not None and not callable(log):
        raise UsageError(f"track(log={log!r}): expected a run of W&B, a SummaryWriter, mlflow, or f(step, values)")
    return log  # type: ignore[no-any-return]


@dataclass(slots=True, kw_only=True)
class Progress:
    """Rank 0's lines of progress."""

    is_shown: bool
    """This is rank 0."""
    total: int | None
    """Steps of the whole run, where it is known."""
    sink: Sink | None = None
    """What else gets the values."""
    curves: Curves | None = field(default_factory=own_curves)
    """Rank 0's file of values; None: no agent has started this process."""
    _values: dict[str, Any] = field(default_factory=dict)
    _since: tuple[int, float] | None = None

    def note(self, step: int, values: dict[str, Any]) -> None:
        """Remember what to show, and hand it on; `step` steps are done with this one."""
        self._values.update(values)
        if self.is_shown and self.curves is not None:
            self.curves.note(step, values)
        if self.sink is not None:
            self.sink(step, {name: _number(value) for name, value in values.items()})

    def reach(self, step: int) -> None:
        """Show a line where it is time to; `step` steps are done."""
        now_s = time.monotonic()
        if self._since is None:
            self._since = step, now_s
        first_step, first_s = self._since
        if not self.is_shown or now_s - first_s < PROGRESS_EVERY_S or step == first_step:
            return
        rate = (step - first_step) / (now_s - first_s)
        of = f" of {self.total}" if self.total is not None else ""
        values = "".join(f", {name} {_number(value):.5g}" for name, value in self._values.items())
        say(f"step {step}{of}, {rate:.3g} steps/s{values}")
        self._since = step, now_s


def _number(value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"step.log({value!r}): expected a number, or a tensor of one number") from None
