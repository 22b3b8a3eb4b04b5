"""What is kept of a stack, and whose is read next?"""

from __future__ import annotations

import msgspec
import pytest

from allranks.host.py_spy import ToldFrame, ToldLocal
from allranks.launch.look.stack_groups import summarize
from allranks.model.node_look import ProcessLook, ProcessRole, SocketSeen
from allranks.watch.since import Track, choose

TORCH = "/venv/lib/python3.11/site-packages/torch"
NEVER_S = float("-inf")
ALL_REDUCE = f"{TORCH}/distributed/distributed_c10d.py"


def frame(function: str, file: str, line: int = 9, **variables: str):
    return ToldFrame(function, file, line, [ToldLocal(name, value) for name, value in variables.items()])


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("step", "150", 150),
        ("global_step", "7", 7),
        ("batch_idx", "3", 3),
        ("epoch", "-1", -1),
        ("it", "12", 12),
        ("i", "0", 0),
        ("Iteration", "4", 4),
        ("max_step", "1000", None),
        ("num_epoch", "10", None),
        ("batch_size", "32", None),
        ("steps_per_epoch", "334", None),
        ("steps_in_epoch", "334", None),
        ("starting_epoch", "0", None),
        ("top_k", "5", None),
        ("password", "1234", None),
        ("step", '"1234"', None),
        ("step", "1.5", None),
        ("step", "True", None),
        ("step", "\u0661", None),
        ("step", "9" * 30, None),
    ],
)
def test_only_whole_numbers_that_count_are_kept(name: str, value: str, kept: int | None) -> None:
    seen = summarize([frame("train", "/home/me/train.py", **{name: value})], at_s=1.0, is_still=False)
    assert seen.counters == (() if kept is None else ((name, kept),))


def test_no_text_of_a_variable_is_kept() -> None:
    frames = [frame("train", "/home/me/train.py", step='"secret"', token='"secret"', i="7")]
    assert b"secret" not in msgspec.json.encode(summarize(frames, at_s=1.0, is_still=False))


def test_the_innermost_line_of_the_user_counts_and_the_call_it_is_in() -> None:
    frames = [
        frame("all_reduce", ALL_REDUCE, step="99"),
        frame("average", "/home/me/train.py", 9, i="3"),
        frame("main", "/home/me/train.py", 40, epoch="2", step="150"),
    ]
    seen = summarize(frames, at_s=4.0, is_still=False)
    assert (seen.operation, seen.place, seen.is_collective) == ("all_reduce", "train.py:9 in average", True)
    assert seen.counters == (("i", 3), ("epoch", 2), ("step", 150))


@pytest.mark.parametrize(
    ("function", "file", "variables"),
    [
        ("Trainer._run_epoch", "transformers/trainer.py", {"step": "150", "inputs": "7"}),
        ("_TrainingEpochLoop.advance", "lightning/pytorch/loops/training_epoch_loop.py", {"batch_idx": "150"}),
    ],
)
def test_the_loop_of_a_trainer_tells_the_step_where_the_user_has_none(function, file, variables) -> None:
    site = "/venv/lib/python3.11/site-packages"
    frames = [
        frame("all_reduce", ALL_REDUCE, step="99"),
        frame("evaluate", "/home/me/train.py", i="47"),
        frame("Trainer.evaluation_loop", f"{site}/transformers/trainer.py", step="3"),
        frame(function, f"{site}/{file}", **variables),
        frame("main", "/home/me/train.py", 40),
    ]
    seen = summarize(frames, at_s=4.0, is_still=False)
    assert seen.counter is not None
    assert seen.counter[1] == 150


@pytest.mark.parametrize("is_still", [True, False])
@pytest.mark.parametrize(
    ("operation", "inner", "text"),
    [("backward", [frame("backward", f"{TORCH}/_tensor.py")], ""), ("wait", [], "work.wait()")],
)
def test_backward_and_wait_are_for_others_only_where_the_process_does_nothing(operation, inner, text, is_still) -> None:
    frames = [*inner, frame("train", "/home/me/train.py")]
    seen = summarize(frames, at_s=1.0, is_still=is_still, text=text)
    assert (seen.operation, seen.is_collective) == (operation, is_still)


def look(*, cpu_s: float = 1.0, num_switches: int = 5, carried: int | None = None) -> ProcessLook:
    socket = SocketSeen(own_address="a", own_port=1, peer_address="b", peer_port=2, acked_bytes=carried)
    sockets = () if carried is None else (socket,)
    return ProcessLook(pid=7, role=ProcessRole.WORKER, cpu_s=cpu_s, num_switches=num_switches, sockets=sockets)


@pytest.mark.parametrize(
    ("first", "then", "is_still", "is_quiet"),
    [
        (look(), look(), True, True),
        (look(), look(cpu_s=1.01), True, True),  # threads that only wake up now and then
        (look(), look(cpu_s=1.5), False, False),
        (look(), look(num_switches=6), False, False),
        (look(carried=10), look(carried=10, cpu_s=1.5), False, True),  # a loop that never ends
        (look(carried=10), look(carried=11), True, True),
        (look(carried=10), look(carried=11, cpu_s=1.5), False, False),
    ],
)
def test_a_process_is_quiet_if_it_does_nothing_or_sends_nothing(first, then, is_still, is_quiet) -> None:
    track = Track("n1", first, 10.0, 10.0)
    for at_s, seen in ((10.0, first), (12.0, then)):
        track.hear(seen, at_s, 0.0)
    assert (track.is_still, track.is_quiet) == (is_still, is_quiet)


@pytest.mark.parametrize(("share", "is_still"), [(0.0, True), (0.02, True), (0.1, False)])
def test_a_thread_that_redraws_a_bar_does_not_make_a_process_busy_however_long_it_is_watched(share, is_still) -> None:
    track = Track("n1", look(), 10.0, 10.0)
    for number in range(60):
        track.hear(look(cpu_s=1.0 + share * number / 2), 10.0 + number / 2, 0.0)
        assert track.is_still == (is_still and number >= 4), number


NOW_S = 100.0


def busy(read_s: float) -> Track:
    return quiet(0.0, read_s)


def quiet(for_s: float, read_s: float) -> Track:
    track = Track("n1", look(), NOW_S, NOW_S - for_s)
    track.read_s = read_s
    return track


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([busy(NEVER_S), busy(NEVER_S)], [0, 1]),
        ([busy(90.0), busy(84.0)], [1]),
        ([busy(98.5), quiet(2.0, 97.9)], [1]),
        ([busy(80.0), quiet(1.9, 97.0), quiet(5.0, 97.0)], [2, 0]),
    ],
)
def test_a_quiet_rank_is_read_every_2_s_before_others_and_a_busy_one_every_15_s(candidates, chosen) -> None:
    found = choose(candidates, num_ranks=3, now_s=NOW_S)
    assert [candidates.index(track) for track in found] == chosen


def test_of_many_ranks_as_many_busy_ones_are_read_as_of_eight() -> None:
    ranks, count = [busy(0.0) for _ in range(64)], 0
    for quarter in range(4 * 120):
        count += len(choose(ranks, num_ranks=64, now_s=200.0 + quarter / 4))
    assert count == 64  # all in the first seconds, and the next round is due after 120 s


def test_a_hang_is_read_every_2_s() -> None:
    rank, times = busy(NOW_S - 7.0), []
    assert choose([rank], now_s=NOW_S) == []
    rank.still_s = NOW_S - 2.0
    for quarter in range(4 * 12):
        if choose([rank], now_s=NOW_S + quarter / 4):
            times.append(quarter / 4)
    assert times == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
