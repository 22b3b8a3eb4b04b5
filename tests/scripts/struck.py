"""Runs a script twice: undisturbed, and with rank 1 killed inside of a step, once, when a checkpoint is complete.

struck.py OUT SCRIPT        below `allranks run --max-restarts 1 --checkpoint-every N`: the second start goes on
struck.py OUT SCRIPT...     below fork_ranks.py, three starts of each script: undisturbed, killed, and gone on

Checkpoints of a script are in OUT/STEM/undisturbed and OUT/STEM/killed.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

from allranks.state.resumed.steps import Step

out, scripts = Path(sys.argv[1]), sys.argv[2:]
if life := os.environ.get("EXACT_LIFE"):
    number, start = divmod(int(life), 3)
    names, is_struck = [["undisturbed"], ["killed"], ["killed"]][start], start == 1
else:
    number, names, is_struck = 0, ["undisturbed", "killed"], os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
folder = out / Path(scripts[number]).stem
sys.argv = [scripts[number]]
enter = Step.__enter__


def enter_and_die(step: Step) -> object:
    if step.number == 57 and os.environ["RANK"] == "1" and is_struck:
        deadline_s = time.monotonic() + 100
        while not list((folder / "killed").glob("step_*")) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return enter(step)


for name in names:
    os.environ |= {"ALLRANKS_CHECKPOINT_DIR": str(folder / name), "ALLRANKS_CHECKPOINT_DIR_CHOSEN": "1"}
    Step.__enter__ = enter if name == "undisturbed" else enter_and_die  # type: ignore[method-assign]
    runpy.run_path(sys.argv[0], run_name="__main__")
