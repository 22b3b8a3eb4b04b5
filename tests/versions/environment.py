"""One environment: a Python, this checkout, one version of torch, and the CUDA libraries that it cannot do without.

    with environment("2.5.1", python, folder) as made: subprocess.run([made.python, "-m", "pytest", ...])

A wheel of torch with CUDA asks for 3 GB of libraries, and needs about half of them to be imported without a GPU. Which
ones, the loader says: what `ldd` does not find, and then what `import torch` does not find, is installed at the version
that torch asks for, until nothing is missing. A torch takes the libraries that a newer one with the same major version
of CUDA brought, which NVIDIA promises to work. The folder is deleted at the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ("pytest", "pytest-timeout")
INSTALL_S = 900
_FROM_TORCH = re.compile(r"filelock|fsspec|jinja2|networkx|setuptools|sympy|typing.extensions", re.IGNORECASE)
"""What every torch imports, or offers to; triton and CUDA are looked at by name."""
_PART_OF = {"cublasLt": "cublas", "cusparseLt": "cusparselt", "nvToolsExt": "nvtx", "nvJitLink": "nvjitlink"}
_PART_OF |= {"nvshmem_host": "nvshmem", "cudart": "cudart|cuda-runtime"}
"""By stem of a library's name: the word for it in the name of its package, where that is another."""


class CannotMake(Exception):
    """This environment cannot be had on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What the tests run in."""

    python: Path
    torch: str
    """As torch itself says it: `2.5.1+cu124`."""
    size_bytes: int


@contextlib.contextmanager
def environment(version: str, python: Path, folder: Path, *, shared: Path) -> Iterator[Environment]:
    """Make an environment in a folder, and delete the folder.

    Args:
        version: of torch, as pip takes it.
        python: the interpreter to use.
        folder: must not exist.
        shared: where libraries of CUDA are kept for the next environment; those of another major version are deleted.
    Raises:
        CannotMake: a package cannot be installed, or torch cannot be imported.
    """
    folder.mkdir(parents=True)
    try:
        yield _make(version, python, folder, shared)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_python(version: str, named: Sequence[Path] = ()) -> Path | None:
    """Return an interpreter of this version (`3.12`): of those named, on PATH, or below ~/.pyenv.

    Args:
        version: major and minor.
        named: looked at first.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    candidates = [*named, *sorted(pyenv.glob(f"{version}.*/bin/python3")), *([Path(on_path)] if on_path else [])]
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        candidates.insert(0, Path(sys.executable))
    return next((each for each in candidates if _version_of(each) == version), None)


def lacking(words: str) -> list[str]:
    """Return stems of the shared libraries that the loader misses or finds too old, from what ldd or an import says.

    >>> lacking("libcudart.so.12 => not found"), lacking("ImportError: libcusparseLt.so.0: cannot open shared object")
    (['cudart'], ['cusparseLt'])
    """
    found = re.findall(r"lib(\w+)\.so[.\d]* (?:=> not found|not found in the system path)", words)
    found += re.findall(r"lib(\w+)\.so[.\d]*: cannot open shared object", words)
    found += re.findall(r"undefined symbol: \w+, version lib(\w+)\.so", words)
    found += re.findall(r"undefined symbol: (nccl|cublas|cudnn|cufft|cusparse)[A-Z]\w*$", words, re.MULTILINE)
    return list(dict.fromkeys(found))


def requirement_of(stem: str, requirements: Sequence[str]) -> str | None:
    """Return what to install for a library, at the version that torch asks for; None: torch names no such package.

    >>> requirement_of("cudart", ["nvidia-cuda-runtime-cu12==12.4.127; platform_system == 'Linux'"])
    'nvidia-cuda-runtime-cu12==12.4.127'
    >>> requirement_of("cublasLt", ["cuda-toolkit[cublas,cudart]==13.2.2; platform_system == 'Linux'"])
    'cuda-toolkit[cublas]==13.2.2'

    Args:
        stem: `cublasLt` of libcublasLt.so.12.
        requirements: Requires-Dist of torch's metadata.
    """
    word = _PART_OF.get(stem, stem)
    for line in requirements:
        name, _, version = re.sub(r"[ ()]", "", line.partition(";")[0]).partition("==")
        extras = re.fullmatch(r"cuda-toolkit\[(.*)\]", name)
        if extras and (extra := next((each for each in extras[1].split(",") if each in word.split("|")), None)):
            return f"cuda-toolkit[{extra}]=={version}"
        if not extras and re.fullmatch(rf"nvidia-(?:cuda-)?(?:{word})(?:-cu\d+)?", name):
            return f"{name}=={version}"
    return None


def _make(version: str, python: Path, folder: Path, shared: Path) -> Environment:
    venv = folder / "venv"
    _run([python, "-m", "venv", "--without-pip", venv], "python -m venv")
    own = venv / "bin/python"
    pip = _Pip(own, folder)
    pip.install("--no-deps", f"torch=={version}")
    (torch,) = venv.glob("lib/python*/site-packages/torch")
    (metadata,) = torch.parent.glob("torch-*.dist-info/METADATA")
    requirements = re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(), re.MULTILINE)
    plain = [line for line in requirements if _FROM_TORCH.match(line) and "extra ==" not in line]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [*project["dependencies"], *project["optional-dependencies"]["torch"]]
    ours = [line for line in ours if not line.startswith("torch")]
    pip.install(*plain, *ours, *TESTS)
    pip.install("--no-deps", str(ROOT))
    _share_libraries(torch, shared)
    _install_libraries(pip, own, torch, requirements)
    said = _run([own, "-c", "import torch; print(torch.__version__)"], "import torch")
    size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink() and path.is_file())
    return Environment(own, said.strip(), size)


def _share_libraries(torch: Path, shared: Path) -> None:
    """Have `nvidia` beside torch, where its libraries look for CUDA's, be a folder that stays."""
    cuda = re.search(r"^cuda\b[^=\n]*= *['\"](\d+)\.", (torch / "version.py").read_text(), re.MULTILINE)
    if cuda is None:  # a build for the CPU
        return
    kept = shared / f"cuda-{cuda[1]}"
    for other in shared.glob("cuda-*"):
        if other != kept:
            shutil.rmtree(other)
    kept.mkdir(parents=True, exist_ok=True)
    (torch.parent / "nvidia").symlink_to(kept)


