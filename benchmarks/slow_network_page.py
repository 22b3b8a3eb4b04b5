"""Write the section on slow networks in docs/evidence/benchmarks.md, and its plot, from the figures that were stored.

sudo python benchmarks/slow_network.py --store
python benchmarks/slow_network_page.py
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slow_network_worker import BACKWARD_S, COLUMNS, FORWARD_S, LAYERS, ROWS, TENSORS

from allranks.comm.advise import StepProfile, advise
from allranks.comm.bench_table import BenchTable, from_json
from allranks.comm.hooks import POWERSGD_RANK

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = DOCS / "evidence" / "slow_network.json"
GPT_RESULTS = DOCS / "evidence" / "slow_network_gpt.json"
TABLES = DOCS / "evidence" / "slow_network_tables.json"
"""What `allranks bench` measured, by nodes and rate."""
PAGE = DOCS / "evidence" / "benchmarks.md"
PLOT = DOCS / "pictures" / "slow_network.svg"
RATES = (500, 100)
"""Mbit/s of the table of methods."""
BEGIN, END = "<!-- slow network: begin -->", "<!-- slow network: end -->"
NAMES = {
    "compute": "compute only",
    "torch": "torch's buckets (1, then 25 MiB)",
    "equal": "buckets of 1 MiB",
    "s.ddp": "`s.ddp(model)`",
    "bf16": '`compress="bf16"`',
    "int8": '`compress="int8"`',
    "powersgd": '`compress="powersgd"`',
}
Record = dict[str, Any]


def main() -> None:
    records = json.loads(RESULTS.read_text())
    tables = {(each["nodes"], each["rate"]): each["table"] for each in json.loads(TABLES.read_text())}
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    plain = at(records, switches=1, two=False)
    sections = [
        methods_table([each for each in at(plain, nodes=6) if each["rate"] in RATES]),
        interfaces_table(at(records, two=True)),
        switches_table(at(records, switches=2)),
        gpt_table(json.loads(GPT_RESULTS.read_text()) if GPT_RESULTS.exists() else []),
        predictions_table([each for each in with_predictions(plain, tables) if "predicted_ms" in each]),
    ]
    section = "\n".join(filter(None, sections))
    PAGE.write_text(f"{before}{BEGIN}\n\n{section}\n{END}{after}")
    PLOT.write_text(draw([each for each in at(plain, nodes=6) if each["rate"] in RATES]))


def methods_table(records: Sequence[Record]) -> str:
    rates = sorted({each["rate"] for each in records}, reverse=True)
    head = "| | " + " | ".join(f"{rate} Mbit/s: ms a step | to buckets of 1 MiB" for rate in rates) + " | MB sent |"
    lines = [f"`slow_network.py`, {dates(records)}: medians of {rounds(records)} rounds, ratios job by job.", "", head]
    lines.append("|" + "---|" * (2 + 2 * len(rates)))
    lines.append("| floor | " + " | ".join(f"{at(records, rate=rate)[0]['floor_ms']:.0f} |" for rate in rates) + " | |")
    for method in dict.fromkeys(each["method"] for each in records):
        cells = [NAMES[method]]
        for rate in rates:
            own, plain = at(records, rate=rate, method=method), at(records, rate=rate, method="equal")
            cells += [spread([each["ms"] for each in own], digits=0), ratio(plain, own)]
        sent = statistics.median(each["sent_mb"] for each in at(records, method=method))
        lines.append(f"| {' | '.join(cells)} | {sent:.1f} |")
    return "\n".join([*lines, "", "![Milliseconds of a step](../pictures/slow_network.svg)", ""])


def interfaces_table(records: Sequence[Record]) -> str:
    if not records:
        return ""
    lines = [f"Two interfaces of half the rate each, both named to Gloo, against one of them ({dates(records)}):", ""]
    lines += ["| | one interface: ms a step | two | one to two |", "|---|---|---|---|"]
    for rate in sorted({each["rate"] for each in records}, reverse=True):
        for method in dict.fromkeys(each["method"] for each in records):
            one = at(records, rate=rate, method=method, interfaces=1)
            two = at(records, rate=rate, method=method, interfaces=2)
            cells = [spread([each["ms"] for each in some], digits=0) for some in (one, two)]
            lines.append(f"| {NAMES[method]}, {rate / 2:g} Mbit/s each | {' | '.join(cells)} | {ratio(one, two)} |")
    return "\n".join([*lines, ""])


def switches_table(records: Sequence[Record]) -> str:
    if not records:
        return ""
    lines = [
        f"Two switches, an uplink of half a link; neighbors in the node list are at different ones ({dates(records)}):",
        "",
    ]
    lines += ["| | ranks in the order of the node list | by `bench.json` | ratio |", "|---|---|---|---|"]
    for rate in sorted({each["rate"] for each in records}, reverse=True):
        for method in dict.fromkeys(each["method"] for each in records):
            listed = at(records, rate=rate, method=method, ring="listed")
            ordered = at(records, rate=rate, method=method, ring="ordered")
            cells = [spread([each["ms"] for each in some], digits=0) for some in (listed, ordered)]
            lines.append(f"| {NAMES[method]}, {rate} Mbit/s | {' | '.join(cells)} | {ratio(listed, ordered)} |")
    return "\n".join([*lines, ""])


def gpt_table(records: Sequence[Record]) -> str:
    if not records:
        return ""
    lines = [
        f"`examples/gpt/train.py`, unmodified: 11 M parameters, real computing, on two cores that all ranks share "
        f"({dates(records)}: {rounds(records)} rounds of {records[0]['steps']} steps, ratios within a round):",
        "",
        "| `allranks run` | ms a step | to buckets of 1 MiB | loss after the last step |",
        "|---|---|---|---|",
    ]
    flags = {"plain": "no flag", "equal": "`--bucket-mb 1`", "bf16": "`--compress bf16 --bucket-mb 1`"}
    for nodes, rate in sorted({(each["nodes"], each["rate"]) for each in records}):
        here = at(records, nodes=nodes, rate=rate)
        for name, said in flags.items():
            own = at(here, method=name)
            times, loss = (
                spread([each["ms"] for each in own], digits=0),
                spread([each["loss"] for each in own], digits=3),
            )
            faster = ratio(at(here, method="equal"), own)
            lines.append(f"| {said}, {nodes} nodes, {rate} Mbit/s | {times} | {faster} | {loss} |")
    return "\n".join([*lines, ""])


def predictions_table(records: Sequence[Record]) -> str:
    if not records:
        return ""
    methods = list(dict.fromkeys(each["method"] for each in records))
    lines = [
        f"Step time that `allranks advise` predicts, over the measured one ({dates(records)}): from the table of",
        "`allranks bench`, which ran before, the step time of `compute only` in the same job, and the model's tensors.",
        "",
        f"| nodes, link | {' | '.join(NAMES[method] for method in methods)} |",
        "|---|" + "---|" * len(methods),
    ]
    for nodes, rate in sorted(
        {(each["nodes"], each["rate"]) for each in records}, key=lambda each: (each[0], each[1] or math.inf)
    ):
        cells = []
        for method in methods:
            own = at(records, nodes=nodes, rate=rate, method=method)
            cells.append(spread([each["predicted_ms"] / each["ms"] for each in own], digits=2))
        link = f"{rate} Mbit/s" if rate else "unshaped"
        lines.append(f"| {nodes}, {link} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def with_predictions(records: Sequence[Record], tables: Mapping[tuple[int, int], Any]) -> list[Record]:
    """Return the records with the step time that is predicted, where their network was measured."""
    jobs, found = ("nodes", "rate", "round"), list[Record]()
    compute_ms = {tuple(each[name] for name in jobs): each["ms"] for each in at(records, method="compute")}
    for each in records:
        table, own_ms = tables.get((each["nodes"], each["rate"])), compute_ms.get(tuple(each[name] for name in jobs))
        is_known = table and own_ms and each["method"] != "compute"
        found.append(each | {"predicted_ms": predict(table, own_ms)[each["method"]]} if is_known else each)
    return found


def predict(table: Any, compute_ms: float) -> dict[str, float]:
    """Milliseconds of a step with each method, as `allranks advise --measure` predicts it, which reads these tensors.

    Args:
        compute_ms: of a step that sends nothing.
    """
    read = from_json(json.dumps(table).encode())
    assert isinstance(read, BenchTable), read
    number = LAYERS * TENSORS
    step = StepProfile(
        tensor_bytes=(4 * ROWS * COLUMNS,) * number,
        forward_s=FORWARD_S,
        backward_s=BACKWARD_S,
        other_s=max(0.0, compute_ms / 1e3 - FORWARD_S - BACKWARD_S),
        low_rank_bytes=4 * POWERSGD_RANK * (ROWS + COLUMNS) * number,
        has_vectors=False,
    )
    found = advise(read, step)
    return {each.method.name: each.step_s * 1e3 for each in (*found.offered, *found.refused)}


def at(records: Sequence[Record], **wanted: Any) -> list[Record]:
    return [each for each in records if all(each.get(name) == value for name, value in wanted.items())]


def dates(records: Sequence[Record]) -> str:
    return " and ".join(sorted({each["date"] for each in records}))


def rounds(records: Sequence[Record]) -> int:
    return len({each["round"] for each in records})


def ratio(slower: Sequence[Record], faster: Sequence[Record]) -> str:
    by_round = {each["round"]: each["ms"] for each in faster}
    return spread([each["ms"] / by_round[each["round"]] for each in slower if each["round"] in by_round], digits=2)


def spread(values: Sequence[float], *, digits: int) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def draw(records: Sequence[Record]) -> str:
    """Bars of each method's median at each rate, the floor of full precision dashed."""
    rates = sorted({each["rate"] for each in records}, reverse=True)
    methods = list(dict.fromkeys(each["method"] for each in records))
    row, left, width = 22, 240, 560
    height = sum(50 + row * len(methods) for _ in rates) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 90} {height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    top = 0
    for rate in rates:
        medians = {m: statistics.median(each["ms"] for each in at(records, rate=rate, method=m)) for m in methods}
        floor, scale = at(records, rate=rate)[0]["floor_ms"], width / max(medians.values())
        parts.append(f'<text x="10" y="{top + 24}" font-weight="bold">{rate} Mbit/s, milliseconds of a step</text>')
        for number, method in enumerate(methods):
            y = top + 36 + row * number
            name = NAMES[method].replace("`", "").replace('"', "&quot;")
            parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{name}</text>')
            length = medians[method] * scale
            parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{row - 5}" fill="#0072b2"/>')
            parts.append(f'<text x="{left + length + 6:.1f}" y="{y + 14}">{medians[method]:.0f}</text>')
        x, bottom = left + floor * scale, top + 36 + row * len(methods)
        parts.append(
            f'<line x1="{x:.1f}" y1="{top + 30}" x2="{x:.1f}" y2="{bottom}" stroke="#d55e00" stroke-dasharray="6 4"/>'
        )
        parts.append(f'<text x="{x + 4:.1f}" y="{top + 27}" fill="#d55e00">floor of fp32</text>')
        top = bottom + 14
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
