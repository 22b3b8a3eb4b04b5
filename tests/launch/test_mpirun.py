"""Real mpirun of Open MPI and MPICH (apt-get install openmpi-bin mpich): agents and ranks that they start.

Two nodes are this machine under two names: the launchers' ssh is a script that changes the host name of its own UTS
namespace, so that needs root.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import HANG_S, clean_env, free_port

OPEN_MPI, MPICH = "mpirun.openmpi", "mpiexec.hydra"
HAS_NAMES = os.geteuid() == 0 and shutil.which("unshare") is not None
SSH = """\
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec unshare --uts sh -c 'hostname "$0"; exec sh -c "$*"' "$host" "$@"
"""
SAY = 'import os; print(*(os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")), flush=True)'
SESSION = """\
import allranks
with allranks.session(backend="gloo") as s:
    s.barrier()
    print("rank", s.rank, "of", s.world_size, "local", s.local_rank, flush=True)
"""


@pytest.fixture(params=[OPEN_MPI, MPICH])
def launcher(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        package = {OPEN_MPI: "openmpi-bin", MPICH: "mpich"}[request.param]
        pytest.skip(f"no {request.param}: apt-get install {package}")
    return str(request.param)


def own_address() -> str:
    """An address of this machine that is not loopback; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
            return str(sock.getsockname()[0])
        except OSError:
            pytest.skip("no network interface but loopback")


def mpirun(
    launcher: str, tmp_path: Path, *command: str, each: int = 1, names: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """Start `each` processes on every named node, or on this machine."""
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    count = str(each * (len(names.split(",")) if names else 1))
    if launcher == OPEN_MPI:
        hosts = ",".join(f"{name}:{each}" for name in names.split(","))
        nodes = ["--host", hosts, "--mca", "plm_rsh_agent", str(ssh), "--map-by", f"ppr:{each}:node"] if names else []
        words = [launcher, "--oversubscribe", *nodes, "-np", count, *(word for name in env for word in ("-x", name))]
    else:
        nodes = ["-launcher", "ssh", "-launcher-exec", str(ssh), "-hosts", names, "-ppn", str(each)] if names else []
        words = [launcher, *nodes, "-n", count]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        [*words, *command],
        cwd=tmp_path,
        env=clean_env(os.environ) | root | env,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


ALLRANKS = (sys.executable, "-m", "allranks", "run")


@pytest.mark.skipif(not HAS_NAMES, reason="two host names on one machine need root and unshare")
def test_agents_of_two_nodes_make_one_job_from_master_addr_alone(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text(SAY)
    ended = mpirun(
        launcher,
        tmp_path,
        *ALLRANKS,
        *("--nproc-per-node", "2", "say.py"),
        names="nodea,nodeb",
        MASTER_ADDR=own_address(),
        MASTER_PORT=str(free_port()),
        ALLRANKS_SECRET="of this test",
    )
    assert ended.returncode == 0, ended.stderr
    places = sorted(line.split()[-4:] for line in ended.stdout.splitlines() if line.strip())
    assert places == [["0", "4", "0", "0"], ["1", "4", "1", "0"], ["2", "4", "0", "1"], ["3", "4", "1", "1"]]


@pytest.mark.skipif(not HAS_NAMES, reason="two host names on one machine need root and unshare")
def test_agents_of_two_nodes_without_an_address_ask_for_it(launcher: str, tmp_path: Path) -> None:
    ended = mpirun(launcher, tmp_path, *ALLRANKS, "--no-python", "true", names="nodea,nodeb")
    assert ended.returncode != 0
    assert "MPI does not tell the address of the first node; give it with --rdzv-endpoint HOST:PORT" in ended.stderr


def test_two_agents_on_one_machine_are_refused_with_the_command(launcher: str, tmp_path: Path) -> None:
    ended = mpirun(launcher, tmp_path, *ALLRANKS, "--no-python", "true", each=2)
    assert ended.returncode != 0
    assert "this node has 2 agents" in ended.stderr
    assert "mpirun --map-by ppr:1:node allranks run ... (Open MPI)" in ended.stderr


@pytest.mark.torch
def test_ranks_of_mpirun_hold_a_session(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SESSION)
    ended = mpirun(
        launcher,
        tmp_path,
        sys.executable,
        "train.py",
        each=2,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    assert ended.returncode == 0, ended.stderr
    said = sorted(line for line in ended.stdout.splitlines() if line.startswith("rank"))
    assert said == ["rank 0 of 2 local 0", "rank 1 of 2 local 1"]
