"""Do several agents, each as on a node of its own, become exactly one group, and end together?"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import agents_in_background, free_port, wait_until, without_waiting

SUM_RANKS = Path(__file__).parents[1] / "scripts" / "sum_ranks.py"
END_S = 60
"""Deadline for two torch groups on two busy cores."""

Agent = subprocess.Popen[str]
Start = Callable[..., Agent]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `allranks run ARGUMENTS` in a directory of its own, as on a node that shares no file system."""
    with agents_in_background() as begin:

        def start_agent(node: str, *arguments: object, env: dict[str, str] | None = None) -> Agent:
            directory = tmp_path / node
            directory.mkdir(exist_ok=True)
            own = {"SLURMD_NODENAME": node, "PYTHONIOENCODING": "utf-8"}
            return begin(directory, *arguments, **own, **(env or {}))

        yield start_agent


@pytest.fixture
def port() -> int:
    return free_port()


def end(agent: Agent, *, within_s: float = END_S) -> tuple[int, str, str]:
    stdout, stderr = agent.communicate(timeout=within_s)
    return agent.returncode, stdout, stderr


def report(stderr: str) -> list[str]:
    """The report without what allranks said before it: on a busy machine the leader waits for a slow agent aloud."""
    return [line for line in stderr.strip().splitlines() if line and not line.startswith("allranks: ")]


def sums(*stdouts: str) -> list[tuple[int, int, int]]:
    """Rank, world size and sum that the workers printed."""
    found = [re.findall(r"rank (\d+) of (\d+) sum (\d+)$", stdout, re.MULTILINE) for stdout in stdouts]
    return sorted((int(a), int(b), int(c)) for lines in found for a, b, c in lines)


def meeting(port: int, *, nodes: int = 2, name: str | None = "job") -> list[str]:
    flags = ["--nnodes", str(nodes), "--rdzv-endpoint", f"localhost:{port}"]
    return flags + (["--rdzv-id", name] if name else [])


# Coming together


@pytest.mark.torch
def test_two_agents_with_node_ranks_form_one_group_of_uneven_size(start: Start, port: int):
    second = start("b", *meeting(port), "--node-rank", 1, "--nproc-per-node", 2, SUM_RANKS)
    first = start("a", *meeting(port), "--node-rank", 0, "--nproc-per-node", 1, SUM_RANKS)
    (first_code, first_out, first_err), (second_code, second_out, second_err) = end(first), end(second)
    assert (first_code, second_code) == (0, 0), first_err + second_err
    assert sums(first_out) == [(0, 3, 6)]
    assert sums(second_out) == [(1, 3, 6), (2, 3, 6)]
    headline = r"^allranks: 3 ranks on 2 nodes \(a,b\), gloo over lo; roll call [\d.]+ s; logs in runs/job/attempt_0$"
    assert re.search(headline, first_err, re.MULTILINE)
    line = "allranks: ranks 1-2 of 3 on b; a leads and prints the report; logs in runs/job/attempt_0/b\n"
    assert without_waiting(second_err) == line


@pytest.mark.torch
def test_two_agents_without_node_ranks_form_one_group(start: Start, port: int):
    agents = [start(node, *meeting(port), SUM_RANKS) for node in ("a", "b")]
    ends = [end(agent) for agent in agents]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert sums(*(stdout for _, stdout, _ in ends)) == [(0, 2, 3), (1, 2, 3)]
    assert sum(" on 2 nodes (" in stderr for _, _, stderr in ends) == 1
    assert sum(" leads and prints the report; " in stderr for _, _, stderr in ends) == 1


@pytest.mark.torch
def test_two_jobs_at_once_on_the_same_preferred_port_do_not_meet(start: Start, port: int):
    agents = [
        start(f"{name}{rank}", *meeting(port, name=name), "--node-rank", rank, SUM_RANKS, number)
        for rank in (0, 1)
        for name, number in (("one", 1), ("ten", 10))
    ]
    ends = [end(agent) for agent in agents]
    assert [code for code, _, _ in ends] == [0, 0, 0, 0], ends
    assert sums(ends[0][1], ends[2][1]) == [(0, 2, 3), (1, 2, 3)]
    assert sums(ends[1][1], ends[3][1]) == [(0, 2, 30), (1, 2, 30)]


