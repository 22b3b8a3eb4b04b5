"""Who means it when SIGTERM comes? A worker that has something to save leaves that to its agent.

At a time limit or a preemption SLURM may signal every process of a job at once, the workers included. The agent gets
the signal, too, and knows better: whether there is time for a checkpoint, and when the worker shall go. Only then does
SIGTERM end the worker, as it would have without this.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


def leave_to_agent(is_meant: Callable[[], bool]) -> bool:
    """Let SIGTERM end this process only when the agent means it; returns whether that holds now.

    A script with a handler of its own keeps it. Children that are forked later die of SIGTERM as ever.

    Args:
        is_meant: whether the agent is ending this process.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return False
    own = os.getpid()

    def obey(signum: int, frame: object) -> None:
        if os.getpid() != own or is_meant():
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    signal.signal(signal.SIGTERM, obey)
    return True
