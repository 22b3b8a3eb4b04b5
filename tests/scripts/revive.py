"""In every task of a step: the first one brings the last node's task back, as the leader does with an agent."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from allranks.launch.queue.revival import Revivals
from allranks.model.identity import world_from_env
from allranks.report.rundir import RunDir

world = world_from_env(os.environ)
where = Path(sys.argv[1])
place = f"{world.node_index} of {world.num_nodes} in step {world.step_id}"
(where / f"{world.node_name}.{os.environ['SLURM_STEP_ID']}").write_text(f"{place}\n")
if world.node_index == 0:
    revivals = Revivals(env=os.environ, run_dir=RunDir(where, "job"), patience_s=60)
    end_s = time.monotonic() + 100
    while not (where / "done").exists() and time.monotonic() < end_s:
        for path in where.glob("lost.*"):
            revivals.expect(path.suffix[1:], node_index=2)
            path.unlink()
        for line in revivals.turn(time.monotonic()):
            print(line, flush=True)
        time.sleep(0.05)
    revivals.close()
else:
    time.sleep(100)
