"""Do ranks that synchronize every few steps average by samples, save only when together, and resume exactly?"""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest
import torch

from allranks.comm.local_sgd import LocalSGD
from allranks.model.errors import UsageError
from allranks.state.resumed.tracked_parts import Parts
from test_session_track import run_ranks

pytestmark = pytest.mark.torch

AVERAGES = """
    import torch
    import allranks

    def norm(): return torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(1))

    with allranks.session(timeout_s=20) as s:
        def meet(samples, **arguments):
            net = norm()
            torch.nn.init.constant_(net[0].weight, 1.0)
            model = s.ddp(net)
            local = s.local_sgd(model, torch.optim.SGD(model.parameters(), lr=1.0), every=2, **arguments)
            for step in range(2):
                net[0].weight.grad = torch.full((1, 1), 2.0 * s.rank)          # steps of 0 and 2: weights of 1 and -3
                for own in net[1].parameters():
                    own.grad = torch.zeros_like(own)
                net[1].running_mean.fill_(s.rank), net[1].num_batches_tracked.fill_(5 + s.rank)
                local.count(samples[s.rank])
                local.step()
            return net

        def told(name, net):
            said = [float(net[0].weight), float(net[1].running_mean), int(net[1].num_batches_tracked)]
            print(f"{name} {said}\\n", end="", flush=True)

        net = torch.nn.Linear(1, 1, bias=False)
        model = s.ddp(net)
        local = s.local_sgd(model, torch.optim.SGD(model.parameters(), lr=0.0), every=3, plain_steps=1)
        sampler = s.sampler(5, global_batch_size=5, micro_batch_size=2, shuffle=False)
        loader = torch.utils.data.DataLoader(torch.arange(5.0).reshape(5, 1), batch_sampler=sampler)
        for step in s.track(model=model, optimizer=local, sampler=sampler).steps(loader, total=2):
            with step as batches:
                for batch in batches:
                    model(batch).mean().backward()
                print(f"step {step.number} of rank {s.rank} {float(net.weight.grad):.2f}\\n", end="", flush=True)
                local.step()
                local.zero_grad()

        told("even", meet([1, 1]))
        told("weighted", meet([3, 1]))
        told("empty rank", meet([1, 0]))
        told("outer", meet([1, 1], outer_lr=0.5, outer_momentum=0.5))
        net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(net.weight, 1.0)
        model = s.ddp(net)
        local = s.local_sgd(model, torch.optim.SGD(model.parameters(), lr=1.0), every=2)

        def closure():
            (loss := model(torch.full((1, 1), 1.0 + s.rank)).sum()).backward()
            return loss

        print(f"closure {float(local.step(closure))} {float(net.weight)}\\n", end="", flush=True)
"""

MEANS = {(0, 0): "2.00", (0, 1): "2.00", (1, 0): "0.50", (1, 1): "3.00"}


def test_weights_and_buffers_are_averaged_by_samples_and_the_outer_step_goes_part_of_the_way(tmp_path: Path):
    result = run_ranks(tmp_path, "2", AVERAGES)
    assert result.stdout.endswith("codes [0, 0]\n"), result.stderr
    *lines, _ = sorted(result.stdout.splitlines(), key=lambda line: line.startswith("codes"))
    gradients = {line for line in lines if line.startswith("step")}
    # Samples 0 and 1 are rank 0's, and 2, 3, 4 rank 1's: the plain step has the mean of all, the local one of its own.
    assert gradients == {f"step {step} of rank {rank} {mean}" for (step, rank), mean in MEANS.items()}
    assert sorted(line for line in lines if line not in gradients) == sorted(
        [
            "even [-1.0, 0.5, 5]",  # (1 + -3) / 2
            "weighted [0.0, 0.25, 5]",  # (3 * 1 + 1 * -3) / 4
            "empty rank [1.0, 0.0, 5]",
            "outer [-0.5, 0.5, 5]",  # 1 - 0.5 * (1 + 0.5) * (1 - -1), Nesterov's first step
        ]
        * 2
        + ["closure 1.0 0.0", "closure 2.0 -1.0"]
    )


