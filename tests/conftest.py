"""What all tests share: a clean environment, and how a test runs allranks for real."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # a machine with a GPU and no package index: tests/gpu has no properties
    pass
else:
    # CI has the same examples each time; `make test-by-hand` looks for new ones. No check of their speed or size: it
    # would fail on a slow machine.
    PROFILE = settings(
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )
    settings.register_profile("repeatable", PROFILE, max_examples=40, derandomize=True)
    settings.register_profile("random", PROFILE, max_examples=400)
    settings.load_profile("repeatable")

FOREIGN = (
    "SLURM", "OMPI_", "PMI", "MPI_", "MV2_", "TORCHELASTIC", "ALLRANKS", "PET_", "NCCL_", "GLOO_", "ROLE_",
    "FLUX_", "PALS_", "PBS_", "JSM_", "LSB_", "AIHC_", "LWS_", "VC_", "VK_", "JOB_COMPLETION_INDEX", "KUBERNETES_",
    "SKYPILOT_", "DSTACK_", "SM_", "NPROC_PER_NODE",
)  # fmt: skip
NAMES = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE",
    "CUDA_VISIBLE_DEVICES",
}  # fmt: skip


def clean_env(env: Mapping[str, str], **more: str) -> dict[str, str]:
    """The environment without anything that a launcher, a profile or another test may have left."""
    kept = {name: value for name, value in env.items() if name not in NAMES and not name.startswith(FOREIGN)}
    return kept | more


@pytest.fixture(autouse=True)
def clean_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(clean_env(os.environ)):
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    """End what a test has left in a session of its own.

    Where a verb runs in this process, what outlives its test becomes a child of it, and the next test would take that
    for a process of its own. Children of fixtures that live longer were there before.
    """
    before = detached_children()
    yield
    for pid in detached_children() - before:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def detached_children() -> set[int]:
    """Children of this process whose session is another one, as that of all that allranks starts."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none, as in most tests; reading the files would be a sixth of their time
        return set()
    found = set()
    for path in Path("/proc/self/task").glob("*/children"):
        told = ""
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            told = path.read_text()
        for pid in map(int, told.split()):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) != os.getsid(0):
                    found.add(pid)
    return found


NOBODY = 65534
IS_LAB_REQUIRED = os.environ.get("ALLRANKS_REQUIRE_LAB") == "1"
"""Read once: while a test runs, its environment is clean."""


def pytest_configure() -> None:
    """Give the programs that tests start the default action of SIGINT, SIGQUIT and SIGHUP.

    A shell without job control starts `make test &` with SIGINT and SIGQUIT ignored, nohup does so with SIGHUP, and
    children inherit it through exec. A handler does not survive exec; an empty one leaves pytest itself as it was.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


HANG_S = 120.0
"""A command that runs for so long hangs. Shorter ones would fail on a machine that is slow and busy."""

Allranks = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def allranks(tmp_path: Path) -> Allranks:
    """Run the `allranks` command in `tmp_path` and return what it did; a hang fails the test."""

    def run(
        *arguments: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = HANG_S
    ) -> subprocess.CompletedProcess[str]:
        no_lab = {"ALLRANKS_LAB_DIR": "/nowhere"}  # messages differ where a lab is up
        return subprocess.run(
            allranks_command(*arguments),
            cwd=tmp_path,
            env=clean_env(os.environ, **no_lab | dict(env or {})),
            capture_output=True,
            text=True,
            timeout=max(timeout_s, HANG_S),
            check=False,
        )

    return run


class Told(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


Tell = Callable[..., Told]


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tell:
    """Run `allranks` in `tmp_path`, in this process: most verbs need no interpreter of their own to be tested."""
    from allranks.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALLRANKS_LAB_DIR", "/nowhere")

    def run(*words: str) -> Told:
        monkeypatch.setattr("sys.argv", ["allranks", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return Told(int(ended.value.code or 0), said.out, said.err)

    return run


@pytest.fixture
def allranks_here(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> Allranks:
    """As `allranks`, but in this process: for verbs that start nothing, most of the time would be imports."""

    def run(*words: str | Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            told = tell(*map(str, words))
        return subprocess.CompletedProcess(words, told.code, told.out, told.err)

    return run


@pytest.fixture
def stand_in() -> Iterator[int]:
    """A process of the test's own that looks like an agent, since only its command is looked at."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # as if it were allranks"]) as process:
        wait_until(lambda: b"allranks" in Path(f"/proc/{process.pid}/cmdline").read_bytes(), "its command")
        yield process.pid
        process.kill()


@contextlib.contextmanager
def agents_in_background() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Give a function that starts `allranks run` in a directory, with more variables; in the end all are killed."""
    agents: list[subprocess.Popen[str]] = []

    def start(directory: Path, *arguments: object, **env: str) -> subprocess.Popen[str]:
        agents.append(
            subprocess.Popen(
                allranks_command("run", *map(str, arguments)),
                cwd=directory,
                env=clean_env(os.environ, **env),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return agents[-1]

    yield start
    for agent in agents:
        agent.kill()
        agent.communicate(timeout=HANG_S)  # its workers hold its pipes until its sweeper ends them


@pytest.fixture
def without_root() -> Iterator[Path]:
    """A folder for a test that runs without root's rights: root may read and write everything."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            yield Path(folder)
        finally:
            if is_root:
                os.seteuid(0)


