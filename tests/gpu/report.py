"""The report of a run: machine, versions, date, what held, what did not, what could not be tried. Pure.

A test's result is what pytest's own junit XML says of it, or, where the test was killed, that it was.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Not shown: where a checkout lies is nobody's business."""
MAX_LINES = 12
"""Of a failure; the rest is in the raw log."""


class Outcome(StrEnum):
    """What became of one test."""

    HELD = "held"
    FAILED = "did not hold"
    UNTRIED = "could not be tried"


@dataclass(frozen=True, slots=True)
class Result:
    """One test, tried or not."""

    test: str
    """`test_facts.py::test_cuda_initializes`"""
    outcome: Outcome
    seconds: float = 0.0
    expected: str = ""
    """First paragraph of its docstring."""
    seen: tuple[str, ...] = ()
    """What it noted down, `seconds to the verdict: 1.2`."""
    why: str = ""
    """Of a failure or a skip."""
    log: str = ""
    """Where its raw output is, below the folder of all logs."""


def read_result(test: str, xml: str, *, log: str) -> Result:
    """Read what pytest wrote of one test.

    Args:
        test: its id.
        xml: text of the junit file; it has exactly one test case.
        log: where its raw output is.
    Raises:
        ValueError: it is no such file.
    """
    try:
        case = next(ET.fromstring(xml.replace(f"{ROOT}/", "")).iter("testcase"))
    except (ET.ParseError, StopIteration) as exc:
        raise ValueError("pytest left no result") from exc
    notes = [(each.get("name", ""), each.get("value", "")) for each in case.iter("property")]
    expected = next((value for name, value in notes if name == "expected"), "")
    seen = tuple(f"{name}: {value}" for name, value in notes if name != "expected")
    seconds = float(case.get("time", 0))
    skipped = case.find("skipped")
    if skipped is not None:
        return Result(test, Outcome.UNTRIED, seconds, expected, seen, skipped.get("message", ""), log)
    broken = [each for each in case if each.tag in ("failure", "error")]
    if not broken:
        return Result(test, Outcome.HELD, seconds, expected, seen, "", log)
    return Result(test, Outcome.FAILED, seconds, expected, seen, _shorten(broken[0]), log)


def _shorten(failure: ET.Element) -> str:
    """What pytest marks with E, the lines that say what was expected and what came; else its one-line message."""
    marked = [line[1:].rstrip() for line in (failure.text or "").splitlines() if line.startswith("E ")]
    lines = marked or failure.get("message", "").splitlines()
    return "\n".join(lines[:MAX_LINES] + (["..."] if len(lines) > MAX_LINES else []))


def render(machine: Mapping[str, str], results: Sequence[Result], *, date: str, took_s: float, title: str) -> str:
    """Return the report as Markdown.

    Args:
        machine: name and value of each fact.
        results: of all tests, also of those that were not tried.
        date: of the run.
        took_s: of the whole run.
        title: its first line.
    """
    by_outcome = {outcome: [each for each in results if each.outcome is outcome] for outcome in Outcome}
    counts = ", ".join(f"{len(by_outcome[outcome])} {outcome}" for outcome in Outcome)
    parts = [f"# {title}", f"{date}, {took_s:.0f} s: {counts}. Written by `make gpu`.", ""]
    parts += ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in machine.items()), ""]
    parts.append(f"## What did not hold ({len(by_outcome[Outcome.FAILED])})\n")
    for each in by_outcome[Outcome.FAILED]:
        parts += [f"### {each.test}\n", f"{each.expected}\n" if each.expected else ""]
        parts += [*(f"- {note}" for note in each.seen), ""]
        parts += ["```", each.why or "no message", "```\n", f"{each.seconds:.1f} s; raw log: `{each.log}`\n"]
    held = by_outcome[Outcome.HELD]
    parts += [f"## What held ({len(held)})\n", "| test | seconds | seen |", "|---|---|---|"]
    parts += [f"| {each.test} | {each.seconds:.1f} | {_cell('; '.join(each.seen))} |" for each in held]
    untried = by_outcome[Outcome.UNTRIED]
    parts += [f"\n## What could not be tried ({len(untried)})\n", "| test | why |", "|---|---|"]
    parts += [f"| {each.test} | {_cell(each.why)} |" for each in untried]
    return "\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
