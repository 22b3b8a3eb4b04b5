"""`allranks lab drill --running`: inject faults into a running job, print one line each."""

from __future__ import annotations

import difflib
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.model.errors import AllranksError, Exit, UsageError, exit_for_signal
from allranks.report.text import Style, say

if TYPE_CHECKING:
    from allranks.lab.running.strike_drill import StrikeResult

HEALTHY = "healthy"


def drill_running(
    names: Sequence[str],
    *,
    lab_name: str,
    node: str | None,
    seed: int,
    has_baseline: bool,
    is_plain: bool,
    is_all: bool,
    minutes: float,
    times: int,
    work_dir: Path,
    json_path: Path | None,
    table_path: Path | None,
) -> int:
    """Run the strikes and print their results; return the exit code."""
    import msgspec

    from allranks.lab.faults.running.strike_catalogue import STRIKES
    from allranks.lab.lab import Lab
    from allranks.lab.running import healthy, strike_drill
    from allranks.lab.running.drills_page import describe_times, render_table

    chosen = [*STRIKES] if is_all else list(names)
    for name in chosen:
        if name not in STRIKES and name != HEALTHY:
            close = difflib.get_close_matches(name, [*STRIKES, HEALTHY], n=1)
            hint = f"did you mean {close[0]}?" if close else "allranks lab inject --list prints all"
            raise UsageError(f"lab drill --running {name}: unknown strike: {hint}")
    if not chosen:
        raise UsageError(
            "lab drill --running: expected names of strikes (allranks lab inject --list prints all), --all or healthy"
        )
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(exit_for_signal(signum)))  # removes the injected faults
    work_dir.mkdir(parents=True, exist_ok=True)
    done: list[StrikeResult] = []
    began_s = time.monotonic()
    missed = unwell = 0
    rounds = [(name, number) for name in chosen for number in range(1 if name == HEALTHY else times)]
    for name, number in rounds:
        try:
            if name == HEALTHY:
                calm = healthy.train(Lab(lab_name), seed=seed, minutes=minutes, work_dir=work_dir, is_plain=is_plain)
                click.echo("\n".join(calm.lines()))
                unwell += bool(calm.wrong)
                continue
            result = strike_drill.drill_running(
                Lab(lab_name),
                name,
                seed=seed + number,
                work_dir=work_dir,
                on=node,
                is_plain=is_plain,
                has_baseline=has_baseline and number == 0 and (not is_all or STRIKES[name].has_baseline),
                say=say,
            )
        except AllranksError as exc:
            if len(rounds) == 1:
                raise
            missed += 1
            say(f"{name}: the drill did not run: {exc}")
            continue
        done.append(result)
        click.echo(_describe(result))
        if json_path is not None:  # after each: hours of drills may be cut off
            json_path.write_bytes(msgspec.json.format(msgspec.json.encode(done)) + b"\n")
    wrong = sum(bool(drilled.wrong) for drilled in done) + unwell
    if times > 1:
        click.echo("\n".join(describe_times(done)))
    click.echo(describe_count(len(rounds), wrong=wrong, missed=missed, took_s=time.monotonic() - began_s))
    if table_path is not None:
        table_path.write_text(render_table(done, seed=seed))
    return Exit.USER_CODE if wrong or missed else Exit.OK


def describe_count(total: int, *, wrong: int, missed: int, took_s: float) -> str:
    """`14 of 15 correct, 369 s; 1 did not run`."""
    not_run = f"; {missed} did not run" if missed else ""
    return f"{total - wrong - missed} of {total} correct, {took_s:.0f} s{not_run}"


def _describe(result: StrikeResult) -> str:
    style = Style.of(sys.stdout)
    mark = style.mark("✗", "x") if result.wrong else style.mark("✓", "+")
    verdict_s, next_s = _seconds(result.verdict_s), _seconds(result.next_step_s)
    leads = f"; {result.leader} takes over" if result.leader else ""
    lines = [f"{mark} {result.fault:<26} {verdict_s:>7} {next_s:>7}  {result.verdict}{leads}"]
    if result.phases_s:
        lines.append("    " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.phases_s.items()))
    lines += [f"    {problem}" for problem in result.wrong]
    if (baseline := result.baseline) is not None:
        silent, next_s = _seconds(baseline.silent_s), _seconds(baseline.next_step_s)
        lines.append(f"    torchrun: no output for {silent}, then: {baseline.said}; next step {next_s}")
    return "\n".join(lines)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"
