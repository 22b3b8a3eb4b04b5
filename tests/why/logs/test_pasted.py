"""What all lines of a log begin with is taken off, unless it tells something."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from allranks.why.logs.log_events import Logs
from allranks.why.logs.pasted import find_margin

MARGINS = {
    "> ": ["> Traceback (most recent call last):", ">   File", ">", "> ValueError: x"],
    "[stderr] ": ["[stderr] step 1", "[stderr] ValueError: x"],
    "    ": ["    step 1", "      step 2"],
    "train | ": ["train | step 1", "train | step 2"],
    "INFO: ": ["INFO: step 1", "INFO: step 2"],
}
TELLING = [
    ["[rank3]: step 1", "[rank3]: step 2"],
    ["srun: error: c002: task 0: Killed", "srun: Force Terminated StepId=120.0"],
    ["[1,3]<stderr>: step 1", "[1,3]<stderr>: step 2"],
    ["INFO: step 1", "ERROR: step 2"],
    ["step 1", "step 2"],
]


@pytest.mark.parametrize(("margin", "lines"), MARGINS.items())
def test_a_margin_is_found_and_stripped(margin: str, lines: list[str]) -> None:
    data = "\n".join(lines).encode()
    strip = find_margin(data)
    assert strip is not None
    assert strip(data).decode().split("\n") == [line.removeprefix(margin) for line in lines]


@pytest.mark.parametrize("lines", TELLING)
def test_what_tells_of_writers_or_of_programs_stays(lines: list[str]) -> None:
    assert find_margin("\n".join(lines).encode()) is None


@pytest.mark.parametrize("margin", ["> ", "ERROR: ", "train | ", "[stderr] ", "    "])
def test_code_that_is_quoted_behind_a_margin_shows_nothing(read: Callable[[str], Logs], margin: str) -> None:
    lines = (
        "Traceback (most recent call last):",
        '  File "/home/ml/train.py", line 88, in <module>',
        '    raise E("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")',
        "ShardMismatch: 5 columns",
    )
    logs = read("\n".join(margin + line for line in lines))
    assert [event.kind for event in logs.events] == ["traceback", "frame", "exception"]
