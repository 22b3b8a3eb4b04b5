"""`allranks advise`: what would make a training step faster on this network, and what would it cost?"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli import complete
from allranks.cli.options import json_option, log_dir_option, note_misplaced, timeout_option
from allranks.model.errors import UsageError
from allranks.model.hostlist import expand_hosts, fold_hosts
from allranks.report.text import Style, count_of, describe_size, one_line, say

if TYPE_CHECKING:
    from allranks.comm.advise import Advice, Prediction, StepProfile
    from allranks.comm.bench_table import BenchTable

MAX_BYTES = 64 << 20
"""Of a table."""
FORWARD_SHARE = 1 / 3
"""Of a step's computing: the backward pass takes twice as long as the forward pass."""
GUESSED_TENSORS = 64
"""A model that nobody measured has so many parameters, of one size."""
WIDTH = 12
MOST = 1 << 20
"""Nodes."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}


class CountType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """A large number, as people write it.

    >>> CountType().convert("125M", None, None), CountType().convert("13e6", None, None)
    (125000000, 13000000)
    """

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        text = str(value).strip().upper()
        unit = text[-1:] if text[-1:] in _UNITS else ""
        try:
            number = float(text.removesuffix(unit)) * _UNITS[unit]
        except ValueError:
            number = 0.0
        if not 1 <= number <= 1e15:
            self.fail(f"{value!r}: expected a positive number, for example 13100000, 13.1M or 7B", param, ctx)
        return round(number)


class Figure(click.FloatRange):
    """A number in a range, and not `nan`, which click lets through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r}: expected a number, for example 150", param, ctx)
        return number


def _positive(flag: str, metavar: str, help_text: str, kind: Any = None) -> Callable[[Any], Any]:
    kind = kind or Figure(min=0, min_open=True, max=1e9)
    return click.option(flag, type=kind, metavar=metavar, help=help_text)


