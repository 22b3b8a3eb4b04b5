"""How busy are the ranks' GPUs, from nvidia-smi's answers up to the beat of their node."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.guard.node.gpus import EVERY_S, MOST_S, OLD_S, GpuMeter
from allranks.guard.node.heartbeat import WorkerWatch
from allranks.host.gpu_load import GpuLoad, load_of, parse_gpu_loads, read_gpu_loads
from allranks.model.beat import GpuSeen, LoadSeen, RankBeat
from host.fake_nvidia_smi import install

from .scenes import FAST
from .test_heartbeat import Told

A, B = "GPU-e04d2b16-6a7f-45c9-9d38-c8b0f12e7a93", "GPU-f9a3c581-2e64-4d1b-87f0-3b5d6e8a0c27"
LOADS = (GpuLoad(A, 97, 1, 81559), GpuLoad(B, None, 14337, 81559, (3999999, 3999998)))


def test_nvidia_smi_says_how_busy_and_full_each_gpu_is_and_who_uses_it(tmp_path: Path) -> None:
    assert read_gpu_loads(deadline_s=30, env=install(tmp_path, "550-h100")) == LOADS
    assert read_gpu_loads(deadline_s=30, env={"PATH": str(tmp_path / "none")}) == ()


@pytest.mark.parametrize(
    ("loads", "found"),
    [
        ("", ()),
        ("No devices were found\n", ()),
        (f"{A}, [GPU requires reset], [N/A], [N/A]\n", ()),
        (f"{A}, 250, 1, 2\n", (GpuLoad(A, None, 1, 2),)),
        (f"{A}, 5, {'9' * 400}, 2\n", ()),
        (f"{A}, 5, 1\n{B}, 5, 1, 2, 3\n", ()),
    ],
)
def test_answers_that_are_none_are_dropped(loads: str, found: tuple[GpuLoad, ...]) -> None:
    assert parse_gpu_loads(loads, "GPU-x, [N/A], python, [N/A]\nGPU-y\n") == found


def processes(root: Path, *pids: int) -> Path:
    for pid in pids:
        (root / f"proc/{pid}").mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    ("users", "visible", "num_ranks", "found"),
    [
        (((71,), (70,)), None, 2, {0: B, 1: A}),  # as the driver says, whatever the order
        (((70, 71), ()), None, 2, {0: A, 1: A}),  # two ranks on one GPU
        (((70,), ()), None, 2, {0: A}),  # rank 1 has not begun
        (((99,), ()), None, 2, {}),  # somebody else's
        (((), ()), None, 2, {0: A, 1: B}),  # a container hides processes: one GPU a rank
        (((5,), (6,)), "1,0", 2, {0: B, 1: A}),  # pids of another namespace
        (((), ()), f"{B[:12]},{A}", 2, {0: B, 1: A}),
        (((), ()), "1", 2, {}),
        (((), ()), "7,1", 2, {}),
        (((), ()), None, 1, {}),  # which one, nobody can tell
    ],
)
def test_a_rank_has_the_gpu_that_its_process_uses(
    users: tuple[tuple[int, ...], ...], visible: str | None, num_ranks: int, found: dict[int, str], tmp_path: Path
) -> None:
    loads = [GpuLoad(uuid, 10 + at, at, 4, pids) for at, (uuid, pids) in enumerate(zip((A, B), users, strict=True))]
    root = processes(tmp_path, 70, 71, 99)
    told = load_of({rank: 70 + rank for rank in range(num_ranks)}, loads, visible=visible, root=root)
    assert {rank: (A, B)[gpu.used_mib] for rank, gpu in told.items()} == found


def test_two_gpus_of_one_process_are_the_use_of_the_idlest_and_all_memory(tmp_path: Path) -> None:
    loads = (GpuLoad(A, 90, 10, 80, (70,)), GpuLoad(B, 20, 5, 80, (70,)), GpuLoad("GPU-c", 0, 1, 80))
    assert load_of({0: 70}, loads, root=processes(tmp_path, 70)) == {0: GpuSeen(20, 15, 160)}


def test_what_a_gpu_does_stands_beside_the_memory_of_its_rank() -> None:
    load = LoadSeen(rss_mib=9000).with_gpu(GpuSeen(97, 62_695, 81_559))
    assert load == LoadSeen(9000, 97, 3918, 5097)
    assert load.gpu == GpuSeen(97, 62_688, 81_552)


def test_it_is_asked_every_few_seconds_and_the_less_often_the_slower_it_is() -> None:
    now_s, asked, own = 100.0, list[float](), os.getpid()
    took = iter([0.0, 0.01, 0.0, 0.2, 0.0, 0.01])

    def read() -> tuple[GpuLoad, ...]:
        asked.append(now_s)
        return (GpuLoad(A, 50, 16, 32, (own,)),)

    def start(target: Callable[[], None], *, name: str) -> str:
        target()
        return name

    meter = GpuMeter({}, read=read, start=start, clock=lambda: next(took))
    meter.look(now_s, {})
    while now_s < 132:
        now_s += 1.0
        meter.look(now_s, {4: own})
    # Each answer is taken in a second later; 0.2 s are one part in a hundred of 20 s.
    assert asked == [100 + EVERY_S, 106 + EVERY_S, 112 + 20.0]
    assert meter.of_rank == {4: GpuSeen(50, 16, 32)}


@pytest.mark.parametrize(
    ("answer", "pause_s"), [((GpuLoad(A, 50, 1, 2, (os.getpid(),)),), MOST_S), ((), 1200.0), (None, 1200.0)]
)
def test_after_a_slow_answer_the_next_question_follows_within_a_minute_and_after_none_later(
    answer: tuple[GpuLoad, ...] | None, pause_s: float
) -> None:
    now_s, asked, took = 100.0, list[float](), iter([0.0, 12.0] * 2)

    def read() -> tuple[GpuLoad, ...]:
        asked.append(now_s)
        if answer is None:
            raise RuntimeError("a bug")
        return answer

    def start(target: Callable[[], None], *, name: str) -> str:
        with contextlib.suppress(RuntimeError):
            target()
        return name

    meter = GpuMeter({}, read=read, start=start, clock=lambda: next(took))
    while len(asked) < 2 and now_s < 2000:
        meter.look(now_s, {4: os.getpid()})
        now_s += 1.0
    assert asked[1] - asked[0] == 1 + pause_s


def test_where_no_answer_comes_beats_go_on_and_the_last_one_is_forgotten() -> None:
    started = list[Callable[[], None]]()

    def start(target: Callable[[], None], *, name: str) -> str:
        started.append(target)
        if len(started) == 1:  # the second one hangs
            target()
        return name

    own = os.getpid()
    meter = GpuMeter({}, read=lambda: (GpuLoad(A, 50, 16, 32, (own,)),), start=start, clock=lambda: 0.0)
    watch = WorkerWatch(FAST, data_address="127.0.0.1", control_address="127.0.0.1", gpus=meter)
    watch.begin(0, [Told(RankBeat(rank=4, pid=own))], 0.0, node_index=0)
    seen = [watch.beat(float(now_s)).ranks[0].load.gpu for now_s in range(40)]
    watch.close()
    first_s = round(EVERY_S) + 1
    last_s = first_s + round(OLD_S * EVERY_S)
    assert seen == [None] * first_s + [GpuSeen(50, 16, 32)] * (last_s - first_s + 1) + [None] * (39 - last_s)
    assert len(started) == 2
