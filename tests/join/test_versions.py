"""Is it said what a torch lacks, and do the doors to its private parts find what it has?"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import allranks
from allranks.join import group
from allranks.launch.worker_environment import describe_torch
from conftest import Allranks, write
from versions.table import FEATURES


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("2.4.0", True), ("2.8.0+cu128", True), ("2.15.0", True), ("2.15.1+cpu", True), ("2.3.1", False),
        ("2.16.0", False), ("3.0.0", False), ("2.15.0.dev20261101+cpu", False), ("2.15.0a0+gitabc", False),
        ("nightly", False),
    ],
)  # fmt: skip
def test_a_version_outside_of_the_range_and_a_nightly_are_untested(version: str, is_tested: bool):
    assert group.is_tested(version) is is_tested


@pytest.mark.parametrize(
    ("version", "features"),
    [
        ("2.4.1", ["flight recorder", "kept port"]), ("2.7.1+cu126", ["flight recorder", "kept port"]),
        ("2.8.0", []), ("2.10.0", []), ("2.99.0", []), ("nightly", []),
    ],
)  # fmt: skip
def test_what_a_version_lacks(version: str, features: list[str]):
    assert [lack.name for lack in describe_torch(version)[1:]] == features


def test_the_explanation_has_the_version_and_each_lack():
    settings = describe_torch("2.5.1+cu124")
    assert [(each.name, each.value) for each in settings] == [
        ("torch", "2.5.1+cu124"), ("flight recorder", "none for gloo"), ("kept port", "without libuv"),
    ]  # fmt: skip
    assert settings[0].reason == "allranks was tested with 2.4 to 2.15"
    (untested,) = describe_torch("2.16.0")
    assert untested.reason == "allranks was tested with 2.4 to 2.15; with this one the guard may see less"


def test_each_feature_has_a_door():
    root = Path(allranks.__file__).parent
    for door in FEATURES.values():
        file, _, name = door.partition(", ")
        assert name in (root / file).read_text()


def test_explain_says_the_version(allranks: Allranks):
    pytest.importorskip("torch")
    said = allranks("env", "--explain").stdout
    assert "allranks was tested with 2.4 to 2.15  " in next(x for x in said.splitlines() if x.startswith("torch "))


@pytest.mark.parametrize("has_libuv_fd", [True, False])
def test_a_torch_whose_libuv_takes_no_socket_gets_its_other_server(monkeypatch: pytest.MonkeyPatch, has_libuv_fd: bool):
    """Torch before 2.8 says: NotImplementedError: TCPStore(... use_libuv=True, master_listen_fd=...)."""
    asked: list[bool] = []

    def connect(*, use_libuv: bool, master_listen_fd: int) -> str:
        asked.append(use_libuv)
        with socket.socket(fileno=master_listen_fd) as own:
            assert own.getsockname()[1] == port
        if use_libuv and not has_libuv_fd:
            raise NotImplementedError("LibUVStoreDaemon does not support master_listen_fd")
        return "store"

    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        monkeypatch.setenv("ALLRANKS_STORE_FD", str(held.fileno()))
        assert group._serve(connect, port, True) == "store"
    assert asked == ([True] if has_libuv_fd else [True, False])


@pytest.mark.parametrize(
    ("inside", "env", "wanted"),
    [
        ({}, {"TORCH_FR_BUFFER_SIZE": "512"}, "512"),
        ({}, {"TORCH_FR_BUFFER_SIZE": "512", "TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}, "9"),
        ({"_dump_fr_trace_json": print}, {"TORCH_FR_BUFFER_SIZE": "512"}, None),  # there the old name warns
    ],
)
def test_the_recorders_size_has_the_name_that_this_torch_reads(
    monkeypatch: pytest.MonkeyPatch, inside: dict[str, Any], env: dict[str, str], wanted: str | None
):
    fake = SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=SimpleNamespace(**inside)))
    monkeypatch.setitem(group.sys.modules, "torch", fake)
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    group._name_recorder_size()
    assert os.environ.pop("TORCH_NCCL_TRACE_BUFFER_SIZE", None) == wanted


@pytest.mark.torch
def test_a_job_under_an_unknown_torch_says_so_once_and_runs(allranks: Allranks, tmp_path: Path):
    write(
        tmp_path / "train.py",
        """
        import os
        import torch
        torch.__version__ = "2.99.0.dev20270101"
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()  # rank 0's end would close connections that rank 1 still opens
        dist.destroy_process_group()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        """,
    )
    ended = allranks("run", "--nproc-per-node", "2", "--max-restarts", "1", "train.py")
    assert ended.returncode == 0, ended.stderr
    said = (
        "torch 2.99.0.dev20270101 was not tested with allranks (2.4 to 2.15 were): the job runs, but the guard may see"
    )
    assert ended.stderr.count(said) == 1
