"""What the streams between nodes carry, for people: a matrix, and a line for what kept them from being judged. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from allranks.comm.bench import Marks, count_untested, describe, lost_percent, rate_of
from allranks.comm.bench_table import Pair
from allranks.report.text import count_of

MAX_NODES = 16
"""Of a matrix; between more nodes, the slowest streams are listed."""
MAX_LISTED = 8


def describe_busy(marks: Marks) -> tuple[str, ...]:
    """Return a line for each reason why slow streams are held against no node and no link."""
    lines = []
    if marks.busy:
        worst = max(marks.busy, key=lambda pair: pair.others_mbit_s)
        met = f"{worst.source} -> {worst.target} met {worst.others_mbit_s:.0f} Mbit/s of other traffic"
        told = f"the network is busy: {met}"
        if marks.unjudged:
            told += (
                f"; {count_of(len(marks.unjudged), 'slow or lossy stream')} cannot be judged: measure when it is quiet"
            )
        lines.append(told)
    if marks.starved:
        lines.append(
            f"the machines are busy: {count_of(len(marks.starved), 'stream')} of {marks.num_tested} waited for a core, "
            "and were fast at times; no link counts as slow because of that"
        )
    return tuple(lines)


def describe_untested(pairs: Sequence[Pair]) -> str:
    """Return why streams failed, for one of them; empty: all were measured for which there was time."""
    failed = [pair for pair in pairs if pair.mbit_s is None]
    if not failed:
        return ""
    first = failed[0]
    return f"{len(failed)} of {len(pairs)} streams failed: {first.source} -> {first.target}: {first.why}"


def render_streams(nodes: Sequence[str], pairs: Sequence[Pair], marks: Marks) -> str:
    """Return the streams as a matrix, of more than MAX_NODES nodes the slowest ones, and a line that sums them up."""
    tested = sorted((pair for pair in pairs if pair.mbit_s is not None), key=rate_of)
    if not tested:
        return "no stream was measured"
    slowest = tested[0]
    total = f"streams: median {marks.usual_mbit_s:.0f} Mbit/s, slowest {slowest.source} -> {slowest.target}"
    total += f" {describe(slowest)}; {lost_percent(tested)} % of all segments were sent again"
    if left := count_untested(nodes, pairs):
        total += f"; {left} of {left + len(pairs)} not tested, for lack of time"
    if len(nodes) > MAX_NODES:
        listed = [f"{pair.source} -> {pair.target}: {describe(pair)}" for pair in tested[:MAX_LISTED]]
        return "\n".join(["slowest streams", *listed, total])
    return "\n".join([_matrix(nodes, {(pair.source, pair.target): pair for pair in pairs}, marks), total])


def _matrix(nodes: Sequence[str], pairs: Mapping[tuple[str, str], Pair], marks: Marks) -> str:
    def cell(way: tuple[str, str]) -> str:
        pair = pairs.get(way)
        if pair is None:
            return "- "
        if pair.mbit_s is None:
            return ". "
        sign = "*" if pair in marks.slow else "!" if pair in marks.lossy else "~" if pair in marks.busy else " "
        return f"{pair.mbit_s:.0f}{sign}"

    names = [f"{number} {node}" for number, node in enumerate(nodes, start=1)]
    rows = [[cell((a, b)) for b in nodes] for a in nodes]
    width = max(3, *(len(text) for row in rows for text in row))
    first = max(map(len, ("Mbit/s from, to", *names)))
    shown = "".join(text for row in rows for text in row)
    signs = {"*": "slow", "!": "lossy", "~": "met other traffic", ".": "not tested"}
    legend = "; ".join(f"{sign} {word}" for sign, word in signs.items() if sign in shown)
    lines = [f"{'Mbit/s from, to':<{first}}" + "".join(f"{number:>{width}} " for number in range(1, len(nodes) + 1))]
    lines += [
        f"{name:<{first}} " + " ".join(f"{text:>{width}}" for text in row)
        for name, row in zip(names, rows, strict=True)
    ]
    return "\n".join(line.rstrip() for line in [*lines, *([legend] if legend else [])])
