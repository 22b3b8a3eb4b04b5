"""How long do collectives take in a process group, as its slowest rank sees it?

join/trial.py forms the group and loads this file by path, with the cases that one entry of its order lists:

    {"cases": [{"collective": "all_reduce", "size_bytes": 4194304, "in_flight": 8}, ...],   `list_cases` makes them
     "budget_s": 60,                  for all cases together; what does not fit is skipped
     "repeat": [3, 100]}              fewest and most repetitions of a case

Rank 0 answers with a line for each case, in their order:

    {"row": {...}}                    the fields of comm/table.py, Row
    {"skipped": {...}, "why": "..."}  the case, and the reason in a sentence

One case, in which each rank is heard at the store, so that a missing rank is known by its name:

1 try      once with numbers whose result is known; wrong elements are counted      timeout_s
2 agree    rank 0 sets the number of repetitions by the slowest rank's time         timeout_s after the slowest
3 repeat   each repetition is timed alone, up to the end of all in flight           timeout_s each
4 agree    time of a repetition: of the slowest rank in it                          timeout_s after the slowest

Repetitions follow each other without a barrier, as in nccl-tests: a small broadcast therefore shows how often the root
can send, not how long one takes. Gloo of torch 2.13 carries out reduce_scatter as an all-reduce, and its times say so.
Standard library and torch only: it runs in the Python of the job.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

Case = dict[str, Any]
MIB = 1 << 20
BUCKET_SIZES = tuple(MIB // 2 << power for power in range(7))
"""0.5 to 32 MiB: as DDP sends its buckets."""
SIZES = (4 << 10, 64 << 10, MIB, 16 * MIB)
"""Of the collectives other than all-reduce."""
IN_FLIGHT = (1, 8)
REPEAT = (3, 100)
MAX_SHARES = 4
"""A case may take as much time as this many would, if all that are left took the same: large sizes take longest."""
MAX_TEXT = 400
NUM_VALUES, NUM_WEIGHTS = 127, 61
"""Of the numbers that are sent: the sum of NUM_VALUES * NUM_WEIGHTS over 2,000 ranks is still exact in float32."""


def list_cases(
    sizes: Iterable[int] = SIZES,
    *,
    collectives: Iterable[str] = ("all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"),
    bucket_sizes: Iterable[int] = BUCKET_SIZES,
) -> list[Case]:
    """Return the cases of a whole measurement: all-reduce as DDP uses it, then the others, smallest first. Pure.

    Args:
        bucket_sizes: bytes of the all-reduces, which run alone and eight at a time.
        sizes: bytes of each of the other collectives.
    """
    cases = [_case("all_reduce", size, count) for count in IN_FLIGHT for size in sorted(bucket_sizes)]
    cases += [_case(collective, size) for collective in collectives for size in sorted(sizes)]
    return [*cases, _case("barrier", 0)]


def _case(collective: str, size_bytes: int, in_flight: int = 1) -> Case:
    return {"collective": collective, "size_bytes": size_bytes, "in_flight": in_flight}
