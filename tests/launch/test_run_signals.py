"""Does a signal end every process of the job, in bounded time, whatever the workers do with it?"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from conftest import Allranks, allranks_command, clean_env, wait_until, without_waiting

START_S = 120
"""Deadline for workers to come up on a busy machine."""

TREE = """
import os, signal, subprocess, sys, time
from pathlib import Path

if "deaf" in sys.argv:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, lambda *_: Path(f"heard_{os.environ['RANK']}").touch())
near = subprocess.Popen(["sleep", "300"])
far = subprocess.Popen(["sleep", "300"], start_new_session=True)
draft = Path(f"draft_{os.environ['RANK']}")
draft.write_text(f"{os.getpid()} {near.pid} {far.pid}")
draft.rename(f"pids_{os.environ['RANK']}")
time.sleep(300)
"""
"""A worker with one child in its own process group and one in a session of its own."""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `allranks run --nproc-per-node 2 tree.py ARGUMENTS`; everything is gone after the test."""
    (tmp_path / "tree.py").write_text(TREE)
    agents: list[subprocess.Popen[str]] = []

    def start_agent(*arguments: str, shutdown_s: int = 4) -> subprocess.Popen[str]:
        # 4: longer than RECEIPT_S, a slow look and GRACE_S: what is said does not depend on the load.
        agents.append(
            subprocess.Popen(
                allranks_command(
                    "run",
                    "--nproc-per-node",
                    "2",
                    "--master-port",
                    "0",
                    "--shutdown-timeout",
                    str(shutdown_s),
                    "tree.py",
                    *arguments,
                ),
                cwd=tmp_path,
                env=clean_env(os.environ),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return agents[-1]

    yield start_agent
    for agent in agents:
        agent.kill()
        agent.communicate(timeout=60)
    for path in tmp_path.glob("pids_*"):
        for pid in map(int, path.read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_for_tree(tmp_path: Path) -> list[int]:
    """Wait for both workers; return the pids of everything they are and started."""
    deadline_s = time.monotonic() + START_S
    while not all((tmp_path / f"pids_{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline_s, "the workers did not come up"
        time.sleep(0.02)
    pids = [int(pid) for rank in (0, 1) for pid in (tmp_path / f"pids_{rank}").read_text().split()]
    assert len(alive(pids)) == 6
    return pids


def alive(pids: list[int], *, patience_s: float = 0) -> list[int]:
    """Which of them are there, zombies not counted, after at most `patience_s` of waiting for them to go."""
    deadline_s = time.monotonic() + patience_s
    while True:
        there = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    there.append(pid)
        if not there or time.monotonic() >= deadline_s:
            return there
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("signum", "exit_code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)],
    ids=["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"],
)
def test_a_signal_ends_the_whole_tree(start: Start, tmp_path: Path, signum: signal.Signals, exit_code: int):
    agent = start()
    pids = wait_for_tree(tmp_path)
    sent_s = time.monotonic()
    agent.send_signal(signum)
    _, stderr = agent.communicate(timeout=60)
    assert time.monotonic() - sent_s < 60  # the workers sleep for 300
    assert agent.returncode == exit_code
    assert alive(pids) == []
    said = rf"allranks: {signum.name} after \d+ s: all workers here have ended; output in runs/[\w./-]+"
    assert re.fullmatch(said + r"; report in runs/[\w-]+/report\.html", without_waiting(stderr).splitlines()[-1])


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_workers_that_ignore_the_signal_are_killed(
    start: Start, tmp_path: Path, signum: signal.Signals, exit_code: int
):
    agent = start("deaf")
    pids = wait_for_tree(tmp_path)
    sent_s = time.monotonic()
    agent.send_signal(signum)
    _, stderr = agent.communicate(timeout=60)
    assert time.monotonic() - sent_s < 60  # the workers sleep for 300
    assert agent.returncode == exit_code
    more = ", or at once with another Ctrl-C" if signum == signal.SIGINT else ""
    assert f"allranks: ranks 0, 1 handle {signum.name} and have not ended yet; SIGKILL in 3 s{more}\n" in stderr
    assert alive(pids) == []


def test_a_second_ctrl_c_kills_at_once_and_the_run_is_known_as_cancelled(
    start: Start, allranks: Allranks, tmp_path: Path
):
    agent = start("deaf", shutdown_s=200)
    pids = wait_for_tree(tmp_path)
    agent.send_signal(signal.SIGINT)
    wait_until(lambda: all((tmp_path / f"heard_{rank}").exists() for rank in (0, 1)), "the first signal")
    agent.send_signal(signal.SIGINT)
    _, stderr = agent.communicate(timeout=60)  # the first one alone kills after 200
    assert re.search(r"^allranks: second Ctrl-C: all workers on \S+ were killed$", stderr, re.MULTILINE)
    # The kernel takes some milliseconds to free a worker that has torch imported.
    assert (agent.returncode, alive(pids, patience_s=20)) == (130, [])
    assert "CANCELLED, exit code 130" in allranks("status", "latest").stdout


SAVES = """
import os, signal, sys, time
from pathlib import Path

def save(signum, frame):
    with open(f"log_{os.environ['RANK']}", "a") as log:
        log.write(f"{signum} ")
    while not Path("go").exists():
        time.sleep(0.05)
    with open(f"log_{os.environ['RANK']}", "a") as log:
        log.write("saved ")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
children = [os.fork()]
if not children[0]:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(300)
Path(f"pids_{os.environ['RANK']}").write_text(f"{os.getpid()} {children[0]}")
time.sleep(300)
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("signum", "who", "exit_code"),
    [
        pytest.param(signal.SIGTERM, "agent", 143, id="SIGTERM"),
        pytest.param(signal.SIGINT, "agent", 130, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, "all", 143, id="SIGTERM to every process, as SLURM sends it"),
    ],
)
def test_a_script_that_saves_on_sigterm_saves_once(tmp_path: Path, signum: int, who: str, exit_code: int):
    (tmp_path / "train.py").write_text(SAVES)
    agent = subprocess.Popen(
        allranks_command("run", "--nproc-per-node", "2", "--master-port", "0", "train.py"),
        cwd=tmp_path, env=clean_env(os.environ), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: len(list(tmp_path.glob("pids_*"))) == 2, "both ranks are up")
        time.sleep(0.3)
        pids = [list(map(int, path.read_text().split())) for path in tmp_path.glob("pids_*")]
        for pid in (agent.pid, *(worker for worker, _ in pids if who == "all")):
            os.kill(pid, signum)
        wait_until(lambda: [path.read_text() for path in tmp_path.glob("log_*")] == ["15 "] * 2, "both handlers")
        time.sleep(3.5)  # longer than a rank without a handler has
        assert alive([child for _, child in pids]), "a process of the rank was ended that it may need to save"
        (tmp_path / "go").touch()
        _, stderr = agent.communicate(timeout=60)
    finally:
        agent.kill()
        agent.communicate()
    assert [path.read_text() for path in sorted(tmp_path.glob("log_*"))] == ["15 saved "] * 2, stderr
    assert agent.returncode == exit_code
    assert alive([pid for both in pids for pid in both]) == []


def test_a_signal_that_means_nothing_ends_no_job_and_reaches_who_handles_it(tmp_path: Path):
    (tmp_path / "train.py").write_text(
        "import signal, time\nfrom pathlib import Path\n"
        "signal.signal(signal.SIGUSR2, lambda *_: Path('heard').touch())\n"
        "Path('up').touch()\nwhile not Path('heard').exists():\n    time.sleep(0.01)\n"
    )
    agent = subprocess.Popen(
        allranks_command("run", "--master-port", "0", "train.py"),
        cwd=tmp_path, env=clean_env(os.environ), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until((tmp_path / "up").exists, "the worker is up")
        for signum in (signal.SIGALRM, signal.SIGRTMIN, signal.SIGWINCH, signal.SIGCONT):
            agent.send_signal(signum)
        time.sleep(1.5)  # until a heartbeat has said what the rank handles
        agent.send_signal(signal.SIGUSR2)
        _, stderr = agent.communicate(timeout=60)
    finally:
        agent.kill()
        agent.communicate()
    assert agent.returncode == 0, stderr
    told = [line for line in stderr.splitlines() if line.startswith("allranks: SIG")]
    nothing = "no rank handles it, and it means nothing to allranks"
    assert sorted(told) == [
        f"allranks: SIGALRM: {nothing}",
        f"allranks: SIGRTMIN: {nothing}",
        "allranks: SIGUSR2: passed to the ranks that handle it",
    ]


def test_workers_die_with_an_agent_that_is_killed(start: Start, tmp_path: Path):
    agent = start("deaf")
    wait_for_tree(tmp_path)
    workers = [int((tmp_path / f"pids_{rank}").read_text().split()[0]) for rank in (0, 1)]
    agent.kill()
    assert alive(workers, patience_s=60) == []


def test_ctrl_c_while_the_agent_waits_for_other_nodes_ends_it(tmp_path: Path):
    (tmp_path / "train.py").write_text("")
    meeting = ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "alone")
    agent = subprocess.Popen(
        allranks_command("run", *meeting, "train.py"),
        cwd=tmp_path,
        env=clean_env(os.environ),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline_s = time.monotonic() + START_S
        while not list(tmp_path.glob("runs/*/leader.json")):
            assert time.monotonic() < deadline_s, "the leader did not announce itself"
            time.sleep(0.02)
        sent_s = time.monotonic()
        agent.send_signal(signal.SIGINT)
        _, stderr = agent.communicate(timeout=60)
    finally:
        agent.kill()
        agent.communicate()
    assert time.monotonic() - sent_s < 40
    assert agent.returncode == 130
    assert "Traceback" not in stderr


def test_a_daemon_left_by_a_worker_that_ended_well_is_ended_and_named(allranks: Allranks, tmp_path: Path):
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            import subprocess
            print(subprocess.Popen(["sleep", "300"], start_new_session=True).pid)
            """
        )
    )
    result = allranks("run", "train.py")
    pid = int(result.stdout)
    assert alive([pid]) == []
    assert result.returncode == 0
    assert f"allranks: ended processes that the workers left running: sleep (pid {pid})" in result.stderr.splitlines()


def test_a_job_whose_agent_was_stopped_for_long_goes_on(tmp_path: Path):
    """Ctrl-Z and `fg`: the workers go on meanwhile. 60 s of a leader's silence are shortened to 6 s."""
    (tmp_path / "train.py").write_text(
        "import time\nfrom pathlib import Path\nPath('up').touch()\n"
        "while not Path('go').exists():\n    time.sleep(0.01)\n"
    )
    program = (
        "import allranks.launch.agent as agent\nfrom allranks.cli.main import main\n"
        "agent.LEADER_SILENT_S = 6.0\nmain()\n"
    )
    agent = subprocess.Popen(
        [sys.executable, "-c", program, "run", "--master-port", "0", "train.py"],
        cwd=tmp_path,
        env=clean_env(os.environ),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until((tmp_path / "up").exists, "the worker is up")
        for _ in range(2):  # a Ping may wait for the agent when it is stopped, not each time
            agent.send_signal(signal.SIGSTOP)
            time.sleep(7)
            agent.send_signal(signal.SIGCONT)
            time.sleep(0.5)
        (tmp_path / "go").touch()
        _, stderr = agent.communicate(timeout=60)
    finally:
        agent.kill()
        agent.communicate()
    assert agent.returncode == 0, stderr
