"""What people list or print themselves: innermost frames by node, batches by rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from allranks.why.conclusion import Conclusion

Why = Callable[[str | Mapping[str, str]], list[Conclusion]]
LISTED = "gpu-01\n" + "    all_reduce\n" * 8 + "gpu-02\n" + "    broadcast\n" * 4 + "    wait\n    all_reduce\n"
BATCHES = "".join(f"[rank {rank}] batch {batch} - entered\n" for batch in range(3) for rank in range(2))


def test_the_node_with_the_odd_frame_is_named(why: Why) -> None:
    first = why(LISTED)[0]
    assert first.cause.name == "straggler-rank"
    assert first.culprit.nodes == ("gpu-02",)


def test_a_list_in_which_all_are_in_collectives_names_nobody(why: Why) -> None:
    assert "straggler-rank" not in {each.cause.name for each in why(LISTED.replace("wait", "broadcast"))}


def test_the_words_of_frames_in_another_log_are_none(why: Why) -> None:
    found = why(LISTED + "step 7 loss 0.1 12.3 it/s\n")
    assert found[0].cause.name == "healthy"


def test_the_rank_with_a_batch_more_is_named(why: Why) -> None:
    first = why(BATCHES + "[rank 0] batch 3 - entered\nStart of validation\n")[0]
    assert first.cause.name == "uneven-inputs"
    assert first.culprit.ranks == (0,)


def test_as_many_batches_are_healthy(why: Why) -> None:
    assert why(BATCHES + "Start of validation\n")[0].cause.name == "healthy"


def test_a_batch_more_is_healthy_where_the_job_goes_on(why: Why) -> None:
    after = "".join(f"validation step {step} loss 0.1\n" for step in range(4))
    assert why(BATCHES + "[rank 0] batch 3 - entered\nStart of validation\n" + after)[0].cause.name == "healthy"


def test_a_log_that_ends_as_all_ranks_announced_themselves_hangs(why: Why) -> None:
    started = "".join(f"Initializing distributed: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/2\n" for rank in range(2))
    assert why(started)[0].cause.name == "silent-hang"
    assert why(started + "All distributed processes registered.\n")[0].cause.name == "healthy"


def test_a_rank_that_added_its_key_came_to_the_barrier(why: Why) -> None:
    key = "store_based_barrier_key:1"
    added = f"INFO:torch.distributed.distributed_c10d:Added key: {key} to store for rank: 2\n"
    waits = "".join(
        f"Waiting in store based barrier to initialize process group for rank: {rank}, key: {key} "
        "(world_size=4, worker_count=3, timeout=0:30:00)\n"
        for rank in (0, 1)
    )
    first = why(added + waits)[0]
    assert first.cause.name == "missing-rank"
    assert first.culprit.ranks == (3,)
