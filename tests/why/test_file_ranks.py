"""Is the number of a file the rank that wrote it?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from allranks.why.logs.log_events import Logs
from allranks.why.people import People

NAMES = ("{}.err", "train-{}.log", "logs/train-task{}.out", "multirun/{}/train.log")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("said", "are_ranks"), [({}, False), ({1: 1}, False), ({1: 1, 3: 3}, True), ({1: 1, 3: 3, 2: 0}, False)]
)
def test_a_number_is_the_rank_if_lines_of_two_files_say_so_and_none_says_another(
    read: Callable[[Mapping[str, str]], Logs], name: str, said: Mapping[int, int], *, are_ranks: bool
) -> None:
    files = {name.format(number): "step 140 loss 2.31\n" for number in range(4)}
    files |= {name.format(number): f"[rank{rank}]: step 141\n" for number, rank in said.items()}
    assert People(read(files)).rank_of_file == ({name: at for at, name in enumerate(files)} if are_ranks else {})
