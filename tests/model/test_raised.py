"""Which exception of a printed chain is the one to show, and where was it raised? The texts are in raised/.

Those of torch, multiprocessing and groups were printed by Python 3.11 and torch 2.13; Ray, Accelerate and datasets are
as their sources make them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.model.raised import find_origin, read_chain

TEXTS = Path(__file__).parent / "raised"
ONE = {
    "dataloader": ("KeyError: 0", "train.py:6 in __getitem__"),
    "dataloader_odd_class": ("Odd: odd", "train.py:20 in __getitem__"),
    "dataloader_raise_from": ("RuntimeError: row is bad", "train.py:13 in outer"),
    "dataloader_collate": (  # no frame of the worker's is the user's
        "RuntimeError: stack expects each tensor to be equal size, but got [1] at entry 0 and [2] at entry 1",
        "train.py:32 in <module>",
    ),
    "pool": ("RuntimeError: row is bad", "train.py:13 in outer"),
    "pool_raise_from": ("RuntimeError: mine", "train.py:65 in <module>"),
    "process_pool_executor": ("KeyError: 3", "train.py:8 in work"),
    "mp_spawn": ("ValueError: bad 0", "train.py:15 in job"),
    "task_group": ("ValueError: in task", "train.py:42 in f"),
    "groups": ("ValueError: one", "train.py:48 in <module>"),
    "raise_from": ("RuntimeError: row is bad", "train.py:13 in outer"),
    "raise_from_group": ("RuntimeError: mine", "train.py:55 in <module>"),
    "ray": ("KeyError: 3", "data.py:12 in load"),
    "ray_nested": ("RuntimeError: row is bad", "data.py:14 in load"),
    "accelerate_notebook": ("ValueError: bad 1", "train.py:15 in job"),
    "datasets": ("ValueError: line 17 has no label", "rows.py:8 in rows"),
    "session": (
        "CheckpointError: the directory of checkpoints cannot be read: Not a directory (/c)",
        "train.py:13 in <module>",
    ),
    "text_inside": ("RuntimeError: evaluation failed:", "train.py:20 in <module>"),
}
LOGS = {
    "rank_prefix": ("KeyError: 17", "train.py:12 in __getitem__"),
    "log_of_two": ("ValueError: bad batch", "train.py:30 in <module>"),
}


def read(name: str) -> str:
    return (TEXTS / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", ONE)
def test_the_innermost_exception_that_a_framework_handed_on_is_shown(name: str):
    origin = find_origin(read(name))
    assert (origin.headline, origin.place) == ONE[name]


@pytest.mark.parametrize("name", LOGS)
def test_of_a_log_the_last_exception_is_shown(name: str):
    origin = find_origin(read(name), is_one=False)
    assert (origin.headline, origin.place) == LOGS[name]


def test_every_text_is_in_the_table():
    assert {path.stem for path in TEXTS.iterdir()} == ONE.keys() | LOGS.keys()


@pytest.mark.parametrize("text", ["", "killed", 'Traceback (most recent call last):\n  File "x.py", line 3, in f\n'])
def test_what_is_no_whole_traceback_has_no_origin(text: str):
    assert find_origin(text) is None


@pytest.mark.parametrize("name", [*ONE, *LOGS])
def test_a_text_that_is_cut_anywhere_is_read_without_an_error(name: str):
    lines = read(name).splitlines()
    for at in range(len(lines)):
        find_origin("\n".join(lines[at:]))
        find_origin("\n".join(lines[:at]), is_one=False)
    assert read_chain(read(name))
