"""Does what is built install and run in a clean environment, with each Python, without torch and with it?

By hand: it needs a package index, and minutes. A Python that is not on PATH or in pyenv is taken from Debian, in a root
file system that `mmdebstrap` makes for the test, if it is there and we are root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import clean_env, write
from test_wheel import TRAIN, build

pytestmark = [pytest.mark.by_hand, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
SUITES = {"3.13": "trixie", "3.14": "forky"}
"""Debian's releases by their Python."""
IN_ROOT = """
set -e
for each in proc sys dev; do mount --rbind /$each "$1/$each"; done
mkdir -p "$1$2"
mount --bind "$2" "$1$2"
exec chroot "$1" env --chdir="$2" "${@:3}"
"""
FAILED = (
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity\n"
)
GLIBC = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
MUSL = ("x86_64-unknown-linux-musl", "aarch64-unknown-linux-musl")


@dataclass(frozen=True)
class Place:
    """Where commands run: on this machine, or in a root file system."""

    python: str
    folder: Path
    root: Path | None = None

    def run(self, *command: str | Path, timeout_s: float = 900, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder; it must end with the code."""
        words = [str(word) for word in command]
        if self.root is not None:
            words = ["unshare", "--mount", "bash", "-c", IN_ROOT, "bash", str(self.root), str(self.folder), *words]
        env = clean_env(os.environ) | {"HOME": str(self.folder), "XDG_CACHE_HOME": str(self.folder / "cache")}
        done = subprocess.run(
            words, cwd=self.folder, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == code, f"{command} in {self.root}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: build(kind, tmp_path_factory.mktemp(kind)) for kind in ("wheel", "sdist")}


def find_python(version: str) -> str | None:
    """Return a Python of this machine that can make environments."""
    names = [shutil.which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    check = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    for name in filter(None, names):
        done = subprocess.run([name, "-c", check], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return name
    return None


def make_root(suite: str, root: Path) -> None:
    """Install a small Debian with Python into a folder."""
    command = ["mmdebstrap", "--mode=root", "--variant=minbase", "--include=python3,python3-venv,ca-certificates"]
    late = ['--aptopt=Acquire::Check-Valid-Until "false"']
    done = subprocess.run([*command, *late, suite, str(root)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    for path in filter(os.path.exists, ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")):
        shutil.copy(path, root / path[1:])


@pytest.fixture(scope="module", params=VERSIONS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    version = request.param
    with tempfile.TemporaryDirectory(prefix="allranks-install-") as name:
        folder = Path(name).resolve()
        if python := find_python(version):
            yield Place(python, folder)
            return
        if version not in SUITES or os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
            pytest.skip(f"no Python {version} with venv here, and as root no mmdebstrap to get it from Debian")
        with tempfile.TemporaryDirectory(prefix="allranks-debian-") as root:
            make_root(SUITES[version], Path(root))
            yield Place("/usr/bin/python3", folder, Path(root))


def install(place: Place, package: Path, name: str, *more: str) -> Path:
    """Make an environment with only this package, and return its directory of commands."""
    copied = shutil.copy(package, place.folder)
    place.run(place.python, "-m", "venv", name)
    commands = place.folder / name / "bin"
    place.run(commands / "python", "-m", "pip", "install", "--quiet", copied, *more)
    place.run(commands / "python", "-m", "pip", "check")
    return commands


def test_wheel_and_source_install_and_run_without_torch(place: Place, built: dict[str, Path]) -> None:
    commands = install(place, built["wheel"], "env")
    place.run(commands / "python", "-c", "import torch", code=1)
    (place.folder / "job.log").write_text(FAILED)
    answer = place.run(commands / "allranks", "why", "job.log", code=1)
    assert "rank 1" in answer.stdout
    assert answer.stderr == "", "hyperscan was not installed"
    assert_it_runs(place, commands)
    source = shutil.copy(built["sdist"], place.folder)
    place.run(commands / "python", "-m", "pip", "uninstall", "--quiet", "--yes", "allranks")
    place.run(commands / "python", "-m", "pip", "install", "--quiet", "--no-deps", source)
    assert_it_runs(place, commands)


def assert_it_runs(place: Place, commands: Path) -> None:
    assert place.run(commands / "allranks", "--version").stdout.startswith("allranks 0.1.0")
    job = place.run(commands / "allranks", "run", "--nproc-per-node", "2", "--no-python", "echo", "ready")
    ready = sorted(line.split()[-2:] for line in job.stdout.splitlines() if "ready" in line)
    assert ready == [["r0]", "ready"], ["r1]", "ready"]]


def test_it_starts_torch_in_a_clean_environment(built: dict[str, Path], tmp_path: Path) -> None:
    """With the Python that runs the tests, and the pinned torch: several GB if pip finds no CPU build of it."""
    (pin,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    place = Place(sys.executable, tmp_path)
    commands = install(place, built["wheel"], "env", pin, "numpy")
    script = write(tmp_path / "train.py", TRAIN)
    job = place.run(commands / "allranks", "run", "--nproc-per-node", "2", script)
    assert f"sum 2 from {tmp_path}/env/lib/" in job.stdout


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return a place with an environment `tools` that has uv, pipx, and what a release needs."""
    place = Place(sys.executable, tmp_path_factory.mktemp("tools"))
    place.run(place.python, "-m", "venv", "tools")
    place.run("tools/bin/python", "-m", "pip", "install", "--quiet", "uv", "pipx", "twine", "hatchling")
    return place


def resolve(tools: Place, wheel: Path, platform: str, version: str, *more: str) -> set[str]:
    """Return the packages that are installed with the wheel on another machine, if all of them have wheels there."""
    requirements = write(tools.folder / "requirements.in", f"allranks @ file://{wheel}\n")
    command = ("tools/bin/uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--only-binary", ":all:")
    found = tools.run(*command, *more, "--python-platform", platform, "--python-version", version, requirements)
    return {line.partition("==")[0].partition(" @")[0] for line in found.stdout.splitlines()}


ALL = {"allranks", "click", "hyperscan", "jinja2", "markupsafe", "msgspec", "psutil", "py-spy", "zstandard"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("platform", GLIBC)
def test_all_dependencies_have_wheels(tools: Place, built: dict[str, Path], platform: str, version: str) -> None:
    assert resolve(tools, built["wheel"], platform, version) == ALL


@pytest.mark.parametrize("platform", MUSL)
def test_on_musl_only_py_spy_has_none(tools: Place, built: dict[str, Path], platform: str) -> None:
    without = write(tools.folder / "excluded.txt", "py-spy; sys_platform == 'win32'\n")
    assert resolve(tools, built["wheel"], platform, "3.13", "--override", str(without)) == ALL - {"py-spy"}


def test_other_machines_go_without_hyperscan_and_py_spy(tools: Place, built: dict[str, Path]) -> None:
    code = (
        "import sys; from importlib.metadata import Distribution; from packaging.requirements import Requirement\n"
        "import zipfile; name = [n for n in zipfile.ZipFile(sys.argv[1]).namelist() if n.endswith('METADATA')][0]\n"
        "lines = zipfile.ZipFile(sys.argv[1]).read(name).decode().splitlines()\n"
        "all = [Requirement(l.partition(': ')[2]) for l in lines if l.startswith('Requires-Dist')]\n"
        "print(*sorted(r.name for r in all if r.marker is None or r.marker.evaluate({'platform_machine': 'ppc64le'})))"
    )
    found = tools.run("tools/bin/python", "-c", code, built["wheel"]).stdout.split()
    assert found == ["click", "jinja2", "msgspec", "psutil", "zstandard"]


def test_uv_installs_it(tools: Place, built: dict[str, Path]) -> None:
    tools.run("tools/bin/uv", "venv", "--quiet", "--python", sys.executable, "by-uv")
    tools.run("tools/bin/uv", "pip", "install", "--quiet", "--python", "by-uv/bin/python", built["wheel"])
    assert tools.run("by-uv/bin/allranks", "--version").stdout.startswith("allranks 0.1.0")


def test_pipx_installs_it_and_no_python_starts_the_one_on_path(tools: Place, built: dict[str, Path]) -> None:
    """Scripts run with the Python of pipx's environment, which has no torch; --no-python takes the one on PATH."""
    tools.run("tools/bin/pipx", "install", "--quiet", "--python", sys.executable, built["wheel"])
    command = tools.folder / ".local/bin/allranks"
    write(tools.folder / "where.py", "import os, sys\nprint('python in', sys.prefix, 'rank', os.environ['RANK'])\n")
    own = tools.run(command, "run", "--nproc-per-node", "1", "where.py")
    assert "/pipx/venvs/allranks rank 0" in own.stdout
    on_path = tools.run(command, "run", "--nproc-per-node", "1", "--no-python", "tools/bin/python", "where.py")
    assert f"python in {tools.folder}/tools rank 0" in on_path.stdout


def test_a_release_is_built_checked_and_tagged(tools: Place) -> None:
    checkout = tools.folder / "checkout"
    tools.run("git", "clone", "--quiet", ROOT, checkout)
    changes = checkout / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("## 0.1.0, unreleased", "## 0.1.0, 2026-12-01"))
    tools.run("git", "-C", checkout, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "Release 0.1.0")
    release = ("env", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@b", "tools/bin/python", "packaging/release.py")
    release = (*release[:-1], checkout / release[-1])
    assert "dry run: no tag" in tools.run(*release, "--dry-run").stdout
    assert tools.run("git", "-C", checkout, "tag").stdout == ""
    assert "tagged v0.1.0" in tools.run(*release).stdout
    assert tools.run("git", "-C", checkout, "tag").stdout == "v0.1.0\n"
    assert sorted(path.suffix for path in (checkout / "dist").iterdir()) == [".gz", ".whl"]
