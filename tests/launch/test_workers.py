"""Who is taken for a left-over of the workers?"""

from __future__ import annotations

import subprocess

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
