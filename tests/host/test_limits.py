"""Limits, cores and directories."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.host.limits import count_cpus, name_places, read_limits, read_load, read_place
from conftest import write


def test_soft_limits_are_those_of_this_process():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (777, hard))
    try:
        assert read_limits()["nofile"] == 777
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert set(read_limits()) == {"memlock_bytes", "nofile", "stack_bytes", "nproc"}
    assert all(value is None or value >= 0 for value in read_limits().values())


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "reached"),
    [(256, 4096, 1000, 1000), (256, 900, 1000, 900), (2000, 4096, 1000, 2000), (1000, 1000, 1000, 1000)],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(soft, hard, wanted, reached):
    script = (
        "import resource\nfrom allranks.host.limits import raise_open_files, read_limits\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        f"print(raise_open_files({wanted}), read_limits()['nofile'])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == [str(reached)] * 2


AFFINITY = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, AFFINITY),
        ({"proc/self/cgroup": "0::/\n"}, AFFINITY),
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/cpu.max": "100000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/step/cpu.max": "max 100000\n"}, AFFINITY),
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/../../job\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "9900000 100000\n"}, AFFINITY),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "garbage\n"}, AFFINITY),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "100000 0\n"}, AFFINITY),
        (
            {
                "proc/self/cgroup": "5:memory:/a\n4:cpu,cpuacct:/slurm/job_7\n",
                "sys/fs/cgroup/cpu,cpuacct/slurm/job_7/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/slurm/job_7/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/job_7\n",
                "sys/fs/cgroup/cpu/job_7/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/job_7/cpu.cfs_period_us": "100000\n",
            },
            AFFINITY,
        ),
    ],
)
def test_a_quota_narrows_the_cores(tmp_path, files, cores):
    for name, text in files.items():
        write(tmp_path / name, text)
    assert count_cpus(root=tmp_path) == cores


@pytest.mark.parametrize(("text", "load"), [("3.25 1.0 0.5 2/311 812\n", 3.25), ("", None), ("x y", None)])
def test_the_load_is_the_first_number(tmp_path, text, load):
    write(tmp_path / "proc/loadavg", text)
    assert read_load(root=tmp_path) == load


def test_places_are_those_of_the_environment(tmp_path):
    env = {"TMPDIR": "/scratch/a b", "HOME": "/home/me"}
    assert name_places(env, run_dir=tmp_path / "runs/7") == {
        "/dev/shm": Path("/dev/shm"),
        "TMPDIR": Path("/scratch/a b"),
        "HOME": Path("/home/me"),
        "run directory": tmp_path / "runs/7",
    }
    assert name_places({}, root=tmp_path) == {"/dev/shm": tmp_path / "dev/shm", "TMPDIR": tmp_path / "tmp"}


def test_a_directory_is_written_to_and_left_as_it_was(tmp_path):
    place = read_place("TMPDIR", tmp_path)
    assert (place.is_writable, place.problem, place.path) == (True, None, str(tmp_path))
    assert place.free_bytes
    assert place.size_bytes
    assert place.size_bytes >= place.free_bytes
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_nameless_files_is_written_to_too(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # opening a directory for writing: EISDIR, as old kernels say
    assert read_place("TMPDIR", tmp_path).is_writable
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_says_so(tmp_path):
    place = read_place("run directory", tmp_path / "not here")
    assert (place.problem, place.is_writable, place.free_bytes) == ("No such file or directory", None, None)


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").touch()
    assert not read_place("TMPDIR", tmp_path / "file").is_writable


def test_a_path_with_a_null_byte_is_no_crash():
    assert read_place("TMPDIR", Path("/tmp/\0x")).problem


def test_a_path_that_is_no_utf8_can_be_sent(tmp_path):
    path = tmp_path / os.fsdecode(b"b\xff")
    path.mkdir()
    assert read_place("TMPDIR", path).path == f"{tmp_path}/b\\udcff"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc here")
def test_a_read_only_file_system_is_not_writable():
    place = read_place("HOME", Path("/proc"))
    assert place.is_writable is False
    assert place.problem


def test_only_the_run_directory_shows_the_nonce(tmp_path):
    (tmp_path / ".nonce").write_text("4f2a\n")
    assert read_place("run directory", tmp_path).nonce == "4f2a"
    assert read_place("HOME", tmp_path).nonce is None


def test_a_run_directory_without_the_file_has_no_nonce(tmp_path):
    assert read_place("run directory", tmp_path).nonce is None
