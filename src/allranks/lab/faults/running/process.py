"""Strikes at one worker process: it dies, stops, loops, or runs out of memory."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import time
from pathlib import Path
from typing import ClassVar

from allranks.lab.faults.fault import Expected, FaultPlace, JobStart, LabScene
from allranks.lab.faults.running.strike import Strike
from allranks.lab.faults.running.target import DrilledJob
from allranks.model.errors import SetupError
from allranks.state.saved.parts import list_checkpoints, read_manifest

DEAD_S = 2.0
"""0.25 s for others that are about to break, up to 1 s for all to end (guard/ends.py), and what six nodes on two cores
need for the stacks of all ranks."""
RAISED_S = 3.0
"""The same, after the interpreter has ended: 0.6 to 0.9 s with torch, on a core of its own."""
STOPPED_S = 3.0
NEXT_STEP_S = 12.0
CHECKED_S = 10.0
"""Until replicas are compared the next time, which takes 0.5 % of the time, and RAISED_S."""
REPLAY_EVERY = 10
REPLAYED_S = 6.0
"""Until the rank's next replay, 10 or 20 steps of 0.06 s, and RAISED_S."""
HEADROOM_BYTES = 96 << 20
CGROUP_1, CGROUP_2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class SignalStrike(Strike):
    """One signal to one worker, from outside."""

    place = FaultPlace.ANY
    next_step_s = NEXT_STEP_S
    signum: ClassVar[signal.Signals]

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Send it."""
        pid = target.worker_pid(scene, scene.node.name)
        struck_s = time.time()
        os.kill(pid, cls.signum)
        return struck_s


class WorkerKilled(SignalStrike, name="worker-killed", cause="AR407"):
    """SIGKILL to one worker."""

    signum, verdict_s, has_baseline = signal.SIGKILL, DEAD_S, True


class WorkerStopped(SignalStrike, name="worker-stopped", cause="AR010"):
    """SIGSTOP to one worker: its connections stay open, but it does not run."""

    signum, verdict_s, has_baseline = signal.SIGSTOP, STOPPED_S, True


class OrderStrike(Strike):
    """A strike that one rank of the program executes itself, at a step that is logged."""

    place = FaultPlace.ANY
    order: ClassVar[str]
    seconds: ClassVar[float | None] = None
    does_it_again: ClassVar[bool] = False

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Order it."""
        details: dict[str, object] = {} if cls.seconds is None else {"seconds": cls.seconds}
        if cls.does_it_again:
            details["again"] = True
        return target.order(target.rank_on(scene.node.name), cls.order, **details)


class WorkerExits(OrderStrike, name="worker-exits", cause=("AR590", "AR407")):
    """One rank calls os._exit(13) in the middle of a step: no traceback, no message."""

    severity = Expected.FAIL
    order, verdict_s, exit_codes = "exit", DEAD_S, (1,)


class WorkerRaises(OrderStrike, name="worker-raises", cause="AR590"):
    """One rank raises an exception: an error of the script, which a restart would repeat."""

    severity = Expected.FAIL
    order, verdict_s, exit_codes, has_baseline = "raise", RAISED_S, (1,), True


class WorkerSegfaults(OrderStrike, name="worker-segfaults", cause="AR407"):
    """One rank reads from address 0."""

    order, verdict_s, next_step_s = "segfault", DEAD_S, NEXT_STEP_S


class WeightFlipped(OrderStrike, name="weight-bit-flipped", cause="AR610"):
    """One bit of one weight is flipped in one rank; nothing else happens to it."""

    place = FaultPlace.NOT_FIRST
    order, verdict_s, next_step_s, num_lost = "flip", CHECKED_S, CHECKED_S + NEXT_STEP_S, 1


class GradientWrong(OrderStrike, name="gradient-bit-wrong", cause="AR611"):
    """From one step on, one bit of a gradient is wrong in each backward pass of one rank; ranks repeat steps."""

    place = FaultPlace.NOT_FIRST
    arguments: ClassVar = ("--replay-every", str(REPLAY_EVERY))
    order, verdict_s, next_step_s, num_lost = "err", REPLAYED_S, REPLAYED_S + NEXT_STEP_S, 1


