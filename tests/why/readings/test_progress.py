"""Who stopped before the others?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from allranks.why.conclusion import Conclusion
from allranks.why.logs.log_events import Logs
from allranks.why.people import meet
from allranks.why.readings.progress import find_laggard

Why = Callable[[str | Mapping[str, str]], list[Conclusion]]
LOST = "[rank0]: RuntimeError: Connection closed by peer [10.0.0.7]:43185\n"


def test_the_rank_whose_steps_end_first_is_named_where_nobody_is(read: Callable[[str], Logs]) -> None:
    steps = "".join(
        f"[rank{rank}]: step {step} loss 0.1\n" for step in (7, 8) for rank in range(4) if (step, rank) != (8, 2)
    )
    logs = read(steps)
    assert (laggard := find_laggard(logs, meet(logs))) is not None
    assert laggard[0] == 2


def test_ranks_that_differ_name_nobody_where_nothing_failed(why: Why) -> None:
    steps = "".join(f"[rank{rank}]: step {8 - (rank == 2)} loss 0.1\n" for rank in range(4))
    assert why(steps)[0].cause.name == "healthy"


def test_of_two_ranks_none_is_the_laggard(why: Why) -> None:
    found = why("[rank0]: step 7 loss 0.1\n[rank1]: step 8 loss 0.1\n" + LOST)
    assert "straggler-rank" not in {each.cause.name for each in found}


def test_two_that_stopped_together_are_not_told_apart(why: Why) -> None:
    steps = "".join(f"[rank{rank}]: step {8 - (rank in {1, 2})} loss 0.1\n" for rank in range(5))
    assert "straggler-rank" not in {each.cause.name for each in why(steps + LOST)}


def test_steps_that_were_lost_in_buffers_name_nobody(why: Why) -> None:
    steps = "".join(f"[rank{rank}]: step {step} loss 0.1\n" for rank, step in enumerate((812, 809, 811, 810)))
    assert "straggler-rank" not in {each.cause.name for each in why(steps + LOST)}


def test_a_log_that_ends_with_the_same_complaint_again_and_again_is_no_healthy_one(why: Why) -> None:
    again = "".join(f"[Warning] Dialling shard 5 failed, waiting for {ms} milliseconds\n" for ms in (200, 260, 338))
    assert why("Listening...\n" + again)[0].cause.name == "silent-hang"
    assert why("Listening...\n" + again + "step 1 loss 0.1\nstep 2 loss 0.1\n")[0].cause.name == "healthy"


def test_a_rank_whose_last_line_is_an_error_did_not_stop_first(why: Why) -> None:
    """Elastic Horovod 0.28.1, recorded 2026-11-23: rank 1 got SIGKILL, its neighbor lost the connection at once, and
    the others timed out after 30 s."""
    lines = [
        "[0]<stderr>:[2026-11-23 22:41:42.210979: E /horovod/common/operations.cc:697] [0]: Horovod background loop "
        "uncaught exception: [/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.77.0.4]:22424",
        "[1]<stderr>:Killed",
        "[1]<stderr>:srun: error: node03: task 0: Exited with exit code 137",
        "Process 1 exit with status code 137.",
    ]
    lines += [
        f"[{rank}]<stderr>:[2026-11-23 22:42:12.211124: E /horovod/common/operations.cc:697] [{rank}]: Horovod "
        "background loop uncaught exception: [/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for "
        "recv operation to complete"
        for rank in (2, 3, 4, 5)
    ]
    found = why("\n".join(lines))
    assert found[0].culprit.ranks == (1,)
    assert "straggler-rank" not in {each.cause.name for each in found}
