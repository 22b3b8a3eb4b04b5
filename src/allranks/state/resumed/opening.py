"""What does a session open once its group is formed, before the script makes its model?"""

from __future__ import annotations

import contextlib

import torch

from allranks.model.membership import Membership
from allranks.state.resumed.buckets import Wrapped
from allranks.state.truth.op_file import RerunPlan


def open_state(membership: Membership, device: torch.device, on_exit: contextlib.ExitStack) -> Wrapped:
    """Return what will know the modules that the session wraps; where `diff` runs it again, record from here on.

    Args:
        on_exit: of the session.
    """
    wrapped = Wrapped(membership, device)
    on_exit.callback(wrapped.close)
    if plan := RerunPlan.inherited():
        from allranks.state.resumed.rerun_tracked import begin_setup

        begin_setup(plan)
    return wrapped
