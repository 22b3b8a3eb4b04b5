"""`allranks lab drill`: inject faults, start a real job, compare its verdict with the truth, print one line each."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.cli import complete
from allranks.cli.drill_running import describe_count, drill_running
from allranks.cli.options import OutputFile, name_option
from allranks.model.errors import AllranksError, Exit, UsageError
from allranks.report.text import Style, say

if TYPE_CHECKING:
    from allranks.lab.start_drill import DrillResult


@click.command()
@click.argument("faults", nargs=-1, shell_complete=complete.faults)
@click.option("--all", "is_all", is_flag=True, help="Run every fault, one after the other.")
@click.option(
    "--healthy", type=click.IntRange(min=0), default=0, metavar="N", help="Also run N starts without any fault."
)
@click.option(
    "--running",
    is_flag=True,
    help="Inject faults (strikes) into a job while it trains; FAULTS may be `healthy`, for none.",
)
@click.option("--plain", is_flag=True, help="With --running: use a script without allranks.session().")
@click.option(
    "--minutes", type=float, default=2.0, show_default=True, help="With --running healthy: duration in minutes."
)
@click.option(
    "--times",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="With --running: drill each strike N times, each in a new job.",
)
@click.option("--on", "node", metavar="NODE", help="Node that gets the fault. [default: chosen by the seed]")
@click.option("--seed", type=int, metavar="N", help="Seed of all random choices. [default: random, printed]")
@click.option("--baseline", is_flag=True, help="Also run one fault of each class under plain torchrun.")
@click.option(
    "--json",
    "json_path",
    type=OutputFile(example="drills.json"),
    metavar="FILE",
    help="Write the results to FILE.",
)
@click.option(
    "--table",
    "table_path",
    type=OutputFile(example="drills.md"),
    metavar="FILE",
    help="Write a markdown table to FILE.",
)
@click.option(
    "--work-dir",
    type=click.Path(path_type=Path),
    default=Path("drills"),
    show_default=True,
    help="Parent of run directories and logs.",
)
@name_option
def drill(
    faults: tuple[str, ...],
    is_all: bool,
    healthy: int,
    running: bool,
    plain: bool,
    minutes: float,
    times: int,
    node: str | None,
    seed: int | None,
    baseline: bool,
    json_path: Path | None,
    table_path: Path | None,
    work_dir: Path,
    name: str,
) -> int:
    """Inject faults and check that a job names them.

    Each drill injects a fault into a running lab, starts a real job, and compares its verdict with the truth.

    \b
    allranks lab drill mtu-blackhole
    allranks lab drill cable-pulled+env-drift-nccl-algo       two faults at a time
    allranks lab drill --all --healthy 10 --json drills.json
    allranks lab drill --running node-killed mtu-lowered      in a job that trains
    allranks lab drill --running leader-node-killed --times 20
    allranks lab drill --running healthy --minutes 30

    Exit codes: 0 all verdicts were correct, 1 a verdict was wrong or a drill did not run.
    """
    seed = random.randrange(10_000) if seed is None else seed
    if running:
        say(f"seed {seed}")
        return drill_running(
            faults,
            lab_name=name,
            node=node,
            seed=seed,
            has_baseline=baseline,
            is_plain=plain,
            is_all=is_all,
            minutes=minutes,
            times=times,
            work_dir=work_dir,
            json_path=json_path,
            table_path=table_path,
        )
    import msgspec

    from allranks.lab.faults.catalogue import FAULTS
    from allranks.lab.faults.injected import find_fault, refuse_strikes
    from allranks.lab.lab import Lab
    from allranks.lab.start_drill import BASELINES, render_table
    from allranks.lab.start_drill import drill as run_drill

    rounds = [*([] for _ in range(healthy)), *(words.split("+") for words in (FAULTS if is_all else faults))]
    if not rounds:
        raise UsageError(
            "lab drill: expected names of faults (allranks lab inject --list prints all), --all or --healthy N"
        )
    for words in rounds:
        for word in words:
            refuse_strikes(find_fault(word))
    say(f"seed {seed}")
    done: list[DrillResult] = []
    began_s = time.monotonic()
    for number, words in enumerate(rounds):
        has_baseline = baseline and (not is_all or bool(set(words) & set(BASELINES)))
        try:
            result = run_drill(
                Lab(name),
                words,
                seed=seed + (0 if words else number),
                work_dir=work_dir,
                on=node,
                has_baseline=has_baseline,
                say=say,
            )
        except AllranksError as exc:
            if not is_all:
                raise
            say(f"{'+'.join(words)}: the drill did not run: {exc}")
            continue
        done.append(result)
        click.echo(_describe(result))
    wrong = sum(bool(drilled.wrong) for drilled in done)
    missed = len(rounds) - len(done)
    click.echo(describe_count(len(rounds), wrong=wrong, missed=missed, took_s=time.monotonic() - began_s))
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(done)) + b"\n")
    if table_path is not None:
        table_path.write_text(render_table(done, seed=seed))
    return Exit.USER_CODE if wrong or missed else Exit.OK


def _describe(result: DrillResult) -> str:
    style = Style.of(sys.stdout)
    mark = style.mark("✗", "x") if result.wrong else style.mark("✓", "+")
    seconds = f"{result.seconds:5.1f} s" if result.seconds is not None else "      -"
    lines = [f"{mark} {'+'.join(result.faults) or 'healthy':<24} {seconds}  {result.verdict}"]
    lines += [f"    {note}" for note in _notes(result)]
    return "\n".join(lines)


def _notes(result: DrillResult) -> Sequence[str]:
    notes = list(result.wrong)
    if result.baseline is not None:
        notes.append(f"torchrun: no output for {result.baseline.silent_s:.0f} s, then: {result.baseline.said}")
    return notes
