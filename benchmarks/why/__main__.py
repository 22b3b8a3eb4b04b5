"""How often does a tool name cause and culprit of a failed job? From the repository's root:

python -m benchmarks.why run --count 200                     allranks why, on 200 generated jobs
python -m benchmarks.why write DIR --seed 7 --count 100      the jobs as folders, for any tool
python -m benchmarks.why answer DIR > allranks.json          the answers of allranks why to such folders
python -m benchmarks.why score DIR allranks.json other.json  the score of each file of answers
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .faults import FAULTS
from .generate import Generated, generate, generate_many, list_seeds, write_job
from .score import Answer, Judged, judge, table, wrong_ones


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 1 if an answer was certain and wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.why", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="generate jobs, ask allranks why, print the score")
    write = commands.add_parser("write", help="write jobs as folders with truth.json")
    write.add_argument("folder", type=Path)
    write.add_argument("--merged", action="store_true", help="also write merged.log: all lines in the order of time")
    for command in (run, write):
        command.add_argument("--seed", type=int, default=0, help="the first seed")
        command.add_argument("--count", type=int, default=100, help="number of jobs")
        command.add_argument("--half", choices=("dev", "held", "both"), default="dev",
                             help="dev: variants to look at; held: withheld ones, for a final score only")  # fmt: skip
        command.add_argument("--small", action="store_true", help="jobs of some ten kilobytes")
    run.add_argument("--jobs", type=int, default=1, help="processes that generate and ask")
    run.add_argument("--fault", choices=list(FAULTS), help="only jobs whose first fault is this one")
    run.add_argument("--keep", type=Path, metavar="DIR", help="keep the folders of jobs that were answered wrongly")
    run.add_argument("--json", type=Path, metavar="FILE", help="also write truth, answer and judgement of each job")
    run.add_argument("--quiet", action="store_true", help="print the table only: a held half is not to be looked at")
    answer = commands.add_parser("answer", help="print the answers of allranks why to folders that `write` made")
    answer.add_argument("folder", type=Path)
    nvrx = commands.add_parser("nvrx", help="print the answers of NVRx's Restart Agent (needs `write --merged`)")
    nvrx.add_argument("folder", type=Path)
    nvrx.add_argument("--python", required=True, help="an interpreter with nvidia-resiliency-ext 0.7.0")
    scoring = commands.add_parser("score", help="print the score of files of answers, a column for each")
    scoring.add_argument("folder", type=Path)
    scoring.add_argument("answers", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    if options.command == "run":
        return _run(options)
    if options.command == "write":
        sizes = [
            write_job(job, options.folder, is_merged=options.merged)
            for job in generate_many(options.seed, options.count, half=options.half, is_small=options.small)
        ]
        print(f"{len(sizes)} jobs, median {statistics.median(sizes):,.0f} bytes")
        return 0
    truths = {path.parent.name: json.loads(path.read_text()) for path in sorted(options.folder.glob("*/truth.json"))}
    if options.command == "answer":
        from .ours import ask

        print(json.dumps({name: ask(options.folder / name / "logs") for name in truths}, indent=2))
        return 0
    if options.command == "nvrx":
        from .nvrx import ask as ask_nvrx

        found = {name: ask_nvrx(options.folder / name / "merged.log", options.python) for name in truths}
        print(json.dumps(found, indent=2))
        return 0
    columns = {}
    for path in options.answers:
        answers = json.loads(path.read_text())
        columns[path.stem] = [judge(truth, Answer.from_json(answers.get(name, {}))) for name, truth in truths.items()]
    print(table(columns))
    return int(any(one.is_false_certain for judged in columns.values() for one in judged))


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One job, answered and judged."""

    judged: Judged
    record: dict[str, Any]
    size_bytes: int
    wrong: str
    """Answer and truth in words, where the answer is wrong."""


def _answer_seed(seed: int, *, is_small: bool, keep: Path | None) -> _Outcome:
    from .ours import ask

    job = generate(seed, is_small=is_small)
    with tempfile.TemporaryDirectory() as folder:
        size = job.write(Path(folder))
        record = ask(Path(folder))
    answer = Answer.from_json(record)
    truth = job.to_json()
    one = judge(truth, answer)
    if keep and not one.is_right:
        write_job(job, keep)
    told = "" if one.is_right else _tell_wrong(one, job, answer)
    return _Outcome(one, {"truth": truth, "answer": record, "is_right": one.is_right}, size, told)


def _run(options: argparse.Namespace) -> int:
    seeds = list_seeds(options.seed, options.count, half=options.half, is_small=options.small, only=options.fault)
    work = partial(_answer_seed, is_small=options.small, keep=options.keep)
    outcomes = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(work, seeds):
            outcomes.append(outcome)
            if sys.stderr.isatty():
                print(f"\r{len(outcomes)}/{options.count}", end="", file=sys.stderr)
    judged = [outcome.judged for outcome in outcomes]
    sizes = [outcome.size_bytes for outcome in outcomes]
    print(table({"allranks": judged}))
    print(f"\n{len(sizes)} jobs, median {statistics.median(sizes):,.0f} bytes, {sum(sizes):,} bytes in all")
    if not options.quiet:
        wrong = {outcome.judged.job: outcome.wrong for outcome in outcomes}
        for one in wrong_ones(judged):
            print(wrong[one.job])
    if options.json:
        options.json.write_text(json.dumps([outcome.record for outcome in outcomes], indent=1) + "\n")
    return int(any(one.is_false_certain for one in judged))


def _tell_wrong(one: Judged, job: Generated, answer: Answer) -> str:
    wants = []
    for truth in job.truths:
        culprit = truth.culprit
        where = f"ranks {list(culprit.ranks)[:3]} on {', '.join(culprit.nodes)}" if culprit.ranks else ""
        state = "" if truth.is_cause_decidable else ", undecidable"
        wants.append(f"{'|'.join(truth.causes[:4])}{state}; culprit {culprit.level} {where}; {truth.why}")
    parts = [
        "FALSE CERTAIN" if one.is_false_certain else "",
        "" if one.is_cause_right else "cause",
        "" if one.is_culprit_right else "culprit",
    ]
    head = f"seed {job.seed:<6} {job.variant:<52} wrong: {', '.join(filter(None, parts))}"
    return f"{head}\n    got    {answer.words()}\n    wanted {' // '.join(wants)}"


if __name__ == "__main__":
    sys.exit(main())
