"""Write the page, plot and table of the runs of loss.py.

    python benchmarks/loss_report.py --into build/loss       # docs/evidence/compression_loss.json, .md and .svg

A method that has not made all its steps with all seeds is left out; a larger batch needs one seed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from loss import (
    CONTEXT,
    CURVE,
    EVERY,
    METHODS,
    RANKS,
    ROOT,
    WINDOWS,
    first_step_at,
    last_loss,
    path_of,
    read,
)

from allranks.comm.noise import LR_RULES, noise_scale

WORDS = {
    "plain": "fp32 gradients, averaged in every step",
    "bf16": "bf16",
    "int8": "int8, error feedback",
    "powersgd": "PowerSGD, rank 4",
    "topk": "top-k 1 %, error feedback",
    "accumulate-8": "8 micro-batches a step",
    "average-8": "weights averaged every 8 steps",
    "diloco-10": "DiLoCo, every 10 steps",
    "diloco-25": "DiLoCo, every 25 steps",
}


PAGE = """\
# Loss of each method that sends fewer bytes

How much loss a method costs does not depend on the network, so the ranks are simulated: six in one process. They train
a GPT of 0.12 M parameters on the text of Python's standard library, {tokens_per_step:,} tokens a step, {steps:,} steps
(`examples/gpt` with its AdamW, learning rate 1e-3, nothing tuned). For each seed, all methods begin with the same
weights and get the same text in the same order.

The last loss is the mean of the validation loss over the last 100 steps (256 windows of text, nats per byte). The table
has means and ranges of {seeds} seeds, measured on {measured} with torch {torch}.

To repeat it: `python benchmarks/loss.py --into DIRECTORY` makes the runs, in about an hour on one idle core, and
continues runs that were stopped. `python benchmarks/loss_report.py --into DIRECTORY` writes this page, its plot and
`compression_loss.json`.

| method | last loss | compared with plain DDP, % | samples to equal loss |
|---|---|---|---|
{methods}

**Samples to equal loss** is how many samples a method needs to the same loss, as a multiple of plain DDP's. If a
method ends above plain DDP, it is taken at the method's last loss: plain DDP's curve shows at which step it had that
loss. The gain in time to equal loss is the ratio of the step times, divided by this number.

![Validation loss over tokens, mean of the seeds](../pictures/compression_loss.svg)

- int8 runs the code of `comm/hooks.py`. bf16 rounds after every addition, as Gloo's ring does. PowerSGD is the
  arithmetic of torch's hook, after ten plain steps.
- DiLoCo is outer SGD with learning rate 0.9 and Nesterov momentum 0.5, after 10 % of plain steps.
- Limits: one small model, one optimizer, one learning rate without decay.
{reached}
## A larger batch

Batches of 2, 4 and 8 times {tokens_per_step:,} tokens, with the same number of tokens in all. The learning rate is
unchanged (none), or grows with the square root of the factor (sqrt), or with the factor itself (linear). The rows of
1 x are for comparison: the plain batch with a higher learning rate. [Scale to more ranks](../how-to/scaling.md) says
what follows.

| batch | learning rate | seeds | last loss compared with plain DDP, % | samples to equal loss |
|---|---|---|---|---|
{batches}

The gradient noise scale of the plain runs, as `s.ddp(noise_scale=True)` measures it, range over the seeds:

