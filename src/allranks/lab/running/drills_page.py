"""The results of drills of running jobs, as the markdown page that `make drills` writes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from datetime import date

from allranks.lab.running.seen import StrikeBaseline
from allranks.lab.running.strike_drill import BASELINE_S, StrikeResult


def render_table(done: Sequence[StrikeResult], *, seed: int) -> str:
    """Return the page."""
    lines = [
        "# Drills: faults in a running job",
        "",
        "Faults in a running six-node training: a real SLURM job starts in network namespaces, a fault is injected",
        "while all ranks train, and the outcome is compared with the truth.",
        "`make drills` writes this page.",
        "",
        f"{date.today()}, seed {seed}.",
        "Seconds count from the strike: to the verdict as it was printed, and to the next optimizer step",
        "of new workers; of several drills minimum / median / maximum. torchrun: the same training, unmodified, under",
        f"plain torchrun with restarts; cut off after {BASELINE_S:.0f} s.",
        f"{sum(drill.has_account for drill in done)} of {len(done)} jobs left an account of their time (goodput.json);",
        "a row is correct only if it sums to the whole time of all ranks within 0.1 %, by category, rank and attempt.",
        "",
        "| fault | the truth | verdict | to the verdict | to the next step | exit | correct | torchrun |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for fault in dict.fromkeys(drill.fault for drill in done):
        lines.append(_row([drill for drill in done if drill.fault == fault]))
    return "\n".join(lines) + "\n"


def _row(drills: Sequence[StrikeResult]) -> str:
    """Return the row of one fault, which was drilled once or several times."""
    num, wrong = len(drills), list(dict.fromkeys(line for drill in drills for line in drill.wrong))
    num_right = sum(not drill.wrong for drill in drills)
    counted = "" if num == 1 else f"{num_right} of {num}"
    baseline = next((drill.baseline for drill in drills if drill.baseline is not None), None)
    cells = [
        drills[0].fault,
        _join(drill.truth for drill in drills),
        _join(f"{drill.verdict}; {drill.leader} takes over" if drill.leader else drill.verdict for drill in drills),
        describe_spread(drill.verdict_s for drill in drills),
        describe_spread(drill.next_step_s for drill in drills),
        _join("cut off" if drill.exit_code is None else str(drill.exit_code) for drill in drills),
        "no: " + "; ".join(filter(None, [counted, *wrong])) if wrong else counted or "yes",
        "" if baseline is None else _describe(baseline),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def describe_times(done: Sequence[StrikeResult]) -> list[str]:
    """Return lines about the times of each fault that was drilled several times."""
    lines = []
    for fault in dict.fromkeys(drill.fault for drill in done):
        drills = [drill for drill in done if drill.fault == fault]
        waits = [(drill.verdict_s, drill.next_step_s) for drill in drills]
        between = [step_s - said_s for said_s, step_s in waits if said_s is not None and step_s is not None]
        lines += [
            f"{fault}, {len(drills)} times: minimum / median / maximum",
            f"    from the fault to the verdict        {describe_spread(said_s for said_s, _ in waits) or '-'}",
            f"    from the verdict to the next step    {describe_spread(between) or '-'}",
            f"    from the fault to the next step      {describe_spread(step_s for _, step_s in waits) or '-'}",
        ]
    return lines


def describe_spread(seconds: Iterable[float | None]) -> str:
    """Return minimum, median and maximum; of one number itself, of none nothing.

    >>> describe_spread([0.31, None, 0.2, 2.04]), describe_spread([4.9]), describe_spread([None])
    ('0.2 / 0.3 / 2.0 s', '4.9 s', '')
    """
    known = sorted(time_s for time_s in seconds if time_s is not None)
    if len(known) < 2:
        return "".join(f"{time_s:.1f} s" for time_s in known)
    return f"{known[0]:.1f} / {statistics.median(known):.1f} / {known[-1]:.1f} s"


def _join(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def _describe(baseline: StrikeBaseline) -> str:
    said = (
        "prints nothing" if baseline.silent_s is None else f"after {baseline.silent_s:.1f} s `{_plain(baseline.said)}`"
    )
    next_step = "no further step" if baseline.next_step_s is None else f"next step after {baseline.next_step_s:.1f} s"
    end = "cut off" if baseline.exit_code is None else f"exit {baseline.exit_code}"
    return f"{said}; {next_step}; {end}"


def _plain(text: str) -> str:
    return text.replace("`", " ")
