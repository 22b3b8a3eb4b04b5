"""Does the runner of the GPU's tests keep its word without a GPU: one line, limits, a report of all that happened?"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from allranks.host.process import read_process
from allranks.model.beat import ProcessState
from conftest import clean_env, wait_until
from gpu.machine import why_no_gpu
from gpu.report import Outcome, Result, read_result, render

ROOT = Path(__file__).parents[1]
RUN = ROOT / "tests/gpu/run.py"
TESTS = '''\
import os, subprocess, sys, time
import pytest

def test_holds(record_property):
    """Expected: it holds, as NCCL says."""
    record_property("seconds to the verdict", 1.5)

def test_breaks():
    """Expected: one is two."""
    assert 1 == 2, "one | two"

def test_dies():
    os._exit(3)

def test_hangs():
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    left = subprocess.Popen(sleeper, start_new_session=True)
    open(os.environ["LEFT"], "w").write(str(left.pid))
    time.sleep(600)

def test_needs_root():
    pytest.skip("not root")
'''

TORCH = """\
__version__ = "2.99"
class version: cuda = "13.0"
class cuda:
    is_available = device_count = staticmethod(lambda: 1)
    nccl = type("nccl", (), {"version": staticmethod(lambda: (2, 28, 9))})
"""
"""As much of torch as the report wants to know; the real one takes seconds to import."""


def run(where: Path, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run run.py with a torch of ours, a folder of tests in `where`, and its logs beside them."""
    for path, text in ((where / "torch/__init__.py", TORCH), (where / "tests/test_it.py", TESTS)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    folders = ["--tests", str(where / "tests"), "--logs", str(where / "logs")]
    command = [sys.executable, str(RUN), *folders, *map(str, arguments)]
    env = clean_env(os.environ, PYTHONPATH=str(where), **env)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.skipif(not why_no_gpu(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_touches_nothing(tmp_path):
    ran = run(tmp_path, "--out", tmp_path / "out")
    assert ran.returncode == 2
    assert ran.stdout == ""
    (line,) = ran.stderr.splitlines()
    assert line.startswith("error: no NVIDIA GPU on this machine (no /dev/nvidia0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tests", "torch"]


def test_it_goes_on_after_failures_kills_what_hangs_and_reports_all(tmp_path):
    logs, out, left = (tmp_path / name for name in ("logs", "out", "left"))
    ran = run(tmp_path, "--rehearse", "--out", out, "--each-s", 15, "--jobs", 3, LEFT=str(left))
    assert ran.returncode == 1, ran.stderr
    assert "1 held, 3 did not hold, 1 could not be tried" in ran.stdout
    report = (out / "gpu.md").read_text()
    assert report == (logs / "rehearsal.md").read_text()
    assert report.startswith("# A rehearsal on the CPU\n")
    assert "| torch | 2.99 |" in report
    assert "| NCCL of torch | 2.28.9 |" in report
    assert "1 held, 3 did not hold, 1 could not be tried" in report
    assert "| seconds to the verdict: 1.5 |" in report
    assert "it did not end within 15 s" in report
    assert "exit code 3: pytest left no result" in report or "exit code 3: [Errno 2]" in report
    assert "AssertionError: one | two" in report
    assert "Expected: one is two." in report
    assert "| not root |" in report
    # Who reaps orphans may be slow.
    wait_until(lambda: read_process(int(left.read_text())).state is ProcessState.GONE, "what a test left is killed")
    with tarfile.open(out / "gpu-logs.tar.gz") as archive:
        assert "gpu-logs/02_test_breaks/log.txt" in archive.getnames()


def test_when_the_time_is_over_the_rest_is_reported_as_untried(tmp_path):
    ran = run(tmp_path, "--rehearse", "--total-s", 0)
    assert "0 held, 0 did not hold, 5 could not be tried" in ran.stdout
    report = (tmp_path / "logs/rehearsal.md").read_text()
    assert report.count("| the time of the whole run was over before |") == 5


def test_a_device_file_or_nvidia_smi_says_that_there_is_a_gpu(tmp_path):
    def smi(text: str) -> str:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{text}'\n")
        program.chmod(0o755)
        return str(tmp_path)

    root = tmp_path / "root"
    (root / "dev").mkdir(parents=True)
    assert why_no_gpu(root=root, path="/nowhere") == "no /dev/nvidia0, and nvidia-smi is not installed"
    problem = "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."
    assert why_no_gpu(root=root, path=smi(problem)) == f"no /dev/nvidia0, and nvidia-smi -L says: {problem}"
    assert why_no_gpu(root=root, path=smi("GPU 0: NVIDIA H100 (UUID: GPU-1b8f)")) == ""
    (root / "dev/nvidiactl").touch()
    assert why_no_gpu(root=root, path="/nowhere") != ""
    (root / "dev/nvidia0").touch()
    assert why_no_gpu(root=root, path="/nowhere") == ""


def test_the_packages_that_must_be_there_are_those_of_allranks():
    """What run.py looks for before it starts is what pyproject.toml needs, beside torch and pytest."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    text = RUN.read_text()
    names = {each.partition(">")[0] for each in needed} - {"py-spy"}  # a program; its test would say what is missing
    assert {name for name in names if f'"{name}"' not in text} == set()


XML = """<?xml version="1.0"?><testsuites><testsuite><testcase classname="gpu.test_x" name="test_y" time="2.5">
<properties><property name="expected" value="Expected: 0."/><property name="code" value="1"/></properties>{}
</testcase></testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("inside", "outcome", "why"),
    [
        ("", Outcome.HELD, ""),
        ('<skipped type="pytest.skip" message="no root">x.py:3: no root</skipped>', Outcome.UNTRIED, "no root"),
        ('<failure message="a">a\n&gt; x\nE   assert 1 == 0\nx.py:9</failure>', Outcome.FAILED, "   assert 1 == 0"),
        ('<error message="fixture failed">no marked line</error>', Outcome.FAILED, "fixture failed"),
    ],
)  # fmt: skip
def test_a_result_is_read_as_pytest_wrote_it(inside: str, outcome: Outcome, why: str):
    result = read_result("test_x.py::test_y", XML.format(inside), log="y/log.txt")
    assert result == Result("test_x.py::test_y", outcome, 2.5, "Expected: 0.", ("code: 1",), why, "y/log.txt")


@pytest.mark.parametrize("text", ["", "<testsuites/>", XML[:90]])
def test_a_torn_result_is_none(text: str):
    with pytest.raises(ValueError, match="pytest left no result"):
        read_result("test_x.py::test_y", text, log="")


def test_the_report_has_machine_date_and_all_three_outcomes():
    results = [
        Result("a", Outcome.HELD, 1.0, "Expected: x.", ("NCCL: 2.28.9", "codes: [0, 0]")),
        Result("b", Outcome.FAILED, 2.0, "Expected: y.", ("code: 7",), "assert 7 == 0", "b/log.txt"),
        Result("c", Outcome.UNTRIED, why="a | b"),
    ]
    text = render({"GPU": "H100"}, results, date="2026-11-23 03:00 UTC", took_s=61.4, title="T")
    assert text.startswith(
        "# T\n2026-11-23 03:00 UTC, 61 s: 1 held, 1 did not hold, 1 could not be tried. Written by `make gpu`.\n\n"
        "| | |\n|---|---|\n| GPU | H100 |\n\n## What did not hold (1)\n\n### b\n\nExpected: y.\n\n- code: 7\n\n```\n"
        "assert 7 == 0\n```\n\n2.0 s; raw log: `b/log.txt`\n\n## What held (1)\n"
    )
    assert "| a | 1.0 | NCCL: 2.28.9; codes: [0, 0] |" in text
    assert text.endswith("## What could not be tried (1)\n\n| test | why |\n|---|---|\n| c | a \\| b |\n")


def test_the_tests_of_a_gpu_need_no_package_that_is_not_carried() -> None:
    """hypothesis and pytest-xdist are not there: a plugin is not loaded, an import fails."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('hypothesis', 'xdist', 'accelerate', 'lightning_fabric', 'transformers')))\n"
        "import pytest\n"
        "only = ['--collect-only', '-q', '-p', 'pytest_timeout', '-p', 'no:cacheprovider']\n"
        "sys.exit(pytest.main([*only, 'tests/gpu']))\n"
    )
    env = clean_env(os.environ, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests collected" in done.stdout