LIVES = """
    import os
    import signal
    import torch
    from torch.utils.data import DataLoader
    import allranks

    life = int(os.environ["EXACT_LIFE"])
    with allranks.session(timeout_s=20) as s:
        torch.manual_seed(1)
        model = s.ddp(torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1)))
        inner = torch.optim.AdamW(model.parameters(), lr=0.05)
        optimizer = s.local_sgd(model, inner, every=4, plain_steps=3, outer_lr=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
        sampler = s.sampler(60, global_batch_size=7, micro_batch_size=2)
        loader = DataLoader(torch.arange(360.0).reshape(60, 6) / 360, batch_sampler=sampler)
        parts = dict(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
        where = "whole" if life == 0 else "cut"
        state = s.track(**parts, checkpoint_dir=where, checkpoint_every=1)
        for step in state.steps(loader, total=[27, 27, 27, 31, 35][life]):
            with step as batches:
                for batch in batches:
                    (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
            if life == 1 and step.number == 16:
                os._exit(9) if s.rank == 1 else None             # 2 steps after a synchronization
        if life in (0, 2):
            torch.save([*(p.detach() for p in model.parameters()), inner.state_dict()], f"{where}-{s.rank}.pt")
"""


def flat(saved: list[object]) -> torch.Tensor:
    *weights, inner = saved
    moments = [value.flatten().float() for state in inner["state"].values() for value in state.values()]
    return torch.cat(
        [*(weight.flatten() for weight in weights), *moments, torch.tensor([inner["param_groups"][0]["lr"]])]
    )


def test_a_killed_training_resumes_at_a_synchronization_to_the_same_bits_and_another_size_says_what_is_dropped(
    tmp_path: Path,
):
    result = run_ranks(tmp_path, "2,2,2,1,2", LIVES, within_s=120)
    codes = re.findall(r"codes \[.*\]", result.stdout)
    assert codes == ["codes [0, 0]", "codes [1, 9]", "codes [0, 0]", "codes [0]", "codes [0, 0]"], result.stderr
    kept = sorted(path.name for path in (tmp_path / "whole").glob("step_*"))
    assert kept == ["step_19", "step_23", "step_27"]  # with checkpoint_every=1, at synchronizations only
    resumed = [int(step) for step in re.findall(r"resumed at step (\d+) from ", result.stderr)]
    assert resumed[0] in (7, 11, 15)  # 3 plain steps, then every 4; the newest that was written when the rank died
    assert resumed[1:] == [27, 31]
    for rank in range(2):
        whole, cut = (torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=False) for name in ("whole", "cut"))
        assert torch.equal(flat(whole), flat(cut))
    inner = [flat(torch.load(tmp_path / f"whole-{rank}.pt", weights_only=False)) for rank in range(2)]
    assert not torch.equal(*inner)  # each rank has moments of its own
    assert "the optimizer of rank 1 made local steps of its own; its state is dropped\n" in result.stderr
    assert "rank 1 goes on with a copy of another rank's optimizer, which made local steps\n" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"every": 1}, "expected every from 2"),
        ({"every": 8, "plain_steps": -1}, "plain_steps from 0"),
        ({"every": 8, "outer_lr": 0.0}, "expected outer_lr above 0"),
        ({"every": 8, "outer_lr": 0.9, "outer_momentum": 1.0}, "outer_momentum from 0 to below 1"),
    ],
)
def test_numbers_out_of_range_and_a_module_outside_of_ddp_are_refused(arguments, why):
    net = torch.nn.Linear(1, 1)
    with pytest.raises(UsageError, match="expected the module that"):
        LocalSGD(net, torch.optim.SGD(net.parameters()), **arguments)
    ddp = object.__new__(torch.nn.parallel.DistributedDataParallel)
    with pytest.raises(UsageError, match=why):
        LocalSGD(ddp, torch.optim.SGD(net.parameters()), **arguments)


def test_a_checkpoint_of_the_other_kind_of_optimizer_is_refused():
    net = torch.nn.Linear(1, 1)
    parts = Parts({"model": net, "optimizer": torch.optim.AdamW(net.parameters())})
    with pytest.raises(UsageError, match=r"optimizer made local steps in the checkpoint, and does not here"):
        parts.load({"optimizer": {"step": 8, "outer": None}})
    local = object.__new__(LocalSGD)
    local.averager = types.SimpleNamespace(outer=None)
    for state in ({"state": {}, "param_groups": []}, {"step": 8, "outer": {"state": {}, "param_groups": []}}):
        with pytest.raises(UsageError, match="the checkpoint was made without it, or outer_lr is set here or"):
            local.load_state_dict(state)
