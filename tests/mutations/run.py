"""Apply each mutation to a copy of the source, run the tests that must catch it, and write what came out.

    python tests/mutations/run.py                    all; writes docs/evidence/mutations.md
    python tests/mutations/run.py barred exit-75     those whose names contain one of these words; writes nothing

The work tree is never changed. Each worker of the pool has a copy of `src` and a virtual environment of its own, whose
path leads to that copy first and to the packages of this environment second. So tests that start `python -m allranks`
run the changed source, too. Before anything is changed, all named tests must pass on a copy.

Exit code: 0 if every mutation was caught, else 1.
"""

from __future__ import annotations

import argparse
import compileall
import datetime
import os
import platform
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from table import ROOT, Mutation, read_table

PAGE = ROOT / "docs/evidence/mutations.md"
TIMEOUT_S = 300
"""For the tests of one mutation. A mutation that hangs longer is an error of the table: name a quicker test."""
FAILED, PASSED = 1, 0
"""Exit codes of pytest; all others mean that the tests did not run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests of one mutation said."""

    mutation: Mutation
    is_caught: bool
    seconds: float
    caught_by: str = ""
    """The first test that failed."""
    error: str = ""
    """Why the tests could not run; empty: they ran."""


class Copy:
    """A copy of the source with an environment that imports it."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "src"
        shutil.copytree(ROOT / "src", self.source, ignore=shutil.ignore_patterns("__pycache__"))
        # By hash: a file that is changed twice within a second is still compiled anew.
        compileall.compile_dir(self.source, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        venv.create(folder / "venv", symlinks=True)
        self._python = folder / "venv/bin/python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        # A path file adds these folders and does not read theirs: the editable install of this checkout stays out.
        packages = folder / f"venv/lib/{version}/site-packages/copy.pth"
        packages.write_text(f"{self.source}\n{sysconfig.get_path('purelib')}\n")
        # A program that belongs to no source: it is looked for beside the interpreter.
        self._python.with_name("py-spy").symlink_to(Path(sys.executable).with_name("py-spy"))

    def run(self, tests: Sequence[str], *, timeout_s: float | None = None) -> tuple[int, str]:
        """Return pytest's exit code and what it said.

        Args:
            tests: ids.
            timeout_s: of all of them together; None: only each test's own timeout counts.
        """
        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
        result = subprocess.run(
            [str(self._python), "-m", "pytest", *options, *tests],
            cwd=ROOT,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return result.returncode, result.stdout + result.stderr

    def try_out(self, mutation: Mutation) -> Outcome:
        """Return whether the tests catch the mutation; the copy is as before afterwards."""
        path = self.source / "allranks" / mutation.file
        text = path.read_text()
        began_s = time.monotonic()
        try:
            path.write_text(mutation.apply(text))
            code, said = self.run(mutation.tests, timeout_s=TIMEOUT_S)
        except (ValueError, subprocess.TimeoutExpired) as exc:
            return Outcome(mutation, False, time.monotonic() - began_s, error=str(exc))
        finally:
            path.write_text(text)
        seconds = time.monotonic() - began_s
        failed = re.search(r"^FAILED tests/([^\s\[]+)", said, re.MULTILINE)
        if code == FAILED and failed:
            return Outcome(mutation, True, seconds, caught_by=failed[1])
        # A fixture that fails, or a file that cannot be imported, has caught nothing.
        error = "" if code == PASSED else f"pytest ended with {code}: {said.strip()[-600:]}"
        return Outcome(mutation, False, seconds, error=error)


def run_all(mutations: Sequence[Mutation], *, jobs: int) -> list[Outcome]:
    """Return the outcomes, in the order of the table."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies: Queue[Copy] = Queue()
        for number in range(jobs):
            copies.put(Copy(Path(folder) / str(number)))

        def try_one(mutation: Mutation) -> Outcome:
            copy = copies.get()
            try:
                outcome = copy.try_out(mutation)
            finally:
                copies.put(copy)
            word = outcome.error or (f"caught by {outcome.caught_by}" if outcome.is_caught else "NOT CAUGHT")
            print(f"{mutation.name}: {word} ({outcome.seconds:.1f} s)", flush=True)
            return outcome

        first = copies.get()
        code, said = first.run(sorted({test for each in mutations for test in each.tests}))
        copies.put(first)
        if code != PASSED:
            sys.exit(f"the tests must pass before anything is changed:\n{said[-3000:]}")
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(try_one, mutations))


def render(outcomes: Sequence[Outcome], *, jobs: int, took_s: float) -> str:
    """Return the page of the documentation."""
    known = [each for each in outcomes if each.mutation.was_missed]
    own = [each for each in outcomes if not each.mutation.was_missed]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        "# Mutations: does a test fail if a rule is broken?",
        "",
        "<!-- Written by `make mutations`. Do not edit. -->",
        "",
        "Each row changes one line of the source so that it breaks one rule, and runs the tests that guard the rule.",
        "Caught means that one of them failed. The table with the changes is `tests/mutations/mutations.toml`.",
        "",
        f"Measured on {today} with Python {platform.python_version()} on {os.cpu_count()} cores in {took_s:.0f} s "
        f"({jobs} at a time).",
        "",
        "| mutations | caught | of |",
        "|---|---|---|",
        f"| that no test caught at first | {sum(each.is_caught for each in known)} | {len(known)} |",
        f"| one per important rule | {sum(each.is_caught for each in own)} | {len(own)} |",
        "",
    ]
    for title, rows in (("That no test caught at first", known), ("One per important rule", own)):
        lines += [f"## {title}", "", "| rule | mutation | in | caught by | seconds |", "|---|---|---|---|---|"]
        for each in rows:
            mutation, caught = each.mutation, f"`{each.caught_by}`" if each.is_caught else "**not caught**"
            lines.append(f"| {mutation.rule} | {mutation.name} | `{mutation.file}` | {caught} | {each.seconds:.1f} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description="Check that the tests catch the mutations of mutations.toml.")
    parser.add_argument("words", nargs="*", help="run only mutations whose names contain one of these words")
    parser.add_argument("--jobs", type=int, default=2, help="mutations at the same time")
    options = parser.parse_args()
    chosen = [each for each in read_table() if not options.words or any(word in each.name for word in options.words)]
    if not chosen:
        parser.error(f"no mutation is named {' or '.join(options.words)}")
    began_s = time.monotonic()
    outcomes = run_all(chosen, jobs=min(options.jobs, len(chosen)))
    took_s = time.monotonic() - began_s
    caught = sum(each.is_caught for each in outcomes)
    print(f"{caught} of {len(outcomes)} mutations caught in {took_s:.0f} s")
    if not options.words:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(render(outcomes, jobs=options.jobs, took_s=took_s))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