@click.command("advise", context_settings={"allow_interspersed_args": False})
@click.option("--measure", "is_measured", is_flag=True, help="Run SCRIPT for a few steps and measure them.")
@_positive(
    "--params", "N", "Parameters of the model, each with a gradient of 4 bytes: 13100000, 125M or 7B.", CountType()
)
@_positive("--step-ms", "MS", "Milliseconds of a step on one rank alone; 1/3 of it counts as the forward pass.")
@_positive("--forward-ms", "MS", "Milliseconds of the forward pass. [default: see --step-ms]")
@_positive("--backward-ms", "MS", "Milliseconds of the backward pass, with the loss. [default: see --step-ms]")
@_positive("--batch", "B", "Samples of one rank in a step; prints samples per second.", click.IntRange(min=1))
@_positive("--steps", "N", "Steps left in the run; needed to offer local SGD and DiLoCo.", CountType())
@_positive(
    "--noise-scale", "X", "Gradient noise scale, as a multiple of the whole batch; needed to offer accumulation."
)
@_positive("--nodes", "N", "Largest number of nodes to predict. [default: as measured]", click.IntRange(1, MOST))
@click.option(
    "--bench",
    "bench_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Table of `allranks bench`. [default: bench.json in --log-dir]",
)
@click.option(
    "--nproc-per-node", metavar="N|auto|gpu|cpu", help="Ranks per node with --measure, as for `allranks run`."
)
@timeout_option(
    "--timeout", "limit_s", waits_for="for the steps of a script with --measure", default=600.0, at_least=1.0
)
@log_dir_option
@json_option
@click.argument("script", required=False, shell_complete=complete.paths)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete.paths)
def advise(
    script: str | None,
    arguments: tuple[str, ...],
    is_measured: bool,
    params: int | None,
    step_ms: float | None,
    forward_ms: float | None,
    backward_ms: float | None,
    batch: int | None,
    steps: int | None,
    noise_scale: float | None,
    nodes: int | None,
    bench_file: Path | None,
    nproc_per_node: str | None,
    limit_s: float,
    log_dir: Path,
    as_json: bool,
) -> None:
    """Predict a training step with each way to reduce gradients, and rank the ways.

    \b
    allranks bench; allranks advise --measure train.py --epochs 3    measures the network, then the script
    allranks advise --params 13.1M --step-ms 150 --batch 64          from figures, without a script
    allranks advise --params 125M --forward-ms 90 --backward-ms 200 --nodes 16 --steps 20000

    It needs a table of `allranks bench`. A script that it measures must use DistributedDataParallel. Each way is listed
    with its gain, its cost, and the line to write. Ways that change the result are listed only if they pay.
    """
    from allranks.comm.advise import advise as predict

    if os.environ.get("SLURM_PROCID", "0") != "0":  # srun started it once for each node: the first one speaks for all
        return
    if is_measured and script is None:
        raise UsageError("advise: --measure: expected a script, for example allranks advise --measure train.py")
    if script is not None and not is_measured:
        raise UsageError(f"advise: {script}: to measure a script, write --measure before it")
    if is_measured and (params or step_ms):
        raise UsageError("advise: --measure measures parameters and times; remove --params and --step-ms")
    if not is_measured and nproc_per_node:
        raise UsageError("advise: --nproc-per-node is for --measure")
    note_misplaced(arguments)
    path, table = read_table(bench_file, log_dir)
    measured_s: float | None = None
    if script is not None:
        from allranks.cli.check import find_place
        from allranks.launch.check.where import Asked
        from allranks.launch.measured import measure_script

        flags = ["--nproc-per-node", nproc_per_node] if nproc_per_node else []
        place = find_place(Asked(), os.environ, verb="advise")
        flags += ["--standalone"] if place is None else []
        words = (script, *arguments)
        found = measure_script(words, place=place, flags=flags, log_dir=log_dir, env=os.environ, limit_s=limit_s)
        step, ranks = found.to_step(), found.modules[0].ranks
        measured_s = found.step_s if ranks == table.ranks else None
        if hook := next((module.hook for module in found.modules if module.hook), ""):
            say(f"{script} has a communication hook of its own ({hook}); the prediction of `now` is without that hook")
        step = replace(
            step,
            forward_s=step.forward_s if forward_ms is None else forward_ms / 1e3,
            backward_s=step.backward_s if backward_ms is None else backward_ms / 1e3,
        )
    else:
        step = guess_step(params, step_ms, forward_ms, backward_ms)
    try:
        found_advice = predict(table, step, max_nodes=nodes, steps_left=steps, noise_scale=noise_scale)
    except ValueError as exc:
        raise UsageError(f"advise: {path} {exc}; measure again: allranks bench") from exc
    if as_json:
        from allranks.report.machine import to_json

        click.echo(to_json(describe(found_advice, table, batch=batch, measured_s=measured_s)))
    else:
        style = Style.of(sys.stdout)
        click.echo(render(found_advice, table, path, style, batch=batch, measured_s=measured_s))


def read_table(given: Path | None, log_dir: Path) -> tuple[Path, BenchTable]:
    """Return the table of the network, and where it is.

    Raises:
        UsageError: there is none, it cannot be read, or it is of other nodes than those of this job.
    """
    from allranks.comm.bench_table import find_table, from_json
    from allranks.files.regular import read_regular

    path = given or find_table(log_dir)
    try:
        data = read_regular(path, at_most=MAX_BYTES, follows_links=given is not None)
    except FileNotFoundError as exc:
        raise UsageError(f"advise: {path}: no such file; measure the network first: allranks bench") from exc
    except (OSError, ValueError) as exc:
        raise UsageError(f"advise: {path}: {getattr(exc, 'strerror', None) or exc}") from exc
    table = from_json(data)
    if isinstance(table, str):
        raise UsageError(f"advise: {path}: {table}; measure the network again: allranks bench")
    if not 1 <= len(table.nodes) <= table.ranks:
        raise UsageError(
            f"advise: {path}: {count_of(table.ranks, 'rank')} on {count_of(len(table.nodes), 'node')}: expected at "
            "least one on each; measure the network again: allranks bench"
        )
    here = expand_hosts(os.environ.get("SLURM_JOB_NODELIST", "")) if "SLURM_JOB_ID" in os.environ else []
    if given is None and here and not set(here) <= set(table.nodes):
        raise UsageError(
            f"advise: {path} was measured on {fold_hosts(table.nodes)}, and this job has {fold_hosts(here)}: measure "
            f"its network with allranks bench, or use the table anyway with --bench {path}"
        )
    return path, table


