"""An elastic Horovod state that always synchronizes, and that outlives the job.

    from allranks.horovod.state import TorchState

    state = TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)      # as hvd.elastic.TorchState
    state.commit()                                                              # also writes a checkpoint, now and then

Two differences to `hvd.elastic.TorchState`, whose arguments it takes:

- No rank skips `state.sync()`. Horovod lets the ranks of a reset that only removed hosts skip it, and a new worker of
  the same reset then waits forever (horovod/horovod#3494).
- Rank 0 writes what was committed as a checkpoint of allranks (state/saved), and a job that starts again begins with
  the newest one: when Horovod gives up after HOROVOD_ELASTIC_TIMEOUT, at most `checkpoint_every_s` is lost.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.torch.elastic import TorchState as HorovodState
from horovod.torch.mpi_ops import rank

from allranks.model.errors import SetupError
from allranks.state.saved.checkpoint import Checkpointer

DIRECTORY = "ALLRANKS_CHECKPOINT_DIR"
"""Set by `allranks horovod`: checkpoints/ of the run directory."""


class TorchState(HorovodState):  # type: ignore[misc]
    """The state of one training.

    Args:
        checkpoints: directory on a file system that all nodes share; None: that of the run. Without either, nothing is
            written.
        checkpoint_every_s: seconds between two checkpoints; commits between them stay in memory.
        parts: as for `hvd.elastic.TorchState`: a module, an optimizer, a sampler, or any picklable value.
    Raises:
        CheckpointError: there are checkpoints, and none of them can be read.
        SetupError: another run that lives saves in the same directory.
    """

    def __init__(
        self, *, checkpoints: Path | str | None = None, checkpoint_every_s: float = 60.0, **parts: Any
    ) -> None:
        super().__init__(**parts, num_commits=0)
        self._directory = checkpoints or os.environ.get(DIRECTORY)
        self._checkpointer: Checkpointer | None = None
        self._every_s, self._saved_s = checkpoint_every_s, time.monotonic()
        # A worker that is started later is never rank 0: rank 0 loads at the job's start, the others get it in sync().
        if self._directory and rank() == 0:
            self._checkpointer = Checkpointer(self._directory)
            if loaded := self._checkpointer.load():
                self._take(loaded.common)
            if why := self._checkpointer.hold():
                raise SetupError(why)

    def commit(self) -> None:
        """Commit to memory, as Horovod does, and to a checkpoint when it is time for one; then look for new hosts."""
        self.num_commits += 1
        self.save()
        if time.monotonic() >= self._saved_s + self._every_s:
            self.save_checkpoint(wait=False)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Interrupt the training if hosts were added or removed.

        Raises:
            HostsUpdatedInterrupt: they were; all ranks will synchronize.
        """
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt as interrupt:
            interrupt.skip_sync = False
            raise

    def save_checkpoint(self, *, wait: bool = True) -> None:
        """Write the state as it is now; rank 0 does, the others do nothing.

        Args:
            wait: until it is on disk.
        """
        if not self._directory or rank() != 0:
            return
        if self._checkpointer is None:  # another rank was 0 when the job started
            self._checkpointer = Checkpointer(self._directory)
        self._saved_s = time.monotonic()
        self._checkpointer.save(self.num_commits, self._as_dict(), wait=wait)

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _as_dict(self) -> dict[str, Any]:
        parts = {name: handler.value.state_dict() for name, handler in self._handlers.items()}
        return parts | {name: getattr(self, name) for name in self._saved_state}

    def _take(self, saved: Any) -> None:
        """Take the state of a checkpoint, and commit it."""
        for name, value in saved.items():
            if name in self._handlers:
                self._handlers[name].value.load_state_dict(value)
            else:
                setattr(self, name, value)
        self.save()
