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

from conftest import allranks_command, clean_env
from forked import fork_ranks, fork_script

SCRIPTS = Path(__file__).parent / "scripts"
RANDOM_KILLS = Path(__file__).parents[1] / "benchmarks" / "random_kills.py"

pytestmark = pytest.mark.torch


def run_ranks(folder: Path, sizes: str, script: str, within_s: float = 200) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(script))
    return fork_ranks(folder, sizes, path, within_s=within_s)


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


@pytest.mark.healthy
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
    assert "error: " not in result.stderr  # they are victims
    lines = [line for line in result.stderr.splitlines() if " does not count" in line]
    assert len(lines) == 2
    for line in lines:
        assert re.match(
            r"allranks: rank [02]: step 6\d does not count, a collective failed; .*checkpoint.* complete: .*"
            r"(Connection closed by peer|Connection reset by peer|Broken pipe)",
            line,
        ), line


FRAGMENTS = """
    import os
    import textwrap
    from pathlib import Path

    import allranks

    example, *fragments = Path("blocks").read_text().split("BLOCK")
    imports, _, block = example.partition("with allranks.session() as s:")
    before_loop = textwrap.dedent(block.partition("    for step in state.steps")[0])
    with allranks.session(timeout_s=60) as s:
        for number, fragment in enumerate(fragments):
            os.environ["ALLRANKS_CHECKPOINT_DIR"] = f"checkpoints_{number}"
            names = {"s": s}
            exec(imports + before_loop, names)

            def loss_of(got, wanted):
                return (got - wanted).square().mean()

            def train_step(batch):
                loss = loss_of(names["model"](batch[0]), batch[1])
                loss.backward()
                names["optimizer"].step()
                names["optimizer"].zero_grad()
                return loss.detach()

            names |= {"loss_of": loss_of, "train_step": train_step, "validate": lambda model: None}
            exec(fragment, names)
            if "state.steps" not in fragment:
                for step in names["state"].steps(names["loader"], epochs=1):
                    with step as batch:
                        train_step(batch)
            loss = float(loss_of(names["model"](names["inputs"]), names["inputs"].sum(1, keepdim=True)))
            if s.is_leader:
                print(names["state"].step, loss < 0.01, flush=True)
"""


def test_the_fragments_of_the_guide_train_to_their_end(tmp_path: Path):
    """Each in the place of the loop of the guide's example, which the test of its console runs."""
    guide = (Path(__file__).parents[1] / "docs" / "how-to" / "session.md").read_text()
    (tmp_path / "blocks").write_text("BLOCK".join(re.findall(r"```python\n(.*?)```", guide, re.DOTALL)))
    result = run_ranks(tmp_path, "2", FRAGMENTS, within_s=200)
    ends = result.stdout.splitlines()
    assert ends[1:] == ["63 True", *["200 True"] * 3, "20 False", "200 True", "codes [0, 0]"], result.stderr
    assert re.fullmatch(r"\d{1,4} True", ends[0]), "state.stop() did not end it before step 10,000"


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


