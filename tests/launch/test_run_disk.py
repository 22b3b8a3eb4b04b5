"""Does a job outlive the end of its run directory: full, without inodes, removed, unmounted? And is that said, once?"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.report.runs import find_run
from conftest import Allranks, without_waiting, write

pytestmark = pytest.mark.torch
RUN = ("run", "--ignore", "AR011", "--master-port", "0")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """Where `small_disk` mounts one."""
    if os.geteuid() != 0:
        pytest.skip("mounts a file system")
    path = tmp_path / "disk"
    path.mkdir()
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)


def small_disk(path: Path, options: str) -> Path:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], check=True)
    return path / "runs"


def test_ranks_go_on_while_the_ballast_is_used_up_and_the_end_is_written(
    allranks: Allranks, tmp_path: Path, mount: Path
) -> None:
    """Another writer fills a disk of 100 MB; from the ballast's end on, ranks meet ENOSPC, and the verdict is there."""
    runs = small_disk(mount, "size=100m")
    write(
        tmp_path / "train.py",
        """
        import os, sys, time

        disk, deadline = sys.argv[1], time.monotonic() + 60

        def fill(name):
            with open(f"{disk}/{name}", "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1 << 16))
                except OSError:
                    pass

        while (room := os.statvfs(disk)) and (room.f_blocks - room.f_bfree) * room.f_bsize < 3 << 20:
            assert time.monotonic() < deadline, "the ballast is not there"
            time.sleep(0.05)
        fill("other")
        while os.statvfs(disk).f_bavail < 400 and time.monotonic() < deadline:
            time.sleep(0.05)
        print("x" * 100_000, flush=True)
        time.sleep(2.5)
        fill("another")
        try:
            print("y" * 100_000, flush=True)
        except OSError as exc:
            sys.stdout = open(os.devnull, "w")
            raise SystemExit(3 if exc.errno == 28 else 4)
        """,
    )
    result = allranks(*RUN, "--log-dir", runs, "train.py", mount)
    assert result.stdout.startswith("x" * 100_000)
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if "the run directory was full" in line]
    assert len(said) == 1, result.stderr
    assert "allranks gave back 3.1 MiB that it had kept there" in said[0]
    assert "not written" not in result.stderr
    run = find_run("latest", runs)
    assert run is not None
    assert run.verdict is not None
    assert run.verdict.exit_code == result.returncode
    assert "FAILED" in allranks("list", "--log-dir", runs).stdout


def test_ranks_whose_files_cannot_be_made_could_not_start(allranks: Allranks, tmp_path: Path, mount: Path) -> None:
    """Without inodes for them: no traceback of the agent, one reason for each."""
    runs = small_disk(mount, "size=100m,nr_inodes=12")
    write(tmp_path / "train.py", "print('here')\n")
    result = allranks(*RUN, "--ignore", "AR005", "--nproc-per-node", "4", "--log-dir", runs, "train.py")
    assert "Traceback" not in result.stderr
    assert "No space left on device: '" in result.stderr
    assert result.returncode not in (0, 1)
    run = find_run("latest", runs)
    assert run is not None
    assert run.verdict is not None
    assert run.verdict.exit_code == result.returncode


@pytest.mark.parametrize("how", ["rm -r {runs}/2*", "umount --lazy {mount}"])
def test_a_job_goes_on_without_its_directory_and_does_not_promise_its_output(
    allranks: Allranks, tmp_path: Path, mount: Path, how: str
) -> None:
    runs = small_disk(mount, "size=2g")
    write(
        tmp_path / "train.py",
        """
        import os, sys, time

        print("before", flush=True)
        time.sleep(0.5)
        assert os.system(sys.argv[1]) == 0
        time.sleep(4)
        print("after", flush=True)
        """,
    )
    result = allranks(*RUN, "--log-dir", runs, "train.py", how.format(runs=runs, mount=mount))
    assert (result.returncode, result.stdout) == (0, "before\nafter\n")
    *_, gone, last = without_waiting(result.stderr).splitlines()
    assert "the run directory is gone on " in gone
    assert result.stderr.count("is gone") == 1
    assert last.startswith("allranks: train.py succeeded: 1 rank, ")
    assert last.partition("; ")[2].startswith("the output is not in ")
