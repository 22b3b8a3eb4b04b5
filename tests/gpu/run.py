"""Runs the tests of a real GPU, each in a process of its own, and writes docs/evidence/gpu.md.

    make gpu PYTHON=python3                 exit code 0: all held; 1: something did not; 2: no GPU here, or no torch
    make gpu PYTHON=python3 OUT=DIR         also DIR/gpu.md and DIR/gpu-logs.tar.gz
    python3 tests/gpu/run.py --out DIR      the same where there is no make
    make gpu REHEARSE=1                     on the CPU over Gloo: proves the tests' own code, and writes no evidence

It installs nothing and needs no network. `.carried/cp312` (filled by `make carry`) brings the packages that such a
machine lacks. A test that hangs is killed after --each-s seconds with all its processes, and the run goes on. The
report is rewritten after each test, so that a run that is cut off leaves one, too. Tests marked `alone` (they measure,
or look at the idle GPU) run first, one after another; the others then run side by side. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from machine import describe_machine, why_no_gpu

from report import Outcome, Result, read_result, render

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EVIDENCE = ROOT / "docs/evidence/gpu.md"
LOGS = ROOT / "gpu-logs"
MARK = "GPU_SUITE_TEST"
"""Variable that all processes of a test inherit, so that those which outlive it are found."""
LARGEST_LOG_BYTES = 2 << 20
"""Of a file that goes into the archive: logs do, checkpoints do not."""
CORES_A_TEST = 5
MEASURES_LONGER = 3
"""Times --each-s, for those that run alone: saving 1.2 GB 48 times took 129 s."""


def main() -> int:
    """Run what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description="Run the tests of a real GPU.")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU over Gloo, to test the tests")
    parser.add_argument("--out", type=Path, help="folder for a copy of the report and an archive of the logs")
    parser.add_argument("--each-s", type=float, default=60, help=f"limit of one test; x{MEASURES_LONGER} alone")
    parser.add_argument("--total-s", type=float, default=580, help="limit of the whole run")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // CORES_A_TEST), help="side by side")
    parser.add_argument("--only", default="", help="pytest's -k: run only these")
    parser.add_argument("--tests", type=Path, default=HERE, help="folder of the tests")
    parser.add_argument("--logs", type=Path, default=LOGS, help="folder of the raw logs; it is emptied first")
    told = parser.parse_args()
    missing = "" if told.rehearse else why_no_gpu()
    if missing:
        print(f"error: no NVIDIA GPU on this machine ({missing}); without one: make gpu REHEARSE=1", file=sys.stderr)
        return 2
    env = test_env(is_rehearsal=told.rehearse)
    if lacking := why_not_runnable(env):
        print(f"error: {lacking}", file=sys.stderr)
        return 2
    return Suite(told, env).run()


