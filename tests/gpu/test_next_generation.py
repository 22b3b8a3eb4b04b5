"""Does NCCL come up again in the next generation: started anew, forked from the standby, under another leader?"""

from __future__ import annotations

import re
import signal
import time

import pytest

from .conftest import Note, StartJob

UNTIL_RESTARTED = """\
import os, time
from pathlib import Path
from rank import add_up, dist, form_group, rank, tell, world_size
form_group()
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
links = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
tell(is_forked=any("allranks-environment" in link for link in links))
print("generation", generation, flush=True)
while generation == 0:
    add_up()
    time.sleep(0.02)
print("sum", generation, add_up(), "of", world_size, flush=True)
dist.destroy_process_group()
"""

pytestmark = pytest.mark.rehearsable


def test_after_a_restart_nccl_comes_up_again(start: StartJob, note: Note):
    """Expected: rank 1 of the first generation is killed; the second one forms its group and communicator anew, on
    the same store, and ends with 0.
    """
    job = start(UNTIL_RESTARTED, flags=["--max-restarts", "1", "--no-standby"])
    job.wait_for("generation 0")
    struck_s = job.strike(1, signal.SIGKILL)
    up_s = job.wait_for("generation 1")
    note("seconds from SIGKILL to the new group", f"{up_s - struck_s:.1f}")
    assert job.end() == [0, 0], job.tail()
    assert job.out.count("sum 1 2.0 of 2") == 2
    assert not job.json_of(0)["is_forked"]


def test_a_worker_that_the_standby_forked_uses_the_gpu(start: StartJob, note: Note):
    """Expected: the standby has torch imported and no device in use, so that CUDA and NCCL start in the workers that
    it forks. Source: torch 2.11, torch/cuda/__init__.py, _lazy_init, which refuses a fork after CUDA's start.
    """
    job = start(UNTIL_RESTARTED, flags=["--max-restarts", "1"])
    job.wait_for("generation 0")
    struck_s = job.strike(1, signal.SIGKILL)
    up_s = job.wait_for("generation 1")
    note("seconds from SIGKILL to the new group", f"{up_s - struck_s:.1f}")
    assert job.end() == [0, 0], job.tail()
    assert job.out.count("sum 1 2.0 of 2") == 2
    assert [job.json_of(rank)["is_forked"] for rank in (0, 1)] == [True, True], job.tail()
    assert "without a standby" not in job.err


def test_two_ranks_of_one_agent_are_forked_from_one_import(start: StartJob, note: Note):
    """Expected: the first generation of a node with two ranks is forked, too; each has a CUDA context of its own."""
    script = UNTIL_RESTARTED.replace("while generation == 0", "while False")
    job = start(script, nodes=1, ranks_per_node=2, flags=["--backend", "gloo"])
    up_s = job.wait_for("generation 0")
    note("seconds from the start to the group", f"{up_s - job.began_s:.1f}")
    assert job.end() == [0], job.tail()
    assert job.out.count("sum 0 2.0 of 2") == 2
    assert [job.json_of(rank)["is_forked"] for rank in (0, 1)] == [True, True], job.tail()


def test_the_others_go_on_when_the_leader_s_agent_is_killed(start: StartJob, note: Note):
    """Expected: of three nodes the leader's is lost; another one leads, the verdict is AR012 and a warning, and NCCL
    comes up with the two ranks that are left. Both agents end with 0.
    """
    job = start(UNTIL_RESTARTED, nodes=3, min_nodes=2, flags=["--max-restarts", "2"])
    job.wait_for("generation 0")
    time.sleep(1)  # the first heartbeats
    struck_s = job.kill_agent(0)
    up_s = job.wait_for("sum 1 2.0 of 2")
    note("seconds from SIGKILL to the first step of the others", f"{up_s - struck_s:.1f}")
    codes = job.end()
    assert codes == [-signal.SIGKILL, 0, 0], job.tail()
    assert re.search(r"allranks: b leads now: the leader's agent on a is gone", job.err), job.tail()
    lost = [(each["cause"], each["ranks"]) for each in job.findings if each["severity"] == "warn"]
    assert (job.culprits(), ("AR012 node-failure", [0]) in lost) == ([], True), job.tail()
