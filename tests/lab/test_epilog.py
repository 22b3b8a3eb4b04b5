"""Does a real SLURM run the epilog of the how-to, and keep all its nodes whatever becomes of it?"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import wait_until

from .conftest import TestLab

pytestmark = pytest.mark.lab

PAGE = Path(__file__).parents[2] / "docs/how-to/bad-nodes.md"
ALLRANKS = f"{shlex.quote(sys.executable)} -m allranks"
OOM = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
Install = Callable[[str], None]


def script_of_the_page(allranks: str, to: Path) -> str:
    """The script that the how-to tells people to install, with other paths."""
    found = re.search(r"```bash\n(#!/bin/sh\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    script = found[1].replace("/opt/allranks/bin/allranks", allranks).replace("/shared/allranks", str(to))
    assert (allranks in script, str(to) in script) == (True, True)
    return script


@pytest.fixture
def install(six_nodes: TestLab) -> Iterator[Install]:
    """Make a script the Epilog of the lab; SLURM would stop one that takes 10 s, and drain its node."""
    conf = six_nodes.lab.dir / "slurm/slurm.conf"
    before, epilog = conf.read_text(), six_nodes.lab.dir / "slurm/epilog"

    def run(script: str) -> None:
        epilog.write_text(script)
        epilog.chmod(0o755)
        conf.write_text(f"{before}Epilog={epilog}\nPrologEpilogTimeout=10\n")
        six_nodes.ask("scontrol", "reconfigure")

    yield run
    conf.write_text(before)
    six_nodes.ask("scontrol", "reconfigure")


def start_job(lab: TestLab, folder: Path, command: str) -> str:
    """Start a job on two nodes; returns its id."""
    options = ["-N2", "--parsable", f"--chdir={folder}", f"--wrap={command}"]
    return lab.do("master-node", "sbatch", *options).stdout.strip()


def wait_for_epilogs(lab: TestLab, job: str) -> None:
    """Wait until a job has ended, with all its epilogs."""
    states = re.compile(r"JobState=(PENDING|RUNNING|COMPLETING)")
    wait_until(lambda: not states.search(lab.ask("scontrol", "show", "job", job)), "the epilogs end")


SLOW_SETSID = """\
#!{python} -IS
import os, sys, time
if os.fork() == 0:
    time.sleep(0.3)  # as on a busy machine: the epilog has ended, and slurmd kills its process group
    os.setsid()
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def test_a_job_is_explained_and_costs_no_node(six_nodes: TestLab, install: Install, tmp_path: Path) -> None:
    to, setsid = tmp_path / "ends", tmp_path / "setsid"
    to.mkdir()
    setsid.write_text(SLOW_SETSID.format(python=sys.executable))
    setsid.chmod(0o755)
    install(script_of_the_page(ALLRANKS, to).replace("setsid -f", f"{setsid} -f"))
    bad = start_job(six_nodes, tmp_path, f"echo '{OOM}' >&2; exit 1")
    well = start_job(six_nodes, tmp_path, "true")
    wait_until(lambda: len(read(to)) == 2, "a line for each job")
    failed, healthy = (read(to)[job] for job in (bad, well))
    assert (failed["state"], failed["is_failed"], healthy["state"]) == ("FAILED", True, "COMPLETED")
    assert "is_failed" not in healthy
    assert (
        failed["nodes"] == six_nodes.ask("squeue", "--noheader", "--states=all", f"--jobs={bad}", "--format=%N").strip()
    )
    assert six_nodes.is_idle()


def read(to: Path) -> dict[str, dict[str, object]]:
    lines = [json.loads(line) for path in to.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert len({line["job"] for line in lines}) == len(lines)  # each job once, although two nodes ran its epilog
    return {line["job"]: line for line in lines}


def test_an_epilog_that_hangs_or_fails_drains_no_node(six_nodes: TestLab, install: Install, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 30\n")
    hangs.chmod(0o755)
    for script in (
        script_of_the_page(str(hangs), tmp_path),
        script_of_the_page("/nowhere/allranks", tmp_path),
        f"#!/bin/sh\nexec {ALLRANKS} why --epilog --no-such-option\n",
    ):
        install(script)
        wait_for_epilogs(six_nodes, start_job(six_nodes, tmp_path, "true"))
        assert six_nodes.is_idle(), script
