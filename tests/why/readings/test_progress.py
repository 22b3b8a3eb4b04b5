"""Who stopped before the others?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from allranks.why.conclusion import Conclusion

Why = Callable[[str | Mapping[str, str]], list[Conclusion]]
LOST = "[rank0]: RuntimeError: Connection closed by peer [10.0.0.7]:43185\n"


def test_the_rank_whose_steps_end_first_is_named(why: Why) -> None:
    steps = "".join(
        f"[rank{rank}]: step {step} loss 0.1\n" for step in (7, 8) for rank in range(4) if (step, rank) != (8, 2)
    )
    first = why(steps + LOST)[0]
    assert first.cause.name == "straggler-rank"
    assert first.culprit.ranks == (2,)
    assert "stopped at step 7" in first.message


def test_the_rank_whose_log_ends_first_is_named(why: Why) -> None:
    files = {f"rank_{rank}.log": f"2024-05-01 10:0{1 if rank == 1 else 5}:00 loading\n" for rank in range(4)}
    files["rank_0.log"] += LOST
    first = why(files)[0]
    assert first.culprit.ranks == (1,)
    assert "went silent" in first.message


def test_ranks_that_differ_name_nobody_where_nothing_failed(why: Why) -> None:
    steps = "".join(f"[rank{rank}]: step {8 - (rank == 2)} loss 0.1\n" for rank in range(4))
    assert why(steps)[0].cause.name == "healthy"


def test_of_two_ranks_none_is_the_laggard(why: Why) -> None:
    found = why("[rank0]: step 7 loss 0.1\n[rank1]: step 8 loss 0.1\n" + LOST)
    assert "straggler-rank" not in {each.cause.name for each in found}


def test_two_that_stopped_together_are_not_told_apart(why: Why) -> None:
    steps = "".join(f"[rank{rank}]: step {8 - (rank in {1, 2})} loss 0.1\n" for rank in range(5))
    assert "straggler-rank" not in {each.cause.name for each in why(steps + LOST)}


def test_a_log_that_ends_with_the_same_complaint_again_and_again_is_no_healthy_one(why: Why) -> None:
    again = "".join(f"[Warning] Connecting to rank 5 failed, waiting for {ms} milliseconds\n" for ms in (200, 260, 338))
    assert why("Listening...\n" + again)[0].cause.name == "silent-hang"
    assert why("Listening...\n" + again + "step 1 loss 0.1\nstep 2 loss 0.1\n")[0].cause.name == "healthy"
