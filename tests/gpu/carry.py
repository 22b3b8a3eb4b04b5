"""Fills .carried/cp312 with the packages that a GPU machine without a package index lacks.

    make carry                     for Python 3.12 on x86-64; once, where a package index can be reached
    make carry CARRY_FOR=3.13      for another Python

What allranks and the tests import is there afterwards, but torch and numpy, which the machine has: tests/gpu/run.py
puts the folder on PYTHONPATH where the Python is of that version. Nothing is compiled: wheels only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOR_TESTS = ("pytest", "pytest-timeout")
GLIBCS = ("2_28", "2_17", "2_12", "2_5")
"""Of manylinux tags; pip takes each one literally."""
NOT_IMPORTED = ("zstandard/_cffi*", "bin/pytest", "bin/py.test", "bin/pygmentize")
"""Large, or scripts with this machine's paths in them. CPython takes zstandard's other backend."""


def main() -> None:
    """Fill the folder, anew."""
    parser = argparse.ArgumentParser(description="Fill .carried with the packages that a GPU machine lacks.")
    parser.add_argument("--python-version", default="3.12")
    parser.add_argument("--into", type=Path, default=ROOT / ".carried")
    told = parser.parse_args()
    target = told.into / f"cp{told.python_version.replace('.', '')}"
    draft = target.with_name(f"{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    platforms = [f"--platform=manylinux_{glibc}_x86_64" for glibc in GLIBCS]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile",
        "--only-binary=:all:", "--implementation=cp", f"--python-version={told.python_version}", *platforms,
        f"--constraint={ROOT / 'constraints.txt'}", f"--target={draft}", *needed, *FOR_TESTS,
    ]  # fmt: skip
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)
    for pattern in NOT_IMPORTED:
        for path in draft.glob(pattern):
            path.unlink()
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    size_mib = sum(path.stat().st_size for path in target.rglob("*") if path.is_file()) / 2**20
    packages = sorted(path.name.partition("-")[0] for path in target.glob("*.dist-info"))
    print(f"{os.path.relpath(target)}: {size_mib:.0f} MiB, {', '.join(packages)}")


if __name__ == "__main__":
    main()
