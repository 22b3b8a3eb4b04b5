"""`make break`: put real jobs into broken and hostile surroundings, and judge each by facts.

    cd tests; python -m surroundings.run                    all, and write docs/evidence/surroundings.md
    python -m surroundings.run --list --only disk/runs      names only
    python -m surroundings.run --only 'full/.*/prints'      those whose names match; writes no page
    python -m surroundings.run --only odd/ --report FILE    with what stood on the terminals of those that fell

It needs root (mount and process namespaces), and changes nothing outside of its own scratch directories in /tmp.
Read judge.py first: what must hold. Then situations.py, rank.py, stage.py. Exit code: 0 if nothing fell, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import judge
from .disks import can_mount
from .judge import Fall, Kind
from .situations import SITUATIONS
from .stage import DEADLINE_S, TESTS, Situation

PAGE = TESTS.parent / "docs/evidence/surroundings.md"
WHOLE_S = 3 * DEADLINE_S
"""Of one situation with all its jobs; then it is killed from outside."""


@dataclass(frozen=True)
class Outcome:
    """What came of one situation."""

    situation: Situation
    falls: tuple[Fall, ...]
    peak_mb: float
    seconds: float
    evidence: str = ""


class Running:
    """The situations that are being played, so that Ctrl-C can end them."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._processes: set[subprocess.Popen[str]] = set()
        self._is_over = False

    def play(self, situation: Situation) -> Outcome | None:
        """Play one to its end; None: stopped by Ctrl-C."""
        if self._is_over:
            return None
        command = ["setpriv", "--pdeathsig", "TERM", "unshare", "--mount", "--net", "--propagation", "private"]
        scratch = Path(tempfile.mkdtemp(dir=self._folder))
        scratch.chmod(0o755)
        command += [sys.executable, "-m", "surroundings.stage", "watch", situation.name, scratch, str(WHOLE_S)]
        with subprocess.Popen(
            command, cwd=TESTS, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            self._processes.add(process)
            _, err = process.communicate()
            self._processes.discard(process)
        if self._is_over:
            return None
        try:
            said = json.loads((scratch / "outcome.json").read_text())
        except (OSError, ValueError):
            return Outcome(situation, (Fall(Kind.HUNG, f"the whole situation: {err[-1500:]}"),), 0, WHOLE_S)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)  # its mounts are gone with their namespace
        falls = tuple(Fall(Kind(kind), what) for kind, what in said["falls"])
        return Outcome(situation, falls, said["peak_mb"], said["seconds"], said.get("evidence", ""))

    def stop(self) -> None:
        """End all of them; each unmounts what it has mounted."""
        self._is_over = True
        for process in list(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)


