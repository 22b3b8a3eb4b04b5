"""Are the steps of unmodified scripts counted exactly, and is their time where it was lost?

All scripts of a rank are run by forks of one process that has torch imported, as a standby's are.
"""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness import Started, standing_by, workers

from allranks.guard.node.worker import WatchedWorker
from allranks.model.pace import PACE_STATES
from conftest import allranks_command, clean_env

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def standby(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with standing_by(tmp_path_factory.mktemp("standby") / "train.py"):
        yield


EXAMPLES = Path(__file__).parents[3] / "examples"
HEAD = """
import contextlib, json
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp  # once, for all scripts of the rank
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
Linear, SGD = torch.nn.Linear, torch.optim.SGD
truth = {}

@contextlib.contextmanager
def timed(name):
    began = time.perf_counter()
    yield
    truth[name] = truth.get(name, 0) + time.perf_counter() - began

class Slow:  # a data set
    def __init__(self, length, seconds, first):
        self.length, self.seconds, self.first = length, seconds, first
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        if index >= self.length:
            raise IndexError
        with timed(self.first if index < 2 else "data"):
            time.sleep(self.seconds)
        return torch.ones(8)

def run(name, text):
    "Run a script in a fork, and write what its book says."
    if os.fork():
        assert os.wait()[1] == 0, name
        return
    marks = sys.modules["_allranks_inside.thread_marks"]
    before = marks.Cell.inherited().pace[2]
    if "init_process_group" not in text:
        dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store_{name}",
                                rank=RANK, world_size=int(os.environ["WORLD_SIZE"]))
    sys.argv = [name]
    space = globals() | {"__name__": "__main__"}
    exec(compile(text, name, "exec"), space)
    marks.book.end()
    words = list(marks.book._words)
    ns = [words[3], words[4] - words[10], words[5], words[6] - words[11], words[10] + words[11], *words[8:10]]
    told = {"name": name, "steps": words[2] - before, "made": space["made"], "s": [each / 1e9 for each in ns],
            "truth": truth, "missing": marks.book.missing, "back": words[12] - 1, "left_s": words[14] / 1e9}
    print(json.dumps(told), flush=True)
    dist.destroy_process_group()
    sys.exit()
"""
SCRIPTS = {
    "plain DDP": """
        model, made = DDP(Linear(8, 8)), 0
        optimizer = SGD(model.parameters(), lr=0.1)
        for epoch in range(3):
            for batch in DataLoader(torch.ones(8, 8), batch_size=2):
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                made += 1
        """,
    "accumulation": """
        model, made = DDP(Linear(8, 8)), 0
        optimizer = torch.optim.AdamW(model.parameters())
        for number, batch in enumerate(DataLoader(torch.ones(40, 8), batch_size=2)):
            with contextlib.nullcontext() if number % 4 == 3 else model.no_sync():
                (model(batch).sum() / 4).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
                made += 1
        """,
    "evaluation and saves": """
        model, made = DDP(Linear(8, 8)), 0
        optimizer = SGD(model.parameters(), lr=0.1)
        class Stuck:
            def __reduce__(self):
                with timed("save"):
                    time.sleep(0.3)
                return int, ()
        held_out = DataLoader(torch.ones(40, 8), batch_size=2)
        for epoch in range(2):
            # The first batch is fetched in `start`; the batch after an evaluation counts as its last one.
            for batch in DataLoader(Slow(20, 0.01, "eval" if epoch else "start"), batch_size=2):
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                made += 1
            if RANK == 0:
                torch.save({"model": model.state_dict(), "more": Stuck()}, "checkpoint.pt")
            with timed("eval"), torch.no_grad():
                for batch in held_out:
                    model.module(batch)
                    time.sleep(0.02)
        """,
    "two optimizers": """
        model, made = DDP(torch.nn.Sequential(Linear(8, 8), Linear(8, 1))), 0
        both = SGD(model.module[0].parameters(), lr=0.1), torch.optim.Adam(model.module[1].parameters())
        for batch in DataLoader(torch.ones(20, 8), batch_size=2):
            model(batch).sum().backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
            made += 1
        """,
    "pipeline": """
        stage, made = Linear(8, 8), 0
        optimizer = SGD(stage.parameters(), lr=0.1)
        for batch in torch.ones(10, 2, 8):
            if RANK == 0:
                out, gradient = stage(batch), torch.empty(2, 8)
                with timed("blocked" if made else "start"):
                    dist.send(out.detach(), 1)
                    dist.recv(gradient, 1)
                out.backward(gradient)
            else:
                received = torch.empty(2, 8, requires_grad=True)
                dist.recv(received.detach(), 0)
                time.sleep(0.02)
                stage(received).sum().backward()
                dist.send(received.grad, 0)
            optimizer.step()
            optimizer.zero_grad()
            made += 1
        """,
    "FSDP2": """
        from torch.distributed.checkpoint import save
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        model, made = torch.nn.Sequential(Linear(8, 8), Linear(8, 8)), 0
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in torch.ones(10, 2, 8):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            made += 1
        with timed("save"):
            save({"model": model.state_dict()}, checkpoint_id="sharded")
        """,
    "GAN": """
        real, fake, made = DDP(Linear(8, 1)), DDP(Linear(8, 8)), 0
        of_real, of_fake = SGD(real.parameters(), lr=0.1), SGD(fake.parameters(), lr=0.1)
        for batch in DataLoader(torch.ones(20, 8), batch_size=2):
            (real(batch) - real(fake(batch).detach())).sum().backward()
            of_real.step()
            of_real.zero_grad()
            real(fake(batch)).sum().backward()
            of_fake.step()
            of_fake.zero_grad()
            made += 1
        """,
    "local SGD": """
        import allranks
        model, made = Linear(8, 8), 0
        optimizer = SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(torch.ones(40, 8), batch_size=2):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            made += 1
            if made == 10:
                with timed("save"), allranks.saving():
                    time.sleep(0.1)
            if made % 5 == 0:
                for work in [dist.all_reduce(each.data, async_op=True) for each in model.parameters()]:
                    work.wait()
        """,
}
FRAMEWORKS = {
    "lightning": ("pytorch_lightning", ("--epochs", "2"), 16),
    "accelerate": ("accelerate", ("--epochs", "1"), 8),
    "hf_trainer": ("transformers", ("--steps", "8"), 8),
}


def told_by(ranks: list[Started]) -> list[dict[str, dict[str, Any]]]:
    """Wait for them; return by name of the script what each of them has booked."""
    found = []
    for rank in ranks:
        assert rank.process.wait(240) == 0, rank.out.read_text()
        lines = [line for line in rank.out.read_text().splitlines() if line.startswith('{"name"')]
        found.append({told["name"]: told for told in map(json.loads, lines)})
    return found


def close(seen: float, truth: float) -> bool:
    return abs(seen - truth) <= max(0.05, 0.05 * truth)


def test_steps_are_exact_and_losses_are_booked_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = [f"run({name!r}, {textwrap.dedent(script)!r})" for name, script in SCRIPTS.items()]
    with workers(tmp_path, HEAD + "\n".join(calls)) as ranks:
        views = [WatchedWorker(rank=rank, pid=each.pid, cell=each.cell) for rank, each in enumerate(ranks)]
        began_s = time.monotonic()
        told = told_by(ranks)
        paces = [view.look().pace for view in views]
    for pace, own in zip(paces, told, strict=True):
        assert own.keys() == SCRIPTS.keys()
        for script in own.values():
            assert (script["steps"], script["missing"]) == (script["made"], []), script["name"]
        assert pace is not None
        assert pace.steps == sum(script["made"] for script in own.values())
        until_s = max(script["left_s"] for script in own.values())  # what its interpreter does then is not booked
        assert pace.total_us / 1e6 == pytest.approx(until_s - began_s, rel=0.001, abs=0.02)
    names = [str(state) for state in PACE_STATES]
    before = [0.0] * len(names)
    spent: dict[str, dict[str, float]] = {}
    for name, script in told[0].items():
        spent[name] = dict(zip(names, (now - then for now, then in zip(script["s"], before, strict=True)), strict=True))
        before = script["s"]
    losses, truth = spent["evaluation and saves"], told[0]["evaluation and saves"]["truth"]
    assert close(losses["data"], truth["data"])
    assert close(losses["save"], truth["save"])
    assert close(losses["eval"], truth["eval"])
    assert close(spent["pipeline"]["blocked"], told[0]["pipeline"]["truth"]["blocked"])
    assert spent["pipeline"]["blocked"] > 9 * 0.02  # of the second stage
    assert close(spent["local SGD"]["save"], told[0]["local SGD"]["truth"]["save"])
    assert spent["FSDP2"]["save"] >= 0.9 * told[0]["FSDP2"]["truth"]["save"]
    assert 0 <= told[0]["plain DDP"]["back"] <= 1000 or told[0]["plain DDP"]["back"] == -1


def test_the_share_of_a_backward_pass_that_waits_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = """
        from torch.nn.parallel import DistributedDataParallel
        class Slow(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                return x * weight
            @staticmethod
            def backward(ctx, grad):
                began = time.perf_counter()
                time.sleep(0.05)
                computed.append(time.perf_counter() - began)  # longer on a busy machine
                return None, grad
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(8))
            def forward(self, x):
                return Slow.apply(x, self.weight)
        dist.init_process_group("gloo")
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        spent, computed = [], []
        for step in range(24):
            time.sleep(0.15 * RANK)
            loss = model(torch.ones(8)).sum()
            began = time.perf_counter()
            loss.backward()
            spent.append(time.perf_counter() - began)
            optimizer.step()
        print(1000 * (1 - sum(computed[8:]) / sum(spent[8:])), flush=True)
        dist.destroy_process_group()
        """
    with workers(tmp_path, text) as ranks:
        for rank in ranks:
            assert rank.process.wait(240) == 0, rank.out.read_text()
        paces = [WatchedWorker(rank=0, pid=rank.pid, cell=rank.cell).look().pace for rank in ranks]
    shares = [pace.back_blocked_permille for pace in paces if pace is not None]
    truth = [float(rank.out.read_text().splitlines()[-1]) for rank in ranks]
    assert shares == pytest.approx(truth, abs=50)
    assert shares[0] > 600 > 200 > shares[1]  # the late one does not wait


@pytest.mark.parametrize(
    ("name", "flags", "steps"),
    [
        pytest.param(
            name,
            flags,
            steps,
            marks=[
                pytest.mark.skipif(not find_spec(module), reason=f"{module} is not installed"),
                *([] if name == "accelerate" else [pytest.mark.by_hand]),
            ],
        )
        for name, (module, flags, steps) in FRAMEWORKS.items()
    ],
    ids=FRAMEWORKS,
)
def test_steps_of_frameworks_are_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, flags: tuple[str, ...], steps: int
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"""
        import runpy
        sys.argv = ["train.py", *{flags}]
        runpy.run_path({str(EXAMPLES / name / "train.py")!r}, run_name="__main__")
        """
    with workers(tmp_path, text, LOCAL_WORLD_SIZE="2", HF_HUB_OFFLINE="1") as ranks:
        for rank in ranks:
            assert rank.process.wait(240) == 0, rank.out.read_text()
        paces = [WatchedWorker(rank=0, pid=rank.pid, cell=rank.cell).look().pace for rank in ranks]
    assert [pace and pace.steps for pace in paces] == [steps, steps]
    assert all(pace and pace.totals_us[PACE_STATES.index("data")] for pace in paces)  # type: ignore[arg-type]
    saved = [pace and pace.totals_us[PACE_STATES.index("save")] for pace in paces]  # type: ignore[arg-type]
    assert max(saved) > 0


SESSION = """
import json, sys
import torch, allranks
with allranks.session() as s:
    model = s.ddp(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = s.track(model=model, optimizer=optimizer, checkpoint_every=4)
    for step in state.steps([torch.ones(2, 4)] * 10, total=10):
        with step as batch:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
marks = sys.modules["_allranks_inside.thread_marks"]
with open(f"{s.rank}.json", "w") as file:
    json.dump(list(marks.book._words), file)
"""


@pytest.mark.parametrize("flags", [(), ("--no-standby",)], ids=["standby", "no standby"])
def test_a_session_has_exact_steps_and_its_saves_booked(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(SESSION)
    command = allranks_command("run", "--nproc-per-node", "2", *flags, "train.py")
    ended = subprocess.run(
        command, cwd=tmp_path, env=clean_env(os.environ), capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        words = json.loads((tmp_path / f"{rank}.json").read_text())
        assert words[2] == 10
        assert words[8] > 1_000_000  # the copies of two checkpoints, and the wait for the last one
