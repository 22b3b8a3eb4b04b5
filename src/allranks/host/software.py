"""Which software will the workers find: versions, NCCL's plugin and configuration, the environment of a group.

Versions come from the metadata of installed distributions; nothing is imported, torch least of all. As with `import`,
the first entry of sys.path that has a package wins. Reads files that may lie on a network file system: host.node calls
this from a thread.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from allranks.model.card import MAX_TEXT, MAX_VARIABLES
from allranks.model.secret_names import is_secret_name

NCCL_DISTRIBUTIONS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
DISTRIBUTIONS = (
    "torch", "numpy", *NCCL_DISTRIBUTIONS, "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13", "triton", "deepspeed",
    "lightning", "pytorch-lightning", "lightning-fabric", "accelerate", "transformers", "flash-attn",
    "transformer-engine", "apex", "megatron-core", "msgspec",
)  # fmt: skip
"""What takes part in a group, or decides how it is set up."""

# Order matters: what is cut off beyond MAX_VARIABLES comes last.
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "UCX_", "FI_", "NVIDIA_")
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "OMP_NUM_THREADS", "ALLRANKS_COMPRESS", "ALLRANKS_BUCKET_MB")
_OF_ONE_NODE = re.compile(r"NCCL_HOSTID|NVIDIA_VISIBLE_DEVICES|CUDA_MPS_\w+")
_NO_SECRET = ("NCCL_IB_PKEY", "UCX_IB_PKEY")  # partition keys: numbers that must be alike
_MAX_FILE_BYTES = 1 << 20


def read_packages(names: Sequence[str] = DISTRIBUTIONS, *, path: Sequence[str] | None = None) -> dict[str, str]:
    """Return the versions of those distributions that are installed.

    Args:
        names: of distributions, as pip spells them.
        path: directories, the first one wins; sys.path if None.
    """
    from importlib.metadata import distributions

    entries = [entry or "." for entry in (sys.path if path is None else path)]
    found = {}
    places: dict[str, int] = {}
    for name in names:
        for distribution in distributions(name=name, path=entries):
            try:
                version = distribution.version
                place = entries.index(str(distribution.locate_file("")))
            except Exception:  # a half-removed or torn one: KeyError, TypeError, OSError, ValueError, as Python likes
                continue
            if version:
                found[name] = cut(str(version))
                places[name] = place
                break
    # A torch without metadata (a source tree, a stub) that comes first is the one that is imported.
    if "torch" in names and (package := _find_torch(entries)) and package[0] < places.get("torch", len(entries)):
        match = re.search(r"^__version__\s*=\s*['\"]([^'\"\n]+)['\"]", package[1], re.MULTILINE)
        if match:
            found["torch"] = cut(match[1])
    return found


def nccl_version_of(packages: Mapping[str, str]) -> str | None:
    """Return the version of NCCL that pip installed for torch; None for a build that brings its own."""
    return next((packages[name] for name in NCCL_DISTRIBUTIONS if name in packages), None)


def read_torch_cuda(*, path: Sequence[str] | None = None) -> str | None:
    """Return the CUDA version that the torch on the path was built for; None without torch and for a CPU build.

    Args:
        path: directories, the first one wins; sys.path if None.
    """
    package = _find_torch(sys.path if path is None else path)
    return parse_torch_cuda(package[1]) if package else None


def parse_torch_cuda(text: str) -> str | None:
    """Return `cuda` of a torch/version.py: `cuda: Optional[str] = '12.8'`."""
    match = re.search(r"^cuda\b[^=\n]*=\s*(['\"][^'\"\n]*['\"])", text, re.MULTILINE)
    try:
        value = ast.literal_eval(match[1]) if match else None
    except (ValueError, SyntaxError):
        return None
    return cut(value) if isinstance(value, str) else None


def read_glibc_version() -> str | None:
    """Return the version of the GNU C library; None with another one."""
    try:
        words = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (ValueError, OSError):
        return None
    return words[1] if len(words) == 2 and words[0] == "glibc" else None


def find_net_plugin(env: Mapping[str, str], *, root: Path = Path("/")) -> str | None:
    """Return the path of the network plugin that NCCL would load from LD_LIBRARY_PATH or the loader's cache.

    Args:
        env: NCCL_NET_PLUGIN in it names another one than libnccl-net.so, or `none`.
        root: where etc/ld.so.cache is.
    Source: NCCL documentation, "NCCL_NET_PLUGIN": libnccl-net-<value>.so, then <value>, then libnccl-net.so.
    """
    plugin = env.get("NCCL_NET_PLUGIN", "")
    if plugin == "none":
        return None
    named = (f"libnccl-net-{plugin}.so", plugin) if plugin else ()
    available = [*_in_library_path(env), *_in_loader_cache(root)]
    wanted = (*named, "libnccl-net.so")
    best = min(available, key=lambda file: _place_in(wanted, file), default=None)
    return cut(best) if best else None


def parse_loader_cache(content: bytes) -> list[str]:
    """Return the paths of NCCL's network plugins in an ld.so.cache."""
    return [found.decode(errors="replace") for found in re.findall(rb"\0(/[^\0]*/libnccl-net[^/\0]*\.so)\0", content)]


