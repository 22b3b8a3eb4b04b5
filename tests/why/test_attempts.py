"""Which lines are of a further start of the job?"""

from __future__ import annotations

from collections.abc import Callable

from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion


def test_the_end_of_one_task_is_no_end_of_the_job(why: Callable[[str], list[Conclusion]]) -> None:
    """The ranks may print the world size again for another stage; who fails later may have waited for the first."""
    log = ""
    for minute, rank, error in ((1, 3, "KeyError: 'tokens'"), (9, 2, "ValueError: no batch")):
        log += f"2026-11-24 11:0{minute}:00 world size: 4\n2026-11-24 11:0{minute}:10 step {minute}0 loss 2.9\n"
        for line in ("Traceback (most recent call last):", '  File "/home/kim/train.py", line 5, in main', error):
            log += f"2026-11-24 11:0{minute}:20 [rank{rank}]: {line}\n"
        log += f"2026-11-24 11:0{minute}:21 srun: error: n1: task {rank}: Exited with exit code 1\n"
    found = why(log)[0]
    assert (found.culprit.ranks, found.confidence) == ((3,), Confidence.LIKELY)
