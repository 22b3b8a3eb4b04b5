"""Lines that a terminal cut are joined."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from allranks.why.logs.log_events import Logs
from allranks.why.logs.pasted import unwrap

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


def test_joined_lines_add_to_what_the_lines_show_and_replace_none_of_it(read: Callable[[str], Logs]) -> None:
    failed = (
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
        "GPU 0 has a total capacity of 79.11 GiB of which 1.2 GiB is free."
    )
    cut = [failed[at : at + 60] for at in range(0, len(failed), 60)]
    logs = read("\n".join(["start", *cut, "a" * 60, "b" * 60, "end", "c" * 60, "5: ValueError: x", "end"]))
    told = [(event.kind, event.line.number, event.line.rank) for event in logs.events]
    assert told == [("cuda-oom", 2, 3), ("exception", 2, 3), ("exception", 9, 5)]
    assert read("\n".join([*("abc"[at] * 80 for at in range(3)), "5: ValueError: x"])).events[0].line.rank == 5
