"""The card's facts: read on this machine, on broken ones, and against the deadline."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from fake_nvidia_smi import install, install_script

from allranks.host.node import begin_card_facts, read_card_facts, read_facts, read_scheduler
from allranks.model.card import Facts
from allranks.model.fix import SchedulerKind


def children() -> set[str]:
    found = subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return {line for line in found.stdout.splitlines() if not line.startswith("ps ")}


def test_this_machine_is_read():
    facts = read_card_facts(os.environ, names=["localhost"], deadline_s=30)
    assert facts.host_name == socket.gethostname()
    assert list(facts.resolved) == [facts.host_name, "localhost"]
    assert "lo" in [nic.name for nic in facts.interfaces]
    assert facts.num_cpus >= 1
    assert facts.python_version == ".".join(map(str, sys.version_info[:3]))
    assert "msgspec" in facts.packages
    assert [place.purpose for place in facts.places][:2] == ["/dev/shm", "TMPDIR"]
    assert abs(facts.clock_s - time.time()) < 60


@pytest.mark.parametrize(
    ("env", "number"),
    [
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_GPUS": "0,1"}, 4),
        ({"SLURM_STEP_GPUS": "0,1,3"}, 3),  # SLURM 20.11 with --gpus-per-node, recorded
        ({"SLURM_STEP_GPUS": "GPU-1a2b"}, None),
        ({}, None),
    ],
)
def test_the_gpus_that_slurm_promises(env: dict[str, str], number: int | None):
    assert read_facts(env).num_promised_gpus == number


def test_facts_fit_on_a_card():
    env = {f"NCCL_{i}": "x" * 1000 for i in range(200)} | {"HOME": "/nowhere"}
    encoded = msgspec.msgpack.encode(read_card_facts(env, deadline_s=30))
    assert len(encoded) < 64 << 10
    assert msgspec.msgpack.decode(encoded, type=Facts)


def test_a_machine_without_anything_says_what_is_missing(tmp_path):
    facts = read_card_facts({"PATH": str(tmp_path)}, deadline_s=30, root=tmp_path)
    assert facts.unread["gpus"] == "nvidia-smi: not installed"
    assert facts.unread["fabric_manager"] == "systemctl: not installed"
    assert facts.unread["xids"] == "no permission"
    assert (facts.gpus, facts.rdma_ports, facts.boot_id, facts.port_range) == ((), (), None, None)
    assert {place.purpose: place.problem for place in facts.places} == {
        "/dev/shm": "No such file or directory",
        "TMPDIR": "No such file or directory",
    }
    assert not [name for name in facts.unread if "." in name]


def test_facts_that_are_read_beside_are_there_for_whoever_asks_again(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    read = begin_card_facts(os.environ, script_path=script)
    assert read() is read()
    assert read().code.script == str(script)


def test_a_script_that_cannot_be_read_says_why(tmp_path):
    facts = read_card_facts({"PATH": ""}, script_path=tmp_path / "gone.py", deadline_s=30)
    assert (facts.code, facts.unread["code"]) == (None, "No such file or directory")


def test_an_infiniband_port_without_ibv_devinfo_has_no_mtu(tmp_path):
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text("InfiniBand\n")
    facts = read_card_facts({"PATH": ""}, deadline_s=30, root=tmp_path)
    assert [each.active_mtu for each in facts.rdma_ports] == [None]
    assert facts.unread["rdma_ports.active_mtu"] == "ibv_devinfo: not installed"


def test_gpus_come_with_their_details(tmp_path):
    facts = read_card_facts(install(tmp_path, "550-h100"), deadline_s=30)
    assert facts.driver_version == "550.90.07"
    assert [(g.fabric_state, g.remap_failed, g.nvlinks_active) for g in facts.gpus] == [
        ("Completed", False, 3),
        ("In Progress", True, 2),
    ]
    assert facts.gpus[1].processes[0] == "python3 (pid 3999999, 14336 MiB)"
    assert "gpus" not in facts.unread


def test_a_pod_without_its_variables_is_known_by_its_account(tmp_path):
    assert read_scheduler({}, root=tmp_path) is SchedulerKind.NONE
    (tmp_path / "var/run/secrets/kubernetes.io/serviceaccount").mkdir(parents=True)
    assert read_scheduler({}, root=tmp_path) is SchedulerKind.POD
    assert read_scheduler({"SLURM_JOB_ID": "7"}, root=tmp_path) is SchedulerKind.SLURM


def test_a_hanging_driver_costs_the_deadline_and_nothing_else(tmp_path):
    env = install(tmp_path / "bin", "550-h100", delay_s=600)
    before = children()
    start_s = time.monotonic()
    facts = read_card_facts({**env, "HOME": str(tmp_path)}, deadline_s=4)
    assert time.monotonic() - start_s < 25
    assert facts.unread["gpus"] == "nvidia-smi: no answer within 4 s"
    assert facts.interfaces
    assert [place.is_writable for place in facts.places if place.purpose == "HOME"] == [True]
    assert children() == before


def test_a_directory_that_hangs_is_named(tmp_path, monkeypatch):
    statvfs = os.statvfs
    hanging = threading.Event()

    def hang(path: str | Path) -> os.statvfs_result:
        if "gone" in str(path):
            hanging.wait(30)
        return statvfs(path)

    monkeypatch.setattr(os, "statvfs", hang)
    start_s = time.monotonic()
    facts = read_card_facts({"HOME": str(tmp_path)}, run_dir=tmp_path / "gone", deadline_s=4)
    elapsed_s = time.monotonic() - start_s
    hanging.set()
    assert elapsed_s < 25
    places = {place.purpose: place for place in facts.places}
    assert places["run directory"].problem == "no answer within 4 s"
    assert places["run directory"].path == str(tmp_path / "gone")
    assert places["HOME"].is_writable


def test_a_resolver_that_hangs_is_named(monkeypatch):
    hanging = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        hanging.wait(30)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    facts = read_card_facts({"PATH": ""}, names=["node03"], deadline_s=2)
    hanging.set()
    assert facts.unread["resolved"] == f"no answer within 2 s for {facts.host_name}, node03"


def test_a_reader_that_fails_is_named(monkeypatch):
    monkeypatch.setattr("allranks.host.clock.read_clock_state", lambda: 1 / 0)
    facts = read_card_facts({}, deadline_s=30)
    assert facts.is_clock_synchronised is None
    assert facts.unread["is_clock_synchronised"] == "division by zero"


def test_the_nonce_of_the_run_directory_is_seen(tmp_path):
    (tmp_path / ".nonce").write_text("17e2")
    facts = read_card_facts({}, run_dir=tmp_path, deadline_s=30)
    assert [place.nonce for place in facts.places if place.purpose == "run directory"] == ["17e2"]
    assert [file.name for file in tmp_path.iterdir()] == [".nonce"]


@pytest.mark.parametrize("text", ["#!/bin/sh\nkill -9 $$\n", "#!/bin/sh\nhead -c 100000 /dev/urandom\n", "", "#!/no\n"])
def test_a_mad_nvidia_smi_is_survived(tmp_path, text):
    env = install_script(tmp_path, "nvidia-smi", text)
    (tmp_path / "head").symlink_to("/usr/bin/head")
    facts = read_card_facts(env, deadline_s=30)
    assert facts.gpus == ()
    assert facts.unread["gpus"].startswith("nvidia-smi: ")
    msgspec.msgpack.encode(facts)


def test_torch_is_not_imported():
    code = (
        "import os, sys; from allranks.host.node import read_card_facts as r; f = r(os.environ, deadline_s=30);"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout == "set()\n"
