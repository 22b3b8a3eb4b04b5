"""Is the share of a step that waits for communication what it is in truth, for a script that knows nothing of it?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import workers

from allranks.guard.inside.step_times import Steps, Timed, combine, read_timed
from allranks.guard.worker import WatchedWorker
from allranks.model.beat import DdpSeen, RankBeat
from conftest import wait_until

LOG = {
    "iteration": 100, "forward_compute_time_start": 1_795_870_423_399_755_200, "forward_compute_time": 50_000_000,
    "backward_compute_time": 100_000_000, "backward_comm_time": 300_000_000,
    "backward_compute_comm_overlap_time": 90_000_000, "world_size": 6,
}  # fmt: skip


def timed(iteration: int, began_s: float, communication_s: float = 0.3, overlap_s: float = 0.1) -> Timed:
    return Timed(iteration, began_s, 0.05, 0.1, communication_s, overlap_s)


@pytest.mark.parametrize(
    ("changed", "seen"),
    [
        ({}, Timed(100, 1_795_870_423.3997552, 0.05, 0.1, 0.3, 0.09)),
        ({"backward_comm_time": -1}, None),  # CUDA: its events have not come yet
        ({"forward_compute_time_start": 0}, None),
        ({"forward_compute_time": None}, None),
        (dict.fromkeys(LOG), None),  # no step yet
    ],
)
def test_a_log_is_read_where_it_is_whole(changed: dict[str, int | None], seen: Timed | None) -> None:
    assert read_timed({name: value for name, value in (LOG | changed).items() if value is not None}) == seen


@pytest.mark.parametrize(
    ("logs", "step_s", "wait_share"),
    [
        ([[timed(3, 10.0)]], 0.0, None),  # one step has no time from it to the next one
        ([[timed(3, 10.0), timed(4, 10.4)]], 0.4, 0.5),
        ([[timed(3, 10.0), timed(10, 12.8), timed(100, 48.8)]], 0.4, 0.5),  # every 100th
        ([[timed(3, 10.0), timed(4, 12.0, 9.0), timed(5, 12.4), timed(6, 12.8)]], 0.9333, 0.2143),  # one that paused
        ([[timed(3, 10.0), timed(4, 9.0)]], 0.0, None),  # the clock was set
        # Two in one step, as of a GAN; and one of which only every fourth step is that of the other one.
        ([[timed(3, 10.0), timed(4, 11.0)], [timed(3, 10.5), timed(4, 11.5)]], 1.0, 0.4),
        ([[timed(3, 10.0), timed(4, 10.5)], [timed(3, 10.0), timed(4, 12.0)]], 0.5, 0.5),
        ([[], [timed(3, 10.0), timed(4, 10.4)]], 0.4, 0.5),
    ],
)
def test_the_share_is_that_of_the_time_between_steps(
    logs: list[list[Timed]], step_s: float, wait_share: float | None
) -> None:
    told = combine(logs)
    seen = DdpSeen(**{**told, "iteration": int(told["iteration"])})
    assert seen.step_s == pytest.approx(step_s, abs=1e-4)
    assert seen.wait_share == (None if wait_share is None else pytest.approx(wait_share, abs=1e-4))
    assert combine([[], []]) == {}


def test_a_torch_without_the_log_is_noted_and_left_alone() -> None:
    notes: list[str] = []
    for inside in (SimpleNamespace(), SimpleNamespace(Logger=object)):
        Steps(None, notes.append).watch(inside)  # type: ignore[arg-type]
    assert notes == 2 * ["this torch has no log of DDP: how long steps wait for communication is not seen"]


SLOW = """
    from torch.nn.parallel import DistributedDataParallel
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            time.sleep(0.02)
            return x * weight
        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.04)
            return None, grad
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1000))
        def forward(self, x):
            return Slow.apply(x, self.weight)
    dist.init_process_group("gloo")
    def train(model, steps):
        for step in range(steps):
            if RANK == 1:
                time.sleep(0.35)
            model(torch.ones(1000)).sum().backward()
    train(DistributedDataParallel(Net()), 2)  # and is gone
    model = DistributedDataParallel(Net())
    train(model, 2)
    began = time.perf_counter()
    train(model, 6)
    took = (time.perf_counter() - began) / 6
    with open(f"truth.{RANK}", "w") as file:
        file.write(repr(took))
    os.rename(f"truth.{RANK}", f"truth_{RANK}")
    if RANK == 1:
        time.sleep(60)
    train(model, 1)
"""


@pytest.mark.torch
def test_a_plain_ddp_tells_how_long_it_waits_and_the_beat_goes_on_while_the_log_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with workers(tmp_path, SLOW) as started:
        views = [WatchedWorker(rank=rank, pid=each.pid, cell=each.cell) for rank, each in enumerate(started)]

        def look() -> list[RankBeat]:
            return [view.look() for view in views]

        def is_told() -> bool:
            has_ended = all((tmp_path / f"truth_{rank}").exists() for rank in range(2))
            return has_ended and all(beat.ddp is not None and beat.ddp.step_s > 0 for beat in look())

        wait_until(is_told, "the times of some steps")
        truth_s = [float((tmp_path / f"truth_{rank}").read_text()) for rank in range(2)]
        seen = [beat.ddp for beat in look() if beat.ddp is not None]
        for ddp, took_s in zip(seen, truth_s, strict=True):
            assert ddp.step_s == pytest.approx(took_s, rel=0.2)
        shares = [ddp.wait_share for ddp in seen]
        assert shares[0] == pytest.approx((truth_s[0] - 0.06) / truth_s[0], abs=0.1)
        assert shares[1] == pytest.approx((truth_s[1] - 0.41) / truth_s[1], abs=0.1)  # the late one does not wait
        # Rank 0 waits in its backward pass, which holds the log's lock.
        wait_until(lambda: any(group.waiting_s > 2.5 for group in look()[0].groups), "a wait of two reads of the log")
        assert (look()[0].silent_s or 0.0) < 1.0
