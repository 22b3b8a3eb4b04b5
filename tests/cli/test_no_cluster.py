"""Do all verbs that need SLURM say the same, with one exit code, where this machine belongs to no cluster?"""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Allranks, write
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
    ("stack", "12"): "squeue",
    ("submit", "--nodes", "2", "train.py"): "sbatch",
    ("submit", "--dry-run", "--nodes", "2", "train.py"): "sbatch",
    ("check", "--nodes", "2"): "srun",
    ("init",): "sinfo",
}


@pytest.fixture
def without_cluster(slurm: FakeSlurm, tmp_path: Path) -> FakeSlurm:
    """SLURM's commands are installed, and find no cluster."""
    (tmp_path / "train.py").touch()
    (slurm.bin / "srun").write_bytes((slurm.bin / "squeue").read_bytes())
    (slurm.bin / "srun").chmod(0o755)
    for tool in (*TOOLS, "srun"):
        slurm.answer(tool, err=WORDS.format(tool=tool), code=1)
    return slurm


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
