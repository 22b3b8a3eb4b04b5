"""Do the agents of a SLURM step find each other without a flag? Its variables are simulated, all else is real."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from allranks.host.node import NodeFacts
from allranks.launch.job import _do_not_begin
from allranks.model.card import Facts
from allranks.model.world import Launcher
from allranks.preflight.applicant import Applicant, NodePlan
from allranks.report.rundir import RunDir
from allranks.wire.protocol import Goodbye
from conftest import Allranks, allranks_command, clean_env, free_port, without_waiting

SHOW = """\
import json, os
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "ALLRANKS_NODE")
print(json.dumps({name: os.environ[name] for name in names}))
"""


def step(index: int, *, num_nodes: int, job: str = "4711", **more: str) -> dict[str, str]:
    """What srun sets for task `index` of a step with one task a node."""
    return {
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NUM_NODES": str(num_nodes),
        "SLURM_JOB_NODELIST": f"node[01-{num_nodes:02}]",
        "SLURM_NTASKS": str(num_nodes),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(num_nodes),
        "SLURM_STEP_NUM_NODES": str(num_nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{num_nodes})",
        "SLURM_STEP_NODELIST": f"node[01-{num_nodes:02}]",
        "SLURM_PROCID": str(index),
        "SLURM_NODEID": str(index),
        "SLURM_LOCALID": "0",
        "SLURM_GTIDS": str(index),
        "SLURMD_NODENAME": f"node{index + 1:02}",
        **more,
    }


class Step:
    """A step whose agents are all started at once, in one directory, as on a shared file system."""

    def __init__(self, folder: Path, *, num_nodes: int, absent: tuple[int, ...] = (), **more: str) -> None:
        (folder / "show.py").write_text(SHOW)
        # Jobs of other tests have the same id: on one port, an agent could come to a leader of theirs.
        limits = f"[network]\nport = {free_port()}\n[guard]\njoin_s = {12 if absent else 90}\n"
        (folder / "fast.toml").write_text(limits)
        self._agents = {
            index: subprocess.Popen(
                allranks_command("run", "--cluster", "fast.toml", "show.py"),
                cwd=folder,
                env=clean_env(os.environ, **step(index, num_nodes=num_nodes, **more)),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in reversed(range(num_nodes))
            if index not in absent
        }
        self.out: dict[int, str] = {}
        self.err: dict[int, str] = {}
        try:
            for index, agent in self._agents.items():
                self.out[index], self.err[index] = agent.communicate(timeout=60)
        finally:
            for agent in self._agents.values():
                agent.kill()
                agent.wait()
        self.codes = {index: agent.returncode for index, agent in self._agents.items()}

    def shown(self, index: int) -> dict[str, str]:
        text: str = self.out[index].partition("] ")[2]
        result: dict[str, str] = json.loads(text)
        return result


def test_three_agents_form_one_group_without_flags(tmp_path: Path) -> None:
    run = Step(tmp_path, num_nodes=3)
    assert run.codes == {0: 0, 1: 0, 2: 0}, run.err
    worlds = [run.shown(index) for index in range(3)]
    assert [world["RANK"] for world in worlds] == ["0", "1", "2"]
    assert [world["ALLRANKS_NODE"] for world in worlds] == ["node01", "node02", "node03"]
    assert {world["WORLD_SIZE"] for world in worlds} == {"3"}
    assert len({(world["MASTER_ADDR"], world["MASTER_PORT"]) for world in worlds}) == 1
    assert run.out[1].startswith("[node02 r1] ")
    assert (tmp_path / "runs/4711/attempt_0/node03/rank_2.out").exists()


def test_a_requeued_job_starts_its_next_attempt_with_the_same_key(tmp_path: Path) -> None:
    first = Step(tmp_path, num_nodes=2)
    assert first.codes == {0: 0, 1: 0}, first.err
    key = (tmp_path / "runs/4711/secret").read_text()
    again = Step(tmp_path, num_nodes=2, SLURM_RESTART_COUNT="1")
    assert again.codes == {0: 0, 1: 0}, again.err
    assert (tmp_path / "runs/4711/secret").read_text() == key
    assert (tmp_path / "runs/4711/secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "runs/4711/attempt_1/node02/rank_1.out").exists()


def test_a_missing_node_is_named_and_all_that_came_end_alike(tmp_path: Path) -> None:
    run = Step(tmp_path, num_nodes=3, absent=(2,))
    assert run.codes == {0: 75, 1: 75}
    assert re.search(r"still waiting for node03 after \d+ s; 2 of 3 nodes have joined", run.err[0])
    assert "AR001 node-silent   node03 " in run.err[0]
    assert "the node's agent did not join within 12 s; 2 of 3 nodes joined" in run.err[0]
    assert without_waiting(run.err[1]) == ""
    verdict = json.loads((tmp_path / "runs/4711/attempt_0/verdict.json").read_text())
    assert verdict["findings"][0]["node"] == "node03"
    page = (tmp_path / "runs/4711/report.html").read_text()  # of a job that never began
    assert "AR001 node-silent · node03" in page
    assert "2 pairs tried in the roll call" in page


@pytest.mark.parametrize(
    ("launcher", "summary", "printed"),
    [
        (Launcher.SLURM, "stopped by SIGTERM", ""),
        (Launcher.SLURM, "", ""),
        (Launcher.NONE, "stopped by SIGTERM", "allranks: stopped by SIGTERM\n"),
        (Launcher.NONE, "", ""),
    ],
)
def test_a_leader_that_stops_is_quoted_where_this_agent_has_a_terminal_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], launcher: Launcher, summary: str, printed: str
) -> None:
    facts = NodeFacts(host="node02", interfaces=(), num_gpus=0, num_cpus=2)
    plan = NodePlan(
        job="4711", launcher=launcher, attempt=None, facts=facts, node_index=1, num_nodes=2, min_nodes=2
    )  # fmt: skip
    applicant = Applicant(
        plan=plan, shares_run_dir=True, run_dir=RunDir(tmp_path, "4711"), env={}, card_facts=Facts,
        check_signals=lambda: None,
    )  # fmt: skip
    assert _do_not_begin(Goodbye(exit_code=143, summary=summary), applicant) == 143
    assert capsys.readouterr().err == printed


def test_two_steps_of_one_job_do_not_meet(tmp_path: Path) -> None:
    first = Step(tmp_path, num_nodes=2)
    second = Step(tmp_path, num_nodes=2, SLURM_STEP_ID="1")
    assert first.codes == second.codes == {0: 0, 1: 0}, second.err
    assert (tmp_path / "runs/4711.1/attempt_0/node01/rank_0.out").exists()


def test_several_agents_on_a_node_are_refused_with_the_right_line(tmp_path: Path, allranks: Allranks) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    env = step(0, num_nodes=2) | {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}
    result = allranks("run", "show.py", env=env | {"SLURM_NTASKS": "16", "SLURM_GTIDS": "0,1,2,3,4,5,6,7"})
    assert result.returncode == 2
    assert "srun --ntasks-per-node=1 --nodes=2 --ntasks=2 allranks run" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("flags", [[], ["--standalone"]])
def test_a_batch_script_without_srun_is_no_world_of_one(tmp_path: Path, allranks: Allranks, flags: list[str]) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    env = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "6", "SLURM_NTASKS": "6"}
    result = allranks("run", *flags, "show.py", env=env)
    if flags:
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode == 2
        assert "srun --ntasks-per-node=1 --nodes=6 --ntasks=6 allranks run" in result.stderr


def test_early_expansion_of_procid_is_refused(tmp_path: Path, allranks: Allranks) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    result = allranks("run", "--node-rank", "0", "show.py", env=step(1, num_nodes=2))
    assert result.returncode == 2
    assert "--node-rank 0, but this is task 1 of the step" in result.stderr
