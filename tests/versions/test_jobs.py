"""Real jobs over Gloo, for whatever torch and Python runs them: what works, and is what does not said in advance?

`make versions` runs this file once for each version; here it runs with `make test-by-hand`. Each test notes what it saw
of a feature of launch/worker_environment.py (`describe_torch`), and holds it against what that says of this torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from allranks.launch.worker_environment import describe_torch  # noqa: E402
from conftest import HANG_S, Allranks, allranks_command, clean_env, wait_until, write  # noqa: E402
from versions.table import FEATURES  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.by_hand]

Note = Callable[[str, object], None]
SCRIPTS = Path(__file__).parents[1] / "scripts"
LACKS = {lack.name for lack in describe_torch(torch.__version__)[1:]}
FLAGS = ("--ignore", "AR011", "--cluster", "cluster.toml")


@pytest.fixture(autouse=True)
def quick_guard(tmp_path: Path) -> None:
    write(tmp_path / "cluster.toml", "[guard]\nstopped_s = 2\nslow_s = 2\nhang_s = 6\n")


@pytest.fixture
def note(record_property: Note) -> Note:
    """Write down what became of a feature, also where the test then fails."""

    def write_down(name: str, value: object) -> None:
        assert name in FEATURES
        record_property(name, str(value))  # what xdist can send

    return write_down


def culprits(tmp_path: Path) -> list[tuple[str, list[int]]]:
    """Cause and ranks of each finding: `("AR407", [1])`."""
    verdict: dict[str, Any] = json.loads((tmp_path / "runs/latest/attempt_0/verdict.json").read_text())
    return [(each["cause_id"], list(each.get("ranks") or [])) for each in verdict["findings"]]


BRING_UP = """
import json, os, re, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def listeners(port):
    text = "".join(open(f"/proc/net/{name}").read() for name in ("tcp", "tcp6"))
    rows = [line.split() for line in text.splitlines() if ":" in line]
    return [row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port]

dist.init_process_group("gloo")
total = torch.ones(3)
for _ in range(5):
    dist.all_reduce(total)
before = dist.group.WORLD._get_sequence_number_for_group()
dist.all_reduce(total)
after = dist.group.WORLD._get_sequence_number_for_group()
inside = sys.modules["_allranks_inside.entry"]
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(torch.ones(12, 4), batch_size=2):
    model(batch).sum().backward()
    optimizer.step()
torch.save(model.state_dict(), os.devnull)
dist.barrier()
flight = inside._teller.flight
kept = sys.modules["_allranks_hook"]._group._kept[1]
told = {
    "total": total[0].item(),
    "numbers": [before, after],
    "states": flight.states(),
    "ops": sorted({call["op"] for call in flight.last_calls()}),
    "blind": flight.blind,
    "book": list(inside.book._words),
    "wrapped": dist.distributed_c10d._allranks_watches,
}
if os.environ["RANK"] == "0":
    held = os.readlink(f"/proc/self/fd/{os.environ['ALLRANKS_STORE_FD']}")
    told |= {"socket": re.findall(r"\\d+", held), "listeners": listeners(int(os.environ["MASTER_PORT"]))}
    told |= {"libuv": kept.libuvBackend}
with open(f"{os.environ['RANK']}.json", "w") as file:
    json.dump(told, file)
dist.destroy_process_group()
"""


def test_bring_up(allranks: Allranks, tmp_path: Path, note: Note):
    write(tmp_path / "train.py", BRING_UP)
    ended = allranks("run", *FLAGS, "--nproc-per-node", "2", "train.py")
    assert ended.returncode == 0, ended.stderr[-3000:]
    told, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    note("hook", "yes" if told["wrapped"] and "all 2 ranks are up (gloo), " in ended.stderr else "no")
    is_kept = told["socket"] == told["listeners"]
    note("kept port", ("yes" if told["libuv"] else "yes, without libuv") if is_kept else "no")
    before, after = told["numbers"]
    note("sequence numbers", "yes" if after == before + 1 else f"no: {before}, then {after}")
    has_recorder = "0" in told["states"] and "all_reduce" in told["ops"]
    note("flight recorder", "yes" if has_recorder else "none for gloo" if told["blind"] else "no")
    steps, totals = told["book"][2], told["book"][3:10]
    has_times = steps == other["book"][2] == 6 and all(totals[:4]) and all(totals[5:])  # an evaluation has none
    note("times of steps", "yes" if has_times else f"no: {steps} steps, {totals}, {told['blind']}")
    assert has_times
    assert told["total"] == other["total"] == 2**6
    assert "all 2 ranks are up (gloo), " in ended.stderr
    assert is_kept
    assert told["libuv"] == ("kept port" not in LACKS)
    assert after == before + 1
    assert has_recorder == ("flight recorder" not in LACKS)
    assert ("allranks: the guard sees less: torch " in ended.stderr) == (not has_recorder)
    assert "was not tested with allranks" not in ended.stderr


def test_a_wire_format(allranks: Allranks, tmp_path: Path, note: Note):
    write(
        tmp_path / "train.py",
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 4))
        for _ in range(3):
            model(torch.ones(2, 300)).sum().backward()
        dist.barrier()
        """,
    )
    ended = allranks("run", *FLAGS, "--nproc-per-node", "2", "--compress", "int8", "train.py")
    note("wire formats", "yes" if "gradients: sent as int8" in ended.stderr and not ended.returncode else "no")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "allranks: DDP with 0.00482 MB of gradients: sent as int8, buckets of 25 MiB" in ended.stderr


