"""What all lines of a log begin with is taken off, unless it tells something; lines that a terminal cut are joined."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from allranks.why.logs.log_events import Logs
from allranks.why.logs.pasted import find_margin, unwrap

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


WIDE = 80
WRAPPED = ["start", "[rank0]: " + "a" * 71, "aa", "[rank1]: " + "b" * 71, "b" * WIDE, "bb", "end"]


@pytest.mark.parametrize("end", ["", "\n"])
def test_lines_that_a_terminal_cut_are_joined_and_keep_their_numbers(end: str) -> None:
    first, second = WRAPPED[1] + "aa", WRAPPED[3] + "b" * WIDE + "bb"
    joined = unwrap(("\n".join(WRAPPED) + end).encode()).decode()
    assert joined == "\n".join(["start", first, "", second, "", "", "end"]) + end


@pytest.mark.parametrize(
    "lines",
    [
        ["start", *(f"ep {step} " + "x" * 70 for step in range(10, 20)), "end"],  # a format that is repeated
        ["a" * 60 + " " * 20, "x", "b" * 60 + " " * 20, "y", "c" * 60 + " " * 20, "z"],  # padded
        ["a" * WIDE, "x", "b" * WIDE, "y"],  # two may be by chance
        ["a" * 500, "x", "b" * 500, "y", "c" * 500, "z"],  # no screen is so wide
    ],
)
def test_other_long_lines_stay(lines: list[str]) -> None:
    data = "\n".join(lines).encode()
    assert unwrap(data) == data


def test_joined_lines_add_to_what_the_lines_show_and_complete_it(read: Callable[[str], Logs]) -> None:
    failed = (
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
        "GPU 0 has a total capacity of 79.11 GiB of which 1.2 GiB is free."
    )
    cut = [failed[at : at + 60] for at in range(0, len(failed), 60)]
    logs = read("\n".join(["start", *cut, "a" * 60, "b" * 60, "end", "c" * 60, "5: ValueError: x", "end"]))
    told = [(event.kind, event.line.number, event.line.rank) for event in logs.events]
    assert told == [("cuda-oom", 2, 3), ("exception", 2, 3), ("exception", 9, 5)]
    assert logs.events[0].values["gpu"] == "0"  # stands in a later part of the line
    assert read("\n".join([*("abc"[at] * 80 for at in range(3)), "5: ValueError: x"])).events[0].line.rank == 5
