"""A real job leaves the books of its ranks, also of one that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.model.pace import PaceState
from allranks.model.time_book import LaneState
from allranks.report.books import lanes, read_books, sums
from conftest import Allranks, write


@pytest.mark.torch
def test_books_have_each_step_of_ranks_that_ended_well_and_of_one_that_was_killed(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import os, time
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        is_first, rank = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", dist.get_rank()
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(9):
            if step == 6 and is_first and rank == 1:
                os.kill(os.getpid(), 9)
            time.sleep(0.02)
            weight.sum().backward()
            dist.all_reduce(weight.grad)
            optimizer.step()
        dist.destroy_process_group()
        """,
    )
    ended = allranks("run", "--ignore", "AR011", "--nproc-per-node", "2", "--max-restarts", "1", "train.py")
    assert ended.returncode == 0, ended.stderr
    found = read_books(tmp_path / "runs/latest/attempt_0")
    assert found.damaged == ()
    (book,) = found.books
    accounts = {(account.generation, account.rank): account for account in book.ranks}
    assert {key: account.last.steps for key, account in accounts.items()} == {
        (0, 0): 6, (0, 1): 6, (1, 0): 9, (1, 1): 9,
    }  # fmt: skip
    for account in accounts.values():
        assert -1_000_000 < account.begun_us < account.begun_us + account.last.age_us <= book.until_us
        assert account.last.of(PaceState.START) > 0
        assert account.last.of(PaceState.STEP) + account.last.of(PaceState.BLOCKED) > 5 * 20_000  # START has the first
    over_time = lanes(found.books)
    assert [{LaneState.START, LaneState.GONE} <= {*lane.columns} for lane in over_time.lanes] == [True, True]
    assert [known.steps for known in sums(found.books)] == [15, 15]
