"""Do unmodified scripts go on from their own checkpoints, with the same numbers, when a rank is lost?"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from allranks.host.process import read_environment
from conftest import allranks_command, clean_env

pytestmark = pytest.mark.torch

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_S = 200.0
FAST_GUARD = "[guard]\nbeat_s = 0.2\ngone_s = 3\nstopped_s = 1.5\nstalled_s = 1.5\nslow_s = 30\nhang_s = 60\n"
STEP_LOSS = r"step (?P<at>\d+) loss (?P<loss>[\d.]+)"


@dataclass(frozen=True, kw_only=True)
class Example:
    name: str
    pattern: str
    """Of the lines that tell the loss: `at` says where, `loss` what it was."""
    strike_after: str
    """What rank 0 prints when it is time to lose rank 1: a checkpoint is there, and half of the way to go."""
    length: tuple[str, ...]


DDP = Example(name="ddp", pattern=STEP_LOSS, strike_after="step 18 ", length=("--steps", "36"))
CHAR_GPT = Example(name="char_gpt", pattern=STEP_LOSS, strike_after="step 18 ", length=("--steps", "36"))
DEEPSPEED = Example(name="deepspeed", pattern=STEP_LOSS, strike_after="step 18 ", length=("--steps", "36"))
LIGHTNING = Example(
    name="lightning",
    pattern=r"epoch (?P<at>\d+) loss (?P<loss>[\d.]+)",
    strike_after="epoch 3 ",
    length=("--epochs", "7"),
)
NEEDS_DEEPSPEED = pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: DS_BUILD_OPS=0 pip install -c constraints.txt --group frameworks",
)
FRAMEWORKS = [
    Example(name="accelerate", pattern=STEP_LOSS, strike_after="step 12 ", length=("--epochs", "4")),
    LIGHTNING,
    Example(
        name="hf_trainer",
        pattern=r"'loss': '(?P<loss>[\d.]+)'.* 'epoch': '(?P<at>[\d.]+)'",
        strike_after="'epoch': '1.385'",
        length=("--steps", "36"),
    ),
]


class Run:
    """`allranks run` of an example on two ranks, as long as the test lasts."""

    def __init__(self, example: Example, where: Path, *flags: str, step_s: float = 0.0) -> None:
        where.mkdir(exist_ok=True)
        self.where, self.example = where, example
        self.out, self.err = where / "out", where / "err"
        script = EXAMPLES / example.name / "train.py"
        command = ("run", "--nproc-per-node", "2", *flags, script, *example.length, "--step-s", str(step_s))
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                allranks_command(*command), cwd=where, env=clean_env(os.environ), stdout=out, stderr=err
            )

    def wait_until(self, text: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while text not in self.out.read_text():
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline_s, f"{text} did not come: {self.out.read_text()}"
            time.sleep(0.02)

    def strike(self, rank: int, signum: int) -> None:
        """Send a signal to one rank, from outside."""
        (worker,) = [each for each in psutil.Process(self.process.pid).children() if rank_of(each) == str(rank)]
        worker.send_signal(signum)

    def end(self) -> None:
        """Wait for it; it must end well."""
        assert self.process.wait(PATIENCE_S) == 0, self.err.read_text()

    @property
    def losses(self) -> list[tuple[str, str]]:
        """Where the training was, and its loss there, in the order of the lines."""
        return [(each["at"], each["loss"]) for each in re.finditer(self.example.pattern, self.out.read_text())]

    @property
    def weights(self) -> str:
        return re.findall(r"weights ([0-9a-f]{16})$", self.out.read_text(), re.MULTILINE)[-1]

    @property
    def findings(self) -> list[dict[str, Any]]:
        return json.loads((self.where / "runs/latest/attempt_0/verdict.json").read_text())["findings"]


def rank_of(process: psutil.Process) -> str | None:
    return read_environment(process.pid).get("RANK")


@contextmanager
def running(*runs: Run) -> Iterator[None]:
    try:
        yield
    finally:
        for run in runs:
            run.process.terminate()
            run.process.wait(60)


def lose_rank_1(example: Example, tmp_path: Path, signum: int) -> tuple[Run, Run]:
    """Run an example twice, side by side: undisturbed, and with rank 1 struck in the middle."""
    (tmp_path / "cluster.toml").write_text(FAST_GUARD)
    undisturbed = Run(example, tmp_path / "undisturbed")
    guard = ("--cluster", str(tmp_path / "cluster.toml"))
    struck = Run(example, tmp_path / "struck", *guard, "--max-restarts", "2", step_s=0.15)
    with running(undisturbed, struck):
        struck.wait_until(example.strike_after)
        struck.strike(1, signum)
        struck.end()
        undisturbed.end()
    return undisturbed, struck


def assert_it_went_on(undisturbed: Run, struck: Run) -> None:
    """Not from the start, and with the very numbers of a run that nothing happened to."""
    expected = [at for at, _ in undisturbed.losses]
    places = [expected.index(at) for at, _ in struck.losses]
    restarts = [place for before, place in pairwise(places) if place != before + 1]
    assert places[0] == 0
    assert places[-1] == len(expected) - 1
    assert all(place > 0 for place in restarts), f"it began anew: {struck.losses}"
    assert set(struck.losses) == set(undisturbed.losses)
    assert struck.weights == undisturbed.weights
    assert "restart 1 on 1 node, from what the script itself saved; 1 more restart left" in struck.err.read_text()


@pytest.mark.parametrize(
    "example",
    [
        CHAR_GPT,
        pytest.param(DEEPSPEED, marks=[pytest.mark.by_hand, NEEDS_DEEPSPEED]),
        *(pytest.param(example, marks=pytest.mark.by_hand) for example in (DDP, *FRAMEWORKS)),
    ],
    ids=lambda example: example.name,
)
def test_a_killed_rank_is_named_and_its_script_goes_on_from_its_own_checkpoint(example: Example, tmp_path: Path):
    undisturbed, struck = lose_rank_1(example, tmp_path, signal.SIGKILL)
    assert_it_went_on(undisturbed, struck)
    finding = struck.findings[0]
    assert (finding["cause"], finding["ranks"], finding["severity"]) == ("AR407 dead-rank", [1], "warn")
    assert finding["message"] == "killed by SIGKILL (signal 9), not by allranks"


@pytest.mark.parametrize(
    "example",
    [
        Example(name="accelerate", pattern=STEP_LOSS, strike_after="", length=("--epochs", "2")),
        pytest.param(
            Example(name="lightning", pattern=LIGHTNING.pattern, strike_after="", length=("--epochs", "3")),
            marks=pytest.mark.by_hand,
        ),
    ],
    ids=lambda example: example.name,
)
def test_a_framework_that_makes_ddp_itself_sends_its_gradients_compressed(example: Example, tmp_path: Path):
    plain, packed = Run(example, tmp_path / "plain"), Run(example, tmp_path / "packed", "--compress", "int8")
    with running(plain, packed):
        plain.end()
        packed.end()
    assert re.search(r" allranks: DDP with \S+ MB of gradients: sent as int8, ", packed.err.read_text())
    assert "sent as" not in plain.err.read_text()
    assert [at for at, _ in packed.losses] == [at for at, _ in plain.losses]
    assert plain.losses
    off = [
        abs(float(loss) / float(exact) - 1) for (_, loss), (_, exact) in zip(packed.losses, plain.losses, strict=True)
    ]
    assert max(off) < 0.02
    assert packed.weights != plain.weights


@pytest.mark.by_hand
def test_a_stopped_rank_of_plain_ddp_is_named_and_the_script_goes_on(tmp_path: Path):
    undisturbed, struck = lose_rank_1(DDP, tmp_path, signal.SIGSTOP)
    assert_it_went_on(undisturbed, struck)
    finding = struck.findings[0]
    assert (finding["cause"], finding["ranks"], finding["severity"]) == ("AR010 process-stopped", [1], "warn")


@pytest.mark.by_hand
def test_lightning_ends_after_its_epoch_when_it_is_warned_and_goes_on_when_it_is_started_again(tmp_path: Path):
    warned = Run(LIGHTNING, tmp_path / "job", step_s=0.15)
    with running(warned):
        warned.wait_until("epoch 1 ")
        warned.process.send_signal(signal.SIGUSR1)  # SLURM sends it to the agents
        warned.end()
    epochs = [int(at) for at, _ in warned.losses]
    assert epochs == list(range(len(epochs)))
    assert len(epochs) < 7, "it was not warned"
    assert "allranks itself has nothing to save" in warned.err.read_text()
    again = Run(LIGHTNING, tmp_path / "job")
    with running(again):
        again.end()
    assert [int(at) for at, _ in again.losses] == list(range(len(epochs), 7))
