"""The results of drills of running jobs, as the markdown page that `make drills` writes."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.lab.running.drill import BASELINE_S, Drilled
from allranks.lab.running.seen import Baseline


def render_table(done: Sequence[Drilled], *, seed: int) -> str:
    """Return the page."""
    lines = [
        "# Drills of a running job",
        "",
        "Faults in a running six-node training: a real SLURM job starts in network namespaces, a fault is injected",
        "while all ranks train, and the outcome is compared with the truth.",
        "`make drills` writes this page.",
        "",
        f"Seed {seed}. Seconds count from the strike: to the verdict as it was printed, and to the next optimizer step",
        "of new workers. torchrun: the same training, unmodified, under plain torchrun with restarts; cut off after",
        f"{BASELINE_S:.0f} s.",
        "",
        "| fault | the truth | verdict | to the verdict | to the next step | exit | correct | torchrun |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in done:
        cells = [
            each.fault,
            each.truth,
            each.verdict,
            _seconds(each.verdict_s),
            _seconds(each.next_step_s),
            "cut off" if each.exit_code is None else str(each.exit_code),
            "no: " + "; ".join(each.wrong) if each.wrong else "yes",
            "" if each.baseline is None else _describe(each.baseline),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"


def _describe(baseline: Baseline) -> str:
    said = (
        "prints nothing" if baseline.silent_s is None else f"after {baseline.silent_s:.1f} s `{_plain(baseline.said)}`"
    )
    next_step = "no further step" if baseline.next_step_s is None else f"next step after {baseline.next_step_s:.1f} s"
    end = "cut off" if baseline.exit_code is None else f"exit {baseline.exit_code}"
    return f"{said}; {next_step}; {end}"


def _plain(text: str) -> str:
    return text.replace("`", " ")
