"""Is the number of a file the rank that wrote it?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion
from allranks.why.logs.log_events import Logs
from allranks.why.people import meet

Read = Callable[[Mapping[str, str]], Logs]
NAMES = {
    "{}.err": True,
    "train-{}.log": True,
    "logs/train-task{}.out": True,
    "slurm-4711_{}.out": False,
    "train_4711_{}.out": False,
    "train-2025-10-0{}.log": False,
    "run_{}.log": False,
    "fold_{}.log": False,
    "seeds/{}.log": False,
    "multirun/{}/train.log": False,
}


def log(at: str = "11:02:30", last: str = "") -> str:
    return f"world size: 4\n2026-11-24 {at} INFO step 140 loss 2.31\n{last}"


def ranks(read: Read, files: Mapping[str, str]) -> dict[str, int]:
    return meet(read(files)).rank_of_file


@pytest.mark.parametrize(("name", "are_ranks"), NAMES.items())
def test_without_a_word_only_some_names_have_ranks(read: Read, name: str, *, are_ranks: bool) -> None:
    files = {name.format(number): log() for number in range(4)}
    assert ranks(read, files) == ({name: at for at, name in enumerate(files)} if are_ranks else {})


@pytest.mark.parametrize(
    "files",
    [
        {f"{number}.log": log() for number in range(3)},
        {f"{number}.log": log() for number in range(1, 5)},
        {f"{number}.log": log(f"1{number}:02:30") for number in range(4)},
        {f"lr{first}-x{number}.log": log() for first in range(2) for number in range(4)},
        {f"{number}.log": log(last="[rank0]: step 3\n" if number else "") for number in range(4)},
        {f"{number}.log": log(last="srun: error: n1: task 0: Exited with exit code 1\n") for number in range(4)},
        {
            **{f"{number}.log": log(last="KeyError: 'x'\n" if number == 1 else "") for number in range(4)},
            "job.out": "srun: error: n1: task 2: Exited with exit code 1\n",
        },
        {
            **{f"{number}.log": log() for number in range(4)},
            "job.out": "srun: error: n1: task 7: Exited with exit code 1\n",
        },
    ],
    ids=("one-missing", "from-1", "one-after-another", "a-grid", "another-says", "of-srun", "task-2", "task-7"),
)
def test_what_speaks_against_ranks(read: Read, files: Mapping[str, str]) -> None:
    assert ranks(read, files) == {}


def test_what_only_the_numbers_of_files_tell_is_not_certain(
    why: Callable[[Mapping[str, str]], list[Conclusion]],
) -> None:
    error = 'Traceback (most recent call last):\n  File "/home/kim/train.py", line 151, in train\n    x\nKeyError: 1\n'
    files = {f"{number}.log": log(last=error if number == 2 else "") for number in range(4)}
    guessed = why(files)[0]
    assert (guessed.culprit.ranks, guessed.confidence) == ((2,), Confidence.LIKELY)
    said = why({name: f"{text}[rank{name[0]}]: step 141\n" if name[0] != "2" else text for name, text in files.items()})
    assert (said[0].culprit.ranks, said[0].confidence) == ((2,), Confidence.CERTAIN)