def select_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how a group behaves, without secrets and without what is one node's own."""
    chosen = [
        name
        for name in env
        if (name.startswith(_PREFIXES) or name in _NAMES)
        and (name in _NO_SECRET or not is_secret_name(name))
        and not _OF_ONE_NODE.fullmatch(name)
    ]
    chosen.sort(key=lambda name: (next((i for i, p in enumerate(_PREFIXES) if name.startswith(p)), -1), name))
    return {cut(name): cut(env[name]) for name in chosen[:MAX_VARIABLES]}


def hash_nccl_conf(env: Mapping[str, str], *, root: Path = Path("/")) -> str | None:
    """Return the SHA-256 of the configuration files that NCCL reads; None where there is none.

    Args:
        env: NCCL_CONF_FILE in it takes the place of ~/.nccl.conf (NCCL 2.23 and newer).
        root: where etc/nccl.conf is.
    Raises:
        OSError: one is there and cannot be read.
    Source: NCCL src/misc/param.cc, initEnvFunc: the user's file, then /etc/nccl.conf.
    """
    files = []
    if own := env.get("NCCL_CONF_FILE"):
        files.append(Path(own))
    elif home := env.get("HOME"):
        files.append(Path(home) / ".nccl.conf")
    files.append(root / "etc/nccl.conf")
    digest = hashlib.sha256()
    seen = 0
    for file in files:
        try:
            with file.open("rb") as opened:
                content = opened.read(_MAX_FILE_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            continue
        seen += 1
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest() if seen else None


def cut(text: str) -> str:
    """Return a text fit for a card: of MAX_TEXT characters at most, bytes that are no UTF-8 as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()[:MAX_TEXT]


def _find_torch(path: Sequence[str]) -> tuple[int, str] | None:
    """Which entry of the path holds the torch that would be imported, and its version.py, "" without one."""
    for index, entry in enumerate(path):
        package = Path(entry or ".") / "torch"
        try:
            if (package / "__init__.py").is_file():
                text = (package / "version.py").read_text(errors="replace") if (package / "version.py").exists() else ""
                return index, text
        except (OSError, ValueError):
            continue
    return None


def _place_in(wanted: Sequence[str], file: str) -> int:
    name = Path(file).name
    return wanted.index(name) if name in wanted else len(wanted)


def _in_library_path(env: Mapping[str, str]) -> list[str]:
    directories = [Path(entry) for entry in env.get("LD_LIBRARY_PATH", "").split(":") if entry]
    return [str(file) for directory in directories for file in sorted(directory.glob("libnccl-net*.so"))]


def _in_loader_cache(root: Path) -> list[str]:
    try:
        with (root / "etc/ld.so.cache").open("rb") as file:
            return parse_loader_cache(file.read(8 * _MAX_FILE_BYTES))
    except OSError:
        return []
