"""What is tried with each release of SLURM: its list, the results as data, and the page that shows them. Pure."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

STATIC = (
    "port-filtered", "partition", "cable-pulled", "nic-forced-management", "mtu-blackhole", "packet-loss-20",
    "never-starts", "rank-twice", "torchrun-in-tasks", "run-dir-not-shared",
)  # fmt: skip
"""One of each class; never-starts, rank-twice and torchrun-in-tasks depend on what SLURM does."""
RUNNING = (
    "worker-killed", "worker-stopped", "collective-skipped", "link-cut-running", "agent-killed", "node-killed",
    "time-limit", "requeued", "cancelled", "preempted",
)  # fmt: skip
"""Half of them depend on what SLURM does with steps, signals, lost nodes and requeued jobs."""
TESTS = ("tests/lab/test_jobs.py", "tests/lab/test_stack.py", "tests/lab/test_kinds.py")
RIGHT, MISSING = "yes", ""


@dataclass(slots=True, kw_only=True)
class Tried:
    """The results with one release."""

    release: str
    suite: str
    version: str
    """The exact one, as its commands print it."""
    static: dict[str, str] = field(default_factory=dict)
    """Fault -> RIGHT, or what was wrong."""
    running: dict[str, str] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)
    """Test of tests/lab -> RIGHT, or how it failed."""

    @property
    def is_right(self) -> bool:
        """Whether everything was tried, and right."""
        parts = (self.static, self.running, self.tests)
        return all(parts) and all(is_right(value) for part in parts for value in part.values())


def is_right(result: str) -> bool:
    """Whether a result is right, at the first or at the second try."""
    return result.startswith(RIGHT)


def add_second(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    """Return the results after a second try of what was not right; they keep the words of the first."""
    again = {
        name: f"{RIGHT} at the second try; at the first: {first[name].removeprefix('no: ')}"
        if is_right(result) and name in first
        else result
        for name, result in second.items()
        if not is_right(first.get(name, MISSING))
    }
    return {**first, **again}


def read_drills(done: Sequence[Mapping[str, object]], names: Sequence[str], *, key: str) -> dict[str, str]:
    """Return the results of drills by fault, from the file that `allranks lab drill --json` writes.

    Args:
        done: content of the file.
        names: the faults that were asked for; a drill that did not run is not in the file.
        key: of the fault's name: `faults` (a list) or `fault`.
    """
    found: dict[str, str] = {}
    for each in done:
        name, wrong = each[key], each["wrong"]
        assert isinstance(wrong, list)
        found["+".join(name) if isinstance(name, list) else str(name)] = "no: " + "; ".join(wrong) if wrong else RIGHT
    return {name: found.get(name, "did not run") for name in names}


def choose_again(results: Mapping[str, str]) -> list[str]:
    """Return the tests that were not right, and the files of which no test ran, as pytest takes them."""
    wrong = [name.partition(": ") for name, result in results.items() if not is_right(result)]
    ran = {f"tests/lab/{name.partition(': ')[0]}.py" for name in results}
    return [f"tests/lab/{file}.py::test_{name}" for file, _, name in wrong] + [
        each for each in TESTS if each not in ran
    ]


def read_junit(text: str) -> dict[str, str]:
    """Return the results of tests by name, from pytest's XML; a skipped one with its reason."""
    found: dict[str, str] = {}
    for case in ET.fromstring(text).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}: {case.get('name', '').removeprefix('test_')}"
        said = RIGHT
        for kind in ("failure", "error", "skipped"):
            if (element := case.find(kind)) is not None:
                words = " ".join((element.get("message") or "").split())
                said = f"{kind}: {words[:200]}"
        found[name] = said
    return found


def render_page(tried: Sequence[Tried], *, date: str) -> str:
    """Return docs/evidence/slurm-versions.md."""
    lines = [
        "# Releases of SLURM",
        "",
        "Each release's own daemons and commands run in the lab, out of Debian's packages (`allranks lab up --slurm`);",
        "tasks run with the machine's Python and C library. The clusters have slurmdbd with MariaDB. The drills run on",
        "six nodes, each fault with the same seed on all releases. `make slurm-versions` writes this page.",
        "",
        "The limits of times are for a quiet machine with two cores, and that of the next step grows with the time of",
        "`import torch`. On a busy machine, a drill may name the right culprit and still be wrong:",
        "`make slurm-versions ONLY=--again` repeats what was not right or did not run.",
        "",
        f"Last run: {date}.",
        "",
        "| | " + " | ".join(f"SLURM {each.version} ({each.suite})" for each in tried) + " |",
        "|---" * (len(tried) + 1) + "|",
    ]
    for title, part in (
        ("faults at start", "static"),
        ("faults in a running job", "running"),
        ("tests of jobs and verbs", "tests"),
    ):
        lines.append(_row(f"**{title}**", [_count(getattr(each, part)) for each in tried]))
        names = dict.fromkeys(name for each in tried for name in getattr(each, part))
        lines += [_row(_words(name), [getattr(each, part).get(name, MISSING) for each in tried]) for name in names]
    return "\n".join(lines) + "\n"


def _count(part: Mapping[str, str]) -> str:
    return f"{sum(map(is_right, part.values()))} of {len(part)}" if part else "not run"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _row(head: str, cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (head, *cells)) + " |"
