"""Does each example of a training, killed and resumed, come to the bits of the undisturbed run?"""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from allranks.state.saved.checkpoint import Checkpointer
from conftest import Allranks
from forked import fork_ranks

TOGETHER_S = 800.0
"""For all of them on a busy machine; a quiet one needs a minute."""
pytestmark = [pytest.mark.torch, pytest.mark.timeout(TOGETHER_S + 100)]
EXAMPLES = {path.stem: path for path in sorted((Path(__file__).parents[2] / "examples" / "training").glob("*.py"))}
STRUCK = Path(__file__).parents[1] / "scripts/struck.py"
EVERY = "20"
IN_ONE_JOB = "loader_workers"
"""Whose rank has processes of its own when it is killed."""
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


class Ends(NamedTuple):
    """What examples left in a folder, and what was said."""

    out: Path
    said: str

    def compare(self, name: str) -> None:
        """It went on from a checkpoint, and its last one has the bits of the undisturbed run."""
        where = self.out / name
        assert re.search(rf"resumed at step \d+ from {where}/killed/step_\d+\n", self.said), self.said
        expected, found = end_of(where / "undisturbed"), end_of(where / "killed")
        assert found.keys() == expected.keys()
        assert [path for path in expected if not is_same(expected[path], found[path])] == []
        assert sum(isinstance(leaf, torch.Tensor) for leaf in expected.values()) > 10


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    return bool(one == other)


def compiler_env(folder: Path) -> dict[str, str]:
    return {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "code")}


def skip_without_needs(name: str) -> None:
    what, is_here = NEEDS.get(name, ("", True))
    if not is_here:
        pytest.skip(f"{name}.py needs {what}")


FORKED = [name for name in EXAMPLES if NEEDS.get(name, ("", True))[1]]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """All examples, one after the other: one import of torch serves them all."""
    out, sizes = tmp_path_factory.mktemp("examples"), ",".join(["2,2,2"] * len(FORKED))
    scripts = [EXAMPLES[name] for name in FORKED]
    env = compiler_env(out) | {"ALLRANKS_CHECKPOINT_EVERY": EVERY}
    done = fork_ranks(out, sizes, STRUCK, out, *scripts, within_s=TOGETHER_S, **env)
    return Ends(out, done.stdout + done.stderr)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_killed_example_ends_with_the_bits_of_the_undisturbed_one(ends: Ends, name: str):
    skip_without_needs(name)
    at = 3 * FORKED.index(name)
    codes = re.findall(r"^codes (.*)$", ends.said, re.M)
    assert codes[at : at + 3] == ["[0, 0]", "[1, -9]", "[0, 0]"], ends.said
    ends.compare(name)


@pytest.mark.parametrize(
    "name", [name if name == IN_ONE_JOB else pytest.param(name, marks=pytest.mark.by_hand) for name in EXAMPLES]
)
def test_so_it_does_where_allranks_run_starts_it_again(tmp_path: Path, allranks: Allranks, name: str):
    skip_without_needs(name)
    flags = ("--nproc-per-node", "2", "--max-restarts", "1", "--checkpoint-every", EVERY)
    result = allranks("run", *flags, STRUCK, tmp_path, EXAMPLES[name], env=compiler_env(tmp_path), timeout_s=200)
    assert result.returncode == 0, result.stderr
    Ends(tmp_path, result.stderr).compare(name)
