"""`allranks diff --replay`: what it asks and refuses, and which planted difference it names in real runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from allranks.cli import diff
from allranks.cli.diff import describe_outcome
from allranks.cli.main import cli
from allranks.launch.rerun import RerunOutcome, command_of, find_refusal, find_start, read_machine, restore_words
from allranks.model.errors import UsageError
from allranks.state.truth.parting import Differing, Parting
from allranks.state.truth.trace_file import FOLDER, TraceRow, file_name, to_bytes
from conftest import allranks_command, clean_env

SCRIPT = Path(__file__).parents[1] / "scripts/planted.py"
STEPS = "6"
HERE = {"torch": "2.13", "python": "3.11", "hardware": "x86_64 AVX2", "gpus": ["H200", "H200"]}


def about(tmp_path: Path, **told: Any) -> dict[str, Any]:
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    text = hashlib.blake2b(script.read_bytes(), digest_size=16).hexdigest()
    own = {"torch": "2.13", "python": "3.11", "hardware": "x86_64 AVX2", "world_size": 2, "directory": str(tmp_path)}
    return own | {"script": str(script), "text": text, "module": "", "environment": {}, "threads": 1} | told


def refusal(tmp_path: Path, **told: Any) -> str | None:
    row = TraceRow(0, {}, about(tmp_path, **told))
    return find_refusal({0: [row], 1: [row]}, 0, HERE)


def test_another_torch_hardware_or_script_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) is None
    assert refusal(tmp_path, hardware="H200") is None
    assert refusal(tmp_path, torch="2.12") == "it had torch 2.12, here is 2.13"
    assert refusal(tmp_path, python="3.12") == "it had python 3.12, here is 3.11"
    assert refusal(tmp_path, hardware="A100") == "it ran on 2 x A100, here is 2 x H200"
    three = [TraceRow(0, {}, about(tmp_path, hardware="H200", world_size=3))]
    assert find_refusal(dict.fromkeys(range(3), three), 0, HERE) == "it ran on 3 x H200, here is 2 x H200"
    here = HERE | {"hardware": "H200"}
    assert find_refusal(dict.fromkeys(range(3), three), 0, here) == "it ran on 3 x H200, here is 2 x H200"
    assert refusal(tmp_path, script="/gone/train.py") == "its script /gone/train.py is not there"
    assert refusal(tmp_path, text="5eed") == f"its script {tmp_path}/train.py was edited since"
    later = "its record is of a later track() in its script; only the first one can be run again"
    assert refusal(tmp_path, call=1) == later
    assert refusal(tmp_path, directory="/gone") == "its working directory /gone is not there"


def test_of_a_resumed_run_the_process_counts_in_which_the_runs_parted(tmp_path: Path) -> None:
    rows = [TraceRow(4, {}, about(tmp_path)), TraceRow(8, {}, about(tmp_path, torch="2.12"))]
    assert find_refusal({0: rows, 1: rows}, 4, HERE) is None
    assert find_refusal({0: rows, 1: rows}, 8, HERE) == "it had torch 2.12, here is 2.13"
    moved = [rows[0], TraceRow(8, {}, about(tmp_path, hardware="A100"))]
    assert find_refusal({0: moved, 1: moved}, 4, HERE) is None


def test_hidden_arguments_are_taken_from_the_environment_or_asked_for() -> None:
    arguments = "--hf-token '(hidden)' --url 'https://me:(hidden)@hub'"
    env = {"ALLRANKS_HIDDEN_B1": "hf_1", "ALLRANKS_HIDDEN_B2": "pw"}
    assert restore_words("B", arguments, env) == ["--hf-token", "hf_1", "--url", "https://me:pw@hub"]
    with pytest.raises(UsageError, match=r"--url https://me:.hidden.@hub: set ALLRANKS_HIDDEN_B2 to its value"):
        restore_words("B", arguments, {"ALLRANKS_HIDDEN_B1": "hf_1"})
    with pytest.raises(UsageError, match=r"--hf-token .hidden.: set ALLRANKS_HIDDEN_A1 to its value"):
        restore_words("A", arguments, {})
    asked = list[str]()

    def answer(what: str) -> str:
        asked.append(what)
        return "pw"

    words = restore_words("B", arguments, {"ALLRANKS_HIDDEN_B1": "hf_1"}, answer)
    assert words == ["--hf-token", "hf_1", "--url", "https://me:pw@hub"]
    assert restore_words("B", "--keys '(hidden)' '(hidden)'", {}, answer) == ["--keys", "pw", "pw"]
    of_keys = ["--keys (hidden) of run B", "(hidden) (hidden) of run B"]
    assert asked == ["--url https://me:(hidden)@hub of run B", *of_keys]


def test_what_is_typed_on_a_terminal_is_not_shown() -> None:
    @click.command
    def command() -> None:
        words.append(diff._ask("--hf-token (hidden) of run A"))

    words = list[str]()
    told = CliRunner().invoke(command, input="hf_1\n")
    assert (words, told.output.strip()) == (["hf_1"], "--hf-token (hidden) of run A:")


def test_runs_of_another_number_of_ranks_are_not_run_again(tmp_path: Path) -> None:
    for name, size in (("a", 2), ("b", 3)):
        (tmp_path / name / FOLDER).mkdir(parents=True)
        rows = [TraceRow(0, {"part/model": size}, about(tmp_path, world_size=size))]
        (tmp_path / name / FOLDER / file_name(0)).write_bytes(to_bytes(rows))
    found = CliRunner().invoke(
        cli, ["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--replay", "--yes"], standalone_mode=False
    )
    assert str(found.exception) == "diff --replay: runs of 2 and 3 ranks do other operations"


def test_it_begins_at_the_newest_checkpoint_that_both_runs_have_before_the_interval(tmp_path: Path) -> None:
    for place, steps in (("a", (2, 4, 8)), ("b", (2, 4, 6, 8))):
        for step in steps:
            (tmp_path / place / f"step_{step}").mkdir(parents=True)
    places = tmp_path / "a", tmp_path / "b"
    assert [path.name for path in find_start(places, 7)] == ["step_4", "step_4"]
    assert find_start(places, 1) == find_start(places, None) == []


def test_the_command_is_that_of_the_record(tmp_path: Path) -> None:
    told = about(tmp_path, module="pkg.train", environment={"ALLRANKS_BACKEND_CHOSEN": "gloo"})
    command = command_of(told, ["--lr", "1"], log_dir=tmp_path)
    assert command[-5:] == ["--backend=gloo", "-m", "pkg.train", "--lr", "1"]
    command = command_of(about(tmp_path), [], log_dir=tmp_path)
    assert (command[-1], "--nproc-per-node=2" in command) == (f"{tmp_path}/train.py", True)


def test_a_run_that_does_not_repeat_itself_is_named() -> None:
    parting = Parting(num_steps=2, until=4, differing=(Differing("part/model", (0,)),))
    outcome = RerunOutcome(parting=Parting(num_steps=2), unrepeated={"B": parting})
    assert describe_outcome(outcome, 3) == [
        "run B does not repeat its own record at step 4: it is not deterministic, or has compiled "
        "code, which ran eager: part model",
        "no difference between the replays; 2 steps compared",
    ]


def test_without_a_terminal_and_without_yes_nothing_is_run(tmp_path: Path) -> None:
    for name, number in (("a", 1), ("b", 2)):
        (tmp_path / name / FOLDER).mkdir(parents=True)
        rows = [TraceRow(0, {"part/model": number}, about(tmp_path))]
        (tmp_path / name / FOLDER / file_name(0)).write_bytes(to_bytes(rows))
    arguments = ["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--replay"]
    found = CliRunner().invoke(cli, arguments, standalone_mode=False).exception
    assert isinstance(found, UsageError)
    assert found.exit_code == 2
    assert "to allow it, add --yes" in str(found)


# Real runs


class Runs:
    """Runs of the script with planted differences, each made once."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.folder, self.num_ranks = folder, num_ranks
        self.scratch = folder / "tmp"
        self.scratch.mkdir()

    def get(self, plant: str) -> Path:
        place = self.folder / f"checkpoints{plant}"
        if not place.exists():
            flags = [f"--nproc-per-node={self.num_ranks}", f"--checkpoint-dir={place}", "--checkpoint-every=2"]
            self.call("run", *flags, str(SCRIPT), STEPS, *([plant] if plant else []))
        return place

    def call(self, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(allranks_command(*arguments), **self.told, capture_output=True, timeout=240, check=False)
        assert done.returncode in codes, done.stderr
        return str(done.stdout)

    @property
    def told(self) -> dict[str, Any]:
        return {"cwd": self.folder, "env": clean_env(os.environ, TMPDIR=str(self.scratch)), "text": True}

    def replay(self, plant: str) -> list[str]:
        output = self.call("diff", str(self.get("")), str(self.get(plant)), "--replay", "--yes", codes=(1,))
        assert [*self.scratch.glob("allranks-*")] == []
        return [line for line in output.splitlines() if "first difference" in line or "does not repeat" in line]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of two ranks."""
    return Runs(tmp_path_factory.mktemp("replayed"), 2)


@pytest.fixture(scope="module")
def runs_of_three(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A sum over two ranks has the same bits in any order."""
    return Runs(tmp_path_factory.mktemp("replayed"), 3)


@pytest.mark.torch
def test_two_sessions_of_one_script_are_equal(runs: Runs) -> None:
    """The two replays, and the session that made the record, which stands in both places."""
    copy = shutil.copytree(runs.get(""), runs.folder / "copy")
    told = runs.call("diff", str(runs.get("")), str(copy), "--replay", "--yes")
    assert told == "no difference up to step 6; 5 recorded steps compared\n"


@pytest.mark.torch
def test_a_replay_that_ends_before_its_steps_is_an_error(runs: Runs, tmp_path: Path) -> None:
    """The script does nothing, as one does that finds its training done."""
    told = about(tmp_path, **read_machine(), arguments="", world_size=1)
    for name, number in (("a", 1), ("b", 2)):
        (tmp_path / name / FOLDER).mkdir(parents=True)
        rows = [TraceRow(4 * step, {"part/model": step * number}, told) for step in (0, 1)]
        (tmp_path / name / FOLDER / file_name(0)).write_bytes(to_bytes(rows))
    command = allranks_command("diff", str(tmp_path / "a"), str(tmp_path / "b"), "--replay", "--yes")
    done = subprocess.run(command, **runs.told, capture_output=True, timeout=120, check=False)
    assert done.returncode == 78, done.stdout
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert error.endswith("ended with exit code 0 before step 4; the last lines of its output are below")
    assert "allranks: train.py succeeded: 1 rank" in done.stderr.partition(error)[2]


@pytest.mark.by_hand
def test_a_loop_that_both_runs_left_by_break_has_its_last_step(runs: Runs) -> None:
    places = [str(runs.get(plant)) for plant in ("break", "break-draw")]
    said = runs.call("diff", *places, "--replay", "--yes", codes=(1,))
    assert "first difference in step 3: aten.rand.default (rank 1, planted.py:" in said


@pytest.mark.torch
def test_an_extra_draw_is_named(runs: Runs) -> None:
    (said,) = runs.replay("draw")
    assert said.startswith("first difference in step 3: aten.rand.default (rank 1, planted.py:")


@pytest.mark.torch
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_both_runs_and_leaves_nothing(runs: Runs, presses: int) -> None:
    command = allranks_command("diff", str(runs.get("")), str(runs.get("draw")), "--replay", "--yes")
    process = subprocess.Popen(command, **runs.told, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline_s = time.monotonic() + 60
    while not [*runs.scratch.glob("*/*/*/runs/*/attempt_0")] and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert [*runs.scratch.glob("allranks-*")] == []
    while left := [pid for pid in living() if f"{runs.scratch}/allranks-diff-" in environment(pid)]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


@pytest.mark.by_hand
@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (
            "seed",
            "first difference before step 0: aten.uniform_.default (all ranks, planted.py:24 in __init__): "
            "its random numbers come from a generator that stood elsewhere",
        ),
        ("order", "first difference in step 0: the data differ: the batch of all ranks"),
        (
            "dtype",
            "aten.addmm.default (all ranks, planted.py:30 in forward, in model.inner.0): inputs of another dtype or "
            "shape",
        ),
        ("scatter", "planted.py:33 in forward, in model): another input, which no recorded operation has made"),
        ("buckets", "c10d.allreduce_.default (all ranks, planted.py:"),
        ("chance", "run B does not repeat its own record at step 4: it is not deterministic"),
    ],
)
def test_each_planted_difference_is_named(runs_of_three: Runs, plant: str, said: str) -> None:
    assert said in "\n".join(runs_of_three.replay(plant))


def living() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def environment(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    return ""


def test_the_document_has_what_was_found() -> None:
    outcome = RerunOutcome(parting=Parting(num_steps=2), unrepeated={})
    document = json.loads(json.dumps(asdict(outcome)))
    assert (document["difference"], document["parting"]["num_steps"]) == (None, 2)