AS_USERS_WRITE_THEM = """
    import os
    import signal
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, TensorDataset
    import allranks
    from allranks.state.resumed.agree import Agreement
    from allranks.state.saved.checkpoint import Checkpointer

    life = int(os.environ["EXACT_LIFE"])


    class Odd:
        at = 0

        def state_dict(self):
            return {"x": object() if self.at == 6 and dist.get_rank() == 1 else 1}

        def load_state_dict(self, state): ...


    with allranks.session(timeout_s=200) as s:
        def tell(*words):
            if s.is_leader:
                print(*words)

        def micro(name, wrap, size):
            torch.manual_seed(0)
            whole, x = torch.nn.Linear(4, 1, bias=False), torch.arange(64.0).reshape(16, 4)
            net = torch.nn.Linear(4, 1, bias=False)
            net.load_state_dict(whole.state_dict())
            net = wrap(net)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
            sampler = s.sampler(16, global_batch_size=size, seed=1, micro_batch_size=4, shuffle=False)
            loader = DataLoader(TensorDataset(x), batch_sampler=sampler)
            state = s.track(model=net, optimizer=optimizer, sampler=sampler, checkpoint_dir=name)
            for step in state.steps(loader, epochs=1):
                with step as batches:
                    whole(x[step.number * size : step.number * size + size]).square().mean().backward()
                    for (batch,) in batches:
                        net(batch).square().mean().backward()
                    got = next(net.parameters()).grad
                    got = getattr(got, "full_tensor", got.clone)()
                    tell(name, step.number, f"{float(got.norm() / whole.weight.grad.norm()):.3f}")
                    optimizer.zero_grad()
                    whole.zero_grad()

        def gradients():
            micro("sharded", fully_shard, 8)
            micro("compiled", lambda net: torch.compile(s.ddp(net), backend="eager"), 11)

        def one_rank_skips_a_save():
            sampler, part = s.sampler(64, global_batch_size=8, seed=1), Odd()
            loader = DataLoader(TensorDataset(torch.ones(64, 4)), batch_sampler=sampler)
            state = s.track(sampler=sampler, part=part, checkpoint_dir="skips", checkpoint_every=3)
            for step in state.steps(loader, total=12):
                with step:
                    part.at += 1

        def one_writer_hangs():
            store = dist.distributed_c10d._get_default_store()
            talks = Agreement(s.membership, device="cpu")
            agree = lambda can: talks.largest(not can) == [0]
            with Checkpointer("hangs", s.membership, store=store) as checkpoints:
                checkpoints.save(1, {}, agree=agree, wait=True)
                writer = checkpoints._link._process.pid
                if s.rank == 1:
                    os.kill(writer, signal.SIGSTOP)
                checkpoints.save(2, {}, agree=agree)
                checkpoints.save(3, {}, agree=agree, patience_s=0.3 if s.rank == 1 else 60.0)
                if s.rank == 1:
                    os.kill(writer, signal.SIGCONT)
                dist.barrier()
                while not checkpoints.save(4, {}, agree=agree, patience_s=60.0).copy_s:
                    pass
                checkpoints.wait()

        def one_rank_stops():
            sampler = s.sampler(64, global_batch_size=8, seed=1)
            loader = DataLoader(TensorDataset(torch.ones(64, 4)), batch_sampler=sampler)
            state = s.track(sampler=sampler, checkpoint_dir="stops")
            for step in state.steps(loader, total=100):
                with step:
                    if s.rank == 1 and step.number == 5:
                        state.stop()
            names = sorted(os.listdir("stops"))
            tell("stopped", 5 < state.step <= 5 + 17, names == ["owner.json", f"step_{state.step}", "trace"])

        def early_stop():
            model, ema = s.ddp(torch.nn.Linear(4, 1)), torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            sampler = s.sampler(64, global_batch_size=7, seed=1)
            loader = DataLoader(TensorDataset(torch.ones(64, 4)), batch_sampler=sampler)
            state = s.track(model=model, ema=ema, optimizer=optimizer, sampler=sampler, checkpoint_dir="early")
            tell("early", state.step)
            for step in state.steps(loader, total=100):
                with step as (x,):
                    model(x).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if step.number == 9:
                    break

        if life == 0:
            gradients()
            one_rank_skips_a_save()
            one_writer_hangs()
            one_rank_stops()
        early_stop()
"""


def test_loops_as_users_write_them(tmp_path: Path):
    """Micro batches in FSDP2 and compiled DDP, a rank that cannot save, a writer that hangs, `break`; then resumed."""
    result = run_ranks(tmp_path, "2,3", AS_USERS_WRITE_THEM, within_s=400)
    assert result.stdout.splitlines() == [
        "sharded 0 1.000",
        "sharded 1 1.000",
        "compiled 0 1.000",
        "compiled 1 1.000",
        "stopped True True",
        "early 0",
        "codes [0, 0]",
        "early 10",
        "codes [0, 0, 0]",
    ], result.stderr
    failed = [line for line in result.stderr.splitlines() if "is not written" in line]
    assert len(failed) == 2, result.stderr
    assert (
        "the checkpoint of step 6 is not written: rank 1: common['parts']['part']['x'] is a builtins.obj" in failed[0]
    )
    assert "the checkpoint of step 3 is not written: rank 1: the one before is not on disk after 0.3 s" in failed[1]
    saved = {name: sorted(path.name for path in (tmp_path / name).glob("step_*")) for name in ("skips", "hangs")}
    assert saved == {"skips": ["step_12", "step_3", "step_9"], "hangs": ["step_1", "step_2", "step_4"]}


