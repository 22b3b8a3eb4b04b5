"""Where are the checkpoints, and when is one taken? What `Session.track` finds out before anything is loaded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from allranks.model.errors import UsageError
from allranks.model.membership import Membership
from allranks.report.text import say
from allranks.state.resumed.experiment import Named
from allranks.state.resumed.save_clock import SaveClock
from allranks.state.resumed.steps import StepLost
from allranks.state.resumed.telling import Telling, after_session, leave_by_itself, leave_to_agent
from allranks.state.resumed.track import Tracked
from allranks.state.saved.checkpoint import Checkpointer
from allranks.state.truth.op_file import RerunPlan


def begin(
    parts: Mapping[str, Any],
    *,
    membership: Membership,
    checkpoint_dir: str | Path | None,
    checkpoint_every: int | None,
    default: Path,
    device: torch.device,
    keep: int,
    partial: bool,
    cell: Any,
    on_exit: contextlib.ExitStack,
    **told: Any,
) -> Tracked:
    """Return the state of this training, as the newest whole checkpoint has it; all ranks call it together.

    Args:
        default: directory where nobody names one.
        on_exit: of the session; what is being written is waited for there.
        told: as for `Tracked`; the rest is as for `Session.track`.
    """
    if not dist.is_initialized():
        raise UsageError(after_session("s.track()"))
    if cell is not None:
        leave_to_agent(lambda: bool(cell.is_ending))
    is_below_agent = "ALLRANKS_AGENT_PID" in os.environ
    variable = f"ALLRANKS_CHECKPOINT_DIR{'_CHOSEN' * is_below_agent}"
    plan = RerunPlan.inherited()
    every = checkpoint_every or int(os.environ.get("ALLRANKS_CHECKPOINT_EVERY") or 0) or None
    checkpoints = Checkpointer(
        Path(plan.checkpoints if plan else checkpoint_dir or os.environ.get("ALLRANKS_CHECKPOINT_DIR") or default),
        membership,
        store=_get_default_store() if membership.world_size > 1 else None,
        keep=keep,
    )
    kind: Callable[..., Tracked] = Tracked
    if plan is not None:
        from allranks.state.resumed.rerun_tracked import RerunTracked as kind  # noqa: N813

        told |= {"log": None, "plan": plan}
    has_gloo = any(group.backend == "gloo" for group in membership.groups)
    made = kind(
        parts,
        checkpoints=checkpoints,
        every=None if plan else every,
        cell=cell,
        device=torch.device("cpu") if has_gloo else device,
        pace=SaveClock(membership, os.environ, say=say) if membership.is_leader and not (every or plan) else None,
        **told,
    )

    def close(kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        made.left.say()
        if kind is None or (isinstance(error, SystemExit) and not error.code):
            made.leave()
        if kind is None or (issubclass(kind, SystemExit) and not issubclass(kind, StepLost)):
            with Telling(cell).saving():
                checkpoints.close()  # else the writer ends what it has, and nobody waits for ranks that are gone
        checkpoints.release()
        if made.is_unsaved and membership.is_leader:
            say(f"the state after step {made.step} is not saved; {checkpoints.kept}")
        made._telling.end(error)

    on_exit.push(close)
    if cell is None and not is_below_agent:
        on_exit.callback(leave_by_itself(made.ask_to_leave))
    is_default = plan is None and checkpoint_dir is None and variable not in os.environ
    made.load(partial=partial, named=Named(is_default=is_default, is_below_agent=is_below_agent))
    return made
