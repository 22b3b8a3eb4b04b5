"""Which rank wrote a file whose name has only a number? Pure.

    0.err 1.err 2.err 3.err             of a job with 4 ranks
    train-4711-task0.out ... task3.out, where lines of task3.out say [rank3]

A number in one name may be anything: a node, a part, a day. Of files whose names differ in one number only it is the
rank, if lines in them say so and none says another, or if they are all ranks of the job, but one at most.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

_NUMBER = re.compile(r"(?<!\d)\d{1,6}(?!\d)")
_SUFFIX = re.compile(r"\.[a-z]{1,6}$")
LEAST_FILES = 2


def read_file_ranks(said: Mapping[str, Iterable[int]], world: int | None) -> dict[str, int]:
    """Return the rank of each file that belongs to one.

    >>> read_file_ranks({"0.err": (), "1.err": (), "2.err": ()}, world=4)
    {'0.err': 0, '1.err': 1, '2.err': 2}
    >>> read_file_ranks({"part0.log": (), "part1.log": ()}, world=16)
    {}

    Args:
        said: by path, the ranks that its lines give as their writers'.
        world: number of ranks, if known.
    """
    families: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for path in said:
        name = _SUFFIX.sub("", path)
        for number in _NUMBER.finditer(name):
            families[name[: number.start()], name[number.end() :]][path] = int(number[0])
    found: dict[str, int] = {}
    for files in families.values():
        numbers = set(files.values())
        told = [(number, ranks) for path, number in files.items() if (ranks := set(said[path]))]
        are_ranks = world is not None and numbers <= set(range(world)) and len(numbers) >= world - 1
        agree = {number for number, ranks in told if ranks == {number}}
        is_said = len(agree) >= LEAST_FILES or (agree and are_ranks)
        if len(numbers) >= LEAST_FILES and all(ranks == {number} for number, ranks in told):
            found |= files if is_said or (are_ranks and not told) else {}
    return found