class GradientsNan(OrderStrike, name="gradients-nan", cause="AR604"):
    """In one step, the gradient of one rank is NaN: the session says so once, and saves nothing of it."""

    severity = Expected.SURVIVED
    order, watch_s = "nan", 15.0

    @classmethod
    def check(cls, scene: LabScene, target: DrilledJob) -> list[str]:
        """Check that it was said, and that no later checkpoint exists."""
        struck = json.loads((target.directory / f"struck_{target.rank_on(scene.node.name)}.json").read_text())["step"]
        said = (target.directory / "output.txt").read_text(errors="replace")
        line = f"AR604 nan-loss: gradients are NaN or infinite at step {struck}, and then model/"
        saved = [path.name for path in list_checkpoints(target.checkpoints) if read_manifest(path).step >= struck]
        times = said.count(line)
        return [f"{line!r}: said {times} times"] * (times != 1) + [f"{name} was saved" for name in saved]


class WorkerLoops(OrderStrike, name="worker-loops", cause=("AR408", "AR491")):
    """One rank loops forever and holds the GIL: none of its threads can report anything."""

    order, watch_s = "hold-gil", 150.0
    guard: ClassVar = {"hang_s": 45.0}


class WorkerOutOfMemory(Strike, name="worker-oom-killed", cause="AR008"):
    """The memory of the job on one node is limited, and its worker allocates until the kernel kills it.

    A memory cgroup like that of SLURM's task/cgroup, version 1 or 2 as on this machine: the agent and its workers are
    in it from their start.
    """

    place = FaultPlace.ANY
    verdict_s, next_step_s = DEAD_S, NEXT_STEP_S

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Make the cgroup."""
        own = _cgroup_root() / f"allranks-{scene.lab_dir.name}-{scene.node.name}"
        own.mkdir(exist_ok=True)
        scene.remember("cgroup", str(own))

    @classmethod
    def start(cls, scene: LabScene) -> JobStart:
        """Move the node's agent into it."""
        procs = shlex.quote(str(Path(scene.memory["cgroup"]) / "cgroup.procs"))
        enter = f'[ "$SLURMD_NODENAME" != {shlex.quote(scene.node.name)} ] || echo $$ >{procs}; exec "$@"'
        return JobStart(wrapper=("sh", "-c", enter, "sh"))

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Limit it to little more than its current use, and order the worker to allocate more."""
        own = Path(scene.memory["cgroup"])
        limit, usage = own / "memory.limit_in_bytes", own / "memory.usage_in_bytes"
        if not limit.exists():
            limit, usage = own / "memory.max", own / "memory.current"
        limit.write_text(str(int(usage.read_text()) + HEADROOM_BYTES))
        return target.order(target.rank_on(scene.node.name), "allocate")

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Remove the cgroup, which is empty after the job's end."""
        if "cgroup" in scene.memory:
            deadline_s = time.monotonic() + 5.0
            with contextlib.suppress(FileNotFoundError):
                while True:
                    try:
                        Path(scene.memory["cgroup"]).rmdir()
                    except OSError:
                        if time.monotonic() > deadline_s or not Path(scene.memory["cgroup"]).exists():
                            raise
                        time.sleep(0.1)


def _cgroup_root() -> Path:
    """Return the directory in which a cgroup with a memory limit can be created.

    Raises:
        SetupError: there is none.
    """
    if (CGROUP_1 / "memory.limit_in_bytes").exists():
        return CGROUP_1
    controllers = CGROUP_2 / "cgroup.subtree_control"
    if controllers.exists():
        with contextlib.suppress(OSError):
            controllers.write_text("+memory")
        if "memory" in controllers.read_text().split():
            return CGROUP_2
    raise SetupError("lab: worker-oom-killed: neither cgroup v1 nor v2 lets this machine set a memory limit")