def test_env(*, is_rehearsal: bool) -> dict[str, str]:
    """The environment of all tests: allranks from the source tree, and the packages that were carried along."""
    carried = ROOT / ".carried" / f"cp{sys.version_info.major}{sys.version_info.minor}"
    path = [str(ROOT / "src"), *([str(carried)] if carried.is_dir() else [])]
    path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    # Plugins of the machine's pytest may warn, and warnings are errors here; the one that is needed is named.
    return os.environ | {
        "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), str(carried / "bin")]),  # py-spy
        "PYTHONPATH": os.pathsep.join([str(HERE), *path]),
        "GPU_SUITE_PATH": os.pathsep.join(path),
        "GPU_SUITE_REHEARSAL": str(int(is_rehearsal)),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def why_not_runnable(env: dict[str, str]) -> str:
    """Return what this Python lacks, and where it comes from; empty where nothing is missing."""
    names = ("torch", "pytest", "pytest_timeout", "click", "hyperscan", "jinja2", "msgspec", "psutil", "zstandard")
    look = f"import importlib.util as u; print(*[n for n in {names!r} if u.find_spec(n) is None])"
    ran = subprocess.run([sys.executable, "-c", look], env=env, capture_output=True, text=True, timeout=60, check=False)
    lacking = ran.stdout.split()
    if "torch" in lacking:
        return f"{sys.executable} has no torch; name a Python that has: make gpu PYTHON=/path/to/python3"
    if lacking:
        return f"{sys.executable} lacks {', '.join(lacking)}; where a package index can be reached, run: make carry"
    return "" if ran.returncode == 0 else f"{sys.executable} does not start: {ran.stderr.strip()[-200:]}"


class Suite:
    """One run of all tests."""

    def __init__(self, told: argparse.Namespace, env: dict[str, str]) -> None:
        self._told, self._env = told, env
        self._began_s = time.monotonic()
        self._end_s = self._began_s + told.total_s
        self._results: dict[str, Result] = {}
        self._lock = threading.Lock()
        self._machine: dict[str, str] = {}

    def run(self) -> int:
        """Run all tests; returns the exit code."""
        logs: Path = self._told.logs
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        signal.signal(signal.SIGTERM, self._cut_off)
        signal.signal(signal.SIGINT, self._cut_off)
        self._machine = describe_machine(sys.executable, self._env)
        print("\n".join(f"{name}: {value}" for name, value in self._machine.items()), flush=True)
        tests = self._collect()
        over = "the time of the whole run was over before"
        self._results = {test: Result(name_of(test), Outcome.UNTRIED, why=over) for test, _ in tests}
        alone = [test for test, is_alone in tests if is_alone]
        together = [test for test, is_alone in tests if not is_alone]
        try:
            self._run_all(alone, jobs=1, each_s=MEASURES_LONGER * self._told.each_s)
            self._run_all(together, jobs=self._told.jobs, each_s=self._told.each_s)
        finally:
            self._write()
            self._pack()
        failed = [each for each in self._results.values() if each.outcome is Outcome.FAILED]
        counts = [sum(each.outcome is outcome for each in self._results.values()) for outcome in Outcome]
        print(", ".join(f"{count} {outcome}" for count, outcome in zip(counts, Outcome, strict=True)))
        print(f"report: {self._report_path}; raw logs: {logs}")
        return 1 if failed or not self._results else 0

    @property
    def _report_path(self) -> Path:
        """Evidence is what a GPU said; what a rehearsal or other tests say stays with the logs."""
        is_evidence = not self._told.rehearse and self._told.tests == HERE
        return EVIDENCE if is_evidence else self._told.logs / "rehearsal.md"

    def _collect(self) -> list[tuple[str, bool]]:
        """All tests as pytest takes them, with whole paths, and whether each must run alone."""
        listing = self._told.logs / "collected.json"
        only = ["-k", self._told.only] if self._told.only else []
        command = [*self._pytest(self._told.tests), "--collect-only", "-q", *only]
        ran = subprocess.run(
            command, cwd=ROOT, env=self._env | {"GPU_SUITE_LISTING": str(listing)}, capture_output=True, text=True,
            timeout=self._told.each_s, check=False,
        )  # fmt: skip
        if not listing.exists():
            sys.exit(f"error: pytest cannot collect the tests:\n{ran.stdout[-2000:]}{ran.stderr[-1000:]}")
        return [(str(test), bool(is_alone)) for test, is_alone in json.loads(listing.read_text())]

    def _pytest(self, what: Path | str) -> list[str]:
        more = ["-p", "pytest_timeout", "-p", "gpu_suite_plugin", "-p", "no:cacheprovider", "-o", "timeout=0"]
        return [sys.executable, "-m", "pytest", *more, str(what)]

    def _run_all(self, tests: list[str], *, jobs: int, each_s: float) -> None:
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for test in tests:
            waiting.put(test)

        def work() -> None:
            with contextlib.suppress(queue.Empty):
                while time.monotonic() < self._end_s:
                    self._run_one(waiting.get_nowait(), each_s)

        threads = [threading.Thread(target=work) for _ in range(min(jobs, len(tests)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run_one(self, test: str, each_s: float) -> None:
        number = list(self._results).index(test) + 1
        name = f"{number:02}_" + re.sub(r"[^A-Za-z0-9]+", "_", test.partition("::")[2])[:80].strip("_")
        folder: Path = self._told.logs / name
        folder.mkdir()
        xml = folder / "result.xml"
        command = [
            *self._pytest(test),
            f"--junitxml={xml}",
            f"--basetemp={folder / 'tmp'}",
            "-o",
            "junit_family=xunit1",
        ]
        limit_s = min(each_s, max(1.0, self._end_s - time.monotonic()))
        began_s = time.monotonic()
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self._env | {MARK: name}, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            is_late = False
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                is_late = True
                process.kill()
                process.wait()
        left = kill_left_overs(name)
        took_s = time.monotonic() - began_s
        where = f"{folder.name}/log.txt"
        try:
            result = read_result(name_of(test), xml.read_text(), log=where)
        except (OSError, ValueError) as exc:
            why = f"it did not end within {limit_s:.0f} s" if is_late else f"exit code {process.returncode}: {exc}"
            result = Result(name_of(test), Outcome.FAILED, took_s, why=why, log=where)
        with self._lock:
            self._results[test] = result
            self._write()
        also = f"; {left} processes were left over and killed" if left else ""
        print(f"{result.outcome:<18} {took_s:5.1f} s  {result.test}{also}", flush=True)

    def _write(self) -> None:
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        took_s = time.monotonic() - self._began_s
        title = "A rehearsal on the CPU" if self._told.rehearse else "On a real GPU"
        text = render(self._machine, list(self._results.values()), date=date, took_s=took_s, title=title)
        self._report_path.parent.mkdir(parents=True, exist_ok=True)
        self._report_path.write_text(text)
        if self._told.out:
            self._told.out.mkdir(parents=True, exist_ok=True)
            (self._told.out / "gpu.md").write_text(text)

    def _pack(self) -> None:
        """Two files are easily carried home, hundreds are not."""
        if not self._told.out:
            return
        with tarfile.open(self._told.out / "gpu-logs.tar.gz", "w:gz") as archive:
            for path in sorted(self._told.logs.rglob("*")):
                with contextlib.suppress(OSError):  # a process may still be removing it
                    if path.is_file() and not path.is_symlink() and path.stat().st_size <= LARGEST_LOG_BYTES:
                        archive.add(path, Path("gpu-logs") / path.relative_to(self._told.logs), recursive=False)

    def _cut_off(self, signum: int, frame: FrameType | None) -> None:
        self._end_s = 0.0
        kill_left_overs("")
        raise SystemExit(128 + signum)


def name_of(test: str) -> str:
    """`test_facts.py::test_cuda_starts` of a test with a whole path."""
    path, _, end = test.partition("::")
    return f"{Path(path).name}::{end}"


def kill_left_overs(name: str) -> int:
    """Kill all processes that a test started and that still run; returns how many there were.

    Args:
        name: of the test; empty: of all tests.
    """
    killed = 0
    for pid in processes_of(name):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def processes_of(name: str) -> Iterator[int]:
    """Processes that inherited the mark of this test; of any test where the name is empty."""
    mark = f"\0{MARK}={name}".encode() + (b"\0" if name else b"")
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(path.name) != os.getpid() and mark in b"\0" + (path / "environ").read_bytes():
                yield int(path.name)


if __name__ == "__main__":
    sys.exit(main())
