"""Which rank wrote a file whose name has only a number? Pure.

    0.err 1.err 2.err 3.err             of a job with 4 ranks
    train-4711-task0.out ... task3.out, where lines of task3.out say [rank3]

A number in one name may be anything: a node, a part, a day, a run. Of files whose names differ in one number only it is
the rank, if lines in several of them say so and none says another. Else it may be, if all ranks of the job are there,
the files are of one time, and neither the name nor a launcher's line speaks against it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

_NUMBER = re.compile(r"(?<!\d)\d{1,6}(?!\d)")
_SUFFIX = re.compile(r"\.[a-z]{1,6}$")
_NO_RANK = re.compile(
    r"(?:(?<![a-z])(?:run|fold|trial|seed|epoch|part|try|attempt|exp|experiment|sweep|config|cfg|job|step|iter|chunk|shard"
    r"|split|v|version|day|hour|stage|phase|round|restart|retry|start|model|test|case|array|grid|node|host)s?|\d)"
    r"[_.=/-]*$",
    re.IGNORECASE,
)
"""What stands before a number that counts something else, or is a part of a date, of an array's or a step's id."""
_GOES_ON = re.compile(r"[_.:-]?\d")
LEAST_FILES = 2
TOGETHER_S = 10.0
"""Files whose times are all within this are of one time, also if none overlaps another."""


@dataclass(slots=True)
class NumberedFile:
    """What the lines of a file tell about its writer."""

    ranks: set[int] = field(default_factory=set)
    """That lines give as their writer's."""
    times_s: list[float] = field(default_factory=list)
    """Of lines with a date and a year, since the epoch."""
    is_launchers: bool = False
    """A launcher wrote into it."""
    has_raised: bool = False


def read_file_ranks(
    files: Mapping[str, NumberedFile], world: int | None, failed_tasks: Collection[int] = ()
) -> tuple[dict[str, int], frozenset[str]]:
    """Return the rank of each file that belongs to one, and those files where no line says it.

    >>> read_file_ranks({"0.err": NumberedFile(), "1.err": NumberedFile()}, world=2)[0]
    {'0.err': 0, '1.err': 1}
    >>> read_file_ranks({"part0.log": NumberedFile(), "part1.log": NumberedFile()}, world=2)[0]
    {}

    Args:
        files: by path.
        world: number of ranks, if known.
        failed_tasks: those of which srun says that they failed.
    """
    families: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for path in files:
        name = _SUFFIX.sub("", path)
        for number in _NUMBER.finditer(name):
            families[name[: number.start()], name[number.end() :]][path] = int(number[0])
    several = {parts: family for parts, family in families.items() if len(set(family.values())) > 1}
    differ_in = Counter(path for family in several.values() for path in family)
    found: dict[str, int] = {}
    guessed: set[str] = set()
    for (before, after), family in several.items():
        told = [(number, ranks) for path, number in family.items() if (ranks := files[path].ranks)]
        if not all(ranks == {number} for number, ranks in told):
            continue
        is_one_number = all(differ_in[path] == 1 for path in family)
        if len({number for number, _ in told}) >= LEAST_FILES:
            found |= family
        elif is_one_number and _may_be_ranks(before, after) and _are_all(files, family, world, failed_tasks):
            found |= family
            guessed.update(path for path in family if not files[path].ranks)
    return found, frozenset(guessed)


def _may_be_ranks(before: str, after: str) -> bool:
    """Whether a number may be a rank, by what stands before and after it in a path."""
    return "/" not in after and _NO_RANK.search(before) is None and _GOES_ON.match(after) is None


def _are_all(
    files: Mapping[str, NumberedFile], family: Mapping[str, int], world: int | None, failed_tasks: Collection[int]
) -> bool:
    """Whether these are files of all ranks of one run, as far as their lines tell."""
    numbers = set(family.values())
    if world is None or numbers != set(range(world)) or any(files[path].is_launchers for path in family):
        return False
    raised = {number for path, number in family.items() if files[path].has_raised}
    if not numbers.issuperset(failed_tasks) or (raised and failed_tasks and raised.isdisjoint(failed_tasks)):
        return False
    times: defaultdict[int, list[float]] = defaultdict(list)
    for path, number in family.items():
        times[number] += files[path].times_s
    begins, ends = ([of(times_s) for times_s in times.values() if times_s] for of in (min, max))
    return not begins or max(begins) <= min(ends) or max(ends) - min(begins) <= TOGETHER_S