def guess_step(
    params: int | None, step_ms: float | None, forward_ms: float | None, backward_ms: float | None
) -> StepProfile:
    """Return the step that the figures describe.

    Raises:
        UsageError: a figure is missing, or two contradict each other.
    """
    from allranks.comm.advise import StepProfile

    if params is None:
        raise UsageError("advise: expected --measure with a script, or --params with --step-ms")
    if forward_ms is None or backward_ms is None:
        if step_ms is None:
            raise UsageError("advise: --params: expected --step-ms, or --forward-ms and --backward-ms")
        if forward_ms is not None:
            backward_ms = step_ms - forward_ms
        elif backward_ms is not None:
            forward_ms = step_ms - backward_ms
        else:
            forward_ms, backward_ms = step_ms * FORWARD_SHARE, step_ms * (1 - FORWARD_SHARE)
    other_ms = 0.0 if step_ms is None else step_ms - forward_ms - backward_ms
    if min(forward_ms, backward_ms) < 0 or other_ms < -1e-9 * (step_ms or 0):
        raise UsageError(f"advise: --step-ms {step_ms:g} is less than its forward and backward pass")
    whole, rest = divmod(4 * params, GUESSED_TENSORS)
    return StepProfile(
        tensor_bytes=tuple(whole + (number < rest) for number in range(min(GUESSED_TENSORS, 4 * params))),
        forward_s=forward_ms / 1e3,
        backward_s=backward_ms / 1e3,
        other_s=max(0.0, other_ms) / 1e3,
    )


def render(
    advice: Advice, table: BenchTable, path: Path, style: Style, *, batch: int | None, measured_s: float | None
) -> str:
    """Return the advice as text, without a final newline."""
    step, now = advice.step, advice.now
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(table.began_s)) if table.began_s else "at an unknown time"
    slowest = table.slowest_mbit_s()
    link = f"; the slowest link carries {slowest:.4g} Mbit/s" if slowest else ""
    network = f"{fold_hosts(table.nodes)}, {count_of(table.ranks, 'rank')}, {table.backend}{link} ({path}, {began})"
    lines = [
        f"network  {one_line(network)}",
        f"step     computes {_ms(step.compute_s)} ms (forward {_ms(step.forward_s)}, backward {_ms(step.backward_s)}, "
        f"other {_ms(step.other_s)}); {describe_size(step.gradient_bytes)} of gradients",
        f"now      {_ms(now.step_s)} ms a step, predicted"
        + (f"; measured {_ms(measured_s)}" if measured_s is not None else "")
        + f"; each rank sends {describe_size(round(now.sent_bytes))}",
        "",
    ]
    if not advice.offered:
        lines.append("no other way is more than 2 % faster here")
    for number, one in enumerate(advice.offered, start=1):
        lines += _lines_of(number, one, step, style)
    if refused := [one for one in advice.refused if one.method.name != "torch" or step.bucket_bytes]:
        lines += ["", "not offered:"]
        lines += [f"   {one.method.name:<{WIDTH}} {_ms(one.step_s):>6} ms  {one.refusal}" for one in refused]
    lines += ["", *_table_of_nodes(advice, batch), ""]
    from allranks.comm.methods import LOSS_SOURCE

    lines.append(f"losses: measured on {LOSS_SOURCE}; yours may differ")
    return "\n".join(lines)


def _lines_of(number: int, one: Prediction, step: StepProfile, style: Style) -> list[str]:
    method = one.method
    head = f"{number}  {method.name:<{WIDTH}} {_ms(one.step_s):>6} ms"
    head += f"  {one.gain:.2f} x as fast, {one.to_equal_loss:.2f} x to equal loss"
    head += f"; sends {describe_size(round(one.sent_bytes))}"
    lines = [style.paint(head, "1"), f"   write: {method.line}"]
    if method.flags:
        lines.append(f"   or:    allranks run {method.flags} SCRIPT")
    lines.append(f"   cost:  {'; '.join(costs_of(one, step))}")
    if one.buckets is not None and one.buckets.mb is not None:
        lines.append(f"   why:   buckets of {one.buckets.mb:g} MiB: {one.buckets.reason}")
    return lines