def play_all(situations: Sequence[Situation], *, jobs: int) -> list[Outcome]:
    """Play them, and say at once what fell."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="surroundings-") as folder, ThreadPoolExecutor(jobs) as pool:
        Path(folder).chmod(0o755)
        running = Running(folder)
        try:
            for number, outcome in enumerate(pool.map(running.play, situations), 1):
                if outcome is None:
                    break
                outcomes.append(outcome)
                word = "; ".join(f"{fall.kind}: {' '.join(fall.what.split())[:200]}" for fall in outcome.falls)
                took = f"{outcome.seconds:.1f} s, {outcome.peak_mb:.0f} MB"
                print(f"[{number}/{len(situations)}] {outcome.situation.name} ({took}) {word or 'holds'}", flush=True)
        except KeyboardInterrupt:
            running.stop()
            print("stopped; ending what runs", file=sys.stderr)
    return outcomes


def counters(outcomes: Sequence[Outcome]) -> str:
    """Return the lines that say how it went."""
    counts = Counter(kind for outcome in outcomes for kind in {fall.kind for fall in outcome.falls})
    others = [kind for kind in Kind if kind not in (Kind.ENDED, Kind.CULPRIT, Kind.NO_VERDICT)]
    return "\n".join((
        f"situations: {len(outcomes)}; something fell in: {sum(bool(outcome.falls) for outcome in outcomes)}",
        f"jobs that ended though all their own writes succeeded: {counts[Kind.ENDED]}; "
        f"wrong culprits: {counts[Kind.CULPRIT]}; runs without a verdict: {counts[Kind.NO_VERDICT]}; "
        f"agent's most memory: {max((outcome.peak_mb for outcome in outcomes), default=0):.0f} MB",
        "; ".join(f"{kind}: {counts[kind]}" for kind in others),
    ))  # fmt: skip


def render_page(outcomes: Sequence[Outcome], skipped: Sequence[Situation], *, took_s: float) -> str:
    """Return the page of the documentation."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.situation.group].append(outcome)
    lines = [
        "# Broken and hostile surroundings",
        "",
        "<!-- Written by `make break`. Do not edit. -->",
        "",
        "Real jobs and commands, each in namespaces of its own, judged by facts: the ranks note on a healthy disk",
        "which of their writes failed, and `tests/surroundings/judge.py` derives from that what must come of the job:",
        "",
        "```text",
        *(line.strip() for line in (judge.__doc__ or "").splitlines() if line.startswith("    ")),
        "```",
        "",
        "There are disk faults (which disk, which fault, when, what the ranks do), odd workers, floods of output, and",
        "forged files. Each situation must also end before its deadline, without a traceback of allranks and without a",
        "process that is left; the agent's memory stays below 150 MB.",
        "",
        f"Run on {datetime.datetime.now(datetime.UTC).date().isoformat()}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, {took_s / 60:.0f} minutes.",
        "",
        *counters(outcomes).replace("\n", "\n\n").split("\n"),
        "",
        "| situations | number | fell | expected | agent's most memory |",
        "|---|---|---|---|---|",
    ]
    for group, members in groups.items():
        expected = "; ".join(sorted({outcome.situation.expected for outcome in members})).replace("|", " or ")
        num_fallen, peak_mb = sum(bool(each.falls) for each in members), max(each.peak_mb for each in members)
        memory = f"{peak_mb:.0f} MB" if peak_mb else "no agent"
        lines.append(f"| {group} | {len(members)} | {num_fallen} | {expected} | {memory} |")
    if skipped:
        names = sorted({situation.file_system for situation in skipped})
        lines += ["", f"{len(skipped)} situations were skipped: this machine has no {', '.join(names)}."]
    fallen = [outcome for outcome in outcomes if outcome.falls]
    if fallen:
        lines += ["", "## What fell", "", "| situation | what fell |", "|---|---|"]
        lines += [f"| {each.situation.name} | {', '.join(sorted({f.kind for f in each.falls}))} |" for each in fallen]
    return "\n".join(lines) + "\n"


def render_report(outcomes: Sequence[Outcome]) -> str:
    """Return what fell, by what fell, with its evidence."""
    kinds: Counter[tuple[str, Kind]] = Counter()
    for outcome in outcomes:
        for fall in outcome.falls:
            kinds[outcome.situation.group, fall.kind] += 1
    lines = [counters(outcomes), "", *(f"- {group}: {kind}: {number}" for (group, kind), number in kinds.items()), ""]
    for outcome in sorted((each for each in outcomes if each.falls), key=lambda each: each.falls[0].kind):
        lines += [f"## {outcome.situation.name}", ""]
        lines += [f"- **{fall.kind}**: {fall.what}" for fall in outcome.falls]
        lines += ["", "```", outcome.evidence[-5000:], "```", ""]
    return "\n".join(lines)


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PATTERN", help="situations whose names match")
    parser.add_argument("--list", action="store_true", help="print their names, and what is expected")
    parser.add_argument("--jobs", type=int, default=2, help="situations at the same time")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what fell, with its evidence")
    options = parser.parse_args()
    chosen = [situation for name, situation in SITUATIONS.items() if re.search(options.only, name)]
    if options.list:
        print(*(f"{each.name}: {each.expected}" for each in chosen), f"{len(chosen)} situations", sep="\n")
        return 0
    if not chosen:
        sys.exit(f"error: no situation matches {options.only!r}; --list prints their names")
    if os.geteuid() != 0:
        sys.exit("error: mount namespaces need root")
    has = {name: can_mount(name) for name in {situation.file_system for situation in chosen}}
    skipped = [situation for situation in chosen if not has[situation.file_system]]
    for name in sorted(name for name, is_there in has.items() if not is_there):
        num_skipped = sum(each.file_system == name for each in skipped)
        print(f"skipped, since this machine has no {name}: {num_skipped} situations")
    began_s = time.monotonic()
    outcomes = play_all([each for each in chosen if each not in skipped], jobs=options.jobs)
    print(counters(outcomes))
    if options.report:
        options.report.write_text(render_report(outcomes))
    is_complete = len(outcomes) + len(skipped) == len(chosen)
    if is_complete and not options.only:
        PAGE.write_text(render_page(outcomes, skipped, took_s=time.monotonic() - began_s))
    return 0 if is_complete and not any(outcome.falls for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
