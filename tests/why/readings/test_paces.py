"""Who took much longer, as a list of ranks says?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from allranks.why.conclusion import Conclusion

Why = Callable[[str | Mapping[str, str]], list[Conclusion]]


def test_the_rank_that_took_much_longer_is_named(why: Why) -> None:
    times = "".join(f"[default0]:    Rank {rank}: {2031.12 if rank == 5 else 410 + rank}ms\n" for rank in range(8))
    first = why("[default0]:Section Timings (ms):\n" + times)[0]
    assert first.cause.name == "straggler-rank"
    assert first.culprit.ranks == (5,)


def test_ranks_at_the_head_of_a_table_are_named(why: Why) -> None:
    table = "     rank   data_time   step_time\n      144     332.459      48.455\n      145     332.214      48.553\n"
    rest = "      160       0.053     381.009\n      328       0.025     381.041\n"
    assert why(table + rest)[0].culprit.ranks == (144, 145)


@pytest.mark.parametrize(
    "log",
    [
        pytest.param("".join(f"Rank {rank}: {400 + rank * 90}ms\n" for rank in range(8)), id="some are slower"),
        pytest.param("Rank 0: 9000ms\nRank 1: 400ms\nRank 2: 410ms\n", id="three are too few"),
        pytest.param("".join(f"Rank {n % 4}: {9000 if n == 5 else 400}ms\n" for n in range(8)), id="several steps"),
    ],
)
def test_ranks_that_are_as_fast_name_nobody(why: Why, log: str) -> None:
    assert "straggler-rank" not in {each.cause.name for each in why(log)[:1]}
