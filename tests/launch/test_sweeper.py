"""What becomes of an agent's processes when it is killed, and what is told of its end?"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from allranks.files.folder import Folder
from allranks.launch.sweeper import write_end
from allranks.launch.workers import WRITER
from conftest import agents_in_background, wait_until

AGENT = """
import os, subprocess, sys, time
from pathlib import Path
from allranks.launch.sweeper import Sweeper
from allranks.files.folder import Folder
sweeper = Sweeper.start()
sweeper.tell(Folder.at(Path.cwd()), "n0")
marked = {**os.environ, "ALLRANKS_AGENT_PID": str(os.getpid())}

def start(name, command, **more):
    each = subprocess.Popen(command, start_new_session=more.pop("session", True), **more)
    Path(name).write_text(str(each.pid))
    return each

nap = ["sleep", "300"]
worker = "import subprocess, time; subprocess.Popen(['sleep', '300'], env={}); print(flush=True); time.sleep(300)"
started = start("worker", [sys.executable, "-I", "-S", "-c", worker], env={}, stdout=subprocess.PIPE)
started.stdout.readline()
sweeper.watch([started.pid])
start("server", nap, env=marked)                      # in a session of its own
start("deaf", ["sh", "-c", "trap '' TERM; sleep 300; sleep 300"], env=marked)
start("unrelated", nap, env={})
writer = "import os, time\\nwhile not os.path.exists('go'): time.sleep(0.02)\\nopen('saved', 'w').close()  # {WRITER}"
start("writer", [sys.executable, "-I", "-S", "-c", writer], env=marked)
Path("sweeper").write_text(str(sweeper.pid))
Path("ready").touch()
sys.stdin.read()
sweeper.dismiss()
""".replace("{WRITER}", WRITER)
ENDED = ("worker", "server", "deaf")


class Agent:
    """A process with a sweeper, and all kinds of processes that it has started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT], cwd=directory, stdin=subprocess.PIPE, start_new_session=True
        )
        wait_until((directory / "ready").exists, f"the agent {self.process.poll()}", 60)
        self.left = psutil.Process(self.pid("worker")).children() + [psutil.Process(self.pid(name)) for name in ENDED]

    def pid(self, name: str) -> int:
        return int((self.directory / name).read_text())

    def still_there(self) -> list[str]:
        return [str(each) for each in self.left if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    try:
        yield agent
    finally:
        agent.process.kill()
        agent.process.communicate()
        for name in (*ENDED, "unrelated", "writer"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent.pid(name), signal.SIGKILL)


def test_a_killed_agent_leaves_nothing_behind_but_what_writes_a_checkpoint_until_that_is_complete(agent: Agent):
    os.kill(agent.pid("sweeper"), signal.SIGTERM)  # SLURM signals every process of a step
    os.killpg(agent.process.pid, signal.SIGKILL)
    wait_until(lambda: not agent.still_there(), "all processes to end")
    assert psutil.Process(agent.pid("unrelated")).is_running()
    (agent.directory / "go").touch()
    wait_until((agent.directory / "saved").exists, "the checkpoint", 30)  # the writer lives on
    (told,) = map(json.loads, (agent.directory / "events.jsonl").read_text().splitlines())
    assert (told["event"], told["node"], told["pid"]) == ("agent_ended", "n0", agent.process.pid)
    assert told["signal"] in (signal.SIGKILL, None), "Linux before 6.15 may tell its parent only"
    assert (told["oom_kills"], told["is_oom"]) == (0, False)
    wait_until(lambda: is_gone(agent.pid("sweeper")), "the sweeper to end")


def test_an_agent_that_ends_by_itself_loses_nothing(agent: Agent):
    agent.process.communicate(timeout=30)
    wait_until(lambda: is_gone(agent.pid("sweeper")), "the sweeper to end")
    assert len(agent.still_there()) == len(agent.left)
    assert not (agent.directory / "events.jsonl").exists()


def is_gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


SCRIPT = """
import multiprocessing, os, subprocess, time
from pathlib import Path
if __name__ == "__main__":
    loader = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
    loader.start()
    server = subprocess.Popen(["sleep", "300"], start_new_session=True)
    Path("pids").write_text(f"{os.getpid()} {loader.pid} {server.pid}")
    Path("up").touch()
    time.sleep(300)
"""


def test_of_a_killed_run_no_process_stays(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with agents_in_background() as begin:
        agent = begin(tmp_path, "--no-standby", "train.py")
        wait_until((tmp_path / "up").exists, "the script", 60)
        agent.kill()
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        wait_until(lambda: all(map(is_gone, pids)), "all processes to end")
        events = tmp_path / "runs" / "latest" / "attempt_0" / "events.jsonl"
        wait_until(lambda: '"agent_ended"' in events.read_text(), "how it ended")


def test_the_end_of_an_agent_is_not_written_where_somebody_put_another_directory(tmp_path: Path):
    (held := tmp_path / "attempt_0").mkdir()
    told = {"attempt": str(held), "identity": list(Folder.at(held).identity)}
    write_end(told, "first\n")
    held.rename(aside := tmp_path / "aside")
    held.mkdir()
    write_end(told, "second\n")
    assert ((aside / "events.jsonl").read_text(), list(held.iterdir())) == ("first\n", [])
