"""What a checkpoint holds, when it is taken, and where the training goes on after a restart.

    state = s.track(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    for step in state.steps(loader, total=10_000): ...

A step boundary, in this order:

1  the agent is told which step it is, and which checkpoint is complete;
2  the ranks agree whether they save or leave here              (state.resumed.agree)
3  the state is copied; a process beside this one writes it     (state.saved.checkpoint)
4  where the agent ordered to leave: wait until it is written, and end with 0
5  the next batch is fetched                                    (state.resumed.feed)
6  now and then, if asked for, more ranks compute its gradients (state.truth.replay)

A step is done when its `with` block ends. The steps of a loop that was left by `break` are saved when the session is
left. So a checkpoint holds no fetched batch and no half of a step. After a restart the same happens from 5 on, with all
generators of random numbers put back after the loader has been opened, since that draws from them.

At another number of ranks the order of samples, the model and the optimizer go on as they were, its learning rate
included; the generators begin anew from the script's own seed and the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from allranks.model.errors import SetupError, UsageError
from allranks.report.refusal import refusing
from allranks.report.text import say
from allranks.state.resumed import experiment, rng
from allranks.state.resumed.agree import Agreement, Wish
from allranks.state.resumed.averaging import Averaging
from allranks.state.resumed.best import Best
from allranks.state.resumed.buckets import Compressors, Wrapped
from allranks.state.resumed.feed import Feed
from allranks.state.resumed.sampler import mix
from allranks.state.resumed.save_clock import SaveClock
from allranks.state.resumed.steps import Losses, Progress, Step, StepsLeft, describe_resumed, first_words, sink_of
from allranks.state.resumed.telling import Telling
from allranks.state.resumed.tracked_parts import Parts
from allranks.state.saved.checkpoint import Checkpointer, Stall
from allranks.state.truth.comparing import Comparing
from allranks.state.truth.corruption import OnCorruption
from allranks.state.truth.replay import Replay
from allranks.state.truth.trace import Trace

LEAVE_S = 120.0
"""How long a rank that leaves the session after a `break` waits for the others, to save together."""
LEAVING_PATIENCE_S = 30.0
"""How long a save that an order to leave asks for waits for the save before it: the time limit is near."""


class Tracked:
    """The state of one training, on this rank; what is not listed here is as for `Session.track`.

    Args:
        checkpoints: where it is kept.
        cell: how to speak with the agent; None: there is none.
        device: where the default process group takes tensors from.
        on_corruption: what follows where replicas differ, as for `Session.track`.
        replay: f(batch), which does forward and backward; with `replay_every`, as for `Session.track`.
        on_loss: called before this process ends because another rank was lost.
        pace: when a checkpoint is due; None: this rank does not say.
        wrapped: modules in DDP, whose buckets stay as they are in the checkpoint.
    Raises:
        UsageError: a part has no state, or one that no checkpoint can hold, or steps of it cannot be replayed.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        *,
        checkpoints: Checkpointer,
        every: int | None = None,
        keep_best: tuple[str, str] | None = None,
        log: Any = None,
        accumulates: bool = False,
        cell: Any = None,
        device: torch.device | None = None,
        on_corruption: str | None = None,
        replay: Callable[[Any], object] | None = None,
        replay_every: int | None = None,
        on_loss: Callable[[], None] | None = None,
        pace: SaveClock | None = None,
        wrapped: Wrapped | None = None,
    ) -> None:
        self.step = 0
        """How many steps are done, over all restarts. A step is done when its `with` block ends."""
        self.checkpoints, self._parts = checkpoints, Parts(parts)
        self._experiment = experiment.describe()
        self._best = Best(checkpoints.directory, keep_best)
        self._membership = membership = checkpoints.membership
        self._log = sink_of(log) if membership.is_leader else None
        self._every, self._accumulates = every, accumulates
        self._telling = Telling(cell, log=log, is_leader=membership.is_leader)
        self._agreement = Agreement(membership, device=device or torch.device("cpu"))
        self._comparing = Comparing(
            self._parts,
            checkpoints,
            policy=OnCorruption(on_corruption if on_corruption is not None else "roll-back"),
            talks=self._agreement,
            say=say if membership.is_leader else lambda _: None,
        )
        if on_corruption and membership.world_size == 1:
            say(f"on_corruption={on_corruption!r} has no effect: one rank has no replica, a rank with the same state")
        self._trace = Trace(checkpoints.directory, membership, self._experiment)
        self._pace, self._wrapped = pace, wrapped or Wrapped()
        self._averaging, self._compressors = Averaging(parts, membership), Compressors(parts)
        self._losses = Losses(membership, checkpoints, step=lambda: self.step, on_loss=on_loss)
        asked = replay is not None or replay_every is not None
        self._replay = Replay(replay, replay_every, self._parts, self._averaging, self._comparing) if asked else None
        self._epochs = 0
        """How many epochs are over, and `after_epoch` was called for them."""
        self._saved: tuple[int, int] | None = None
        """Step and epochs of the last save."""
        self._is_save_wanted = self._is_stop_wanted = self._is_stopped = False
        self._is_looping = self._is_leave_wanted = self._is_held = self._is_save_late = False
        self._feed: Feed | None = None
        self._current: Step | None = None
        self.left = StepsLeft(is_told=membership.is_leader)
        self.is_unsaved = False
        """The save after the last step of a loop failed."""
        self._loaded: tuple[Any, dict[str, Any]] | None = None
        """This rank's own (None where another number of ranks wrote it) and the common place in the data."""

    def load(self, *, partial: bool = False, named: experiment.Named = experiment.Named()) -> None:  # noqa: B008
        """Put everything back as the newest whole checkpoint has it; all ranks call it together.

        Args:
            named: how the user named the directory.
        Raises:
            UsageError: it holds other parts than are tracked, or is another experiment's.
        """
        # On several nodes rank 0 reads for all; ranks of one node share the page cache (docs/evidence/benchmarks.md).
        share = self._agreement.give if self._membership.num_nodes > 1 else None
        loaded = self.checkpoints.load({"parts": self._parts.like()}, share=share)
        if loaded is None:
            if self._membership.is_leader and not named.is_below_agent:
                say(f"begins at step 0, and saves checkpoints in {self.checkpoints.directory}")
            return
        kept, why, lines = loaded.common["parts"], "", list[str]()
        state = self._parts.state()  # on all ranks: it may be gathered from them
        if self._membership.is_leader:
            why, lines = experiment.compare(loaded.directory, loaded.common, state, named=named, is_partial=partial)
        if why := self.checkpoints.ranks.tell_all("whose checkpoint it is", why):
            raise UsageError(why)
        self._wrapped.keep(loaded.common.get("buckets"))
        self._parts.load(kept)
        self.step, self._epochs = self._saved = loaded.common["step"], loaded.common["epochs"]
        self._loaded, is_same_size = (loaded.per_rank, loaded.common["feed"]), loaded.per_rank is not None
        lines += self._compressors.load(loaded.per_rank, num_ranks=loaded.world_size)
        self._parts.load_inner(loaded.inner or {})
        if is_same_size and (gradients := loaded.per_rank.pop("gradients", None)) and self._accumulates:
            self._parts.load_gradients(gradients)
        if is_same_size and torch.get_num_threads() != loaded.common["threads"]:
            torch.set_num_threads(loaded.common["threads"])  # sums are cut into as many pieces as there are threads
        self._comparing.loaded(self.step, kept.keys(), loaded.common)
        if self._membership.is_leader:
            self.left.resumed(named)
            for line in describe_resumed(loaded, lines, now=self._membership.world_size, accumulates=self._accumulates):
                say(line)

    def save_now(self) -> None:
        """Ask for a checkpoint: all ranks save at their next common boundary, whoever of them asked."""
        self._is_save_wanted = True

    def save(self, **values: Any) -> bool:
        """Save now, and return whether the checkpoint is complete; all ranks call it together, between two steps.

        Args:
            values: the number that `keep_best` names. Rank 0's decides.
        Raises:
            UsageError: it is called inside of a step, or with another value.
        """
        self._telling.check_session("save")
        self._best.check(values)
        if self._current is not None and self._current.is_open:
            raise UsageError(f"state.save() inside of step {self.step}: call it after the step's `with` block")
        with self._losses:
            self._save()
            is_complete = self._wait()
        if is_complete and self._membership.is_leader:
            self._best.consider(self.step, values)
        return is_complete

    def stop(self) -> None:
        """End the training early: all ranks leave `steps()` at their next common boundary, whoever of them asked."""
        self._is_stop_wanted = True

    def steps(
        self,
        loader: Any,
        *,
        total: int | None = None,
        epochs: int | None = None,
        after_epoch: Callable[[int], object] | None = None,
    ) -> Iterator[Step]:
        """Yield the steps that are still to be done; the last state is saved when they are.

        Args:
            loader: DataLoader over our Sampler; else see resumed.feed.
            total: steps of the whole run, restarts included.
            epochs: of the whole run. With both, what comes first.
            after_epoch: called on all ranks when an epoch is over, with its number, before the state is saved.
        Raises:
            UsageError: the loader's sampler is not tracked, or a block was left by an exception that was caught.
            SetupError: another run that lives saves in the same directory.
            SystemExit: with 0, after a checkpoint: the agent ordered to leave.
        """
        with refusing():
            yield from self._steps(loader, total, epochs, after_epoch)

    def _steps(self, loader: Any, total: int | None, epochs: int | None, after_epoch: Any) -> Iterator[Step]:
        self._telling.check_session("steps")
        feed = self._feed if self._feed and self._feed.loader is loader else Feed(loader, self._feed)
        if feed.sampler is not None and not any(feed.sampler is part for part in self._parts.live.values()):
            raise UsageError("the loader's sampler is not tracked, so its position would be lost: track(sampler=...)")
        self.left.note(self.step, self._epochs, total=total, epochs=epochs)
        if self._is_stopped or (total is not None and self.step >= total):
            self._telling.finish()
            return
        if feed.sampler is not None:
            self._averaging.check(feed.sampler)
        self._hold()
        self._telling.finish(is_finished=False)
        self._resume(feed)
        self._feed, whole = feed, feed.count_steps(self.step, total=total, epochs=epochs)
        progress = Progress(is_shown=self._membership.is_leader, total=whole, sink=self._log)
        self._telling.begin(whole if self._membership.is_leader else None)  # one rank tells it for all
        self._is_looping = True
        while True:
            self._end_epochs(feed, after_epoch)
            with self._losses:
                self._boundary()
            progress.reach(self.step)
            if self._is_stopped or (total is not None and self.step >= total):
                break
            share = feed.share()
            batches = feed.fetch(self.step, epochs=epochs, ended=lambda: self._end_epochs(feed, after_epoch))
            if batches is None:
                break
            self._trace.batch(batches)
            if self._replay is not None:
                with self._losses:
                    self._replay.fetched(self.step, batches[0])
            self._current = step = Step(
                number=self.step,
                epoch=feed.epoch,
                batches=batches,
                share=share,
                is_micro=feed.sampler is not None and feed.sampler.micro_batch_size is not None,
                begin=self._averaging.begin,
                done=self._step_done,
                progress=progress,
                lose=self._losses.lose,
            )
            yield step
            if not step.is_done:
                raise UsageError(f"step {step.number} was not done: use `with step as batch`, and let its errors pass")
        self._is_looping = False
        self._save_last()
        self._telling.finish()

    def ask_to_leave(self) -> bool:
        """Have all ranks save and leave at their next common boundary; False where this rank is in no `steps()`."""
        self._is_leave_wanted = self._is_looping
        return self._is_looping

    def leave(self) -> None:
        """Save the steps of a loop that was left by `break`; all ranks call it when they leave the session."""
        self._is_looping = False
        saved = self._saved or (0, 0)
        if self._feed is None or self._place == saved:
            return
        why = ""
        self._telling.phase("leaving")
        if self._current is not None and self._current.is_open:
            why = f"step {self.step} was left by an exception"
        elif self._feed.is_ahead:
            why = f"the loader has given the batch of step {self.step}, which was not made, and cannot go back"
        word = f"step {self.step}{why and ', '}{why}"
        try:
            why = self.checkpoints.ranks.meet("leave the session", word, LEAVE_S) or why
        except RuntimeError as exc:
            why = f"rank 0 is gone ({first_words(exc)})"
        if why and (self._membership.is_leader or why.startswith("rank 0")):
            say(f"steps {saved[0] + 1} to {self.step} are not saved: {why}")
        elif not why:
            self._save_last()

    def _resume(self, feed: Feed) -> None:
        """Open the loader where the checkpoint was taken, and put the generators back."""
        if self._loaded is None:
            return
        (own, common), self._loaded = self._loaded, None
        if own is not None:
            if own["feed"] is not None:  # else it was saved before the first step
                feed.load_state_dict(own["feed"])
            feed.open(self.step)
            rng.restore(own["rng"])
            return
        if feed.sampler is None and common is not None:
            feed.load_state_dict(common | {"used": 0})
            if self._membership.is_leader:
                say(f"epoch {feed.epoch} begins again: only allranks' Sampler has an order for any number of ranks")
        feed.open(self.step)
        rng.seed_all(mix(torch.initial_seed(), self.step))

    def _end_epochs(self, feed: Feed, after_epoch: Callable[[int], object] | None) -> None:
        while self._epochs < feed.epoch:
            self._epochs += 1  # first: a save inside of the call holds what was done in it
            if after_epoch is not None:
                with self._losses:
                    after_epoch(self._epochs - 1)

    # A boundary

    @property
    def _place(self) -> tuple[int, int]:
        return self.step, self._epochs

    def _boundary(self) -> None:
        self._telling.save_done(self.checkpoints.last_complete, self.checkpoints.write_s)
        order = self._telling.reach(self.step)
        wish = Wish(
            saves=(self._pace is not None and self._pace.is_due()) or self._is_save_wanted or order is not None,
            leaves=self._is_leave_wanted or (order is not None and order.leaves),
            stops=self._is_stop_wanted,
            looks=self._comparing.looks(self.step),
            words=self._comparing.words(self.step, is_synchronized=self._averaging.is_synchronized),
        )
        agreed = self._agreement.reach(self.step, wish)
        if self._comparing.heard(self.step, agreed.words, looks=agreed.looks):
            self._note()
        self._is_stopped |= agreed.stops
        is_in_turn = self._every is not None and self.step > 0 and self.step % self._every == 0
        is_due = agreed.saves or agreed.leaves or is_in_turn or self._is_save_late
        self._is_save_late = is_due and not agreed.leaves and not self._averaging.is_synchronized
        if is_due and not self._is_save_late and self._saved != self._place:
            stall = self._save(LEAVING_PATIENCE_S if agreed.leaves else None)
            if self._pace is not None and not agreed.leaves:
                self._pace.save_done(stall, self.checkpoints.write_s)
        if agreed.saves:
            self._is_save_wanted = False
            self._telling.carry_out(order)
        if agreed.leaves:
            own = "SIGTERM" if self._is_leave_wanted else "another rank was told to"
            self._leave(order.why.partition(":")[0] if order is not None else own)

    def _hold(self) -> None:
        """Before the first step; who only loads and evaluates is in nobody's way."""
        if not self._is_held and (why := self.checkpoints.hold()):
            raise SetupError(why)
        self._is_held = True

    def _step_done(self) -> None:
        assert self._feed is not None
        self._feed.consume()
        self.step += 1

    def _save(self, patience_s: float | None = None) -> Stall:
        with self._telling.saving(then="training"):
            self._averaging.synchronize()  # for a save that cannot wait: a call of `save`, an order to leave, the end
            self._comparing.compare_now(self.step)
            per_rank = {"rng": rng.capture(), "feed": self._feed.state_dict() if self._feed else None}
            per_rank |= {"owed": self._compressors.state()} | self._parts.own(accumulates=self._accumulates)
            common = {
                "step": self.step,
                "epochs": self._epochs,
                "threads": torch.get_num_threads(),
                "experiment": self._experiment,
                "feed": {"epoch": self._feed.epoch if self._feed else 0},
                "parts": self._parts.state(),
                "buckets": self._wrapped.state(),
                **self._comparing.state(),
            }
            stall = self.checkpoints.save(
                self.step,
                common,
                per_rank,
                agree=lambda can: not self._agreement.largest(not can)[0],
                patience_s=patience_s,
                about=self._comparing.about,
                refusal=self._comparing.refuse_to_save(),
            )
            self._saved = self._place
            self._note(is_saved=True)
            return stall

    def _save_last(self) -> None:
        with self._losses:
            if self._saved != self._place:
                self._save()
            self.is_unsaved = not self._wait()

    def _note(self, *, is_saved: bool = False) -> None:
        seen = self._comparing
        about = {"healed": len(seen.healed), "is_sharded": seen.is_sharded}
        self._trace.note(self.step, seen.numbers, is_saved=is_saved, **about)

    def _wait(self) -> bool:
        self._trace.flush()
        with self._telling.saving():
            is_written = self.checkpoints.wait()
        self._telling.save_done(self.checkpoints.last_complete, self.checkpoints.write_s)
        return is_written

    def _leave(self, why: str) -> None:
        self._telling.phase("leaving")
        is_written = self._wait()
        if self._membership.is_leader:
            failed = "" if is_written else ", a newer one could not be written"
            say(f"leaving at step {self.step}: {why}; {self.checkpoints.kept}{failed}")
        raise SystemExit(0)
