"""Runs real jobs under one version of torch and Python after the other, and writes docs/evidence/versions.md.

    python tests/versions/run.py                          all of VERSIONS
    python tests/versions/run.py 2.5.1 2.13.0@3.12        these
    python tests/versions/run.py --resume                 those without a row of today
    python tests/versions/run.py --python /opt/py314/bin/python3.14 2.15.0@3.14

Each version gets an environment of its own (see environment.py), runs test_jobs.py in it, and is deleted: at most 10 GB
at a time. The page is rewritten after each version, so a run that is cut off leaves what it has. What cannot be had (no
such Python, no such wheel) gets a row that says so.

Exit code: 0 if all jobs passed, else 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from environment import ROOT, CannotMake, environment, find_python
from table import Row, merge, read_rows, render, row_of

PAGE = ROOT / "docs/evidence/versions.md"
JOBS = Path(__file__).parent / "test_jobs.py"
LOGS = ROOT / "versions-logs"
VERSIONS = (
    "2.15.0@3.11", "2.15.0@3.14", "2.13.0@3.13", "2.13.0@3.12", "2.13.0@3.11",
    "2.10.0@3.11", "2.8.0@3.11", "2.6.0@3.11", "2.5.1@3.11", "2.4.1@3.11",
)  # fmt: skip
"""Order matters: a torch takes CUDA libraries that a newer one left."""
DEFAULT_PYTHON = "3.11"
NEEDED_BYTES = 10 << 30
JOBS_S = 900


def main() -> int:
    """Run what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description="Run real jobs under many versions of torch.")
    parser.add_argument("versions", nargs="*", metavar="TORCH[@PYTHON]", help="default: all of them")
    parser.add_argument("--resume", action="store_true", help="leave out what has a row of today")
    parser.add_argument(
        "--python", type=Path, action="append", default=[], help="an interpreter to use for its version"
    )
    parser.add_argument("--folder", type=Path, help="where environments are made; default: a temporary one")
    parser.add_argument("--total-s", type=float, default=7200, help="no environment is begun after so long")
    parser.add_argument("--page", type=Path, default=PAGE)
    told = parser.parse_args()
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    page: Path = told.page
    rows = read_rows(page.read_text()) if page.exists() else []
    done = {row.key for row in rows if row.date == date} if told.resume else set()
    began_s, is_whole = time.monotonic(), True
    folder = told.folder or Path(tempfile.mkdtemp(prefix="versions-"))
    folder.mkdir(parents=True, exist_ok=True)
    for wanted in told.versions or VERSIONS:
        version, _, python = wanted.partition("@")
        if (version, python or DEFAULT_PYTHON) in done:
            continue
        if time.monotonic() - began_s > told.total_s:
            print(f"{wanted}: not run, the time is over", flush=True)
            is_whole = False
            continue
        row = try_out(version, python or DEFAULT_PYTHON, told.python, folder / wanted.replace("@", "-"), date)
        is_whole &= row.jobs.endswith(" passed")
        rows = merge(rows, row)
        page.write_text(render(rows))
        print(f"{row.torch} @ {row.python}: {row.jobs} ({time.monotonic() - began_s:.0f} s so far)", flush=True)
    if told.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if is_whole else 1


def try_out(version: str, python: str, named: list[Path], folder: Path, date: str) -> Row:
    """Return what the jobs say of one version."""
    interpreter = find_python(python, named)
    if interpreter is None:
        return Row(version, python, date, f"not run: no Python {python} on this machine")
    if (free := shutil.disk_usage(folder.parent).free) < NEEDED_BYTES:
        return Row(version, python, date, f"not run: {free >> 30} GB of disk are free, 10 are needed")
    try:
        with environment(version, interpreter, folder, shared=folder.parent / "shared") as made:
            print(f"{made.torch} @ {python}: {made.size_bytes >> 20} MB in {folder}", flush=True)
            xml = folder / "result.xml"
            LOGS.mkdir(exist_ok=True)
            with (LOGS / f"{folder.name}.txt").open("w") as log:
                run_jobs(made.python, folder, xml, log.fileno())
            return row_of(made.torch, python, xml.read_text(), date=date)
    except (CannotMake, OSError, ValueError, subprocess.TimeoutExpired) as exc:
        return Row(version, python, date, f"not run: {exc}")


def run_jobs(python: Path, folder: Path, xml: Path, log: int) -> None:
    """Run test_jobs.py in an environment; what came of it is in the junit file."""
    options = ["-p", "no:cacheprovider", "-p", "pytest_timeout", "-o", "filterwarnings=default", f"--junitxml={xml}"]
    options += ["-o", "junit_family=xunit1", f"--basetemp={folder / 'jobs'}", "-v"]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "VIRTUAL_ENV": str(folder / "venv")}
    command = [str(python), "-m", "pytest", *options, str(JOBS)]
    subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log, timeout=JOBS_S, check=False)


if __name__ == "__main__":
    sys.exit(main())