def test_what_it_lacks_is_said_in_advance(allranks: Allranks):
    said = allranks("env", "--explain").stdout
    (line,) = [line for line in said.splitlines() if line.startswith("torch ")]
    assert line.split()[1].partition("+")[0] == torch.__version__.partition("+")[0]
    assert "; with this one the guard may see less" not in line
    told = [name for name in FEATURES if any(line.startswith(f"{name}  ") for line in said.splitlines())]
    assert told == [name for name in FEATURES if name in LACKS]


def test_a_missing_rank(allranks: Allranks, tmp_path: Path, note: Note):
    write(
        tmp_path / "train.py",
        """
        import datetime, os, pathlib, time
        if os.environ["RANK"] == "1":
            time.sleep(90)
        import torch.distributed as dist
        pathlib.Path(f"rank {os.environ['RANK']} has torch").touch()  # whoever waits does so for rank 1 alone
        while len([*pathlib.Path().glob("rank * has torch")]) < 2:
            time.sleep(0.01)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
        """,
    )
    ended = allranks("run", *FLAGS, "--nproc-per-node", "3", "train.py")
    is_named = "; 2 of 3 ranks have joined" in ended.stderr and culprits(tmp_path) == [("AR401", [1])]
    note("named missing ranks", "yes" if is_named else "no")
    assert culprits(tmp_path) == [("AR401", [1])], ended.stderr[-3000:]
    assert "allranks: still waiting in init_process_group after 3 s for rank 1 " in ended.stderr


STRUCK = """
import os, signal, sys, time
had_torch = "torch._C" in sys.modules
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("life", life, "rank", rank, "standby", had_torch, flush=True)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
began_s = time.monotonic()
for step in range(10_000):
    model(torch.ones(2, 8)).sum().backward()
    done = torch.tensor([float(time.monotonic() - began_s > (6 if life == 0 else 1))])
    dist.broadcast(done, 0)
    if done.item() and life == 0:
        STRIKE
    elif done.item():
        break
    time.sleep(0.01)
dist.destroy_process_group()
"""


def struck(tmp_path: Path, strike: str) -> Path:
    return write(tmp_path / "train.py", STRUCK.replace("STRIKE", strike))


