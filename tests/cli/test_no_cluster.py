"""Do all verbs that need SLURM say the same, with one exit code, where this machine belongs to no cluster?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from allranks.cli.lab import SIX_NODES
from allranks.config.file import read_cluster
from allranks.lab.hosts import find_inits
from conftest import Allranks, wait_until, write
from fake_slurm import TOOLS, FakeSlurm, assert_one_line, fake_slurm  # noqa: F401  (a fixture)

CURE = "SLURM's commands need it: load the slurm module, or log in to a login node of the cluster"
# As SLURM 22.05 says it, without a slurm.conf and without a DNS record of a controller.
WORDS = """\
{tool}: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
{tool}: error: fetch_config: DNS SRV lookup failed
{tool}: error: _establish_config_source: failed to fetch config
{tool}: fatal: Could not establish a configuration source
"""
VERBS = {
    ("status", "12"): "scontrol",
    ("logs", "12"): "scontrol",
    ("cancel", "12"): "scontrol",
    ("why", "12"): "scontrol",
    ("stack", "12"): "scontrol",
    ("submit", "--nodes", "2", "train.py"): "sbatch",
    ("submit", "--dry-run", "--nodes", "2", "train.py"): "sbatch",
    ("check", "--nodes", "2"): "srun",
    ("init",): "sinfo",
}


@pytest.fixture
def allranks(allranks_here: Allranks) -> Allranks:
    return allranks_here


@pytest.fixture
def without_cluster(slurm: FakeSlurm, tmp_path: Path) -> FakeSlurm:
    """SLURM's commands are installed, and find no cluster."""
    (tmp_path / "train.py").touch()
    (slurm.bin / "srun").write_bytes((slurm.bin / "squeue").read_bytes())
    (slurm.bin / "srun").chmod(0o755)
    for tool in (*TOOLS, "srun"):
        slurm.answer(tool, err=WORDS.format(tool=tool), code=1)
    return slurm


@pytest.fixture
def labs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # of SLURM's files, so its path must be short
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_where_a_lab_is_up_the_command_for_it_is_said(
    without_cluster: FakeSlurm, allranks: Allranks, tmp_path: Path, labs: Path
) -> None:
    write(tmp_path / "runs/12/submission.sh", "#!/bin/bash\n")
    write(tmp_path / "runs/12/attempt_0/node01/env.json", "[]")
    (tmp_path / "runs/latest").symlink_to("12")
    for name in ("second", "gone"):
        plan = {"cluster": msgspec.to_builtins(read_cluster(SIX_NODES).cluster)}
        write(labs / name / "lab.json", json.dumps(plan))
    env = {"ALLRANKS_LAB_DIR": str(labs)}
    # Process 1 of a node, as far as another process sees it.
    node = [sys.executable, "-c", "input()", "lab/init.py", str(labs / "second"), "master-node"]
    with subprocess.Popen(["unshare", "--pid", "--fork", *node], stdin=subprocess.PIPE) as started:
        wait_until(lambda: "master-node" in find_inits(labs / "second"), "the node")
        go_on = "a lab is up here: allranks lab exec --name second master-node -- allranks"
        for verb in (("cancel", "latest"), ("why", "12"), ("stack", "12"), ("submit", "--nodes", "2", "train.py")):
            result = allranks(*verb, env=env)
            assert f"no slurm.conf on this machine; SLURM's commands need it: {go_on} {' '.join(verb)}" in result.stderr
            assert_one_line(result.stderr)
            assert result.returncode == 78
        assert allranks("list", env=env).stderr == (
            "allranks: SLURM was not asked (squeue: no slurm.conf on this machine), so its pending and running jobs "
            f"are missing here; {go_on} list\n"
        )
        started.communicate(b"\n")  # it ends


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_without_a_slurm_conf_it_is_said_in_one_sentence(
    verb: tuple[str, ...], without_cluster: FakeSlurm, allranks: Allranks
) -> None:
    result = allranks(*verb)
    assert result.returncode == 78
    *_, last = result.stderr.splitlines(keepends=True)
    assert_one_line(last)
    assert f"{VERBS[verb]}: no slurm.conf on this machine; {CURE}" in last
    assert "resolve_ctls" not in result.stderr


@pytest.mark.parametrize(
    "verb", [("status", "12"), ("stack", "12"), ("check", "--nodes", "2"), ("init",)], ids=" ".join
)
def test_a_slurm_conf_that_is_not_there_is_said_without_asking(
    verb: tuple[str, ...], without_cluster: FakeSlurm, allranks: Allranks
) -> None:
    result = allranks(*verb, env={"SLURM_CONF": "/gone/slurm.conf"})
    assert result.returncode == 78
    *_, last = result.stderr.splitlines(keepends=True)
    assert_one_line(last)
    assert f"{VERBS[verb]}: SLURM_CONF=/gone/slurm.conf: no such file; {CURE}" in last
    assert without_cluster.calls() == []


def test_a_list_of_nothing_is_empty(without_cluster: FakeSlurm, allranks: Allranks) -> None:
    result = allranks("list")
    assert (result.returncode, result.stdout) == (0, "")
    words = "you have no pending or running job (squeue: no slurm.conf on this machine), and runs has no run"
    assert result.stderr == f"allranks: {words}\n"


def test_a_job_that_left_its_run_directory_is_known_from_it(
    without_cluster: FakeSlurm, allranks: Allranks, tmp_path: Path
) -> None:
    write(tmp_path / "runs" / "12" / "attempt_0" / "node01" / "rank_0.out", "step 3\n")
    result = allranks("status", "12")
    words = "job 12: SLURM was not asked (scontrol: no slurm.conf on this machine); its output is in its run directory"
    assert (result.returncode, result.stdout.splitlines()[0]) == (0, words)
    result = allranks("logs", "12")
    assert (result.returncode, result.stdout) == (0, "[node01 r0] step 3\n")
