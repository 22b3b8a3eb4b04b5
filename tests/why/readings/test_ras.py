"""Who is behind, as NCCL's RAS counts operations?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from allranks.why.conclusion import Conclusion

Why = Callable[[str | Mapping[str, str]], list[Conclusion]]
HEAD = "#0-0 (27a079b828ff1a75) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n"


def test_few_that_are_behind_keep_the_others_waiting(why: Why) -> None:
    counts = "  30 ranks have launched up to operation 640\n  2 ranks have launched up to operation 639\n"
    ranks = "".join(f"  Rank {rank} -- GPU {rank} managed by process {70 + rank} on node 10.0.0.7\n" for rank in (4, 5))
    first = why(HEAD + counts + ranks)[0]
    assert first.cause.name == "straggler-rank"
    assert (first.culprit.ranks, first.culprit.nodes) == ((4, 5), ("10.0.0.7",))


def test_one_that_is_behind_stands_in_its_own_line(why: Why) -> None:
    counts = (
        "  7 ranks have launched up to operation 64\n"
        "  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 1650386 on node node1\n"
    )
    first = why(HEAD + counts)[0]
    assert (first.cause.name, first.culprit.ranks, first.culprit.nodes) == ("straggler-rank", (7,), ("node1",))


def test_the_last_report_counts(why: Why) -> None:
    """In a running job some rank is behind at any time."""
    counts = "  7 ranks have launched up to operation {0}4\n"
    counts += "  Rank {0} has launched up to operation {0}0 -- GPU 3 managed by process 1650386 on node node1\n"
    assert why("".join(HEAD + counts.format(rank) for rank in (5, 6)))[0].culprit.ranks == (6,)


def test_one_that_has_launched_nothing_is_behind(why: Why) -> None:
    counts = (
        "  7 ranks have launched up to operation 1\n"
        "  Rank 2 has not launched any operations -- GPU 2 managed by process 12 on node node1\n"
    )
    assert why(HEAD + counts)[0].culprit.ranks == (2,)


def test_one_that_sees_only_some_of_the_gpus_has_two_numbers_of_its_own(why: Why) -> None:
    counts = "  6 ranks have launched up to operation 64\n"
    alone = "  Rank 7 has launched up to operation 60 -- GPU 0 (NVML 3) managed by process 71 on node node1\n"
    few = "  2 ranks have launched up to operation 60\n  Rank 7 -- GPU 0 (NVML 3) managed by process 71 on node node1\n"
    assert [why(HEAD + counts + behind)[0].culprit.nodes for behind in (alone, few)] == [("node1",), ("node1",)]


def test_a_rank_of_a_communicator_is_not_one_of_the_job(why: Why) -> None:
    eight = "n1:7:7 [0] NCCL INFO comm 0x55 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 0 MNNVL 0\n"
    counts = (
        "  3 ranks have launched up to operation 64\n"
        "  Rank 1 has launched up to operation 60 -- GPU 3 managed by process 1650386 on node node2\n"
    )
    first = why(eight + HEAD + counts)[0]
    assert (first.culprit.ranks, first.culprit.nodes) == ((), ("node2",))


def test_few_that_are_ahead_are_in_another_collective(why: Why) -> None:
    counts = "  30 ranks have launched up to operation 640\n  2 ranks have launched up to operation 641\n"
    ranks = "".join(f"  Rank {rank} -- GPU {rank} managed by process {70 + rank} on node 10.0.0.7\n" for rank in (4, 5))
    first = why(HEAD + counts + ranks)[0]
    assert (first.cause.name, first.culprit.ranks) == ("collective-mismatch", (4, 5))


def test_processes_that_ras_has_lost_are_dead(why: Why) -> None:
    dead = "DEAD\n  1 job process is considered dead (unreachable via the RAS network)\n"
    first = why(dead + "  Process 3487984 on node 172.16.64.213 managing GPU 5\n")[0]
    assert (first.cause.name, first.culprit.nodes) == ("dead-rank", ("172.16.64.213",))
