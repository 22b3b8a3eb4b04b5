"""Try allranks with each release of SLURM that Debian has, and write what came out.

    python tests/slurm_versions/run.py                 all releases; writes docs/evidence/slurm-versions.md
    python tests/slurm_versions/run.py 24.11 26.05     only these; the page keeps the results of the others
    python tests/slurm_versions/run.py --part tests    only drills, or only tests
    python tests/slurm_versions/run.py --again         what was not right once more, for example on a quieter machine

Needs root, and mmdebstrap and mariadb-server besides what the lab needs. One lab is up at a time. Results are kept in
WORK/results.json after each part, so a run that was cut off can be completed with what it lacks.

Exit code: 0 if every drill and test was right, else 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from table import (
    MISSING,
    RUNNING,
    STATIC,
    TESTS,
    Tried,
    add_second,
    choose_again,
    is_right,
    read_drills,
    read_junit,
    render_page,
)

from allranks.lab.release import RELEASES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/evidence/slurm-versions.md"
WORK = ROOT / "drills/slurm-versions"
NAME = "versions"
SEED = "1"
DRILL_S = 1800
TESTS_S = 2400


def main() -> int:
    """Try the releases and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help=f"of {', '.join(RELEASES)}; by default all")
    parser.add_argument("--part", choices=["drills", "tests"], help="by default both")
    parser.add_argument("--again", action="store_true", help="only what was not right; the page says so")
    arguments = parser.parse_args()
    asked = arguments.releases or list(RELEASES)
    if unknown := set(asked) - set(RELEASES):
        parser.error(f"unknown release: {', '.join(sorted(unknown))}; expected some of {', '.join(RELEASES)}")
    WORK.mkdir(parents=True, exist_ok=True)
    kept = WORK / "results.json"
    results = {each["release"]: Tried(**each) for each in (json.loads(kept.read_text()) if kept.exists() else [])}
    for release in asked:
        tried_now = results.setdefault(release, Tried(release=release, suite=RELEASES[release], version=""))
        for part, try_it in (("drills", run_drills), ("tests", run_tests)):
            if arguments.part in (None, part):
                print(f"SLURM {release}: {part}", flush=True)
                try_it(tried_now, is_again=arguments.again)
                kept.write_text(json.dumps([asdict(each) for each in results.values()], indent=2))
    tried = [results[release] for release in RELEASES if release in results]
    PAGE.write_text(render_page(tried, date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")))
    return 0 if all(each.is_right for each in tried) and len(tried) == len(RELEASES) else 1


def run_drills(tried: Tried, *, is_again: bool) -> None:
    """Run drills in a six-node lab with accounting."""
    static, running = (
        [name for name in names if not (is_again and is_right(done.get(name, MISSING)))]
        for names, done in ((STATIC, tried.static), (RUNNING, tried.running))
    )
    if not static and not running:
        return
    work = WORK / tried.release
    work.mkdir(exist_ok=True)
    up = ("--cluster", str(ROOT / "examples/six-node/cluster.toml"), "--slurm", tried.release, "--accounting")
    try:
        lab("up", *up, timeout_s=1200)
        told = subprocess.run(lab_command("status", "--json"), capture_output=True, text=True, check=True, timeout=60)
        tried.version = json.loads(told.stdout)["slurm"]
        found = drills(static, work / "static.json", key="faults") if static else {}
        tried.static = add_second(tried.static, found) if is_again else found
        lab("up", *up, timeout_s=300)
        found = drills(running, work / "running.json", key="fault", flags=["--running"]) if running else {}
        tried.running = add_second(tried.running, found) if is_again else found
    finally:
        lab("down", timeout_s=120)


def run_tests(tried: Tried, *, is_again: bool) -> None:
    """Run the tests of jobs, which start their own labs."""
    chosen = choose_again(tried.tests) if is_again else TESTS
    if not chosen:
        return
    work = WORK / tried.release
    work.mkdir(exist_ok=True)
    report = work / "tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--numprocesses=0", "-q", *chosen, f"--junitxml={report}"]
    env = os.environ | {"TEST_SLURM": tried.release, "ALLRANKS_REQUIRE_LAB": "1"}
    run(command, timeout_s=TESTS_S, env=env)
    found = read_junit(report.read_text()) if report.exists() else {}
    tried.tests = add_second(tried.tests, found) if is_again else found


def drills(names: Sequence[str], report: Path, *, key: str, flags: Sequence[str] = ()) -> dict[str, str]:
    """Run drills and return their results by fault."""
    report.unlink(missing_ok=True)
    work = report.with_suffix("")
    lab("drill", *flags, *names, "--seed", SEED, "--json", str(report), "--work-dir", str(work), timeout_s=DRILL_S)
    return read_drills(json.loads(report.read_text()) if report.exists() else [], names, key=key)


def lab(verb: str, *arguments: str, timeout_s: float) -> None:
    """Run a verb of `allranks lab`; its output is shown, and its results speak for it."""
    run(lab_command(verb, *arguments), timeout_s=timeout_s, env=dict(os.environ))


def lab_command(verb: str, *arguments: str) -> list[str]:
    """Return the command line of a verb of `allranks lab`."""
    return [sys.executable, "-m", "allranks", "lab", verb, "--name", NAME, *arguments]


def run(command: Sequence[str], *, timeout_s: float, env: dict[str, str]) -> None:
    """Run a command in the root of the project until its end or its deadline."""
    print("$ " + " ".join(command[1:]), flush=True)
    try:
        subprocess.run(command, cwd=ROOT, env=env, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        print(f"cut off after {timeout_s:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
