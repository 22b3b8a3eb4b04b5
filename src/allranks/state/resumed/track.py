"""What a checkpoint holds, when it is taken, and where the training goes on after a restart.

    state = s.track(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    for step in state.steps(loader, total=10_000): ...

A step boundary, in this order:

1  the agent is told which step it is, and which checkpoint is complete;
2  the ranks agree whether they save or leave here              (state.resumed.agree)
3  the state is copied; a process beside this one writes it     (state.saved.checkpoint)
4  where the agent ordered to leave: wait until it is written, and end with 0
5  the next batch is fetched                                    (state.resumed.feed)

So a checkpoint holds no fetched batch and no half of a step. After a restart the same happens from 5 on, with all
generators of random numbers put back after the loader has been opened, since that draws from them.

At another number of ranks the order of samples, the model and the optimizer go on as they were, its learning rate
included; the generators begin anew from the script's own seed and the step.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from allranks.model.errors import UsageError
from allranks.report.text import say
from allranks.state.resumed import rng
from allranks.state.resumed.agree import Agreement, Wish
from allranks.state.resumed.feed import Feed
from allranks.state.resumed.pace import Pace
from allranks.state.resumed.sampler import Share, mix
from allranks.state.resumed.scaling import GradientWeight, gradient_factor
from allranks.state.resumed.steps import Progress, Step, StepLost, first_words, is_collective_failure
from allranks.state.resumed.telling import Cell, Telling
from allranks.state.saved.checkpoint import Checkpointer, Stall


def track(
    parts: Mapping[str, Any],
    *,
    directory: Path,
    every: int | None,
    rank: int,
    world_size: int,
    cell: Cell | None,
    device: torch.device,
    on_exit: contextlib.ExitStack,
    on_loss: Callable[[], None],
    pace: Pace | None = None,
) -> Tracked:
    """Return the state of this training, as the newest whole checkpoint has it; all ranks call it together.

    Args:
        parts: what a checkpoint holds, by name.
        directory: of the checkpoints.
        every: steps between them; None: the cadence decides.
        rank: of this process.
        world_size: number of ranks.
        cell: how to speak with the agent; None: there is none.
        device: of this rank.
        on_exit: of the session; what is being written is waited for there.
        on_loss: called before this process ends because another rank was lost.
        pace: when a checkpoint is due, on rank 0 where there is no `every`.
    """
    store = _get_default_store() if world_size > 1 else None
    checkpoints = Checkpointer(directory, rank=rank, world_size=world_size, store=store)
    made = Tracked(
        parts,
        checkpoints=checkpoints,
        rank=rank,
        world_size=world_size,
        every=every,
        cell=cell,
        device=torch.device("cpu") if "gloo" in dist.get_backend_config() else device,
        on_loss=on_loss,
        pace=pace,
    )

    def close(kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or (issubclass(kind, SystemExit) and not issubclass(kind, StepLost)):
            checkpoints.close()  # else the writer ends what it has, and nobody waits for ranks that are gone

    on_exit.push(close)
    made.load()
    return made


class Tracked:
    """The state of one training, on this rank; see `Session.track`.

    Args:
        parts: anything with `state_dict` and `load_state_dict`, the same on all ranks.
        checkpoints: where it is kept.
        rank: of this process.
        world_size: number of ranks.
        every: steps between checkpoints; None: the cadence decides.
        cell: how to speak with the agent; None: there is none.
        device: where the default process group takes tensors from.
        on_loss: called before this process ends because another rank was lost.
        pace: when a checkpoint is due; None: this rank does not say.
    Raises:
        UsageError: a part has no state.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        *,
        checkpoints: Checkpointer,
        rank: int,
        world_size: int,
        every: int | None = None,
        cell: Cell | None = None,
        device: torch.device | None = None,
        on_loss: Callable[[], None] | None = None,
        pace: Pace | None = None,
    ) -> None:
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise UsageError(f"track({name}={type(part).__name__}): expected something with state_dict")
        self.step = 0
        """How many steps are done, over all restarts."""
        self.checkpoints = checkpoints
        self._parts = {name: _inner(part) for name, part in parts.items()}
        self._rank = rank
        self._world_size = world_size
        self._every = every
        self._telling = Telling(cell)
        self._agreement = Agreement(is_leader=rank == 0, device=device or torch.device("cpu"))
        self._on_loss = on_loss
        self._pace = pace
        modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        self._ddp = [module for module in modules.values() if isinstance(module, DistributedDataParallel)]
        self._not_weighed = [name for name, module in modules.items() if world_size > 1 and module not in self._ddp]
        weighed = [module for name, module in modules.items() if name not in self._not_weighed]
        self._weight = GradientWeight(parameter for module in weighed for parameter in module.parameters())
        self._saved_step: int | None = None
        self._is_save_wanted = False
        self._feed: Feed | None = None
        self._loaded: _Place | None = None

    def load(self) -> None:
        """Put everything back as the newest whole checkpoint has it; all ranks call it together.

        Raises:
            UsageError: it holds other parts than are tracked.
        """
        shaped = self._shape_sharded_optimizers()
        loaded = self.checkpoints.load(self._common())
        if loaded is None:
            for optimizer in shaped:
                optimizer.state.clear()
            return
        kept = loaded.common["parts"]
        if kept.keys() != self._parts.keys():
            raise UsageError(
                f"{loaded.directory} holds {', '.join(sorted(kept)) or 'nothing'}, but track() names "
                f"{', '.join(sorted(self._parts)) or 'nothing'}; track the same, or begin with an empty directory"
            )
        for name, part in self._parts.items():
            part.load_state_dict(kept[name])
        self.step = self._saved_step = loaded.common["step"]
        self._loaded = _Place(loaded.per_rank, loaded.common["feed"])
        is_same_size = loaded.per_rank is not None
        if is_same_size and torch.get_num_threads() != loaded.common["threads"]:
            torch.set_num_threads(loaded.common["threads"])  # sums are cut into as many pieces as there are threads
        if self._rank == 0:
            sizes = "" if is_same_size else f"; {loaded.world_size} ranks wrote it, {self._world_size} go on"
            say(f"resumed at step {self.step} from {loaded.directory}{sizes}")

    def _shape_sharded_optimizers(self) -> list[torch.optim.Optimizer]:
        """Give optimizers of sharded parameters (FSDP2) the state that a step makes, for the shards to go into."""
        modules = [part for part in self._parts.values() if isinstance(part, torch.nn.Module)]
        shaped = []
        for part in self._parts.values():
            if isinstance(part, torch.optim.Optimizer) and not part.state and _has_shards(part):
                get_optimizer_state_dict(torch.nn.ModuleList(modules), part)
                shaped.append(part)
        return shaped

    def save_now(self) -> None:
        """Ask for a checkpoint: all ranks save at their next common boundary, whoever of them asked."""
        self._is_save_wanted = True

    def steps(self, loader: Any, *, total: int | None = None, epochs: int | None = None) -> Iterator[Step]:
        """Yield the steps that are still to be done; the last state is saved when they are.

        Args:
            loader: DataLoader over our Sampler; else see resumed.feed.
            total: steps of the whole run, restarts included.
            epochs: of the whole run. With both, what comes first.
        Raises:
            UsageError: the loader's sampler is not tracked, or a block was left by an exception that was caught.
            SystemExit: with 0, after a checkpoint: the agent ordered to leave.
        """
        feed = Feed(loader)
        if feed.sampler is not None and not any(feed.sampler is part for part in self._parts.values()):
            raise UsageError("the loader's sampler is not tracked, so its position would be lost: track(sampler=...)")
        if total is not None and self.step >= total:
            return
        if feed.sampler is not None and self._not_weighed and feed.sampler.global_batch_size % self._world_size:
            raise UsageError(
                f"{', '.join(self._not_weighed)} is not in DDP, so only even slices can be averaged: global_batch_size "
                f"is {feed.sampler.global_batch_size} at {self._world_size} ranks; take a multiple, or s.ddp()"
            )
        self._resume(feed)
        self._feed = feed
        progress = Progress(is_shown=self._rank == 0, total=total)
        self._telling.phase("training")
        while True:
            with self._losing():
                self._boundary()
            progress.reach(self.step)
            if total is not None and self.step >= total:
                break
            share = feed.share()
            batches = feed.fetch(self.step, epochs=epochs)
            if batches is None:
                break
            step = Step(
                self.step,
                epoch=feed.epoch,
                batches=batches,
                share=share,
                is_micro=feed.sampler is not None and feed.sampler.micro_batch_size is not None,
                weigh=self._weigh,
                progress=progress,
                lose=self._lose,
            )
            yield step
            if not step.is_done:
                raise UsageError(f"step {step.number} was not done: use `with step as batch`, and let its errors pass")
            feed.consume()
            self.step += 1
        with self._losing():
            if self._saved_step != self.step:
                self._save()
            self.checkpoints.wait()
            self._telling.save_done(self.checkpoints.last_complete)
        self._telling.finish()

    def _resume(self, feed: Feed) -> None:
        """Open the loader where the checkpoint was taken, and put the generators back."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        if loaded.own is not None:
            feed.load_state_dict(loaded.own["feed"])
            feed.open(self.step)
            rng.restore(loaded.own["rng"])
            return
        if feed.sampler is None:
            feed.load_state_dict(loaded.feed | {"used": 0})
            if self._rank == 0:
                say(f"epoch {feed.epoch} begins again: only allranks' Sampler has an order for any number of ranks")
        feed.open(self.step)
        rng.seed_all(mix(torch.initial_seed(), self.step))

    # A boundary

    def _boundary(self) -> None:
        self._telling.save_done(self.checkpoints.last_complete)
        order = self._telling.reach(self.step)
        is_checkpoint_due = self._pace is not None and self._pace.is_due()
        wish = Wish(
            saves=self._is_save_wanted or is_checkpoint_due or order is not None,
            leaves=order is not None and order.leaves,
        )
        agreed = self._agreement.reach(self.step, wish)
        is_in_turn = self._every is not None and self.step > 0 and self.step % self._every == 0
        if (agreed.saves or agreed.leaves or is_in_turn) and self._saved_step != self.step:
            stall = self._save()
            if self._pace is not None and not agreed.leaves:
                self._pace.save_done(stall, self.checkpoints.write_s)
        if agreed.saves:
            self._is_save_wanted = False
            self._telling.carry_out(order)
        if agreed.leaves:
            self._leave(order.why if order is not None else "another rank was told to")

    def _save(self) -> Stall:
        self._telling.phase("saving")
        per_rank = {"rng": rng.capture(), "feed": self._feed.state_dict() if self._feed else None}
        stall = self.checkpoints.save(self.step, self._common(), per_rank)
        self._saved_step = self.step
        self._telling.phase("training")
        return stall

    def _common(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "threads": torch.get_num_threads(),
            "feed": {"epoch": self._feed.epoch if self._feed else 0},
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }

    def _leave(self, why: str) -> None:
        self._telling.phase("leaving")
        is_written = self.checkpoints.wait()
        self._telling.save_done(self.checkpoints.last_complete)
        if self._rank == 0:
            at = self.checkpoints.last_complete
            kept = f"the checkpoint of step {at} is complete" if at is not None else "there is no checkpoint"
            failed = "" if is_written else ", a newer one could not be written"
            say(f"leaving at step {self.step}: {why}; {kept}{failed}")
        raise SystemExit(0)

    # Inside a step

    def _weigh(self, share: Share | None, part: int, is_last: bool) -> None:
        if share is not None:
            self._weight.set(gradient_factor(share.parts[part], share.total, self._world_size))
        for module in self._ddp:
            module.require_backward_grad_sync = is_last

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            self._lose(exc)
            raise

    def _lose(self, error: BaseException) -> None:
        """Where this is a failed collective, say once what becomes of the step and raise StepLost."""
        if not is_collective_failure(error):
            return
        if self._on_loss is not None:
            self._on_loss()
        at = self.checkpoints.last_complete
        kept = f"the checkpoint of step {at} is complete" if at is not None else "no checkpoint is complete"
        said = f"rank {self._rank}: step {self.step} does not count, a collective failed; {kept}: {first_words(error)}"
        print(f"error: {said}", file=sys.stderr, flush=True)
        raise StepLost(said) from error


class _Place(NamedTuple):
    """What a checkpoint says of where the data and the generators were."""

    own: Any
    """This rank's; None where another number of ranks wrote it."""
    feed: dict[str, Any]


def _has_shards(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"])


def _inner(part: Any) -> Any:
    """The module itself, so that its names are the same with and without DDP around it."""
    return part.module if isinstance(part, DistributedDataParallel) else part
