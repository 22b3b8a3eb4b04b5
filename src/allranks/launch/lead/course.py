"""The life of a job: its phases, what ends each of them, and what a signal does in it. Data only; leader.py goes by it.

phase      ends when                                   at the latest after                 then
running    all ranks have ended, the guard proves a    the guard's deadlines; a save that  stopping
           fault, or a signal says so                  a signal asked for: its grace
stopping   every agent has said Stopped                the grace and STOPPED_S (longer    forming; over, where the
                                                       where ranks save: launch.grace);    job is to end
                                                       who has not said it is disconnected
forming    the driver has told which checkpoint is     ANSWER_S; then without the answer   running with all nodes that
           there, and SLURM what a signal means                                            are here; paused; over
paused     enough nodes are here, and there is room    capacity_s; then, with a little     forming; over
           on a disk that has ended a rank             room, without waiting for more
over       at once: every agent gets its Goodbye, or Resign

signal     running                                     stopping, forming, paused
SIGUSR1    the scheduler is asked: all ranks save, and the scheduler is asked: the last checkpoint counts,
           leave; the job is requeued, or ends         and the job is requeued, or ends
stop       the scheduler is asked: all ranks save and  the job ends with the signal's exit code
           leave, or they are stopped
others     every rank that handles it gets it          the same; most often no rank runs
Over: nothing. A stop signal (SIGTERM, SIGINT, SIGHUP, SIGQUIT) outranks SIGUSR1; a job that got one is never requeued.

A connection that ends is taken up again by its agent: the node is away, for RETURN_S at most, before it is lost.

A leader that is lost is succeeded by another agent (launch.succession), whose leader begins in the phase running, and
is told by the guard that its predecessor is gone; or, after Resign, in the phase stopping, with that decision made.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

RESTART_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL before a restart; ranks that cannot handle SIGTERM get SIGKILL at once."""
SHUTDOWN_S = 30.0
"""For ranks that handle the signal, or that save, where --shutdown-timeout does not say: as torchrun's. SLURM may leave
less."""
STOPPED_S = 5.0
"""Seconds after the grace period in which an agent must report that its workers have ended."""
OWN_STOPPED_S = 60.0
"""The same for the agent in the leader's own process: if it is late, the whole process is, and so is its clock."""
ANSWER_S = 5.0
"""Seconds to wait for what the driver looks up: a checkpoint, the meaning of a signal."""
SPARE_S = 4.0
"""Seconds of the grace period reserved for shutdown."""
LOOK_S = 50e-6
"""Seconds between two looks of the guard, for each node beyond OFTEN_UP_TO: a look takes a tenth of that."""
OFTEN_UP_TO = 64
"""Nodes up to which the guard looks in every turn."""
NOTICE_S = 10.0
"""Seconds between two lines of a paused job."""
RETURN_S = 3.0
"""Seconds in which an agent may take up its connection again before its node is lost."""
GATHER_S = 6.0
"""The same for the members of a generation whose leader is new: they do not all notice the loss at the same time."""


class Phase(StrEnum):
    """Where the job is."""

    RUNNING = "running"
    STOPPING = "stopping"
    FORMING = "forming"
    PAUSED = "paused"
    OVER = "over"


MOVES = {
    Phase.RUNNING: {Phase.STOPPING},
    Phase.STOPPING: {Phase.FORMING, Phase.OVER},
    Phase.FORMING: {Phase.RUNNING, Phase.PAUSED, Phase.OVER},
    Phase.PAUSED: {Phase.FORMING, Phase.OVER},
}
"""Phases that may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the job is about, beyond the plan of one generation."""

    job: str
    wanted_backend: str
    store_address: str
    store_port: int
    num_nodes: int
    min_nodes: int
    capacity_s: float
    """How long to wait for nodes below the minimum."""
    shutdown_s: float = SHUTDOWN_S
    """Seconds for ranks that handle the signal which ends them, and for those that save."""