| steps | tokens |
|---|---|
{scales}
"""


def summarize(folder: Path, seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Return what docs/evidence/compression_loss.json holds, of the methods whose seeds have all been run."""
    plain = {seed: read(folder, "plain", seed) for seed in seeds}
    methods = {}
    for method in METHODS + CURVE:
        runs = {seed: read(folder, method.name, seed) for seed in seeds if path_of(folder, method.name, seed).exists()}
        runs = {seed: run for seed, run in runs.items() if run["step"] >= steps}
        if not runs or (len(runs) < len(seeds) and method in METHODS):
            continue
        pairs = [(run["losses"], plain[seed]["losses"]) for seed, run in runs.items()]
        last = [last_loss(own, steps) for own, _ in pairs]
        base = [last_loss(other, steps) for _, other in pairs]
        methods[method.name] = {
            "seeds": list(runs),
            "last_loss": [round(loss, 4) for loss in last],
            "difference_percent": spread([100 * (a / b - 1) for a, b in zip(last, base, strict=True)]),
            "samples_to_equal_loss": spread([samples_to_equal_loss(own, other, steps) for own, other in pairs]),
            "steps_to_plains_last_loss": [
                step and round(step)
                for step in (first_step_at(own, target) for (own, _), target in zip(pairs, base, strict=True))
            ],
            "mean_loss": [
                round(statistics.fmean(dict(own)[step] for own, _ in pairs), 4)
                for step in range(EVERY, steps + 1, EVERY)
            ],
        }
    scales = []
    for begin in range(0, steps, 100):
        of_seeds = []
        for run in plain.values():
            share, whole = zip(*run["norms"][begin : begin + 100], strict=True)
            of_seeds.append(round(noise_scale(share, whole, RANKS) * RANKS * WINDOWS * CONTEXT))
        scales.append({"first_step": begin + 1, "tokens": of_seeds})
    tokens = RANKS * WINDOWS * CONTEXT
    return {
        "measured": time.strftime("%Y-%m-%d", time.gmtime()),
        "torch": torch.__version__,
        "seeds": list(seeds),
        "ranks": RANKS,
        "steps": steps,
        "tokens_per_step": tokens,
        "validated_every": EVERY,
        "methods": methods,
        "noise_scale": scales,
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and range over seeds."""
    rounded_values = [round(value, 3) for value in values]
    return {"mean": round(statistics.fmean(values), 3), "range": [min(rounded_values), max(rounded_values)]}


def samples_to_equal_loss(own: Sequence[Any], plain: Sequence[Any], steps: int) -> float:
    """How many times plain's samples this method needs to the higher one of the two last losses."""
    mine, other = last_loss(own, steps), last_loss(plain, steps)
    if mine > other:
        return steps / (first_step_at(plain, mine) or steps)
    return (first_step_at(own, other) or steps) / steps


def table(summary: dict[str, Any]) -> str:
    """The Markdown page."""
    found = summary["methods"]
    methods = [
        f"| {words} | {statistics.fmean(found[name]['last_loss']):.3f} | {figures(found[name], 1)} |"
        for name, words in WORDS.items()
        if name in found
    ]
    batches = [
        f"| {k} x | {rule}, x {LR_RULES[rule](k):.3g} | {len(found[name]['seeds'])} | {figures(found[name], 1)} |"
        for k in (2, 4, 8)
        for rule in ("none", "sqrt", "linear")
        if (name := "accumulate-8" if (k, rule) == (8, "none") else f"accumulate-{k}-{rule}") in found
    ]
    batches += [
        f"| 1 x | x {scale} | {len(found[name]['seeds'])} | {figures(found[name], 1)} |"
        for scale in (2, 4, 8)
        if (name := f"accumulate-1-x{scale}") in found
    ]
    scales = []
    for row in summary["noise_scale"]:
        first, low, high = row["first_step"], min(row["tokens"]), max(row["tokens"])
        scales.append(f"| {first:,} to {first + 99:,} | {low:,} to {high:,} |")
    later = {name: found[name]["steps_to_plains_last_loss"] for name in WORDS if name in found}
    reached = [
        f"{min(steps):,.0f} to {max(steps):,.0f} ({WORDS[name]})"
        for name, steps in later.items()
        if all(step is not None and step > summary["steps"] for step in steps)
    ]
    return PAGE.format(
        tokens_per_step=summary["tokens_per_step"],
        steps=summary["steps"],
        seeds=len(summary["seeds"]),
        measured=summary["measured"],
        torch=summary["torch"].partition("+")[0],
        methods="\n".join(methods),
        reached=f"- With more steps, plain DDP's last loss was reached at step: {'; '.join(reached)}.\n"
        * bool(reached),
        batches="\n".join(batches),
        scales="\n".join(scales),
    )


def figures(found: dict[str, Any], digits: int) -> str:
    """Two cells: difference in percent and samples."""
    return f"{cell_of(found['difference_percent'], f'+z.{digits}f')} | {cell_of(found['samples_to_equal_loss'], '.2f')}"


def cell_of(values: dict[str, Any], form: str) -> str:
    """Mean and range; of one seed only the value."""
    low, high = (f"{value:{form}}" for value in values["range"])
    return f"{values['mean']:{form}}" + (f" ({low} to {high})" if low != high else "")


COLORS = ("#222222", "#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#d62728", "#ff7f0e", "#17becf", "#e377c2")


def plot(summary: dict[str, Any]) -> str:
    """The curves of METHODS as SVG, from a tenth of the run on."""
    steps, tokens = summary["steps"], summary["tokens_per_step"]
    names = [name for name in WORDS if name in summary["methods"]]
    begin = steps // 10 // EVERY
    curves = {name: summary["methods"][name]["mean_loss"][begin - 1 :] for name in names}
    low = math.floor(min(map(min, curves.values())) * 5) / 5
    high = math.ceil(min(max(curve[len(curve) // 8] for curve in curves.values()), 3.6) * 5) / 5

    def x(i: float) -> float:
        return 60 + 520 * i / (len(curves["plain"]) - 1)

    def y(loss: float) -> float:
        return 20 + 340 * (high - min(loss, high)) / (high - low)

    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 420" font-family="sans-serif" font-size="13">']
    out.append('<rect width="820" height="420" fill="white"/>')
    for i in range(round((high - low) * 5) + 1):
        loss = low + i / 5
        out.append(f'<path d="M60 {y(loss):.1f}H580" stroke="#ddd"/>')
        out.append(f'<text x="52" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.1f}</text>')
    for part in (0.1, 0.4, 0.7, 1.0):
        at = x((part - 0.1) / 0.9 * (len(curves["plain"]) - 1))
        anchor = "end" if part == 1.0 else "middle"
        out.append(
            f'<text x="{at:.0f}" y="380" text-anchor="{anchor}">{part * steps * tokens / 1e6:.2f} M tokens</text>'
        )
    out.append('<text x="60" y="408">validation loss, nats per byte</text>')
    last = sorted(names, key=lambda name: curves[name][-1], reverse=True)
    spots: list[float] = []
    for name in last:
        spots.append(max(y(curves[name][-1]) + 4, spots[-1] + 16 if spots else 0))
    over = max(0.0, spots[-1] - 372)
    for name, color in zip(names, COLORS, strict=False):
        points = " ".join(f"{x(i):.1f},{y(loss):.1f}" for i, loss in enumerate(curves[name]) if loss <= high)
        out.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        height, words = spots[last.index(name)] - over, "plain" if name == "plain" else WORDS[name]
        out.append(f'<text x="588" y="{height:.0f}" fill="{color}">{words}</text>')
    return "\n".join(out) + "\n</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--seeds", default="0,1,2", help="(default: 0,1,2)")
    parser.add_argument("--steps", type=int, default=1000, help="steps of plain (default: 1000)")
    args = parser.parse_args()
    summary = summarize(args.into, [int(seed) for seed in args.seeds.split(",")], args.steps)
    evidence = ROOT / "docs" / "evidence"
    (evidence / "compression_loss.json").write_text(json.dumps(summary, indent=1) + "\n")
    (evidence / "compression_loss.md").write_text(table(summary))
    (ROOT / "docs" / "pictures" / "compression_loss.svg").write_text(plot(summary))


if __name__ == "__main__":
    main()
