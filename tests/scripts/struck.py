"""Runs a script twice: undisturbed, and with rank 1 killed inside of a step, once, when a checkpoint is complete.

struck.py SCRIPT OUT        below `allranks run --max-restarts 1 --checkpoint-every N`

Checkpoints are in OUT/undisturbed and OUT/killed.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

from allranks.state.resumed.steps import Step

script, out = sys.argv[1], Path(sys.argv[2])
sys.argv = [script]
enter = Step.__enter__


def enter_and_die(step: Step) -> object:
    if step.number == 57 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        deadline_s = time.monotonic() + 100
        while not list((out / "killed").glob("step_*")) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return enter(step)


for name in ("undisturbed", "killed"):
    os.environ |= {"ALLRANKS_CHECKPOINT_DIR": str(out / name), "ALLRANKS_CHECKPOINT_DIR_CHOSEN": "1"}
    Step.__enter__ = enter if name == "undisturbed" else enter_and_die  # type: ignore[method-assign]
    runpy.run_path(script, run_name="__main__")
