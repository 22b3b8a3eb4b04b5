"""Does the ledger say where the time went? Planted losses, a chronic straggler, shaped links, what it costs, a week.

python -m benchmarks.ledger losses          seven planted losses, each within 5 % or 50 ms, and the right rank
python -m benchmarks.ledger chronic         six ranks on six lab nodes, one of them 10 ms late in steps of 100 ms
python -m benchmarks.ledger links           DDP on shaped links, 2 and 6 ranks: `wait` + `transfer` within 5 points
python -m benchmarks.ledger cost            live line, status file and books; marks of a step and of a collective
python -m benchmarks.ledger week            1,024 virtual ranks: bytes of a beat, the leader's processor time, its files

Run it from the repository's root, with the Python that has allranks and torch; all but `cost` and `week` as root, since
they use a lab (`losses --plants slow-rank,slow-loader` does not). Each takes at most 4 minutes, prints a line for each
figure, and ends with 0 if all are right, 1 if one is wrong, 2 if a job did not run. docs/evidence/ledger.md is written
from what each command found last, unless --no-page is given. Measure on a quiet machine: the truth has the machine's
noise in it, too, but a step that takes longer changes what is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import chronic, cost, links, losses, page, week
from .jobs import MeasurementError, Part, scratch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one measurement; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    planted = commands.add_parser("losses")
    planted.add_argument("--plants", type=lambda text: text.split(","), default=list(losses.PLANTS), help="with commas")
    planted.add_argument("--together", action="store_true", help="those of one machine in one job")
    planted.add_argument("--steps", type=int, default=losses.STEPS)
    planted.add_argument("--within", type=float, default=losses.WITHIN, help="part of the truth, of those")
    late = commands.add_parser("chronic")
    late.add_argument("--minutes", type=float, default=0.0, help="of the healthy job; 0: as many steps as the other")
    late.add_argument("--kinds", type=lambda text: text.split(","), default=["late", "healthy"], help="with commas")
    shaped = commands.add_parser("links")
    shaped.add_argument("--steps", type=int, default=links.STEPS, help="of each job")
    shaped.add_argument("--ranks", type=int, nargs="+", default=[2, 6])
    price = commands.add_parser("cost")
    price.add_argument("--ranks", type=int, default=cost.RANKS)
    price.add_argument("--pairs", type=int, default=cost.PAIRS, help="of halves, with and without")
    price.add_argument("--half-s", type=float, default=cost.HALF_S, help="seconds of each half")
    commands.add_parser("week")
    for command in commands.choices.values():
        command.add_argument("--name", default=f"ledger-{os.getpid()}", help="of the lab")
        command.add_argument("--keep", type=Path, metavar="DIR", help="keep the files of the jobs there")
        command.add_argument("--no-page", action="store_true", help="do not write docs/evidence/ledger.md")
    options = parser.parse_args(arguments)
    began_s = time.monotonic()
    try:
        with scratch(options.keep) as directory:
            part = measure(options, directory)
    except MeasurementError as exc:
        print(exc, file=sys.stderr)
        return 2
    for note in part.notes:
        print(note)
    wrong = [check for check in part.checks if not check.is_right]
    print(f"{len(part.checks) - len(wrong)} of {len(part.checks)} right, {time.monotonic() - began_s:.0f} s, "
          f"load {os.getloadavg()[0]:.1f}")  # fmt: skip
    if not options.no_page:
        page.keep(options.command, part)
    return int(bool(wrong))


def measure(options: argparse.Namespace, directory: Path) -> Part:
    """Run the measurement that was asked for."""
    if options.command == "chronic":
        return chronic.measure(directory, lab=options.name, minutes=options.minutes, kinds=options.kinds)
    if options.command == "links":
        return links.measure(directory, lab=options.name, steps=options.steps, sizes=options.ranks)
    if options.command == "cost":
        return cost.measure(directory, ranks=options.ranks, pairs=options.pairs, half_s=options.half_s)
    if options.command == "week":
        return week.measure(directory)
    if unknown := {plant.partition("=")[0] for plant in options.plants} - {*losses.PLANTS}:
        raise MeasurementError(f"{', '.join(sorted(unknown))}: expected of {', '.join(losses.PLANTS)}")
    about = {"lab": options.name, "is_together": options.together, "steps": options.steps, "within": options.within}
    return losses.measure(options.plants, directory, **about)


if __name__ == "__main__":
    sys.exit(main())