def test_random_kills_leave_no_trace_in_weights_and_samples(tmp_path: Path):
    flags = ("--ranks", "3", "--kills", "2", "--total", "60", "--lead-s", "0.4")
    result = fork_script(tmp_path, RANDOM_KILLS, *flags)
    assert result.returncode == 0, result.stdout + result.stderr
    runs = re.search(r"2 kills in (\d+) runs", result.stdout)
    assert runs is not None
    assert f"bit-identical state    {runs[1]} of {runs[1]}" in result.stdout


VALIDATE = """
    import torch
    import allranks

    with allranks.session(timeout_s=20) as s:
        layers = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Dropout(0.5))
        model = s.ddp(layers)                       # sends its buffers in each forward pass
        before = torch.get_rng_state()
        measure = lambda batch: {"sum": model(batch).sum(), "count": len(batch)}
        data = torch.arange(7.0)[:, None]
        sums = [s.validate(model, s.seeded(data), measure, batch_size=size, num_workers=size % 2) for size in (1, 2, 9)]
        assert model.training and torch.equal(torch.get_rng_state(), before)
        s.barrier()
        print([{name: round(value, 3) for name, value in each.items()} for each in sums], "\\n", end="")
"""


def test_a_validation_counts_each_sample_once_and_no_rank_waits_for_another(tmp_path: Path):
    result = run_ranks(tmp_path, "3,2", VALIDATE)
    assert result.stdout.count("codes [0, 0, 0]") == result.stdout.count("codes [0, 0]") == 1, result.stderr
    assert result.stdout.count(str([{"count": 7.0, "sum": 21.0}] * 3)) == 5


READERS = """
    import os
    import torch
    import allranks

    life = int(os.environ["EXACT_LIFE"])
    if life == 2:                               # each rank is told that it is alone on its node
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    read_bytes, pread = [], os.pread
    def counted(*told):
        read_bytes.append(len(data := pread(*told)))
        return data
    os.pread = counted
    torch.manual_seed(life)
    with allranks.session(timeout_s=20) as s:
        model = torch.nn.Linear(1000, 3000)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state = s.track(model=model, optimizer=optimizer)
        megabytes = sum(read_bytes) // 1_000_000
        if life == 0:
            model(torch.ones(1000)).sum().backward()
            optimizer.step()
            assert state.save()
        total = float(model.weight.double().sum() + optimizer.state[model.weight]["momentum_buffer"].double().sum())
        print(f"life {life} rank {s.rank} read {megabytes} MB, {total}\\n", end="")
"""


def test_on_several_nodes_one_rank_reads_the_common_state_for_all(tmp_path: Path):
    result = run_ranks(tmp_path, "2,2,2", READERS)
    assert result.stdout.count("codes [0, 0]") == 3, result.stderr
    found = re.findall(r"^life (\d) rank (\d) read (\d+) MB, (.+)$", result.stdout, re.M)
    assert len({total for *_, total in found}) == 1
    megabytes = {(life, rank): int(read) for life, rank, read, _ in found}
    assert min(megabytes["1", "0"], megabytes["1", "1"], megabytes["2", "0"]) >= 24
    assert megabytes["2", "1"] < 6


@pytest.mark.parametrize(
    ("launcher", "exit_code"),
    [
        pytest.param([sys.executable], 0, id="no launcher"),
        pytest.param(allranks_command("run", "--nproc-per-node", "2", "--master-port", "0"), 143, id="allranks run"),
        pytest.param(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], 1, id="torchrun",
            marks=pytest.mark.by_hand,
        ),
    ],
)  # fmt: skip
def test_sigterm_saves_outside_of_slurm(tmp_path: Path, launcher: list[str], exit_code: int):
    process = subprocess.Popen(
        [*launcher, SCRIPTS / "steps.py", "600"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=clean_env(os.environ) | {"ALLRANKS_CHECKPOINT_DIR": "checkpoints"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        said = ""
        while not said.rstrip().endswith("step 4"):
            said = process.stdout.readline()
            assert said, "it ended"
        process.terminate()
        said, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    (saved,) = re.findall(r"leaving at step (\d+): SIGTERM.*the checkpoint of step \1 is complete", said)
    assert process.returncode == exit_code
    assert (tmp_path / "checkpoints" / f"step_{saved}").is_dir()