def write(path: Path, text: str) -> Path:
    """Write a file of a test, without the indentation that its text has in the test, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    return path


SLOW = r"(\[[^]]+\] )?allranks: (still waiting |no report was written \(it took longer than )"


def without_waiting(stderr: str) -> str:
    """What a command said, without its lines on what it waits for, and on a report that took too long: only a slow
    machine takes long enough for them."""
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(SLOW, line))


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has buried yet does not, once all its threads have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] != "Z" or int(fields[17]) > 1


def wait_until(is_so: Callable[[], Any], what: str, timeout_s: float = HANG_S) -> Any:
    """Wait for something that must come, and return it."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := is_so()):
        assert time.monotonic() < deadline_s, f"{what}: not in {timeout_s} s"
        time.sleep(0.005)
    return found


_lanes = itertools.count(os.getpid() * 97)
PORTS_OF_A_LEADER = 16
"""A leader takes the first free one of so many (wire.leader.PORTS_TRIED), and others look for it there."""


def free_port() -> int:
    """A port with nobody near it: below those that the kernel hands out (32768 on), and in another lane than those of
    other tests, so that neither a connection takes it nor an agent of another test meets its leader."""
    for lane in _lanes:
        number = 10_000 + PORTS_OF_A_LEADER * (lane % 1250)
        with contextlib.suppress(OSError), socket.create_server(("", number)):
            return number
    raise AssertionError


_uses_torch = True
"""Whether the test that runs may load torch."""


def allranks_command(*arguments: str | Path) -> Sequence[str]:
    """The command line of the allranks under test.

    A job of several ranks, or with restarts, has a standby, which imports torch on each node whatever the script does:
    four times the time of a small job. So only tests that are marked `torch` or `gpu` have one.
    """
    words = [*map(str, arguments)]
    if words[:1] == ["run"] and not _uses_torch:
        words.insert(1, "--no-standby")
    return [sys.executable, "-m", "allranks", *words]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection, which would walk through ten thousand tests again and again: in each of the
    processes that run tests, it takes as long as all the rest. Later collections leave them out, too."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


QUICK_AND_LAST = "tests/why/"
"""Thousands of tests of milliseconds each: they keep all cores busy while the last long ones run."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts torch comes late, and of it first what has more time than others, since it needs it. But healthy jobs
    come first: the end of `make test` would wait for one of them."""

    def turn(item: pytest.Item) -> tuple[int, float]:
        if item.get_closest_marker("healthy"):
            return 0, 0
        if item.get_closest_marker("torch") is None:
            return 3 if item.nodeid.startswith(QUICK_AND_LAST) else 1, 0
        timeout = item.get_closest_marker("timeout")
        return 2, -timeout.args[0] if timeout else 0

    items.sort(key=turn)


LABS = {
    "jobs": ("test_epilog.py", "test_events.py", "test_jobs.py", "test_run.py", "test_stack.py"),
    "faults": (
        "test_bench.py", "test_check.py", "test_drill.py", "test_faults.py", "test_lab.py", "test_leader.py",
        "test_running.py", "test_slow_network.py",
    ),
}  # fmt: skip
"""Tests of these files share one lab each, one after the other; both take about as long."""
SHARING = (
    "tests/cli/test_diff_rerun.py", "tests/examples/test_training.py", "tests/guard/inside/test_booked_scripts.py",
    "tests/guard/inside/test_worker_inside.py", "tests/state/truth/test_replay.py", "tests/why/logs/test_match.py",
)  # fmt: skip
"""Tests of each of these files share what takes long: runs, or the patterns of all causes, compiled."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process runs all tests that share something: those of a lab wait for SLURM while the others compute. (No
    group: xdist 3.8 gives its name to an attribute that pytest 9.2 no longer has.)"""
    from xdist.scheduler import LoadScopeScheduling

    class OneProcessPerScope(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            name = path.rpartition("/")[2]
            labs = (lab for lab, files in LABS.items() if path.startswith("tests/lab/") and name in files)
            return next(labs, path if path in SHARING else nodeid)

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            # xdist keeps all that a process has run, and counts through it after each test: forget what is complete.
            units = self.assigned_work[node]
            for scope in [scope for scope, unit in units.items() if all(unit.values())]:
                del units[scope]

        def remove_node(self, node: Any) -> str | None:
            # xdist 3.8 gives the test that ended a process to the next process, and so on.
            units = self.assigned_work.pop(node)
            left = {scope: unit for scope, unit in units.items() if not all(unit.values())}
            if not left:
                return None
            unit = next(iter(left.values()))
            ended: str = next(test for test, is_complete in unit.items() if not is_complete)
            unit[ended] = True
            self.workqueue.update((scope, unit) for scope, unit in left.items() if not all(unit.values()))
            for other in self.assigned_work:
                self._reschedule(other)
            return ended

    return OneProcessPerScope(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    global _uses_torch
    _uses_torch = any(item.get_closest_marker(name) for name in ("torch", "gpu"))
    for marker in item.iter_markers("program"):
        name, package = marker.args
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not on PATH; apt-get install {package}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where a lab is required, as in CI, a test that is skipped has failed if it needs a lab or one of its programs."""
    report = yield
    needs_lab = item.get_closest_marker("lab") or item.get_closest_marker("program")
    if report.skipped and needs_lab and IS_LAB_REQUIRED:
        report.outcome = "failed"
        report.longrepr = f"ALLRANKS_REQUIRE_LAB=1, but this test was skipped: {report.longreprtext}"
    return report
