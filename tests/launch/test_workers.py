"""Who is taken for a left-over of the workers?"""

from __future__ import annotations

import os
import signal
import subprocess

import psutil

from allranks.launch.workers import end_left_behind


def test_a_tool_of_the_agent_itself_is_no_left_over():
    own = subprocess.Popen(["sleep", "60"])
    left = subprocess.Popen(["sleep", "60"], start_new_session=True)  # as workers are, and so all that they start
    try:
        assert end_left_behind(0.5) == [f"sleep (pid {left.pid})"]
        assert own.poll() is None
    finally:
        own.kill()
        left.kill()
        own.wait()
        left.wait()


def test_what_is_spared_keeps_its_children():
    """As srun, which is two processes."""
    spared = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], start_new_session=True, stdout=subprocess.PIPE)
    try:
        child = psutil.Process(int(spared.stdout.readline()))
        assert end_left_behind(0.1, spared=[spared.pid]) == []
        assert psutil.Process(spared.pid).children() == [child]
    finally:
        os.killpg(spared.pid, signal.SIGKILL)
        spared.communicate()
