"""Saves and loads the state of a run, so that all ranks resume from the same checkpoint.

    with Checkpointer("runs/17/checkpoints", membership, store=store) as checkpoints:
        if loaded := checkpoints.load():                     # all ranks together, the same one on all
            model.load_state_dict(loaded.common["model"])
            ...
        for step in ...:
            checkpoints.save(step, {"model": model.state_dict(), "step": step}, {"rng": torch.get_rng_state()})

All ranks call `load` and `save` at the same steps, in the same order. None of them is a collective.

A save, on every rank:
    1  pack.py      lays the values out: of `common` rank 0 everything, the others only their shards (sharded.py)
    2  snapshot.py  copies them to shared memory; all that holds up the training
    3  writer_link.py      hands them to writer.py, a process of its own that outlives this one until they are written
    4  commit.py    makes all ranks' parts one checkpoint, in one rename; tidy.py deletes old ones
A load: reader.py on every rank, rank 0 decides (consensus.py).
"""

from __future__ import annotations

import itertools
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

from allranks.host.slurm_job import is_running
from allranks.model.errors import SetupError, UsageError
from allranks.model.membership import ALONE, Membership
from allranks.report.text import say as say_to_stderr
from allranks.state.saved.commit import PATIENCE_S, explain
from allranks.state.saved.consensus import NOTICE_S, Consensus
from allranks.state.saved.holding import Holding
from allranks.state.saved.manifest import Damaged
from allranks.state.saved.owner import Owner, identify, refuse
from allranks.state.saved.pack import Packer, Piece, StateError
from allranks.state.saved.parts import list_checkpoints
from allranks.state.saved.reader import Loaded, await_writers, read_checkpoint
from allranks.state.saved.snapshot import Snapshot
from allranks.state.saved.tidy import KEEP_AT_LEAST, roll_back
from allranks.state.saved.writer_link import WriterGoneError, WriterLink

__all__ = ["CheckpointError", "Checkpointer", "Loaded", "Stall", "StateError"]

_numbers = itertools.count()
"""Instance counter for store keys; all ranks must construct their checkpointers in the same order."""
GIVEN_UP_S = 15.0
"""How long the end of a run waits for the save before one that was given up, or a roll-back for the only one."""


class CheckpointError(SetupError):
    """There are checkpoints, or may be, and none of them can be read: beginning anew in silence would be worse."""


@dataclass(frozen=True, slots=True)
class Stall:
    """How long one `save` held up the training thread."""

    copy_s: float
    """Walking the state and copying it to shared memory: what an interval between checkpoints is reckoned with."""
    waited_s: float
    """Waiting for the save before it, where that was still being written; and for this one with `wait=True`."""

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.copy_s + self.waited_s