def _install_libraries(pip: _Pip, python: Path, torch: Path, requirements: Sequence[str]) -> None:
    core = [torch / "lib" / f"lib{name}.so" for name in ("torch_global_deps", "torch_python", "torch_cuda", "c10_cuda")]
    core = [path for path in core if path.exists()]
    done: set[str] = set()
    for _ in range(20):
        words = _words(["ldd", *map(str, core)])
        if not lacking(words):
            words = _words([str(python), "-c", "import torch"])
        stems = [stem for stem in lacking(words) if stem not in done]
        if not stems:
            return
        done |= set(stems)
        wanted = {stem: requirement_of(stem, requirements) for stem in stems}
        if unknown := [stem for stem, requirement in wanted.items() if requirement is None]:
            raise CannotMake(f"torch needs {', '.join(unknown)}, and names no package for it")
        pip.install(*sorted({each for each in wanted.values() if each}))


class _Pip:
    """The newest pip, run from its wheel: Debian's Python brings none, and an old one may not know a new Python."""

    def __init__(self, python: Path, folder: Path) -> None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), "pip"]
        _run(command, "pip download pip")
        (wheel,) = folder.glob("pip-*.whl")
        constraints = folder / "constraints.txt"
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        # Another torch needs its own version of these; numpy has wheels of one release for few Pythons only.
        free = re.compile(r"torch==|numpy==|setuptools==|typing_extensions==|sympy==|hyperscan==")
        constraints.write_text("\n".join(line for line in lines if not free.match(line)) + "\n")
        self._command = [python, wheel / "pip", "install", "--quiet", "--no-cache-dir", "--no-compile"]
        self._command += ["--disable-pip-version-check", "--prefer-binary", "--constraint", constraints]
        self._temporary = folder / "tmp"
        self._temporary.mkdir()

    def install(self, *what: str) -> None:
        """Install these.

        Raises:
            CannotMake: pip says no.
        """
        options = [each for each in what if each.startswith("-")]
        listed = self._temporary / "requirements.txt"  # in a file, requirements may have markers
        listed.write_text("\n".join(each for each in what if each not in options) + "\n")
        command = [*self._command, *options, "--requirement", listed]
        _run(command, f"pip install {' '.join(what)[:80]}", TMPDIR=str(self._temporary))


def _run(command: Sequence[str | Path], what: str, **env: str) -> str:
    ran = subprocess.run(
        list(map(str, command)), env=os.environ | env, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    if ran.returncode:
        lines = [line for line in ran.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise CannotMake(f"{what}: {' '.join(lines[-3:])[-400:]}")
    return ran.stdout


def _words(command: Sequence[str]) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return ran.stdout + ran.stderr


def _version_of(python: Path) -> str | None:
    try:
        ask = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        return subprocess.run(ask, capture_output=True, text=True, timeout=30, check=False).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None