def test_killed(allranks: Allranks, tmp_path: Path, note: Note):
    struck(tmp_path, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    ended = allranks("run", *FLAGS, "--nproc-per-node", "2", "--max-restarts", "1", "train.py")
    came = [f"life 1 rank {rank} standby True" in ended.stdout for rank in range(2)]
    note("standbys", "yes" if all(came) else "no")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "AR407 dead-rank" in ended.stderr
    assert "rank 1" in next(line for line in ended.stderr.splitlines() if "AR407 dead-rank" in line)
    assert all(came), ended.stdout


def test_stopped(allranks: Allranks, tmp_path: Path):
    struck(tmp_path, "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)")
    ended = allranks("run", *FLAGS, "--nproc-per-node", "2", "train.py")
    assert culprits(tmp_path) == [("AR010", [1])], ended.stderr[-3000:]


def test_mismatch(allranks: Allranks, tmp_path: Path):
    struck(tmp_path, "dist.all_reduce(torch.ones(7)) if rank != 1 else dist.broadcast(torch.ones(7), 0)")
    ended = allranks("run", *FLAGS, "--nproc-per-node", "3", "train.py")
    assert culprits(tmp_path) == [("AR410", [1])], ended.stderr[-3000:]


def test_hang_before_a_collective(allranks: Allranks, tmp_path: Path):
    struck(tmp_path, "dist.all_reduce(torch.ones(7)) if rank != 1 else time.sleep(1000)")
    ended = allranks("run", *FLAGS, "--nproc-per-node", "2", "train.py")
    assert culprits(tmp_path) == [("AR408", [1])], ended.stderr[-3000:]


def test_resume(tmp_path: Path, note: Note):
    """Killed and resumed at three ranks, with the bits of a run that was not killed."""
    from allranks.state.resumed.buckets import CAN_PIN

    write(tmp_path / "cluster.toml", "[guard]\nstopped_s = 5\n")
    script = [SCRIPTS / "exact_train.py", "--total", "40", "--every", "5", "--noise"]
    command = ["run", *FLAGS, "--nproc-per-node", "3", *script]

    def start(out: str, *more: str) -> subprocess.Popen[str]:
        with (tmp_path / f"{out}.log").open("w") as log:
            arguments = allranks_command(*command, out, *more)
            own = clean_env(os.environ, ALLRANKS_CHECKPOINT_DIR=str(tmp_path / f"{out}-saved"), OMP_NUM_THREADS="1")
            return subprocess.Popen(arguments, cwd=tmp_path, env=own, stdout=log, stderr=log, text=True)

    def log_of(out: str) -> str:
        return (tmp_path / f"{out}.log").read_text()[-3000:]

    whole = start("whole")
    assert whole.wait(HANG_S) == 0, log_of("whole")
    command[len(FLAGS) + 1 : len(FLAGS) + 1] = ["--max-restarts", "1", "--no-standby"]
    cut = start("cut", "--pause-s", "0.1")
    steps = tmp_path / "cut/0/2.steps"
    wait_until(lambda: cut.poll() is not None or (steps.exists() and len(steps.read_text().splitlines()) > 12), "steps")
    os.kill(int((tmp_path / "cut/0/2.pid").read_text()), signal.SIGKILL)
    assert cut.wait(HANG_S) == 0, log_of("cut")
    assert "resumed at step " in (tmp_path / "cut.log").read_text()
    models = [torch.load(tmp_path / out / "final.pt", weights_only=True)["model"] for out in ("whole", "cut")]
    is_same = all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    note("pinned buckets", ("yes" if CAN_PIN else "no: DDP with find_unused_parameters") if is_same else "other bits")
    assert is_same
    assert ("pinned buckets" not in LACKS) == CAN_PIN


CHECKPOINT = """
import sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import allranks
try:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
except ImportError:
    from torch.distributed._tensor import DTensor, Shard, distribute_tensor

with allranks.session() as s:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (s.world_size,))
    model = torch.nn.Linear(5, 7, bias=False)
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = s.sampler(60, global_batch_size=12)
    loader = torch.utils.data.DataLoader(torch.arange(60.0), batch_sampler=sampler)
    state = s.track(model=model, optimizer=optimizer, sampler=sampler, checkpoint_dir="saved", checkpoint_every=100)
    begun = state.step
    for step in state.steps(loader, total=int(sys.argv[1])):
        with step as batch:
            model.weight.grad = model.weight.detach() * 0.5
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(model.weight, DTensor)
    whole = model.weight.full_tensor().detach()
    if s.is_leader:
        torch.save({"begun": begun, "weight": whole, "path": str(state.checkpoints.directory)}, "ended.pt")
"""


def test_checkpoint(allranks: Allranks, tmp_path: Path, note: Note):
    """A sharded tensor and its momentum: saved by two ranks, resumed by one, as if nothing had happened."""
    write(tmp_path / "train.py", CHECKPOINT)

    def run(ranks: int, steps: int) -> dict[str, Any]:
        ended = allranks("run", *FLAGS, "--nproc-per-node", str(ranks), "train.py", str(steps))
        assert ended.returncode == 0, ended.stderr[-3000:]
        told: dict[str, Any] = torch.load(tmp_path / "ended.pt", weights_only=True)
        return told

    assert run(2, 4)["begun"] == 0
    cut = run(1, 8)
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 7, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(8):
        model.weight.grad = model.weight.detach() * 0.5
        optimizer.step()
    is_same = cut["begun"] == 4 and torch.equal(cut["weight"], model.weight.detach())
    note("checkpoints", "yes" if is_same else "no")
    assert is_same
