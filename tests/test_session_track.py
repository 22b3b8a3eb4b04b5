"""Do all ranks of a session save, leave and resume at the same step, and come to the same weights?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from conftest import clean_env

SCRIPTS = Path(__file__).parent / "scripts"
RANDOM_KILLS = Path(__file__).parents[1] / "benchmarks" / "random_kills.py"

pytestmark = pytest.mark.torch


def run(folder: Path, *command: object, within_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=clean_env(os.environ, PYTHONIOENCODING="utf-8"),
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )


def run_ranks(folder: Path, sizes: str, script: str) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(script))
    return run(folder, SCRIPTS / "fork_ranks.py", sizes, path)


TRAIN = """
    import os
    import torch
    from torch.utils.data import DataLoader
    import allranks
    from allranks.guard.inside.cell import Cell

    cell = Cell.create()                       # what an agent would do
    os.environ["ALLRANKS_CELL_FD"] = str(cell.fd)
    torch.manual_seed(1)
    with allranks.session(timeout_s=20) as s:
        model = s.ddp(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = s.sampler(100, global_batch_size=8)
        loader = DataLoader(torch.arange(400.0).reshape(100, 4) / 400, batch_sampler=sampler)
        state = s.track(model=model, optimizer=optimizer, sampler=sampler)
        resumed_at = state.step
        try:
            for step in state.steps(loader, total=200):
                with step as batch:
                    model(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    EVENT
        finally:
            told = cell.read()
            print(f"rank {s.rank} from {resumed_at} step {told.step} saved {told.saved} {told.phase}\\n", end="")
"""


def told_by(stdout: str) -> list[tuple[str, ...]]:
    """From, step, saved and phase of each rank."""
    found = re.findall(r"^rank (\d) from (\d+) step (\d+) saved (\w+) (\w+)$", stdout, re.M)
    return [line[1:] for line in sorted(found)]


def test_an_order_that_one_rank_saw_makes_all_save_and_leave_at_the_same_step_and_they_resume_there(tmp_path: Path):
    event = """
                    if s.rank == 2 and step.number == resumed_at + 20:
                        cell.give_order(0, "the time limit is near", leaves=True)
    """.strip()
    result = run_ranks(tmp_path, "3,3", TRAIN.replace("EVENT", event))
    assert result.stdout.count("codes [0, 0, 0]\n") == 2, result.stderr
    at = 0
    for life in result.stdout.split("codes")[:2]:
        told = told_by(life)
        assert len(told) == 3
        assert len(set(told)) == 1, told
        began, step, saved, phase = told[0]
        assert (int(began), phase) == (at, "leaving")
        assert saved == step
        assert at + 20 < int(step) <= at + 20 + 17
        assert f"allranks: leaving at step {step}: " in result.stderr
        assert f"the checkpoint of step {step} is complete" in result.stderr
        at = int(step)


def test_a_wish_of_one_rank_is_a_checkpoint_of_all(tmp_path: Path):
    event = "if s.rank == 1 and step.number == 30: state.save_now()"
    result = run_ranks(tmp_path, "3", TRAIN.replace("EVENT", event))
    assert result.stdout.endswith("codes [0, 0, 0]\n"), result.stderr
    assert {line[1:3] for line in told_by(result.stdout)} == {("200", "200")}
    (wished,) = {int(path.name.removeprefix("step_")) for path in (tmp_path / "checkpoints").glob("step_*")} - {200}
    assert 30 < wished <= 31 + 16


def test_a_lost_rank_ends_the_others_in_one_line_and_nothing_of_the_step_counts(tmp_path: Path):
    event = """
                    if s.rank == 1 and step.number == 60:
                        os._exit(9)
    """.strip()
    result = run_ranks(tmp_path, "3", TRAIN.replace("EVENT", event))
    assert result.stdout.endswith("codes [1, 9, 1]\n"), result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 2
    for line in lines:
        assert re.match(
            r"error: rank [02]: step 6\d does not count, a collective failed; .*checkpoint.* complete: .*"
            r"(Connection closed by peer|Connection reset by peer|Broken pipe)",
            line,
        ), line


def test_the_example_of_the_guide_runs_and_has_nothing_to_do_when_it_is_run_again(tmp_path: Path):
    guide = (Path(__file__).parents[1] / "docs" / "how-to" / "session.md").read_text()
    example = next(
        block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "allranks.session" in block
    )
    result = run_ranks(tmp_path, "2,1", example)
    assert result.stdout == "200 steps are done\ncodes [0, 0]\n200 steps are done\ncodes [0]\n", result.stderr


LIVES = """
    import os
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader
    import allranks

    life = int(os.environ["EXACT_LIFE"])
    with allranks.session(timeout_s=20) as s:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1))
        if KIND == "sharded":
            for layer in (*model, model):
                fully_shard(layer)
        else:
            model = s.ddp(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        sampler = s.sampler(60, global_batch_size=6 if KIND == "sharded" else 7)
        loader = DataLoader(torch.arange(360.0).reshape(60, 6) / 360, batch_sampler=sampler)
        where = "whole" if life == 0 else "cut"
        state = s.track(model=model, optimizer=optimizer, sampler=sampler, checkpoint_dir=where)
        for step in state.steps(loader, total=[12, 5, 9, 12][life]):
            with step as batch:
                (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        whole = [getattr(parameter, "full_tensor", parameter.clone)().detach() for parameter in model.parameters()]
        if s.is_leader:
            torch.save(whole, f"{where}.pt")
"""


@pytest.mark.parametrize(("kind", "sizes"), [("sharded", "2,2,3,1"), ("ddp", "3,3,2,3")])
def test_a_training_goes_on_at_any_number_of_ranks(tmp_path: Path, kind: str, sizes: str):
    result = run_ranks(tmp_path, sizes, LIVES.replace("KIND", repr(kind)))
    codes = [f"codes {[0] * int(size)}" for size in sizes.split(",")]
    assert result.stdout.splitlines() == codes, result.stderr
    whole, cut = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "cut"))
    for mine, other in zip(cut, whole, strict=True):
        assert torch.allclose(mine, other, atol=1e-6)


def test_random_kills_leave_no_trace_in_weights_and_samples(tmp_path: Path):
    result = run(tmp_path, RANDOM_KILLS, "--ranks", 3, "--kills", 2, "--total", 60, "--lead-s", 0.4, within_s=110)
    assert result.returncode == 0, result.stdout + result.stderr
    runs = re.search(r"2 kills in (\d+) runs", result.stdout)
    assert runs is not None
    assert f"bit-identical weights  {runs[1]} of {runs[1]}" in result.stdout