def test_node_names_ranks_and_the_store_address_are_alike_on_both(start: Start, port: int, tmp_path: Path):
    names = ("ALLRANKS_MEMBERS", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    show = tmp_path / "show.py"
    show.write_text(f"import json, os\nprint(json.dumps([os.environ['RANK'], *map(os.environ.get, {names!r})]))\n")
    agents = [start(node, *meeting(port), "--node-rank", i, show) for i, node in enumerate(("a", "b"))]
    rows: list[list[str]] = [json.loads(end(agent)[1].partition("] ")[2]) for agent in agents]
    taken = int(rows[0][3])
    assert rows[0] == ["0", "a=0+1,b=1+1", "127.0.0.1", str(taken), "2", "2", "job"]
    assert rows[1] == ["1", *rows[0][1:]]
    assert port <= taken < port + 16


def test_two_agents_of_one_name_are_told_apart(start: Start, port: int, tmp_path: Path):
    show = tmp_path / "show.py"
    show.write_text("import os\nprint(os.environ['ALLRANKS_NODE'], os.environ['ALLRANKS_MEMBERS'])\n")
    agents = [start("a", *meeting(port), "--node-rank", rank, show) for rank in (0, 1)]
    lines = [end(agent)[1].partition("] ")[2].strip() for agent in agents]
    assert lines == ["a.0 a.0=0+1,a.1=1+1", "a.1 a.0=0+1,a.1=1+1"]


# Refusals


def test_a_wrong_secret_is_refused_by_name_and_both_end_soon(start: Start, port: int, tmp_path: Path):
    cluster, script = tmp_path / "cluster.toml", tmp_path / "train.py"
    cluster.write_text("[guard]\njoin_s = 10\n")  # on a busy machine the stranger starts seconds later
    script.write_text("")
    flags = meeting(port, name=None)
    leader = start("a", *flags, "--cluster", cluster, "--node-rank", 0, script, env={"ALLRANKS_SECRET": "open sesame"})
    stranger = start("b", *flags, "--node-rank", 1, script, env={"ALLRANKS_SECRET": "open barley"})
    code, _, stderr = end(stranger)
    reason = "it does not know this job's secret (the leader's comes from $ALLRANKS_SECRET)"
    assert code == 78
    assert re.fullmatch(rf"error: the leader at localhost:\d+ rejected this node: {re.escape(reason)}\n", stderr)
    code, _, stderr = end(leader)
    assert code == 75
    assert f"allranks: 127.0.0.1 was rejected: {reason}\n" in stderr
    assert "AR001 node-silent   node rank 1 " in stderr
    assert "the node's agent did not join within 10 s; 1 of 2 nodes joined" in stderr
    assert "open sesame" not in stderr
    assert "Traceback" not in stderr


def test_a_script_that_one_node_lacks_ends_all_with_its_name(start: Start, port: int, tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.py").write_text("")
    agents = [start(node, *meeting(port), "--node-rank", i, "train.py") for i, node in enumerate(("a", "b"))]
    ends = [end(agent) for agent in agents]
    assert [code for code, _, _ in ends] == [2, 2]
    assert report(ends[0][2]) == report(ends[1][2])
    head, said, *_ = report(ends[0][2])
    assert re.fullmatch(r"\S AR512 node-cannot-start   b +certain", head)
    assert (
        said
        == "  train.py: no such script; expected a Python file (for a module add -m, for another program --no-python)"
    )
    assert report(ends[0][2])[-1] == "  waited for it: a"


def test_another_script_or_wire_format_on_one_node_ends_all_with_its_name(start: Start, port: int, tmp_path: Path):
    """Each agent has a directory of its own here, as on nodes without a shared file system."""
    given = {"a": ["--compress", "bf16"], "b": ["--compress", "bf16"], "c": ["--bucket-mb", "4"]}
    for name, version in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(f"version = {version}\n")
    flags = meeting(port, nodes=3)
    agents = [start(node, *flags, "--node-rank", rank, *given[node], "train.py") for rank, node in enumerate("abc")]
    ends = [end(agent) for agent in agents]
    assert {code for code, _, _ in ends} == {75}
    said = report(ends[0][2])
    heads = [" ".join(line.split()[1:]) for line in said if line.endswith(" certain")]
    assert heads == ["AR503 env-drift c certain", "AR503 env-drift c certain", "AR513 code-differs c certain"]
    assert "  --compress differs: 2 of 3 nodes have bf16; c does not set it" in said
    assert "  --bucket-mb differs: 2 of 3 nodes do not set it; c has 4" in said
    assert re.search(r"the training script differs: 2 of 3 nodes have sha256 [0-9a-f]{12}; c has sha256", "".join(said))


def test_another_version_of_a_module_beside_it_is_said_and_stops_nobody(start: Start, port: int, tmp_path: Path):
    for name, version in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text("import model\n")
        (tmp_path / name / "model.py").write_text(f"version = {version}\n")
    flags = meeting(port, nodes=3)
    agents = [start(node, *flags, "--node-rank", index, "train.py") for index, node in enumerate("abc")]
    ends = [end(agent) for agent in agents]
    assert {code for code, _, _ in ends} == {0}
    assert "code beside the script (model.py) differs: 2 of 3 nodes have the same; c differs" in ends[0][2]


# Ending together


FAIL_ON_1 = """
import os, time
from pathlib import Path

Path("up").touch()
if os.environ["RANK"] == "1":
    raise ValueError("bad batch")
time.sleep(60)
"""


def test_a_worker_that_fails_ends_both_alike_with_one_report_on_the_leader(start: Start, port: int, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(FAIL_ON_1)
    agents = [start(node, *meeting(port), "--node-rank", i, script) for i, node in enumerate(("a", "b"))]
    ends = [end(agent) for agent in agents]
    assert [code for code, _, _ in ends] == [1, 1]
    leader, other = ends[0][2], ends[1][2]
    assert leader.count("AR590 user-code-error   b · rank 1") == 1
    assert "\n  ValueError: bad batch (train.py:7 in <module>)\n" in leader
    assert "  others waited for it or were ended: rank 0\nallranks: train.py failed (exit " in leader
    assert other.splitlines()[-1] == (
        "allranks: ended: AR590 user-code-error: rank 1 on b: ValueError: bad batch (train.py:7 in <module>); "
        "the full report is on a"
    )
    assert "✗" not in other
    verdict: dict[str, Any] = json.loads((tmp_path / "a/runs/latest/attempt_0/verdict.json").read_text())
    assert (verdict["exit_code"], len(verdict["findings"])) == (1, 1)
    assert not list((tmp_path / "b").rglob("verdict.json"))


WAIT = "import time\nfrom pathlib import Path\ntime.sleep(1)\nPath('up').touch()\ntime.sleep(300)\n"
"""Up only after the agents' first heartbeats: who is lost before them can be tried by nobody."""


def start_two_that_run(start: Start, port: int, tmp_path: Path) -> tuple[Agent, Agent]:
    """The leader on a and the other agent on b, their workers running; silence alone proves nothing."""
    script = tmp_path / "train.py"
    script.write_text(WAIT)
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cluster.toml").write_text(f"[guard]\ngone_s = {3 * END_S}\n")
    leader, other = (start(node, *meeting(port), "--node-rank", i, script) for i, node in enumerate(("a", "b")))
    wait_until((tmp_path / "a" / "up").exists, "job a", END_S)
    wait_until((tmp_path / "b" / "up").exists, "job b", END_S)
    return leader, other


def test_a_killed_agent_is_named_by_the_leader(start: Start, port: int, tmp_path: Path):
    leader, other = start_two_that_run(start, port, tmp_path)
    other.kill()
    code, _, stderr = end(leader)
    assert code == 75
    assert stderr.count("AR012 node-failure   b · rank 1") == 1
    assert "\n  the node's agent died, but the machine answers: somebody killed it, or the kernel did" in stderr
    assert "  others waited for it or were ended: rank 0\nallranks: train.py failed (exit " in stderr


def test_a_stopped_agent_is_named_and_does_not_keep_the_job_from_ending(start: Start, port: int, tmp_path: Path):
    """Its worker goes on, and ends with 0 like that of the other node."""
    script = tmp_path / "train.py"
    script.write_text("import time\nfrom pathlib import Path\ntime.sleep(1)\nPath('up').touch()\ntime.sleep(2)\n")
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cluster.toml").write_text("[guard]\ngone_s = 2\nbeat_s = 0.2\n")
    leader, other = (start(node, *meeting(port), "--node-rank", i, script) for i, node in enumerate(("a", "b")))
    wait_until((tmp_path / "b" / "up").exists, "job b", END_S)
    other.send_signal(signal.SIGSTOP)
    code, _, stderr = end(leader)
    assert code == 75
    assert "its machine answers, so its agent is stopped (SIGSTOP) or gets no processor time" in stderr
    assert "AR010 process-stopped   b · rank 1" in stderr
    assert "its machine answers, and all other ranks have finished" in stderr


@pytest.mark.parametrize("told", ["a", "b"])
def test_a_signal_to_one_agent_ends_both_alike(start: Start, port: int, tmp_path: Path, told: str):
    script = tmp_path / "train.py"
    script.write_text(WAIT)
    agents = {node: start(node, *meeting(port), "--node-rank", i, script) for i, node in enumerate(("a", "b"))}
    wait_until((tmp_path / "a" / "up").exists, "job a", END_S)
    wait_until((tmp_path / "b" / "up").exists, "job b", END_S)
    agents[told].send_signal(signal.SIGTERM)
    codes = {node: end(agent)[0] for node, agent in agents.items()}  # the workers sleep for 300 s
    assert codes == {"a": 143, "b": 143}


def test_a_second_agent_of_the_same_node_rank_is_refused(start: Start, port: int, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("")
    leader = start("a", *meeting(port, nodes=3), "--node-rank", 0, script)
    twins = [start(node, *meeting(port, nodes=3), "--node-rank", 1, script) for node in ("b", "c")]
    (refused,) = wait_until(lambda: [twin for twin in twins if twin.poll() is not None], "one to be refused")
    code, _, stderr = end(refused)
    last = start("d", *meeting(port, nodes=3), "--node-rank", 2, script)
    assert code == 78
    assert re.search(
        r"rejected this node: node rank 1 has already joined \([bc], pid \d+\); give each node its own", stderr
    )
    assert [end(agent)[0] for agent in (leader, last)] == [0, 0]


def test_a_killed_leader_is_named_by_the_other_agent(start: Start, port: int, tmp_path: Path):
    leader, other = start_two_that_run(start, port, tmp_path)
    leader.kill()
    code, _, stderr = end(other)
    assert code == 75
    assert "AR012 node-failure" in stderr
    assert "the leader's agent on a is gone" in stderr


def test_sigterm_ends_a_paused_job_with_its_own_code_and_a_verdict(start: Start, port: int, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(WAIT)
    flags = (*meeting(port), "--max-restarts", 1)
    leader, other = (start(node, *flags, "--node-rank", i, script) for i, node in enumerate(("a", "b")))
    for node in ("a", "b"):
        wait_until((tmp_path / node / "up").exists, f"job {node}", END_S)
    other.kill()
    assert leader.stderr is not None
    said = iter(leader.stderr.readline, "")
    for _ in range(2):  # 10 s lie between two of them: the workers here have been gone for long
        next(line for line in said if line.startswith("allranks: paused: only 1 of at least 2 nodes; "))
    leader.send_signal(signal.SIGUSR1)
    assert any(
        "SIGUSR1: passed to the ranks that handle it; allranks itself has nothing to save" in line for line in said
    )
    leader.send_signal(signal.SIGTERM)
    assert end(leader)[0] == 143
    assert json.loads((tmp_path / "a/runs/job/attempt_0/verdict.json").read_text())["exit_code"] == 143
