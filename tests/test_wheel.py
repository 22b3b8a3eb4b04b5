"""Is what users install, a wheel, the whole package, and does the quick start run from it?"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from trove_classifiers import classifiers

from conftest import allranks_command, clean_env, write

ROOT = Path(__file__).parents[1]
TRAIN = """\
import torch
import torch.distributed as dist

import allranks

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    print("sum", int(total), "from", allranks.__file__)
dist.destroy_process_group()
"""


def build(target: str, folder: Path) -> Path:
    """Build the package as `pip install .` does, and return the file."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=clean_env(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("allranks-*")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def source_files() -> set[str]:
    """All files of the package, but for what Python compiled."""
    source = ROOT / "src"
    paths = (path for path in (source / "allranks").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(source).as_posix() for path in paths}


def test_a_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if name.startswith("allranks/")}
    texts = {name for name in source_files() if name.startswith("allranks/causes/text/")}
    assert found == source_files() - texts | {"allranks/causes/book.json"}


def test_a_wheel_says_where_the_project_is_and_what_it_needs_where(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert "allranks/py.typed" in archive.namelist()
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    given = metadata.get_all("Classifier", [])
    assert [name for name in given if name not in classifiers] == []
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)} <= set(given)
    urls = [url.partition(", ")[0] for url in metadata.get_all("Project-URL", [])]
    assert urls == ["Homepage", "Documentation", "Changelog", "Issues"]
    marked = "platform_machine == 'x86_64' or platform_machine == 'aarch64'"
    assert metadata.get_all("Provides-Extra") == ["metrics", "otlp", "top", "torch"]
    needs = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert sorted(need for need in needs if ";" in need) == [f"hyperscan>=0.7; {marked}", f"py-spy>=0.4; {marked}"]


def test_a_source_distribution_has_every_file_of_the_package(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = [Path(member.name) for member in archive.getmembers() if member.isfile()]
    found = {Path(*path.parts[2:]).as_posix() for path in names if path.parts[1] == "src"}
    assert found == source_files()


def test_causes_are_explained_from_an_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    command = allranks_command("explain", "mtu-blackhole")
    env = clean_env(os.environ, PYTHONPATH=str(tmp_path))
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("AR204 mtu-blackhole\nLarge packets are lost"), done.stderr


@pytest.mark.torch
@pytest.mark.healthy
def test_a_job_runs_from_an_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    script = write(tmp_path / "train.py", TRAIN)
    done = subprocess.run(
        allranks_command("run", "--nproc-per-node", "2", script),
        cwd=tmp_path,
        env=clean_env(os.environ, PYTHONPATH=str(installed)),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"sum 2 from {installed}/allranks/__init__.py" in done.stdout
