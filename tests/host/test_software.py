"""Versions, plugin, configuration and environment, from trees of installed distributions."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.host.software import (
    cut,
    find_net_plugin,
    hash_nccl_conf,
    nccl_version_of,
    parse_loader_cache,
    parse_torch_cuda,
    read_packages,
    read_torch_cuda,
    select_environment,
)

VERSION_PY = """\
from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '2.13.0+cu128'
debug = False
cuda: Optional[str] = '12.8'
git_version = 'abc'
hip: Optional[str] = None
"""


def install(directory: Path, name: str, version: str) -> None:
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def install_torch(directory: Path, text: str = VERSION_PY) -> None:
    (directory / "torch").mkdir(parents=True)
    (directory / "torch/__init__.py").touch()
    (directory / "torch/version.py").write_text(text)


def test_versions_are_those_of_installed_distributions(tmp_path):
    install(tmp_path, "torch", "2.13.0+cu128")
    install(tmp_path, "nvidia-nccl-cu12", "2.28.9")
    install(tmp_path, "unrelated", "1.0")
    packages = read_packages(path=[str(tmp_path)])
    assert packages == {"torch": "2.13.0+cu128", "nvidia-nccl-cu12": "2.28.9"}
    assert nccl_version_of(packages) == "2.28.9"


def test_without_a_distribution_of_nccl_there_is_no_version():
    assert nccl_version_of({"torch": "2.13.0+cpu"}) is None


def test_the_first_entry_of_the_path_wins(tmp_path):
    install(tmp_path / "stub", "torch", "2.9.0")
    install(tmp_path / "site", "torch", "2.13.0")
    assert read_packages(path=[str(tmp_path / "stub"), str(tmp_path / "site")]) == {"torch": "2.9.0"}
    assert read_packages(path=[str(tmp_path / "site"), str(tmp_path / "stub")]) == {"torch": "2.13.0"}


def test_a_stub_on_pythonpath_wins_in_a_real_interpreter(tmp_path):
    install(tmp_path, "torch", "2.9.0.stub")
    code = (
        "from allranks.host.software import read_packages as r; import sys; print(r()['torch'], 'torch' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    answer = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert answer.stdout == "2.9.0.stub False\n"


def test_a_torch_without_metadata_that_comes_first_wins(tmp_path):
    install_torch(tmp_path / "source")
    install(tmp_path / "site", "torch", "2.11.0")
    assert read_packages(path=[str(tmp_path / "source"), str(tmp_path / "site")]) == {"torch": "2.13.0+cu128"}
    assert read_packages(path=[str(tmp_path / "site"), str(tmp_path / "source")]) == {"torch": "2.11.0"}


def test_a_torn_distribution_is_passed_over(tmp_path):
    (tmp_path / "a/torch-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    install(tmp_path / "b", "torch", "2.13.0")
    assert read_packages(path=[str(tmp_path / "a"), str(tmp_path / "b"), "/no/such"]) == {"torch": "2.13.0"}


def test_cuda_is_read_from_torch_without_importing_it(tmp_path):
    install_torch(tmp_path / "first")
    install_torch(tmp_path / "second", "cuda = '11.8'\n")
    assert read_torch_cuda(path=[str(tmp_path), str(tmp_path / "first"), str(tmp_path / "second")]) == "12.8"
    assert read_torch_cuda(path=[str(tmp_path)]) is None


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        (VERSION_PY, "12.8"),
        ("cuda = '11.8'\n", "11.8"),
        ('cuda: Optional[str] = "13.0"\n', "13.0"),
        ("cuda: Optional[str] = None\n", None),
        ("cuda_x = '1'\n", None),
        ("", None),
        ("cuda = '12", None),
    ],
)
def test_cuda_of_a_version_file(text, cuda):
    assert parse_torch_cuda(text) == cuda


@given(st.text())
def test_any_version_file_can_be_read(text):
    parse_torch_cuda(text)
    parse_torch_cuda(f"cuda = '{text}'")


@given(st.binary())
def test_any_loader_cache_can_be_read(content):
    parse_loader_cache(content)


def test_the_plugin_is_the_one_that_nccl_loads(tmp_path):
    for name in ("a/libnccl-net-ofi.so", "b/libnccl-net.so", "c/libnccl-net.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    env = {"LD_LIBRARY_PATH": f"{tmp_path}/a:{tmp_path}/b::{tmp_path}/c:/no/such"}
    assert find_net_plugin(env, root=tmp_path) == f"{tmp_path}/b/libnccl-net.so"
    assert find_net_plugin({**env, "NCCL_NET_PLUGIN": "ofi"}, root=tmp_path) == f"{tmp_path}/a/libnccl-net-ofi.so"
    assert find_net_plugin({**env, "NCCL_NET_PLUGIN": "none"}, root=tmp_path) is None
    assert find_net_plugin({}, root=tmp_path) is None


def test_the_loader_s_cache_is_asked_too(tmp_path):
    (tmp_path / "etc").mkdir()
    cache = b"glibc-ld.so.cache1.1\0\1\2libz.so\0/lib/libz.so\0libnccl-net.so\0/opt/hpcx/lib/libnccl-net.so\0\xff"
    (tmp_path / "etc/ld.so.cache").write_bytes(cache)
    assert find_net_plugin({}, root=tmp_path) == "/opt/hpcx/lib/libnccl-net.so"


def test_the_environment_holds_what_changes_a_group():
    chosen = {
        "NCCL_ALGO": "Ring", "GLOO_SOCKET_IFNAME": "ens1f1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "x", "CUDA_VISIBLE_DEVICES": "0,1", "UCX_TLS": "rc", "FI_PROVIDER": "efa",
        "LD_LIBRARY_PATH": "/opt", "LD_PRELOAD": "a.so", "PYTHONPATH": "/x", "OMP_NUM_THREADS": "8",
        "NVIDIA_DRIVER_CAPABILITIES": "all", "NCCL_IB_PKEY": "0x8001",
    }  # fmt: skip
    left_out = {
        "HOME": "/root", "RANK": "0", "TORCHELASTIC_RUN_ID": "x", "OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "0",
        "HF_TOKEN": "secret", "NCCL_API_KEY": "secret", "TORCH_PASSWORD": "secret", "fi_secret": "secret",
        "CUDA_SECRET_X": "secret", "NCCL_HOSTID": "n1", "NVIDIA_VISIBLE_DEVICES": "GPU-1", "NCCLX": "1",
    }  # fmt: skip
    assert select_environment({**left_out, **chosen}) == chosen


def test_the_environment_is_bounded():
    many = {f"NCCL_V{i:03}": "x" * 10_000 for i in range(300)} | {"LD_PRELOAD": "a.so"}
    chosen = select_environment(many)
    assert len(chosen) == 100
    assert chosen["LD_PRELOAD"] == "a.so"
    assert {len(value) for name, value in chosen.items() if name != "LD_PRELOAD"} == {512}


@given(st.text())
def test_any_text_can_be_sent(text):
    assert len(cut(text).encode()) <= 4 * 512


def test_bytes_that_are_no_utf8_become_escapes():
    assert cut(os.fsdecode(b"/opt/\xff")) == "/opt/\\udcff"


def test_the_configuration_of_nccl_is_hashed(tmp_path):
    env = {"HOME": str(tmp_path / "home")}
    assert hash_nccl_conf(env, root=tmp_path) is None
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("NCCL_DEBUG=WARN\n")
    content = b"NCCL_DEBUG=WARN\n"
    only_etc = hashlib.sha256(len(content).to_bytes(8, "big") + content).hexdigest()
    assert hash_nccl_conf(env, root=tmp_path) == only_etc
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.nccl.conf").write_text("NCCL_ALGO=Ring\n")
    assert hash_nccl_conf(env, root=tmp_path) not in (None, only_etc)
    # NCCL_CONF_FILE takes the place of the one at home, also where it does not exist.
    assert hash_nccl_conf({**env, "NCCL_CONF_FILE": str(tmp_path / "none")}, root=tmp_path) == only_etc


def test_a_configuration_that_cannot_be_read_is_no_missing_one(tmp_path):
    (tmp_path / "etc/nccl.conf").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        hash_nccl_conf({}, root=tmp_path)