class Checkpointer:
    """Saves and loads the state of one run in one directory, which all ranks see.

    A failed save never stops the training: it is said in one line, and the older checkpoints stay as they are.
    """

    def __init__(
        self,
        directory: Path | str,
        membership: Membership = ALONE,
        *,
        store: Store | None = None,
        keep: int = 3,
        skip_after_s: float = 120.0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Touches nothing yet but the store: all ranks agree on a name for this run there.

        Args:
            directory: made when it is not there; on a file system that all nodes share.
            membership: who saves and loads together.
            store: what the ranks agree over in `load`; None for a single rank.
            keep: how many whole checkpoints stay, at least 2.
            skip_after_s: how long a save waits for the one before it to be on disk, before it is left out: training
                goes on beside a file system that hangs.
            say: takes the one-line messages; else they go to stderr.
        """
        if membership.world_size > 1 and store is None:
            raise UsageError(f"a checkpointer for {membership.world_size} ranks needs the store of their process group")
        if keep < KEEP_AT_LEAST:
            raise UsageError(f"keep={keep}: the newest {KEEP_AT_LEAST} checkpoints always stay")
        self.directory, self.membership = Path(directory).absolute(), membership
        self._keep, self._skip_after_s, self._say = keep, skip_after_s, say or say_to_stderr
        prefix = f"{membership.store_prefix}/checkpoints/{next(_numbers)}"
        self.ranks = Consensus(store, membership, prefix=prefix, say=self._say)
        self._run = self.ranks.tell_all("the name of this run", uuid.uuid4().hex[:12])
        self._snapshot: Snapshot | None = None
        self._link: WriterLink | None = None
        self._loads, self._number = itertools.count(), 0
        self._steps, self._step, self._about = dict[str, int](), 0, dict[str, Any]()
        self._is_whole, self._is_given_up = True, False
        self._owner: Owner | None = None
        self._holding: Holding | None = None
        self.last_complete: int | None = None
        """Step of the newest checkpoint that this run has written whole or loaded."""
        self.write_s: float | None = None
        """How long the last complete save took from the copy to the rename; on rank 0."""

    @property
    def kept(self) -> str:
        """Which checkpoint of this run is whole, in words."""
        at = self.last_complete
        return "no checkpoint is complete" if at is None else f"the checkpoint of step {at} is complete"

    # Holding

    def hold(self) -> str:
        """Keep other runs out of the directory; return why this one is kept out, "" if it is not. All ranks call it.

        A run that only loads needs no hold. `save` does the same for one that did not call this.
        """
        why = self._hold() if self.membership.is_leader else ""
        return self.ranks.tell_all("whose directory it is", why)

    def _hold(self) -> str:
        if self._holding is None:
            self._owner = self._owner or identify(os.environ)
            holding = Holding(self.directory, self._owner, find_running=is_running, say=self._say)
            if other := holding.begin():
                return "; ".join(refuse(self.directory, other))
            self._holding = holding
        return ""

    # Loading

    def load(
        self, like: object = None, *, share: Callable[[Sequence[torch.Tensor]], None] | None = None
    ) -> Loaded | None:
        """Return the newest checkpoint that is whole, or None where there is none.

        All ranks call it together and get the same one. What is torn or altered is passed over and said aloud.

        Args:
            like: the live state, as `save` would get it. A sharded tensor (DTensor) is read into the one of its path,
                without a copy; one that lies below a DTensor's path is placed as that; any other comes back whole.
            share: a collective that fills tensors with the bytes of rank 0's; only rank 0 then reads the common state.
                None: every rank does.
        Raises:
            CheckpointError: there are checkpoints, and every one is damaged; or the directory cannot be read.
        """
        key = f"load {next(self._loads)}"
        skipped: list[tuple[Path, str]] = []
        found: dict[str, Any] = {"names": [], "why": ""}
        if self.membership.is_leader:
            try:
                skipped = await_writers(self.directory, self._say)
                found["names"] = [path.name for path in list_checkpoints(self.directory)]
            except OSError as exc:  # all ranks must hear it, or they would wait for rank 0
                found["why"] = explain(exc, self.directory)
        found = json.loads(self.ranks.tell_all(f"{key}: the checkpoints there are", json.dumps(found)))
        if found["why"]:
            raise CheckpointError(f"the directory of checkpoints cannot be read: {found['why']}")
        names = found["names"]
        for index, name in enumerate(names):
            directory = self.directory / name
            loaded, to_send, why = None, list[torch.Tensor](), ""
            try:
                loaded, to_send = read_checkpoint(directory, self.membership, like=like, is_read_once=share is not None)
            except (Damaged, OSError) as exc:
                why = str(exc)
            words = self.ranks.collect(f"{key}: what is read of {name} ({index})", why)
            faults = [f"rank {rank} reads {word}" for rank, word in enumerate(words) if word]
            why = self.ranks.tell_all(f"{key}: whether {name} is whole ({index})", next(iter(faults), ""))
            if not why and loaded is not None:
                if share:
                    share(to_send)  # nothing can fail in it but the network: all ranks have read what they had to
                self.last_complete = loaded.step
                self._tell_skipped(skipped, f"going on from {name}")
                return loaded
            skipped.append((directory, why))
        self._tell_skipped(skipped, "there is no other")
        if names:
            raise CheckpointError(
                f"allranks: AR601 checkpoint-corrupt: none of the {len(names)} checkpoints in {self.directory} is "
                f"whole, the newest: {skipped[-len(names)][1]}; move them away to begin anew"
            )
        return None

    def _tell_skipped(self, skipped: list[tuple[Path, str]], instead: str) -> None:
        for directory, why in skipped if self.membership.is_leader else ():
            self._say(f"checkpoint {directory} is passed over: {why}; {instead}")

    def roll_back(self) -> list[str]:
        """Roll back on rank 0 (see tidy), and return, in words, at which steps the job can go on; at none if empty."""
        steps = list[str]()
        with suppress(OSError):
            if self.membership.is_leader:
                is_settled = self._link is None or self._link.is_gone or self._link.wait_settled(0.0)
                if (step := roll_back(self.directory, self._say)) is not None:
                    steps.append(f"step {step}")
                if not is_settled and self._about.get("verified") and step != self._step:  # nobody waits for it
                    steps.append(f"step {self._step} once that is written")
        return steps

    # Saving

    def save(
        self,
        step: int,
        common: object,
        per_rank: object = None,
        *,
        wait: bool = False,
        agree: Callable[[bool], bool] | None = None,
        patience_s: float | None = None,
        about: Callable[[], Mapping[str, Any]] = dict,
        refusal: str = "",
    ) -> Stall:
        """Copy the state now and have it written meanwhile; all ranks call it at the same steps.

        Both parts are nested dicts, lists and tuples of tensors, numbers, str, bytes, None, NumPy arrays and scalars,
        torch dtypes. A rank that cannot save, because its state holds something else or its writer is still busy, says
        so before anything is copied: then all ranks give this save up, and rank 0 prints why.

        Args:
            step: how many steps are done.
            common: what is the same on all ranks: rank 0 writes it. Of DTensors every rank writes its shards.
            per_rank: what only this rank has: its random generators, its place in the data.
            wait: return only when it is written, or has failed.
            agree: returns whether all ranks can save, given whether this one can. None: this rank decides alone.
            patience_s: how long the save before may take to be on disk; None: `skip_after_s`.
            about: returns what else the manifest says; asked when all ranks can save.
            refusal: why this rank must not save; empty: it may.
        """
        self._number += 1
        name = f"{self._run}-{self._number}"
        began_s = time.perf_counter()
        why = refusal or (self._hold() if self.membership.is_leader else "")
        why = why or self._make_room(self._skip_after_s if patience_s is None else patience_s)
        waited_s = time.perf_counter() - began_s
        header, pieces, size_bytes = b"", list[Piece](), 0
        if not why:
            try:
                header, pieces, size_bytes = self._lay_out(common, per_rank)
            except StateError as exc:
                why = str(exc)
            except (OSError, MemoryError) as exc:
                why = f"no shared memory for the copy ({exc})"
        laid_out_s = time.perf_counter()
        can_all = agree(not why) if agree else not why
        self._is_given_up = not can_all
        waited_s += time.perf_counter() - laid_out_s
        if not can_all:
            words = self.ranks.collect(f"save {self._number}: why it is given up", why) if agree else [why]
            if words:
                rank = next(rank for rank, word in enumerate(words) if word)
                self._fail(step, f"rank {rank}: {words[rank]}" if len(words) > 1 else why)
            return Stall(0.0, time.perf_counter() - began_s)
        assert self._snapshot is not None
        self._snapshot.fill(header, pieces)
        self._step, self._about = step, dict(about())
        self._steps[name] = step
        self._ask(step, {"attempt": {"step": step, "name": name}, "size_bytes": size_bytes, "about": self._about})
        copy_s = time.perf_counter() - began_s - waited_s
        if wait:
            self.wait()
        return Stall(copy_s, time.perf_counter() - began_s - copy_s)

    def wait(self, timeout_s: float = PATIENCE_S) -> bool:
        """Wait for the last save to be written; True: it is complete (or there was none)."""
        if self._link is None:
            return not self._is_given_up
        is_settled = self._await(self._link, self._link.wait_settled, timeout_s)
        return is_settled and self._is_whole and not self._is_given_up

    def close(self, *, wait: bool = True) -> None:
        """End the writer.

        Args:
            wait: until the last save is written. Where this process fails it need not: the writer finishes by itself.
        """
        if self._link is not None:
            if wait:
                is_done = self._link.wait_settled if self.membership.is_leader else self._link.wait_written
                self._await(self._link, is_done, PATIENCE_S)
            self._link.close(wait=wait)
            self._link = None
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None
        self.release()

    def release(self) -> None:
        """Let other runs have the directory; `close` does it, too."""
        if self._holding is not None:
            self._holding.end()
            self._holding = None

    def _await(self, link: WriterLink, is_done: Callable[[float], bool], timeout_s: float) -> bool:
        """Wait for the last save, and say so after NOTICE_S, after twice as long, and so on."""
        began_s, notice_s = time.monotonic(), NOTICE_S
        deadline_s = began_s + (GIVEN_UP_S if self._is_given_up else timeout_s)
        while not is_done(max(0.0, min(began_s + notice_s, deadline_s) - time.monotonic())):
            waited_s = time.monotonic() - began_s
            if link.is_gone or began_s + waited_s >= deadline_s:
                return False
            what = f"the checkpoint of step {self._step}"
            if not link.wait_written(0.0):
                whom = f"rank {self.membership.rank}"
                why = f"its part of {what} is not on disk: does {self.directory} hang?"
            elif self.membership.is_leader:
                whom, why = "other ranks", f"their parts of {what} are not all on disk"
            else:
                whom, why = "rank 0", f"it completes {what}"
            self._say(f"still waiting for {whom} after {waited_s:.0f} s; {why}")
            notice_s *= 2
        return True

    def _make_room(self, patience_s: float) -> str:
        """Wait until the memory is free for the next save; return why it is not, "" when it is."""
        if self._link and not self._link.wait_written(patience_s) and not self._link.is_gone:
            return f"the one before is not on disk after {patience_s:g} s: does {self.directory} hang?"
        try:
            self._link = self._link or self._start_writer()
        except OSError as exc:
            return f"no writer can be started ({exc})"
        return ""

    def _lay_out(self, common: object, per_rank: object) -> tuple[bytes, list[Piece], int]:
        """Return this rank's part as `Packer.lay_out` does; the shared memory has room for it."""
        own, whole = Packer(), Packer()
        own_tree = own.pack(per_rank, f"per_rank[{self.membership.rank}]")
        if own.sharded:
            raise StateError(f"{next(iter(own.sharded))} is a DTensor, which several ranks have: it belongs to common")
        is_first = self.membership.is_leader
        common_tree = (own if is_first else whole).pack(common, "common")
        own.sharded.update(whole.sharded)
        tensors: list[Any] = []
        shards: list[Any] = []
        if own.sharded:
            from allranks.state.saved.sharded import describe_tensors, pack_shards

            tensors, shards = describe_tensors(own.sharded), pack_shards(own)
        tree = {"own": own_tree, "shards": shards}
        if is_first:
            tree |= {"common": common_tree, "tensors": tensors}
        laid_out = own.lay_out(tree)
        assert self._snapshot is not None
        self._snapshot.reserve(laid_out[-1])
        return laid_out

    def _ask(self, step: int, request: dict[str, object]) -> None:
        """Hand the copy to the writer; one that has been killed is replaced."""
        for _ in range(2):
            try:
                self._link = self._link or self._start_writer()
                self._is_whole = False
                self._link.ask(self._number, request)
                return
            except WriterGoneError as exc:
                self._say(f"the writer of rank {self.membership.rank}'s checkpoints ({exc}) has been killed")
                self._link = None
            except OSError as exc:
                self._fail(step, f"no writer can be started ({exc})")
                return
        self._fail(step, "its writer was killed twice")

    def _start_writer(self) -> WriterLink:
        if self._snapshot is None:
            self._snapshot = Snapshot(say=self._say)
        return WriterLink(
            self._snapshot.descriptor,
            self._hear,
            root=str(self.directory),
            rank=self.membership.rank,
            world_size=self.membership.world_size,
            keep=self._keep,
            run=self._run,
            torch=torch.__version__,
            owner=None if self._owner is None else asdict(self._owner),
        )

    def _hear(self, message: dict[str, Any]) -> None:
        """What the writer says, in the thread that listens."""
        if message.get("is_written"):
            return
        step = self._steps.pop(message["attempt"])
        self._is_whole = bool(message["is_whole"])
        if message["is_whole"]:
            self.last_complete = step
            self.write_s = message.get("write_s", self.write_s)
        elif why := message.get("why"):
            self._fail(step, why)

    def _fail(self, step: int, why: str) -> None:
        self._say(f"the checkpoint of step {step} is not written: {why}; {self.kept}")

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)
