"""What do the last steps and the last lines tell?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from allranks.why.conclusion import Conclusion

Why = Callable[[str | Mapping[str, str]], list[Conclusion]]


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
