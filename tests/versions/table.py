"""The page of all versions: one row a torch and Python, written by a run and read back by the next one. Pure."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

FEATURES = {
    "hook": "join/hook.py",
    "kept port": "join/group.py, _serve",
    "named missing ranks": "join/group.py, _Arrival",
    "sequence numbers": "guard/inside/wrapped_calls.py",
    "flight recorder": "guard/inside/flight.py, _dump_of",
    "times of steps": "guard/inside/thread_marks.py, wrap",
    "pinned buckets": "state/resumed/buckets.py, CAN_PIN",
    "checkpoints": "state/saved/sharded.py",
    "standbys": "join/standby.py",
    "wire formats": "join/ddp.py, lacking",
}
"""What allranks takes from torch beyond its documented interface, or adds to it, and its door: where it is looked for,
below src/allranks. This file is read by a Python that may not have allranks."""
UNKNOWN = "-"
_COLUMNS = ("torch", "Python", *FEATURES, "jobs", "date")
_HEAD = """# PyTorch and Python

Written by `make versions`: each row is a run of the same jobs (bring-up, a missing rank, a killed rank, a stopped one,
a mismatch, a hang, resume, checkpoint) over Gloo, on the CPU, in an environment of its own. NCCL is in none of them.

`allranks env --explain` prints what the installed version lacks. Under a version outside of this table a job says so
once, and runs. The columns are the features that need more of torch than its documented interface.

"""


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one version."""

    torch: str
    python: str
    date: str
    jobs: str
    """`11 passed`, or which did not pass; why there is nothing, where the jobs could not be run."""
    features: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """Rows of one key replace each other."""
        return self.torch.partition("+")[0], self.python


def row_of(torch: str, python: str, xml: str, *, date: str) -> Row:
    """Return what pytest's junit file says of one version.

    Raises:
        ValueError: it is no such file.
    """
    try:
        cases = list(ET.fromstring(xml).iter("testcase"))
    except ET.ParseError as exc:
        raise ValueError("pytest left no result") from exc
    broken = [each.get("name", "") for each in cases if any(child.tag in ("failure", "error") for child in each)]
    skipped = [each.get("name", "") for each in cases if each.find("skipped") is not None]
    seen = {own.get("name", ""): own.get("value", "") for each in cases for own in each.iter("property")}
    jobs = [f"{len(cases) - len(broken) - len(skipped)} passed"]
    jobs += [f"failed: {', '.join(broken)}"] if broken else []
    jobs += [f"skipped: {', '.join(skipped)}"] if skipped or not cases else []
    return Row(torch, python, date, "; ".join(jobs), {name: seen.get(name, UNKNOWN) for name in FEATURES})


def render(rows: Iterable[Row]) -> str:
    """Return the page, oldest version first."""
    lines = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    for row in sorted(rows, key=lambda each: (_numbers(each.torch), _numbers(each.python))):
        features = (row.features.get(name, UNKNOWN) for name in FEATURES)
        lines.append(_line([row.torch, row.python, *features, row.jobs, row.date]))
    return _HEAD + "\n".join(lines) + "\n"


def read_rows(page: str) -> list[Row]:
    """Return the rows of a page that `render` wrote; those of another form are left out."""
    found = []
    for line in page.splitlines():
        cells = [each.strip().replace("\\|", "|") for each in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == len(_COLUMNS) and cells[0][:1].isdigit():
            told = dict(zip(_COLUMNS, cells, strict=True))
            features = {name: told[name] for name in FEATURES}
            found.append(Row(told["torch"], told["Python"], told["date"], told["jobs"], features))
    return found


def merge(old: Iterable[Row], new: Row) -> list[Row]:
    """Return all rows, with the new one in the place of its elder."""
    return [*(row for row in old if row.key != new.key), new]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", version.partition("+")[0]))
