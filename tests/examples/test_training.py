"""Does each example of a training, killed and resumed, come to the bits of the undisturbed run?"""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.state.saved.checkpoint import Checkpointer
from conftest import Allranks

pytestmark = pytest.mark.torch
EXAMPLES = Path(__file__).parents[2] / "examples" / "training"
STRUCK = Path(__file__).parents[1] / "scripts" / "struck.py"
NEEDS = {
    "compiled": ("a C++ compiler", shutil.which("g++") or shutil.which("clang++")),
    "stateful_loader": ("torchdata", importlib.util.find_spec("torchdata")),
}


def leaves_of(state: Any, where: str = "") -> dict[str, Any]:
    """All values in a state, by the path to them."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else None
    if items is None:
        return {where: state}
    return {path: leaf for key, value in items for path, leaf in leaves_of(value, f"{where}/{key}").items()}


def end_of(folder: Path) -> dict[str, Any]:
    with Checkpointer(folder) as checkpoints:
        loaded = checkpoints.load()
        assert loaded is not None
        return leaves_of(loaded.common)


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    return bool(one == other)


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_a_killed_example_ends_with_the_bits_of_the_undisturbed_one(tmp_path: Path, allranks: Allranks, name: str):
    what, is_here = NEEDS.get(name, ("", True))
    if not is_here:
        pytest.skip(f"{name}.py needs {what}")
    flags = ("--nproc-per-node", "2", "--max-restarts", "1", "--checkpoint-every", "20")
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    result = allranks("run", *flags, STRUCK, EXAMPLES / f"{name}.py", tmp_path, env=env, timeout_s=200)
    assert result.returncode == 0, result.stderr
    assert re.search(rf"resumed at step \d+ from {tmp_path}/killed/step_\d+\n", result.stderr), result.stderr
    expected, found = end_of(tmp_path / "undisturbed"), end_of(tmp_path / "killed")
    assert found.keys() == expected.keys()
    assert [path for path in expected if not is_same(expected[path], found[path])] == []
    assert sum(isinstance(leaf, torch.Tensor) for leaf in expected.values()) > 10