def costs_of(one: Prediction, step: StepProfile) -> list[str]:
    """Return what a method costs, each as a phrase."""
    method = one.method
    costs = ["changes the result"] if method.changes_result else []
    if method.loss.percent is None:
        costs.append(f"needs at least {method.samples:.1f} x the samples, by the noise scale")
    elif method.wire or method.changes_result:
        costs.append(f"validation loss {method.loss.percent:+g} % after as many samples")
    for what, times in (("memory on each rank", method.memory), ("for each rank in a checkpoint", method.checkpoint)):
        if times:
            costs.append(f"{describe_size(round(times * step.gradient_bytes))} more {what}")
    return [*costs, *([method.remark] if method.remark else [])] or ["none"]


def _table_of_nodes(advice: Advice, batch: int | None) -> list[str]:
    best = [one.method.name for one in advice.offered[:3]]
    rows = [("nodes", [f"{step.nodes}{'*' * step.is_scaled}" for step in advice.by_nodes])]
    for name in ("now", *best):
        rows.append((f"{name}, ms", [_ms(step.steps_s[name]) for step in advice.by_nodes]))
        if batch:
            per_s = [f"{step.ranks * batch / step.steps_s[name]:.4g}" for step in advice.by_nodes]
            rows.append((f"{name}, samples/s", per_s))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}" + "".join(f"{text:>9}" for text in texts) for name, texts in rows]
    if any(step.is_scaled for step in advice.by_nodes):
        lines.append("* not measured: scaled from the measured number of nodes, as a ring")
    return lines


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.0f}" if time_s >= 0.0095 else f"{time_s * 1e3:.2g}"


def describe(advice: Advice, table: BenchTable, *, batch: int | None, measured_s: float | None) -> dict[str, object]:
    """Return the advice as a document."""
    from allranks.comm.methods import LOSS_SOURCE

    step, offered = advice.step, len(advice.offered)
    order = [
        (advice.compute, True),
        *((one, True) for one in advice.offered),
        *((one, False) for one in advice.refused),
    ]
    return {
        "nodes": list(table.nodes),
        "ranks": table.ranks,
        "backend": table.backend,
        "forward_ms": _rounded(step.forward_s),
        "backward_ms": _rounded(step.backward_s),
        "other_ms": _rounded(step.other_s),
        "gradient_bytes": step.gradient_bytes,
        "now_ms": _rounded(advice.now.step_s),
        "measured_ms": None if measured_s is None else _rounded(measured_s),
        "methods": [
            {
                "name": one.method.name,
                "rank": number if 0 < number <= offered else None,
                "step_ms": _rounded(one.step_s),
                "sent_bytes": round(one.sent_bytes),
                "gain": round(one.gain, 3),
                "to_equal_loss": round(one.to_equal_loss, 3),
                "loss_percent": one.method.loss.percent,
                "changes_result": one.method.changes_result,
                "memory_bytes": round(one.method.memory * step.gradient_bytes),
                "checkpoint_bytes": round(one.method.checkpoint * step.gradient_bytes),
                "line": one.method.line,
                "flags": one.method.flags,
                "bucket_mb": one.buckets.mb if one.buckets else one.method.bucket_mb,
                "why_not": one.refusal,
            }
            for number, (one, _) in enumerate(order)
        ],
        "by_nodes": [
            {
                "nodes": scaled.nodes,
                "ranks": scaled.ranks,
                "is_scaled": scaled.is_scaled,
                "step_ms": {name: _rounded(time_s) for name, time_s in scaled.steps_s.items()},
                **({"samples": scaled.ranks * batch} if batch else {}),
            }
            for scaled in advice.by_nodes
        ],
        "loss_source": LOSS_SOURCE,
    }


def _rounded(time_s: float) -> float:
    return round(time_s * 1e3, 3)
