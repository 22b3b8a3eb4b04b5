"""Weights get out of a checkpoint without a process group, as a file that other programs read."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import allranks
from allranks.model.errors import UsageError
from allranks.state.saved.checkpoint import Checkpointer, CheckpointError
from allranks.state.saved.manifest import part_name
from conftest import Allranks, allranks_command, write

pytestmark = pytest.mark.torch


def weights(step: int) -> OrderedDict[str, torch.Tensor]:
    table = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3) + step
    return OrderedDict({"_orig_mod.table": table, "_orig_mod.head": table, "blocks.0._orig_mod.bias": torch.ones(3)})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2; the optimizer's bytes of step 2 are altered, and with them what is in the same block."""
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    with Checkpointer(root) as saved:
        for step in (1, 2):
            parts = {"model": weights(step), "ema": {"table": torch.zeros(2)}, "scheduler": {"last": 3, "rate": [0.1]}}
            saved.save(step, {"step": step, "parts": parts}, wait=True)
    path = root / "step_2" / part_name(0)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    return root


def test_the_newest_whole_checkpoint_is_read_under_the_names_of_the_module(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = allranks.load_weights(checkpoints)
    assert list(loaded) == ["table", "head", "blocks.0.bias"]
    assert loaded["table"].equal(weights(1)["_orig_mod.table"])
    assert loaded["table"].data_ptr() == loaded["head"].data_ptr()
    said = capsys.readouterr().err
    assert f"{checkpoints}/step_2 is passed over: {part_name(0)}: block 1 of 1 does not match its checksum" in said
    assert "trying step_1" in said
    assert list(allranks.load_weights(str(checkpoints / "step_1"), part="ema")) == ["table"]


def test_what_is_not_there_is_said(checkpoints: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no part 'teacher' with weights, but ema, model, scheduler"):
        allranks.load_weights(checkpoints / "step_1", part="teacher")
    with pytest.raises(UsageError, match="is no checkpoint, and has none in it"):
        allranks.load_weights(tmp_path)
    with pytest.raises(CheckpointError, match="block 1 of 1 does not match its checksum; there is no other"):
        allranks.load_weights(checkpoints / "step_2")


def test_load_file_of_safetensors_and_torch_load_read_what_export_writes(
    allranks_here: Allranks, checkpoints: Path, tmp_path: Path
) -> None:
    outs = tmp_path / "model.safetensors", tmp_path / "model.pt"
    result = allranks_here("export", checkpoints / "step_1", "--safetensors", outs[0], "--torch", outs[1])
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == f"{outs[0]}: 3 tensors, 0.0 MB"
    for loaded in load_file(outs[0]), torch.load(outs[1], weights_only=True):
        assert loaded.keys() == {"table", "head", "blocks.0.bias"}
        assert loaded["head"].dtype is torch.bfloat16
        assert loaded["head"].equal(weights(1)["_orig_mod.head"])
    assert sorted(tmp_path.iterdir()) == sorted(outs)


@pytest.mark.parametrize(
    ("flags", "code", "why"),
    [
        ([], 2, "error: export: say what to write: --safetensors OUT or --torch OUT"),
        (["--part", "scheduler", "--safetensors", "out"], 2, "scheduler['last'] is a int, which safetensors cannot"),
        (["--torch", "/proc/none/out"], 2, "error: export: /proc/none/out: No such file or directory"),
    ],
)
def test_an_export_that_cannot_be_says_why(
    allranks_here: Allranks, checkpoints: Path, flags: list[str], code: int, why: str
) -> None:
    result = allranks_here("export", checkpoints / "step_1", *flags)
    assert (result.returncode, why in result.stderr) == (code, True), result.stderr


@pytest.mark.parametrize("flag", ["--torch", "--safetensors"])
def test_an_export_onto_a_full_disk_is_one_line_and_leaves_nothing(
    checkpoints: Path, tmp_path: Path, flag: str
) -> None:
    result = subprocess.run(
        allranks_command("export", checkpoints / "step_1", flag, "out"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},  # a cut file of it would be read later
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (2, "error: export: out: File too large\n")
    assert not [*tmp_path.iterdir()]


def test_an_export_replaces_no_device_and_no_link(allranks_here: Allranks, checkpoints: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused = allranks_here("export", checkpoints / "step_1", "--torch", "pipe")
    assert (refused.returncode, refused.stderr) == (
        2,
        "error: export: pipe is no regular file; name another one\n",
    )
    (tmp_path / "link").symlink_to("out")
    allranks_here("export", checkpoints / "step_1", "--torch", "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "out").is_file()


def test_an_export_without_safetensors_says_what_to_install(
    allranks: Allranks, checkpoints: Path, tmp_path: Path
) -> None:
    write(tmp_path / "path/safetensors.py", "raise ModuleNotFoundError(\"No module named 'safetensors'\")\n")
    result = allranks("export", checkpoints, "--safetensors", "out", env={"PYTHONPATH": str(tmp_path / "path")})
    cure = f"{sys.executable} -m pip install safetensors (No module named 'safetensors')"
    assert result.stderr == f"error: export: --safetensors needs safetensors: {cure}\n"
    assert result.returncode == 2


@pytest.mark.parametrize("run", ["latest", "20261123-031500-977", "runs/20261123-031500-977"])
def test_an_export_takes_a_run_for_its_newest_checkpoint(
    allranks_here: Allranks, checkpoints: Path, tmp_path: Path, run: str
) -> None:
    mine = write(tmp_path / "runs/20261123-031500-977/attempt_0/events.jsonl", "").parent.parent
    (tmp_path / "runs/latest").symlink_to(mine.name)
    shutil.copytree(checkpoints / "step_1", mine / "checkpoints/step_1")
    result = allranks_here("export", run, "--torch", "model.pt")
    assert result.returncode == 0, result.stderr
    assert torch.load(tmp_path / "model.pt", weights_only=True).keys() == {"table", "head", "blocks.0.bias"}


def test_a_directory_of_checkpoints_may_have_a_script_that_is_called_as_one_of_a_run(
    allranks_here: Allranks, checkpoints: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoints / "step_1", tmp_path / "mine/step_1")
    write(tmp_path / "mine/submission.sh", "#SBATCH --nodes=2\n")
    result = allranks_here("export", "mine", "--torch", "model.pt")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("run", ["latest", "runs/20261123-031500-977"])
def test_an_export_of_a_run_finds_its_checkpoints_where_checkpoint_dir_had_them(
    allranks_here: Allranks, checkpoints: Path, tmp_path: Path, run: str
) -> None:
    setting = {"name": "ALLRANKS_CHECKPOINT_DIR", "value": str(checkpoints), "reason": "", "source": ""}
    node = write(tmp_path / "runs/20261123-031500-977/attempt_0/n1/env.json", json.dumps([setting])).parent
    (tmp_path / "runs/latest").symlink_to(node.parent.parent.name)
    result = allranks_here("export", run, "--torch", "model.pt")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("given", "looked"),
    [
        ("checkpoints", "checkpoints: no such directory"),
        ("runs", "runs/"),
        ("latest", "runs/977/checkpoints: no such directory"),
    ],
)
def test_an_export_without_a_checkpoint_says_where_it_looked_and_what_to_give(
    allranks_here: Allranks, tmp_path: Path, given: str, looked: str
) -> None:
    write(tmp_path / "runs/977/attempt_0/events.jsonl", "")
    (tmp_path / "runs/latest").symlink_to("977")
    result = allranks_here("export", given, "--torch", "model.pt")
    assert result.stderr == (
        f"error: export: {given}: found no checkpoint ({looked}); expected a checkpoint, which is a directory step_N "
        "with a MANIFEST.json, a directory of checkpoints, for example runs/latest/checkpoints, or a run, for example "
        "latest\n"
    )
    assert result.returncode == 2


def test_an_export_of_the_latest_run_names_the_checkpoints_of_a_script_without_one(
    allranks_here: Allranks, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints/step_3").mkdir(parents=True)
    result = allranks_here("export", "latest", "--torch", "model.pt")
    assert result.stderr == (
        "error: latest: there is no run in runs yet, but checkpoints in checkpoints/: allranks export checkpoints\n"
    )
    assert result.returncode == 2
